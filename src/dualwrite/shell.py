"""Quoting for the shell commands that an error's next step shows."""

from __future__ import annotations

import re
import shlex
from typing import Final

_NEEDS_NO_QUOTES: Final = re.compile(r"[\w@%+=:,./-][\w@%+=:,./~-]*", re.ASCII)


def shell_word(text: str) -> str:
    """Quote a text, if necessary, so that a shell reads it as one word."""
    return text if _NEEDS_NO_QUOTES.fullmatch(text) else shlex.quote(text)
