"""On PostgreSQL a transaction begins with its first statement, and shows whether the writer is fenced: before any message."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from dualwrite import Phase, Transaction
from dualwrite.errors import FencedError, StoreUnavailableError
from dualwrite.kafka.base import Message
from dualwrite.observability.outages import BEGIN, database_at
from dualwrite.transaction import opened
from writer.scene import Scene

Use = Callable[[Scene, Transaction], None]


def insert(scene: Scene, tx: Transaction) -> None:
    scene.insert(tx, 2)


def send(scene: Scene, tx: Transaction) -> None:
    scene.send(tx, 2)


def send_many(scene: Scene, tx: Transaction) -> None:
    tx.send_many(scene.topic, ["2"])


def send_as_a_group(scene: Scene, tx: Transaction) -> None:
    opened(tx).send_messages([Message(scene.topic, b"2", None, None, None, None)])


def fenced_by(use: Use, scene: Scene, tx: Transaction) -> None:
    with pytest.raises(FencedError):
        use(scene, tx)
    assert scene.unfinished() == []


@pytest.mark.parametrize("use", [insert, send, send_many, send_as_a_group])
def test_a_fenced_writer_sends_nothing(scene: Scene, use: Use) -> None:
    """The block has begun. Its first call raises, and so does its end, even if it has ignored that."""
    with scene.connect() as writer:
        scene.write(writer, 1)
        scene.recover()
        with pytest.raises(FencedError), writer.transaction() as tx:
            fenced_by(use, scene, tx)
        assert writer.phase is Phase.FENCED
        writer.reopen()
        scene.write(writer, 3)
    assert scene.agree() == [1, 3]


@pytest.mark.parametrize("use", [insert, send])
def test_a_transaction_that_has_sent_nothing_yet_is_no_answer_of_the_database(scene: Scene, use: Use) -> None:
    """Otherwise an outage would be over although nothing was answered."""
    with scene.connect() as writer:
        scene.write(writer, 1)
        database = database_at(writer.store.description)
        database.failed(BEGIN, StoreUnavailableError("No answer."), since=time.monotonic())
        with writer.transaction() as tx:
            assert BEGIN in database.failing
            use(scene, tx)
            assert (BEGIN in database.failing) is (use is insert)  # the user's own statements are not watched
        assert not database.failing
