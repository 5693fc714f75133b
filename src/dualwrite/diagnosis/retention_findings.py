"""The findings about how long the records of a topic last: for so long, lost messages can be published again. No I/O."""

from __future__ import annotations

from typing import Final

from dualwrite.diagnosis.findings import Finding, Guarantee, Promise, Severity, duration
from dualwrite.kafka.inspect import TRANSACTION_STATE_TOPIC, TopicFacts
from dualwrite.kafka.retention import Retention

_DAY_MS: Final = 86_400_000
_ENOUGH_MS: Final = _DAY_MS  # a night, in which nobody starts the recovery that failed
_WEEK_MS: Final = 7 * _DAY_MS


def records_last(retention: Retention) -> str:
    """How long records last, for a table: `7 days`, `no limit`, `1 h, until compacted`."""
    deleted = retention.deletes and (retention.retention_ms is not None or retention.retention_bytes is not None)
    limits = []
    if deleted and retention.retention_ms is not None:
        limits.append(duration(retention.retention_ms))
    if deleted and retention.retention_bytes is not None:
        limits.append(f"{retention.retention_bytes} bytes")
    if retention.compacts:
        limits.append("until compacted")
    return ", ".join(limits) or "no limit"


def judge_retention(topic: TopicFacts, promised: Promise | None) -> list[Finding]:
    """The findings about a topic that a writer sends to, where Kafka may abort a transaction that the database committed.

    With two-phase commit it does not, and nothing needs to be published again.
    """
    if (
        promised is None
        or promised.guarantee is Guarantee.TWO_PHASE
        or not topic.exists
        or topic.name == TRANSACTION_STATE_TOPIC
    ):
        return []
    if topic.retention is None:
        what = f"Its retention settings can't be read: how long {_LOST} can be published again is not known."
        step = "retention.ms and cleanup.policy, as an administrator; or grant the principal DescribeConfigs on the topic"
        return [_finding(topic, Severity.UNKNOWN, what, step)]
    return [*_deleted(topic, topic.retention), *_compacted(topic, topic.retention)]


_LOST: Final = "the messages of a transaction that Kafka has aborted and the database has committed"


def _deleted(topic: TopicFacts, retention: Retention) -> list[Finding]:
    found = []
    lasts = retention.retention_ms
    if retention.deletes and lasts is not None and lasts < _ENOUGH_MS:
        what = f"Its records last {duration(lasts)}: later, {_LOST} can't be published again."
        found.append(_finding(topic, Severity.WEAK, what, f"retention.ms={_WEEK_MS} (7 days), or at least {_ENOUGH_MS} (24 h)"))
    if retention.deletes and retention.retention_bytes is not None:
        what = f"retention.bytes is {retention.retention_bytes} for each partition: records that exceed it are deleted earlier "
        what += f"than retention.ms says, and with them {_LOST}."
        found.append(_finding(topic, Severity.NOTE, what, "remove retention.bytes, or make it larger than what a day brings"))
    return found


def _compacted(topic: TopicFacts, retention: Retention) -> list[Finding]:
    lag = retention.min_compaction_lag_ms
    if not retention.compacts or lag >= _ENOUGH_MS:
        return []
    aged = f", and {duration(lag)} after they were written (min.compaction.lag.ms)" if lag else ""
    what = f"It is compacted: the cleaner removes {_LOST}, as soon as their segment is closed{aged}. That is after "
    what += f"{duration(retention.segment_ms)} (segment.ms), or once it is full."
    return [_finding(topic, Severity.WEAK, what, f"min.compaction.lag.ms={_WEEK_MS} (7 days), or at least {_ENOUGH_MS} (24 h)")]


def _finding(topic: TopicFacts, severity: Severity, what: str, change: str) -> Finding:
    return Finding(severity, f"topic {topic.name}", what, change)
