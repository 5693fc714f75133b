"""Opens `dualwrite.admin.decisions` with the settings of the command line."""

from __future__ import annotations

from dualwrite.admin.decisions import Decided
from dualwrite.admin.decisions import Decisions as StoredDecisions
from dualwrite.api import open_recoverer
from dualwrite.cli.options import store_for
from dualwrite.settings import Settings

__all__ = ["Decided", "Decisions"]


class Decisions(StoredDecisions):
    """Looks up ids in the database that the settings name. Use it in a `with` statement, which closes the connections.

    Args:
        settings: The database and Kafka.
    """

    def __init__(self, settings: Settings) -> None:
        store = store_for(settings)
        super().__init__(store, open_recoverer(store, settings=settings))
