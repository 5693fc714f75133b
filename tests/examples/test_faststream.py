"""The FastStream example, on a real broker: what it publishes is committed with its session, as FastStream encodes it."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import sqlalchemy as sa
from confluent_kafka.admin import AdminClient
from faststream import BaseMiddleware
from faststream import TestApp as RunningApp
from sqlalchemy.ext.asyncio import AsyncSession

import dualwrite
from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.testing import failpoints
from dualwrite.testing.topics import CommittedMessage, read_committed
from fixtures.broker import make_topic
from fixtures.pace import LIMIT, until_recorded

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "faststream_own_session.py"


@pytest.fixture
def service(
    broker: DevCluster, new_name: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """The example as a module, with topics and a group of the test's own."""
    url = f"sqlite+aiosqlite:///{tmp_path}/shop.db"
    migration.upgrade(url.replace("+aiosqlite", ""))
    monkeypatch.setenv("DUALWRITE_DATABASE_URL", url)
    monkeypatch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", broker.bootstrap_servers)
    incoming, topic = new_name("incoming"), new_name("topic")
    make_topic(broker, incoming)
    code = EXAMPLE.read_text(encoding="utf-8").replace('"incoming-orders", "orders"', f"{incoming!r}, {topic!r}")
    (tmp_path / "faststream_service.py").write_text(code.replace('group_id="shop"', f"group_id={incoming!r}"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("faststream_service")
    del sys.modules["faststream_service"]


def test_an_order_is_a_row_and_an_event_also_if_its_first_commit_fails(service: ModuleType, broker: DevCluster) -> None:
    """FastStream gets the error of the commit, and consumes the message again."""
    fails_once = failpoints.only_at(1, failpoints.raises(dualwrite.DeliveryError("No.")))

    async def work() -> None:
        async with RunningApp(service.app):
            with failpoints.armed("before_db_commit", fails_once):
                for number in (1, 1, 2):
                    await service.broker.publish(service.Order(id=str(number), item=f"item {number}"), service.INCOMING)
                await asyncio.to_thread(
                    until_recorded, lambda: [message.key_text for message in sent(broker, service.TOPIC)], "12"
                )
            assert [row.id for row in await rows(service)] == ["1", "2"]

    asyncio.run(work())
    assert [(message.key_text, message.json()) for message in sent(broker, service.TOPIC)] == [
        (number, {"id": number, "item": f"item {number}"}) for number in "12"
    ]


def test_a_joined_message_is_what_faststream_would_have_sent(
    service: ModuleType, broker: DevCluster, new_name: Callable[[str], str]
) -> None:
    joined, plain, rolled_back = new_name("topic"), new_name("topic"), new_name("topic")
    options = {"correlation_id": "17", "reply_to": "answers", "headers": {"tenant": "acme"}, "timestamp_ms": 1_790_000_000_000}
    messages = [service.Order(id="1", item="lamp"), {"item": "chair"}, "text", b"bytes", 17, None]
    seen = []

    class Seeing(BaseMiddleware[Any, Any]):
        async def publish_scope(self, call_next: Callable[[Any], Awaitable[Any]], cmd: Any) -> Any:
            seen.append(cmd.destination)
            return await call_next(cmd)

    async def work() -> None:
        service.broker.insert_middleware(Seeing)
        async with RunningApp(service.app):
            engine = service.broker.context.get("shop").engine
            for number, message in enumerate(messages):
                await service.broker.publish(message, plain, key=str(number), **options)
                async with AsyncSession(engine) as session:
                    await service.publish(message, joined, session=session, key=str(number), **options)
                    await session.commit()
            async with AsyncSession(engine) as session:
                await service.publish("lost", rolled_back, session=session)
                await session.rollback()

    asyncio.run(work())
    assert seen == [plain, joined] * len(messages) + [rolled_back]
    expected = [replace(message, topic=joined) for message in sent(broker, plain)]
    assert len(expected) == len(messages)
    assert [replace(message, offset=0) for message in sent(broker, joined)] == [replace(each, offset=0) for each in expected]
    assert rolled_back not in AdminClient({"bootstrap.servers": broker.bootstrap_servers}).list_topics(timeout=LIMIT).topics


def sent(broker: DevCluster, topic: str) -> list[CommittedMessage]:
    with suppress(dualwrite.UnknownTopicError):  # it is made by the first message
        return read_committed(broker.bootstrap_servers, topic, timeout=LIMIT)
    return []


async def rows(service: ModuleType) -> Sequence[Any]:
    async with AsyncSession(service.broker.context.get("shop").engine) as session:
        return (await session.scalars(sa.select(service.OrderRow).order_by(service.OrderRow.id))).all()
