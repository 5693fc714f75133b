"""Under TestCase nothing is sent, and `capture_messages` shows what would be; TransactionTestCase is the real thing."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from crash.databases import Databases
from django_project.processes import run_manage
from dualwrite.devcluster import DevCluster

BACKEND = "dualwrite.django.backends"


@pytest.mark.parametrize(
    ("database", "environment"),
    [
        ("postgresql", {}),
        ("mariadb", {}),
        ("sqlite", {}),
        ("sqlite", {"SHOP_WITHOUT_MIGRATIONS": "1"}),
        ("postgresql", {"SHOP_ENGINE": f"{BACKEND}.postgresql"}),
        ("mariadb", {"SHOP_ENGINE": f"{BACKEND}.mysql"}),
    ],
)
@pytest.mark.slow
def test_the_tests_of_a_project(
    databases: Databases, broker: DevCluster, database: str, environment: Mapping[str, str]
) -> None:
    scene = databases.scene(database, broker)
    given = {"SHOP_KAFKA": scene.bootstrap, "SHOP_PREFIX": scene.transactional_id, "SHOP_TOPIC": scene.topic, **environment}
    said = run_manage(scene.url, "test", "django_project.shop.tests", "--noinput", PYTHONWARNINGS="error", **given)
    assert "OK" in said
    assert os.environ.get("SHOP_ENGINE") is None
