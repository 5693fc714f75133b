"""Writes docs/how-it-works/evidence.md from the results of runs, docs/how-it-works/evidence/*.json.

::

    python tools/evidence.py                             # writes the page
    python tools/evidence.py --add soak/*/soak.json      # takes results of other tools first
    python tools/evidence.py --judge "COMMAND" FILE …    # judges histories of a test, and takes the result of that

A result is an object: `kind` (one of `SECTIONS`), `date`, `command`, `dualwrite` (the commit),
`versions` (lists by name), `operations`, `faults` and `anomalies` (numbers by kind), and `rows` (objects: a table).
`seconds` and a `note` (a sentence, for what people found out afterwards) are optional.
A file with the kind "found" lists what such runs have found.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import check_history

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "how-it-works" / "evidence.md"
RESULTS: Final = PAGE.with_suffix("")

Result = dict[str, Any]

SECTIONS: Final = {
    "soak": (
        "Soak",
        """\
All kinds of clients ran at once while clients, brokers, databases, the network and clocks failed. Each kind recorded a
[history](histories.md), which was judged after each round. Outcomes are unknown where a client was killed, or was told that
nobody knows; recovery has settled them all, and the table says how many had committed.""",
    ),
    "histories": (
        "Histories of single tests",
        "The soak tests of one kind of client record a history, too.",
    ),
    "simulator": (
        "Simulator",
        """\
[The real code](simulator.md) of writers and recovery, in memory, under a scheduler that a seed drives. An operation is a seed:
one run with up to three writers and two recoverers.""",
    ),
    "removals": (
        "Rules taken out",
        "The simulator again, without one of the [rules](rules.md): the first seed that misses it, and what is wrong then.",
    ),
    "matrix": (
        "Versions",
        "The crash tests on other versions of brokers, databases and Python.",
    ),
}
"""Title and introduction of each kind, in the order of the page."""

HEAD: Final = """\
# Evidence

What ran, how often, against what, and what it found. Each result has the command that repeats it. `python tools/evidence.py`
writes this page from the results, which are beside it in the repository (`docs/how-it-works/evidence`); a test compares both.
"""


def results() -> list[Result]:
    """All of them, in the order of their dates."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    return sorted(found, key=lambda result: str(result.get("date", "")))


def page(found: Sequence[Result]) -> str:
    """The page of these results."""
    by_kind = {kind: [result for result in found if result["kind"] == kind] for kind in SECTIONS}
    rows = [
        {
            "": title,
            "runs": len(those),
            "operations": sum(result["operations"] for result in those),
            "faults": sum(sum(result["faults"].values()) for result in those),
            "anomalies": sum(sum(result["anomalies"].values()) for result in those),
        }
        for kind, (title, _) in SECTIONS.items()
        if (those := by_kind[kind])
    ]
    parts = [HEAD, table(rows)]
    for kind, (title, introduction) in SECTIONS.items():
        if those := by_kind[kind]:
            parts += [f"## {title}\n{introduction}\n", section(kind, those)]
    if mended := [row for result in found if result["kind"] == "found" for row in result["rows"]]:
        parts.append("## What was found, and repaired\nWhat such runs, the models and the simulator have found in dualwrite:\n")
        parts.append(table(mended))
    return "\n".join(parts)


def section(kind: str, those: Sequence[Result]) -> str:
    """The tables that the runs of a kind have, and the runs."""
    rows = [row for result in those for row in result["rows"]]
    parts = [table(by_client(rows) if kind == "soak" else rows)] if rows else []
    if kind in ("soak", "simulator"):
        parts.append(faults(those))
    return "\n".join([*parts, runs(those)])


def by_client(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The sums over all runs, by kind of client."""
    clients: dict[str, Counter[str]] = {}
    for row in rows:
        clients.setdefault(row["clients"], Counter()).update({name: row[name] for name in row if name != "clients"})
    return ({"clients": name, **numbers} for name, numbers in clients.items())


def faults(those: Iterable[Result]) -> str:
    """The sums over all runs, by kind."""
    summed = sum((Counter(result["faults"]) for result in those), Counter[str]())
    return table({"fault": kind, "times": n} for kind, n in sorted(summed.items()))


def runs(those: Iterable[Result]) -> str:
    """A line for each run."""
    lines = []
    for result in those:
        versions = ", ".join(f"{name} {' '.join(each)}" for name, each in result["versions"].items() if name != "dualwrite")
        anomalies = sum(result["anomalies"].values())
        text = (
            f"- {result['date']}, commit `{result['dualwrite']}`: `{result['command']}`. {result['operations']:,} operations, "
        )
        text += f"{sum(result['faults'].values()):,} faults, {anomalies} anomalies"
        text += f", {result['seconds']:,} s" if "seconds" in result else ""
        lines.append(f"{text}. {versions}." + (f" {result['note']}" if "note" in result else ""))
    return "\n".join(lines) + "\n"


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A table of objects, whose columns are the names in the order in which they come."""
    every = [*rows]
    columns = [*dict.fromkeys(name for row in every for name in row)]
    cells = [[*map(cell, (row.get(column, "") for column in columns))] for row in every]
    align = ["---:" if all(isinstance(row.get(column, 0), int) for row in every) else "---" for column in columns]
    return "".join(f"| {' | '.join(line)} |\n" for line in [columns, align, *cells])


def cell(value: Any) -> str:
    """A value of a table."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- taking results -------------------------------------------------------------------------------------------------------


def judged(command: str, commit: str | None, files: Sequence[Path]) -> Result:
    """The result of histories that a test has recorded."""
    found = check_history.check(files)
    operations = found["operations"]
    row = {"operations": sum(operations.values()), **operations, "unknown, committed": found["unknown"]["committed"]}
    row |= {"messages": found["messages"], "seen by consumers": found["seen"]["by consumers"]}
    anomalies = {name: each["count"] for name, each in found["anomalies"].items()}
    return {
        **of_today("histories", command, commit),
        "versions": found["versions"],
        "operations": row["operations"],
        "faults": found["faults"],
        "anomalies": anomalies,
        "seconds": found["seconds"],
        "rows": [{"test": files[0].parent.name.rpartition("-")[0], **row, "anomalies": sum(anomalies.values())}],
    }


def of_today(kind: str, command: str, commit: str | None = None) -> Result:
    """How a new result begins.

    Args:
        kind: Its kind.
        command: What repeats it.
        commit: Of dualwrite; by default that of the checkout.
    """
    if commit is None:
        asked = ["git", "rev-parse", "--short=8", "HEAD"]
        commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603  (git)
    return {"kind": kind, "date": f"{datetime.now(UTC):%Y-%m-%d}", "command": command, "dualwrite": commit}


def command_without(local: str) -> str:
    """What repeats this run of a tool, anywhere: without an option that is a matter of this machine."""
    given, kept = iter(sys.argv[1:]), list[str]()
    for each in given:
        if each == local:
            next(given, None)
        elif not each.startswith(f"{local}="):
            kept.append(each)
    return shlex.join(["python", f"tools/{Path(sys.argv[0]).name}", *kept])


def unused(kind: str, date: str) -> Path:
    """A name for a new result."""
    return next(path for n in range(1, 1000) if not (path := RESULTS / f"{kind}-{date}-{n}.json").exists())


def main() -> int:
    """Take results, and write the page."""
    parser = argparse.ArgumentParser(description="Writes the page of evidence from the results of runs.")
    parser.add_argument("--add", nargs="+", type=Path, default=[], metavar="RESULT", help="take these results first")
    parser.add_argument("--judge", metavar="COMMAND", help="judge histories, which this command has recorded")
    parser.add_argument("--commit", help="of the run that is judged, if it is not that of the checkout")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="the histories")
    options = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for path in options.add:
        result = json.loads(path.read_text(encoding="utf-8"))
        shutil.copy(path, unused(result["kind"], result["date"]))
    if options.judge:
        result = judged(options.judge, options.commit, options.files)
        unused("histories", result["date"]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(results()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
