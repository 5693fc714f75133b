"""A connection that is opened in the background: whoever wants it waits for as long as it can spare, and may come back."""

from __future__ import annotations

import _thread
import os

from kafka.protocol.metadata import MetadataRequest

from dualwrite.deadline import Deadline
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.connection import Connection


def about_the_cluster() -> MetadataRequest:
    """Asks for the brokers and the cluster's id, and for no topic."""
    return MetadataRequest(topics=[], allow_auto_topic_creation=False)


class Opening:
    """One attempt to open a connection, in a thread of its own.

    So nothing that opening waits for (a name server, a host that takes no packets, TLS, a login) keeps anybody for longer than
    his own limit. By `_thread`, for the reason that `undisturbed` has.

    Args:
        address: The broker.
        config: Security and time limits.

    Attributes:
        connection: What was opened, once it is done and there is no error.
        cluster_id: Kafka's `cluster.id`, as that broker answers it; empty where it has none.
        error: What opening raised; see `Connection`.
    """

    def __init__(self, address: Address, config: KafkaConfig) -> None:
        self._address = address
        self._pid = os.getpid()
        self._config = config
        self.connection: Connection | None = None
        self.cluster_id = ""
        self.error: BaseException | None = None
        self._is_done = False
        self._is_unwanted = False
        self._running = _thread.allocate_lock()
        self._lock = _thread.allocate_lock()
        self._running.acquire()
        _thread.start_new_thread(self._run, ())

    @property
    def is_ours(self) -> bool:
        """Whether its thread runs in this process, and not in the parent that was forked."""
        return self._pid == os.getpid()

    def wait(self, seconds: float) -> bool:
        """Whether it is done, after `seconds` at most."""
        if not self._is_done and self._running.acquire(timeout=max(seconds, 0.0)):
            self._running.release()  # where KeyboardInterrupt keeps us from that, it is done all the same
        return self._is_done

    def give_up(self) -> None:
        """Nobody wants it any more: it is closed, now or as soon as it is open."""
        with self._lock:
            self._is_unwanted = True
            if self.connection is not None:
                self.connection.close()

    def _run(self) -> None:
        try:
            deadline = Deadline.after(self._config.connect_timeout)
            made = Connection(self._address, self._config, deadline)
            self.cluster_id = made.call(about_the_cluster(), deadline).cluster_id or ""
            with self._lock:
                self.connection = made
                if self._is_unwanted:
                    made.close()
        except BaseException as error:  # noqa: BLE001  (it is raised again by whoever wants the connection)
            self.error = error
        finally:
            self._is_done = True
            self._running.release()
