"""The app: its checks, and its tables also where Django runs no migrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.db.models.signals import post_migrate


class DualwriteConfig(AppConfig):
    """`INSTALLED_APPS = [..., "dualwrite.django"]`."""

    name = "dualwrite.django"
    label = "dualwrite"
    verbose_name = "dualwrite"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the checks, and what makes the tables for `migrate --run-syncdb` and for tests without migrations."""
        from dualwrite.django.checks import check_databases, check_settings  # noqa: PLC0415  (when the settings are there)

        checks.register(check_settings)
        checks.register(check_databases, checks.Tags.database)
        post_migrate.connect(_after_migrate, sender=self, dispatch_uid="dualwrite")


def _after_migrate(using: str, plan: Sequence[Any] = (), **_: Any) -> None:
    """Make the tables of an alias that has none; and close its pool: TransactionTestCase flushes its tables."""
    from dualwrite.django.pools import close_pools  # noqa: PLC0415  (as above)
    from dualwrite.django.schema import make_missing_tables  # noqa: PLC0415  (as above)

    close_pools(using)
    if not any(is_backwards for _, is_backwards in plan):
        make_missing_tables(using)
