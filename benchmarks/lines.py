"""Counts this repository's lines of code, and checks that no package has grown beyond its line in `lines.toml`.

::

    python benchmarks/lines.py             # each folder, and each package beside its limit
    python benchmarks/lines.py --check     # exit code 1 if a package is larger than its limit, or has none
    python benchmarks/lines.py --lower     # lower the limits to what the packages have today

Code is what is left without blank lines, comments and docstrings. Files that a tool has generated are counted apart.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Final

from figures import table

_ROOT: Final = Path(__file__).parent.parent
_LIMITS: Final = Path(__file__).with_name("lines.toml")
_FOLDERS: Final = ("src", "migrations", "tests", "tools", "benchmarks")
_GENERATED: Final = "generated"
_NO_CODE: Final = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


@cache
def code_lines(file: Path) -> int:
    """How many lines have code: without blank lines, comments and docstrings."""
    with tokenize.open(file) as opened:
        found = {
            line
            for token in tokenize.generate_tokens(opened.readline)
            if token.type not in _NO_CODE
            for line in range(token.start[0], token.end[0] + 1)
        }
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(found)


def is_generated(file: Path) -> bool:
    """Whether a tool has written the file."""
    return file.stem.endswith("_generated")


def folders(root: Path) -> str:
    """The table of files, lines, and lines of code of each folder; generated files have their own line."""
    cells = []
    for folder in _FOLDERS:
        found = sorted((root / folder).rglob("*.py"))
        for what, files in (
            (folder, [file for file in found if not is_generated(file)]),
            (f"{folder}, generated", [file for file in found if is_generated(file)]),
        ):
            every = sum(len(file.read_bytes().splitlines()) for file in files)
            if files:
                cells.append([what, f"{len(files):,}", f"{every:,}", f"{sum(map(code_lines, files)):,}"])
    return table(["folder", "files", "lines", "code"], cells)


def packages(root: Path) -> dict[str, int]:
    """Each package of `src`, each other folder, and what is generated, with its lines of code."""
    found: Counter[str] = Counter()
    for folder in _FOLDERS:
        for file in (root / folder).rglob("*.py"):
            owner = file.parent.relative_to(root / folder).as_posix() if folder == "src" else folder
            found[_GENERATED if is_generated(file) else owner] += code_lines(file)
    return dict(sorted(found.items()))


def excess(found: dict[str, int], limits: dict[str, int]) -> list[str]:
    """A sentence for each package that is larger than its limit, or that has none."""
    return [
        f"{package} has {lines:,} lines of code; its limit in benchmarks/lines.toml is {limits.get(package, 0):,}"
        for package, lines in found.items()
        if lines > limits.get(package, 0)
    ]


def lowered(text: str, found: dict[str, int]) -> str:
    """The limits' file, in which no limit is higher than what its package has, and no package that is gone has one."""

    def line(match: re.Match[str]) -> str:
        lines = found.get(match["package"], 0)
        return f'"{match["package"]}" = {min(lines, int(match["limit"]))}{match["rest"]}\n' if lines else ""

    return re.sub(r'^"(?P<package>[^"]+)" = (?P<limit>\d+)(?P<rest>.*)\n', line, text, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = parser.add_mutually_exclusive_group()
    for name, what in (
        ("check", "compare each package with its limit"),
        ("lower", "lower the limits"),
    ):
        chosen.add_argument(f"--{name}", action="store_true", help=what)
    arguments = parser.parse_args()
    found, text = packages(_ROOT), _LIMITS.read_text(encoding="utf-8")
    limits: dict[str, int] = tomllib.loads(text)
    if arguments.lower:
        _LIMITS.write_text(lowered(text, found), encoding="utf-8")
    elif arguments.check:
        if above := excess(found, limits):
            sys.exit("\n".join([*above, "Take lines out, or raise the limit with a comment that says which feature pays."]))
    else:
        cells = [[each, f"{found[each]:,}", f"{limits.get(each, 0):,}"] for each in found]
        print(f"{folders(_ROOT)}\n\n{table(['package', 'code', 'limit'], cells)}")


if __name__ == "__main__":
    main()
