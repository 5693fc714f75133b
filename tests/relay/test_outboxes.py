"""Outboxes that others have made: Debezium's table, rows that are marked, and tables that a relay refuses at its start."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from relay_scene import RelayScene

from dualwrite import Relay, Settings
from dualwrite.diagnosis.examination import examine
from dualwrite.errors import ConfigurationError, StoreError
from dualwrite.relay import DEBEZIUM, GENERIC, BatchOptions, OutboxLayout, RelayOptions, create_table
from fixtures.broker import make_topic, read_topic, read_values, wait_for_markers
from fixtures.tables import table

UUIDS = {"postgresql": "uuid", "mysql": "char(36)", "mariadb": "char(36)", "sqlite": "text"}
JSON = {"postgresql": "jsonb", "mysql": "json", "mariadb": "json", "sqlite": "text"}
SERIAL = {
    "postgresql": "seq bigserial",
    "mysql": "seq bigint AUTO_INCREMENT UNIQUE",
    "mariadb": "seq bigint AUTO_INCREMENT UNIQUE",
    "sqlite": "seq integer PRIMARY KEY",
}


def execute(scene: RelayScene, statement: str, **values: Any) -> None:
    with scene.engine.begin() as connection:
        connection.execute(sa.text(statement), values)


def relayed(scene: RelayScene, layout: OutboxLayout, **options: Any) -> Relay:
    with scene.relay(layout=layout, **options) as relay:
        relay.run(until_empty=True)
    wait_for_markers(scene.servers)
    return relay


def test_debeziums_outbox(scene: RelayScene, new_name: Callable[[str], str]) -> None:
    """The router's defaults; UUIDs have no order, so the table needs a column that has one."""
    kind, dialect = new_name("order"), scene.engine.dialect.name
    make_topic(scene.broker, f"outbox.event.{kind}")
    key = "" if dialect == "sqlite" else " PRIMARY KEY"
    execute(
        scene,
        f"CREATE TABLE debezium (id {UUIDS[dialect]}{key}, aggregatetype varchar(255), aggregateid varchar(255), "
        f"type varchar(255), payload {JSON[dialect]}, {SERIAL[dialect]})",
    )
    ids = [str(uuid4()) for _ in range(30)]
    for number, identity in enumerate(ids):
        execute(
            scene,
            "INSERT INTO debezium (id, aggregatetype, aggregateid, type, payload) VALUES (:id, :kind, '7', 'made', :payload)",
            id=identity,
            kind=kind,
            payload=f'{{"n": {number}}}',
        )
    layout = replace(DEBEZIUM, table="debezium", header_columns={"id": "id", "eventType": "type"})
    with pytest.raises(ConfigurationError, match="order_by"), scene.relay(layout=layout):
        pass
    relayed(scene, replace(layout, order_by="seq"), batch=BatchOptions(rows=7))
    found = read_topic(scene.servers, f"outbox.event.{kind}")
    assert [message.value() for message in found] == [b'{"n": %d}' % number for number in range(30)]
    assert [dict(message.headers() or ())["id"].decode() for message in found] == ids
    assert {message.key() for message in found} == {b"7"}
    assert dict(found[0].headers() or ())["eventType"] == b"made"


def test_rows_that_are_marked_instead_of_deleted(scene: RelayScene) -> None:
    moment = {"postgresql": "timestamptz", "sqlite": "text"}.get(scene.engine.dialect.name, "datetime(6)")
    execute(scene, f"ALTER TABLE outbox ADD COLUMN published_at {moment}")
    numbers = scene.insert(25)
    layout = replace(GENERIC, published="published_at")
    relayed(scene, layout, batch=BatchOptions(rows=10))
    relayed(scene, layout)
    scene.check(numbers)
    with scene.engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM outbox WHERE published_at IS NOT NULL")) == 25


def test_the_values_of_columns_in_a_table_of_a_users_own(scene: RelayScene) -> None:
    """A quoted name, a condition, another topic, integers and texts, a tombstone, and no other column."""
    quote = scene.quoted
    execute(
        scene, f"CREATE TABLE {quote('Order Events')} (nr integer PRIMARY KEY, {quote('Who')} integer, body text, kind text)"
    )
    for nr, body, kind in ((2, "größe %s :x", "a"), (1, "first", "a"), (3, None, "a"), (4, "not this", "b")):
        values = {"nr": nr, "body": body, "kind": kind}
        execute(scene, f"INSERT INTO {quote('Order Events')} VALUES (:nr, 5, :body, :kind)", **values)
    layout = OutboxLayout("Order Events", id="nr", topic=scene.topic, key="Who", value="body", where="kind = 'a'")
    relayed(scene, layout)
    found = scene.messages()
    assert [message.value() for message in found] == [b"first", "größe %s :x".encode(), None]
    assert {message.key() for message in found} == {b"5"}
    with scene.engine.connect() as connection:
        assert connection.scalars(sa.text(f"SELECT nr FROM {quote('Order Events')}")).all() == [4]


@table(
    ("layout", "text"),
    [
        (replace(GENERIC, table="nowhere"), "nowhere"),
        (replace(GENERIC, key="customer", headers="meta"), "no column 'customer', 'meta'"),
        (replace(GENERIC, topic="{kind}"), "no column 'kind'"),
        (replace(GENERIC, id="topic"), "order_by"),
    ],
)
def test_a_relay_says_at_its_start_what_is_missing(on_sqlite: RelayScene, layout: OutboxLayout, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text), on_sqlite.relay(layout=layout):
        pass


def test_a_relay_on_postgresql_says_at_its_start_what_is_missing(on_postgres: RelayScene) -> None:
    for layout in (replace(GENERIC, table="nowhere"), replace(GENERIC, table="no.where")):
        with pytest.raises(ConfigurationError, match="create-table"), on_postgres.relay(layout=layout):
            pass
    with (
        pytest.raises(ConfigurationError, match="no column 'customer'"),
        on_postgres.relay(layout=replace(GENERIC, key="customer")),
    ):
        pass


def test_an_id_that_is_not_unique_publishes_nothing(on_sqlite: RelayScene) -> None:
    execute(on_sqlite, "CREATE TABLE twice (id integer, topic text, value text)")
    for value in ("a", "b"):
        execute(on_sqlite, f"INSERT INTO twice VALUES (1, '{on_sqlite.topic}', '{value}')")
    layout, batch = OutboxLayout("twice", key=None), BatchOptions(rows=1)
    with on_sqlite.relay(layout=layout, batch=batch) as relay, pytest.raises(StoreError, match="not unique"):
        relay.run()
    assert read_values(on_sqlite.servers, on_sqlite.topic) == []


def test_an_outbox_in_another_schema(on_postgres: RelayScene) -> None:
    scene = on_postgres
    execute(scene, "CREATE SCHEMA shop")
    execute(scene, "ALTER TABLE outbox SET SCHEMA shop")
    execute(scene, "INSERT INTO shop.outbox (topic, value) VALUES (:topic, '0')", topic=scene.topic)
    relayed(scene, replace(GENERIC, table="shop.outbox"))
    assert read_values(scene.servers, scene.topic) == [b"0"]


@table("changes", [{"poll": 0}, {"shards": 0}, {"on_poison": "skip"}, {"shard_by": "x"}, {"lease": -1}])
def test_options_that_are_not_allowed(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        RelayOptions(**changes)


def test_shards_share_the_rows_by_key_whatever_their_number_is(on_postgres: RelayScene) -> None:
    scene, no_key = on_postgres, f"{on_postgres.topic}-no-key"
    for shards in itertools.islice(itertools.cycle([3, 1, 2]), 4):
        scene.insert(30)
        execute(scene, "INSERT INTO outbox (topic, value) VALUES (:topic, '-1')", topic=no_key)
        relayed(scene, GENERIC, shards=shards, batch=BatchOptions(rows=4))
    scene.check(range(120))
    assert read_values(scene.servers, no_key) == [b"-1"] * 4


def plainly(scene: RelayScene, statement: str) -> None:
    """Run SQL as it is, without parameters."""
    with scene.engine.begin() as connection:
        connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


def test_names_and_sql_of_users_are_no_templates(scene: RelayScene) -> None:
    """Colons, percent signs and quotes mean in SQLAlchemy's texts, and to drivers, what they don't mean in SQL."""
    dialect = scene.engine.dialect.name
    name, mark = 'out%box :id "x"', "`" if dialect in ("mysql", "mariadb") else '"'

    def quoted(part: str) -> str:
        return mark + part.replace(mark, 2 * mark) + mark

    kind, now = ("varchar(99)", "datetime(6)") if mark == "`" else ("text", "text" if dialect == "sqlite" else "timestamptz")
    topic, key, value = names = [quoted(each) for each in ("the :topic", "100%", 'The "Value"')]
    columns = [f"{each} {kind}" for each in names]
    columns += [f"{quoted(each)} {now}" for each in ("%(not before)s", "sent %s", "made:at")]
    plainly(scene, f"CREATE TABLE {quoted(name)} ({SERIAL[dialect]}, {', '.join(columns)})")
    for each in ('{"draft":true}', '{"draft":false}', ":draft", "100%", "%(x)s"):
        row = f"('{scene.topic}', ':k', '{each}')"
        plainly(scene, f"INSERT INTO {quoted(name)} ({topic}, {key}, {value}) VALUES {row}")
    layout = OutboxLayout(
        name,
        id="seq",
        topic="{the :topic}",
        key="100%",
        value='The "Value"',
        not_before="%(not before)s",
        published="sent %s",
        created="made:at",
        where=value + """ NOT IN ('{"draft":true}', ':draft') -- 100% :right""",
    )
    by = f"CASE WHEN {key} = ':k' AND seq % 2 = 1 THEN 1 ELSE 0 END"
    assert relayed(scene, layout, shards=2, shard_by=by).published == 3
    found = read_topic(scene.servers, scene.topic)
    assert {each.key() for each in found} == {b":k"}
    assert {each.value() for each in found} == {b'{"draft":false}', b"100%", b"%(x)s"}
    with (
        pytest.raises(ConfigurationError, match="option where"),
        scene.relay(layout=replace(layout, where="no_such = ':x'")),
    ):
        pass
    with pytest.raises(ConfigurationError, match="option shard_by"), scene.relay(layout=layout, shards=2, shard_by="no_such"):
        pass


def test_an_outbox_is_made_under_any_name(scene: RelayScene) -> None:
    create_table(scene.engine, "50% :off")
    with scene.engine.connect() as connection:
        assert "50% :off" in sa.inspect(connection).get_table_names()


NOW = datetime.now(UTC)
FORMS: dict[str, Callable[[datetime], str]] = {
    "isoformat": datetime.isoformat,
    "isoformat, naive": lambda at: at.replace(tzinfo=None).isoformat(),
    "with Z": lambda at: f"{at:%Y-%m-%dT%H:%M:%S}.123Z",
    "minutes": lambda at: f"{at:%Y-%m-%d %H:%M}",
    "to the east": lambda at: at.astimezone(timezone(timedelta(hours=9))).isoformat(" "),
    "to the west": lambda at: at.astimezone(timezone(timedelta(hours=-7))).isoformat(),
}


def test_sqlites_times_are_compared_as_times_in_all_forms(on_sqlite: RelayScene) -> None:
    scene, numbers = on_sqlite, []
    for form in FORMS.values():
        numbers += scene.insert(1, not_before=form(NOW - timedelta(minutes=2)), created_at=form(NOW - timedelta(minutes=2)))
        scene.insert(1, not_before=form(NOW + timedelta(hours=1)))
    scene.insert(1, not_before="tomorrow")
    with scene.relay() as relay:
        status = relay.status()
        assert (status.waiting, status.later) == (len(FORMS) + 1, len(FORMS))
        assert status.oldest is not None
        assert 110 < status.oldest < 3600
        relay.run(until_empty=True)
        (dead,) = relay.dead_letters.oldest()
    assert (dead.error_kind, dead.row["not_before"]) == ("InvalidMessageError", "tomorrow")
    assert "can't read as a time" in dead.error
    scene.check(numbers)


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_times_that_are_texts_are_refused_at_the_start(scene: RelayScene) -> None:
    execute(scene, "ALTER TABLE outbox ADD COLUMN due varchar(40)")
    with (
        pytest.raises(ConfigurationError, match=r"(?s)'due'.*not_before"),
        scene.relay(layout=replace(GENERIC, not_before="due")),
    ):
        pass


@pytest.mark.parametrize("database_url", ["postgresql", "mariadb"], indirect=True)
def test_ids_from_a_sequence_with_a_cache_are_warned_of(scene: RelayScene, caplog: pytest.LogCaptureFixture) -> None:
    """At the start, by `relay status`, and by `doctor`."""
    if scene.engine.dialect.name == "postgresql":
        execute(scene, "ALTER TABLE outbox ALTER id SET CACHE 20")
        execute(scene, "CREATE SEQUENCE numbers CACHE 30")
        default = "nextval('numbers')"
    else:
        execute(scene, "CREATE SEQUENCE numbers")  # its default is 1000
        default = "nextval(numbers)"
    execute(scene, f"CREATE TABLE numbered (id bigint DEFAULT {default} PRIMARY KEY, topic varchar(99), value varchar(9))")
    with scene.relay(layout=OutboxLayout("numbered", key=None)) as relay:
        assert "CACHE" in caplog.text
        assert [note for note in relay.status().notes if "numbers" in note and "another order" in note]
    caplog.clear()
    with Relay(scene.url, kafka=scene.servers) as relay:
        relay.run(until_empty=True)
        found = [each for each in examine(Settings(database_url=scene.url)).findings if each.about == "outbox outbox"]
        if scene.engine.dialect.name == "postgresql":
            assert "CACHE 20" in caplog.text
            execute(scene, "ALTER TABLE outbox ALTER id SET CACHE 1")
            assert len(found) == 1
        assert relay.status().notes == ()


def test_different_numbers_of_shards_are_told(on_postgres: RelayScene) -> None:
    def relays(*counts: int) -> tuple[str, ...]:
        with ExitStack() as opened:
            made = [opened.enter_context(on_postgres.relay(shards=count)) for count in counts]
            for relay in made:
                relay.run_once()
            return made[0].status().notes

    assert relays(2, 2) == relays(1) == ()
    assert ["(2, 4)" in note for note in relays(4, 2)] == [True]
    assert ["(1, 4)" in note for note in relays(1, 4)] == [True]
