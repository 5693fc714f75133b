"""The bill of materials of a wheel (PEP 770, CycloneDX): what is inside that others wrote, with version and licence.

The build writes it into `.dist-info/sboms/`. It has no time and no random number, so that two builds of one commit are equal.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FILE_NAME: Final = "dualwrite.cdx.json"

_CONSOLE: Final = "dualwrite/console/static/vendor"


@dataclass(frozen=True)
class Part:
    """A package of somebody else that a wheel has files of, or files made from it.

    Attributes:
        registry: The package's type in a package URL: `npm`, `pypi`.
        licence: An SPDX expression.
        about: What of the package is inside, as a sentence.
        files: Their paths in the wheel.
    """

    registry: str
    name: str
    version: str
    licence: str
    about: str
    files: tuple[str, ...]

    @property
    def url(self) -> str:
        """The package URL."""
        return f"pkg:{self.registry}/{self.name}@{self.version}"


MESSAGES: Final = Part(
    "pypi",
    "kafka-python",
    "3.0.12",
    "Apache-2.0",
    "Apache Kafka's message definitions, in this package's copy; tools/kafka_messages.py generates a module from them.",
    ("dualwrite/kafka/client/messages_generated.py",),
)


def compiled_with(mypy: str, files: Iterable[str]) -> Part:
    """The runtime library of mypyc, which is linked into each compiled module."""
    about = "The runtime library of mypyc, linked into compiled modules."
    return Part("pypi", "mypy", mypy, "MIT AND PSF-2.0", about, tuple(sorted(files)))


def in_every_wheel(source: Path) -> list[Part]:
    """What is in each wheel; `source` is the repository's folder `src`."""
    listed: dict[str, dict[str, str]] = json.loads((source / _CONSOLE / "vendored.json").read_text(encoding="utf-8"))
    files = defaultdict(list)
    for file, facts in listed.items():
        files[facts["package"], facts["spdx"]].append(f"{_CONSOLE}/{file}")
    parts = [MESSAGES]
    for (package, licence), names in files.items():
        name, _, version = package.rpartition("@")
        parts.append(Part("npm", name, version, licence, "Served to browsers by dualwrite.console.", tuple(names)))
    return parts


def document(version: str, licence: str, parts: Iterable[Part]) -> str:
    """The bill of the wheel of this version of dualwrite, as JSON."""
    product = f"pkg:pypi/dualwrite@{version}"
    ordered = sorted(parts, key=lambda part: part.url)
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component("dualwrite", version, product, licence)},
        "components": [
            {
                **_component(part.name, part.version, part.url, part.licence),
                "description": part.about,
                "evidence": {"occurrences": [{"location": file} for file in part.files]},
            }
            for part in ordered
        ],
        "dependencies": [{"ref": product, "dependsOn": [part.url for part in ordered]}],
    }
    return json.dumps(bill, indent=2) + "\n"


def _component(name: str, version: str, url: str, licence: str) -> dict[str, Any]:
    found = {"expression": licence} if " " in licence else {"license": {"id": licence}}
    return {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url, "licenses": [found]}
