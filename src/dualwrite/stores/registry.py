"""From a URL to the store behind it; each backend is imported only when its URL asks for it."""

from __future__ import annotations

from dualwrite.errors import ConfigurationError
from dualwrite.stores.base import TxnStateStore


def store_from_url(url: str) -> TxnStateStore:
    """The store for a URL, with connections of its own. Nothing connects yet.

    Args:
        url: `postgresql+psycopg://user@host/database` (`postgresql://` means the same) or `sqlite:////path/to/file.db`.

    Raises:
        ConfigurationError: There is no store for it, or it can't be read.
        MissingDependencyError: The backend's package is not installed.
    """
    scheme, separator, _ = url.partition("://")
    backend = scheme.partition("+")[0].lower()
    if separator and backend in ("postgresql", "sqlite"):
        from dualwrite.stores.sql import SqlStateStore  # noqa: PLC0415  (one backend, one import)

        return SqlStateStore.from_url(url)
    raise ConfigurationError(
        f"There is no store for a URL that begins with {scheme!r}." if separator else "The database's address is no URL.",
        next_step="postgresql+psycopg://user@host/database or sqlite:////path/to/file.db",
    )
