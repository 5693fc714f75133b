"""Texts of other programs as a terminal may show them: an id that a client chose must not erase a row, or forge a line."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with each character that is not printable, such as a newline or ESC, as its escape sequence (`\n`, `\x1b`)."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


def printable_lines(text: str) -> str:
    """The same for a text that may have several lines, such as a database's error message."""
    return "\n".join(printable(line.expandtabs()) for line in text.split("\n"))
