"""`dualwrite watch`: `dualwrite stuck`, live in the terminal.

Exit codes: 0 the user left, 2 usage error, no terminal, or Kafka can't be reached at the start.
"""

from __future__ import annotations

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

from dualwrite.cli.decided import Decisions
from dualwrite.cli.keys import pressed_keys
from dualwrite.cli.options import KafkaSettings, Schema, Url, counted, refuse, settings_for
from dualwrite.cli.stuck import LONGER, UNREAD, Longer, Look, Topic, look
from dualwrite.cli.stuck import Group as GroupOption
from dualwrite.cli.stuck_view import ORDERS, stuck_table
from dualwrite.cli.tool_group import ToolGroup
from dualwrite.cli.transactions_common import TIMEOUT, Kafka, Timeout, admin_tools, now_ms
from dualwrite.errors import DualWriteError

_REDRAW: Final = 0.25
_HELP: Final = "s: sort by the next column   r: reverse   q: quit"
_TERMINATED: Final = 143

app = typer.Typer(cls=ToolGroup)


@dataclass(frozen=True)
class _Seen:
    """The latest answer.

    Args:
        look: What is stuck.
        at: When it was found, as `time.time`.
        error: Why there is no newer one, if so.
    """

    look: Look
    at: float
    error: DualWriteError | None = None


@app.callback(invoke_without_command=True)
def watch(
    *,
    topic: Topic = None,
    group: GroupOption = None,
    longer: Longer = LONGER,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 2.0,
    sort: Annotated[str, typer.Option("--sort", help=f"The first order: {', '.join(ORDERS)}.")] = next(iter(ORDERS)),
    url: Url = None,
    schema: Schema = None,
    kafka: Kafka = None,
    kafka_config: KafkaSettings = None,
    timeout: Timeout = TIMEOUT,
) -> None:
    """Show what `dualwrite stuck` shows, again and again, until `q` or Ctrl-C.

    `s` sorts by the next column, `r` reverses the order. If Kafka stops answering, the last answer stays, with the reason.
    """
    if sort not in ORDERS:
        raise typer.BadParameter(f"sort by one of {', '.join(ORDERS)}.", param_hint="--sort")
    console = Console()
    if not (console.is_terminal and sys.stdin.isatty()):
        refuse("`dualwrite watch` needs a terminal. For a program there is `dualwrite stuck --json`.")
    settings = settings_for(url, kafka, kafka_config, schema)
    with ExitStack() as opened:
        admin = opened.enter_context(admin_tools(kafka, kafka_config, timeout))
        decisions = None if settings.database_url is None else opened.enter_context(Decisions(settings))

        def look_once() -> _Seen:
            if decisions is not None:
                decisions.try_again()
            asked = None if decisions is None else lambda: decisions
            return _Seen(look(admin, asked, topic=topic, group=group, longer_than=longer), time.time())

        with _ended_by_signal():
            _Screen(console, _Looking(look_once, interval), sort).run()


class _Looking:
    """Looks again and again, in a thread of its own, so that keys are answered meanwhile."""

    def __init__(self, look: Callable[[], _Seen], interval: float) -> None:
        self._look = look
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dualwrite watch", daemon=True)
        self.seen = look()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(1.0)  # a request that is not answered ends with the process

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            try:
                self.seen = self._look()
            except DualWriteError as error:
                last = self.seen
                self.seen = replace(last, error=error)


class _Screen:
    """What is drawn, and the keys that change it."""

    def __init__(self, console: Console, looking: _Looking, order: str) -> None:
        self._console = console
        self._looking = looking
        self._order = order
        self._backwards = False

    def run(self) -> None:
        with (
            self._looking,
            pressed_keys() as next_key,
            Live(self._drawn(), console=self._console, screen=True, auto_refresh=False) as live,
        ):
            while (key := next_key(_REDRAW)) != "q":
                self._take(key)
                live.update(self._drawn(), refresh=True)

    def _take(self, key: str | None) -> None:
        if key == "s":
            orders = list(ORDERS)
            self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        elif key == "r":
            self._backwards = not self._backwards

    def _drawn(self) -> Any:
        seen = self._looking.seen
        found = seen.look.found
        head = f"{counted(len(found.partitions), 'partition')} of {found.searched} stuck   {_clock(seen.at)}   by {self._order}"
        lines: list[Any] = [Text(head, style="bold"), Text(_HELP, style="dim")]
        lines += [Text(f"No newer answer: {seen.error}", style="red")] if seen.error is not None else []
        unread = seen.look.unread
        lines += [Text(f"{UNREAD}: {unread}", style="red")] if unread is not None else []
        lines += [Text(f"Not complete: {problem}", style="red") for problem in found.problems if not problem.covered]
        lines += [Text(f"Something may be missing: {error}", style="red") for error in found.hidden]
        if found.partitions:
            table = stuck_table(
                found,
                seen.look.decided,
                now_ms(),
                order=self._order,
                backwards=self._backwards,
                every_group=False,
                width=self._console.width,
            )
            lines += [Text(""), table]
        return Group(*lines)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Ctrl-C ends the command as `q` does; SIGTERM ends it too, and the terminal is restored."""

    def terminated(*_: object) -> None:
        raise SystemExit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, before)
