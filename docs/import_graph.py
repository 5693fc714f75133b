"""The packages of a checkout and what imports what: packages, layers, imports, cycles.

    python docs/import_graph.py            # this checkout
    python docs/import_graph.py OTHER      # another one, such as a worktree of an older commit
    python docs/import_graph.py --mermaid  # the map that docs/how-it-works/index.md draws

A *package* here is a folder without folders in it, or a module beside folders. Its *layer* is one above the highest layer that
it imports from. If packages import each other in a cycle, there are no layers: the cycle is printed, and the exit code is 1. An
import of names for a type checker (`if TYPE_CHECKING`) is not counted. A package's `__init__` only passes names on: importing
a name from there counts as an import of the package.

The map has one node for everything below `dualwrite.jobs`, and so on. It leaves out an import that others imply (cli → api →
jobs, so also cli → jobs).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = "dualwrite"


def packages_of(graph: grimp.ImportGraph) -> dict[str, str]:
    """The package of each module."""
    parents = {module for module in graph.modules if graph.find_children(module)}
    nested = {module.rpartition(".")[0] for module in parents}  # those that have folders in them

    def package(module: str) -> str:
        parent = module.rpartition(".")[0]
        return module if parent in nested else parent

    return {module: package(module) for module in graph.modules if module not in parents}


def imports_of(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """What each package imports."""
    packages = packages_of(graph)
    imports: dict[str, set[str]] = {package: set() for package in packages.values()}
    for module, package in packages.items():
        for imported in graph.find_modules_directly_imported_by(module):
            other = packages.get(imported, imported)  # an `__init__` that passes names on has the name of its package
            if other in imports and other != package:
                imports[package].add(other)
    return imports


def layers_of(imports: dict[str, set[str]]) -> dict[str, int]:
    """The layer of each package, from 0.

    Raises:
        graphlib.CycleError: There is a cycle; its second argument names the packages.
    """
    layers: dict[str, int] = {}
    for package in TopologicalSorter(imports).static_order():
        layers[package] = 1 + max((layers[below] for below in imports[package]), default=-1)
    return layers


def mermaid_of(imports: dict[str, set[str]]) -> str:
    """The map as Mermaid text.

    Raises:
        graphlib.CycleError: There is a cycle between the nodes.
    """
    nodes: dict[str, set[str]] = defaultdict(set)
    for package, imported in imports.items():
        nodes[_short(package).partition(".")[0]].update(_short(other).partition(".")[0] for other in imported)
    for node, direct in nodes.items():
        direct.discard(node)
    below: dict[str, set[str]] = {}
    for node in TopologicalSorter(nodes).static_order():
        below[node] = nodes[node].union(*(below[other] for other in nodes[node]))
    drawn = sorted(
        (node, other) for node in nodes for other in nodes[node] if not any(other in below[step] for step in nodes[node])
    )
    return "\n".join(("graph TD", *(f"    {node} --> {other}" for node, other in drawn), ""))


def _short(package: str) -> str:
    return package.removeprefix(f"{ROOT}.")


def main() -> int:
    """Print layer by layer, the highest first; or the map."""
    asked = sys.argv[1:]
    place = Path(asked[0]) if asked and asked != ["--mermaid"] else Path(__file__).parents[1]
    sys.path.insert(0, str(place / "src"))
    graph = grimp.build_graph(ROOT, exclude_type_checking_imports=True, cache_dir=None)
    imports = imports_of(graph)
    number = sum(map(len, imports.values()))
    try:
        layers = layers_of(imports)
    except CycleError as error:
        print(f"{len(imports)} packages, {number} imports, and a cycle: {' → '.join(error.args[1])}")
        return 1
    if asked == ["--mermaid"]:
        print(mermaid_of(imports), end="")
        return 0
    by_layer = defaultdict(list)
    for package, layer in sorted(layers.items()):
        by_layer[layer].append(_short(package))
    for layer in sorted(by_layer, reverse=True):
        print(f"{layer:2}  {', '.join(by_layer[layer])}")
    print(f"{len(imports)} packages in {len(by_layer)} layers, {number} imports, no cycle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
