"""The transaction tools on a cluster with ACLs: what a missing one hides, and which one the error names."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from dualwrite.admin import Ending, Reason, RecordTransaction, TransactionAdmin
from dualwrite.devcluster import DevCluster
from dualwrite.errors import BrokerAuthorizationError
from dualwrite.kafka.inspect import TRANSACTION_STATE_TOPIC
from fixtures import acls, json_pages
from fixtures.acls import Operation, Resource
from fixtures.broker import TRUSTING
from fixtures.command import output_of
from fixtures.logins import login_as
from fixtures.pace import LIMIT, until
from fixtures.transactions import HOUR_MS, Transactions

pytestmark = pytest.mark.slow

Grant = Callable[..., None]
Shown = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def guarded_config() -> dict[str, str]:
    """Transactions can be made to hang."""
    return TRUSTING


@pytest.fixture
def trusting(guarded: DevCluster) -> DevCluster:
    return guarded


@pytest.fixture
def shown(guarded: DevCluster, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command as the reader."""
    options = [word for name, value in login_as(guarded, "reader").items() for word in ("--kafka-config", f"{name}={value}")]
    return lambda *words: output_of(capsys, *words, *options)


def with_json(shown: Shown, command: str, *words: str) -> tuple[int, Any, set[str]]:
    """A command of `transactions` with --json: its code, its document, and the documented fields that had a value."""
    code, out, _ = shown("transactions", command, *words, "--json")
    found = json.loads(out)
    return code, found, json_pages.check(command, found)


@pytest.fixture
def reader(guarded: DevCluster) -> Iterator[TransactionAdmin]:
    with TransactionAdmin(login_as(guarded, "reader"), timeout=LIMIT) as admin:
        yield admin


@pytest.fixture
def grant(guarded: DevCluster) -> Iterator[Grant]:
    """Allows the reader an operation on a resource; taken back after the test."""
    yield partial(acls.grant, guarded, "reader")
    mine = AclBindingFilter(
        ResourceType.ANY, None, ResourcePatternType.ANY, "User:reader", None, AclOperation.ANY, AclPermissionType.ANY
    )
    admin = AdminClient({"bootstrap.servers": guarded.bootstrap_servers})
    for future in admin.delete_acls([mine]).values():
        future.result(LIMIT)


def opened(scene: Transactions, topic: str) -> str:
    return scene.open(topic=topic, timestamp=int(time.time() * 1000) - HOUR_MS)


def refused(problem: Any, *words: str) -> bool:
    return isinstance(problem, BrokerAuthorizationError) and all(word in str(problem) for word in words)


def test_a_transactional_id(scene: Transactions, reader: TransactionAdmin, grant: Grant, topic: str) -> None:
    name = opened(scene, topic)
    assert name not in {found.transactional_id for found in reader.list()}
    (found,) = reader.describe([name])
    assert refused(
        found.problem, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", f"grant the principal Describe on the transactional id {name!r}"
    )
    grant(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, name)
    until(lambda: next(reader.describe([name])).description, "the ACL is known to the broker")
    listed = reader.list()
    assert name in {found.transactional_id for found in listed}
    assert not listed.complete, "others may be hidden"
    needed = ["Describe on the topic '__transaction_state'", "Describe on the transactional id '*'"]
    assert all(refused(*pair) for pair in zip(listed.hidden, needed, strict=True))
    grant(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, "*")
    grant(Operation.DESCRIBE, Resource.TOPIC, TRANSACTION_STATE_TOPIC)
    until(lambda: reader.list().complete, "the ACLs are known to the broker")


def test_a_topic(reader: TransactionAdmin, grant: Grant, topic: str) -> None:
    def problem() -> Any:
        (found,) = reader.describe_producers(topic)
        return found.problem

    assert refused(problem(), "Metadata", "TOPIC_AUTHORIZATION_FAILED", f"grant the principal Describe on the topic {topic!r}")
    grant(Operation.DESCRIBE, Resource.TOPIC, topic)
    until(lambda: refused(problem(), "DescribeProducers", f"grant the principal Read on the topic {topic!r}"), problem)
    assert not reader.find_hanging(topic=topic).complete
    grant(Operation.READ, Resource.TOPIC, topic)
    until(lambda: problem() is None, problem)


def test_an_id_that_may_be_hidden_by_a_missing_acl_is_not_reported_hanging(
    scene: Transactions, reader: TransactionAdmin, grant: Grant, topic: str, shown: Shown
) -> None:
    healthy, hanging = topic, scene.hang()
    opened(scene, healthy)
    for one in (healthy, hanging):
        grant(Operation.READ, Resource.TOPIC, one)
    for one in (healthy, hanging):
        search = until(lambda one=one: found if (found := reader.find_hanging(topic=one)).searched else None, "the ACL")
        assert search.hanging == ()
        assert [found.reason for found in search.undecided] == [Reason.NOT_LISTED]
        needed = [f"Describe on the topic '{TRANSACTION_STATE_TOPIC}'", "Describe on the transactional id '*'"]
        assert all(refused(*pair) for pair in zip(search.hidden, needed, strict=True))
    code, _, seen = with_json(shown, "find-hanging", "--topic", hanging)
    assert code == 1
    assert {"undecided[].reason", "undecided[].why", "hidden[].message", "hidden[].code"} <= seen
    grant(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, "*")
    until(lambda: reader.find_hanging(topic=healthy).complete, "the ACL is known to the broker")
    assert [found.reason for found in reader.find_hanging(topic=hanging).undecided] == [Reason.NOT_LISTED]
    grant(Operation.DESCRIBE, Resource.TOPIC, TRANSACTION_STATE_TOPIC)  # shows that every id has its coordinator
    until(lambda: reader.find_hanging(topic=hanging).complete, "the ACL is known to the broker")
    assert reader.find_hanging(topic=healthy).hanging == ()
    search = reader.find_hanging(topic=hanging)
    assert [found.reason for found in search.hanging] == [Reason.UNKNOWN_PRODUCER]


def test_repairs(scene: Transactions, reader: TransactionAdmin, grant: Grant, topic: str) -> None:
    """What is missing is named, and nothing is changed."""
    name, hanging = opened(scene, topic), scene.hang()
    grant(Operation.READ, Resource.TOPIC, "*")
    grant(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, "*")
    until(lambda: reader.find_hanging(topic=hanging, max_transaction_timeout=0).hanging, "the ACLs are known to the broker")
    examined = reader.examine(hanging, 0)
    assert examined is not None
    with pytest.raises(
        BrokerAuthorizationError, match=r"(?s)WriteTxnMarkers.*grant the principal ClusterAction on the cluster"
    ):
        reader.abort(examined, force=True)
    assert reader.examine(hanging, 0) == examined
    seen = next(reader.describe([name])).description
    assert seen is not None
    with pytest.raises(BrokerAuthorizationError, match=r"(?s)EndTxn.*grant the principal Write"):
        reader.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)
    assert next(reader.describe([name])).description == seen
    grant(Operation.ALTER, Resource.CLUSTER, "kafka-cluster")
    grant(Operation.WRITE, Resource.TRANSACTIONAL_ID, name)

    def allowed() -> bool:
        try:
            reader.abort(examined, force=True)
        except BrokerAuthorizationError:
            return False
        return True

    until(allowed, "the ACL is known to the broker")
    reader.force_terminate(name, producer_id=seen.producer_id, epoch=seen.epoch)


def test_stuck_without_acls(scene: Transactions, reader: TransactionAdmin, grant: Grant, topic: str) -> None:
    opened(scene, topic)
    found = reader.stuck(topic=topic)
    assert refused(found.unreadable[0].problem, f"grant the principal Describe on the topic {topic!r}")
    grant(Operation.DESCRIBE, Resource.TOPIC, topic)

    def problem() -> Any:
        found = reader.stuck(topic=topic)
        assert (found.partitions, found.complete, found.searched) == ((), False, 0)
        (one,) = found.unreadable
        return one.problem

    until(lambda: refused(problem(), "DescribeProducers", f"grant the principal Read on the topic {topic!r}"), problem)
    grant(Operation.READ, Resource.TOPIC, topic)
    (one,) = until(lambda: reader.stuck(topic=topic).partitions, "the ACL is known to the broker")
    assert (one.holder.transactional_id, one.holder.hanging) == (None, Reason.NOT_LISTED)


def test_the_id_of_a_record_that_an_acl_hides(
    scene: Transactions, reader: TransactionAdmin, grant: Grant, topic: str, shown: Shown
) -> None:
    """It is not said that no coordinator lists one."""
    name = opened(scene, topic)
    scene.end()
    grant(Operation.READ, Resource.TOPIC, topic)

    def found() -> RecordTransaction | None:
        try:
            return reader.transaction_of(topic, 0, 0)
        except BrokerAuthorizationError:
            return None

    record = until(found, "the ACL is known to the broker")
    assert (record.ending, record.transactional_id, record.complete) == (Ending.COMMITTED, None, False)
    code, out, err = shown("transactions", "of", "--topic", topic, "--partition", "0", "--offset", "0")
    assert code == 1
    assert "not known: grant the principal Describe on the topic '__transaction_state'" in out
    assert "grant the principal Describe on the transactional id '*'" in err
    grant(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, name)
    until(lambda: reader.transaction_of(topic, 0, 0).complete, "the ACL is known to the broker")
    assert reader.transaction_of(topic, 0, 0).transactional_id == name


def test_the_positions_of_a_group_that_may_not_be_described(
    scene: Transactions, reader: TransactionAdmin, grant: Grant, topic: str
) -> None:
    """It is listed, by an ACL on the cluster; whether it waits is not known."""
    group = scene.new_name("group")
    opened(scene, topic)
    with closing(Consumer({"bootstrap.servers": scene.servers, "group.id": group})) as consumer:
        consumer.commit(offsets=[TopicPartition(topic, 0, 0)], asynchronous=False)
        consumer.subscribe([topic])
        until(lambda: consumer.poll(0.1) or consumer.assignment(), "the partitions are assigned")
        grant(Operation.DESCRIBE, Resource.CLUSTER, "kafka-cluster")
        grant(Operation.READ, Resource.TOPIC, "*")
        grant(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, "*")
        until(lambda: reader.stuck(topic=topic).partitions, "the ACLs are known to the broker")
        found = reader.stuck(topic=topic)
        assert not found.complete
        assert refused(found.hidden[0], f"grant the principal Describe on the group {group!r}")
        assert not reader.stuck(group=group).complete
        grant(Operation.DESCRIBE, Resource.GROUP, group)
        until(lambda: reader.stuck(topic=topic).complete, "the ACL is known to the broker")
        assert [one.group_id for one in reader.stuck(group=group).partitions[0].groups] == [group]


def test_topics_and_groups_that_an_acl_hides(scene: Transactions, reader: TransactionAdmin, grant: Grant, shown: Shown) -> None:
    """A view of the whole cluster is not reported as complete if a part may be missing."""
    seen, unseen, group = scene.topic(), scene.topic(), scene.new_name("group")
    opened(scene, unseen)
    topics, groups = (f"Kafka leaves out the {what} that the principal may not describe" for what in ("topics", "groups"))
    grant(Operation.READ, Resource.TOPIC, seen)
    grant(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, "*")
    grant(Operation.DESCRIBE, Resource.GROUP, group)
    until(lambda: reader.find_hanging(topic=seen).complete, "the ACL is known to the broker")
    for search in (reader.find_hanging(), reader.stuck()):
        assert not search.complete
        assert topics in str(search.hidden)
    assert groups in str(reader.stuck(topic=seen).hidden)
    assert not reader.stuck(topic=seen).complete
    code, out, err = shown("stuck")
    assert (code, "No consumer waits" in out, topics in err, groups in err) == (1, True, True, True)
    grant(Operation.DESCRIBE, Resource.CLUSTER, "kafka-cluster")  # all groups are listed
    until(lambda: reader.stuck(topic=seen).complete, "the ACL is known to the broker")
    grant(Operation.READ, Resource.TOPIC, "*")
    until(lambda: reader.find_hanging(max_transaction_timeout=7200).complete, "the ACL is known to the broker")
    assert unseen in {one.end.topic for one in reader.stuck().partitions}


def test_the_topics_of_a_transaction_that_an_acl_hides(
    scene: Transactions, reader: TransactionAdmin, grant: Grant, topic: str, shown: Shown
) -> None:
    name = opened(scene, topic)
    grant(Operation.DESCRIBE, Resource.TRANSACTIONAL_ID, name)
    until(lambda: next(reader.describe([name])).description, "the ACL is known to the broker")
    assert next(reader.describe([name])).hides_topics
    code, _, err = shown("transactions", "describe", name)
    assert (code, f"{name}: Kafka leaves out the topics of its transaction" in err) == (1, True)
    code, found, _ = with_json(shown, "describe", name)
    assert (code, found["complete"]) == (1, False)
    assert [(one["kind"], name in one["message"]) for one in found["hidden"]] == [("BrokerAuthorizationError", True)]
    grant(Operation.DESCRIBE, Resource.TOPIC, topic)
    until(lambda: not next(reader.describe([name])).hides_topics, "the ACL is known to the broker")
    assert shown("transactions", "describe", name)[0] == 0
