"""Explore the model of the job protocol: every scene with all rules, then without each rule. See README.md."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from model.job_search import search
from model.job_state import RULES, Scene
from model.scenes import LARGE, NEEDS, SMALL
from model.search import Found


def show_found(name: str, found: Found) -> None:
    """Print the result of a search."""
    verdict = f"VIOLATION: {found.violation}" if found.violation else "no violation"
    reach = "" if found.violation or found.is_complete else ", NOT COMPLETE"
    print(f"{name}: {found.states:,} states, {found.seconds:.0f} s: {verdict}{reach}", flush=True)  # noqa: T201  (a script)
    for number, step in enumerate(found.trace, 1):
        print(f"   {number:2d}. {step}")  # noqa: T201


def show(name: str, scene: Scene, seconds: float, wanted: str = "") -> None:
    """Search, and print what was found."""
    show_found(name, search(scene, seconds=seconds, wanted=wanted))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help=f"scenes by name, or rules: {', '.join(RULES)}; all if none is given")
    parser.add_argument("--without", nargs="*", default=[], help="rules to remove from the scenes")
    parser.add_argument("--seconds", type=float, default=900, help="limit of one search")
    asked = parser.parse_args()
    scenes = SMALL | LARGE
    for name in asked.what or (*scenes, *NEEDS):
        if name in scenes:
            show(name, replace(scenes[name], without=frozenset(asked.without)), asked.seconds)
        else:
            need = NEEDS[name]
            label = f"without {name}{f' and {need.spare}' if need.spare else ''} ({RULES[name]})"
            show(label, need.without(name, need.spare), asked.seconds, need.violation)


if __name__ == "__main__":
    main()
