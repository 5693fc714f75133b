"""The findings about a database: its table, whether it keeps acknowledged commits, what the role may do. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from dualwrite.diagnosis.findings import CRASH, LOST_COMMIT, DatabaseFacts, Finding, Severity
from dualwrite.stores.sql.rights import BASIC, RIGHTS, Right, rights_words

_broken = partial(Finding, Severity.BROKEN, "database")
_weak = partial(Finding, Severity.WEAK, "database")
_unknown = partial(Finding, Severity.UNKNOWN, "database")
_note = partial(Finding, Severity.NOTE, "database")

_MAX_NAMED_IDS: Final = 5

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
    return [*_table(database), *_origin(database), *_durability(database.settings)]


def _table(database: DatabaseFacts) -> Iterator[Finding]:
    if database.table_error is not None:
        yield _broken(*database.table_error)
    elif database.newest_revision is None:
        pass
    elif database.revision is None:
        yield _note("The table is complete, but was not created by `dualwrite db upgrade`: keep it up to date yourself.", None)
    elif database.revision != database.newest_revision:
        what = f"The table is at revision {database.revision}; the newest of this release is {database.newest_revision}."
        yield _weak(what, "dualwrite db upgrade")


def _origin(database: DatabaseFacts) -> Iterator[Finding]:
    """The findings about copies, other clusters and earlier states."""
    if database.copied is not None:
        what, is_sure = database.copied
        step = "`dualwrite db new-store-id` if the original is still in use, else `dualwrite db keep-store-id`"
        yield (_broken if is_sure else _weak)(what, step)
    if database.why_no_marks is not None:
        step = "run `dualwrite db new-store-id` on each copy before its first writer starts; PostgreSQL: let the user execute "
        what = f"A copy of this database could not be recognised: {database.why_no_marks}."
        yield _note(what, f"{step}pg_control_system()")
    if database.elsewhere:
        what = f"Transactional ids of another Kafka cluster, which can't be used with this one: {_named(database.elsewhere)}."
        yield _broken(
            what, "connect to their cluster; or, if they have moved to this one for good, run `dualwrite db move-cluster`"
        )
    if database.forgotten:
        names = _named(database.forgotten)
        yield _weak(
            f"It has gone back to an earlier state, and has forgotten committed transactions of {names}.",
            "`dualwrite status` says where their messages are; docs/operations/database-failover.md says what to do",
        )


def _durability(settings: Mapping[str, str]) -> Iterable[Finding]:
    """The findings about the durability of commits; the database's kind shows in the names of its settings."""
    for name, judge in _KINDS.items():
        if name in settings:
            return judge(settings)
    what = "The database does not show whether an acknowledged commit is durable, and on how many disks."
    return [_unknown(what, "how it writes and replicates a commit before it acknowledges it")]


def _named(ids: tuple[str, ...]) -> str:
    return ", ".join(ids[:_MAX_NAMED_IDS]) + (f" and {len(ids) - _MAX_NAMED_IDS} more" if len(ids) > _MAX_NAMED_IDS else "")


def _managed(product: str, server: str) -> Finding:
    what = f"This is {product}: where an acknowledged commit is stored, and what a failover keeps, is not decided by "
    return _unknown(f"{what}{server}'s settings.", "the provider's documentation of durability and failover")


# --- MySQL and MariaDB ------------------------------------------------------------------------------------------------


def _mysql(settings: Mapping[str, str]) -> Iterator[Finding]:
    if settings.get("engine", "InnoDB") != "InnoDB":
        what = f"The table's engine is {settings['engine']}: without transactions there is no guarantee."
        yield _broken(what, "ALTER TABLE kafka_transaction_state ENGINE=InnoDB")
        return
    if read_only := [name for name in _READ_ONLY if settings.get(name) in _ON]:
        what = f"The database is read-only ({', '.join(read_only)}): a replica, or a read-only user."
        yield _broken(what, "connect to the primary, as a user that may write")
        return
    yield from _disk(settings)
    if "product" in settings:
        yield _managed(settings["product"], "MySQL")
        return
    if _is_galera(settings):
        yield _GALERA
    yield from _group_replication(settings)
    if settings.get("log_bin") in _ON:
        yield from _binary_log(settings)


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


def _disk(settings: Mapping[str, str]) -> Iterator[Finding]:
    """What the server itself may lose."""
    if (flush := settings["innodb_flush_log_at_trx_commit"]) not in _DURABLE:
        what = f"innodb_flush_log_at_trx_commit is {flush}: {CRASH} {LOST_COMMIT}."
        yield _weak(what, "innodb_flush_log_at_trx_commit=1")
    if settings.get("Innodb_redo_log_enabled") == "OFF":
        what = f"InnoDB's redo log is disabled: {CRASH} may lose the whole database."
        yield _weak(what, "ALTER INSTANCE ENABLE INNODB REDO_LOG")
    if (method := settings.get("innodb_flush_method", "")).lower() in _NO_FLUSH:
        what = f"innodb_flush_method is {method}: a power failure may lose acknowledged commits, and corrupt the database."
        yield _weak(what, "innodb_flush_method=O_DIRECT")
    doublewrite = settings.get("innodb_doublewrite", "ON")
    if doublewrite in _NO_DOUBLEWRITE:
        state = "off" if doublewrite != "DETECT_ONLY" else doublewrite
        yield _weak(f"innodb_doublewrite is {state}: a power failure may corrupt committed pages.", "innodb_doublewrite=ON")
    elif doublewrite not in _DOUBLEWRITE:
        what = f"innodb_doublewrite is {doublewrite}: whether a power failure may corrupt committed pages is not known."
        yield _unknown(what, "the server's documentation; ON is safe")


def _group_replication(settings: Mapping[str, str]) -> Iterator[Finding]:
    if not settings.get("group_replication_group_name"):
        return
    consistency = settings.get("group_replication_consistency")
    if settings.get("group_replication_single_primary_mode") == "OFF":
        what = "Group replication has several primaries: a read on one may be older than a commit on another."
        yield _weak(what, "group_replication_single_primary_mode=ON")
    elif consistency not in _SAFE_CONSISTENCY:
        what = f"group_replication_consistency is {consistency}: a new primary may be read before it has applied the last "
        yield _weak(f"{what}commits.", "group_replication_consistency=BEFORE_ON_PRIMARY_FAILOVER")
    else:
        what = "This is group replication: a commit is in the memory of a majority, and on the disk of this server only."
        yield _unknown(what, "whether several members can lose power at once; dualwrite is not tested with it")


def _binary_log(settings: Mapping[str, str]) -> Iterator[Finding]:
    if settings.get("sync_binlog") != "1":
        what = f"sync_binlog is {settings.get('sync_binlog')}: a power failure {LOST_COMMIT}, and replicas may have other "
        yield _weak(f"{what}commits than this server.", "sync_binlog=1")
    if settings.get("sql_log_bin") == "OFF":
        yield _weak("sql_log_bin is off on this connection: its commits never reach a replica.", "sql_log_bin=ON")
    if _is_galera(settings) or settings.get("group_replication_group_name"):
        return
    role = next((pair for pair in _ROLES if settings.get(f"rpl_semi_sync_{pair[0]}_enabled") in _ON), None)
    if role is not None:
        yield from _semi_synchronous(settings, *role)
    elif (attached := settings.get("Slaves_connected", "0")) != "0":
        what = f"A commit does not wait for an attached replica ({attached}): one that is promoted may lack the last commits."
        yield _weak(what, "semi-synchronous replication, with a timeout that never falls back")
    else:
        what = "A commit waits for no replica: one that is promoted after a failure may lack the last commits."
        yield _note(what, "enable semi-synchronous replication, if there are replicas")


def _semi_synchronous(settings: Mapping[str, str], role: str, other: str) -> Iterator[Finding]:
    name = f"rpl_semi_sync_{role}"
    if settings.get(f"{name.capitalize()}_status") == "OFF":
        what = f"Semi-synchronous replication is enabled, but off at present ({name.capitalize()}_status): a commit waits for "
        yield _weak(f"{what}no replica.", "see whether the replicas are connected and enabled for it")
    limit = settings.get(f"{name}_timeout", "")
    if not limit.isdecimal():
        what = f"{name}_timeout can't be read: whether commits stop waiting for a replica is not known."
        yield _unknown(what, f"SHOW GLOBAL VARIABLES LIKE '{name}_timeout'")
    elif int(limit) < _FOREVER:
        what = f"A commit that no replica acknowledges within {int(limit) / 1000:g} s ({name}_timeout) is acknowledged all the "
        what += "same, and so are the next ones: a replica that is promoted then lacks them."
        yield _weak(what, f"{name}_timeout={_FOREVER}")
    if settings.get(f"{name}_wait_no_{other}") == "OFF":
        what = f"{name}_wait_no_{other} is off: as soon as too few replicas are connected, a commit waits for none."
        yield _weak(what, f"{name}_wait_no_{other}=ON")
    if (point := settings.get(f"{name}_wait_point")) != "AFTER_SYNC":
        what = f"{name}_wait_point is {point}: others, such as recovery, see a commit before a replica has it, and may act on "
        yield _weak(f"{what}what a failover then undoes.", f"{name}_wait_point=AFTER_SYNC")


# --- PostgreSQL -------------------------------------------------------------------------------------------------------

_WEAK_VALUES: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("synchronous_commit", "off"): (f"{CRASH} {LOST_COMMIT}", "synchronous_commit=on"),
    ("fsync", "off"): ("a power failure may lose acknowledged commits, and corrupt the whole database", "fsync=on"),
    ("full_page_writes", "off"): ("a power failure may corrupt committed pages", "full_page_writes=on"),
}
"""By setting and value, what may happen, and the better value."""

_WAITS: Final = ("on", "remote_apply", "remote_write", "local", "off")
_STANDBYS: Final = re.compile(r"\s*(?:(?:FIRST|ANY)\s+)?(\d+)\s*\((.*)\)\s*", re.IGNORECASE)


def _postgresql(settings: Mapping[str, str]) -> Iterator[Finding]:
    if settings.get("transaction_read_only") == "on":
        what = "The database is read-only (transaction_read_only): a standby, or a read-only user."
        yield _broken(what, "connect to the primary, as a user that may write")
        return
    if settings.get("persistence") == "u":
        what = "The table kafka_transaction_state is UNLOGGED: after a crash of the server it is empty, and so is every record "
        yield _broken(f"{what}of what was committed.", "ALTER TABLE kafka_transaction_state SET LOGGED")
    for (name, value), (consequence, change) in _WEAK_VALUES.items():
        if settings.get(name) == value:
            yield _weak(f"{name} is {value}: {consequence}.", change)
    if "product" in settings:
        yield _managed(settings["product"], "PostgreSQL")
    elif settings["synchronous_commit"] != "off":
        yield from _standbys(settings)


def _standbys(settings: Mapping[str, str]) -> Iterator[Finding]:
    names, waits = settings.get("synchronous_standby_names"), settings["synchronous_commit"]
    attached = int(settings["attached standbys"]) if "attached standbys" in settings else None
    if names is None or waits not in _WAITS:
        what = f"synchronous_standby_names is {names}, synchronous_commit is {waits}: whether a commit waits for a standby is "
        yield _unknown(f"{what}not known.", "PostgreSQL's documentation of both settings")
    elif not names and attached:
        what = f"A commit does not wait for an attached standby ({attached}): one that is promoted may lack the last commits."
        yield _weak(what, "synchronous_standby_names, with the standbys that may be promoted")
    elif not names:
        what = "A commit waits for no standby: one that is promoted after a failure may lack the last commits."
        now = " None is attached at present." if attached == 0 else ""
        yield _note(what + now, "set synchronous_standby_names, if there are standbys")
    elif waits == "local":
        yield _weak(f"synchronous_commit is local: promoting a standby {LOST_COMMIT}.", "synchronous_commit=on")
    elif waits == "remote_write":
        what = "synchronous_commit is remote_write: a commit waits until a standby has it in memory. If that machine fails "
        yield _weak(f"{what}too, promoting it {LOST_COMMIT}.", "synchronous_commit=on")
    else:
        yield from _synchronous(settings, names, attached)


def _synchronous(settings: Mapping[str, str], names: str, attached: int | None) -> Iterator[Finding]:
    listed = _STANDBYS.fullmatch(names)
    wanted = int(listed[1]) if listed else 1
    members = (listed[2] if listed else names).split(",")
    there = settings.get("synchronous standbys")
    everyone = len(members) if attached is None else max(len(members), attached)
    if there is not None and int(there) < wanted:
        what = f"A commit waits for {wanted} of {names!r}, and {there} of them are attached: every COMMIT hangs now."
        yield _broken(what, "start the standbys, or change synchronous_standby_names")
    elif everyone > wanted or "*" in names:
        what = (
            f"A commit waits for {wanted} of the standbys {names!r}. If another one is promoted, it may lack the last commits."
        )
        step = "whether your failover tool promotes only a standby that has every acknowledged commit (Patroni: "
        yield _unknown(what, f"{step}synchronous_mode)")


# --- SQLite, RocksDB, ZooKeeper ---------------------------------------------------------------------------------------


def _sqlite(settings: Mapping[str, str]) -> Iterator[Finding]:
    mode, level = settings["journal_mode"], settings.get("synchronous")
    if mode not in _SQLITE_MODES or level not in _SQLITE_LEVELS:
        what = f"journal_mode is {mode} and synchronous is {level}: this release of dualwrite does not know what that means."
        yield _unknown(what, "SQLite's documentation of both; safe are WAL and FULL")
    elif (weak := _sqlite_weakness(mode, level)) is not None:
        yield _weak(weak[0], f"PRAGMA {weak[1]}")
    elif settings.get("fullfsync") == "off":  # macOS only
        what = f"fullfsync is off: fsync of macOS leaves data in the disk's cache, so a power failure {LOST_COMMIT}."
        yield _weak(what, "PRAGMA fullfsync = ON")


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


def _rocksdb(settings: Mapping[str, str]) -> Iterator[Finding]:
    if "env" in settings:
        what = "The database's files are not where its path says: it may be in memory, and gone with the process."
        yield _unknown(what, "the Env with which the Rdict was opened")
    if settings.get("wal_recovery_mode") in _TOLERANT:
        what = f"wal_recovery_mode skips damaged records: after a power failure it {LOST_COMMIT}, and keeps later commits."
        yield _weak(what, "DBRecoveryMode.point_in_time(), the default")


def _zookeeper(settings: Mapping[str, str]) -> Iterator[Finding]:
    what = "A client can't see whether the servers write a commit to disk before they acknowledge it (forceSync)."
    yield _unknown(what, "zookeeper.forceSync in the servers' configuration: yes, the default")
    mode = settings.get("mode")
    if mode == "standalone":
        what = "One server, no ensemble: acknowledged commits are lost with its disk, and nothing works while it is down."
        yield _weak(what, "an ensemble of three or five servers")
    elif mode is None:
        what = "The server does not say whether it belongs to an ensemble."
        yield _unknown(what, "4lw.commands.whitelist, which must contain srvr; or the servers")


_KINDS: Final[Mapping[str, Callable[[Mapping[str, str]], Iterator[Finding]]]] = {
    "synchronous_commit": _postgresql,
    "innodb_flush_log_at_trx_commit": _mysql,
    "journal_mode": _sqlite,
    "disable_wal": _rocksdb,
    "forceSync": _zookeeper,
}
"""By the name of a setting that only this kind of database has."""


# --- what the database lets the role do -----------------------------------------------------------------------------------

WRITING: Final = "writing"
CHECKED_USES: Final[Mapping[str, Sequence[str]]] = {
    WRITING: BASIC,
    **{use: (use,) for use in ("journal", "processor", "relay", "jobs")},
}
"""Uses that are judged together, by the name that they have here."""

_WRITES: Final = sum(len(privileges) - 1 for use in BASIC for privileges in RIGHTS[use].values())
"""How many of the rights for writing are not SELECT."""


def judge_rights(
    role: str,
    missing: Mapping[str, Sequence[Right]],
    prefixes: Sequence[str],
    command: Callable[[str, Sequence[str]], str],
) -> list[Finding]:
    """The findings about what a role lacks for each of `CHECKED_USES`.

    Args:
        role: The role.
        missing: What it lacks, by use; without uses for which it has everything.
        prefixes: The prefixes of pools that have a journal, as far as they are known.
        command: Makes the command that prints the GRANT statements for a role's uses.
    """
    if not missing:
        return []
    found, left = [], dict(missing)
    writing = left.pop(WRITING, ())
    if len(writing) == _WRITES and all(right.privilege != "SELECT" for right in writing):
        what = f"The role {role!r} may only read, as an operator's may; a writer or pool with it can't be opened."
        return [Finding(Severity.NOTE, "database", what, command(role, ()))]
    if writing:
        what = f"The role {role!r} can't open a writer or a pool: it needs {rights_words(writing)}."
        found.append(Finding(Severity.BROKEN, "database", what, command(role, ())))
    if prefixes and (lacks := left.pop("journal", ())):
        what = f"The role {role!r} can't use the journal of {', '.join(prefixes)}: it needs {rights_words(lacks)}."
        found.append(Finding(Severity.BROKEN, "journal", what, command(role, ["journal"])))
    if left:
        what = (
            f"The role {role!r} lacks privileges for {', '.join(left)}, which matters only to programs that use it for these."
        )
        found.append(Finding(Severity.NOTE, "database", what, command(role, list(left))))
    return found
