"""`manage.py dualwrite …` and `manage.py dualwrite_consume`."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

import dualwrite
import dualwrite.django
from crash.scene import Scene
from django_project import handlers
from django_project.processes import manage, run_manage
from django_project.shop.models import Event
from dualwrite.django.consuming import DjangoConsumer
from dualwrite.processor import ProcessorOptions
from dualwrite.testing.topics import read_committed
from fixtures.pace import LIMIT, until_received

pytestmark = pytest.mark.slow
each_database = pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite"])


@each_database
def test_the_command_gets_database_and_kafka(shop: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    with dualwrite.django.atomic() as tx:
        tx.send(shop.topic, "1")
    call_command("dualwrite", "status", "--prefix", shop.transactional_id, "--json")
    shown = json.loads(capfd.readouterr().out)
    assert shop.transactional_id in json.dumps(shown)
    with pytest.raises(CommandError, match="ended with 2"):
        call_command("dualwrite", "status", "--nothing")
    del tx


@pytest.mark.soak
def test_manage_py_passes_everything_on(shop: Scene, tmp_path: Path) -> None:
    environment = {"SHOP_KAFKA": shop.bootstrap, "SHOP_PREFIX": shop.transactional_id}
    said = run_manage(
        shop.url, "dualwrite", "--using", "default", "db", "current", "--settings", "django_project.settings", **environment
    )
    assert "0001" in said
    assert "Usage: dualwrite recover" in run_manage(shop.url, "dualwrite", "recover", "--help", **environment)
    with pytest.raises(AssertionError, match="no entry for the database 'other'"):
        run_manage(f"sqlite:///{tmp_path / 'x.db'}", "dualwrite", "--using=other", "status", **environment)


def consume(scene: Scene, source: str, count: int, *, group: str, **options: Any) -> None:
    """Run a consumer until its events are there; in a thread, as it is in a process of its own."""
    consumer = DjangoConsumer(handlers.copy, [source], group, **options)

    def run() -> None:
        try:
            consumer.run()
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until_received(lambda: scene.rows() if thread.is_alive() else range(count), f"{count} events", at_least=count)
    finally:
        consumer.stop()
        thread.join(LIMIT)


@each_database
def test_consuming_with_the_orm(shop: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers.SESSIONS.clear()
    source = f"source-{shop.transactional_id}"
    send_to(shop, source, range(1, 8))
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", 0)
    consume(shop, source, 7, group=shop.transactional_id, options=ProcessorOptions(batch=3))
    assert shop.agree() == list(range(1, 8))
    assert len({id(each) for each in handlers.SESSIONS}) >= 3  # a connection for each transaction
    send_to(shop, source, [8])
    consume(shop, source, 8, group=shop.transactional_id)  # continues where the group was
    assert shop.agree() == list(range(1, 9))


def test_a_message_that_fails(shop: Scene) -> None:
    source, letters = f"source-{shop.transactional_id}", f"letters-{shop.transactional_id}"
    send_to(shop, source, [1, 13, 2])
    options = ProcessorOptions(dead_letter_topic=letters, attempts=2, pause=0.01)
    consume(shop, source, 2, group=shop.transactional_id, options=options)
    assert shop.agree() == [1, 2]
    (letter,) = read_committed(shop.settings, letters)
    assert letter.value == b"13"
    send_to(shop, source, [13])
    with pytest.raises(CommandError, match="could not be processed"):
        call_command("dualwrite_consume", "django_project.handlers.copy", topic=[source], attempts=1)
    assert Event.objects.filter(writer=shop.transactional_id, number=13).count() == 0


@pytest.mark.soak
def test_a_process_that_consumes_until_sigterm(shop: Scene) -> None:
    source = f"source-{shop.transactional_id}"
    send_to(shop, source, range(1, 4))
    given = {"SHOP_KAFKA": shop.bootstrap, "SHOP_PREFIX": f"{shop.transactional_id}-consumer", "SHOP_TOPIC": shop.topic}
    command = ["dualwrite_consume", "django_project.handlers.copy_all", "--topic", source, "--group", "g", "--batches"]
    with manage(shop.url, *command, **given) as process:
        try:
            until_received(lambda: shop.rows() if process.poll() is None else range(3), "three events", at_least=3)
            process.terminate()
            _, errors = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert shop.agree() == [1, 2, 3]


def send_to(scene: Scene, topic: str, numbers: Any) -> None:
    with dualwrite.django.atomic() as tx:
        for number in numbers:
            tx.send(topic, str(number), key=scene.transactional_id)


def test_a_handler_that_can_not_be_imported(shop: Scene) -> None:
    with pytest.raises(CommandError, match="can't be imported"):
        call_command("dualwrite_consume", "django_project.handlers.nothing", topic=["x"])
    del shop
