"""The settings that a pool's units declare, such as their tenant: those of the pool's function and of the call, checked."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Final

from dualwrite.errors import ConfigurationError, UsageError
from dualwrite.stores.base import TxnStateStore

Local = Mapping[str, str]
"""Settings with their values, by name."""

NONE: Final[Local] = {}
_PART: Final = "[A-Za-z_][A-Za-z0-9_$]*"
_NAME: Final = re.compile(rf"{_PART}(?:\.{_PART})+")
_OURS: Final = "dualwrite."
_MAX_NAMES: Final = 1_000


def check_function(local: object) -> None:
    """Check the option `local` of a pool.

    Raises:
        ConfigurationError: It is not a function.
    """
    if local is not None and not callable(local):
        raise ConfigurationError(
            f"local must be a function that returns the settings of a call, not {type(local).__name__}.",
            next_step="PoolOptions(local=lambda: {'app.tenant': tenant.get()}); for one call, pool.with_options(local={…})",
        )


class Declared:
    """What the units of one pool may declare.

    Args:
        store: Of the pool.
        of_pool: The option `local` of the pool.

    Raises:
        ConfigurationError: There is a function, and the database has no such settings.
    """

    def __init__(self, store: TxnStateStore, of_pool: Callable[[], Local] | None) -> None:
        self._store = store
        self._of_pool = of_pool
        if of_pool is not None and (refusal := self._refusal()) is not None:
            raise ConfigurationError(refusal, next_step=_WITHOUT)

    def checked(self, local: Local | None) -> Local:
        """The settings of a call, by their names in lower case, as PostgreSQL reads them; None: there are none.

        Raises:
            UsageError: The database has no such settings, or a name or a value is not valid.
        """
        if not local:
            return NONE
        if (refusal := self._refusal()) is not None:
            raise UsageError(refusal, next_step=_WITHOUT)
        if not isinstance(local, Mapping):
            raise UsageError(
                f"The settings of a call are a {type(local).__name__}.", next_step="give a mapping: {'app.tenant': tenant}"
            )
        found = {_name(name): _value(name, value) for name, value in local.items()}
        if len(found) < len(local):
            raise UsageError(f"A setting is there twice, in different case: {', '.join(local)}.", next_step="give it one value")
        return found

    def of_call(self, own: Local) -> Local:
        """The settings of a call that is made now: those of the pool's function, and over them the call's own.

        Raises:
            UsageError: As for `checked`.
            Exception: What the function raises.
        """
        if self._of_pool is None:
            return own
        return {**self.checked(self._of_pool()), **own}

    def _refusal(self) -> str | None:
        if self._store.has_local_settings:
            return None
        return f"Settings can't be declared for {self._store.description}: only PostgreSQL has settings of the application."


def local_on_connection() -> UsageError:
    """The error for settings of a transaction on the user's connection."""
    return UsageError(
        "Settings can't be declared for a transaction on a connection of yours.",
        next_step="execute SELECT set_config('app.tenant', …, true) in the block: it shares the connection with nobody",
    )


_WITHOUT: Final = "leave out `local`, and pass what the units need as their arguments"


@functools.lru_cache(maxsize=_MAX_NAMES)
def _name(name: object) -> str:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} can't be declared as a setting.",
            cause="its name is not one of the application's own, which have a dot in them",
            next_step="declare one like app.tenant; a unit that sets another one, such as search_path, itself runs alone",
        )
    if name.lower().startswith(_OURS):
        raise UsageError(f"The setting {name} is dualwrite's own.", next_step="use another name, such as app.tenant")
    return name.lower()


def _value(name: str, value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        what = "contains a NUL character" if isinstance(value, str) else f"is a {type(value).__name__}"
        raise UsageError(f"The value of the setting {name} {what}.", next_step="give a str, such as str(tenant_id)")
    return value
