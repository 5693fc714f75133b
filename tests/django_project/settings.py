"""The settings of the tests' project; the environment says which database and which Kafka it uses.

MariaDB and MySQL are used by mysqlclient where it is installed. It has no wheels for Linux, so in CI PyMySQL is in its place.
"""

from __future__ import annotations

import os
import tempfile
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pymysql
import sqlalchemy as sa

HAS_MYSQLCLIENT = PathFinder.find_spec("MySQLdb") is not None
if not HAS_MYSQLCLIENT:
    pymysql.version_info = (2, 2, 4, "final", 0)  # Django asks for that of mysqlclient
    pymysql.install_as_MySQLdb()

ENGINES = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql", "sqlite": "sqlite3"}


def database(text: str, **changes: Any) -> dict[str, Any]:
    """An entry of DATABASES for a URL of SQLAlchemy's."""
    url = sa.make_url(text)
    query = dict(url.query)
    if HAS_MYSQLCLIENT and query.pop("ssl_disabled", None):
        query["ssl_mode"] = "DISABLED"
    found = {
        "ENGINE": f"django.db.backends.{ENGINES[url.get_backend_name()]}",
        "NAME": url.database or "",
        "USER": url.username or "",
        "PASSWORD": url.password or "",
        "HOST": query.pop("host", None) or query.pop("unix_socket", None) or url.host or "",
        "PORT": str(url.port or ""),
        "OPTIONS": query,
    }
    if url.get_backend_name() == "sqlite":
        found["OPTIONS"] = {"timeout": 30}
        found["TEST"] = {"NAME": f"{url.database}.test"}
    return {**found, **changes}


def dualwrite(prefix: str, kafka: str) -> dict[str, Any]:
    """The setting DUALWRITE."""
    return {"default": {"PREFIX": prefix, "KAFKA": kafka, "OPTIONS": {"size": 2}, "TIMEOUTS": {"kafka": 60, "delivery": 60}}}


SECRET_KEY = "of-tests"
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "django_project.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "static/"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "dualwrite.django",
    "django_project.shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DATABASES = {
    "default": database(
        os.environ.get("SHOP_DATABASE", f"sqlite:///{Path(tempfile.gettempdir()) / f'shop-{os.getpid()}.sqlite3'}"),
        **({"ENGINE": os.environ["SHOP_ENGINE"]} if "SHOP_ENGINE" in os.environ else {}),
    )
}
DUALWRITE = dualwrite(os.environ.get("SHOP_PREFIX", "shop"), os.environ.get("SHOP_KAFKA", "127.0.0.1:9092"))
if os.environ.get("SHOP_WITHOUT_MIGRATIONS"):
    MIGRATION_MODULES = {"dualwrite": None}
