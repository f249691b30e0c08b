"""Native kernels: the bits of the reference with an IEEE root, on every instruction set, for any value. All values of
each format are in test_native_spaces.py, all lengths in test_native_lengths.py."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overspill.native
from overspill import cgroups
from overspill.kernels import codecs, cpu, masters, reference
from overspill.kernels.cpu import How
from overspill.kernels.elements import Elements
from overspill.tiers.threads import workers

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
SGD = {"lr": 1e-2, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
ADAGRAD = {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "eps": 1e-10, "maximize": False}
RULES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "adam": ("adam", 2, ADAM),
    "adam l2": ("adam", 2, ADAM | {"weight_decay": 0.1, "maximize": True}),
    "adamw": ("adam", 2, ADAM | {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamw far": ("adam", 2, ADAM | {"betas": (0.3, 0.5), "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "amsgrad": ("adam", 3, ADAM | {"amsgrad": True, "eps": 1e-3}),
    "sgd": ("sgd", 0, SGD),
    "sgd decay": ("sgd", 0, SGD | {"weight_decay": 0.1, "maximize": True}),
    "momentum": ("sgd", 1, SGD | {"momentum": 0.9, "dampening": 0.3}),
    "nesterov": ("sgd", 1, SGD | {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adagrad": ("adagrad", 1, ADAGRAD),
    "adagrad decay": ("adagrad", 1, ADAGRAD | {"lr_decay": 0.1, "weight_decay": 0.1, "maximize": True}),
}
APPLY = {"adam": reference._adam, "sgd": reference._sgd, "adagrad": reference._adagrad}
FIELDS = {"adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "sgd": ("momentum_buffer",), "adagrad": ("sum",)}
KINDS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


FACTORS = (torch.tensor([0.37]), torch.tensor([1.0 / 3.0]))
NATIVE = pytest.mark.skipif(cpu.library() is None, reason="no native library: there was no compiler at install")
pytestmark = NATIVE


def numbers(count: int, seed: int) -> Tensor:
    """Of all magnitudes: ordinary, tiny, denormal, huge, zeros of both signs, infinite, none at all."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, generator=generator)
    kinds = torch.randint(0, 16, (count,), generator=generator)
    for kind, change in enumerate((1e-20, 1e-39, 1e-44, 1e30, 0.0, -0.0, float("inf"), float("nan"))):
        chosen = kinds == kind
        found[chosen] = change if change == 0 or change != change else found[chosen] * change
    return found


def elements(rule: str, count: int, kinds: tuple[torch.dtype, torch.dtype], seed: int = 0) -> Elements:
    own = numbers(count, seed)
    if kinds[0] == torch.bfloat16:
        weight, kept = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
        masters.split(own, weight, kept)
    else:
        weight, kept = own, None
    fields = [numbers(count, seed + 2 + i) for i in range(RULES[rule][1])]
    for field in fields[1:] if RULES[rule][0] == "adam" else fields if RULES[rule][0] == "adagrad" else []:
        field.abs_()
    return Elements(weight, kept, numbers(count, seed + 1).to(kinds[1]), FACTORS, fields)


def calm(on: Elements, seed: int = 9) -> Elements:
    """With gradients and fields of some magnitudes: one that is infinite, or none at all, would be all that counts of
    its block."""
    generator = torch.Generator().manual_seed(seed)

    def change(x: Tensor) -> Tensor:
        sizes = torch.randint(-6, 7, x.shape, generator=generator)
        return torch.where(x.abs() < 100, x, 0.5).mul_(torch.exp2(sizes.to(x.dtype)))

    return replace(on, gradient=change(on.gradient), arrays=[change(field) for field in on.fields])


def part(on: Elements, begin: int, end: int) -> Elements:
    kept = None if on.kept is None else on.kept[begin:end].clone()
    arrays = [a.clone() for a in codecs.pieces(on.format, on.arrays, begin, end)]
    weight, gradient = on.weight[begin:end].clone(), on.gradient[begin:end].clone()
    return replace(on, weight=weight, kept=kept, gradient=gradient, arrays=arrays)


def expected(rule: str, on: Elements, step: int) -> Elements:
    """By the reference, on copies."""
    name, _, hypers = RULES[rule]
    found = part(on, 0, on.weight.numel())
    gradient = found.gradient.float()
    for factor in on.factors:
        gradient.mul_(factor)
    master = found.weight if found.kept is None else masters.join(found.weight, found.kept)
    APPLY[name](master, gradient, found.fields, hypers, step, reference.ieee_root)
    if found.kept is not None:
        masters.split(master, found.weight, found.kept)
    return found


def native(rule: str, on: Elements, step: int, how: How) -> Elements:
    name, _, hypers = RULES[rule]
    found = part(on, 0, on.weight.numel())
    cpu.RULES[name](found, hypers, step, how)
    return found


def differing(one: Elements, other: Elements, rule: str = "adam") -> list[str]:
    """Arrays whose bits differ, but for those of NaN."""
    pairs = {"weight": (one.weight, other.weight)}
    arrays = (one.tops, other.tops) if one.format == "compact" else (one.arrays, other.arrays)
    pairs |= {f"array {i}": pair for i, pair in enumerate(zip(*arrays, strict=True))}
    if one.format == "compact":
        # The sign of NaN is nobody's.
        names = FIELDS[RULES[rule][0]][: len(one.fields)]
        loaded = (codecs.load("compact", names, found.arrays) for found in (one, other))
        pairs |= {f"field {i}": pair for i, pair in enumerate(zip(*loaded, strict=True))}
    wrong = [name for name, (a, b) in pairs.items() if not _same(a, b)]
    if one.kept is not None and other.kept is not None and not torch.equal(one.kept, other.kept):
        wrong.append("kept")
    return wrong


def _same(a: Tensor, b: Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.itemsize]
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("instructions", cpu.sets())
@pytest.mark.parametrize("kinds", KINDS, ids=["fp32", "bf16 with fp32 gradients", "bf16"])
@pytest.mark.parametrize("rule", RULES)
def test_the_bits_of_the_reference(rule: str, kinds: tuple[torch.dtype, torch.dtype], instructions: str) -> None:
    on = elements(rule, 20011, kinds)
    for step in (1, 2, 1000):
        assert differing(native(rule, on, step, How(instructions, 1)), expected(rule, on, step)) == []


def packed(rule: str, on: Elements, format: str, seed: int = 5) -> Elements:
    """The same numbers in another format."""
    names, count = FIELDS[RULES[rule][0]][: RULES[rule][1]], on.weight.numel()
    sizes = [count] if format == "bf16" else [count, codecs.blocks_of(count)]
    arrays = [torch.empty(n, dtype=cpu.FORMATS[format]) for _ in names for n in sizes]
    first = (1 << 32) - 3000
    noise = codecs.chance(first, count, codecs.key_of(seed, 0), torch.device("cpu"))
    codecs.keep(format, names, arrays, noise, on.fields)
    kept = on.kept
    if format == "compact" and kept is not None:
        kept = (kept >> 8).to(torch.int8)
    return Elements(on.weight, kept, on.gradient, on.factors, arrays, format, first, 0)


def expected_in(rule: str, on: Elements, step: int, number: int) -> Elements:
    """By the codecs and the reference, on copies."""
    name, count, hypers = RULES[rule]
    found, names = part(on, 0, on.weight.numel()), FIELDS[name][:count]
    gradient = found.gradient.float()
    for factor in on.factors:
        gradient.mul_(factor)
    fields = codecs.load(on.format, names, found.arrays)
    master = found.weight if found.kept is None else masters.join(found.weight, found.kept)
    APPLY[name](master, gradient, fields, hypers, step, reference.ieee_root)
    noise = codecs.chance(on.first, on.weight.numel(), codecs.key_of(number, step), torch.device("cpu"))
    codecs.keep(on.format, names, found.arrays, noise, fields)
    if found.kept is not None:
        masters.split(master, found.weight, found.kept, noise[1] >> 24)
    return found


@pytest.mark.parametrize("instructions", cpu.sets())
@pytest.mark.parametrize("format", ["bf16", "compact"])
@pytest.mark.parametrize("rule", RULES)
def test_states_in_other_formats(rule: str, format: str, instructions: str) -> None:
    for kinds in KINDS:
        for count in (0, 1, 127, 129, 1025, 5003):
            some = elements(rule, count, kinds)
            for on in (packed(rule, some, format), packed(rule, calm(some), format)):
                for step in (1, 7):
                    ours = native(rule, replace(on, key=codecs.key_of(3, step)), step, How(instructions, 1))
                    assert differing(ours, expected_in(rule, on, step, 3), rule) == [], (kinds, count, step)


@pytest.mark.parametrize("instructions", cpu.sets())
def test_several_steps(instructions: str) -> None:
    for rule in RULES:
        ours = theirs = elements(rule, 5003, (torch.bfloat16, torch.bfloat16))
        for step in range(1, 8):
            ours, theirs = native(rule, ours, step, How(instructions, 1)), expected(rule, theirs, step)
        assert differing(ours, theirs) == [], rule


def test_any_number_of_threads() -> None:
    on = elements("adamw", (1 << 18) + 13, (torch.bfloat16, torch.bfloat16))
    known = expected("adamw", on, 3)
    for instructions in cpu.sets():
        for threads in (1, 2, 3, 7):
            assert differing(native("adamw", on, 3, How(instructions, threads)), known) == []
    small = packed("adamw", on, "compact")
    known = expected_in("adamw", small, 3, 9)
    for threads in (1, 2, 5):
        ours = native("adamw", replace(small, key=codecs.key_of(9, 3)), 3, How(cpu.sets()[-1], threads))
        assert differing(ours, known, "adamw") == []


def test_threads_are_those_of_the_process_whatever_omp_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(cgroups, "PROC", tmp_path)  # no quota, wherever this runs
    how = How.best()
    assert how is not None and how.threads == len(os.sched_getaffinity(0))


# The job's quota, that of its step, and how many cores they come to.
QUOTAS = {
    "none": ("max 100000", "max 100000", 64),
    "of the job": ("400000 100000", "max 100000", 4),
    "a part of a core counts": ("max 100000", "250000 100000", 3),
    "less than one": ("20000 100000", "max 100000", 1),
    "the smallest counts": ("500000 100000", "800000 100000", 5),
    "more than there are": ("9900000 100000", "max 100000", 64),
    "nobody knows": ("", "many", 64),
}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("case", QUOTAS)
def test_threads_are_no_more_than_a_quota_lets_run(
    case: str, version: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    *quotas, cores = QUOTAS[case]
    line, root = ("7:cpu,cpuacct:/job/step\n", "cpu") if version == 1 else ("0::/job/step\n", "")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"4:memory:/other\n{line}")
    for folder, told in zip(("job", "job/step"), quotas, strict=True):
        group = tmp_path / "cgroup" / root / folder
        group.mkdir(parents=True)
        if version == 2:
            (group / "cpu.max").write_text(f"{told}\n")
        else:
            for name, number in zip(("quota", "period"), told.replace("max", "-1").split(), strict=False):
                (group / f"cpu.cfs_{name}_us").write_text(f"{number}\n")
    monkeypatch.setattr(cgroups, "PROC", tmp_path)
    monkeypatch.setattr(cgroups, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    how = How.best()
    assert how is not None and how.threads == cgroups.cores() == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    how = How.best()
    assert how is not None and how.threads == max(1, cores // 2), "its ranks share it"


def pool_threads() -> list[set[int]]:
    """Where those of the library may run."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "overspill-pool\n"]
    return [os.sched_getaffinity(int(task.name)) for task in tasks]


def test_threads_run_where_their_caller_may() -> None:
    on, how, all_cores = elements("adamw", 1 << 20, KINDS[2]), How("portable", 3), os.sched_getaffinity(0)
    native("adamw", on, 3, how)
    assert [where == all_cores for where in pool_threads()].count(True) >= 2
    one = {max(all_cores)}

    def bound() -> int:
        os.sched_setaffinity(0, one)
        native("adamw", on, 3, how)
        return pool_threads().count(one)

    with workers(1, "bound") as pool:
        assert pool.submit(bound).result() >= 2, "those that were there already"
    assert os.sched_getaffinity(0) == all_cores
    native("adamw", on, 3, how)
    assert pool_threads().count(all_cores) >= 2, "and back"


def test_a_forked_process_has_threads_of_its_own() -> None:
    on = elements("adamw", 1 << 18, (torch.bfloat16, torch.bfloat16))
    known = native("adamw", on, 3, How("portable", 2))
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # torch has no threads of its own here any more, and would wait for them
        os._exit(len(differing(native("adamw", on, 3, How("portable", 2)), known)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_an_instruction_set_can_be_forced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert cpu.chosen_set() == cpu.sets()[-1]
    monkeypatch.setenv(cpu.FORCE, "portable")
    assert cpu.chosen_set() == "portable"
    with caplog.at_level(logging.WARNING, "overspill"):
        monkeypatch.setenv(cpu.FORCE, "")
        assert cpu.chosen_set() == cpu.sets()[-1] and caplog.text == "", "nothing is not a name"
        monkeypatch.setenv(cpu.FORCE, "sse9")
        assert cpu.chosen_set() == cpu.sets()[-1]
    assert "expected OVERSPILL_CPU as one of portable" in caplog.text


def test_without_the_library_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    monkeypatch.setattr(overspill.native, "LIBRARY", tmp_path / "none.so")
    cpu.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "overspill"):
            assert cpu.library() is None and cpu.library() is None and How.best() is None and cpu.sets() == ()
        assert caplog.text.count("no native library") == 1
        cpu.library.cache_clear()
        monkeypatch.setenv("LOCAL_RANK", "1")
        with caplog.at_level(logging.WARNING, "overspill"):
            assert cpu.library() is None
        assert caplog.text.count("no native library") == 1, "the first rank of a machine has said it"
    finally:
        cpu.library.cache_clear()


@pytest.mark.parametrize("what", ["another version", "another library", "no library at all"])
def test_a_file_that_is_not_this_library_is_not_used(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    if what == "another version":
        monkeypatch.setattr(overspill.native, "VERSION", 1000)
    else:
        (tmp_path / "text.so").write_text("this is no library")
        found = torch._C.__file__ if what == "another library" else tmp_path / "text.so"
        monkeypatch.setattr(overspill.native, "LIBRARY", Path(str(found)))
    cpu.library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "overspill"):
            assert cpu.library() is None and How.best() is None and cpu.sets() == ()
        (said,) = caplog.messages
        assert "anew" in said and ("expected version 1000" in said) == (what == "another version")
    finally:
        cpu.library.cache_clear()
