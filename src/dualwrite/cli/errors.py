"""The text of an error, as commands print it."""

from __future__ import annotations

from dualwrite.cli.printable import printable_lines
from dualwrite.errors import DualWriteError


def error_text(error: DualWriteError) -> str:
    """The error with its cause and next step, on lines of their own."""
    subject = f" [transactional id {error.transactional_id!r}]" if error.transactional_id is not None else ""
    lines = [f"Error: {error.what.rstrip()}{subject}"]
    if error.cause:
        lines.append(f"Cause: {error.cause}")
    if error.next_step:
        lines.append(f"Next step: {error.next_step}")
    return printable_lines("\n".join(lines))
