"""Two hooks of the build: compiled modules and the bill of materials of a wheel, and what a package index shows.

If DUALWRITE_COMPILE is 1, a wheel has the modules that run once for each message in compiled form: the same source, by mypyc. A
wheel without it, and an editable installation, run the source; `dualwrite.kafka.native.is_compiled` says which one is used.

README's links are relative, and an index has only README. If DUALWRITE_REPOSITORY_URL is set, the links lead there, and the
project's URLs are made from it. Otherwise only the links' text is left, and there are no URLs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

sys.path.append(str(Path(__file__).parent / "tools"))
import bill_of_materials

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


class WheelFiles(BuildHookInterface[Any]):
    """The build hook of pyproject.toml."""

    def dependencies(self) -> list[str]:
        """What is needed in addition to hatchling."""
        return list(_TOOLS) if _is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel's files are collected."""
        if version == "editable":
            return
        self._built = tempfile.mkdtemp(prefix="dualwrite-")
        parts = bill_of_materials.in_every_wheel(Path(self.root, "src"))
        if _is_wanted():
            compiled = self._compile()
            parts.append(bill_of_materials.compiled_with(installed_version("mypy"), compiled.values()))
            build_data["force_include"].update(compiled)
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
        bill = Path(self._built, bill_of_materials.FILE_NAME)
        metadata = self.metadata
        bill.write_text(bill_of_materials.document(metadata.version, metadata.core.license_expression, parts), encoding="utf-8")
        build_data["sbom_files"].append(str(bill))

    def _compile(self) -> dict[str, str]:
        """Compile; returns the files, each with its path in the wheel."""
        command = [sys.executable, "-c", _COMPILE, self._built, *_MYPY, *MODULES]
        subprocess.run(command, cwd=Path(self.root, "src"), check=True)  # noqa: S603  (the command above)
        libraries = Path(self._built, "lib")
        return {str(file): str(file.relative_to(libraries)) for file in libraries.rglob("*") if file.is_file()}

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
        metadata["urls"] = urls(repository) if repository else {}


def urls(repository: str) -> dict[str, str]:
    """The project's URLs, with the labels that package indexes know."""
    return {
        "Homepage": repository,
        "Documentation": f"{repository}/blob/HEAD/docs/index.md",
        "Source": repository,
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


def for_index(text: str, repository: str) -> str:
    """README with links into the repository; without links if that is empty."""
    return _RELATIVE_LINK.sub(rf"[\1]({repository}/blob/HEAD/\2)" if repository else r"\1", text)
