"""The savepoints of a transaction of Django's: what was sent in one that is rolled back is not sent.

Django reports no savepoints, but it shows each statement to the wrappers of a connection (`connection.execute_wrapper`). So all
are seen: those of `atomic()`, those of `transaction.savepoint()`, which `on_commit` does not follow, and those of raw SQL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from typing import Any, Final, NamedTuple

Connection = Any
"""Django's DatabaseWrapper, which has no types."""

_STATEMENT: Final = re.compile(
    r"\s*(?:(?P<set>SAVEPOINT)|(?P<release>RELEASE(\s+SAVEPOINT)?)|ROLLBACK\s+((WORK|TRANSACTION)\s+)?TO(\s+SAVEPOINT)?)\s+"
    r"[\"`]?(?P<name>[^\"`;\s]+)",
    re.IGNORECASE,
)
_FIRST_LETTERS: Final = frozenset("SRsr \n\t")


class _Savepoint(NamedTuple):
    name: str
    number: int


class Savepoints:
    """Follows the savepoints of a connection's transaction until its end.

    Args:
        connection: Django's, in a transaction.
        forget_since: Called with a savepoint, as `now` has it, that was rolled back.
        whole: The name of an older savepoint with whose end the transaction counts as ended, if there is one.
        ended: Called then, with whether it was released.
    """

    def __init__(
        self,
        connection: Connection,
        forget_since: Callable[[Hashable], None],
        *,
        whole: str | None = None,
        ended: Callable[[bool], None] | None = None,
    ) -> None:
        self._whole = whole
        self._ended = ended
        self._connection = connection
        self._forget_since = forget_since
        self._open: list[_Savepoint] = []
        self._number = 0
        connection.execute_wrappers.insert(0, self)  # a wrapper of a `with` block is taken out as the last one

    def now(self) -> frozenset[Hashable]:
        """The savepoints that the transaction is in; None stands for those that are older than this object."""
        return frozenset([None, *self._open])

    def end(self) -> None:
        """Follow them no longer. Idempotent."""
        if self in self._connection.execute_wrappers:
            self._connection.execute_wrappers.remove(self)

    def __call__(self, execute: Callable[..., Any], sql: Any, params: Any, many: Any, context: Any) -> Any:
        """Execute a statement, and note what it does to the savepoints; see `connection.execute_wrapper`."""
        result = execute(sql, params, many, context)
        if isinstance(sql, str) and sql[:1] in _FIRST_LETTERS and (found := _STATEMENT.match(sql)) is not None:
            self._note(found)
        return result

    def _note(self, found: re.Match[str]) -> None:
        name = found["name"]
        if name == self._whole and self._ended is not None:
            self._ended(bool(found["release"]))
            return
        if found["set"]:
            self._number += 1
            self._open.append(_Savepoint(name, self._number))
            return
        at = next((i for i in reversed(range(len(self._open))) if self._open[i].name == name), None)
        if found["release"]:
            del self._open[len(self._open) if at is None else at :]
        elif at is None:
            self._open.clear()
            self._forget_since(None)
        else:
            self._forget_since(self._open[at])
            del self._open[at + 1 :]
