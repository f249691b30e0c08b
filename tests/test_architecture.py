"""The rules of the house that a machine can check: layers, cycles, sizes, handlers, public names, cost of import.

All but the last few read the sources with `ast` and import nothing of the package. Each test collects every offender
and shows them all at once.
"""

import ast
import functools
import graphlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "overspill"
PACKAGE = ROOT / NAME

_PUBLIC = "prepare plan building save load export full grad state settle close trace Plan errors"
PUBLIC = frozenset(_PUBLIC.split())

# Top-level module -> (layer, the other top-level modules it may import). Inside its own folder a module is free.
# ROOT_MODULE is the package itself, as its users import it.
ROOT_MODULE = "overspill/__init__.py"
ZERO = frozenset({"errors", "specs", "slots", "config", "trace", "native", "cgroups", "interrupts", "times"})
BELOW_API = ZERO | {"program", "tiers", "comm", "kernels", "units", "plan", "runtime", "modules", "checkpoint"}
DOORS = frozenset({"cli", "report", "integrations", "bench"})
LAYERS: dict[str, tuple[int, frozenset[str]]] = {
    **dict.fromkeys(ZERO, (0, ZERO)),
    **dict.fromkeys(("program", "tiers", "comm", "kernels"), (1, ZERO)),
    "units": (2, ZERO | {"tiers", "comm"}),
    "plan": (2, ZERO | {"program"}),
    **dict.fromkeys(("runtime", "modules"), (3, ZERO | {"units", "tiers", "kernels", "comm", "program"})),
    "checkpoint": (4, ZERO | {"units", "tiers"}),
    **dict.fromkeys(("loading", "saving", "measured"), (5, BELOW_API)),
    "forms": (5, BELOW_API),
    "planning": (5, BELOW_API | {"measured", "forms"}),
    "setup": (5, BELOW_API | {"loading", "planning", "forms"}),
    "replanning": (5, BELOW_API | {"planning", "forms"}),
    "api": (5, BELOW_API | {"planning", "replanning", "setup", "saving"}),
    **dict.fromkeys(DOORS, (6, ZERO | DOORS | {"api", ROOT_MODULE})),
    # What a machine can do is measured on its tiers, and by the kernels themselves.
    "bench": (6, ZERO | DOORS | {"api", "tiers", "kernels", ROOT_MODULE}),
    ROOT_MODULE: (7, frozenset({"api", "errors", "specs", "interrupts"})),
    "__main__": (8, frozenset({"cli"})),
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_METHODS = 15
MAX_PARAMETERS = 6
MIN_FOLDER_DOCSTRING_LINES = 3
MAX_IMPORT_SHARE = 0.15
"""Of what importing torch takes: some machines are twice as fast as others."""
LAZY = ("rich", "typer", "transformers", "matplotlib", "overspill.cli", "overspill.bench")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """One source file of the package, parsed."""

    name: str
    """Dotted; a folder's `__init__` bears the folder's name."""
    path: Path
    text: str
    tree: ast.Module

    @property
    def top(self) -> str:
        """Its row in LAYERS."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ROOT_MODULE

    def at(self, node: ast.stmt | ast.expr | ast.excepthandler) -> str:
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"


@functools.cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found[name] = Module(name=name, path=path, text=text, tree=ast.parse(text, filename=str(path)))
    assert NAME in found, f"there is no {ROOT_MODULE}"
    return found


def layer(top: str) -> int:
    return LAYERS[top][0] if top in LAYERS else -1


def from_targets(module: Module, node: ast.ImportFrom) -> Iterator[str]:
    """The package modules that `from X import a, b` reads: X.a where that is a module, else X."""
    base = node.module or ""
    if node.level:
        is_folder = module.path.name == "__init__.py"
        parts = module.name.split(".")
        parts = parts[: len(parts) - node.level + is_folder]
        base = ".".join([*parts, *([node.module] if node.module else [])])
    if base.split(".")[0] != NAME:
        return
    for alias in node.names:
        inner = f"{base}.{alias.name}"
        # `plan` is both a folder and a public function: the doors of layer 6 mean the function.
        public = base == NAME and alias.name in PUBLIC and module.top in DOORS
        yield inner if inner in modules() and not public else base


def import_targets(module: Module) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Every import of a package module, at the top or inside a function, as (node, dotted name)."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.split(".")[0] == NAME:
                        yield node, alias.name
            case ast.ImportFrom():
                for name in from_targets(module, node):
                    yield node, name
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ) if name.split(".")[0] == NAME:
                yield node, name


def functions(module: Module) -> Iterator[Function]:
    for node in ast.walk(module.tree):
        if isinstance(node, Function):
            yield node


def last_name(node: ast.expr) -> str:
    """`command` of `app.command(...)`, `jit` of `triton.jit`."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def decorated(function: Function, *names: str) -> bool:
    return any(last_name(decorator) in names for decorator in function.decorator_list)


def report(rule: str, offenders: list[str]) -> None:
    assert not offenders, f"{rule}\n  " + "\n  ".join(offenders)


# ---- who may import whom


def test_every_top_level_module_has_its_layer() -> None:
    tops = {module.top for module in modules().values()}
    report(f"not in LAYERS ({Path(__file__).name}), so nobody decided where it belongs:", sorted(tops - LAYERS.keys()))


def test_imports_go_down_the_layers() -> None:
    offenders = []
    for module in modules().values():
        allowed = LAYERS.get(module.top, (-1, frozenset()))[1] | {module.top}
        for node, name in import_targets(module):
            top = name.split(".")[1] if "." in name else ROOT_MODULE
            if top not in allowed:
                offenders.append(f"{module.at(node)}: {module.top} ({layer(module.top)}) -> {top} ({layer(top)})")
    report("a module imports what its row in LAYERS does not allow:", offenders)


def test_no_import_cycles() -> None:
    known = modules()
    graph = {
        module.name: {name for _, name in import_targets(module) if name in known and name != module.name}
        for module in known.values()
    }
    cycles = []
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
            break
        except graphlib.CycleError as error:
            # Each module of the list is imported by the next one; it is shown the other way round, as "a -> b" is read.
            cycle = list(reversed(error.args[1]))
            cycles.append(" -> ".join(cycle))
            graph[cycle[0]].discard(cycle[1])
    report("import cycles (imports inside functions count):", cycles)


# ---- sizes


def test_files_are_short() -> None:
    lengths = [(module, len(module.text.splitlines())) for module in modules().values()]
    report(
        f"files of more than {MAX_FILE_LINES} lines:",
        [f"{module.path.relative_to(ROOT)}: {lines}" for module, lines in lengths if lines > MAX_FILE_LINES],
    )


def test_functions_are_short() -> None:
    offenders = []
    for module in modules().values():
        for function in functions(module):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            kernel = module.top == "kernels" and decorated(function, "jit")  # Triton code cannot be split at will
            if lines > MAX_FUNCTION_LINES and not kernel:
                offenders.append(f"{module.at(function)}: {function.name}: {lines}")
    report(f"functions of more than {MAX_FUNCTION_LINES} lines:", offenders)


def test_classes_are_small() -> None:
    offenders = []
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                methods = [item for item in node.body if isinstance(item, Function) and not decorated(item, "overload")]
                if len(methods) > MAX_METHODS:
                    offenders.append(f"{module.at(node)}: {node.name}: {len(methods)}")
    report(f"classes of more than {MAX_METHODS} methods:", offenders)


def typer_commands(module: Module) -> set[str]:
    """Functions of cli/ registered by `@app.command()` or by `app.command()(function)`."""
    if module.top != "cli":
        return set()
    names = {function.name for function in functions(module) if decorated(function, "command", "callback")}
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(func=ast.Call() as register, args=[ast.Name(id=name)]) if last_name(register) in (
                "command",
                "callback",
            ):
                names.add(name)
    return names


def count_parameters(function: Function) -> int:
    """All of them, `*args` and `**kwargs` too, without self and cls."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    if named and named[0].arg in ("self", "cls"):
        named = named[1:]
    return len(named) + (arguments.vararg is not None) + (arguments.kwarg is not None)


def test_signatures_are_short() -> None:
    offenders = []
    for module in modules().values():
        # The user's two doors and the command line spell out every keyword: that is their documentation.
        exempt = {"prepare", "plan"} if module.name == f"{NAME}.api" else typer_commands(module)
        for function in functions(module):
            count = count_parameters(function)
            # A GPU's kernel takes pointers and numbers, and nothing that could hold several of them.
            kernel = any("triton.jit" in ast.unparse(each) for each in function.decorator_list)
            if count > MAX_PARAMETERS and function.name not in exempt and not kernel:
                offenders.append(f"{module.at(function)}: {function.name}: {count}")
    report(f"functions of more than {MAX_PARAMETERS} parameters:", offenders)


# ---- handlers


def is_broad(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple):
        return any(is_broad(item) for item in node.elts)
    return last_name(node) in ("Exception", "BaseException")


def raises(body: list[ast.stmt]) -> bool:
    """Whether the statements hold a `raise` of their own, not one inside a function defined there."""
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Raise):
            return True
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            todo.extend(ast.iter_child_nodes(node))
    return False


def test_no_handler_swallows_everything() -> None:
    offenders = []
    for module in modules().values():
        for node in ast.walk(module.tree):
            match node:
                case ast.ExceptHandler(type=None):
                    offenders.append(f"{module.at(node)}: bare except")
                case ast.ExceptHandler(type=ast.expr() as kind) if is_broad(kind) and not raises(node.body):
                    offenders.append(f"{module.at(node)}: except {ast.unparse(kind)} without raise")
                case ast.Call(args=kinds) if last_name(node) == "suppress" and any(map(is_broad, kinds)):
                    offenders.append(f"{module.at(node)}: {ast.unparse(node)}")
    report("handlers that swallow every error:", offenders)


# ---- errors


def test_asserts_have_a_message() -> None:
    offenders = []
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assert) and node.msg is None:
                offenders.append(f"{module.at(node)}: {ast.unparse(node)}")
    report("asserts without a message:", offenders)


SIGNS = ("expected", "found", ";")
"""What an error for the user says: what was expected, what was found and, behind a semicolon, what to do."""


def error_texts(module: Module) -> Iterator[tuple[ast.Call, ast.expr]]:
    """Every text that an error of overspill.errors is made with, and the call that says it."""
    kinds = {node.name for node in modules()[f"{NAME}.errors"].tree.body if isinstance(node, ast.ClassDef)}
    calls = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call) and node.args]
    within = {id(node): function for function in functions(module) for node in ast.walk(function)}
    told = retelling(module, kinds)
    for call in (call for call in calls if last_name(call) in kinds and call not in told):
        text, function = call.args[0], within.get(id(call))
        if function is None or ast.unparse(text) not in {argument.arg for argument in function.args.args}:
            yield call, text
        else:  # of a text that it is given: its callers say it
            yield from ((caller, caller.args[0]) for caller in calls if last_name(caller) == function.name)


def retelling(module: Module, kinds: set[str]) -> list[ast.AST]:
    """What is made of an error of overspill.errors where it was caught, so that it says what that one says."""
    handlers = [node for node in ast.walk(module.tree) if isinstance(node, ast.ExceptHandler) and node.name]
    caught = [handler for handler in handlers if handler.type and last_name(handler.type) in kinds]
    return [node for handler in caught for node in ast.walk(handler) if f"{{{handler.name}}}" in ast.unparse(node)]


def spelt_out(module: Module, text: ast.AST) -> str:
    """The words of a text, and of what functions of the same folder add to it."""
    words = []
    for node in ast.walk(text):
        match node:
            case ast.Constant(value=str(word)):
                words.append(word)
            case ast.Call():
                words.extend(spelt_out(module, helper) for helper in text_functions(module.top, last_name(node)))
    return " ".join(words)


@functools.cache
def text_functions(top: str, name: str) -> list[Function]:
    """Functions of that name in a folder which return a text."""
    folder = [module for module in modules().values() if module.top == top and f"def {name}(" in module.text]
    found = [function for module in folder for function in functions(module) if function.name == name]
    return [function for function in found if function.returns and ast.unparse(function.returns) == "str"]


def test_errors_say_what_was_expected_and_found_and_what_to_do() -> None:
    offenders = []
    for module in modules().values():
        for call, text in error_texts(module):
            lacking = [sign for sign in SIGNS if sign not in spelt_out(module, text)]
            if lacking:
                offenders.append(f"{module.at(call)}: lacks {', '.join(map(repr, lacking))}: {ast.unparse(text)}")
    report("errors that do not say 'expected ..., found ...; what to do':", offenders)


# ---- folders and texts


def test_every_folder_says_what_it_is() -> None:
    offenders = []
    # A folder of data only (plan/machines) is no package.
    folders = {parent for path in PACKAGE.rglob("*.py") for parent in path.parents if parent.is_relative_to(PACKAGE)}
    for folder in sorted(folders):
        module = modules().get(".".join(folder.relative_to(ROOT).parts))
        docstring = ast.get_docstring(module.tree) if module else None
        lines = len((docstring or "").splitlines())
        if lines < MIN_FOLDER_DOCSTRING_LINES:
            found = f"docstring of {lines} lines" if module else "no __init__.py"
            offenders.append(f"{folder.relative_to(ROOT)}: {found}")
    report(f"folders whose __init__.py lacks a docstring of {MIN_FOLDER_DOCSTRING_LINES} lines:", offenders)


def test_every_folder_names_its_modules() -> None:
    offenders = []
    for module in modules().values():
        # What is in the package's own folder has its rows in LAYERS.
        if module.path.name != "__init__.py" or module.name == NAME:
            continue
        docstring = ast.get_docstring(module.tree) or ""
        for path in sorted(module.path.parent.glob("*.py")):
            if path != module.path and not re.search(rf"\b{path.stem}\.py\b|`{path.stem}`", docstring):
                offenders.append(f"{module.path.relative_to(ROOT)}: {path.name}")
    report("modules that the docstring of their folder does not name, as name.py or `name`:", offenders)


MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home)(?![\w-])")
TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml", "constraints.txt")
BINARY = frozenset({".pyc", ".so", ".o", ".png", ".jpg", ".gif", ".safetensors"})


def test_no_text_names_a_machine_path() -> None:
    paths = [ROOT / name for name in TEXTS]
    for folder in (PACKAGE, ROOT / "csrc", ROOT / "docs", ROOT / ".ci"):
        paths.extend(sorted(folder.rglob("*")))
    offenders = []
    for path in paths:
        if path.is_file() and path.suffix not in BINARY:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if MACHINE_PATH.search(line):
                    offenders.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    report("texts that name a path of one machine:", offenders)


# ---- the public face


def test_public_names_are_the_frozen_set() -> None:
    package = importlib.import_module(NAME)
    names = list(package.__all__)
    assert len(names) == len(set(names)), f"twice in __all__: {sorted(n for n in set(names) if names.count(n) > 1)}"
    assert set(names) == PUBLIC, f"missing: {sorted(PUBLIC - set(names))}; not public: {sorted(set(names) - PUBLIC)}"
    report("in __all__ but not there:", [name for name in names if not hasattr(package, name)])


def run_python(code: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_folders_do_not_hide_public_functions() -> None:
    # Importing the folder overspill/plan for the first time after the package binds the name `plan` to the folder.
    if (PACKAGE / "plan").is_dir():
        is_function = run_python(f"import {NAME}; import {NAME}.plan; print(callable({NAME}.plan))")
        assert is_function == "True", f"{NAME}.plan is the folder: import the folder first, then bind the function"


def test_import_is_cheap_and_touches_no_device() -> None:
    code = (
        "import gc, sys, time\n"
        "start = time.process_time()\n"
        "import torch\n"
        "of_torch = time.process_time() - start\n"
        # A collection of torch's own objects, a tenth of a second, may fall due at any time; it is not our cost.
        "gc.freeze()\n"
        "before = set(sys.modules)\n"
        # Of this process: whoever else is busy on the machine does not count.
        "start = time.process_time()\n"
        f"import {NAME}\n"
        "seconds = time.process_time() - start\n"
        "assert not torch.cuda.is_initialized(), 'the import initialised CUDA'\n"
        f"eager = [name for name in {LAZY!r} if name in sys.modules.keys() - before]\n"
        "assert not eager, f'imported at once, should be imported where they are used: {eager}'\n"
        "print(seconds / of_torch)\n"
    )
    best = min(float(run_python(code)) for _ in range(3))
    assert best < MAX_IMPORT_SHARE, f"import {NAME} costs {best:.1%} of import torch more than that"
