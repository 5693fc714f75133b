"""Runs all kinds of clients at once, for hours, while everything fails, and judges what they have recorded.

::

    python tools/soak.py --hours 2                     # rounds of 15 minutes, each on new servers
    python tools/soak.py --minutes 10 --seed 7 --only pool,relays

Clients are killed and paused beyond their leases, and have wrong clocks; brokers and databases are killed and come back; the
network is cut, silent or slow. Each kind of client records a history (docs/how-it-works/histories.md). After a round all faults
end, what was left is recovered, both sides are read, and each history is judged. The end is one table, and `soak.json` beside
the histories, which `tools/evidence.py` takes. Exit code 1: there is an anomaly. Ctrl-C ends the round in the same way.

A round has servers of its own, so disks and the checker's memory hold what one round writes: with the default, some hundred
thousand operations. It needs Java, a checkout, and what the tests need.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from evidence import command_without, of_today
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from endurance.clients import Kind
    from endurance.stage import Stage

ROOT: Final = Path(__file__).parents[1]
TESTS: Final = ROOT / "tests"
SCENES: Final = ("relay", "processor", "spark")
"""Folders whose modules pytest finds by their own names."""


class Interrupt:
    """Whether Ctrl-C was pressed, or SIGTERM came; the second one ends the program at once."""

    def __init__(self) -> None:
        self.pressed = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._press)

    def _press(self, *_: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


class Counted:
    """How many operations the files of a history have begun so far, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._read, self.operations = folder, dict[Path, int](), 0

    def look(self) -> int:
        """Read what is new."""
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            end = new.rfind(b"\n") + 1
            self._read[path] = self._read.get(path, 0) + end
            self.operations += new.count(b'["i"', 0, end)
        return self.operations


class Round:
    """One round: servers, clients and faults; then recovery, and a verdict on each history.

    Args:
        options: Those of the command line.
        folder: Where the histories go.
        seed: It chooses the faults.
        interrupt: Ends the round early.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, seed: int, interrupt: Interrupt) -> None:
        self._options, self._folder, self._seed, self._interrupt = options, folder, seed, interrupt
        self._chance = random.Random(seed)  # noqa: S311  (no secret)
        self._kinds: list[Kind] = []
        self._restarts: Counter[str] = Counter()

    def run(self, seconds: float) -> dict[str, Any]:
        """Let it run for so long; its faults, and for each kind of client the summary of its history."""
        from endurance.fed_clients import KINDS, missing  # noqa: PLC0415  (needs the path of the tests)
        from endurance.stage import Stage  # noqa: PLC0415  (likewise)

        begun, options = time.monotonic(), self._options
        wanted = [kind for kind in KINDS if options.only is None or kind.name in options.only]
        chosen = [kind for kind in wanted if not missing(kind)]
        mariadb = any(kind.database == "mariadb" for kind in chosen)
        self._say(f"round with seed {self._seed}: brokers and databases start")
        with Stage(options.brokers or self._chance.choice((1, 3)), kafka=options.kafka, mariadb=mariadb) as stage:
            for kind in chosen:
                (place := self._folder / kind.name.replace(" ", "-")).mkdir(parents=True)
                self._kinds.append(kind(stage, place, self._chance))
            faults, brokers = self._work(stage, seconds), len(stage.cluster.status().nodes)
            for kind in self._kinds:
                self._say(f"{kind.name}: recovered, read")
                kind.settle()
                kind.read_back()
        found = {}
        for kind in self._kinds:
            self._say(f"{kind.name}: judged")
            found[kind.name] = kind.judge()
            faults["a clock turned"] += found[kind.name]["faults"].get("a clock turned", 0)
        return {
            "seed": self._seed,
            "brokers": brokers,
            "seconds": round(time.monotonic() - begun),
            "faults": faults,
            "restarts": self._restarts,
            "found": found,
            "left out": {kind.name: missing(kind) for kind in wanted if missing(kind)},
        }

    def _work(self, stage: Stage, seconds: float) -> Counter[str]:
        """The clients at work while faults happen, which are counted; all of these end."""
        from endurance.schedule import Schedule  # noqa: PLC0415  (as above)

        counted = {kind.name: Counted(kind.folder) for kind in self._kinds}
        schedule = Schedule(stage, self._kinds, self._chance, self._options.every)
        with ExitStack() as at_work, Live(console=self._options.console, refresh_per_second=2, transient=True) as live:
            for kind in self._kinds:
                at_work.enter_context(kind.running())
                kind.supervise()
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0 and not self._interrupt.pressed:
                until = time.monotonic() + 1
                while time.monotonic() < until:
                    schedule.step()
                    time.sleep(0.05)
                for kind in self._kinds:
                    self._restarts[kind.name] += len(kind.supervise())
                    kind.feed()
                operations = {name: each.look() for name, each in counted.items()}
                live.update(progress(f"seed {self._seed}, {left:,.0f} s left", operations, schedule.done, self._restarts))
            live.update("")
            self._say("all faults end")
            schedule.heal()
        return Counter(schedule.done)

    def _say(self, text: str) -> None:
        self._options.console.print(f"{datetime.now(UTC):%H:%M:%S} {text}", highlight=False)


def progress(title: str, operations: dict[str, int], faults: Counter[str], restarts: Counter[str]) -> Group:
    """What a round has done so far."""
    table = Table("clients", "operations", "ended by themselves", title=title)
    for name, number in operations.items():
        table.add_row(name, f"{number:,}", str(restarts[name]))
    return Group(table, ", ".join(f"{kind} {number}" for kind, number in sorted(faults.items())))


# --- the result -----------------------------------------------------------------------------------------------------------


def result(head: dict[str, Any], rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All rounds, in the form of docs/how-it-works/evidence/*.json.

    Args:
        head: What the result begins with.
        rounds: What `Round.run` has returned.
    """
    rows: dict[str, dict[str, Any]] = {}
    faults, anomalies, restarts = Counter[str](), Counter[str](), Counter[str]()
    versions: dict[str, set[str]] = {}
    for one in rounds:
        faults.update(one["faults"])
        restarts.update(one["restarts"])
        for name, found in one["found"].items():
            row = rows.setdefault(name, {"clients": name, **dict.fromkeys(COLUMNS, 0)})
            row["operations"] += sum(found["operations"].values())
            for outcome, number in found["operations"].items():
                row[outcome] += number
            row["unknown, committed"] += found["unknown"]["committed"]
            row["messages"] += found["messages"]
            row["seen by consumers"] += found["seen"]["by consumers"]
            row["anomalies"] += sum(each["count"] for each in found["anomalies"].values())
            anomalies.update({anomaly: each["count"] for anomaly, each in found["anomalies"].items()})
            for what, those in found["versions"].items():
                versions.setdefault(what, set()).update(those)
    return {
        **head,
        "versions": {what: sorted(those) for what, those in sorted(versions.items())},
        "operations": sum(row["operations"] for row in rows.values()),
        "faults": dict(sorted(faults.items())),
        "anomalies": dict(anomalies),
        "seconds": sum(one["seconds"] for one in rounds),
        "rounds": [{"seed": one["seed"], "brokers": one["brokers"], "seconds": one["seconds"]} for one in rounds],
        "ended by themselves": dict(restarts),
        "left out": rounds[-1]["left out"],
        "rows": [*rows.values()],
    }


COLUMNS: Final = (
    "operations",
    "ok",
    "fail",
    "unknown",
    "unknown, committed",
    "messages",
    "seen by consumers",
    "anomalies",
)


def show(console: Console, found: dict[str, Any]) -> None:
    """The table at the end."""
    table = Table("clients", *COLUMNS, title=f"{found['seconds']} s, {len(found['rounds'])} rounds")
    for row in found["rows"]:
        table.add_row(row["clients"], *(f"{row[column]:,}" for column in COLUMNS))
    console.print(table)
    for name in ("faults", "anomalies", "versions", "ended by themselves", "left out"):
        each = (
            f"{what} {number if isinstance(number, int | str) else ' '.join(number)}" for what, number in found[name].items()
        )
        console.print(f"{name}: {', '.join(each) or 'none'}")


def keep(folder: Path) -> None:
    """Compress the histories."""
    for path in folder.rglob("*.jsonl"):
        with path.open("rb") as plain, gzip.open(f"{path}.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        path.unlink()


def main() -> int:
    """Run the rounds of the command line."""
    parser = argparse.ArgumentParser(description="Runs all kinds of clients at once while everything fails.")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--hours", type=float, default=1)
    length.add_argument("--minutes", type=float)
    parser.add_argument("--round", type=float, default=15, metavar="MINUTES", help="the length of a round (default: 15)")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; each next one has the next number")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="KINDS", help="such as pool,relays")
    parser.add_argument("--brokers", type=int, choices=(1, 3), help="by default the seed chooses")
    parser.add_argument("--kafka", metavar="VERSION", help="by default that of dualwrite's development cluster")
    parser.add_argument("--every", type=float, default=5, metavar="SECONDS", help="between two faults, on average (default: 5)")
    parser.add_argument("--folder", type=Path, help="where the histories go (default: below the folder soak)")
    options = parser.parse_args()
    options.console = Console() if sys.stdout.isatty() else Console(width=160)
    prepare_path()
    from endurance.fed_clients import KINDS  # noqa: PLC0415  (needs the path of the tests)

    if unknown := {*(options.only or ())} - (known := {kind.name for kind in KINDS}):
        parser.error(f"there are no clients {', '.join(sorted(unknown))}, only {', '.join(sorted(known))}")
    seconds = (options.minutes or options.hours * 60) * 60
    folder = (options.folder or Path("soak", f"{datetime.now(UTC):%Y%m%dT%H%M%S}")).absolute()
    head, interrupt, rounds = of_today("soak", command_without("--folder")), Interrupt(), list[dict[str, Any]]()
    while seconds > 0 and not interrupt.pressed:
        place, length_of_this = folder / f"{options.seed + len(rounds):03}", min(seconds, options.round * 60)
        rounds.append(Round(options, place, options.seed + len(rounds), interrupt).run(length_of_this))
        keep(place)
        seconds -= length_of_this
        found = result(head, rounds)
        (folder / "soak.json").write_text(json.dumps(found, indent=1) + "\n")
        (folder / f"{place.name}.json").write_text(json.dumps(rounds[-1], indent=1) + "\n")
    show(options.console, found)
    options.console.print(f"python tools/check_history.py {folder}/*/KIND/*.jsonl.gz judges a kind again")
    return 1 if any(found["anomalies"].values()) else 0


def prepare_path() -> None:
    """As pytest does for tests: their modules, and those of this checkout, here and in other processes."""
    source = str(ROOT / "src")
    sys.path[:0] = [source, str(TESTS), *(str(TESTS / name) for name in SCENES)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    os.environ["DUALWRITE_TESTING"] = "1"
    logging.getLogger("psycopg").setLevel(logging.ERROR)  # inserts of this process break off with the database
    os.environ.setdefault("DUALWRITE_TEST_PACE", "3")  # a run is busy by itself: measured limits would be half an hour


if __name__ == "__main__":
    sys.exit(main())
