"""Which declared settings are in force in one transaction of PostgreSQL, and what changes them. No I/O.

A setting has its value until the transaction ends. For a unit that does not declare it, it gets back the value that it had when
the transaction began. The server keeps that one, too, in a setting of ours: nobody has to wait for an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

_BEFORE: Final = "dualwrite.before."
"""Together with the name of a setting: what keeps its earlier value."""
_REMEMBERED_SECONDS: Final = 1.0

InForce = Mapping[str, str | None]
"""The declared value of each setting; None: the value from before the transaction. Other settings were never changed."""


class Change(NamedTuple):
    """One SELECT that changes settings, with `%s` for each of its values, and what is in force after it."""

    statement: str
    values: list[str]
    then: InForce


def change(in_force: InForce, wanted: Mapping[str, str]) -> Change | None:
    """What gives all settings the value that they have for a unit which declares `wanted`; None: they have it."""
    columns, values, then = [], [], dict(in_force)
    for name in {**in_force, **wanted}:
        value = wanted.get(name)
        if name in in_force and in_force[name] == value:
            continue
        then[name] = value
        if value is None:
            columns.append(f"pg_catalog.set_config('{name}', pg_catalog.current_setting('{_BEFORE}{name}'), true)")
            continue
        values.append(value)
        column = f"pg_catalog.set_config('{name}', %s, true)"
        if name not in in_force:  # CASE has an order
            before = f"COALESCE(pg_catalog.current_setting('{name}', true), '')"
            column = f"CASE WHEN pg_catalog.set_config('{_BEFORE}{name}', {before}, true) IS NOT NULL THEN {column} END"
        columns.append(column)
    return Change(f"SELECT {', '.join(columns)}", values, then) if columns else None


class DeferredTriggers:
    """Whether the database has triggers that may run at COMMIT: there, they would read the settings of the last unit.

    The answer is remembered for a second. Threads may share it: a lost update costs a query.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._exist = False

    def exist(self, ask: Callable[[], bool]) -> bool:
        """Whether there are some; `ask` asks the database."""
        if time.monotonic() >= self._until:
            asked_at = time.monotonic()
            self._exist = ask()
            self._until = asked_at + _REMEMBERED_SECONDS
        return self._exist
