"""Deleting staged rows by their keys. Needs no Arrow: recovery by hand does it, too."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Final

from sqlalchemy import Connection, and_, column, delete, inspect, or_, table

from dualwrite.jobs.table_names import split_name

ID_COLUMN: Final = "dualwrite_id"
FENCE_COLUMN: Final = "dualwrite_fence"
_KEYS_A_STATEMENT: Final = 100


class StagedRows:
    """A staging table of which only the name is known.

    Args:
        name: As `quoted_name` writes it; it stands in the job's row.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def delete(self, connection: Connection, up_to: Mapping[str, int]) -> int:
        """Delete what was staged under these ids and any fence up to the given one; how many rows there were.

        A table that is not there any more holds nothing.
        """
        if not self._name:  # of a run that no task has opened
            return 0
        schema, name = split_name(self._name, connection.dialect.name)
        if not inspect(connection).has_table(name, schema=schema):
            return 0
        staged = table(name, column(ID_COLUMN), column(FENCE_COLUMN), schema=schema)
        keys, deleted = iter(up_to.items()), 0
        while chosen := list(islice(keys, _KEYS_A_STATEMENT)):
            ours = or_(*(and_(staged.c[ID_COLUMN] == key, staged.c[FENCE_COLUMN] <= fence) for key, fence in chosen))
            deleted += connection.execute(delete(staged).where(ours)).rowcount
        return deleted
