"""Run dualwrite's recipe and recovery under a seed, with faults between any two steps: docs/how-it-works/simulator.md.

```
python tools/simulate.py --seeds 10000              # seeds 0 to 9999: how many in a minute, and the first that fails
python tools/simulate.py --seed 4711 --trace        # one seed, step by step; one that fails is shrunk first
python tools/simulate.py --seeds 100000 --without   # without each rule that it can see: after how many seeds that is noticed
python tools/simulate.py --seeds 100000 --without F1 F7
python tools/simulate.py --seeds 1000000 --result soak/simulator.json     # for tools/evidence.py --add
```
"""

# ruff: noqa: T201  (a command that prints)

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, TypeVar

from evidence import command_without, of_today, table
from rich.console import Console
from rich.progress import track

ROOT: Final = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "removals")]

from removal import copy_of_the_package  # noqa: E402  (the path comes first)

from simulator.choices import shrunk  # noqa: E402
from simulator.rules import visible  # noqa: E402
from simulator.run import Run, run  # noqa: E402

T = TypeVar("T")

_PART: Final = 1000
"""Seeds that one process runs before it reports."""
_FAILED: Final = re.compile(r"^seed (\d+): (.*)$", re.MULTILINE)
_NUMBER: Final = re.compile(r"\d+")


@dataclass
class Part:
    """What some seeds have met.

    Attributes:
        seeds: How many have run.
        failed: The first one that failed, and how.
        faults: How many faults there were, by kind.
        transactions: How many transactions users have run.
        seconds: Of the processor.
    """

    seeds: int = 0
    failed: tuple[int, str] | None = None
    faults: Counter[str] = field(default_factory=Counter)
    transactions: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, seeds: range) -> Part:
        """Run seeds until one fails."""
        began, part = time.process_time(), cls()
        for seed in seeds:
            broken, made = run(seed)
            part.seeds += 1
            part.faults += made.world.met
            part.transactions += len(made.units)
            if broken is not None:
                part.failed = seed, broken
                break
        part.seconds = time.process_time() - began
        return part

    def add(self, other: Part) -> None:
        """Count what later seeds have met."""
        self.seeds += other.seeds
        self.failed = self.failed or other.failed
        self.faults += other.faults
        self.transactions += other.transactions
        self.seconds += other.seconds


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


def search(seeds: range, processes: int = 1, result: Path | None = None) -> int:
    """Run seeds until one fails."""
    began, found = time.perf_counter(), Part()
    parts = [seeds[at : at + _PART] for at in range(0, len(seeds), _PART)]
    with ProcessPoolExecutor(processes, get_context("spawn"), gc.freeze) as pool:
        for part in shown(pool.map(Part.of, parts), len(parts)):
            found.add(part)
            if found.failed is not None:
                pool.shutdown(cancel_futures=True)
                break
    wall = time.perf_counter() - began
    rate, of_cpu = found.seeds / wall * 60, found.seeds / found.seconds * 60
    print(f"{found.seeds} seeds, {rate:.0f} a minute, {of_cpu:.0f} a minute of processor time")
    if result is not None:
        row = {"seeds": found.seeds, "from": seeds.start, "transactions": found.transactions}
        write(result, "simulator", found.seeds, wall, [row], faults=found.faults, anomalies=int(found.failed is not None))
    if found.failed is None:
        return 0
    seed, broken = found.failed
    print(f"seed {seed}: {broken}\ntrace: python tools/simulate.py --seed {seed} --trace")
    return 1


def without(wanted: Sequence[str], seeds: range, processes: int, result: Path | None = None) -> int:
    """Remove rules from copies of the source, one at a time, and print after how many seeds each is missed."""
    chosen = [each for each in visible() if not wanted or each.rule.split()[0] in wanted]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:

        def missed(number: int) -> tuple[int | str, str]:
            place = Path(folder) / str(number)
            copy_of_the_package(place, chosen[number])
            environment = os.environ | {"PYTHONPATH": str(place / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
            command = [sys.executable, __file__, "--seeds", str(len(seeds)), "--from", str(seeds.start), "--processes", "1"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)  # noqa: S603  (this file)
            if done.returncode not in (0, 1):
                raise RuntimeError(done.stderr)
            found = _FAILED.search(done.stdout)
            return (int(found[1]), found[2]) if found else ("none", "")

        began, rows = time.perf_counter(), []
        for removal, (seed, broken) in zip(chosen, shown(pool.map(missed, range(len(chosen))), len(chosen)), strict=True):
            rows.append({"removed rule": removal.rule, "first seed": seed, "what is found": broken[:100]})
    print(table(rows))
    unseen = sum("none" in row.values() for row in rows)
    print(f"{len(rows) - unseen} of {len(rows)} rules that the simulator can see are missed.")
    if result is not None:
        write(result, "removals", len(rows), time.perf_counter() - began, rows)
    return int(unseen > 0)


def shown(things: Iterable[T], count: int) -> Iterable[T]:
    """The same, with a bar on a terminal."""
    console = Console(stderr=True)
    return track(things, "", count, console=console, transient=True, disable=not console.is_terminal)


def write(
    path: Path,
    kind: str,
    operations: int,
    seconds: float,
    rows: list[dict[str, Any]],
    *,
    faults: Mapping[str, int] = {},
    anomalies: int = 0,
) -> None:
    """A result for the page of evidence."""
    result = of_today(kind, command_without("--result")) | {
        "versions": {"python": [platform.python_version()]},
        "operations": operations,
        "faults": dict(sorted(faults.items())),
        "anomalies": {"the promise is broken": anomalies},
        "seconds": round(seconds),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """The command; 1 if something was found, or a removed rule was not missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many seeds")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first one")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="print what happens, step by step")
    parser.add_argument("--without", nargs="*", metavar="RULE", help="remove these rules, or each, from a copy of the source")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many copies run side by side")
    parser.add_argument("--result", type=Path, metavar="FILE", help="write the result here, for tools/evidence.py")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.seeds)
    if asked.without is not None:
        return without(asked.without, seeds, asked.processes, asked.result)
    if asked.seed is not None:
        return show(asked.seed) if asked.trace else search(range(asked.seed, asked.seed + 1))
    return search(seeds, asked.processes, asked.result)


if __name__ == "__main__":
    sys.exit(main())
