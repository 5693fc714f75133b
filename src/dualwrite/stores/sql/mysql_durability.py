"""What MariaDB and MySQL show about the durability of an acknowledged commit, for `dualwrite doctor`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sqlalchemy import Connection

from dualwrite.stores.sql.home import schema_of
from dualwrite.stores.sql.table import TABLE_NAME

_VARIABLES: Final = (
    "innodb_flush_log_at_trx_commit",
    "innodb_flush_method",
    "innodb_doublewrite",
    "innodb_read_only",
    "log_bin",
    "sql_log_bin",
    "sync_binlog",
    "read_only",
    "super_read_only",
    "tx_read_only",  # MariaDB
    "transaction_read_only",  # MySQL, and MariaDB from 11.1 on
    *(f"rpl_semi_sync_{role}_{name}" for role in ("master", "source") for name in ("enabled", "timeout", "wait_point")),
    "rpl_semi_sync_master_wait_no_slave",
    "rpl_semi_sync_source_wait_no_replica",
    "group_replication_group_name",
    "group_replication_single_primary_mode",
    "group_replication_consistency",
    "wsrep_on",
    "wsrep_provider",
)
_STATUS: Final = (
    "Innodb_redo_log_enabled",  # MySQL
    "Rpl_semi_sync_master_status",
    "Rpl_semi_sync_source_status",
    "Slaves_connected",  # MariaDB
)
_ABOUT: Final = ("version", "version_comment", "aurora_version")
_PRODUCTS: Final = ("TiDB", "OceanBase", "Vitess", "SingleStore")


def durability(connection: Connection) -> dict[str, str]:
    """Variables and status by their names.

    `engine` is our table's storage engine, which is transactional only if it is InnoDB. `product` is there if the server is
    another one than MariaDB or MySQL; its variables then don't show how it stores a commit.
    """
    found = _shown(connection, "VARIABLES", _VARIABLES) | _shown(connection, "GLOBAL STATUS", _STATUS)
    about = _shown(connection, "VARIABLES", _ABOUT)
    product = next((name for name in _PRODUCTS if name.lower() in " ".join(about.values()).lower()), None)
    if product is not None or "aurora_version" in about:
        found["product"] = product or "Amazon Aurora"
    engine = connection.exec_driver_sql(
        "SELECT ENGINE FROM information_schema.TABLES WHERE TABLE_SCHEMA = COALESCE(%s, DATABASE()) AND TABLE_NAME = %s",
        (schema_of(connection.engine), TABLE_NAME),
    ).scalar()
    return found if engine is None else {**found, "engine": engine}


def _shown(connection: Connection, what: str, names: Iterable[str]) -> dict[str, str]:
    """Those of the names that the server has, with their values."""
    listed = ", ".join(f"'{name}'" for name in names)
    return {row[0]: row[1] for row in connection.exec_driver_sql(f"SHOW {what} WHERE Variable_name IN ({listed})")}
