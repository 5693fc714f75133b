"""What operators do on the page: each action on a real broker, by the forms of the page, and logged with who and what."""

from __future__ import annotations

import logging

import pytest
import sqlalchemy as sa

from console.console_scene import Browser, ConsoleScene
from dualwrite.relay.dead_letters import DeadLetters
from dualwrite.testing.fakes import FakeMessage
from dualwrite.transactional_id import drainer_id
from fixtures.broker import make_topic, read_topic, wait_for_markers


def test_an_id_is_recovered(scene: ConsoleScene, caplog: pytest.LogCaptureFixture) -> None:
    name = scene.name("shop")
    scene.crash(name)
    browser = scene.client()
    with caplog.at_level(logging.WARNING, "dualwrite.console"):
        done = browser.act(f"/detail/{name}", "recover")
    assert f"anna: recover {name}. {name}: the database had committed; Kafka&#39;s side is committed now." in done
    logged = [record.getMessage() for record in caplog.records]
    assert logged[0] == f"anna asks to recover {name}"
    assert logged[1].startswith(f"done for anna: recover {name}: ")
    wait_for_markers(scene.servers)
    assert scene.published(name) == [b"from the crashed writer"]
    assert "Nothing: everything on this id is resolved." in browser.get(f"/detail/{name}")


def test_an_id_that_was_claimed_since_the_page_was_read_is_left_alone(scene: ConsoleScene) -> None:
    name = scene.name("shop")
    scene.crash(name)
    browser = scene.client()
    fields = browser.form(f"/detail/{name}", "recover")
    fence = scene.store.claim(name, "another process", timeout=10).fence
    browser.send("recover", fields)
    assert "The id is not as the page showed it" in browser.section("carried")
    assert scene.row(name).fence == fence


def test_lost_messages_are_published_again(scene: ConsoleScene) -> None:
    name = scene.name("shop")
    make_topic(scene.broker, f"{name}-events", 1)
    scene.lose(name)
    browser = scene.client()
    done = browser.act(f"/detail/{name}", "publish")
    assert "its messages are published again now" in done
    wait_for_markers(scene.servers)
    assert (scene.published(name), scene.row(name).lost) == ([b"from the crashed writer"], ())


def test_only_what_the_page_has_shown_is_acknowledged(scene: ConsoleScene) -> None:
    name = scene.name("shop")
    lost = scene.lose(name).lost[0]
    browser = scene.client()
    fields = browser.form(f"/detail/{name}", "acknowledge")
    browser.send("acknowledge", [(field, f"{value}0" if field == "entry" else value) for field, value in fields])
    assert "There was nothing left." in browser.section("carried")
    assert scene.row(name).lost == (lost,)
    assert f"Acknowledged 1 transaction: LOST {lost.state}." in browser.act(f"/detail/{name}", "acknowledge")
    assert scene.row(name).lost == ()


def test_a_journal_is_published(scene: ConsoleScene) -> None:
    prefix = scene.name("shop")
    make_topic(scene.broker, f"{prefix}-events", 1)
    scene.journal(prefix, "one", "two")
    done = scene.client().act("/section/journals", "drain")
    assert "The journal is empty, and its gate is closed: it had 2 messages." in done
    wait_for_markers(scene.servers)
    assert scene.published(prefix) == [b"one", b"two"]
    assert scene.row(drainer_id(prefix)).is_clean or not scene.row(drainer_id(prefix)).lost


def test_dead_letters_are_replayed_or_dropped(scene: ConsoleScene) -> None:
    topic = f"{scene.name('shop')}-events"
    make_topic(scene.broker, topic, 1)
    with scene.relay("not a topic!") as relay:
        browser = scene.client(relays=[relay])
        (letter,) = relay.dead_letters.oldest()
        chosen = [*browser.form("/section/letters", "replay"), ("letter", str(letter.id))]
        assert "No dead letter is chosen." in _after(browser, "replay", browser.form("/section/letters", "replay"))
        assert "&#39;not a topic!&#39;" in _after(browser, "replay", chosen), "it is still not valid"
        _correct(scene, topic)
        assert "Published 1 dead letter." in _after(browser, "replay", chosen)
        assert relay.dead_letters.count() == 0
    with scene.relay("not a topic!") as relay:
        browser = scene.client()
        (letter,) = relay.dead_letters.oldest()
        fields = [("token", _token(browser)), ("relay", relay.name), ("letter", str(letter.id))]
        assert "pass the relay to console(relays=…)" in _after(browser, "replay", fields)
        assert "Deleted 1 dead letter." in _after(browser, "drop", fields)
        assert relay.dead_letters.count() == 0


def test_the_dead_letters_of_a_journal(scene: ConsoleScene) -> None:
    prefix = scene.name("shop")
    scene.journal(prefix, "one", topic="not a topic!")
    browser = scene.client()
    browser.act("/section/journals", "drain")
    browser.until("letters", drainer_id(prefix), "1 dead letter")
    letters = DeadLetters(scene.store, drainer_id(prefix))
    fields = [*browser.form("/section/letters", "replay"), ("letter", str(letters.oldest()[0].id))]
    _correct(scene, f"{prefix}-events")
    make_topic(scene.broker, f"{prefix}-events", 1)
    assert "Published 1 dead letter." in _after(browser, "replay", fields)
    wait_for_markers(scene.servers)
    assert (letters.count(), scene.published(prefix)) == (0, [b"one"])


def _correct(scene: ConsoleScene, topic: str) -> None:
    engine = sa.create_engine(scene.url)
    with engine.begin() as connection:
        found = connection.execute(sa.text("SELECT source_row FROM dualwrite_dead_letter")).scalar_one()
        text = found if isinstance(found, str) else bytes(found).decode()
        changed = text.replace("not a topic!", topic)
        connection.execute(sa.text("UPDATE dualwrite_dead_letter SET source_row = :row"), {"row": changed})
    engine.dispose()


def _token(browser: Browser, action: str = "drop") -> str:
    where = "/section/topics" if action == "resend" else "/section/letters"
    return str(dict(browser.form(where, action))["token"])


def _after(browser: Browser, action: str, fields: list[tuple[str, str]]) -> str:
    assert browser.send(action, fields).status_code == 303
    return str(browser.section("carried"))


def test_dead_letters_of_processors_are_sent_again(scene: ConsoleScene) -> None:
    dead, topic, group = scene.name("dead"), scene.name("orders"), scene.name("billing")
    for name in (dead, topic):
        make_topic(scene.broker, name, 1)
    scene.dead_letter(dead, FakeMessage(topic, b"one", key=b"k", offset=7), group)
    scene.dead_letter(dead, FakeMessage(topic, b"two", offset=8), group)
    scene.dead_letter(dead, FakeMessage(topic, b"of others", offset=9), "shipping")
    browser = scene.client(dead_letter_topics=[dead])
    left = browser.until("topics", f"{group}, in {dead}", "2 dead letters", "shipping, in")
    assert f"{topic}-0, offset 7" in left
    assert "<strong>ValueError</strong> it is bad" in left
    assert f"2 dead letters of {group} in {dead}." in browser.until("todo", "dead letters of")
    fields = [("token", _token(browser, "resend")), ("topic", dead), ("group", group)]
    assert "Sent 2 dead letters again." in _after(browser, "resend", fields)
    assert "Sent 0 dead letters again." in _after(browser, "resend", fields)
    assert "is none of this console&#39;s dead-letter topics" in _after(
        browser, "resend", [*fields[:1], ("topic", "x"), fields[2]]
    )
    wait_for_markers(scene.servers)
    sent = read_topic(scene.servers, topic)
    assert [(message.key(), message.value()) for message in sent] == [(b"k", b"one"), (None, b"two")]
    assert group not in browser.until("topics", "shipping, in").replace(dead, "")


def test_a_dead_letter_topic_that_cannot_be_read_is_told(scene: ConsoleScene) -> None:
    browser = scene.client(dead_letter_topics=["not a topic!"])
    assert "not a topic! could not be read" in browser.until("topics", "could not be read")
    assert "Not read: not a topic!" in browser.section("todo")
