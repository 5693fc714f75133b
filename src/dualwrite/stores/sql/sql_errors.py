"""The one place where errors of a SQL database are translated into ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import URL, Engine
from sqlalchemy.exc import PendingRollbackError

from dualwrite.errors import (
    ClaimTimeoutError,
    DualWriteError,
    FencedError,
    StateTableMissingError,
    StoreCommitFailedError,
    StoreCommitUnknownError,
    StoreError,
    StoreLockedError,
    StoreNotWritableError,
    StoreUnavailableError,
    TransactionControlError,
    WriterClosedError,
    shell_word,
)
from dualwrite.stores.rows import Claim, fenced
from dualwrite.stores.sql.dialect import TAKES_NO_WRITES, ErrorClass, StoreDialect, driver_error
from dualwrite.stores.sql.home import given_schema, home_of
from dualwrite.stores.sql.rights import IMPLIED, rights_on
from dualwrite.stores.sql.tables import TABLE_NAME, metadata

_SECRETS: Final = frozenset({"password", "passwd", "sslpassword", "passfile", "ssl_key_password"})
_SETTING: Final = "`--url` or DUALWRITE_DATABASE_URL (or the engine that you passed)"
_UPGRADE: Final = "run `dualwrite db upgrade --url {command_url}{schema_option}`"
_TEXTS: Final[dict[ErrorClass, tuple[type[StoreError], str, str | None]]] = {
    ErrorClass.CONNECTION: (
        StoreUnavailableError,
        "The database {where} can't be reached, or ended the connection, while {doing}.",
        f"check that it is running and that the address is right: {_SETTING}; then try again",
    ),
    ErrorClass.REFUSED: (
        StoreUnavailableError,
        "The database {where} refused the connection while {doing}.",
        f"check {{refused_by}}: {_SETTING}",
    ),
    ErrorClass.NO_TABLE: (StateTableMissingError, "The table {table} is missing in {where}.", _UPGRADE),
    ErrorClass.OLD_TABLE: (StateTableMissingError, "The table {table} in {where} is older than this dualwrite.", _UPGRADE),
    ErrorClass.LOCKED: (
        StoreLockedError,
        "A lock in the database {where} was not released within the limit while {doing}.",
        "try again, or end the transaction that holds the lock",
    ),
    ErrorClass.CONFLICT: (
        StoreCommitFailedError,
        "The database {where} aborted our transaction because of another one while {doing}; nothing of it was committed.",
        "run the whole transaction again",
    ),
    ErrorClass.DENIED: (
        StoreError,
        "The database {where} does not permit {doing}; nothing of it was written.",
        "grant {denied} to the connection's role, and to each that a block sets (SET ROLE); {grants} prints all that it needs",
    ),
    ErrorClass.READ_ONLY: (
        StoreNotWritableError,
        "The database {where} permits no writes while {doing}; nothing of it was written.",
        "try again, if it is read-only only for a while; otherwise find out what makes it read-only: {read_only_by}",
    ),
    ErrorClass.EXHAUSTED: (
        StoreNotWritableError,
        "The database {where} lacks disk space, memory or another resource while {doing}; nothing of it was written.",
        "give it what the cause names, and try again",
    ),
    ErrorClass.ABORTED: (
        StoreError,
        "The database's transaction can't be committed: an earlier statement in it failed, and the block continued.",
        "let the error leave the block, or run the statement under a savepoint (begin_nested)",
    ),
    ErrorClass.PREPARED: (
        StoreError,
        "The database {where} lost a prepared statement, or has another with the same name, while {doing}.",
        "behind a pooler such as PgBouncer, set prepare_threshold to None: connect_args={{'prepare_threshold': None}}",
    ),
    ErrorClass.POOLED: (
        StoreError,
        "The connection pooler in front of the database {where} permits no transactions: it is in statement mode.",
        "set pool_mode=transaction, or session, for this database and user in PgBouncer",
    ),
    ErrorClass.DUPLICATE: (StoreError, "The database {where} failed while {doing}.", None),
    ErrorClass.OTHER: (StoreError, "The database {where} failed while {doing}.", None),
}
_ELSEWHERE: Final = (
    "The table {table} is missing in {where}; the schema {others} has one.",
    "pass schema={others} (commands: --schema; environment: DUALWRITE_SCHEMA). Only for tables that are separate from those: "
    + _UPGRADE,
)
_MAX_SCHEMAS: Final = 3
"""With more, such as those of tenants, or of all services on a server, none of them is meant more than another."""
_TOO_SLOW: Final = (
    StoreUnavailableError,
    "A statement in the database {where} was ended by {time_limit}, or canceled, while {doing}.",
    "try again; if it was the limit, raise it: the block, the user or the database has set it",
)
_OUTAGES: Final = TAKES_NO_WRITES | {ErrorClass.CONNECTION, ErrorClass.LOCKED}
_INVALIDATED: Final = "8s2b"
"""SQLAlchemy's code of the PendingRollbackError of a connection that broke before; a failed flush has another."""
_STATEMENT_TIMEOUTS: Final = frozenset({"57014", 1969, 3024})
"""The statement itself took too long: PostgreSQL's, MariaDB's and MySQL's limits."""


def address(url: URL) -> str:
    """A URL for messages, without its password."""
    return _without_query_secrets(url).render_as_string(hide_password=True)


def address_for_commands(url: URL) -> str:
    """A URL for use in a command, without the password (it belongs in PGPASSWORD or ~/.pgpass)."""
    return _without_query_secrets(url)._replace(password=None).render_as_string(hide_password=False)


def _without_query_secrets(url: URL) -> URL:
    return url.difference_update_query(_SECRETS & url.query.keys())


@dataclass(frozen=True, slots=True)
class ErrorMap:
    """Translates the errors of one engine's database."""

    engine: Engine
    dialect: StoreDialect

    def is_outage(self, error: BaseException) -> bool:
        """A statement that took longer than the database permits is not one."""
        if isinstance(error, PendingRollbackError):
            return error.code == _INVALIDATED
        return self.dialect.classify(error) in _OUTAGES and not _took_too_long(driver_error(error))

    def grants_command(self, role: str, uses: Sequence[str] = (), outbox: str | None = None) -> str:
        """The command that prints the GRANT statements for these uses."""
        schema = given_schema(self.engine)
        words = ["dualwrite", "db", "grants", "--role", role, *(f"--{use}" for use in uses if use not in IMPLIED)]
        words += [] if outbox is None else ["--table", outbox]
        words += ["--url", address_for_commands(self.engine.url), *(() if schema is None else ("--schema", schema))]
        return " ".join(map(shell_word, words))

    def translated(
        self, error: BaseException, doing: str, transactional_id: str | None = None, *, reads: bool = False
    ) -> DualWriteError:
        """Our error for the driver's, except during COMMIT; `doing` completes "… failed while <doing>", which only `reads`."""
        error_class = self.dialect.classify(error)
        kind, what, next_step = _TOO_SLOW if _took_too_long(driver_error(error)) else _TEXTS[error_class]
        if error_class is ErrorClass.LOCKED:
            blocker = self.dialect.known_blocker(self.engine)
            if blocker is not None:
                what, next_step = f"{what[:-1]}; it is held by {blocker.text}.", blocker.next_step
        schema, table = given_schema(self.engine), _table_named_in(driver_error(error))
        others = self._schemas_with(table) if error_class is ErrorClass.NO_TABLE else ()
        if others:
            what, next_step = _ELSEWHERE
        facts = {
            "others": " or ".join(map(repr, others)),
            "denied": rights_on(table, schema, str(driver_error(error)), reads=reads),
            "grants": self.grants_command("ROLE"),
            "where": address(self.engine.url),
            "command_url": address_for_commands(self.engine.url),
            "doing": doing,
            "refused_by": self.dialect.refused_by,
            "read_only_by": self.dialect.read_only_by,
            "time_limit": self.dialect.time_limit,
            "table": table if schema is None else f"{schema}.{table}",
            "schema_option": "" if schema is None else f" --schema {shell_word(schema)}",
        }
        return kind(
            what.format_map(facts),
            transactional_id=transactional_id,
            cause=_sentence(driver_error(error)),
            next_step=None if next_step is None else next_step.format_map(facts),
        )

    def _schemas_with(self, table: str) -> Sequence[str]:
        """In which few schemas there is a table of this name; none if that can't be found out."""
        try:
            with self.engine.connect() as connection:
                found = self.dialect.schemas_with(connection, table)
            return found if len(found) <= _MAX_SCHEMAS else ()
        except Exception:  # noqa: BLE001  (something has failed already; this must not hide it)
            return ()


def error_and_causes(error: BaseException, *, before: BaseException | None = None) -> Iterator[BaseException]:
    """The error, what it was raised from, and what was being handled when it was raised, the newest first.

    Without `before`, which was being handled before, and its causes.
    """
    seen = {id(before)}
    rest: list[BaseException | None] = [error]
    while rest:
        found = rest.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        rest += [found.__context__, found.__cause__]


def _took_too_long(error: BaseException) -> bool:
    return not {getattr(error, "sqlstate", None), *error.args[:1]}.isdisjoint(_STATEMENT_TIMEOUTS)


def _table_named_in(error: BaseException) -> str:
    """Which of our tables an error is about; the state table if it names none."""
    text = str(error).partition("\n")[0]
    return max((name for name in metadata.tables if name in text), key=len, default=TABLE_NAME)


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    code = getattr(error, "sqlstate", None) or getattr(error, "sqlite_errorname", None)
    return f"{type(error).__name__}{f' {code}' if code else ''}: {text}"


def locked_too_long(
    errors: ErrorMap, ids: Sequence[str], timeout: float, error: BaseException, doing: str
) -> ClaimTimeoutError:
    """The error for a wait for the lock of one of the ids' rows that took longer than `timeout` seconds.

    It names the id whose row is locked, and the blocker, if possible.
    """
    transactional_id, blocker = ids[0], None
    try:
        for name in ids:
            blocker = errors.dialect.find_blocker(errors.engine, name)
            if blocker is not None:
                transactional_id = name
                break
    except Exception:  # noqa: BLE001  (the wait has failed already; failing to find its cause must not hide that)
        blocker = None
    return ClaimTimeoutError(
        f"The row of the id stayed locked for {timeout:g} s while {doing}.",
        transactional_id=transactional_id,
        cause=f"the lock is held by {blocker.text}"
        if blocker
        else f"its holder is not known ({_sentence(driver_error(error))})",
        next_step=blocker.next_step if blocker else "try again: the holder may have finished by now",
        timeout=timeout,
        blocker=blocker.text if blocker else None,
        blocker_pid=blocker.pid if blocker else None,
    )


class TransactionErrors:
    """Makes the errors of one transaction, under its claim."""

    def __init__(self, errors: ErrorMap, claim: Claim) -> None:
        self._errors = errors
        self._claim = claim

    def translated(self, error: BaseException, doing: str) -> DualWriteError:
        """Our error for the driver's; see `ErrorMap.translated`."""
        return self._errors.translated(error, doing, self._claim.transactional_id)

    def fenced(self, current: Any) -> FencedError:
        """The error for a row with another fence: `fence` and `owner` of the newest claim; None if the id has no row."""
        return fenced(self._claim, *((None, None) if current is None else (current.fence, current.owner)))

    def row_not_found(self, current: Any, store_id: str) -> DualWriteError:
        """The error for a record that changed no row of this store, although the row has our fence, and we our mark."""
        table = home_of(self._errors.engine).name()
        what = (
            f"The prepared state could not be recorded in {table}: there the block's transaction does not see the row that it "
            "began with. Nothing was committed."
        )
        if current.store_id != store_id:
            return StoreCommitFailedError(
                what,
                transactional_id=self._claim.transactional_id,
                cause=f"the row belonged to the store {store_id!r}, and now there is one of {current.store_id!r}: the store "
                "got a new id meanwhile, or the block has replaced the table",
                next_step="run the whole transaction again",
            )
        return StoreError(
            what,
            transactional_id=self._claim.transactional_id,
            cause="the block, or a statement in it, hides the row or has replaced the table: row-level security, a rule, a "
            "trigger, a temporary table of the same name (MariaDB, MySQL), ALTER TABLE",
            next_step=f"leave {table} out of these, for all roles that blocks use",
        )

    def not_found_in_encoding(self, changed: str) -> StoreError:
        """The error for an id that the database reads as another text, since the session's encoding was changed."""
        return StoreError(
            "The row of the id was not found, since the session's character set is no longer the driver's. Nothing was "
            "committed.",
            transactional_id=self._claim.transactional_id,
            cause=changed,
            next_step="leave the character set as it is in the block, or give it to the driver when it connects (charset=…)",
        )

    def ended(self) -> WriterClosedError:
        """The error for a use of the transaction after its end."""
        return WriterClosedError("The transaction has ended.", transactional_id=self._claim.transactional_id)

    def ended_by_block(self) -> TransactionControlError:
        """The error for a transaction that the user's block has ended itself."""
        return TransactionControlError(
            "The block ended the database's transaction itself: what it wrote before that may have been committed WITHOUT its "
            "messages, which are aborted now.",
            transactional_id=self._claim.transactional_id,
            cause="a COMMIT or ROLLBACK through the driver's own connection, a procedure, or a statement that ends the "
            "transaction implicitly, or removes its mark (PostgreSQL: RESET ALL; SQLite: ON CONFLICT ROLLBACK; MariaDB, "
            "MySQL: CREATE TABLE and the like bypassing tx.db, or a deadlock whose error the block ignored)",
            next_step="check what the block wrote; remove the commit or rollback from it (savepoints are allowed)",
        )

    def flush_failed(self) -> StoreError:
        """The error for a session that can't be used any more, since the block has ignored the error of a flush."""
        return StoreError(
            "The database's transaction can't be committed: a flush of the ORM session failed, and the block continued.",
            transactional_id=self._claim.transactional_id,
            next_step="let the error of the flush leave the block, or flush under a savepoint (session.begin_nested())",
        )

    def commit_failed(self, cause: str) -> StoreCommitFailedError:
        """The error for a COMMIT that certainly had no effect."""
        return StoreCommitFailedError(
            f"The database {address(self._errors.engine.url)} did not commit; nothing of the transaction was written.",
            transactional_id=self._claim.transactional_id,
            cause=cause,
            next_step="if the cause is a conflict with another transaction, run the whole transaction again",
        )

    def commit_unknown(self, error: BaseException) -> StoreCommitUnknownError:
        """The error for a COMMIT that may have had its effect."""
        return StoreCommitUnknownError(
            f"{address(self._errors.engine.url)} did not answer the COMMIT: it may or may not have committed.",
            transactional_id=self._claim.transactional_id,
            cause=str(driver_error(error)).strip(),
            next_step="claim the id again with the same expected fence and read the row",
        )


def quietly(step: Callable[[], object]) -> bool:
    """Run a step of the cleanup, and return whether it succeeded."""
    try:
        step()
    except Exception:  # noqa: BLE001  (rollback's contract: it raises no Exception)
        return False
    return True
