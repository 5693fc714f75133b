"""Fixtures of the tests of dualwrite.django: the project's settings, on the database of a scene of the crash tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("django")

os.environ["DJANGO_SETTINGS_MODULE"] = "django_project.settings"

import django
from django.conf import settings
from django.core.management import call_command
from django.db import connections

django.setup()
del os.environ["DJANGO_SETTINGS_MODULE"]  # it is not that of other tests' processes

import dualwrite.django
from crash.databases import Databases
from crash.scene import Scene
from django_project import settings as project
from django_project.processes import with_database
from dualwrite.devcluster import DevCluster


@pytest.fixture
def scene(databases: Databases, broker: DevCluster, database: str, producer: str) -> Scene:
    """A prefix with its own topic, on the test's database."""
    del producer
    return databases.scene(database, broker)


@pytest.fixture
def producer() -> str:
    return "native"


@pytest.fixture
def shop(scene: Scene, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Scene]:
    """The scene, which the project uses in this process; a test's mark `shop` changes the entry of DATABASES."""
    mark = request.node.get_closest_marker("shop")
    changes = {} if mark is None else mark.kwargs
    with_database(monkeypatch, project.database(scene.url, **changes))
    monkeypatch.setattr(settings, "DUALWRITE", project.dualwrite(scene.transactional_id, scene.bootstrap))
    monkeypatch.setenv("SHOP_TOPIC", scene.topic)
    call_command("migrate", verbosity=0, run_syncdb=True)
    yield scene
    dualwrite.django.close_pools()
    connections.close_all()
