"""The one place where errors of a SQL database are translated into ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import URL, Engine
from sqlalchemy.exc import PendingRollbackError

from dualwrite.errors import (
    ClaimTimeoutError,
    DualWriteError,
    StateTableMissingError,
    StoreCommitFailedError,
    StoreError,
    StoreLockedError,
    StoreUnavailableError,
)
from dualwrite.shell import shell_word
from dualwrite.stores.sql.dialect import ErrorClass, StoreDialect, driver_error
from dualwrite.stores.sql.home import given_schema
from dualwrite.stores.sql.table import TABLE_NAME, metadata

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
        f"check address, user, password and privileges: {_SETTING}",
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
        "The database {where} aborted our transaction because of a conflict while {doing}; nothing of it was committed.",
        "run the whole transaction again",
    ),
    ErrorClass.DENIED: (
        StoreError,
        "The database {where} does not permit {doing}; nothing of it was written.",
        "grant SELECT, INSERT and UPDATE on {table} to the connection's role, and to each that a block sets (SET ROLE)",
    ),
    ErrorClass.READ_ONLY: (
        StoreError,
        "The database {where} permits no writes while {doing}; nothing of it was written.",
        "find out what makes it read-only: {read_only_by}",
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
    ErrorClass.DUPLICATE: (StoreError, "The database {where} failed while {doing}.", None),
    ErrorClass.OTHER: (StoreError, "The database {where} failed while {doing}.", None),
}
_TOO_SLOW: Final = (
    StoreUnavailableError,
    "A statement in the database {where} was ended by {time_limit}, or canceled, while {doing}.",
    "try again; if it was the limit, raise it: the block, the user or the database has set it",
)
_OUTAGES: Final = frozenset({ErrorClass.CONNECTION, ErrorClass.LOCKED})
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
    """Translates the errors of one engine's database.

    Args:
        engine: For the address.
        dialect: Classifies the driver's errors.
    """

    engine: Engine
    dialect: StoreDialect

    def classify(self, error: BaseException) -> ErrorClass:
        """What the error means."""
        return self.dialect.classify(error)

    def is_outage(self, error: BaseException) -> bool:
        """See TxnStateStore. A statement that took longer than the database permits is not one."""
        if isinstance(error, PendingRollbackError):
            return error.code == _INVALIDATED
        driver = driver_error(error)
        return self.classify(error) in _OUTAGES and not _took_too_long(driver)

    def translated(self, error: BaseException, doing: str, transactional_id: str | None = None) -> DualWriteError:
        """Our error for the driver's, except during COMMIT.

        Args:
            error: SQLAlchemy's or the driver's error.
            doing: What was tried, to complete "… failed while <doing>".
            transactional_id: The id it was tried for.
        """
        error_class = self.classify(error)
        kind, what, next_step = _TOO_SLOW if _took_too_long(driver_error(error)) else _TEXTS[error_class]
        if error_class is ErrorClass.LOCKED:
            blocker = self.dialect.known_blocker(self.engine)
            if blocker is not None:
                what, next_step = f"{what[:-1]}; it is held by {blocker.text}.", blocker.next_step
        schema, table = given_schema(self.engine), _table_named_in(driver_error(error))
        facts = {
            "where": address(self.engine.url),
            "command_url": address_for_commands(self.engine.url),
            "doing": doing,
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


def error_and_causes(error: BaseException, *, before: BaseException | None = None) -> Iterator[BaseException]:
    """The error, what it was raised from, and what was being handled when it was raised, the newest first.

    Args:
        error: The error.
        before: What was being handled before: neither this error nor its causes are returned.
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
