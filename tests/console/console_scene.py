"""The scene of the console's tests: a database and a broker in every state that the page shows."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from typing import Any
from urllib.parse import quote_plus

import pytest
import sqlalchemy as sa
from confluent_kafka import Producer
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import dualwrite
from dualwrite.admin import TransactionAdmin
from dualwrite.console import Authorize, Console, Role, console
from dualwrite.devcluster import DevCluster
from dualwrite.processor.dead_letters import dead_letter_headers
from dualwrite.relay import Relay, create_table
from dualwrite.stores.base import LostKind, LostTransaction, Resolution, StateRow
from dualwrite.stores.journal import JournalEntry, JournalLimits
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.sql_journal import SqlJournal, insert_entries
from dualwrite.testing import failpoints
from dualwrite.testing.fakes import FakeMessage
from dualwrite.texts import now_ms
from fixtures.broker import read_values
from fixtures.fork_server import ForkedProcess
from fixtures.pace import LIMIT, ended, until

PATH = "/dualwrite"
"""Where the console is mounted."""

SCREENSHOTS = os.environ.get("DUALWRITE_SCREENSHOTS")
"""A folder for the pictures of the documentation."""


def operator(request: Any) -> Role:
    """Everybody may do everything."""
    request.state.who = "anna"
    return Role.OPERATOR


class ConsoleScene:
    """What writers have left on a database and a broker, and the console that shows it.

    Args:
        url: The database, with dualwrite's tables, and nothing else in it.
        broker: The cluster.
    """

    def __init__(self, url: str, broker: DevCluster) -> None:
        self.url = url
        self.broker = broker
        self.servers = broker.bootstrap_servers
        self.part = "" if SCREENSHOTS else f"-{uuid.uuid4().hex[:8]}"
        self.store = SqlStateStore.from_url(url, lock_timeout=LIMIT)
        self._consoles: list[Console] = []

    def name(self, kind: str) -> str:
        """A name that no other test has on the broker."""
        return f"{kind}{self.part}"

    def close(self) -> None:
        for each in self._consoles:
            each.close()
        self.store.close()

    @property
    def settings(self) -> dualwrite.Settings:
        return dualwrite.Settings(database_url=self.url, kafka={"bootstrap.servers": self.servers}, lanes=1)

    # --- what writers have left

    def crash(self, name: str, point: str = "after_db_commit") -> StateRow:
        """A writer that is gone in the middle of a transaction of one message, to the topic `<name>-events`."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DUALWRITE_DATABASE_URL", self.url)
            patch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", self.servers)
            patch.setenv("DUALWRITE_LANES", "1")
            arguments = [name, f"{name}-events", "1"]
            with ForkedProcess("cli.crashing_writer", arguments, failpoints=f"{point}#1=exit") as process:
                assert ended(process) == failpoints.EXIT_CODE
        return self.row(name)

    def lose(self, name: str) -> StateRow:
        """A transaction that the database has committed and somebody has aborted at Kafka, as recovery has found."""
        row = self.crash(name)
        with TransactionAdmin(self.servers, timeout=LIMIT) as admin:
            state = row.prepared_state
            assert state is not None
            admin.force_terminate(row.kafka_id(row.generation), producer_id=state.producer_id, epoch=state.epoch)
        dualwrite.recover(self.store, settings=self.settings, ids=[name], on_lost="report")
        assert self.row(name).lost
        return self.row(name)

    def unverified(self, name: str, like: StateRow) -> None:
        """A row with a transaction of which Kafka has no evidence."""
        lost = LostTransaction(LostKind.UNVERIFIED, like.lost[0].state, 0, like.updated_at)
        claim = self.store.claim(name, "test", timeout=LIMIT)
        self.store.record_resolution(claim, Resolution(lost=lost, resolved_generation=0))

    def journal(self, prefix: str, *values: str, topic: str | None = None) -> None:
        """An open journal with messages to the topic `<prefix>-events`, or to another one."""
        assert isinstance(self.store.journal, SqlJournal)
        self.store.journal.prepare(prefix)
        self.store.journal.open(prefix, "a pool that is gone", JournalLimits())
        to = topic or f"{prefix}-events"
        entries = [JournalEntry(to, None, each.encode(), None, None, now_ms()) for each in values]
        self.store.short_transactions.run(lambda connection: insert_entries(connection, prefix, entries), "a test")

    def dead_letter(self, topic: str, message: FakeMessage, group: str) -> None:
        """A message that a processor of the group could not process."""
        headers = dead_letter_headers(message, ValueError("it is bad"), group_id=group, attempts=5)
        producer = Producer({"bootstrap.servers": self.servers})
        producer.produce(topic, message.value(), message.key(), headers=headers)
        assert producer.flush(LIMIT) == 0

    @contextmanager
    def relay(self, topic: str) -> Iterator[Relay]:
        """A relay with one dead letter, whose row names a topic that is not one; and an outbox that is empty."""
        engine = sa.create_engine(self.url)
        if not sa.inspect(engine).has_table("outbox"):
            create_table(engine)
        with engine.begin() as connection:
            connection.execute(
                sa.text("INSERT INTO outbox (topic, value) VALUES (:topic, :value)"), {"topic": topic, "value": b"x"}
            )
        engine.dispose()
        with Relay(self.store, name=self.name("relay"), settings=self.settings) as relay:
            relay.run_once()
            assert relay.dead_letters.count() == 1
            yield relay

    def row(self, name: str) -> StateRow:
        """The row of an id."""
        row = self.store.read(name)
        assert row is not None
        return row

    def published(self, name: str) -> list[bytes | None]:
        """The committed messages of a topic."""
        return read_values(self.servers, f"{name}-events")

    # --- the console

    def made(self, **options: Any) -> Console:
        """A console of the database and the broker."""
        options = {"settings": self.settings, **options} if "pool" not in options else options
        found = console(options.pop("pool", None), **options)
        self._consoles.append(found)
        return found

    def client(self, authorize: Authorize | None = operator, **options: Any) -> Browser:
        """A browser that uses the console, which is mounted at PATH."""
        return Browser(self.made(authorize=authorize, **options))


class Browser:
    """Uses a console as a browser does: it keeps cookies, sends the forms of pages, and says from which page they come."""

    def __init__(self, mounted: Console, path: str = PATH, root_path: str = "") -> None:
        app = Starlette(routes=[Mount(path, mounted)])
        self.http = TestClient(app, base_url="http://ops.example.com", root_path=root_path)
        self.path = root_path + path

    def get(self, where: str, status: int = 200) -> str:
        """The HTML of a page or of a section."""
        found = self.http.get(f"{self.path}{where}")
        assert found.status_code == status, found.text
        return found.text

    def section(self, name: str) -> str:
        return self.get(f"/section/{name}")

    def until(self, name: str, *texts: str) -> str:
        """Read a section until it has these texts."""
        seen = ""

        def has_them() -> bool:
            nonlocal seen
            seen = self.section(name)
            return all(text in seen for text in texts)

        until(has_them, lambda: f"{texts} in {name}: {seen}", pause=0.2)
        return seen

    def form(self, where: str, action: str) -> list[tuple[str, str]]:
        """The fields of a form of a page."""
        page = self.get(where)
        found = re.search(rf'<form method="post" action="{self.path}/act/{action}">(.*?)</form>', page, re.DOTALL)
        assert found is not None, f"no form {action}: {page}"
        return [(name, value) for name, value in re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', found[1])]

    def act(self, where: str, action: str, **headers: str) -> str:
        """Send a form of a page; return the list of actions."""
        found = self.send(action, self.form(where, action), **headers)
        assert found.status_code == 303, found.text
        return self.section("carried")

    def send(self, action: str, fields: list[tuple[str, str]], **headers: str) -> Any:
        content = "&".join(f"{name}={_quoted(value)}" for name, value in fields)
        given = {"origin": "http://ops.example.com", "content-type": "application/x-www-form-urlencoded", **headers}
        given = {name: value for name, value in given.items() if value}
        return self.http.post(f"{self.path}/act/{action}", content=content, headers=given, follow_redirects=False)


def _quoted(text: str) -> str:
    return quote_plus(unescape(text))
