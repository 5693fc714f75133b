"""What the user sees: the progress of a run, and its figures at the end."""

from __future__ import annotations

import time
from typing import Final

from rich.console import Console
from rich.table import Table

from dualwrite.demo.supervisor import Tally
from dualwrite.demo.verdict import BAD_OUTCOMES, EXAMPLES, DemoVerdict

_LINE_INTERVAL: Final = 5.0


class Screen:
    """Shows a run: a line every few seconds.

    Args:
        console: Where to.
        quiet: Show only what stays behind, as for a script that reads the verdict.
    """

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._next_line = time.monotonic() + _LINE_INTERVAL

    def say(self, line: str) -> None:
        """Print a line."""
        if not self._quiet:
            self.remind(line)

    def remind(self, line: str) -> None:
        """Print a line about something that stays behind, and that the user must remove."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, tally: Tally, transactions: int) -> None:
        """Show the progress; called often."""
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_INTERVAL
            self.say(f"{tally.transactions:,} of {transactions:,} flights, {_summary(tally)}")


def _summary(tally: Tally) -> str:
    text = f"{tally.kills} killed"
    if tally.outcomes:  # a pool recovers in the background and does not report it
        text += f", {sum(number for name, number in tally.outcomes.items() if name != 'NOTHING')} recovered"
    return text + (f", {len(tally.errors)} ERRORS" if tally.errors else "")


def show_verdict(console: Console, verdict: DemoVerdict) -> None:
    """Print the table and the verdict."""
    tally, findings = verdict.tally, verdict.findings.counts()
    p50, p99 = verdict.milliseconds
    table = Table("", "", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.columns[1].justify = "right"

    def row(name: str, value: object, *, bad: bool = False) -> None:
        table.add_row(name, f"[bold red]{value}[/]" if bad else str(value))

    what = "flight" if verdict.options.pool else "transaction"
    row(f"{what}s", f"{tally.transactions:,}")
    row("departures in the database", f"{verdict.rows:,}")
    row("messages visible to consumers", f"{verdict.messages:,}")
    row("cancelled flights (no message)", f"{tally.transactions - verdict.rows:,}")
    row("kills (SIGKILL)", f"{tally.kills:,}", bad=tally.kills != verdict.options.kills)
    recovers_at_start = not (verdict.options.naive or verdict.options.pool)
    row("  during recovery" if recovers_at_start else "  during startup", f"{tally.kills_while_opening:,}")
    for name, number in sorted(tally.outcomes.items()):
        when = "recoveries" if recovers_at_start else "recovered at the end"
        row(f"{when}: {name}", f"{number:,}", bad=name in BAD_OUTCOMES)
    for name, number in findings.items():
        row(name.replace("_", " "), f"{number:,}", bad=number > 0)
    if verdict.unresolved:
        row("ids left to recover", ", ".join(verdict.unresolved), bad=True)
    row(f"{what}s per second", f"{verdict.per_second:,.0f}")
    if verdict.options.pool:
        row("flights per commit", f"{verdict.flights_per_commit:.1f}")
    row(f"p50, p99 of a {what}", f"{p50:.1f} ms, {p99:.1f} ms")
    row("slowest start with recovery" if recovers_at_start else "slowest start", f"{max(tally.openings, default=0):.2f} s")
    console.print(table)
    for name, number in findings.items():
        if number:
            some = ", ".join(str(each) for each in getattr(verdict.findings, name)[:EXAMPLES])
            console.print(f"{name.replace('_', ' ')}: {some}{' …' if number > EXAMPLES else ''}", highlight=False)
    for error in tally.errors[:EXAMPLES]:
        console.print(f"a worker failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    style = "green" if verdict.all_agree else "yellow" if verdict.options.naive else "bold red"
    console.print(verdict.summary(), style=style, highlight=False, soft_wrap=True)
