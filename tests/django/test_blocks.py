"""`dualwrite.django.atomic()`: rows and messages commit together, on Django's own connection."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, IntegrityError, connection, connections, transaction
from django.test import AsyncRequestFactory

import dualwrite
import dualwrite.django
from crash.scene import Scene
from django_project.shop.models import Event, Order, OrderLine
from dualwrite import failpoints
from dualwrite.django import atomic
from joined.own_sessions import send

each_database = pytest.mark.parametrize("database", ["postgresql", "mariadb", "sqlite"])


def write(scene: Scene, number: int) -> None:
    Event(number=number, writer=scene.transactional_id).save(force_insert=True)


def write_and_send(tx: Any, scene: Scene, number: int) -> None:
    write(scene, number)
    send(tx, scene, number)


def failing(scene: Scene, number: int, *steps: Callable[[Any], object]) -> Any:
    """A block that writes and sends, and does something that makes it, or its commit, fail."""
    with atomic() as tx:
        write_and_send(tx, scene, number)
        for step in steps:
            step(tx)
    return tx


def divided(*_: object) -> None:
    raise ZeroDivisionError


def too_large(tx: Any) -> None:
    tx.send(os.environ["SHOP_TOPIC"], b"x" * 1_100_000)


@each_database
def test_a_block_commits_both_or_neither(shop: Scene) -> None:
    for number in (1, 2):
        with atomic() as tx:
            write_and_send(tx, shop, number)
            assert tx.db is connections["default"]
            assert tx.outcome is None
        assert tx.outcome == "published"
        assert tx.transactional_id in dualwrite.django.pool().transactional_ids
    with pytest.raises(ZeroDivisionError):
        failing(shop, 3, divided)
    with pytest.raises(dualwrite.WriterClosedError):
        send(tx, shop, 3)
    with atomic() as tx:
        tx.send(shop.topic, b"4")
        write(shop, 4)
    with atomic():
        Order.objects.create(item="without messages")
    assert Order.objects.filter(item="without messages").exists()
    assert shop.agree() == [1, 2, 4]


@each_database
def test_a_refused_message_rolls_back_the_rows(shop: Scene) -> None:
    called: list[int] = []
    with pytest.raises(dualwrite.MessageTooLargeError):
        failing(shop, 1, lambda _: transaction.on_commit(lambda: called.append(1)), too_large)
    with atomic() as tx:
        write_and_send(tx, shop, 2)
        transaction.on_commit(lambda: called.append(2))
    assert called == [2]
    assert shop.agree() == [2]


@each_database
def test_a_savepoint_that_is_rolled_back_takes_its_messages_with_it(shop: Scene) -> None:
    with atomic() as tx:
        write_and_send(tx, shop, 1)
        with suppress(ZeroDivisionError), transaction.atomic():
            write_and_send(tx, shop, 2)
            with transaction.atomic():
                write_and_send(tx, shop, 3)
            raise ZeroDivisionError
        with transaction.atomic():
            write_and_send(tx, shop, 4)
            with suppress(ZeroDivisionError), atomic() as inner:
                assert inner is tx
                write_and_send(tx, shop, 5)
                raise ZeroDivisionError
            with atomic():
                write_and_send(tx, shop, 6)
        savepoint = transaction.savepoint()
        with transaction.atomic():
            write_and_send(tx, shop, 7)
        transaction.savepoint_rollback(savepoint)
        send(tx, shop, 8)
        write(shop, 8)
        assert tx.outcome is None
    assert shop.agree() == [1, 4, 6, 8]


@each_database
def test_django_rolls_back_without_an_error(shop: Scene) -> None:
    with atomic() as tx:
        write_and_send(tx, shop, 1)
        with suppress(ZeroDivisionError), transaction.atomic(savepoint=False):
            raise ZeroDivisionError
    assert tx.outcome is None
    with atomic() as tx:
        write_and_send(tx, shop, 2)
        transaction.set_rollback(True)
    assert tx.outcome is None
    with atomic() as tx, suppress(ZeroDivisionError), atomic(savepoint=False):
        write_and_send(tx, shop, 3)
        raise ZeroDivisionError
    assert tx.outcome is None
    with atomic() as tx:
        write_and_send(tx, shop, 4)
    assert shop.agree() == [4]


@each_database
def test_an_error_in_a_callback_comes_after_the_commit(shop: Scene) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        failing(shop, 1, lambda _: transaction.on_commit(divided))
    assert "had committed on both sides" in raised.value.__notes__[0]
    assert shop.agree() == [1]
    with atomic() as tx:
        write_and_send(tx, shop, 2)
    assert shop.agree() == [1, 2]


@pytest.mark.parametrize("database", ["postgresql"])
def test_a_constraint_that_is_checked_at_commit(shop: Scene) -> None:
    with pytest.raises(IntegrityError) as raised:
        failing(shop, 1, lambda _: OrderLine.objects.create(order_id=-1, product_id=-1))
    assert isinstance(raised.value.__cause__, psycopg.IntegrityError)
    with atomic() as tx:
        write_and_send(tx, shop, 2)
    assert shop.agree() == [2]


@each_database
def test_decorated_functions_and_send_without_tx(shop: Scene) -> None:
    @atomic
    def place(number: int) -> int:
        write(shop, number)
        dualwrite.django.send(shop.topic, str(number), key=shop.transactional_id)
        if number == 1:
            place(number + 1)
        return number

    @atomic(savepoint=False)
    def place_with_options(number: int) -> None:
        place(number)

    assert place(1) == 1
    place_with_options(3)
    with pytest.raises(dualwrite.UsageError, match="no block"):
        dualwrite.django.send(shop.topic, "4")
    with transaction.atomic(), pytest.raises(dualwrite.UsageError, match="no block"):
        dualwrite.django.send(shop.topic, "4")
    assert shop.agree() == [1, 2, 3]


def test_where_a_block_can_not_be(shop: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    with transaction.atomic(), pytest.raises(dualwrite.UsageError, match="outermost") as raised:
        atomic().__enter__()
    assert "non_atomic_requests" not in str(raised.value)
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    with transaction.atomic(), pytest.raises(dualwrite.UsageError, match="non_atomic_requests"):
        atomic().__enter__()
    transaction.set_autocommit(False)
    with pytest.raises(dualwrite.UsageError, match="autocommit"):
        atomic().__enter__()
    transaction.set_autocommit(True)

    async def in_loop() -> None:
        atomic().__enter__()

    with pytest.raises(dualwrite.UsageError, match="arun"):
        asyncio.run(in_loop())
    with pytest.raises(dualwrite.UsageError, match="coroutine function"):
        atomic(in_loop)
    with pytest.raises(dualwrite.ConfigurationError, match="no entry for the database 'other'"):
        dualwrite.django.pool("other")
    assert shop.agree() == []


def test_an_async_view(shop: Scene) -> None:
    from django_project.urls import order_async

    async def view() -> bytes:
        response = await order_async(AsyncRequestFactory().post("/", {"item": "7"}))
        return bytes(response.content)

    assert asyncio.run(view()) == b"published"
    assert shop.messages() == [7]


def ended_by_server(scene: Scene) -> Callable[[], None]:
    """Ends the session of the block, as a restart of the server does."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()" if connection.vendor == "postgresql" else "SELECT connection_id()")
        session = cursor.fetchone()[0]
    text = f"SELECT pg_terminate_backend({session})" if connection.vendor == "postgresql" else f"KILL {session}"

    def end() -> None:
        with scene.engine.connect() as other:
            other.exec_driver_sql(text)

    return end


@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
@pytest.mark.parametrize("point", ["after_begin", "after_record"])
def test_a_connection_that_is_lost_before_commit(shop: Scene, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def end_later(_: object) -> None:
        end = ended_by_server(shop)

        def once() -> None:
            monkeypatch.delitem(failpoints.armed, point)
            end()

        monkeypatch.setitem(failpoints.armed, point, once)

    with pytest.raises((dualwrite.DualWriteError, DatabaseError)):
        failing(shop, 1, end_later)
    with atomic() as tx:
        write_and_send(tx, shop, 2)
    assert shop.agree() == [2]
