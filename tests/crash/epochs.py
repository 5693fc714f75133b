"""Setting the epochs of transactional ids by one changed record each, instead of one EndTxn per epoch.

The coordinator stores an id's newest state as one record in `__transaction_state`. After a copy of that record with another
epoch is written and the coordinator has read its log again at a restart, the id is as after 32,765 transactions.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final
from uuid import uuid4

from confluent_kafka import Consumer, Message, TopicPartition

from dualwrite.devcluster import DevCluster
from dualwrite.kafka.inspect import TRANSACTION_STATE_TOPIC
from fixtures.pace import LIMIT, TimeLimitError
from fixtures.producing import producing

_KEY: Final = struct.Struct(">hh")  # version, length of the id that follows
_STATE: Final = struct.Struct(">hqh")  # version, producer id, epoch; the rest is not changed
_LISTED: Final = 0  # versions of the key that name an id
_MAY_WRITE: Final = {"client.id": "__admin_client", "acks": "all"}
"""The only client id that may write to Kafka's internal topics."""


def set_epochs(cluster: DevCluster, epochs: Mapping[str, int]) -> None:
    """Give transactional ids without an open transaction another epoch, and restart the cluster's single broker."""
    newest = _newest_states(cluster)
    with producing(cluster.bootstrap_servers, _MAY_WRITE) as produce:
        for kafka_id, epoch in epochs.items():
            found = newest[kafka_id]
            value = found.value()
            assert value is not None, f"{kafka_id} has expired"
            version, producer_id, _ = _STATE.unpack_from(value)
            produce(
                TRANSACTION_STATE_TOPIC,
                key=found.key(),
                value=_STATE.pack(version, producer_id, epoch) + value[_STATE.size :],
                partition=found.partition(),
            )
    cluster.kill(1)  # an orderly stop would write what it has in memory
    cluster.start(1, timeout=LIMIT)


def _newest_states(cluster: DevCluster) -> dict[str, Message]:
    """The newest record of each transactional id."""
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": f"epochs-{uuid4().hex}",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        waiting = set(consumer.list_topics(TRANSACTION_STATE_TOPIC, timeout=LIMIT).topics[TRANSACTION_STATE_TOPIC].partitions)
        consumer.assign([TopicPartition(TRANSACTION_STATE_TOPIC, partition, 0) for partition in waiting])
        newest = {}
        while waiting:
            message = consumer.poll(LIMIT)
            if message is None:
                raise TimeLimitError(f"no answer while reading {TRANSACTION_STATE_TOPIC}")
            if message.error() is not None:  # the end of a partition
                waiting.discard(message.partition())
                continue
            key = message.key()
            assert key is not None
            version, length = _KEY.unpack_from(key)
            assert version == _LISTED, key
            newest[key[_KEY.size :][:length].decode()] = message
        return newest
    finally:
        consumer.close()
