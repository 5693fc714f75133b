"""`dualwrite watch`: `dualwrite stuck`, live in the terminal.

Exit codes: 0 the user quit, 2 usage error, no terminal, or Kafka can't be reached at the start.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Self

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dualwrite.admin import StuckSearch
from dualwrite.cli.options import decisions_for, grouped, refuse
from dualwrite.cli.stuck import ORDERS, UNREAD, Where, stuck_table
from dualwrite.cli.tool_options import ClusterAndDatabase, ToolGroup
from dualwrite.diagnosis.stuck import Look, look
from dualwrite.errors import DualWriteError
from dualwrite.texts import counted, now_ms, printable

try:
    import termios
    import tty
except ImportError:  # Windows
    termios = tty = None  # type: ignore[assignment]

_REDRAW: Final = 0.25
_WIDE: Final = 140
_HELP: Final = "s: sort by the next column   r: reverse   q: quit"
_TERM: Final = signal.SIGTERM
_STOP: Final = getattr(signal, "SIGTSTP", None)  # not on Windows
_TERMINATED: Final = 143
_MAX_PROBLEMS: Final = 3
_MAX_ROW_HEIGHT: Final = 8  # lines; an estimate for how many rows to leave out

app = typer.Typer(cls=ToolGroup)


@contextmanager
def pressed_keys() -> Iterator[Callable[[float], str | None]]:
    """Yield a function that waits some seconds for a key; it returns None if no key was pressed, and `q` at the end of input.

    Ctrl-C still interrupts.
    """
    if termios is None:
        refuse("On this platform single keys can't be read from the terminal. Use `dualwrite stuck` instead.")
    descriptor = sys.stdin.fileno()

    def next_key(seconds: float) -> str | None:
        if not select.select([descriptor], [], [], seconds)[0]:
            return None
        read = os.read(descriptor, 1)
        return read.decode("latin-1") if read else "q"

    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield next_key
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@app.callback(invoke_without_command=True)
@grouped
def watch(
    *,
    where: Where,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="The refresh interval in seconds.")] = 2.0,
    sort: Annotated[str, typer.Option("--sort", help=f"The initial order: {', '.join(ORDERS)}.")] = next(iter(ORDERS)),
    cluster: ClusterAndDatabase,
) -> None:
    """Show what `dualwrite stuck` shows, live, until `q` or Ctrl-C.

    `s` sorts by the next column, `r` reverses the order. If Kafka stops responding, the last result stays, with the reason.
    """
    if sort not in ORDERS:
        raise typer.BadParameter(f"sort by one of {', '.join(ORDERS)}.", param_hint="--sort")
    console = Console()
    if not (console.is_terminal and sys.stdin.isatty()):
        refuse("`dualwrite watch` needs a terminal. In a program, use `dualwrite stuck --json`.")
    settings = cluster.settings()
    asked: dict[str, Any] = {"topic": where.topic, "group": where.group, "longer_than": where.longer}
    with ExitStack() as opened:
        admin = opened.enter_context(cluster.admin())
        decisions = None if settings.database_url is None else opened.enter_context(decisions_for(settings))

        def look_once() -> _Seen:
            if decisions is None:
                return _Seen(look(admin, None, **asked), time.time())
            decisions.try_again()
            return _Seen(look(admin, lambda: decisions, **asked), time.time())

        poller = _Poller(look_once, interval)
        try:
            _Screen(console, poller, sort).run()
        finally:
            if poller.is_busy:
                poller.own(opened.pop_all())


@dataclass(frozen=True)
class _Seen:
    """The latest result, when it was found (as `time.time`), and the error of the last search, if it failed."""

    look: Look
    at: float
    error: Exception | None = None


class _Poller:
    """Repeats the search in its own thread, so that the screen responds to keys in the meantime."""

    def __init__(self, look: Callable[[], _Seen], interval: float) -> None:
        self._look = look
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dualwrite watch", daemon=True)
        self._owned: ExitStack | None = None
        self.seen = look()

    @property
    def is_busy(self) -> bool:
        """Whether the thread is still waiting for a response; it ends with the process."""
        return self._thread.is_alive()

    def own(self, opened: ExitStack) -> None:
        """Keep the connections that the thread is using: no other thread may close them."""
        self._owned = opened

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self.seen = self._look()
            except Exception as error:  # noqa: BLE001  (after any error, the screen must show that it is not up to date)
                last = self.seen
                self.seen = replace(last, error=error)


class _Screen:
    """Draws the result, and handles the keys."""

    def __init__(self, console: Console, poller: _Poller, order: str) -> None:
        self._console = console
        self._poller = poller
        self._order = order
        self._backwards = False

    def run(self) -> None:
        with self._poller, _signals() as sent:
            while self._until_stopped(sent):
                sent.discard(_STOP)
                os.kill(os.getpid(), signal.SIGSTOP)  # the terminal is restored; continues here after SIGCONT
            if _TERM in sent:
                raise SystemExit(_TERMINATED)

    def _until_stopped(self, sent: set[int]) -> bool:
        """Draw until the user quits or suspends the process; return whether the process is to be suspended."""
        with (
            pressed_keys() as next_key,
            Live(self._drawn(), console=self._console, screen=True, auto_refresh=False) as live,
        ):
            while not sent and (key := next_key(_REDRAW)) != "q":
                self._handle_key(key)
                live.update(self._drawn(), refresh=True)
        return sent == {_STOP}

    def _handle_key(self, key: str | None) -> None:
        if key == "s":
            orders = list(ORDERS)
            self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        elif key == "r":
            self._backwards = not self._backwards

    def _drawn(self) -> Any:
        seen = self._poller.seen
        found = seen.look.found
        clock = time.strftime("%H:%M:%S", time.localtime(seen.at))
        head = f"{counted(len(found.partitions), 'partition')} of {found.searched} stuck   {clock}   by {self._order}"
        lines: list[Any] = [Text(head, style="bold"), Text(_HELP, style="dim")]
        if seen.error is not None:
            kind = "" if isinstance(seen.error, DualWriteError) else f"{type(seen.error).__name__}: "
            lines.append(_red(f"No newer result: {kind}{seen.error}"))
        unread = seen.look.unread
        lines += [_red(f"{UNREAD}: {unread}")] if unread is not None else []
        lines += [_red(f"Incomplete: {problem}") for problem in _missing(found)]
        if not found.partitions:
            return Group(*lines)
        return Group(*self._with_rows(lines, seen.look))

    def _with_rows(self, lines: list[Any], seen: Look) -> list[Any]:
        """The lines, as many rows of the table as fit on the screen, and the number of rows that don't."""
        shown = total = len(seen.found.partitions)
        while True:
            table = stuck_table(
                seen.records(now_ms()),
                order=self._order,
                backwards=self._backwards,
                every_group=False,
                wide=self._console.width >= _WIDE,
                width=self._console.width,
                rows=shown,
            )
            more = [] if shown == total else [Text(f"{total - shown} more", style="bold")]
            drawn = [*lines, Text(""), table, *more]
            excess = len(self._console.render_lines(Group(*drawn), pad=False)) - self._console.height
            if excess <= 0 or shown == 0:
                return drawn
            shown = max(shown - max(excess // _MAX_ROW_HEIGHT, 1), 0)


def _red(text: str) -> Text:
    return Text(printable(text), style="red")


def _missing(found: StuckSearch) -> list[str]:
    """The first problems that make the result incomplete, and how many more there are."""
    problems = [str(problem) for problem in found.problems if not problem.covered]
    problems += [str(one.problem) for one in found.unreadable]
    problems += [str(error) for error in found.hidden]
    more = len(problems) - _MAX_PROBLEMS
    return [*problems[:_MAX_PROBLEMS], *([f"{more} more: see `dualwrite stuck`"] if more > 0 else [])]


@contextmanager
def _signals() -> Iterator[set[int]]:
    """Collect Ctrl-C, SIGTERM and Ctrl-Z in a set instead of acting on them, so that the terminal is restored first."""
    sent: set[int] = set()
    numbers = [number for number in (signal.SIGINT, _TERM, _STOP) if number is not None]
    before = {number: signal.signal(number, lambda got, _: sent.add(got)) for number in numbers}
    try:
        yield sent
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
