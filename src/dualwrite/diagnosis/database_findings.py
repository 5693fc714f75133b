"""The findings about a database: its table, and whether it keeps acknowledged commits. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Final

from dualwrite.diagnosis.findings import CRASH, LOST_COMMIT, DatabaseFacts, Finding, Severity

_broken = partial(Finding, Severity.BROKEN, "database")
_weak = partial(Finding, Severity.WEAK, "database")
_unknown = partial(Finding, Severity.UNKNOWN, "database")
_note = partial(Finding, Severity.NOTE, "database")

_NAMED: Final = 5

_READ_ONLY: Final = ("super_read_only", "read_only", "tx_read_only", "transaction_read_only", "innodb_read_only")
_ON: Final = ("ON", "1")
_DURABLE: Final = ("1", "3")  # 3 is MariaDB's, with one sync more
_DOUBLEWRITE: Final = ("ON", "1", "DETECT_AND_RECOVER")
_NO_DOUBLEWRITE: Final = ("OFF", "0", "DETECT_ONLY")
_NO_FLUSH: Final = ("nosync", "littlesync")
_FOREVER: Final = 4_294_967_295  # milliseconds; MySQL's greatest timeout
_ROLES: Final = (("master", "slave"), ("source", "replica"))
_SAFE_CONSISTENCY: Final = ("BEFORE_ON_PRIMARY_FAILOVER", "BEFORE", "AFTER", "BEFORE_AND_AFTER")

_SQLITE_LEVELS: Final = ("off", "normal", "full", "extra")
_SQLITE_MODES: Final = ("delete", "truncate", "persist", "memory", "wal", "off")

_TOLERANT: Final = {"kSkipAnyCorruptedRecords", "3"}


def judge_database(database: DatabaseFacts) -> list[Finding]:
    """The findings about the database: its table, and the durability of acknowledged commits."""
    found = []
    if database.table_error is not None:
        what, step = database.table_error
        found.append(_broken(what, step))
    elif database.newest_revision is None:
        pass
    elif database.revision is None:
        what = "The table is complete, but was not created by `dualwrite db upgrade`: keep it up to date yourself."
        found.append(_note(what, None))
    elif database.revision != database.newest_revision:
        what = f"The table is at revision {database.revision}; the newest of this release is {database.newest_revision}."
        found.append(_weak(what, "dualwrite db upgrade"))
    if database.copied is not None:
        what, is_sure = database.copied
        step = "`dualwrite db new-store-id` if the original is still in use, else `dualwrite db keep-store-id`"
        found.append((_broken if is_sure else _weak)(what, step))
    if database.why_no_marks is not None:
        what = f"A copy of this database could not be recognised: {database.why_no_marks}."
        step = "run `dualwrite db new-store-id` on each copy before its first writer starts; PostgreSQL: let the user execute "
        found.append(_note(what, f"{step}pg_control_system()"))
    if database.elsewhere:
        found.append(_on_other_clusters(database.elsewhere))
    return [*found, *_durability(database.settings)]


def _durability(settings: Mapping[str, str]) -> list[Finding]:
    """The findings about the durability of commits; the database's kind shows in the names of its settings."""
    if "synchronous_commit" in settings:
        return _postgresql(settings)
    if "innodb_flush_log_at_trx_commit" in settings:
        return _mysql(settings)
    if "journal_mode" in settings:
        return _sqlite(settings)
    if "disable_wal" in settings:
        return _rocksdb(settings)
    if "forceSync" in settings:
        return _zookeeper(settings)
    what = "The database does not show whether an acknowledged commit is durable, and on how many disks."
    return [_unknown(what, "how it writes and replicates a commit before it acknowledges it")]


def _on_other_clusters(ids: tuple[str, ...]) -> Finding:
    named = ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")
    what = f"Transactional ids of another Kafka cluster, which can't be used with this one: {named}."
    step = "connect to their cluster; or, if they have moved to this one for good, run `dualwrite db move-cluster`"
    return _broken(what, step)


def _managed(product: str, server: str) -> Finding:
    what = f"This is {product}: where an acknowledged commit is stored, and what a failover keeps, is not decided by "
    return _unknown(f"{what}{server}'s settings.", "the provider's documentation of durability and failover")


# --- MySQL and MariaDB ------------------------------------------------------------------------------------------------


def _mysql(settings: Mapping[str, str]) -> list[Finding]:
    if settings.get("engine", "InnoDB") != "InnoDB":
        what = f"The table's engine is {settings['engine']}: without transactions there is no guarantee."
        return [_broken(what, "ALTER TABLE kafka_transaction_state ENGINE=InnoDB")]
    read_only = [name for name in _READ_ONLY if settings.get(name) in _ON]
    if read_only:
        what = f"The database is read-only ({', '.join(read_only)}): a replica, or a read-only user."
        return [_broken(what, "connect to the primary, as a user that may write")]
    found = _disk(settings)
    if "product" in settings:
        return [*found, _managed(settings["product"], "MySQL")]
    if _is_galera(settings):
        found.append(_GALERA)
    return [*found, *_group_replication(settings), *_binary_log(settings)]


def _is_galera(settings: Mapping[str, str]) -> bool:
    """Whether the server belongs to a Galera cluster: `wsrep_on` alone may be on without a provider."""
    return settings.get("wsrep_on") in _ON and settings.get("wsrep_provider", "none").lower() not in ("", "none")


_GALERA: Final = _weak(
    "This is a Galera cluster. Jepsen (2026, versions 12.1.2 to 12.2.2) found that it loses committed transactions when nodes "
    "crash or are cut off, allows lost updates between nodes without any failure, and reads old rows. Their messages are then "
    "visible without their rows, and two writers of an id on two nodes may both pass the check of the fencing token.",
    "let every writer and every command use the same one node, with innodb_flush_log_at_trx_commit=1 on all; after a node has "
    "failed, compare rows and messages",
)


def _disk(settings: Mapping[str, str]) -> list[Finding]:
    """What the server itself may lose."""
    found = []
    flush = settings["innodb_flush_log_at_trx_commit"]
    if flush not in _DURABLE:
        what = f"innodb_flush_log_at_trx_commit is {flush}: {CRASH} {LOST_COMMIT}."
        found.append(_weak(what, "innodb_flush_log_at_trx_commit=1"))
    if settings.get("Innodb_redo_log_enabled") == "OFF":
        what = f"InnoDB's redo log is disabled: {CRASH} may lose the whole database."
        found.append(_weak(what, "ALTER INSTANCE ENABLE INNODB REDO_LOG"))
    if (method := settings.get("innodb_flush_method", "")).lower() in _NO_FLUSH:
        what = f"innodb_flush_method is {method}: a power failure may lose acknowledged commits, and corrupt the database."
        found.append(_weak(what, "innodb_flush_method=O_DIRECT"))
    doublewrite = settings.get("innodb_doublewrite", "ON")
    if doublewrite in _NO_DOUBLEWRITE:
        state = "off" if doublewrite != "DETECT_ONLY" else doublewrite
        what = f"innodb_doublewrite is {state}: a power failure may corrupt committed pages."
        found.append(_weak(what, "innodb_doublewrite=ON"))
    elif doublewrite not in _DOUBLEWRITE:
        what = f"innodb_doublewrite is {doublewrite}: whether a power failure may corrupt committed pages is not known."
        found.append(_unknown(what, "the server's documentation; ON is safe"))
    return found


def _group_replication(settings: Mapping[str, str]) -> list[Finding]:
    if not settings.get("group_replication_group_name"):
        return []
    if settings.get("group_replication_single_primary_mode") == "OFF":
        what = "Group replication has several primaries: a read on one may be older than a commit on another."
        return [_weak(what, "group_replication_single_primary_mode=ON")]
    consistency = settings.get("group_replication_consistency")
    if consistency not in _SAFE_CONSISTENCY:
        what = (
            f"group_replication_consistency is {consistency}: a new primary may be read before it has applied the last commits."
        )
        return [_weak(what, "group_replication_consistency=BEFORE_ON_PRIMARY_FAILOVER")]
    what = "This is group replication: a commit is in the memory of a majority, and on the disk of this server only."
    return [_unknown(what, "whether several members can lose power at once; dualwrite is not tested with it")]


def _binary_log(settings: Mapping[str, str]) -> list[Finding]:
    if settings.get("log_bin") not in _ON:
        return []
    found = []
    if settings.get("sync_binlog") != "1":
        what = f"sync_binlog is {settings.get('sync_binlog')}: a power failure {LOST_COMMIT}, and replicas may have other "
        found.append(_weak(f"{what}commits than this server.", "sync_binlog=1"))
    if settings.get("sql_log_bin") == "OFF":
        what = "sql_log_bin is off on this connection: its commits never reach a replica."
        found.append(_weak(what, "sql_log_bin=ON"))
    if _is_galera(settings) or settings.get("group_replication_group_name"):
        return found
    role = next((pair for pair in _ROLES if settings.get(f"rpl_semi_sync_{pair[0]}_enabled") in _ON), None)
    return [*found, *(_asynchronous(settings) if role is None else _semi_synchronous(settings, *role))]


def _asynchronous(settings: Mapping[str, str]) -> list[Finding]:
    if (attached := settings.get("Slaves_connected", "0")) != "0":
        what = f"A commit does not wait for an attached replica ({attached}): one that is promoted may lack the last commits."
        return [_weak(what, "semi-synchronous replication, with a timeout that never falls back")]
    what = "A commit waits for no replica: one that is promoted after a failure may lack the last commits."
    return [_note(what, "enable semi-synchronous replication, if there are replicas")]


def _semi_synchronous(settings: Mapping[str, str], role: str, other: str) -> list[Finding]:
    name = f"rpl_semi_sync_{role}"
    found = []
    if settings.get(f"{name.capitalize()}_status") == "OFF":
        what = f"Semi-synchronous replication is enabled, but off at present ({name.capitalize()}_status): a commit waits for "
        found.append(_weak(f"{what}no replica.", "see whether the replicas are connected and enabled for it"))
    limit = settings.get(f"{name}_timeout", "")
    if not limit.isdecimal():
        what = f"{name}_timeout can't be read: whether commits stop waiting for a replica is not known."
        found.append(_unknown(what, f"SHOW GLOBAL VARIABLES LIKE '{name}_timeout'"))
    elif int(limit) < _FOREVER:
        what = f"A commit that no replica acknowledges within {int(limit) / 1000:g} s ({name}_timeout) is acknowledged all the "
        what += "same, and so are the next ones: a replica that is promoted then lacks them."
        found.append(_weak(what, f"{name}_timeout={_FOREVER}"))
    if settings.get(f"{name}_wait_no_{other}") == "OFF":
        what = f"{name}_wait_no_{other} is off: as soon as too few replicas are connected, a commit waits for none."
        found.append(_weak(what, f"{name}_wait_no_{other}=ON"))
    if (point := settings.get(f"{name}_wait_point")) != "AFTER_SYNC":
        what = f"{name}_wait_point is {point}: others, such as recovery, see a commit before a replica has it, and may act on "
        found.append(_weak(f"{what}what a failover then undoes.", f"{name}_wait_point=AFTER_SYNC"))
    return found


# --- PostgreSQL -------------------------------------------------------------------------------------------------------

_WEAK_VALUES: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("synchronous_commit", "off"): (f"{CRASH} {LOST_COMMIT}", "synchronous_commit=on"),
    ("fsync", "off"): ("a power failure may lose acknowledged commits, and corrupt the whole database", "fsync=on"),
    ("full_page_writes", "off"): ("a power failure may corrupt committed pages", "full_page_writes=on"),
}
"""By setting and value, what may happen, and the better value."""

_WAITS: Final = ("on", "remote_apply", "remote_write", "local", "off")
_STANDBYS: Final = re.compile(r"\s*(?:(?:FIRST|ANY)\s+)?(\d+)\s*\((.*)\)\s*", re.IGNORECASE)


def _postgresql(settings: Mapping[str, str]) -> list[Finding]:
    if settings.get("transaction_read_only") == "on":
        what = "The database is read-only (transaction_read_only): a standby, or a read-only user."
        return [_broken(what, "connect to the primary, as a user that may write")]
    found = []
    if settings.get("persistence") == "u":
        what = "The table kafka_transaction_state is UNLOGGED: after a crash of the server it is empty, and so is every record "
        found.append(_broken(f"{what}of what was committed.", "ALTER TABLE kafka_transaction_state SET LOGGED"))
    found += [
        _weak(f"{name} is {value}: {consequence}.", change)
        for (name, value), (consequence, change) in _WEAK_VALUES.items()
        if settings.get(name) == value
    ]
    if "product" in settings:
        return [*found, _managed(settings["product"], "PostgreSQL")]
    return found if settings["synchronous_commit"] == "off" else [*found, *_standbys(settings)]


def _standbys(settings: Mapping[str, str]) -> list[Finding]:
    names, waits = settings.get("synchronous_standby_names"), settings["synchronous_commit"]
    attached = int(settings["attached standbys"]) if "attached standbys" in settings else None
    if names is None or waits not in _WAITS:
        what = f"synchronous_standby_names is {names}, synchronous_commit is {waits}: whether a commit waits for a standby is "
        return [_unknown(f"{what}not known.", "PostgreSQL's documentation of both settings")]
    if not names:
        return [_waits_for_none(attached)]
    if waits == "local":
        what = f"synchronous_commit is local: promoting a standby {LOST_COMMIT}."
        return [_weak(what, "synchronous_commit=on")]
    if waits == "remote_write":
        what = "synchronous_commit is remote_write: a commit waits until a standby has it in memory. If that machine fails "
        return [_weak(f"{what}too, promoting it {LOST_COMMIT}.", "synchronous_commit=on")]
    return _synchronous(settings, names, attached)


def _waits_for_none(attached: int | None) -> Finding:
    if attached:
        what = f"A commit does not wait for an attached standby ({attached}): one that is promoted may lack the last commits."
        return _weak(what, "synchronous_standby_names, with the standbys that may be promoted")
    what = "A commit waits for no standby: one that is promoted after a failure may lack the last commits."
    if attached == 0:
        what += " None is attached at present."
    return _note(what, "set synchronous_standby_names, if there are standbys")


def _synchronous(settings: Mapping[str, str], names: str, attached: int | None) -> list[Finding]:
    listed = _STANDBYS.fullmatch(names)
    wanted = int(listed[1]) if listed else 1
    members = (listed[2] if listed else names).split(",")
    there = settings.get("synchronous standbys")
    if there is not None and int(there) < wanted:
        what = f"A commit waits for {wanted} of {names!r}, and {there} of them are attached: every COMMIT hangs now."
        return [_broken(what, "start the standbys, or change synchronous_standby_names")]
    everyone = len(members) if attached is None else max(len(members), attached)
    if everyone <= wanted and "*" not in names:
        return []
    what = f"A commit waits for {wanted} of the standbys {names!r}. If another one is promoted, it may lack the last commits."
    step = "whether your failover tool promotes only a standby that has every acknowledged commit (Patroni: synchronous_mode)"
    return [_unknown(what, step)]


# --- SQLite, RocksDB, ZooKeeper ---------------------------------------------------------------------------------------


def _sqlite(settings: Mapping[str, str]) -> list[Finding]:
    mode, level = settings["journal_mode"], settings.get("synchronous")
    if mode not in _SQLITE_MODES or level not in _SQLITE_LEVELS:
        what = f"journal_mode is {mode} and synchronous is {level}: this release of dualwrite does not know what that means."
        return [_unknown(what, "SQLite's documentation of both; safe are WAL and FULL")]
    weak = _sqlite_weakness(mode, level)
    if weak is None and settings.get("fullfsync") == "off":  # macOS only
        weak = (
            f"fullfsync is off: fsync of macOS leaves data in the disk's cache, so a power failure {LOST_COMMIT}.",
            "fullfsync = ON",
        )
    return [] if weak is None else [_weak(weak[0], f"PRAGMA {weak[1]}")]


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


def _rocksdb(settings: Mapping[str, str]) -> list[Finding]:
    found = []
    if "env" in settings:
        what = "The database's files are not where its path says: it may be in memory, and gone with the process."
        found.append(_unknown(what, "the Env with which the Rdict was opened"))
    if settings.get("wal_recovery_mode") in _TOLERANT:
        what = f"wal_recovery_mode skips damaged records: after a power failure it {LOST_COMMIT}, and keeps later commits."
        found.append(_weak(what, "DBRecoveryMode.point_in_time(), the default"))
    return found


def _zookeeper(settings: Mapping[str, str]) -> list[Finding]:
    what = "A client can't see whether the servers write a commit to disk before they acknowledge it (forceSync)."
    found = [_unknown(what, "zookeeper.forceSync in the servers' configuration: yes, the default")]
    mode = settings.get("mode")
    if mode == "standalone":
        what = "One server, no ensemble: acknowledged commits are lost with its disk, and nothing works while it is down."
        found.append(_weak(what, "an ensemble of three or five servers"))
    elif mode is None:
        what = "The server does not say whether it belongs to an ensemble."
        found.append(_unknown(what, "4lw.commands.whitelist, which must contain srvr; or the servers"))
    return found
