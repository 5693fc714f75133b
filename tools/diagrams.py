"""Draw the documentation's Mermaid diagrams as SVG files, which the build embeds: `python tools/diagrams.py`.

A repository viewer draws a diagram from its text. The built pages show `docs/diagrams/KEY.svg`, where KEY is made from that
text: so neither the build nor the reader's browser needs a program, or the network. This tool draws the files that are missing,
and removes those that no page shows. It needs npm, and a Chromium (`CHROMIUM` names the program).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[1] / "docs"
FOLDER: Final = DOCS / "diagrams"

_BLOCK: Final = re.compile(r"^```\{?mermaid\}?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MERMAID: Final = "@mermaid-js/mermaid-cli@12"
_SETTINGS: Final = {"theme": "neutral", "htmlLabels": False, "flowchart": {"htmlLabels": False}, "deterministicIds": True}


def key_of(text: str) -> str:
    """The name of the file with the drawing of a diagram."""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:16]


def diagrams() -> Iterator[str]:
    """The texts of all diagrams of the documentation."""
    for page in sorted(DOCS.rglob("*.md")):
        for found in _BLOCK.finditer(page.read_text(encoding="utf-8")):
            yield found[1]


def missing() -> list[str]:
    """The texts of the diagrams that are not drawn."""
    return [text for text in diagrams() if not (FOLDER / f"{key_of(text)}.svg").exists()]


def unused() -> list[Path]:
    """The drawings that no page shows."""
    keys = {key_of(text) for text in diagrams()}
    return [drawing for drawing in FOLDER.glob("*.svg") if drawing.stem not in keys]


def main() -> None:
    """Draw what is missing, and remove what is unused."""
    FOLDER.mkdir(exist_ok=True)
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("No Chromium was found: install one, or name it by CHROMIUM.")
    with tempfile.TemporaryDirectory() as place:
        settings, puppeteer = Path(place, "mermaid.json"), Path(place, "puppeteer.json")
        settings.write_text(json.dumps(_SETTINGS))
        puppeteer.write_text(json.dumps({"executablePath": browser, "args": ["--no-sandbox"]}))
        for text in missing():
            source, drawing = Path(place, "diagram.mmd"), FOLDER / f"{key_of(text)}.svg"
            source.write_text(text)
            command = ["npx", "--yes", "--package", _MERMAID, "mmdc", "--input", str(source), "--output", str(drawing)]
            options = ["--configFile", str(settings), "--puppeteerConfigFile", str(puppeteer), "--backgroundColor", "white"]
            subprocess.run([*command, *options], check=True, env={**os.environ, "PUPPETEER_SKIP_DOWNLOAD": "1"})  # noqa: S603  (our own text)
            sys.stdout.write(f"drawn: {drawing.name}\n")
    for drawing in unused():
        drawing.unlink()
        sys.stdout.write(f"removed: {drawing.name}\n")


if __name__ == "__main__":
    main()
