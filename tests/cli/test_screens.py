"""The screens in docs/operations/transactions.md are what the commands print."""

from __future__ import annotations

import io
import re
import sys
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from cli.conftest import Crashed, Scene
from fixtures.pace import until

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "transactions.md"
BLOCKS = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def screen_of(command: str) -> str:
    """The page's screen of a command, without the line on which it is typed."""
    (found,) = [block.partition("\n")[2] for block in BLOCKS if block.startswith(f"$ dualwrite {command}")]
    return plain(found)


def plain(text: str) -> str:
    """Without what differs from run to run: times, numbers, processes, the width of columns."""
    text = re.sub(r"writer \S+:\d+ \S+", "writer <process>", text)
    text = re.sub(r"#[0-9a-f]{12}\.\d+", "#<generation>", text)
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ|\d\d:\d\d:\d\d", "<time>", text)
    text = re.sub(r"\b(partition|transaction)s\b", r"\1", text)
    text = re.sub(r"(?<![\w#-])\d+(:\d+)?(?!\w)", "<number>", text)
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines())


@pytest.fixture
def left(scene: Scene) -> Crashed:
    """A transaction that the database has committed, and Kafka has prepared."""
    return scene.crash("after_db_commit")


def shown(left: Crashed, out: str, group: str = "billing") -> str:
    return plain(
        re.sub(r"sqlite:\S+", "…", out.replace(left.topic, "orders").replace(left.name, "shop-1").replace(group, "billing"))
    )


@pytest.mark.parametrize(
    "command",
    [
        "transactions list --state Ongoing",
        "transactions describe shop-1 --url",
        "transactions describe-producers --topic orders",
        "transactions of --topic orders --partition 0 --offset",
    ],
)
def test_the_screen_of_a_transaction(scene: Scene, left: Crashed, command: str) -> None:
    words = command.replace("orders", left.topic).replace("shop-1", left.name).split()
    more = {"list": ["--pattern", f"{left.name}.*"], "describe": [scene.url], "of": ["0"]}.get(words[1], [])
    _, out, err = scene.call(*words, *more)
    assert err == ""
    assert shown(left, out) == screen_of(command)


@pytest.mark.slow
def test_the_screen_of_a_hanging_transaction(scene: Scene) -> None:
    topic = scene.hang()
    _, out, err = scene.call("transactions", "find-hanging", "--topic", topic)
    assert err == ""
    assert plain(out.replace(topic, "orders")) == screen_of("transactions find-hanging")


def test_the_screen_of_stuck(scene: Scene, left: Crashed) -> None:
    group = scene.new_name("group")
    with closing(
        Consumer({"bootstrap.servers": scene.servers, "group.id": group, "isolation.level": "read_committed"})
    ) as consumer:
        consumer.commit(offsets=[TopicPartition(left.topic, 0, 0)], asynchronous=False)
        consumer.subscribe([left.topic])
        until(lambda: consumer.poll(0.1) or consumer.assignment(), "the partitions are assigned")
        _, out, err = scene.call("stuck", "--topic", left.topic, "--longer-than", "0", *scene.at)
    assert err == ""
    assert shown(left, out, group) == screen_of("stuck --url")


# --- repairs, at a terminal -------------------------------------------------------------------------------------------


@pytest.fixture
def yes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal at which the question is answered by yes."""
    terminal = io.StringIO("y\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", terminal)


def assert_screen(out: str, err: str, command: str) -> None:
    """The page shows the output with the question and its answer in it; the answer is what is typed."""
    lines = screen_of(command).splitlines()
    (question,) = [line for line in lines if line.endswith("[y/N]: y")]
    assert f"{err} y" == question
    assert out.splitlines() == [line for line in lines if line != question]


@pytest.mark.usefixtures("yes")
def test_the_screen_of_complete(scene: Scene, left: Crashed) -> None:
    _, out, err = scene.call("transactions", "complete", left.name, *scene.at)
    assert_screen(shown(left, out), shown(left, err), "transactions complete")


@pytest.mark.usefixtures("yes")
def test_the_screen_of_force_terminate(scene: Scene) -> None:
    topic = scene.topic()
    name = scene.open(topic=topic)
    _, out, err = scene.call("transactions", "force-terminate", name)
    out, err = (plain(text.replace(topic, "orders").replace(name, "billing-1")) for text in (out, err))
    assert_screen(out, err, "transactions force-terminate")


@pytest.mark.slow
@pytest.mark.usefixtures("yes")
def test_the_screen_of_abort(scene: Scene) -> None:
    topic = scene.hang()
    _, out, err = scene.call("transactions", "abort", "--topic", topic, "--partition", "0", "--start-offset", "0", "--force")
    assert_screen(plain(out.replace(topic, "orders")), plain(err.replace(topic, "orders")), "transactions abort")


def test_every_screen_of_the_page_is_compared() -> None:
    typed = {re.sub(r"^\$ dualwrite (transactions )?", "", block).split()[0] for block in BLOCKS if block.startswith("$")}
    reading = {"list", "describe", "describe-producers", "find-hanging", "of", "stuck"}
    assert typed == reading | {"abort", "complete", "force-terminate"}
