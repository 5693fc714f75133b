"""Two of three brokers do not respond: the transaction tools answer with what the other one knows, and say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from outage_scene import IDS, PARTITIONS, TOPIC, coordinators, must_have_responded, three_brokers

from dualwrite.admin import TransactionAdmin
from dualwrite.admin.requests import Brokers
from dualwrite.cli import main
from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerUnavailableError, ConfigurationError
from fixtures import json_pages
from fixtures.broker import make_topic
from fixtures.pace import LIMIT, TimeLimitError, limit, until
from fixtures.tiers import thinned

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def three() -> Iterator[DevCluster]:
    """Brokers that keep what they lead while they are paused, and afterwards."""
    with three_brokers(**{"broker.session.timeout.ms": "600000"}) as cluster:
        yield cluster


@contextmanager
def only(cluster: DevCluster, responding: int) -> Iterator[list[int]]:
    """Brokers that do not respond: all but one. Without a quorum of controllers, no broker can take over from them."""
    silent = sorted({1, 2, 3} - {responding})
    for node in silent:
        cluster.pause(node)
    try:
        yield silent
    finally:
        for node in silent:
            cluster.resume(node)


ASKED = {
    "list": ["transactions", "list"],
    "describe": ["transactions", "describe", *IDS, *(f"unused-{number}" for number in range(32))],  # of every coordinator
    "describe-producers": ["transactions", "describe-producers", "--topic", TOPIC],
    "find-hanging": ["transactions", "find-hanging", "--topic", TOPIC, "--max-transaction-timeout", "0"],
    "of": ["transactions", "of", "--topic", TOPIC, "--offset", "0", "--partition"],
    "stuck": ["stuck", "--topic", TOPIC, "--longer-than", "0"],
}


@pytest.mark.parametrize("command", thinned(ASKED, kept=["list", "find-hanging", "stuck"]))
@pytest.mark.soak
def test_the_commands_report_incomplete_answers(three: DevCluster, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """In words, in the JSON of the page, and by the exit code.

    Two brokers are silent, so that nothing can be taken over.
    """
    with TransactionAdmin(three.bootstrap_servers, timeout=LIMIT) as admin:
        listed = {node: name for name, node in coordinators(admin).items()}
        leaders = {end.broker: end.partition for end in admin.ends([TOPIC])}
    answering = next(node for node in listed if node in leaders)
    with only(three, answering) as silent:
        arguments = [*ASKED[command], *([str(leaders[answering])] if command == "of" else [])]
        seconds = (
            5 if command in ("find-hanging", "stuck") else 2
        )  # they ask in many steps; the former looks again after a second
        code = main([*arguments, "--kafka", three.bootstrap_servers, "--timeout", str(limit(seconds)), "--json"])
        found = json.loads(capsys.readouterr().out)
        if found.get("error", {}).get("kind") == "BrokerUnavailableError":
            raise TimeLimitError(f"{command}: the broker that answers has not done so within {limit(seconds):.1f} s")
        assert (code, found.get("complete")) == (1, False), found
        seen = json_pages.check(command, found)
        if command != "describe":  # which has the reason at each id
            assert {"problems[].broker", "problems[].address", "problems[].reason", "problems[].covered"} <= seen
        if command == "list":
            assert main([*arguments, "--kafka", three.bootstrap_servers, "--timeout", str(limit(2))]) == 1
            shown = capsys.readouterr()
            assert listed[answering] in shown.out
            assert [f"The output is incomplete: Broker {node} (127.0.0.1:" in shown.err for node in silent] == [True, True]


def test_a_broker_without_a_replica(three: DevCluster) -> None:
    make_topic(three, "single", replicas=1)
    with TransactionAdmin(three.bootstrap_servers, timeout=LIMIT) as admin:
        (end,) = until(lambda: [one for one in admin.ends(["single"]) if one.problem is None], "the topic has a leader")
        other = next(node for node in (1, 2, 3) if node != end.broker)
        message = rf"(?s)Broker {other} has no replica of topic 'single'.*brokers {end.broker},"
        with pytest.raises(ConfigurationError, match=message):
            admin.describe_producers("single", broker=other)
        with pytest.raises(ConfigurationError, match=message):
            admin.find_hanging(topic="single", broker=other)


def test_a_silent_broker_is_waited_for_once(three: DevCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in each batch of ids."""
    given_up = []
    note = Brokers._give_up

    def counted(brokers: Brokers, node: int, *more: Any) -> None:
        given_up.append(node)
        note(brokers, node, *more)

    monkeypatch.setattr(Brokers, "_give_up", counted)
    names = [*IDS, *(f"unused-{number}" for number in range(1_500))]
    with TransactionAdmin(three.bootstrap_servers, timeout=LIMIT, broker_timeout=limit(1)) as admin:
        responding = min({1, 2, 3} - {coordinators(admin)[IDS[0]]})
        asked = {one.coordinator for one in admin.describe(names)}
        with only(three, responding) as silent:
            found = list(admin.describe(names))
    if responding in given_up:
        raise TimeLimitError(f"broker {responding} has not responded within {limit(1):.1f} s")
    assert [one.transactional_id for one in found] == names
    assert sorted(given_up) == [node for node in silent if node in asked]
    assert given_up


def test_a_silent_broker_delays_nothing_and_is_named(three: DevCluster) -> None:
    with TransactionAdmin(three.bootstrap_servers, timeout=LIMIT, broker_timeout=limit(1)) as admin:
        before = coordinators(admin)
        known = {name for name, node in before.items() if node == before[IDS[0]]}
        with only(three, before[IDS[0]]) as silent:
            answer = admin.list()
            described = {found.transactional_id: found for found in admin.describe(IDS)}
            (producers,) = admin.describe_producers(TOPIC, [0], broker=silent[0])
            stuck = admin.stuck(topic=TOPIC)
        must_have_responded(answer.problems, {before[IDS[0]]})
        assert [problem.broker for problem in answer.problems] == silent
        assert {found.transactional_id for found in answer} == known
        assert {name for name, found in described.items() if found.description is not None} == known
        assert isinstance(producers.problem, BrokerUnavailableError)
        assert set(silent) <= {problem.broker for problem in stuck.problems}
        assert len(stuck.partitions) + len(stuck.unreadable) == PARTITIONS
