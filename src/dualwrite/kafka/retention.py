"""How long a topic keeps its records, by its settings. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

RETENTION_SETTINGS: Final = ("cleanup.policy", "retention.ms", "retention.bytes", "min.compaction.lag.ms", "segment.ms")

_UNLIMITED: Final = -1


@dataclass(frozen=True, slots=True)
class Retention:
    """When Kafka may remove records of a topic.

    Args:
        deletes: Whether `cleanup.policy` has `delete`: whole segments are deleted, the oldest first.
        compacts: Whether it has `compact`: the cleaner then removes every record of an aborted transaction.
        retention_ms: `retention.ms`, counted from the timestamp of a segment's newest record; None: unlimited.
        retention_bytes: `retention.bytes` of a partition, beyond which segments are deleted earlier; None: unlimited.
        min_compaction_lag_ms: `min.compaction.lag.ms`, the age before which the cleaner does not touch a record.
        segment_ms: `segment.ms`, after which the segment that is written to is closed; the cleaner reads closed ones only.
    """

    deletes: bool
    compacts: bool
    retention_ms: int | None
    retention_bytes: int | None
    min_compaction_lag_ms: int
    segment_ms: int

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> Self | None:
        """From the settings of the topic; None if they can't be read."""
        if any(name not in settings for name in RETENTION_SETTINGS):
            return None
        policy, *numbers = map(settings.__getitem__, RETENTION_SETTINGS)
        milliseconds, size, lag, segment = map(int, numbers)
        policies = [each.strip() for each in policy.split(",")]
        return cls("delete" in policies, "compact" in policies, _limit(milliseconds), _limit(size), lag, segment)

    @property
    def least_ms(self) -> int | None:
        """The milliseconds for which a record lasts at least, unless `retention.bytes` is exceeded; None: no limit."""
        limits = [self.min_compaction_lag_ms] if self.compacts else []
        if self.deletes and self.retention_ms is not None:
            limits.append(self.retention_ms)
        return min(limits, default=None)


def _limit(number: int) -> int | None:
    return None if number == _UNLIMITED else number
