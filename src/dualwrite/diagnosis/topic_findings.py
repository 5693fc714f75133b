"""The findings about topics, including the one in which Kafka stores its transactions. No I/O."""

from __future__ import annotations

from typing import Final

from dualwrite.diagnosis.findings import Finding, Severity
from dualwrite.kafka.inspect.topics import TRANSACTION_STATE_TOPIC, TopicFacts

_DEFAULT_MESSAGE_MAX_BYTES: Final = 1_000_000  # librdkafka's message.max.bytes


def judge_topic(topic: TopicFacts, *, message_max_bytes: int = _DEFAULT_MESSAGE_MAX_BYTES) -> list[Finding]:
    """The findings about a topic that a writer sends to, or about the topic in which Kafka stores its transactions.

    Args:
        topic: What is known about it.
        message_max_bytes: The producer's limit for one message.
    """
    if not topic.exists:
        return _missing(topic)
    found = [*_replication(topic), *_sizes(topic, message_max_bytes)]
    if topic.writable is False and topic.name != TRANSACTION_STATE_TOPIC:
        found.append(_topic(topic, Severity.BROKEN, "The principal may not write to it.", "grant it Write on the topic"))
    if topic.without_leader:
        what = f"{topic.without_leader} of {topic.partitions} partitions have no leader: nothing can be written there now."
        found.append(_topic(topic, Severity.BROKEN, what, "see which brokers are down"))
    if topic.unclean_leader_election:
        what = "unclean.leader.election.enable is on: a lagging replica may become leader, and the messages it lacks are lost."
        found.append(_topic(topic, Severity.WEAK, what, "unclean.leader.election.enable=false"))
    hidden = [name for name, value in _durability(topic) if value is None]
    if hidden:
        what = f"{' and '.join(hidden)} can't be read: whether {_what_is_lost(topic)} may be lost is not known."
        found.append(_topic(topic, Severity.UNKNOWN, what, f"both settings, as an administrator; {_GRANT}"))
    return found


_GRANT: Final = "or grant the principal DescribeConfigs on the topic"


def _durability(topic: TopicFacts) -> tuple[tuple[str, object], ...]:
    """The settings that decide whether what is acknowledged is durable; the first has no effect on a single replica."""
    least = topic.min_insync_replicas if topic.replicas > 1 else 1
    return (("min.insync.replicas", least), ("unclean.leader.election.enable", topic.unclean_leader_election))


def _what_is_lost(topic: TopicFacts) -> str:
    return "the outcome of a transaction" if topic.name == TRANSACTION_STATE_TOPIC else "an acknowledged message"


def _missing(topic: TopicFacts) -> list[Finding]:
    if topic.name == TRANSACTION_STATE_TOPIC:  # few principals may describe Kafka's internal topics
        what = "It is not visible: whether the outcome of a transaction may be lost is not known."
        step = "its replicas and min.insync.replicas, as an administrator; or grant the principal Describe and "
        step += "DescribeConfigs on it"
        return [_topic(topic, Severity.UNKNOWN, what, step)]
    if topic.error is not None:
        what = f"Kafka reports {topic.error} for it."
        return [_topic(topic, Severity.BROKEN, what, "check its name, and that the principal has Describe and Write on it")]
    if topic.made_at_first_use:
        what = "It does not exist; the broker creates it at the first message, with the broker's default replication."
        return [_topic(topic, Severity.WEAK, what, "create it first, with the replication and settings that you want")]
    what = "It does not exist" + (", and the broker does not create topics." if topic.made_at_first_use is False else ".")
    return [_topic(topic, Severity.BROKEN, what, "create it")]


def _replication(topic: TopicFacts) -> list[Finding]:
    replicas, in_sync, least = topic.replicas, topic.in_sync, topic.min_insync_replicas
    if topic.name == TRANSACTION_STATE_TOPIC:
        advice = "three replicas, min.insync.replicas=2 (new cluster: transaction.state.log.replication.factor, .min.isr)"
    else:
        advice = "three replicas, min.insync.replicas=2"
    lost = _what_is_lost(topic)
    severity, what, change = Severity.WEAK, None, advice
    if least is not None and least > replicas:
        severity, change = Severity.BROKEN, f"min.insync.replicas={max(replicas - 1, 1)}, or more replicas"
        what = f"min.insync.replicas is {least}, but there are {replicas} replicas: no message can be acknowledged."
    elif least is not None and in_sync < least:
        severity, change = Severity.BROKEN, "see which brokers are down"
        what = f"Only {in_sync} of {replicas} replicas are in sync, but min.insync.replicas is {least}: writes fail now."
    elif replicas == 1:
        what = f"It has one replica: {lost} is lost with that broker's disk, or in a power failure before it is flushed to it, "
        what += "and nothing works while the broker is down."
    elif least == 1:
        what = f"min.insync.replicas is 1: while the other replicas lag, {lost} is on one broker only, perhaps only in memory."
    elif least == replicas:
        severity = Severity.NOTE
        what = f"min.insync.replicas is {least}, the number of replicas: one broker down stops every write."
    return [] if what is None else [_topic(topic, severity, what, change)]


def _sizes(topic: TopicFacts, message_max_bytes: int) -> list[Finding]:
    limit = topic.max_message_bytes
    if limit is None or limit >= message_max_bytes or topic.name == TRANSACTION_STATE_TOPIC:
        return []
    what = f"Its max.message.bytes is {limit}; the producer allows messages of up to {message_max_bytes} bytes."
    return [_topic(topic, Severity.NOTE, what, f"the topic's max.message.bytes, or the producer's message.max.bytes={limit}")]


def _topic(topic: TopicFacts, severity: Severity, what: str, change: str) -> Finding:
    return Finding(severity, f"topic {topic.name}", what, change)
