"""The tests of the shop, as a user writes them; tests/django/test_in_tests.py runs them by `manage.py test`."""

from __future__ import annotations

import os
from contextlib import suppress

import pytest
from django.db import connection, transaction
from django.test import TestCase, TransactionTestCase

import dualwrite
import dualwrite.django
from django_project.shop.models import Order, Topic
from dualwrite.testing.fakes import FakeTransaction
from dualwrite.testing.topics import read_committed

OURS = getattr(connection, "dualwrite_joins", False)
"""Whether the project's ENGINE is ours."""


def failing(topic: str, item: str) -> None:
    """A block that fails after it has written and sent."""
    with dualwrite.django.atomic() as tx:
        Order.objects.create(item=item)
        tx.send(topic, item)
        raise ZeroDivisionError


class InTestCase(TestCase):
    """Nothing connects to Kafka: the test's transaction never commits."""

    def test_a_block_is_a_fake(self) -> None:
        with dualwrite.django.capture_messages() as captured, dualwrite.django.atomic() as tx:
            Order.objects.create(item="lamp")
            tx.send("orders", "lamp", key="1", headers={"kind": b"new"})
            assert isinstance(tx, FakeTransaction)
        assert [(each.topic, each.text, each.key_text) for each in captured] == [("orders", "lamp", "1")]
        assert captured[0].header["kind"] == b"new"
        assert tx.outcome == "published"
        assert Order.objects.filter(item="lamp").exists()
        with pytest.raises(dualwrite.WriterClosedError):
            tx.send("orders", "lamp")

    def test_what_is_rolled_back_is_not_captured(self) -> None:
        with dualwrite.django.capture_messages() as captured:
            with pytest.raises(ZeroDivisionError):
                failing("orders", "1")
            with dualwrite.django.atomic() as tx:
                tx.send("orders", "2")
                with suppress(ZeroDivisionError), transaction.atomic():
                    dualwrite.django.send("orders", "3")
                    raise ZeroDivisionError
                with dualwrite.django.atomic():
                    dualwrite.django.send("orders", "4")
            with dualwrite.django.atomic() as tx:
                tx.send("orders", "5")
                transaction.set_rollback(True)
        assert [each.text for each in captured] == ["2", "4"]
        assert tx.outcome is None

    def test_own_callbacks_only(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks, dualwrite.django.atomic() as tx:
            with transaction.atomic():
                tx.send("orders", "1")
            transaction.on_commit(lambda: None)
        assert len(callbacks) == 1

    def test_a_view(self) -> None:
        with dualwrite.django.capture_messages(using="default") as captured:
            response = self.client.post("/order/", {"item": "lamp"})
        assert (response.content, [each.text for each in captured]) == (b"published", ["lamp"])

    def test_outside_of_a_block(self) -> None:
        with pytest.raises(dualwrite.UsageError):
            dualwrite.django.send("orders", "1")

    def test_inside_of_another_block(self) -> None:
        with dualwrite.django.capture_messages() as captured, transaction.atomic():
            if OURS:
                with dualwrite.django.atomic() as tx:
                    tx.send("orders", "1")
            else:
                with pytest.raises(dualwrite.UsageError):
                    dualwrite.django.atomic().__enter__()
        assert [each.text for each in captured] == (["1"] if OURS else [])

    def test_any_block(self) -> None:
        if not OURS:
            self.skipTest("needs our ENGINE")
        with dualwrite.django.capture_messages() as captured:
            self.client.post("/order-in-atomic/", {"item": "lamp"})
            self.client.post("/order-in-atomic/", {"item": "none", "fails": "1"})
            with suppress(ZeroDivisionError), transaction.atomic():
                dualwrite.django.send("orders", "none")
                raise ZeroDivisionError
            with transaction.atomic():
                with transaction.atomic():
                    dualwrite.django.send("orders", "two")
                assert len(captured) == 1
        assert [each.text for each in captured] == ["lamp", "two"]


class InTransactionTestCase(TransactionTestCase):
    """The real thing: the block commits, and Kafka has the messages."""

    def sent(self) -> list[str | None]:
        found = read_committed({"bootstrap.servers": os.environ["SHOP_KAFKA"]}, Topic.name())
        return [each.text for each in found]

    def test_a_block_commits(self) -> None:
        with dualwrite.django.capture_messages() as captured:
            response = self.client.post("/order/", {"item": "first"})
        assert response.content == b"published"
        assert [each.text for each in captured] == ["first"]
        assert "first" in self.sent()

    def test_a_block_is_rolled_back(self) -> None:
        with pytest.raises(ZeroDivisionError):
            failing(Topic.name(), "never")
        assert not Order.objects.exists()
        with dualwrite.django.atomic() as tx:
            tx.send(Topic.name(), "second")
        assert "second" in self.sent()
        assert "never" not in self.sent()
