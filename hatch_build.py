"""Two hooks of the build: modules that are compiled, and what a package index shows of README.

If DUALWRITE_COMPILE is 1, a wheel has the modules that run once for each message in compiled form: the same source, by mypyc. A
wheel without it, and an editable installation, run the source; `dualwrite.kafka.native.is_compiled` says which one is used.

README's links are relative, and an index has only README. If DUALWRITE_REPOSITORY_URL is set, the links lead there, and it is
one of the project's URLs. Otherwise only their text is left.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

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


_RELATIVE_LINK: Final = re.compile(r"\[([^\[\]]+)\]\((?!https?:|mailto:|#)([^()\s]+)\)")


class IndexMetadata(MetadataHookInterface):
    """The metadata hook of pyproject.toml."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the fields that pyproject.toml calls dynamic."""
        repository = os.environ.get("DUALWRITE_REPOSITORY_URL", "").rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text, repository)}
        metadata["urls"] = {"Repository": repository} if repository else {}


def for_index(text: str, repository: str) -> str:
    """README with links into the repository; without links if that is empty."""
    return _RELATIVE_LINK.sub(rf"[\1]({repository}/blob/HEAD/\2)" if repository else r"\1", text)
