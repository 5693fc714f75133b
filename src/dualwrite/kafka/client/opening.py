"""A connection that is opened in the background: a caller waits as long as its time limit allows, and may try again later."""

from __future__ import annotations

import _thread
import os

from dualwrite.closing import closed_on_error
from dualwrite.deadline import Deadline
from dualwrite.kafka.client.config import Address, KafkaConfig
from dualwrite.kafka.client.connection import Connection
from dualwrite.kafka.client.messages_generated import MetadataRequest


def about_the_cluster() -> MetadataRequest:
    """A Metadata request for the brokers and the cluster id, without topics."""
    return MetadataRequest(topics=[], allow_auto_topic_creation=False)


class Opening:
    """One attempt to open a connection, in its own thread.

    So nothing that opening waits for (a name server, a host that drops packets, TLS, a login) blocks a caller beyond the
    caller's own time limit. `undisturbed` explains why this uses `_thread`.

    Args:
        address: The broker.
        config: Security and time limits.

    Attributes:
        connection: The open connection, once the attempt has succeeded.
        cluster_id: Kafka's `cluster.id`, as this broker reports it; empty if it has none.
        error: The exception, if the attempt failed; see `Connection`.
        is_reported: Whether a wait has returned because the attempt has finished. Only the first one does: perhaps nobody wants
            the connection any more.
    """

    def __init__(self, address: Address, config: KafkaConfig) -> None:
        self._address = address
        self._pid = os.getpid()
        self._config = config
        self.connection: Connection | None = None
        self.cluster_id = ""
        self.error: BaseException | None = None
        self.is_reported = False
        self._is_done = False
        self._is_unwanted = False
        self._running = _thread.allocate_lock()
        self._lock = _thread.allocate_lock()
        self._running.acquire()
        _thread.start_new_thread(self._run, ())

    @property
    def is_ours(self) -> bool:
        """Whether its thread runs in this process, and not in the parent of a fork."""
        return self._pid == os.getpid()

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; whether the attempt has finished."""
        if not self._is_done and self._running.acquire(timeout=max(seconds, 0.0)):
            self._running.release()  # if KeyboardInterrupt prevents this, `_is_done` is set all the same
        return self._is_done

    def give_up(self) -> None:
        """The connection is no longer wanted: close it, now or as soon as it is open."""
        with self._lock:
            self._is_unwanted = True
            if self.connection is not None:
                self.connection.close()

    def _run(self) -> None:
        try:
            deadline = Deadline.after(self._config.connect_timeout)
            made = Connection(self._address, self._config, deadline)
            with closed_on_error(made):
                self.cluster_id = made.call(about_the_cluster(), deadline).cluster_id or ""
            with self._lock:
                self.connection = made
                if self._is_unwanted:
                    made.close()
        except BaseException as error:  # noqa: BLE001  (raised again in the caller that wants the connection)
            self.error = error
        finally:
            self._is_done = True
            self._running.release()
