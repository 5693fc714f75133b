"""Watches what the user's statements leave behind for those who use the transaction, or its connection, afterwards."""

from __future__ import annotations

from typing import Any, Final

from dualwrite.stores.sql.session_effects import Routines, SessionEffects
from dualwrite.stores.sql.session_text import Effect
from dualwrite.stores.transaction import RunAloneError

_LONGEST: Final = 80


class Watch:
    """Watches one transaction; see `StoreTransaction.watch`.

    Args:
        effects: Of the store.
        routines: Asks the database, on the transaction's connection.

    Attributes:
        is_harmless: See `SessionEffects`: such a statement need not be seen.
        shares: Whether others use the transaction too.
        refused: What the current unit was about to do when it was refused.
        has_changed_session: Whether something was left behind in the session.
    """

    __slots__ = ("_effects", "_routines", "has_changed_session", "is_harmless", "refused", "shares")

    def __init__(self, effects: SessionEffects, routines: Routines) -> None:
        self._effects = effects
        self._routines = routines
        self.is_harmless = effects.is_harmless
        self.shares = False
        self.refused: str | None = None
        self.has_changed_session = False

    def see(self, sql: str, parameters: Any) -> None:
        """Called before each statement.

        Raises:
            RunAloneError: It would leave something behind, and others share the transaction. It must not be executed.
        """
        effect = self._effects.of(sql, parameters, self._routines)
        if effect is not Effect.NONE:
            self._seen(" ".join(sql.split())[:_LONGEST], changes_session=effect is Effect.SESSION)

    def see_driver(self, call: str) -> None:
        """Called before something whose statements are not seen, such as the driver's own connection.

        Raises: as for `see`.
        """
        self._seen(call, changes_session=True)

    def see_past(self, call: str) -> None:
        """Called after something whose statements were not seen. The unit is undone, and the connection replaced.

        Raises: as for `see`.
        """
        self.has_changed_session = True
        self._seen(call, changes_session=True)

    def see_cursor(self, call: str) -> None:
        """Called before a cursor with a name is opened, which ends with the transaction.

        Raises: as for `see`.
        """
        self._seen(call, changes_session=False)

    def _seen(self, what: str, *, changes_session: bool) -> None:
        if self.shares:
            self.refused = what
            raise RunAloneError(what)
        self.has_changed_session |= changes_session
