"""What can go wrong with the demo itself, as opposed to what it finds."""

from __future__ import annotations

from dualwrite.errors import DualWriteError


class DemoError(DualWriteError):
    """The demo could not go on: a worker does not start, or nothing moves. Attributes: `log_file` where there is one."""
