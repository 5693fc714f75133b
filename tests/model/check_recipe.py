"""Explore the model of the recipe: every scene with all rules, then without each rule. See README.md."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from model.check_jobs import show_found
from model.journal_model import without
from model.recipe_scenes import INSTEAD, LARGE, NEEDS, SMALL, search
from model.recipe_state import RULES, TRIED
from model.search import Found

JOURNAL_TRACES: Final = ("CL-id", "CL-drain")
"""The rules of the journal's model whose traces the documentation shows."""


def as_text(found: Found) -> str:
    """A trace as the documentation shows it."""
    steps = (f"{number:2d}. {step}" for number, step in enumerate(found.trace, 1))
    return "\n".join((*steps, f"=> {found.violation}", ""))


def main() -> None:
    """The command."""
    names = ", ".join((*RULES, *TRIED))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help=f"scenes by name, or rules: {names}; all if none is given")
    parser.add_argument("--without", nargs="*", default=[], help="rules to remove from the scenes")
    parser.add_argument("--seconds", type=float, default=900, help="limit of one search")
    parser.add_argument("--traces", type=Path, help="a folder in which the trace of each rule is written to a file")
    asked = parser.parse_args()
    if asked.traces is not None:
        for name, need in NEEDS.items():
            found = search(need.without(name), wanted=need.violation)
            (asked.traces / f"{name}.txt").write_text(as_text(found), encoding="utf-8")
        for name in JOURNAL_TRACES:
            (asked.traces / f"{name}.txt").write_text(as_text(without(name)), encoding="utf-8")
        return
    scenes = SMALL | LARGE
    for name in asked.what or (*scenes, *NEEDS, *INSTEAD):
        if name in scenes:
            scene = replace(scenes[name], without=frozenset(asked.without))
            show_found(name, search(scene, seconds=asked.seconds))
        elif name in INSTEAD:
            rule, need = INSTEAD[name]
            found = search(need.without(rule), seconds=asked.seconds, wanted=need.violation)
            show_found(f"{name} ({TRIED[name]}) instead of {rule}", found)
        else:
            need = NEEDS[name]
            found = search(need.without(name), seconds=asked.seconds, wanted=need.violation)
            show_found(f"without {name} ({RULES[name]})", found)


if __name__ == "__main__":
    main()
