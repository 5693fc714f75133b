"""Chunk markers in ZooKeeper: nodes `/kafka_job_chunk/<job>/<partition>/<chunk>`, created in the multi of their chunk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from kazoo.exceptions import KazooException, NoNodeError

from dualwrite.chunks.markers import WHOLE_JOB, ChunkMarker, ChunkMarkers
from dualwrite.stores.zookeeper import ZooKeeperStore
from dualwrite.stores.zookeeper.errors import translated
from dualwrite.stores.zookeeper.paths import node_name
from dualwrite.transaction import Transaction

ROOT: Final = "/kafka_job_chunk"


class ZooKeeperChunkMarkers(ChunkMarkers):
    """See ChunkMarkers. Creating a node that exists already makes the whole multi fail.

    Plain reads are enough: they use the session that claimed the id, so they see at least everything before that claim.

    Args:
        store: The store.
    """

    def __init__(self, store: ZooKeeperStore) -> None:
        self._store = store
        self._acl = store.acl
        self._existing: set[str] = set()

    def read(self, transaction: Transaction, job_id: str, partition: int) -> Mapping[int, ChunkMarker]:
        """See ChunkMarkers."""
        folder = _folder(job_id, partition)
        try:
            names = transaction.db.get_children(folder)
        except NoNodeError:
            return {}
        found = {}
        for number in map(int, names):
            rows, digest = json.loads(transaction.db.get(f"{folder}/{number}")[0])
            found[number] = ChunkMarker(number, rows, digest)
        return found

    def write(self, transaction: Transaction, job_id: str, partition: int, marker: ChunkMarker) -> None:
        """See ChunkMarkers; missing parent nodes are created in the same multi."""
        folder = _folder(job_id, partition)
        for path in (ROOT, folder.rpartition("/")[0], folder):
            if path in self._existing:
                continue
            if transaction.db.exists(path) is None:
                transaction.db.create(path, acl=self._acl)
            else:
                self._existing.add(path)
        data = json.dumps([marker.rows, marker.digest]).encode()
        transaction.db.create(f"{folder}/{marker.number}", data, acl=self._acl)

    def forget(self, job_id: str) -> int:
        """See ChunkMarkers; deletes node by node, the plan last."""
        store, counted = self._store, 0
        store.check()  # starts the client
        client, job = store.client, f"{ROOT}/{node_name(job_id)}"
        try:
            client.sync(job)
            with suppress(NoNodeError):
                for partition in sorted(client.get_children(job), key=int, reverse=True):
                    folder = f"{job}/{partition}"
                    if int(partition) != WHOLE_JOB:
                        counted += len(client.get_children(folder))
                    client.delete(folder, recursive=True)
                client.delete(job)
        except KazooException as error:
            raise translated(error, store.description, "removing the markers of a job") from error
        return counted


def _folder(job_id: str, partition: int) -> str:
    return f"{ROOT}/{node_name(job_id)}/{partition}"
