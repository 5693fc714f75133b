"""What PostgreSQL shows about the durability of an acknowledged commit, for `dualwrite doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, bindparam, text

from dualwrite.stores.sql.column_types import decoded
from dualwrite.stores.sql.home import schema_of
from dualwrite.stores.sql.table import TABLE_NAME

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


def durability(connection: Connection) -> dict[str, str]:
    """Settings by their names, and what else decides about an acknowledged commit.

    `transaction_read_only` is on in a standby, `persistence` is our table's: `u` for an unlogged one. `product` is there if the
    server is not a plain PostgreSQL; its settings then don't show how it stores a commit. Otherwise there are `attached
    standbys`, and if the user may see it, how many of them are `synchronous standbys`.
    """
    found = {decoded(row.name): decoded(row.setting) for row in connection.execute(_SETTINGS)}
    where = {"name": TABLE_NAME, "schema": schema_of(connection.engine)}
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
