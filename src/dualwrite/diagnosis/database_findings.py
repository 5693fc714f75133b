"""The findings about a database: its table, and whether it keeps acknowledged commits. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dualwrite.diagnosis.findings import DatabaseFacts, Finding, Severity

_CRASH: Final = "a crash of the server or its machine"
_LOST_COMMIT: Final = "may lose acknowledged commits: their messages are then visible without their rows"
_WEAK_VALUES: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("synchronous_commit", "off"): (f"{_CRASH} {_LOST_COMMIT}", "synchronous_commit=on"),
    ("fsync", "off"): ("a power failure may lose acknowledged commits, and corrupt the whole database", "fsync=on"),
    ("full_page_writes", "off"): ("a power failure may corrupt committed pages", "full_page_writes=on"),
}
"""PostgreSQL: by setting and value, what may happen, and the better value."""


def judge_database(database: DatabaseFacts) -> list[Finding]:
    """The findings about the database: its table, and the durability of acknowledged commits."""
    found = []
    if database.table_error is not None:
        what, step = database.table_error
        found.append(_database(Severity.BROKEN, what, step))
    elif database.newest_revision is None:
        pass
    elif database.revision is None:
        what = "The table is complete, but was not created by `dualwrite db upgrade`: keep it up to date yourself."
        found.append(_database(Severity.NOTE, what, None))
    elif database.revision != database.newest_revision:
        what = f"The table is at revision {database.revision}; the newest of this release is {database.newest_revision}."
        found.append(_database(Severity.WEAK, what, "dualwrite db upgrade"))
    if database.copied is not None:
        what, is_sure = database.copied
        step = "`dualwrite db new-store-id` if the original is still in use, else `dualwrite db keep-store-id`"
        found.append(_database(Severity.BROKEN if is_sure else Severity.WEAK, what, step))
    if database.why_no_marks is not None:
        what = f"A copy of this database could not be recognised: {database.why_no_marks}."
        step = "run `dualwrite db new-store-id` on each copy before its first writer starts; PostgreSQL: let the user execute "
        found.append(_database(Severity.NOTE, what, f"{step}pg_control_system()"))
    if database.elsewhere:
        found.append(_on_other_clusters(database.elsewhere))
    return [*found, *_postgresql(database.settings), *_mysql(database.settings), *_sqlite(database.settings)]


_NAMED: Final = 5


def _on_other_clusters(ids: tuple[str, ...]) -> Finding:
    named = ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")
    what = f"Transactional ids of another Kafka cluster, which can't be used with this one: {named}."
    step = "connect to their cluster; or, if they have moved to this one for good, run `dualwrite db move-cluster`"
    return _database(Severity.BROKEN, what, step)


def _postgresql(settings: Mapping[str, str]) -> list[Finding]:
    if settings.get("transaction_read_only") == "on":
        what = "The database is read-only (transaction_read_only): a standby, or a read-only user."
        return [_database(Severity.BROKEN, what, "connect to the primary, as a user that may write")]
    found = [
        _database(Severity.WEAK, f"{name} is {value}: {consequence}.", change)
        for (name, value), (consequence, change) in _WEAK_VALUES.items()
        if settings.get(name) == value
    ]
    standbys = settings.get("synchronous_standby_names")
    if standbys == "":
        what = "A commit waits for no standby: one that is promoted after a failure may lack the last commits."
        found.append(_database(Severity.NOTE, what, "set synchronous_standby_names, if there are standbys"))
    elif standbys and settings.get("synchronous_commit") == "local":
        what = f"synchronous_commit is local: promoting a standby {_LOST_COMMIT}."
        found.append(_database(Severity.WEAK, what, "synchronous_commit=on"))
    return found


def _mysql(settings: Mapping[str, str]) -> list[Finding]:
    """MariaDB and MySQL, by the names of their variables."""
    if settings.get("engine", "InnoDB") != "InnoDB":
        what = f"The table's engine is {settings['engine']}: without transactions there is no guarantee."
        return [_database(Severity.BROKEN, what, "ALTER TABLE kafka_transaction_state ENGINE=InnoDB")]
    read_only = [name for name in _MYSQL_READ_ONLY if settings.get(name) == "ON"]
    if read_only:
        what = f"The database is read-only ({', '.join(read_only)}): a replica, or a read-only user."
        return [_database(Severity.BROKEN, what, "connect to the primary, as a user that may write")]
    found = []
    if settings.get("innodb_flush_log_at_trx_commit", "1") != "1":
        value = settings["innodb_flush_log_at_trx_commit"]
        what = f"innodb_flush_log_at_trx_commit is {value}: {_CRASH} {_LOST_COMMIT}."
        found.append(_database(Severity.WEAK, what, "innodb_flush_log_at_trx_commit=1"))
    if settings.get("innodb_doublewrite") in ("OFF", "0"):
        what = "innodb_doublewrite is off: a power failure may corrupt committed pages."
        found.append(_database(Severity.WEAK, what, "innodb_doublewrite=ON"))
    return [*found, *_binary_log(settings)]


_MYSQL_READ_ONLY: Final = ("super_read_only", "read_only", "tx_read_only", "transaction_read_only")


def _binary_log(settings: Mapping[str, str]) -> list[Finding]:
    if settings.get("log_bin") != "ON":
        return []
    found = []
    if settings.get("sync_binlog") != "1":
        what = f"sync_binlog is {settings.get('sync_binlog')}: after a power failure, replicas may lack commits that are here."
        found.append(_database(Severity.WEAK, what, "sync_binlog=1"))
    waits = ("rpl_semi_sync_master_enabled", "rpl_semi_sync_source_enabled", "wsrep_on")
    if not any(settings.get(name) == "ON" for name in waits):
        what = "A commit waits for no replica: one that is promoted after a failure may lack the last commits."
        found.append(_database(Severity.NOTE, what, "enable semi-synchronous replication, if there are replicas"))
    return found


def _sqlite(settings: Mapping[str, str]) -> list[Finding]:
    mode, level = settings.get("journal_mode"), settings.get("synchronous")
    if mode is None:
        return []
    if mode in ("off", "memory"):
        what = f"journal_mode is {mode}: a crash in the middle of a transaction may corrupt the database."
        return [_database(Severity.WEAK, what, "PRAGMA journal_mode = WAL")]
    if level == "off":
        what = "synchronous is off: a power failure may lose acknowledged commits, and corrupt the database."
        return [_database(Severity.WEAK, what, "PRAGMA synchronous = FULL")]
    if level == "normal":
        if mode == "wal":
            what = f"synchronous is normal with WAL: a power failure {_LOST_COMMIT}."
        else:
            what = f"synchronous is normal: with journal_mode {mode}, a power failure may corrupt the database."
        return [_database(Severity.WEAK, what, "PRAGMA synchronous = FULL")]
    if level == "full" and mode == "delete":  # the commit is the journal's removal, after which the directory is not synced
        what = "journal_mode is delete: a power failure right after a commit may roll it back."
        return [_database(Severity.WEAK, what, "PRAGMA journal_mode = WAL, or PRAGMA synchronous = EXTRA")]
    return []


def _database(severity: Severity, what: str, change: str | None) -> Finding:
    return Finding(severity, "database", what, change)
