"""The rooms of a checkout and what imports what: rooms, floors, arrows, circles.

    python docs/import_graph.py            # this checkout
    python docs/import_graph.py OTHER      # another one, such as a worktree of an older commit
    python docs/import_graph.py --mermaid  # the map that docs/how-it-works/index.md draws

A *room* is a folder without folders in it, or a module beside folders. An *arrow* leads from a room to one that it imports. A
room stands one *floor* above the highest room that it imports. With a circle there are no floors: the
circle is printed, and the exit code is 1. An import of names for a type checker (`if TYPE_CHECKING`) is no arrow, and neither
are those of a package's `__init__`, which only passes names on: importing them from there is an import of that room.

The map has one node for everything below `dualwrite.jobs`, and so on, and leaves out an arrow that follows from others (cli →
api → jobs, so also cli → jobs).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = "dualwrite"


def rooms_of(graph: grimp.ImportGraph) -> dict[str, str]:
    """The room of each module."""
    packages = {module for module in graph.modules if graph.find_children(module)}
    nested = {module.rpartition(".")[0] for module in packages}  # packages with packages in them

    def room(module: str) -> str:
        parent = module.rpartition(".")[0]
        return module if parent in nested else parent

    return {module: room(module) for module in graph.modules if module not in packages}


def arrows_of(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """What each room imports."""
    rooms = rooms_of(graph)
    arrows: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for module, room in rooms.items():
        for imported in graph.find_modules_directly_imported_by(module):
            other = rooms.get(imported, imported)  # a package that passes names on is the room of the modules in it
            if other in arrows and other != room:
                arrows[room].add(other)
    return arrows


def floors_of(arrows: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each room, from 0.

    Raises:
        graphlib.CycleError: There is a circle; its second argument names the rooms.
    """
    floors: dict[str, int] = {}
    for room in TopologicalSorter(arrows).static_order():
        floors[room] = 1 + max((floors[below] for below in arrows[room]), default=-1)
    return floors


def mermaid_of(arrows: dict[str, set[str]]) -> str:
    """The map as Mermaid text.

    Raises:
        graphlib.CycleError: There is a circle between the nodes.
    """
    nodes: dict[str, set[str]] = defaultdict(set)
    for room, imported in arrows.items():
        nodes[_short(room).partition(".")[0]].update(_short(other).partition(".")[0] for other in imported)
    for node, direct in nodes.items():
        direct.discard(node)
    below: dict[str, set[str]] = {}
    for node in TopologicalSorter(nodes).static_order():
        below[node] = nodes[node].union(*(below[other] for other in nodes[node]))
    drawn = sorted(
        (node, other) for node in nodes for other in nodes[node] if not any(other in below[step] for step in nodes[node])
    )
    return "\n".join(("graph TD", *(f"    {node} --> {other}" for node, other in drawn), ""))


def _short(room: str) -> str:
    return room.removeprefix(f"{ROOT}.")


def main() -> int:
    """Print floor by floor, the highest first; or the map."""
    asked = sys.argv[1:]
    place = Path(asked[0]) if asked and asked != ["--mermaid"] else Path(__file__).parents[1]
    sys.path.insert(0, str(place / "src"))
    graph = grimp.build_graph(ROOT, exclude_type_checking_imports=True, cache_dir=None)
    arrows = arrows_of(graph)
    number = sum(map(len, arrows.values()))
    try:
        floors = floors_of(arrows)
    except CycleError as error:
        print(f"{len(arrows)} rooms, {number} arrows, and a circle: {' → '.join(error.args[1])}")
        return 1
    if asked == ["--mermaid"]:
        print(mermaid_of(arrows), end="")
        return 0
    by_floor = defaultdict(list)
    for room, floor in sorted(floors.items()):
        by_floor[floor].append(_short(room))
    for floor in sorted(by_floor, reverse=True):
        print(f"{floor:2}  {', '.join(by_floor[floor])}")
    print(f"{len(arrows)} rooms on {len(by_floor)} floors, {number} arrows, no circle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
