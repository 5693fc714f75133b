"""The findings about a database: its table, and whether it keeps acknowledged commits. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dualwrite.diagnosis.findings import LOST_COMMIT, DatabaseFacts, Finding, Severity
from dualwrite.diagnosis.findings import about_database as _database
from dualwrite.diagnosis.mysql_findings import judge_mysql
from dualwrite.diagnosis.postgresql_findings import judge_postgresql


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
    return [*found, *_durability(database.settings)]


def _durability(settings: Mapping[str, str]) -> list[Finding]:
    """The findings about the durability of commits; the database's kind shows in the names of its settings."""
    if "synchronous_commit" in settings:
        return judge_postgresql(settings)
    if "innodb_flush_log_at_trx_commit" in settings:
        return judge_mysql(settings)
    if "journal_mode" in settings:
        return _sqlite(settings)
    if "disable_wal" in settings:
        return _rocksdb(settings)
    if "forceSync" in settings:
        return _zookeeper(settings)
    what = "The database does not show whether an acknowledged commit is durable, and on how many disks."
    return [_database(Severity.UNKNOWN, what, "how it writes and replicates a commit before it acknowledges it")]


_NAMED: Final = 5


def _on_other_clusters(ids: tuple[str, ...]) -> Finding:
    named = ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")
    what = f"Transactional ids of another Kafka cluster, which can't be used with this one: {named}."
    step = "connect to their cluster; or, if they have moved to this one for good, run `dualwrite db move-cluster`"
    return _database(Severity.BROKEN, what, step)


_SQLITE_LEVELS: Final = ("off", "normal", "full", "extra")
_SQLITE_MODES: Final = ("delete", "truncate", "persist", "memory", "wal", "off")


def _sqlite(settings: Mapping[str, str]) -> list[Finding]:
    mode, level = settings["journal_mode"], settings.get("synchronous")
    if mode not in _SQLITE_MODES or level not in _SQLITE_LEVELS:
        what = f"journal_mode is {mode} and synchronous is {level}: this release of dualwrite does not know what that means."
        return [_database(Severity.UNKNOWN, what, "SQLite's documentation of both; safe are WAL and FULL")]
    weak = _sqlite_weakness(mode, level)
    if weak is None and settings.get("fullfsync") == "off":  # macOS only
        weak = (
            f"fullfsync is off: fsync of macOS leaves data in the disk's cache, so a power failure {LOST_COMMIT}.",
            "fullfsync = ON",
        )
    return [] if weak is None else [_database(Severity.WEAK, weak[0], f"PRAGMA {weak[1]}")]


def _sqlite_weakness(mode: str, level: str) -> tuple[str, str] | None:
    """What may happen, and the better setting."""
    if mode in ("off", "memory"):
        return f"journal_mode is {mode}: a crash in the middle of a transaction may corrupt the database.", "journal_mode = WAL"
    if level == "off":
        what = "synchronous is off: a power failure may lose acknowledged commits, and corrupt the database."
        return what, "synchronous = FULL"
    if level == "normal" and mode == "wal":
        return f"synchronous is normal with WAL: a power failure {LOST_COMMIT}.", "synchronous = FULL"
    if level == "normal":
        what = f"synchronous is normal: with journal_mode {mode}, a power failure may corrupt the database."
        return what, "synchronous = FULL"
    if level == "full" and mode == "delete":  # the commit is the journal's removal, after which the directory is not synced
        what = "journal_mode is delete: a power failure right after a commit may roll it back."
        return what, "journal_mode = WAL, or PRAGMA synchronous = EXTRA"
    return None


_TOLERANT: Final = {"kSkipAnyCorruptedRecords", "3"}


def _rocksdb(settings: Mapping[str, str]) -> list[Finding]:
    found = []
    if "env" in settings:
        what = "The database's files are not where its path says: it may be in memory, and gone with the process."
        found.append(_database(Severity.UNKNOWN, what, "the Env with which the Rdict was opened"))
    if settings.get("wal_recovery_mode") in _TOLERANT:
        what = f"wal_recovery_mode skips damaged records: after a power failure it {LOST_COMMIT}, and keeps later commits."
        found.append(_database(Severity.WEAK, what, "DBRecoveryMode.point_in_time(), the default"))
    return found


def _zookeeper(settings: Mapping[str, str]) -> list[Finding]:
    what = "A client can't see whether the servers write a commit to disk before they acknowledge it (forceSync)."
    found = [_database(Severity.UNKNOWN, what, "zookeeper.forceSync in the servers' configuration: yes, the default")]
    mode = settings.get("mode")
    if mode == "standalone":
        what = "One server, no ensemble: acknowledged commits are lost with its disk, and nothing works while it is down."
        found.append(_database(Severity.WEAK, what, "an ensemble of three or five servers"))
    elif mode is None:
        what = "The server does not say whether it belongs to an ensemble."
        found.append(_database(Severity.UNKNOWN, what, "4lw.commands.whitelist, which must contain srvr; or the servers"))
    return found
