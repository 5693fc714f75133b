"""`ENGINE = "dualwrite.django.backends.…"`: every outermost `atomic()` commits what was sent in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.test import Client

import dualwrite
import dualwrite.django
from crash.scene import Scene
from django_project.shop.models import Event, Order, OrderLine
from dualwrite.django import atomic
from dualwrite.django.backends.joining import CommitRefusedError
from dualwrite.django.checks import check_settings

on_our_engine = pytest.mark.parametrize(
    "database",
    [
        pytest.param("postgresql", marks=pytest.mark.shop(ENGINE="dualwrite.django.backends.postgresql")),
        pytest.param("mariadb", marks=pytest.mark.shop(ENGINE="dualwrite.django.backends.mysql")),
    ],
)


def write_and_send(scene: Scene, number: int) -> None:
    Event(number=number, writer=scene.transactional_id).save(force_insert=True)
    dualwrite.django.send(scene.topic, str(number), key=scene.transactional_id)


def failing(scene: Scene, number: int, step: Callable[[], object]) -> None:
    with transaction.atomic():
        write_and_send(scene, number)
        step()


@on_our_engine
def test_blocks_of_django_commit_messages(shop: Scene) -> None:
    with transaction.atomic():
        write_and_send(shop, 1)
        with suppress(ZeroDivisionError), transaction.atomic():
            write_and_send(shop, 2)
            raise ZeroDivisionError
        with transaction.atomic():
            write_and_send(shop, 3)
        with atomic() as tx:
            tx.send(shop.topic, b"4")
            Event(number=4, writer=shop.transactional_id).save(force_insert=True)
    assert tx.outcome == "published"
    with transaction.atomic(), suppress(ZeroDivisionError), transaction.atomic():
        write_and_send(shop, 5)  # the unit is younger than the savepoint
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError):
        failing(shop, 6, lambda: 1 // 0)
    failing(shop, 7, lambda: transaction.set_rollback(True))
    with atomic():
        write_and_send(shop, 8)
    with pytest.raises(dualwrite.UsageError, match="no block"):
        write_and_send_outside(shop)
    with transaction.atomic():
        Order.objects.create(item="without a message")
    assert shop.agree() == [1, 3, 4, 8]


def write_and_send_outside(scene: Scene) -> None:
    dualwrite.django.send(scene.topic, "9")


@on_our_engine
def test_what_is_refused_is_not_committed(shop: Scene) -> None:
    def too_large() -> None:
        dualwrite.django.send(shop.topic, b"x" * 1_100_000)

    with pytest.raises(CommitRefusedError) as raised:
        failing(shop, 1, too_large)
    assert isinstance(raised.value, DatabaseError)
    assert isinstance(raised.value.__cause__, dualwrite.MessageTooLargeError)
    with transaction.atomic():
        write_and_send(shop, 2)
    if connection.vendor == "postgresql":  # checked at COMMIT
        with pytest.raises(IntegrityError):
            failing(shop, 3, lambda: OrderLine.objects.create(order_id=-1, product_id=-1))
    with transaction.atomic():
        write_and_send(shop, 4)
    assert shop.agree() == [2, 4]


@on_our_engine
def test_requests_and_transactions_by_hand(shop: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    assert list(check_settings()) == []
    client: Any = Client()
    assert client.post("/order-in-atomic/", {"item": "1"}).content == b"done"
    assert client.post("/order/", {"item": "2"}).status_code == 200
    transaction.set_autocommit(False)
    with transaction.atomic():
        dualwrite.django.send(shop.topic, "3")
    transaction.rollback()
    transaction.set_autocommit(True)
    assert shop.messages() == [1, 2]
