"""Closes members of consumer groups just when they are assigned partitions; for a test that looks whether the process goes on.

python -m processor.closing_worker BOOTSTRAP TOPIC PROTOCOL TIMES SECONDS
"""

from __future__ import annotations

import faulthandler
import sys
from typing import Any
from uuid import uuid4

from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient

from dualwrite.kafka.librdkafka.consumer import GroupConsumer
from dualwrite.kafka.librdkafka.group_offsets import Partition
from fixtures.pace import LIMIT, until

PROTOCOLS: dict[str, dict[str, Any]] = {
    "range": {"partition.assignment.strategy": "range"},
    "cooperative-sticky": {"partition.assignment.strategy": "cooperative-sticky"},
    "consumer": {"group.protocol": "consumer"},
}


def wait_until_assigned(servers: str, group: str) -> None:
    """Wait until the coordinator has assigned the partitions; the member, which isn't polled, does not own them yet."""
    admin = AdminClient({"bootstrap.servers": servers})

    def is_assigned() -> bool:
        found = admin.describe_consumer_groups([group])[group].result(LIMIT)
        return found.state == ConsumerGroupState.STABLE and bool(found.members[0].assignment.topic_partitions)

    until(is_assigned, "the coordinator has assigned the partitions", pause=0.02)


def main() -> None:
    servers, topic, protocol, times, seconds = sys.argv[1:]

    def begin(partitions: list[Partition]) -> dict[Partition, int]:
        return dict.fromkeys(partitions, 0)

    for _ in range(int(times)):
        group = f"group-{uuid4().hex[:12]}"
        consumer = GroupConsumer({"bootstrap.servers": servers, "group.id": group, **PROTOCOLS[protocol]}, [topic], begin)
        wait_until_assigned(servers, group)
        faulthandler.dump_traceback_later(float(seconds), exit=True)  # needs no lock of the interpreter
        consumer.close()
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
