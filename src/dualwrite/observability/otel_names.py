"""The names in OpenTelemetry's spans: those of its semantic conventions, which may still change, and our own.

The messaging conventions are those of version 1.44, with the status "Development". A test compares them with the package
opentelemetry-semantic-conventions.
"""

from __future__ import annotations

from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"

# --- the conventions' -------------------------------------------------------------------------------------------------------

SYSTEM: Final = "messaging.system"
KAFKA: Final = "kafka"

OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
SEND: Final = "send"
PROCESS: Final = "process"

DESTINATION: Final = "messaging.destination.name"
PARTITION: Final = "messaging.destination.partition.id"
MESSAGE_COUNT: Final = "messaging.batch.message_count"
CONSUMER_GROUP: Final = "messaging.consumer.group.name"
OFFSET: Final = "messaging.kafka.offset"
KEY: Final = "messaging.kafka.message.key"
TOMBSTONE: Final = "messaging.kafka.message.tombstone"

ERROR_TYPE: Final = "error.type"

# --- ours: the conventions have no word on transactions -----------------------------------------------------------------------

TRANSACTIONAL_ID: Final = "dualwrite.transactional_id"
"""The writer's logical id. In a span of recovery it is the id of the lane."""

LANE: Final = "dualwrite.lane"
"""The id of the lane that had the transaction."""

GROUP_SIZE: Final = "dualwrite.group.size"
"""How many units have shared the transaction."""

WAITED: Final = "dualwrite.unit.waited"
"""Seconds from the call of the pool to the unit's beginning."""

OUTCOME: Final = "dualwrite.outcome"
"""What has become of a unit: one of these."""

COMMITTED: Final = "committed"
JOURNALED: Final = "journaled"
ROLLED_BACK: Final = "rolled back"
UNDONE: Final = "undone"
IN_DOUBT: Final = "in doubt"
LOST: Final = "lost"

WAS_IN_DOUBT: Final = "dualwrite.was_in_doubt"
"""True if the outcome was unknown for a moment, and the writer has found out that the transaction committed."""

JOB: Final = "dualwrite.job"
"""The batch of a job, such as "batch 0 of job 'load'"."""

JOB_PARTITION: Final = "dualwrite.job.partition"
JOB_ATTEMPT: Final = "dualwrite.job.attempt"
"""A task's partition and the number of its attempt, both from 0."""

RECOVERY_OUTCOME: Final = "dualwrite.recovery.outcome"
"""The value of a `dualwrite.Outcome`."""

GENERATION: Final = "dualwrite.generation"
"""The generation of the lane's producer."""

# --- the names of spans; those of `send` and `process` are followed by the topic ----------------------------------------------

DELIVER: Final = "deliver"
DATABASE_COMMIT: Final = "commit database"
KAFKA_COMMIT: Final = "commit kafka"
RECOVER: Final = "recover"
PUBLISH_AGAIN: Final = "publish again"
JOB_WRITE: Final = "write job"
JOB_TASK: Final = "task"
JOB_COMMIT: Final = "commit job"
JOB_ABORT: Final = "abort job"
