"""Installing where nothing can be compiled: it works, one line says what is missing, and plain torch updates."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from overspill.kernels import cpu
from overspill.native import VERSION

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
TREE = ("overspill", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE")
TRAIN = """
import hashlib, torch, overspill
from overspill.kernels import cpu
from overspill.native import VERSION

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.GELU(), torch.nn.Linear(200, 300))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = overspill.prepare(model, optimizer, states="compact", gpu="64MiB", host="64MiB")
for step in range(3):
    model(torch.randn(4, 300)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
found = b"".join(p.detach().float().numpy().tobytes() for p in overspill.close(model).parameters())
print(overspill.__file__, cpu.How.best() is not None, hashlib.sha256(found).hexdigest())
"""


def run(*command: str, cwd: Path, **variables: str) -> tuple[str, str]:
    """What it printed, as output and as errors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def trained(package: Path, cwd: Path) -> tuple[bool, str, str]:
    """Whether there was a library, the bits of the weights, and what was said."""
    out, said = run(sys.executable, "-c", TRAIN, cwd=cwd, PYTHONPATH=str(package))
    where, native, bits = out.split()
    assert Path(where).is_relative_to(package), where
    return native == "True", bits, said


def without(what: str, folder: Path) -> dict[str, str]:
    """Variables of a machine that lacks it."""
    folder.mkdir()
    if what == "cmake":
        return {"PATH": str(folder)}
    return {"CXX": str(folder / "none")}


def source(folder: Path) -> Path:
    """All that is needed to install from."""
    folder.mkdir()
    for name in TREE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def installed(source: Path, target: Path, **variables: str) -> str:
    """What pip said of it."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-v", "--no-index", "--no-deps")
    here = ("--no-build-isolation", "--target", str(target), str(source))
    return "".join(run(*pip, *here, cwd=source.parent, **variables))


@pytest.mark.parametrize("what", ["cmake", "compiler"])
def test_install_where_nothing_compiles(what: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    if what == "compiler" and shutil.which("cmake") is None:
        pytest.skip("no cmake")
    told = installed(source(tmp_path / "source"), target, **without(what, tmp_path / "empty"))
    said = [line for line in told.splitlines() if "native kernels" in line]
    assert len(said) == 1 and "plain torch, which is slower" in said[0], told
    assert ("'cmake'" in said[0]) == (what == "cmake")
    assert (target / "overspill").is_dir() and not list(target.rglob("*.so"))

    native, bits, said_then = trained(target, tmp_path)
    assert not native
    lines = [line for line in said_then.splitlines() if "native library" in line]
    assert len(lines) == 1 and "plain torch, which is slower" in lines[0], said_then
    native, expected, said_here = trained(ROOT, tmp_path)
    assert native == (cpu.library() is not None) and bits == expected
    assert not native or "native library" not in said_here


def version(target: Path) -> list[int]:
    """Of the library, if there is one. Asked in a process of its own, which has no other one loaded."""
    ask = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).overspill_version())"
    return [int(run(sys.executable, "-c", ask, str(found), cwd=target)[0]) for found in target.rglob("*.so")]


@pytest.mark.skipif(cpu.library() is None or shutil.which("cmake") is None, reason="nothing compiles here")
def test_nothing_is_taken_from_an_earlier_build(tmp_path: Path) -> None:
    """Of other sources, in a folder that was copied with what was built in it, or that cannot be repeated."""
    one, two = source(tmp_path / "one"), tmp_path / "two"
    installed(one, tmp_path / "first")
    assert version(tmp_path / "first") == [VERSION] and list((one / "build").rglob("*.so"))
    shutil.copytree(one, two)
    native = two / "csrc/native.cpp"
    native.write_text(native.read_text().replace(f"return {VERSION};", "return 1000;"))
    installed(two, tmp_path / "second")
    assert version(tmp_path / "second") == [1000]
    told = installed(two, tmp_path / "third", **without("compiler", tmp_path / "empty"))
    assert version(tmp_path / "third") == [] and "plain torch, which is slower" in told
