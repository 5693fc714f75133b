"""Three brokers with open transactions, for the tests of the transaction tools while one or two of them do not respond."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dualwrite.admin import BrokerProblem, TransactionAdmin
from dualwrite.devcluster import DevCluster
from fixtures.broker import make_topic, started
from fixtures.open_transactions import left_open
from fixtures.pace import TimeLimitError, limit, until

IDS = [f"id-{number}" for number in range(8)]
TOPIC = "topic"
PARTITIONS = 6


@contextmanager
def three_brokers(**config: str) -> Iterator[DevCluster]:
    """A cluster with open transactions that all of its brokers coordinate."""
    with started(nodes=3, config={"offsets.topic.replication.factor": "1", **config}) as cluster:
        make_topic(cluster, TOPIC, PARTITIONS)
        servers = cluster.bootstrap_servers
        producers = [
            left_open(servers, name, TOPIC, partition=number % PARTITIONS, seconds=600) for number, name in enumerate(IDS)
        ]
        yield cluster
        producers.clear()  # until here they keep their transactions open


def coordinators(admin: TransactionAdmin) -> dict[str, int]:
    """The coordinator of each id, once all brokers have answered."""

    def listed() -> dict[str, int] | None:
        answer = admin.list()
        found = {one.transactional_id: one.coordinator for one in answer}
        assert set(found) <= set(IDS)
        return None if answer.problems or list(found) != IDS else found

    return until(listed, "every broker lists its ids", pause=0.1)


def must_have_responded(problems: Iterable[BrokerProblem], nodes: set[int]) -> None:
    """A time limit of the test is over if brokers that are running have not responded within theirs."""
    slow = [problem for problem in problems if problem.broker in nodes]
    if slow:
        raise TimeLimitError(f"not within {limit(1):.1f} s: {slow}")
