"""The findings about MariaDB and MySQL: whether they keep acknowledged commits, also after a failover. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dualwrite.diagnosis.findings import CRASH, LOST_COMMIT, Finding, Severity, about_database

_READ_ONLY: Final = ("super_read_only", "read_only", "tx_read_only", "transaction_read_only", "innodb_read_only")
_ON: Final = ("ON", "1")
_DURABLE: Final = ("1", "3")  # 3 is MariaDB's, with one sync more
_DOUBLEWRITE: Final = ("ON", "1", "DETECT_AND_RECOVER")
_NO_DOUBLEWRITE: Final = ("OFF", "0", "DETECT_ONLY")
_NO_FLUSH: Final = ("nosync", "littlesync")
_FOREVER: Final = 4_294_967_295  # milliseconds; MySQL's greatest timeout
_ROLES: Final = (("master", "slave"), ("source", "replica"))
_SAFE_CONSISTENCY: Final = ("BEFORE_ON_PRIMARY_FAILOVER", "BEFORE", "AFTER", "BEFORE_AND_AFTER")


def judge_mysql(settings: Mapping[str, str]) -> list[Finding]:
    """The findings about the settings of `SqlStateStore.durability`, which has the names of the server's variables."""
    if settings.get("engine", "InnoDB") != "InnoDB":
        what = f"The table's engine is {settings['engine']}: without transactions there is no guarantee."
        return [about_database(Severity.BROKEN, what, "ALTER TABLE kafka_transaction_state ENGINE=InnoDB")]
    read_only = [name for name in _READ_ONLY if settings.get(name) in _ON]
    if read_only:
        what = f"The database is read-only ({', '.join(read_only)}): a replica, or a read-only user."
        return [about_database(Severity.BROKEN, what, "connect to the primary, as a user that may write")]
    found = _disk(settings)
    if "product" in settings:
        what = (
            f"This is {settings['product']}: where an acknowledged commit is stored, and what a failover keeps, is not decided "
        )
        what += "by MySQL's settings."
        return [*found, about_database(Severity.UNKNOWN, what, "the provider's documentation of durability and failover")]
    if is_galera(settings):
        found.append(_GALERA)
    return [*found, *_group_replication(settings), *_binary_log(settings)]


def is_galera(settings: Mapping[str, str]) -> bool:
    """Whether the server belongs to a Galera cluster: `wsrep_on` alone may be on without a provider."""
    return settings.get("wsrep_on") in _ON and settings.get("wsrep_provider", "none").lower() not in ("", "none")


_GALERA: Final = about_database(
    Severity.WEAK,
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
        found.append(about_database(Severity.WEAK, what, "innodb_flush_log_at_trx_commit=1"))
    if settings.get("Innodb_redo_log_enabled") == "OFF":
        what = f"InnoDB's redo log is disabled: {CRASH} may lose the whole database."
        found.append(about_database(Severity.WEAK, what, "ALTER INSTANCE ENABLE INNODB REDO_LOG"))
    if (method := settings.get("innodb_flush_method", "")).lower() in _NO_FLUSH:
        what = f"innodb_flush_method is {method}: a power failure may lose acknowledged commits, and corrupt the database."
        found.append(about_database(Severity.WEAK, what, "innodb_flush_method=O_DIRECT"))
    doublewrite = settings.get("innodb_doublewrite", "ON")
    if doublewrite in _NO_DOUBLEWRITE:
        state = "off" if doublewrite != "DETECT_ONLY" else doublewrite
        what = f"innodb_doublewrite is {state}: a power failure may corrupt committed pages."
        found.append(about_database(Severity.WEAK, what, "innodb_doublewrite=ON"))
    elif doublewrite not in _DOUBLEWRITE:
        what = f"innodb_doublewrite is {doublewrite}: whether a power failure may corrupt committed pages is not known."
        found.append(about_database(Severity.UNKNOWN, what, "the server's documentation; ON is safe"))
    return found


def _group_replication(settings: Mapping[str, str]) -> list[Finding]:
    if not settings.get("group_replication_group_name"):
        return []
    if settings.get("group_replication_single_primary_mode") == "OFF":
        what = "Group replication has several primaries: a read on one may be older than a commit on another."
        return [about_database(Severity.WEAK, what, "group_replication_single_primary_mode=ON")]
    consistency = settings.get("group_replication_consistency")
    if consistency not in _SAFE_CONSISTENCY:
        what = (
            f"group_replication_consistency is {consistency}: a new primary may be read before it has applied the last commits."
        )
        change = "group_replication_consistency=BEFORE_ON_PRIMARY_FAILOVER"
        return [about_database(Severity.WEAK, what, change)]
    what = "This is group replication: a commit is in the memory of a majority, and on the disk of this server only."
    return [
        about_database(
            Severity.UNKNOWN, what, "whether several members can lose power at once; dualwrite is not tested with it"
        )
    ]


def _binary_log(settings: Mapping[str, str]) -> list[Finding]:
    if settings.get("log_bin") not in _ON:
        return []
    found = []
    if settings.get("sync_binlog") != "1":
        what = (
            f"sync_binlog is {settings.get('sync_binlog')}: a power failure {LOST_COMMIT}, and replicas may have other commits "
        )
        found.append(about_database(Severity.WEAK, f"{what}than this server.", "sync_binlog=1"))
    if settings.get("sql_log_bin") == "OFF":
        what = "sql_log_bin is off on this connection: its commits never reach a replica."
        found.append(about_database(Severity.WEAK, what, "sql_log_bin=ON"))
    if is_galera(settings) or settings.get("group_replication_group_name"):
        return found
    role = next((pair for pair in _ROLES if settings.get(f"rpl_semi_sync_{pair[0]}_enabled") in _ON), None)
    return [*found, *(_asynchronous(settings) if role is None else _semi_synchronous(settings, *role))]


def _asynchronous(settings: Mapping[str, str]) -> list[Finding]:
    if (attached := settings.get("Slaves_connected", "0")) != "0":
        what = f"A commit does not wait for an attached replica ({attached}): one that is promoted may lack the last commits."
        return [about_database(Severity.WEAK, what, "semi-synchronous replication, with a timeout that never falls back")]
    what = "A commit waits for no replica: one that is promoted after a failure may lack the last commits."
    return [about_database(Severity.NOTE, what, "enable semi-synchronous replication, if there are replicas")]


def _semi_synchronous(settings: Mapping[str, str], role: str, other: str) -> list[Finding]:
    name = f"rpl_semi_sync_{role}"
    found = []
    if settings.get(f"{name.capitalize()}_status") == "OFF":
        what = (
            f"Semi-synchronous replication is enabled, but off at present ({name.capitalize()}_status): a commit waits for no "
        )
        found.append(
            about_database(Severity.WEAK, f"{what}replica.", "see whether the replicas are connected and enabled for it")
        )
    limit = settings.get(f"{name}_timeout", "")
    if not limit.isdecimal():
        what = f"{name}_timeout can't be read: whether commits stop waiting for a replica is not known."
        found.append(about_database(Severity.UNKNOWN, what, f"SHOW GLOBAL VARIABLES LIKE '{name}_timeout'"))
    elif int(limit) < _FOREVER:
        what = f"A commit that no replica acknowledges within {int(limit) / 1000:g} s ({name}_timeout) is acknowledged all the "
        what += "same, and so are the next ones: a replica that is promoted then lacks them."
        found.append(about_database(Severity.WEAK, what, f"{name}_timeout={_FOREVER}"))
    if settings.get(f"{name}_wait_no_{other}") == "OFF":
        what = f"{name}_wait_no_{other} is off: as soon as too few replicas are connected, a commit waits for none."
        found.append(about_database(Severity.WEAK, what, f"{name}_wait_no_{other}=ON"))
    if (point := settings.get(f"{name}_wait_point")) != "AFTER_SYNC":
        what = f"{name}_wait_point is {point}: others, such as recovery, see a commit before a replica has it, and may act on "
        found.append(about_database(Severity.WEAK, f"{what}what a failover then undoes.", f"{name}_wait_point=AFTER_SYNC"))
    return found
