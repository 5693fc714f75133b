"""The map of the rooms (modules and packages right below `dualwrite`) as docs/how-it-works/index.md draws it.

`python tests/docs/rooms.py` prints how many rooms, floors and imports there are, and the map as Mermaid text. An import that
follows from others on the map (cli → api → jobs, so also cli → jobs) is not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import grimp

PACKAGE = "dualwrite"


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """For each room, those that it imports."""
    graph = grimp.build_graph(PACKAGE)
    found: dict[str, set[str]] = {_room(module): set() for module in graph.find_children(PACKAGE)}
    for module in graph.modules - {PACKAGE}:
        for imported in graph.find_modules_directly_imported_by(module) - {PACKAGE}:
            if _room(imported) != _room(module):
                found[_room(module)].add(_room(imported))
    return {room: frozenset(below) for room, below in sorted(found.items())}


def _room(module: str) -> str:
    return module.split(".")[1]


@cache
def below(room: str) -> frozenset[str]:
    """Every room that a room imports, directly or not."""
    direct = imports()[room]
    return direct.union(*map(below, direct))


@cache
def floor(room: str) -> int:
    """0 for a room that imports no other one."""
    return 1 + max((floor(other) for other in imports()[room]), default=-1)


def drawn() -> list[tuple[str, str]]:
    """The arrows of the map."""
    return [
        (room, other)
        for room, direct in imports().items()
        for other in sorted(direct)
        if not any(other in below(between) for between in direct)
    ]


def mermaid() -> str:
    """The map as Mermaid text."""
    return "\n".join(("graph TD", *(f"    {room} --> {other}" for room, other in drawn()), ""))


if __name__ == "__main__":
    floors = 1 + max(map(floor, imports()))
    arrows = sum(map(len, imports().values()))
    print(f"{len(imports())} rooms on {floors} floors, {arrows} imports between them, of which {len(drawn())} are drawn:\n")  # noqa: T201  (a command)
    print(mermaid(), end="")  # noqa: T201
