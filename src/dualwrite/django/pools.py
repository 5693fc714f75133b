"""The pools: one for each alias and process, made when it is first needed, and closed at the end of the process."""

from __future__ import annotations

import threading
from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections

from dualwrite import process
from dualwrite.api import create_pool
from dualwrite.django.configuration import SETTING, configuration
from dualwrite.pool.pool import WriterPool

_made: dict[tuple[int, str], tuple[Any, WriterPool[Any]]] = {}
"""By process and alias, with what they were made for: the setting, and the name of the database.

Those of a parent stay: if they were collected, its connections would be closed.
"""

_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock  # noqa: PLW0603  (a thread of the parent may have it)
    _lock = threading.Lock()


process.call_in_child(_renew_lock)


def pool(using: str | None = None) -> WriterPool[Any]:
    """The pool of a database, which is made if this process has none yet.

    It is made for the database that the alias means now: tests give it another one.

    Args:
        using: The alias; None: `default`.

    Raises:
        ConfigurationError: The setting DUALWRITE has no valid entry for it.
        DualWriteError: As for `create_pool`.
    """
    alias = DEFAULT_DB_ALIAS if using is None else using
    made_for = (getattr(settings, SETTING, None), connections.settings.get(alias, {}).get("NAME"))
    key = (process.pid, alias)
    with _lock:
        before, made = _made.get(key, (None, None))
        if made is not None:
            if before == made_for and not made.is_closed:
                return made
            made.close()
        chosen = configuration(alias)
        made = create_pool(
            chosen.url, prefix=chosen.prefix, settings=chosen.settings, options=chosen.options, **chosen.arguments
        )
        _made[key] = made_for, made
        return made


def close_pools(using: str | None = None) -> None:
    """Close the pools of this process, or that of one alias; the next block makes a new one.

    The end of the process does it by itself. Call it before a test database is dropped.

    Raises:
        DualWriteError: As for `WriterPool.close`.
    """
    with _lock:
        for key in [each for each in _made if each[0] == process.pid and using in (None, each[1])]:
            _, made = _made.pop(key)
            made.close()
