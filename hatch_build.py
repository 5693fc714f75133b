"""Compiles, into a wheel, the modules that run once for each message: the same source, by mypyc, if DUALWRITE_COMPILE is 1.

A wheel without it, and an editable installation, run the source. `compiled.py` of the native producer says which one is used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MODULES: Final = (
    "dualwrite/kafka/messages.py",
    "dualwrite/kafka/native/accumulator.py",
    "dualwrite/kafka/native/partition.py",
    "dualwrite/kafka/native/partitioners.py",
    "dualwrite/kafka/native/records.py",
)
"""What runs once for each message. Requests, EndTxn and recovery run a few times per transaction, and gain nothing."""

_TOOLS: Final = ("mypy>=2.4,<3", "setuptools>=80")

# The packages that dualwrite imports are not installed where a wheel is built, so their types are not known.
_MYPY: Final = ("--config-file=", "--ignore-missing-imports", "--follow-imports=silent")

_COMPILE: Final = """
import sys
from mypyc.build import mypycify
from setuptools import setup

built, *arguments = sys.argv[1:]
setup(
    name="dualwrite",
    packages=[],
    ext_modules=mypycify(arguments, opt_level="3", debug_level="0", target_dir=built + "/c"),
    script_args=["--quiet", "build_ext", "--build-lib", built + "/lib", "--build-temp", built + "/objects"],
)
"""


class CompiledModules(BuildHookInterface[Any]):
    """The build hook of pyproject.toml."""

    def dependencies(self) -> list[str]:
        """What is needed in addition to hatchling."""
        return list(_TOOLS) if _is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel's files are collected."""
        if version == "editable" or not _is_wanted():
            return
        self._built = tempfile.mkdtemp(prefix="dualwrite-")
        command = [sys.executable, "-c", _COMPILE, self._built, *_MYPY, *MODULES]
        subprocess.run(command, cwd=Path(self.root, "src"), check=True)  # noqa: S603  (the command above)
        libraries = Path(self._built, "lib")
        found = [file for file in libraries.rglob("*") if file.is_file()]
        build_data["force_include"].update({str(file): str(file.relative_to(libraries)) for file in found})
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002  (the interface)
        """Called when the wheel is written."""
        shutil.rmtree(getattr(self, "_built", ""), ignore_errors=True)


def _is_wanted() -> bool:
    return os.environ.get("DUALWRITE_COMPILE") == "1"
