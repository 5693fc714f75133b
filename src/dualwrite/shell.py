"""Quoting for the shell commands that an error's next step shows."""

from __future__ import annotations

import re
import shlex
from typing import Final

_NEEDS_NO_QUOTES: Final = re.compile(r"[\w@%+=:,./-][\w@%+=:,./~-]*", re.ASCII)


def shell_word(text: str) -> str:
    """Quote a text, if necessary, so that a shell reads it as one word.

    What is not printable is escaped, as bash, ksh and zsh read it, so that the command can be shown, and pasted.
    """
    if _NEEDS_NO_QUOTES.fullmatch(text):
        return text
    return shlex.quote(text) if text.isprintable() else f"$'{''.join(map(_escaped, text))}'"


def _escaped(each: str) -> str:
    if each in "\\'":
        return f"\\{each}"
    return each if each.isprintable() else f"\\U{ord(each):08x}"
