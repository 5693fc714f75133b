"""System checks: `manage.py check`, and `manage.py check --database default` for what only the database knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.core import checks
from django.db import Error, connections

from dualwrite import migration
from dualwrite.django.configuration import EXAMPLE, SETTING, aliases, configuration
from dualwrite.django.schema import current_revision
from dualwrite.errors import DualWriteError


def check_settings(**_: Any) -> Iterator[Any]:
    """The setting DUALWRITE, the databases' kinds, and ATOMIC_REQUESTS."""
    if not aliases():
        yield checks.Error(f"{SETTING} is missing, or no dictionary.", hint=f"set {EXAMPLE}", id="dualwrite.E001")
    for alias in aliases():
        if alias not in connections:
            hint = f"use one of {', '.join(connections)}"
            yield checks.Error(f"{SETTING} has {alias!r}, which DATABASES does not have.", hint=hint, id="dualwrite.E002")
            continue
        try:
            configuration(alias)
        except DualWriteError as error:
            yield checks.Error(f"{error.what} {error.cause or ''}".rstrip(), hint=error.next_step, id="dualwrite.E003")
        connection = connections[alias]
        if connection.settings_dict.get("ATOMIC_REQUESTS") and not getattr(connection, "dualwrite_joins", False):
            yield checks.Warning(
                f"ATOMIC_REQUESTS of the database {alias!r} wraps each view into a block that dualwrite can't commit.",
                hint='mark views that send with @transaction.non_atomic_requests; or use ENGINE "dualwrite.django.backends.…"',
                id="dualwrite.W001",
            )


def check_databases(databases: Sequence[str] | None = None, **_: Any) -> Iterator[Any]:
    """The revision of the tables. `migrate` runs this check first, so it must not be an error."""
    newest = migration.newest()
    for alias in databases or ():
        if alias not in aliases() or alias not in connections:
            continue
        hint = f"manage.py migrate dualwrite --database {alias}"
        try:
            found = current_revision(connections[alias])
        except Error as error:
            yield checks.Error(f"The database {alias!r} does not answer: {error}", id="dualwrite.E004")
            continue
        if found != newest:
            what = (
                "has no tables of dualwrite" if found is None else f"has dualwrite's tables of revision {found}, not {newest}"
            )
            yield checks.Warning(f"The database {alias!r} {what}.", hint=hint, id="dualwrite.W002")
