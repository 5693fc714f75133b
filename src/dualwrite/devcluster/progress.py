"""Reports progress while a cluster is prepared: silently, or on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from types import TracebackType


class ClusterProgress(Protocol):
    """Receives the steps of preparing and starting a cluster."""

    def step(self, description: str, *, total: int | None = None) -> None:
        """A new step begins; the previous one has ended.

        Args:
            description: The step's text, as shown to the user.
            total: How many units the step has; None if unknown.
        """

    def advance(self, amount: float) -> None:
        """`amount` more units of the current step are done (parts of a unit count as fractions)."""


class SilentProgress:
    """Prints nothing; the default of the library."""

    def step(self, description: str, *, total: int | None = None) -> None:
        """Do nothing."""

    def advance(self, amount: float) -> None:
        """Do nothing."""


class TerminalProgress:
    """One live line on standard error, with a bar if the step has a total; nothing if it is not a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def step(self, description: str, *, total: int | None = None) -> None:
        """Show the new step, with a bar when `total` is known."""
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task(description, total=total)

    def advance(self, amount: float) -> None:
        """Move the bar."""
        self._bar.advance(self._task, amount)
