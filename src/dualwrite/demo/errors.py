"""The errors of the demo itself, as opposed to its findings."""

from __future__ import annotations

from dualwrite.errors import DualWriteError


class DemoError(DualWriteError):
    """The demo can't continue: a worker does not start, or there is no progress. Attributes: `log_file`, if there is one."""


class StalePositionError(DualWriteError):
    """A worker's position in the database has changed since the worker read it; nothing was written."""
