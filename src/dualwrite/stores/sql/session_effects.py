"""What the statements of units leave behind in a session, with the functions, procedures and triggers that they call.

The database is asked for a text that is new, once: which of its names are functions, or tables with triggers, and what these
contain. All of it is forgotten after a minute, since a migration may have replaced a function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from dualwrite.stores.sql.session_text import Effect, Examined, any_is_false, examined, examined_body

_REMEMBERED: Final = 60.0
"""Seconds."""
_MOST_TEXTS: Final = 10_000
_LONGEST: Final = 4_000
"""Characters of a text that is remembered: longer ones have values in them, and come once."""
_DEFINING: Final = frozenset(("create", "alter", "drop"))


class Routine(NamedTuple):
    """A function, a procedure or a trigger of the database.

    Args:
        source: Its body; None if the database does not show it.
        language: The language of the body.
    """

    source: str | None
    language: str


Routines = Callable[[frozenset[str]], Iterable[Routine] | None]
"""Returns the routines with these names, in lower case, and those that triggers of tables with these names call.

None: the database can't be asked now, because an earlier statement has failed; so will the next one, unless it rolls back.
"""


class SessionEffects:
    """The effects of one database's statements. Threads may share it: a lost update costs a query.

    Args:
        family: See `examined`.
    """

    def __init__(self, family: str) -> None:
        self._family = family
        self._until = 0.0
        self._texts: dict[str, Examined] = {}
        self._harmless: set[str] = set()  # those of `_texts` that leave nothing behind, whatever their parameters are
        self._known: set[str] = set()  # names that were asked for, and lead to nothing that leaves anything behind

    def is_harmless(self, sql: str) -> bool:
        """Whether `of` has found, in this minute, that a statement leaves nothing behind, whatever its parameters are."""
        return sql in self._harmless and time.monotonic() < self._until

    def of(self, sql: str, parameters: Any, routines: Routines) -> Effect:
        """The effect of a statement.

        Args:
            sql: Its text.
            parameters: Its parameters, in any form.
            routines: Asks the database.
        """
        now = time.monotonic()
        if now > self._until or len(self._texts) > _MOST_TEXTS:
            self._texts, self._harmless, self._known, self._until = {}, set(), set(), now + _REMEMBERED
        found = self._texts.get(sql)
        if found is None:
            own = examined(sql, self._family)
            found = self._with_routines(own, routines)
            if found is None:
                return own.effect
            if len(sql) <= _LONGEST:
                self._texts[sql] = found
                if found.if_false is Effect.NONE:  # it is never less than the effect
                    self._harmless.add(sql)
            if found.names & _DEFINING:
                self._until = 0.0  # before the next statement, which may call what this one defines
        if found.effect is found.if_false:
            return found.effect
        return found.if_false if any_is_false(parameters) else found.effect

    def _with_routines(self, found: Examined, routines: Routines) -> Examined | None:
        """With the effects of what is called, as far as the calls go; None if the database can't be asked."""
        called, asked = Effect.NONE, set(found.names)
        names = found.names - self._known
        while names and max(called, found.effect) is not Effect.SESSION:
            answer = routines(frozenset(names))
            if answer is None:
                return None
            bodies = [examined_body(source, language, self._family) for source, language in answer]
            called = max([called, *(body.effect for body in bodies)])
            names = frozenset().union(*(body.names for body in bodies)) - asked - self._known
            asked |= names
        if called is Effect.NONE and not names:  # otherwise one of them leaves something behind, or was not asked for
            self._known |= asked
        effect = max(called, found.effect)
        return Examined(effect, found.names, max(effect, found.if_false))
