"""Which settings of a database decide whether an acknowledged commit is durable; see `TxnStateStore.durability`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from sqlalchemy import Connection, bindparam, text

from dualwrite.stores.sql.dialect import driver_connection
from dualwrite.stores.sql.home import home_of
from dualwrite.stores.sql.tables import TABLE_NAME, decoded


def durability(connection: Connection) -> Mapping[str, str]:
    """The settings by their names, and what else decides about an acknowledged commit."""
    return _BY_DIALECT[connection.dialect.name](connection)


# --- PostgreSQL ---------------------------------------------------------------------------------------------------------------

_SERVICES: Final[Mapping[str, str]] = {
    "rds": "Amazon RDS",
    "cloudsql": "Google Cloud SQL",
    "alloydb": "Google AlloyDB",
    "azure": "Azure Database",
    "neon": "Neon",
}
"""By the first part of the names of their own settings."""

_SETTINGS: Final = text(
    "SELECT name, setting FROM pg_catalog.pg_settings WHERE name IN "
    "('fsync', 'full_page_writes', 'synchronous_commit', 'synchronous_standby_names', 'transaction_read_only')"
)
_PRODUCT: Final = text(
    "SELECT pg_catalog.version() AS version, "
    "EXISTS (SELECT 1 FROM pg_catalog.pg_proc WHERE proname = 'aurora_version') AS is_aurora, "
    "(SELECT pg_catalog.min(pg_catalog.split_part(name, '.', 1)) FROM pg_catalog.pg_settings "
    "WHERE name LIKE '%.%' AND pg_catalog.split_part(name, '.', 1) IN :services) AS service"
).bindparams(bindparam("services", list(_SERVICES), expanding=True))
_PERSISTENCE: Final = text(
    "SELECT c.relpersistence::text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relname = :name AND n.nspname = COALESCE(:schema, pg_catalog.current_schema())"
)
_STANDBYS: Final = text(  # sync_state is hidden from users without pg_read_all_stats
    "SELECT pg_catalog.count(*) AS attached, pg_catalog.count(sync_state) AS visible, "
    "pg_catalog.count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')) AS synchronous FROM pg_catalog.pg_stat_replication "
    "WHERE state IS DISTINCT FROM 'backup' "
    "AND pid NOT IN (SELECT active_pid FROM pg_catalog.pg_replication_slots "
    "WHERE slot_type = 'logical' AND active_pid IS NOT NULL)"
)


def _postgresql(connection: Connection) -> Mapping[str, str]:
    """Settings by their names, and what else decides about an acknowledged commit.

    `transaction_read_only` is on in a standby, `persistence` is our table's: `u` for an unlogged one. `product` is there if
    the server is not a plain PostgreSQL; its settings then don't show how it stores a commit. Otherwise there are
    `attached standbys`, and if the user may see it, how many of them are `synchronous standbys`.
    """
    found = {decoded(row.name): decoded(row.setting) for row in connection.execute(_SETTINGS)}
    where = {"name": TABLE_NAME, "schema": home_of(connection.engine).schema()}
    if persistence := connection.scalar(_PERSISTENCE, where):
        found["persistence"] = decoded(persistence)
    server = connection.execute(_PRODUCT).one()
    version = decoded(server.version)
    if not version.startswith("PostgreSQL ") or "-YB-" in version:
        found["product"] = "YugabyteDB" if "-YB-" in version else " ".join(version.split()[:2])
    elif server.is_aurora or server.service:
        found["product"] = "Amazon Aurora" if server.is_aurora else _SERVICES[decoded(server.service)]
    else:
        standbys = connection.execute(_STANDBYS).one()
        found["attached standbys"] = str(standbys.attached)
        if standbys.visible == standbys.attached:
            found["synchronous standbys"] = str(standbys.synchronous)
    return found


# --- MariaDB and MySQL --------------------------------------------------------------------------------------------------------

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


def _mysql(connection: Connection) -> Mapping[str, str]:
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
        (home_of(connection.engine).schema(), TABLE_NAME),
    ).scalar()
    return found if engine is None else {**found, "engine": engine}


def _shown(connection: Connection, what: str, names: Iterable[str]) -> dict[str, str]:
    """Those of the names that the server has, with their values."""
    listed = ", ".join(f"'{name}'" for name in names)
    return {row[0]: row[1] for row in connection.exec_driver_sql(f"SHOW {what} WHERE Variable_name IN ({listed})")}


# --- SQLite -------------------------------------------------------------------------------------------------------------------

_SYNCHRONOUS: Final = {0: "off", 1: "normal", 2: "full", 3: "extra"}


def _sqlite(connection: Connection) -> Mapping[str, str]:
    """With `fullfsync` on macOS, where fsync alone does not empty the disk's own cache."""
    raw = driver_connection(connection)
    (level,) = raw.execute("PRAGMA synchronous").fetchone()
    (mode,) = raw.execute("PRAGMA journal_mode").fetchone()
    found = {"synchronous": _SYNCHRONOUS.get(level, str(level)), "journal_mode": mode}
    if sys.platform == "darwin":
        (full,) = raw.execute("PRAGMA fullfsync").fetchone()
        found["fullfsync"] = "on" if full else "off"
    return found


_BY_DIALECT: Final[Mapping[str, Callable[[Connection], Mapping[str, str]]]] = {
    "postgresql": _postgresql,
    "mysql": _mysql,
    "mariadb": _mysql,
    "sqlite": _sqlite,
}
