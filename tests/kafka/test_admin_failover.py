"""One of three brokers is killed: the transaction tools ask the brokers that take over from it, and report what nobody has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from outage_scene import IDS, PARTITIONS, TOPIC, coordinators, must_have_responded, three_brokers

from dualwrite.admin import StuckSearch, TransactionAdmin
from dualwrite.admin.groups import GROUP_OFFSETS_TOPIC, partition_of_group
from dualwrite.devcluster import DevCluster
from fixtures.pace import LIMIT, limit, until

pytestmark = pytest.mark.soak  # in CI: brokers that do not respond, in test_admin_outage


@pytest.fixture(scope="module")
def three() -> Iterator[DevCluster]:
    with three_brokers() as cluster:
        yield cluster


def test_a_killed_broker(three: DevCluster) -> None:
    with TransactionAdmin(three.bootstrap_servers, timeout=LIMIT, broker_timeout=limit(1)) as admin:
        before = coordinators(admin)
        down = before[IDS[0]]
        three.kill(down)
        try:
            first = admin.list()
            assert down in {problem.broker for problem in first.problems}
            must_have_responded(first.problems, {1, 2, 3} - {down})
            known = {name for name, node in before.items() if node != down}
            assert known <= {found.transactional_id for found in first}, first.problems

            def taken_over() -> bool:
                answer = admin.list()
                assert {found.transactional_id for found in answer} <= set(IDS)
                return answer.complete and [found.transactional_id for found in answer] == IDS

            until(taken_over, "other brokers coordinate all ids", pause=0.2)
            assert [(problem.broker, problem.covered) for problem in admin.list().problems] == [(down, True)]
            assert all(found.description is not None for found in admin.describe(IDS))
            search = admin.find_hanging(topic=TOPIC, max_transaction_timeout=0)
            assert (search.hanging, search.open) == ((), len(IDS))
            assert search.undecided == ()

            def examined() -> StuckSearch | None:
                found = admin.stuck(topic=TOPIC)
                return None if found.unreadable else found

            stuck = until(examined, "the new leaders know their offsets")
            assert (len(stuck.partitions), stuck.hidden) == (PARTITIONS, ())
            assert all(problem.covered or GROUP_OFFSETS_TOPIC in problem.reason for problem in stuck.problems)
        finally:
            three.start(down)


def test_a_group_whose_coordinator_is_down(three: DevCluster) -> None:
    """It is not said that there is no such group."""
    group = "group"
    with closing(Consumer({"bootstrap.servers": three.bootstrap_servers, "group.id": group})) as consumer:

        def commits() -> bool:
            try:
                consumer.commit(offsets=[TopicPartition(TOPIC, 0, 0)], asynchronous=False)
            except KafkaException:  # its coordinator was started just now
                return False
            return True

        until(commits, "the group has a position")
    client = AdminClient({"bootstrap.servers": three.bootstrap_servers})
    homes = client.list_topics(GROUP_OFFSETS_TOPIC, timeout=LIMIT).topics[GROUP_OFFSETS_TOPIC].partitions
    down = homes[partition_of_group(group, len(homes))].leader
    three.kill(down)
    try:
        with TransactionAdmin(three.bootstrap_servers, timeout=LIMIT, broker_timeout=limit(1)) as admin:

            def problems() -> str:
                found = admin.stuck(group=group)
                assert not found.complete
                return " ".join(map(str, found.problems))

            until(lambda: "without a leader: their consumer groups are missing" in problems(), problems, pause=0.2)
    finally:
        three.start(down)
