"""Explore the model of the recipe: every scene with all rules, then each rule taken out. See README.md."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from model.check_jobs import show_found
from model.recipe_scenes import LARGE, NEEDS, SMALL, search
from model.recipe_state import RULES


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", help=f"scenes by name, or rules: {', '.join(RULES)}; all of them if none is given")
    parser.add_argument("--without", nargs="*", default=[], help="rules to take out of the scenes")
    parser.add_argument("--seconds", type=float, default=900, help="for one search")
    asked = parser.parse_args()
    scenes = SMALL | LARGE
    for name in asked.what or (*scenes, *NEEDS):
        if name in scenes:
            scene = replace(scenes[name], without=frozenset(asked.without))
            show_found(name, search(scene, seconds=asked.seconds))
        else:
            found = search(NEEDS[name].without(name), seconds=asked.seconds)
            show_found(f"without {name} ({RULES[name]})", found)


if __name__ == "__main__":
    main()
