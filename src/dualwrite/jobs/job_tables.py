"""The tables of jobs, and their rows, read and written within the caller's transaction."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, NamedTuple

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Integer,
    Row,
    Table,
    TableClause,
    and_,
    bindparam,
    column,
    delete,
    insert,
    inspect,
    or_,
    select,
    table,
    update,
)

from dualwrite.errors import ConfigurationError
from dualwrite.jobs.rules import JobRow
from dualwrite.stores.base import MAX_OWNER_LENGTH
from dualwrite.stores.sql.tables import LongWords, UtcDateTime, Words, metadata
from dualwrite.stores.sql.tables import state_table as t

__all__ = ["attempt_table", "batch_table", "chunk_table", "job_table", "metadata"]

job_table: Final = Table(
    "kafka_job",
    metadata,
    Column("prefix", Words(255), primary_key=True),
    Column("job_id", Words(255), nullable=False),
    Column("batch_id", BigInteger, nullable=False),
    Column("token", Words(32), nullable=False),
    Column("is_open", Boolean, nullable=False),
    Column("keeps_lease", Boolean, nullable=False),
    Column("earlier_tokens", LongWords(), nullable=False),
    Column("staging_table", Words(255), nullable=False),
    Column("owner", Words(MAX_OWNER_LENGTH), nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)
"""One row per prefix: the job that holds it, and its newest run, open or closed."""

batch_table: Final = Table(
    "kafka_job_batch",
    metadata,
    Column("job_id", Words(255), primary_key=True),
    Column("batch_id", BigInteger, primary_key=True, autoincrement=False),
    Column("prefix", Words(255), nullable=False),
    Column("token", Words(32), nullable=False),
    Column("row_count", BigInteger, nullable=False),
    Column("winners", LongWords(size="medium"), nullable=False),
    Column("committed_at", UtcDateTime, nullable=False),
)
"""One marker per committed batch, written in the transaction that committed the batch. `winners` is `Marker.document`."""

attempt_table: Final = Table(
    "kafka_job_attempt",
    metadata,
    Column("transactional_id", Words(255), primary_key=True),
    Column("prefix", Words(255), nullable=False, index=True),
    Column("token", Words(32), nullable=False),
    Column("task", Words(32), nullable=False),
    Column("beats", Integer, nullable=False),
)
"""The transactional ids of task attempts; each row names the run and the task attempt that claimed the id last."""

CHUNK_TABLE_NAME: Final = "kafka_job_chunk"

MAX_JOB_ID_LENGTH: Final = 200
"""Maximum length of a job id, in characters."""

_MAX_DIGEST_LENGTH: Final = 64

chunk_table: Final = Table(
    CHUNK_TABLE_NAME,
    metadata,
    Column("job_id", Words(MAX_JOB_ID_LENGTH), primary_key=True),
    Column("partition_number", Integer, primary_key=True, autoincrement=False),
    Column("chunk_number", Integer, primary_key=True, autoincrement=False),
    Column("row_count", BigInteger, nullable=False),
    Column("digest", Words(_MAX_DIGEST_LENGTH), nullable=False),
    Column("committed_at", UtcDateTime, nullable=False),
)
"""The row with partition -1 belongs to the job itself: its digest column has the job's plan, as JSON text."""

PLAIN: Final = select(job_table).where(job_table.c.prefix == bindparam("prefix"))
SHARED: Final = PLAIN.with_for_update(read=True)
"""Until the transaction ends, no run on the prefix can be opened, decided or closed."""
LOCKED: Final = PLAIN.with_for_update()
"""As SHARED; in addition, no task can claim an id."""

_MARKER: Final = select(batch_table).where(
    batch_table.c.job_id == bindparam("job"), batch_table.c.batch_id == bindparam("batch")
)

ID_COLUMN: Final = "dualwrite_id"
FENCE_COLUMN: Final = "dualwrite_fence"
_KEYS_PER_STATEMENT: Final = 100
_PART: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|`((?:[^`]|``)+)`|([^\s."`()]+))\s*(\.|$)')


class Winner(NamedTuple):
    """One Kafka transaction of a committed batch."""

    transactional_id: str
    generation: int
    state: str


@dataclass(frozen=True, slots=True)
class Marker:
    """A committed batch: the run, how many rows it moved into the table, and the transactions with its messages.

    `committed_at` is by the driver's clock (UTC, aware).
    """

    prefix: str
    token: str
    row_count: int
    winners: tuple[Winner, ...]
    committed_at: datetime
    bound_to: str = ""

    @property
    def document(self) -> str:
        """The content of the column `winners`."""
        return json.dumps({"bound_to": self.bound_to, "winners": self.winners})


def read_job(connection: Connection, prefix: str, query: Any = PLAIN) -> JobRow | None:
    """The row of a prefix, read with `PLAIN`, `SHARED` or `LOCKED`; None if there is no row."""
    found = connection.execute(query, {"prefix": prefix}).one_or_none()
    return None if found is None else job_row(found)


def job_row(found: Row[Any]) -> JobRow:
    """A stored row as a JobRow."""
    columns = found._asdict()
    columns["earlier_tokens"] = tuple(json.loads(columns["earlier_tokens"]))
    return JobRow(**columns)


def write_job(connection: Connection, row: JobRow, *, is_new: bool) -> None:
    """Write the row of a prefix."""
    values = {column.name: getattr(row, column.name) for column in job_table.c}
    values["earlier_tokens"] = json.dumps(row.earlier_tokens)
    connection.execute(
        insert(job_table).values(values) if is_new else update(job_table).where(job_table.c.prefix == row.prefix).values(values)
    )


def read_marker(connection: Connection, job_id: str, batch_id: int) -> Marker | None:
    """The marker of a batch, or None if the batch is not committed."""
    found = connection.execute(_MARKER, {"job": job_id, "batch": batch_id}).one_or_none()
    if found is None:
        return None
    document = json.loads(found.winners)
    winners = tuple(Winner(*entry) for entry in document["winners"])
    return Marker(found.prefix, found.token, found.row_count, winners, found.committed_at, document["bound_to"])


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One transactional id of a job, with the run that claimed it last, and whether no transaction of the id is open."""

    transactional_id: str
    token: str
    fence: int
    is_resolved: bool


def read_attempts(connection: Connection, prefix: str, *, ids: Collection[str] | None = None) -> list[AttemptRow]:
    """The transactional ids that tasks have used under a prefix, restricted to `ids` if given; sorted."""
    query = select(
        attempt_table.c.transactional_id, attempt_table.c.token, t.c.fence, t.c.generation, t.c.resolved_generation
    ).where(attempt_table.c.prefix == prefix, attempt_table.c.transactional_id == t.c.transactional_id)
    if ids is not None:
        query = query.where(attempt_table.c.transactional_id.in_(list(ids)))
    rows = (
        AttemptRow(row.transactional_id, row.token, row.fence, row.resolved_generation >= row.generation)
        for row in connection.execute(query)
    )
    return sorted(rows, key=lambda row: row.transactional_id)


def left_behind(connection: Connection, row: JobRow) -> tuple[AttemptRow, ...]:
    """The attempts of a prefix that belong to no open run: only cleanup and recovery claim them with their current tokens.

    Call it while the job's row is locked, with the row as it will be written: a run that opens later may claim any of these
    ids, but then with a new fencing token.
    """
    attempts = read_attempts(connection, row.prefix)
    return tuple(attempt for attempt in attempts if not (row.is_open and attempt.token == row.token))


def fence_attempts(connection: Connection, prefix: str, token: str, owner: str, *, keep: Collection[str] = ()) -> None:
    """Fence every id that a run's tasks have claimed, except those in `keep`: none of these tasks can continue.

    Every such id was claimed with a shared lock on the job's row; the caller must hold the exclusive lock.
    """
    of_run = select(attempt_table.c.transactional_id).where(attempt_table.c.prefix == prefix, attempt_table.c.token == token)
    losers = update(t).where(t.c.transactional_id.in_(of_run))
    if keep:
        losers = losers.where(t.c.transactional_id.not_in(sorted(keep)))
    connection.execute(
        losers.values(fence=t.c.fence + 1, owner=owner[:MAX_OWNER_LENGTH], claim_token="", updated_at=datetime.now(UTC))
    )


class StagedRows:
    """A staging table of which only the name is known: that in the job's row, as written by `quoted_name`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def delete(self, connection: Connection, up_to: Mapping[str, int]) -> int:
        """Delete the rows staged under each id with fencing tokens up to the given one; return how many there were.

        If the table no longer exists, there are none.
        """
        staged = self._table(connection)
        if staged is None:
            return 0
        keys, deleted = iter(up_to.items()), 0
        while chosen := list(islice(keys, _KEYS_PER_STATEMENT)):
            ours = or_(*(and_(staged.c[ID_COLUMN] == key, staged.c[FENCE_COLUMN] <= fence) for key, fence in chosen))
            deleted += connection.execute(delete(staged).where(ours)).rowcount
        return deleted

    def committed_keys(self, connection: Connection, up_to: Mapping[str, int]) -> list[tuple[str, int]]:
        """The ids and fencing tokens, up to the given ones, that have visible staged rows; does not wait for locks."""
        staged = self._table(connection)
        if staged is None:
            return []
        key, fence = staged.c[ID_COLUMN], staged.c[FENCE_COLUMN]
        found: list[tuple[str, int]] = []
        for one, last in up_to.items():
            fences = connection.scalars(select(fence).where(key == one, fence <= last).distinct())
            found += [(one, each) for each in fences]
        return found

    def delete_exactly(self, connection: Connection, transactional_id: str, fence: int) -> int:
        """Delete the rows staged under this id and exactly this fencing token; return how many there were."""
        staged = self._table(connection)
        if staged is None:
            return 0
        ours = and_(staged.c[ID_COLUMN] == transactional_id, staged.c[FENCE_COLUMN] == fence)
        return connection.execute(delete(staged).where(ours)).rowcount

    def _table(self, connection: Connection) -> TableClause | None:
        if not self._name:  # the run was never opened by a task
            return None
        schema, name = split_name(self._name, connection.dialect.name)
        if not inspect(connection).has_table(name, schema=schema):
            return None
        return table(name, column(ID_COLUMN), column(FENCE_COLUMN), schema=schema)


def split_name(dbtable: str, dialect: str) -> tuple[str | None, str]:
    """The schema, or None, and the table of a name.

    Raises:
        ConfigurationError: The text is not a table name.
    """
    parts: list[str] = []
    place = 0
    while found := _PART.match(dbtable, place):
        quoted, ticked, bare, dot = found.groups()
        if quoted is not None:
            parts.append(quoted.replace('""', '"'))
        elif ticked is not None:
            parts.append(ticked.replace("``", "`"))
        else:
            parts.append(bare.lower() if dialect == "postgresql" else bare)
        place = found.end()
        if not dot:
            break
    if place != len(dbtable) or not 1 <= len(parts) <= 2 or dbtable.rstrip().endswith("."):  # noqa: PLR2004
        raise ConfigurationError(
            f"dbtable is {dbtable!r}, which is not a table name.",
            cause="rows can be written only to a table, not to a query",
            next_step='use table, schema.table, or "Quoted schema"."Quoted table"',
        )
    return (parts[0] if parts[1:] else None), parts[-1]


def quoted_name(name: str, schema: str | None) -> str:
    """A table's name quoted for PostgreSQL, to pass to the driver directly: SQLAlchemy's own quoting doubles each %."""
    return ".".join('"' + part.replace('"', '""') + '"' for part in (schema, name) if part is not None)
