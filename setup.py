"""Builds the native kernels of csrc/ where there is a compiler; everything else stands in pyproject.toml.

They are one shared library with a plain C interface, so one wheel serves every version of Python and of torch.
"""

import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HERE = Path(__file__).parent


class BuildByCMake(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        out, build = Path(self.get_ext_fullpath(ext.name)).resolve().parent, Path(self.build_temp, "native").resolve()
        # What an earlier build left, perhaps in another folder or of other sources, is not to be taken for this one.
        shutil.rmtree(build, ignore_errors=True)
        for folder in (out.parents[1], HERE) if self.editable_mode else (out.parents[1],):
            (folder / self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        try:
            subprocess.run(["cmake", "-S", HERE / "csrc", "-B", build, f"-DOVERSPILL_OUT={out}"], check=True)
            subprocess.run(["cmake", "--build", build, "--parallel"], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            # The extension is optional: setuptools says this in one line and goes on.
            why = "cmake or the compiler failed" if isinstance(error, subprocess.CalledProcessError) else str(error)
            told = f"no native kernels were built ({why}): updates on the host run in plain torch, which is slower"
            raise CompileError(told) from error


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("overspill.kernels.liboverspill_native", sources=[], optional=True)],
    cmdclass={"build_ext": BuildByCMake, "bdist_wheel": AnyPython},
)
