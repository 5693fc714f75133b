"""Run dualwrite's recipe and recovery under a seed, with faults between any two steps: docs/how-it-works/simulator.md.

```
python tools/simulate.py --seeds 10000              # seeds 0 to 9999: how many in a minute, and the first that fails
python tools/simulate.py --seed 4711 --trace        # one seed, step by step; one that fails is shrunk first
python tools/simulate.py --seeds 100000 --without   # without each rule that it can see: after how many seeds that is noticed
python tools/simulate.py --seeds 100000 --without F1 F7
```
"""

# ruff: noqa: T201  (a command that prints)

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "removals")]

from removal import copy_of_the_package  # noqa: E402  (the path comes first)

from simulator.choices import shrunk  # noqa: E402
from simulator.rules import visible  # noqa: E402
from simulator.run import Run, run  # noqa: E402

_FAILED: Final = re.compile(r"^seed (\d+): (.*)$", re.MULTILINE)
_NUMBER: Final = re.compile(r"\d+")


def failing(seeds: range) -> Iterator[tuple[int, str]]:
    """The seeds that fail, and how."""
    for seed in seeds:
        broken, _ = run(seed)
        if broken is not None:
            yield seed, broken


def smallest(seed: int) -> tuple[str | None, Run]:
    """A run of this seed with its trace; if it fails, one with as few faults and steps as were found."""
    broken, made = run(seed, trace=True)
    if broken is None:
        return broken, made
    kind = _NUMBER.sub("", broken)

    def fails(choices: Sequence[int]) -> bool:
        found, _ = run(seed, choices)
        return found is not None and _NUMBER.sub("", found) == kind

    return run(seed, shrunk(made.choices.made, fails), trace=True)


def show(seed: int) -> int:
    """Print the trace of one seed."""
    broken, made = smallest(seed)
    print(f"seed {seed}: {made.scene}")
    print(*(made.world.trace or ()), sep="\n")
    print(f"=> {broken or 'the promise is kept'}")
    return int(broken is not None)


def search(seeds: range) -> int:
    """Run seeds until one fails."""
    gc.freeze()
    began, used = time.perf_counter(), time.process_time()
    found = next(failing(seeds), None)
    count = len(seeds) if found is None else found[0] - seeds.start + 1
    wall, cpu = time.perf_counter() - began, time.process_time() - used
    print(f"{count} seeds, {count / wall * 60:.0f} a minute, {count / cpu * 60:.0f} a minute of processor time")
    if found is None:
        return 0
    print(f"seed {found[0]}: {found[1]}")
    print(f"trace: python tools/simulate.py --seed {found[0]} --trace")
    return 1


def without(wanted: Sequence[str], seeds: range, processes: int) -> int:
    """Remove rules from copies of the source, one at a time, and print after how many seeds each is missed."""
    chosen = [each for each in visible() if not wanted or each.rule.split()[0] in wanted]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:

        def missed(number: int) -> str | None:
            place = Path(folder) / str(number)
            copy_of_the_package(place, chosen[number])
            environment = os.environ | {"PYTHONPATH": str(place / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
            command = [sys.executable, __file__, "--seeds", str(len(seeds)), "--from", str(seeds.start)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603  (this file)
            if done.returncode not in (0, 1):
                raise RuntimeError(done.stderr)
            found = _FAILED.search(done.stdout)
            return None if found is None else f"| {chosen[number].rule} | {found[1]} | {found[2].splitlines()[0][:100]} |"

        print(f"| removed rule | first seed of {len(seeds)} | what is found |\n| --- | --- | --- |")
        count = 0
        for removal, found in zip(chosen, pool.map(missed, range(len(chosen))), strict=True):
            count += found is not None
            print(found or f"| {removal.rule} | none | |", flush=True)
    print(f"\n{count} of {len(chosen)} rules that the simulator can see are missed.")
    return int(count < len(chosen))


def main() -> int:
    """The command; 1 if something was found, or a removed rule was not missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many seeds")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first one")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="print what happens, step by step")
    parser.add_argument("--without", nargs="*", metavar="RULE", help="remove these rules, or each, from a copy of the source")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many copies run side by side")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.seeds)
    if asked.without is not None:
        return without(asked.without, seeds, asked.processes)
    if asked.seed is not None:
        return show(asked.seed) if asked.trace else search(range(asked.seed, asked.seed + 1))
    return search(seeds)


if __name__ == "__main__":
    sys.exit(main())
