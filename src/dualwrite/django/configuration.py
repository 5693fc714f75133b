"""The setting `DUALWRITE`: for each alias of DATABASES the prefix, Kafka and options; and the URL of that database.

For example::

    DUALWRITE = {
        "default": {
            "PREFIX": "shop",
            "KAFKA": {"bootstrap.servers": "127.0.0.1:9092"},
            "OPTIONS": {"size": 4, "when_kafka_is_down": "journal"},
            "TIMEOUTS": {"delivery": 10.0},
        }
    }
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

from django.conf import settings
from django.db import connections
from sqlalchemy import URL

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.pool.scaling import PoolOptions
from dualwrite.settings import Settings, Timeouts, misspelt
from dualwrite.stores.leases import numbered
from dualwrite.stores.sql.engines import for_pymysql
from dualwrite.transactional_id import validate_transactional_id

SETTING: Final = "DUALWRITE"

_KEYS: Final = ("PREFIX", "KAFKA", "OPTIONS", "TIMEOUTS", "DATABASE_URL")
_OF_CREATE_POOL: Final = ("size", "producer", "two_phase", "lanes", "on_lost")
_OF_POOL_OPTIONS: Final = tuple(each.name for each in fields(PoolOptions))
_NOT_LIBPQS: Final = (
    *("assume_role", "autocommit", "client_encoding", "context", "cursor_factory", "isolation_level", "pool"),
    *("prepare_threshold", "row_factory", "server_side_binding"),
)
"""OPTIONS of Django's PostgreSQL backend that are not libpq's; all others are."""
_OF_PYMYSQL: Final = ("charset", "connect_timeout", "read_default_file", "ssl_mode", "unix_socket")
EXAMPLE: Final = 'DUALWRITE = {"default": {"PREFIX": "shop", "KAFKA": "127.0.0.1:9092"}}'


@dataclass(frozen=True, slots=True)
class Configuration:
    """What `create_pool` needs for one alias.

    Args:
        prefix: Of the pool's ids.
        url: The database, with the password.
        settings: Kafka and the time limits; other settings come from the environment.
        options: Of the pool.
        arguments: Further arguments of `create_pool`.
    """

    prefix: str
    url: str = field(repr=False)
    settings: Settings
    options: PoolOptions
    arguments: Mapping[str, Any]

    def environment(self) -> dict[str, str]:
        """The variables from which the command `dualwrite` reads the same."""
        given = {
            "DATABASE_URL": self.url,
            **{f"KAFKA_{name}": value for name, value in self.settings.kafka.items() if not callable(value)},
            **{f"TIMEOUT_{name}": value for name, value in asdict(self.settings.timeouts).items()},
            **{name: value for name, value in self.arguments.items() if name != "size"},
        }
        return {f"DUALWRITE_{k.upper().replace('.', '_')}": str(v) for k, v in given.items() if v is not None}


def aliases() -> tuple[str, ...]:
    """The aliases that the setting has; none if it is no dictionary."""
    given = getattr(settings, SETTING, None)
    return tuple(given) if isinstance(given, Mapping) else ()


def configuration(alias: str) -> Configuration:
    """The configuration of an alias. Nothing connects.

    Raises:
        ConfigurationError: It is missing, or a value is not allowed.
    """
    every: Any = getattr(settings, SETTING, None)
    if alias not in aliases():
        raise ConfigurationError(
            f"The setting {SETTING} has no entry for the database {alias!r}.",
            cause=f"it has entries for {', '.join(map(repr, every))}" if every else f"the setting is {every!r}",
            next_step=f"set {EXAMPLE}; or name another database: atomic(using=…)",
        )
    given = _checked(f"{SETTING}[{alias!r}]", every[alias], _KEYS)
    options = _checked("OPTIONS", given.get("OPTIONS", {}), (*_OF_CREATE_POOL, *_OF_POOL_OPTIONS))
    limits = _checked("TIMEOUTS", given.get("TIMEOUTS", {}), [each.name for each in fields(Timeouts)])
    prefix = given.get("PREFIX")
    if not isinstance(prefix, str) or not prefix:
        raise ConfigurationError(
            f"{SETTING}[{alias!r}] has no PREFIX.", next_step="give the prefix of the transactional ids: a name of the service"
        )
    validate_transactional_id(numbered(prefix, 1))
    chosen = Settings.from_environment()
    return Configuration(
        prefix,
        str(given.get("DATABASE_URL") or database_url(alias)),
        chosen.with_changes(
            kafka=dict(KafkaConfig.over(given.get("KAFKA"), chosen.kafka).properties),
            timeouts=replace(chosen.timeouts, **limits),
        ),
        PoolOptions(**{name: value for name, value in options.items() if name in _OF_POOL_OPTIONS}),
        {name: value for name, value in options.items() if name in _OF_CREATE_POOL},
    )


def _checked(where: str, given: Any, allowed: Collection[str]) -> Mapping[str, Any]:
    unknown = [name for name in given if name not in allowed] if isinstance(given, Mapping) else [given]
    if unknown:
        raise ConfigurationError(
            f"{where} can't have {unknown[0]!r}.",
            cause=misspelt(map(str, unknown), allowed),
            next_step=f"give a dictionary with some of {', '.join(allowed)}",
        )
    found: Mapping[str, Any] = given
    return found


# --- the database -------------------------------------------------------------------------------------------------------------


def database_url(alias: str) -> str:
    """The URL of a database for connections of dualwrite's own: leases, recovery and the journal are not Django's.

    Raises:
        ConfigurationError: dualwrite can't use the database.
    """
    connection = connections[alias]
    given = connection.settings_dict
    options = dict(given.get("OPTIONS") or {})
    if connection.vendor == "postgresql":
        return _url("postgresql+psycopg", given, _of_libpq(options))
    if connection.vendor == "mysql":  # also MariaDB
        return _url("mysql+pymysql", given, _of_pymysql(options))
    if connection.vendor == "sqlite":  # a test's may be in memory: the store refuses it
        return f"sqlite:///{given['NAME']}"
    raise ConfigurationError(
        f"dualwrite can't use the database {alias!r}: {connection.display_name}.",
        next_step="use PostgreSQL, MariaDB, MySQL or SQLite",
    )


def _of_libpq(options: Mapping[str, Any]) -> dict[str, str]:
    found = {name: str(value) for name, value in options.items() if name not in _NOT_LIBPQS}
    if "assume_role" in options:
        found["options"] = f"{found.get('options', '')} -c role={options['assume_role']}".strip()
    return found


def _of_pymysql(options: Mapping[str, Any]) -> dict[str, str]:
    found = {name: str(options[name]) for name in _OF_PYMYSQL if name in options}
    found |= {f"ssl_{name}": str(value) for name, value in (options.get("ssl") or {}).items() if name in ("ca", "cert", "key")}
    return for_pymysql(found)


def _url(drivername: str, given: Mapping[str, Any], query: dict[str, str]) -> str:
    host = given.get("HOST") or None
    if host is not None and host.startswith("/"):
        query, host = {"host" if "psycopg" in drivername else "unix_socket": host, **query}, None
    url = URL.create(
        drivername,
        given.get("USER") or None,
        given.get("PASSWORD") or None,
        host,
        int(given["PORT"]) if given.get("PORT") else None,
        str(given["NAME"]) if given.get("NAME") else None,
        query,
    )
    return url.render_as_string(hide_password=False)
