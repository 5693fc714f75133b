"""The errors behind an error."""

from __future__ import annotations

from collections.abc import Iterator


def causes_of(error: BaseException, *, before: BaseException | None = None) -> Iterator[BaseException]:
    """What an error was raised from, or else while handling it; then what is behind that, and so on, as a traceback shows it.

    Args:
        error: The error.
        before: What `sys.exception()` returned before the work began that raised the error. Python makes it the context of
            every error of the work, and it says nothing about them: neither it nor what is behind it is returned.
    """
    seen = {id(error), id(before)}
    while (found := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        if id(found) in seen:
            return
        seen.add(id(found))
        yield found
        error = found
