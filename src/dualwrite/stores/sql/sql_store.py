"""SqlStateStore: the rows in a SQL database, using SQLAlchemy Core 2."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from sqlalchemy import URL, ColumnElement, Connection, Engine, make_url

from dualwrite.errors import StoreError
from dualwrite.state import ProducerKind
from dualwrite.stores.base import TxnStateStore, U
from dualwrite.stores.identity import StoreIdentity
from dualwrite.stores.journal import JournalStore, UnclaimedTransaction
from dualwrite.stores.leases import LeaseStore
from dualwrite.stores.positions import Positions
from dualwrite.stores.rows import (
    MAX_OWNER_LENGTH,
    Acquiring,
    Claim,
    ClaimedLanes,
    LostTransaction,
    Resolution,
    StateRow,
    acknowledged,
    check_fence,
    forgotten,
    new_token,
    none_elsewhere,
    with_resolution,
)
from dualwrite.stores.sql.dialect import ErrorClass
from dualwrite.stores.sql.durability import durability
from dualwrite.stores.sql.engines import (
    KEPT_CONNECTIONS,
    check_connections,
    close_engine,
    dialect_of,
    make_engine,
    parse_url,
    watch_errors,
)
from dualwrite.stores.sql.guard import check_statements
from dualwrite.stores.sql.home import engine_at_home, refuse_without_schemas
from dualwrite.stores.sql.joined_transaction import JoinedTransaction, UsersConnection
from dualwrite.stores.sql.joining import joined
from dualwrite.stores.sql.raw_connections import users_connection
from dualwrite.stores.sql.short import ClaimAttempt, ShortTransactions, WithLanes, acquired
from dualwrite.stores.sql.sql_context import Access, StoreContext
from dualwrite.stores.sql.sql_errors import ErrorMap, address, error_and_causes
from dualwrite.stores.sql.sql_journal import SqlJournal
from dualwrite.stores.sql.sql_keeping import SqlLeases, SqlPositions
from dualwrite.stores.sql.sql_transaction import SqlStoreTransaction
from dualwrite.stores.sql.tables import (
    LockedRows,
    LookedAt,
    check_tables,
    identity_or_first,
    list_ids,
    lock_rows,
    locked_identity,
    look_around,
    look_at,
    read_identity,
    read_rows,
    replace_identity,
    write_rows,
)
from dualwrite.stores.sql.unclaimed import UnclaimedJoinedTransaction, UnclaimedSqlTransaction
from dualwrite.stores.store_transaction import StoreTransaction, UsersTransaction
from dualwrite.transactional_id import LANE_MARK, further_lanes

if TYPE_CHECKING:
    from dualwrite.stores.sql.orm import SessionSource
    from dualwrite.stores.sql.psycopg_connection import Source


log = logging.getLogger(__name__)

DEFAULT_CONNECT_TIMEOUT: Final = 10.0
DEFAULT_LOCK_TIMEOUT: Final = 30.0


class SqlStateStore(TxnStateStore):
    """Keeps the rows in the table `kafka_transaction_state` of a PostgreSQL, MariaDB, MySQL or SQLite database.

    `SqlStateStore.from_url` creates a suitable engine; your own engine keeps its settings and its listeners.

    Args:
        engine: Where connections come from.
        owns_engine: Whether `close` disposes of the engine.
        lock_timeout: Seconds that `record_resolution` and other changes wait for a locked row; `claim` has its own timeout.
        session: What `tx.session` is created from: your sessionmaker, scoped_session or Session class. Its options (except the
            bind), methods and events are kept: `before_commit` comes at the end of the block, while messages can still be
            sent, `after_commit` once the database has committed, `after_rollback` once it has rolled back; neither if the
            outcome is unknown. By default it is SQLAlchemy's Session, with `expire_on_commit=False`.
        schema: The schema of our tables (MariaDB, MySQL: the database), instead of the default one.
            `dualwrite db upgrade --schema` creates them there.

    Raises:
        ConfigurationError: The database or the driver is not supported, or the engine's pool has a single connection for all
            (in-memory SQLite), so that a claim can't run beside a transaction.
    """

    undoes_units = True
    units_need_savepoints = True

    def __init__(
        self,
        engine: Engine,
        *,
        owns_engine: bool = False,
        lock_timeout: float = DEFAULT_LOCK_TIMEOUT,
        session: SessionSource | None = None,
        schema: str | None = None,
    ) -> None:
        check_connections(engine)
        refuse_without_schemas(engine.dialect.name, schema)
        self._dialect = dialect_of(engine)
        self._dialect.watch_engine(engine)
        check_statements(engine)
        watch_errors(engine)
        self._engine = engine = engine_at_home(engine, self._dialect, schema, is_ours=owns_engine)
        self._owns_engine = owns_engine
        errors = ErrorMap(engine, self._dialect)
        self._context = StoreContext(engine, self._dialect, errors, session, Access())
        if session is not None:
            _ = self._context.sessions  # refuse an unusable one now
        self._short = ShortTransactions(engine, self._dialect, errors, lock_timeout, self._context.driver_errors)
        self._marks_if_first: frozenset[str] | None = None  # for an identity that would be the first

    @classmethod
    def from_url(
        cls,
        url: str | URL,
        *,
        connect_timeout: float = DEFAULT_CONNECT_TIMEOUT,
        lock_timeout: float = DEFAULT_LOCK_TIMEOUT,
        session: SessionSource | None = None,
        schema: str | None = None,
        **engine_options: Any,
    ) -> Self:
        """A store with its own engine, with suitable settings; nothing connects yet.

        Args:
            url: `postgresql+psycopg://user@host/database` (`postgresql://` means the same), `mysql+pymysql://…`,
                `mariadb+pymysql://…` or `sqlite:////path/to/file.db`.
            connect_timeout: Seconds for one attempt to connect (PostgreSQL).
            lock_timeout: Seconds that `record_resolution` and other changes wait for a locked row; SQLite: the busy timeout.
            session: As for the class.
            schema: As for the class.
            engine_options: More arguments for SQLAlchemy's `create_engine`; they override ours.

        Raises:
            ConfigurationError: The URL can't be parsed, or the database is not supported.
            MissingDependencyError: The driver is not installed.
        """
        parsed, dialect = parse_url(url)
        ours = dialect.engine_options(parsed, connect_timeout=connect_timeout, lock_timeout=lock_timeout)
        theirs = dict(engine_options)
        ours["connect_args"] = {**ours.get("connect_args", {}), **theirs.pop("connect_args", {})}
        if not theirs.keys() & {"pool", "poolclass", "pool_size"} and dialect.family != "sqlite":
            ours["pool_size"] = KEPT_CONNECTIONS
        engine = make_engine(parsed, dialect, **{**ours, **theirs})
        return cls(engine, owns_engine=True, lock_timeout=lock_timeout, session=session, schema=schema)

    @classmethod
    def from_psycopg(
        cls,
        source: Source,
        *,
        connect_timeout: float = DEFAULT_CONNECT_TIMEOUT,
        lock_timeout: float = DEFAULT_LOCK_TIMEOUT,
        session: SessionSource | None = None,
        schema: str | None = None,
    ) -> Self:
        """A store on your own psycopg connections. Transactions run on them, and `tx.db` is your connection, guarded.

        Row factories, adapters, prepared statements, isolation level and subclasses are kept. Cursors, `execute`, `copy`,
        `pipeline()` and `transaction()` (a savepoint) work in the block; `commit`, `rollback`, `close`, `autocommit` and
        `tpc_…` raise TransactionControlError. `tx.session` is an ORM session in the same transaction.

        Args:
            source: One of

                - a `psycopg.Connection`: you own it, and the store does not close it. Between the writer's transactions you may
                  use it, but must end each transaction that you begin; autocommit is switched off during the writer's
                  transactions. Claims and other changes run on the store's own connections with the same parameters, including
                  the password; they do not have settings made later (`SET search_path`, `SET ROLE`), which `check` detects.
                  After a COMMIT whose response never came the connection is closed, since its transaction might still be open;
                  also when it breaks. A writer on it can't be used any more then: connect again, and open another writer.
                - a `psycopg_pool.ConnectionPool`: you own it; each transaction and each claim uses a connection of it.
                - a function that makes a connection, for example `lambda: psycopg.connect(…)`: the store keeps the
                  connections for later transactions and claims, makes new ones as needed, and closes them all.
            connect_timeout: Seconds for one attempt to connect, for the store's own connections.
            lock_timeout: Seconds that `record_resolution` and other changes wait for a locked row.
            session: As for the class.
            schema: As for the class.

        Raises:
            ConfigurationError: `source` has another type, or is a closed connection.
            MissingDependencyError: psycopg is not installed.
            psycopg.Error: The function or the pool could not provide a connection; one is needed here to get the address.
        """
        _, dialect = parse_url("postgresql+psycopg://")
        from dualwrite.stores.sql.psycopg_connection import psycopg_access  # noqa: PLC0415  (extra `postgres`)

        options = dialect.engine_options(make_url("postgresql+psycopg://"), connect_timeout=connect_timeout, lock_timeout=0)
        engine, access = psycopg_access(source, options["connect_args"])
        store = cls(engine, owns_engine=True, lock_timeout=lock_timeout, session=session, schema=schema)
        store._context.access = access
        return store

    @property
    def engine(self) -> Engine:
        """The engine, for schema work and tests."""
        return self._engine

    @property
    def short_transactions(self) -> ShortTransactions:
        """Our own transactions, for jobs and others that keep tables next to the store's."""
        return self._short

    @property
    def has_local_settings(self) -> bool:  # type: ignore[override]  # a plain attribute of the others
        return self._context.dialect.has_local_settings

    @property
    def most_side_by_side(self) -> int:
        return 2 if self.is_local else self._context.access.connections(self._engine)

    @property
    def description(self) -> str:
        return address(self._engine.url)

    def check(self) -> None:
        """Compares the columns, since the table may also be made by the user's own migrations."""
        self._short.query(self._context.access.check, "checking the table")
        self._short.query(check_tables, "checking the table")

    def check_rights(self, *uses: str) -> None:
        self._short.check_rights(*uses)

    @property
    def leases(self) -> LeaseStore:
        return SqlLeases(self._short)

    @property
    def positions(self) -> Positions:
        return SqlPositions(self._short)

    @property
    def journal(self) -> JournalStore:
        return SqlJournal(self._short, self._begun, self._begun_unclaimed)

    def durability(self) -> Mapping[str, str]:
        return self._short.query(durability, "reading the durability settings")

    # --- which database this is ---------------------------------------------------------------------------------------------

    @property
    def detects_copies(self) -> bool:  # type: ignore[override]
        """False for MariaDB and MySQL: a promoted replica has another identifier."""
        return self._dialect.detects_copies

    def identity(self) -> StoreIdentity | None:
        return self._short.query(read_identity, "reading the database's id")

    def set_identity(self, identity: StoreIdentity, *, expected: StoreIdentity | None) -> bool:
        try:
            return self._short.run(partial(replace_identity, identity=identity, expected=expected), "storing the database's id")
        except StoreError as error:
            if self._short.is_caused_by(error, ErrorClass.DUPLICATE):
                return False
            raise

    def marks(self) -> frozenset[str]:
        """Also empty if the database does not show us its identifier."""
        try:
            return self._short.query(self._dialect.database_marks, "reading the database's identifier")
        except StoreError as error:
            log.debug("%s: the database's identifier can't be read: %s", self.description, f"{error}")
            return frozenset()

    def why_no_marks(self) -> str | None:
        try:
            found = self._short.query(self._dialect.database_marks, "reading the database's identifier")
        except StoreError as error:
            return f"its identifier can't be read ({error.cause or error.what.removesuffix('.')})"
        return None if found else "the server has no identifier (server_uuid, server_uid)"

    def claim(
        self, transactional_id: str, owner: str, *, timeout: float, expected_fence: int | None = None, token: str | None = None
    ) -> Claim:
        made = self._claimed([transactional_id], owner, timeout, token=token, expected_fence=expected_fence)
        return made.rows[0].claim

    def claim_lanes(
        self,
        lanes: Sequence[str],
        owner: str,
        *,
        timeout: float,
        cluster_id: str | None,
        expected_fence: int | None = None,
        token: str | None = None,
        acquiring: Acquiring | None = None,
    ) -> ClaimedLanes:
        """In one transaction: if one lane can't be claimed, none is."""
        besides = WithLanes(cluster_id, acquiring, self._first_identity())
        return self._claimed(lanes, owner, timeout, token=token, expected_fence=expected_fence, lanes=besides)

    def claim_if(self, transactional_id: str, owner: str, condition: Callable[[Connection], None], *, timeout: float) -> Claim:
        """Claim only if a condition holds in the transaction of the claim; if it does not hold, it raises.

        Args:
            transactional_id: The logical id.
            owner: Who claims, as text for people.
            condition: Runs first in the transaction, and may write in it. Called again if the transaction is repeated.
            timeout: Seconds to wait at most.

        Raises: as `claim`, and what the condition raises.
        """
        return self._claimed([transactional_id], owner, timeout, condition=condition).rows[0].claim

    def _claimed(
        self, ids: Sequence[str], owner: str, timeout: float, *, token: str | None = None, **besides: Any
    ) -> ClaimedLanes:
        return ClaimAttempt(self._short, ids, owner[:MAX_OWNER_LENGTH], timeout, token or new_token(), **besides).make()

    def begin(self, claim: Claim) -> StoreTransaction:
        return self._begun(claim, may_wait=False)

    def begin_soon(self, claim: Claim) -> StoreTransaction:
        return self._begun(claim, may_wait=True)

    def _begun(self, claim: Claim, *, may_wait: bool, gate: str | None = None) -> SqlStoreTransaction:
        transaction = SqlStoreTransaction(self._context, claim, gate=gate)
        transaction.begin(may_wait=may_wait)
        return transaction

    def _begun_unclaimed(self, prefix: str, *, on: Any = None, may_wait: bool = False) -> UnclaimedTransaction:
        if on is not None:
            return UnclaimedJoinedTransaction(self._context, prefix, on)
        transaction = UnclaimedSqlTransaction(self._context, prefix)
        transaction.begin(may_wait=may_wait)
        return transaction

    def join(self, target: Any, owner: object, new: Callable[[Callable[[], frozenset[Hashable]]], U]) -> U:
        """Join a transaction of SQLAlchemy's: of a Session, AsyncSession, Connection, AsyncConnection or scoped session."""
        return joined(target, owner, new)

    def users_connection(self, connection: Any) -> UsersTransaction:
        """Of any driver that SQLAlchemy knows and `raw_connections` lists."""
        return users_connection(connection)

    def begin_on(self, connection: UsersConnection, claim: Claim, *, gate: str | None) -> StoreTransaction:
        return JoinedTransaction(self._context, claim, connection, gate=gate)

    def is_conflict(self, error: BaseException) -> bool:
        error = self._behind_lost_savepoint(error)
        return isinstance(error, self._context.driver_errors) and self._dialect.classify(error) is ErrorClass.CONFLICT

    def is_outage(self, error: BaseException) -> bool:
        """A statement that took longer than the database permits is not one."""
        error = self._behind_lost_savepoint(error)
        return isinstance(error, self._context.driver_errors) and self._context.errors.is_outage(error)

    def _behind_lost_savepoint(self, error: BaseException) -> BaseException:
        """The error that rolled back everything, if `error` is that of a `begin_nested()` whose savepoint was lost by that."""
        drivers = self._context.driver_errors
        if not isinstance(error, drivers) or not self._dialect.has_lost_savepoint(error):
            return error
        causes = (each for each in error_and_causes(error) if isinstance(each, drivers))
        return next((each for each in causes if self._dialect.may_have_rolled_back(each)), error)

    # --- reading ----------------------------------------------------------------------------------------------------------

    def read(self, transactional_id: str) -> StateRow | None:
        return self._read([transactional_id]).get(transactional_id)

    def _read(self, ids: Sequence[str]) -> dict[str, StateRow]:
        return self._short.query(partial(read_rows, ids=ids), "reading the row", ids[0])

    def look_at(self, lanes: Sequence[str]) -> tuple[StateRow, ...]:
        """In one query, if the dialect's marks are a column."""
        column = self._dialect.marks_column()
        try:
            identity, shown, rows = self._looked_at(lanes, column)
        except StoreError as error:
            if column is None:
                raise
            log.debug("%s: the database's identifier can't be read: %s", self.description, f"{error}")
            column = None
            identity, shown, rows = self._looked_at(lanes, None)
            marks: frozenset[str] = frozenset()
        else:
            marks = self.marks() if column is None else frozenset({shown} if shown else ())
        self._check_marks(identity, marks)
        if identity is None or identity.marks or not marks:
            self._marks_if_first = marks
        by_id = {row.transactional_id: row for row in rows}
        return tuple(by_id[name] for name in (*lanes, *further_lanes(by_id, lanes)) if name in by_id)

    def _looked_at(self, lanes: Sequence[str], marks: ColumnElement[Any] | None) -> LookedAt:
        work = partial(look_at, ids=lanes, lanes_prefix=lanes[0] + LANE_MARK, marks=marks)
        return self._short.query(work, "reading the row", lanes[0])

    def read_claimed(self, claim: Claim) -> StateRow:
        return check_fence(self.read(claim.transactional_id), claim)

    def read_claimed_rows(self, claims: Sequence[Claim]) -> tuple[StateRow, ...]:
        """In one query."""
        found = self._read([claim.transactional_id for claim in claims])
        return tuple(check_fence(found.get(claim.transactional_id), claim) for claim in claims)

    def list(self, prefix: str = "") -> list[str]:
        return self._short.query(partial(list_ids, prefix=prefix), "listing the ids")

    def elsewhere(self, name: str, cluster_id: str) -> Mapping[str, str]:
        """In one query."""
        return self._short.query(partial(look_around, transactional_id=name, cluster_id=cluster_id), "listing the ids")[1]

    # --- changing ---------------------------------------------------------------------------------------------------------

    def record_resolution(self, claim: Claim, resolution: Resolution) -> None:
        self.record_resolutions([(claim, resolution)])

    def record_resolutions(self, resolutions: Sequence[tuple[Claim, Resolution]]) -> None:
        """In one transaction."""

        def work(connection: Connection) -> None:
            found = _locked(connection, [claim for claim, _ in resolutions]).rows
            for claim, resolution in resolutions:
                found[claim.transactional_id] = with_resolution(found[claim.transactional_id], resolution)
            write_rows(connection, found.values(), existing=found)

        self._short.run(work, "resolving a transaction", resolutions[0][0].transactional_id)

    def acquire_generation(self, claim: Claim, kind: ProducerKind, *, reuse: bool = False, cluster_id: str = "") -> int:
        """A number whose COMMIT got no response is skipped, which is harmless."""
        only = frozenset({claim.transactional_id})
        (row,) = self.acquire_generations([claim], Acquiring(kind, only, only if reuse else frozenset(), cluster_id))
        return row.generation

    def acquire_generations(self, claims: Sequence[Claim], acquiring: Acquiring) -> tuple[StateRow, ...]:
        """In one transaction."""
        first, name = self._first_identity(), claims[0].transactional_id

        def work(connection: Connection) -> tuple[StateRow, ...]:
            found, identity = _locked(connection, claims)
            if acquiring.cluster_id and not all(row.cluster_id for row in found.values()):
                identity = locked_identity(connection, first)
                none_elsewhere(name, look_around(connection, name, acquiring.cluster_id)[1], acquiring.cluster_id)
            # read in this transaction: it may have been replaced
            store_id = (identity or identity_or_first(connection, first)).store_id
            rows = {each: acquired(row, acquiring, store_id) for each, row in found.items()}
            write_rows(connection, rows.values(), existing=found)
            return tuple(rows[claim.transactional_id] for claim in claims)

        return self._short.run_inserting(work, "acquiring a generation", name)  # perhaps the database's identity

    def _first_identity(self) -> StoreIdentity:
        """To be stored if the database has no identity yet; if it has one without marks, the marks are added now."""
        if self._marks_if_first is None:
            marks, kept = self.marks(), self.identity()
            if kept is not None and marks and not kept.marks:
                self._own_identity()
            self._marks_if_first = marks
        return StoreIdentity.new(self._marks_if_first)

    def acknowledge(
        self, transactional_id: str, *, only: Collection[LostTransaction] | None = None
    ) -> tuple[LostTransaction, ...]:
        removed: list[LostTransaction] = []  # over all attempts: the response to the COMMIT that removed them may be lost

        def work(connection: Connection) -> None:
            found = lock_rows(connection, [transactional_id]).rows
            for row in found.values():
                left = acknowledged(row, only)
                removed.extend(entry for entry in row.lost if entry not in (*left.lost, *removed))
                write_rows(connection, [left], existing=found)

        self._short.run(work, "acknowledging lost transactions", transactional_id)
        return tuple(removed)

    def forget(self, transactional_id: str) -> None:
        def work(connection: Connection) -> None:
            found = lock_rows(connection, [transactional_id]).rows
            write_rows(connection, [forgotten(row) for row in found.values() if not row.forgotten], existing=found)

        self._short.run(work, "forgetting the id", transactional_id)

    def close(self) -> None:
        self._context.access.close()
        if self._owns_engine:
            close_engine(self._engine)


def _locked(connection: Connection, claims: Sequence[Claim]) -> LockedRows:
    """The claims' rows, locked and checked to have their fences."""
    found = lock_rows(connection, [claim.transactional_id for claim in claims])
    for claim in claims:
        check_fence(found.rows.get(claim.transactional_id), claim)
    return found
