"""Kafka's side."""

from __future__ import annotations

from dualwrite.errors.base import DualWriteError
from dualwrite.errors.usage import ConfigurationError


class BrokerError(DualWriteError):
    """An error on Kafka's side. Attributes: `code` and `name` of Kafka's error, if it returned one."""

    code: int
    name: str


class BrokerUnavailableError(BrokerError):
    """No broker, or no transaction coordinator, answered within the time limit."""

    servers: str

    retriable = True


class BrokerAuthorizationError(BrokerError):
    """The principal lacks an ACL, or authentication failed; the message names the ACL to grant."""


class UnknownTopicError(BrokerError):
    """The topic does not exist, and the broker does not create topics automatically."""


class UnknownGroupError(BrokerError):
    """There is no consumer group of this name, or the principal may not see it."""


class MessageTooLargeError(BrokerError):
    """A message is larger than the producer or the broker accepts. Attributes: `size` (bytes), and `limit` if known."""

    size: int
    limit: int


class UnknownTransactionStateError(BrokerError):
    """The coordinator returned a transaction state that this release does not know; nothing was done. Attributes: `state`."""

    state: str


class TransactionChangedError(BrokerError):
    """The transaction that was to be ended has ended, or another has begun, or its id was claimed; nothing was done."""


class RepairRefusedError(BrokerError):
    """An operator's repair could contradict what a coordinator or a database has decided, or may decide; nothing was done."""


class DeliveryError(BrokerError):
    """A message of the transaction could not be written to its partition; both sides were rolled back."""

    retriable = True


class MessageRefusedError(DeliveryError):
    """The broker rejected a message and would reject it on every attempt; both sides were rolled back.

    Examples: a message without a key in a compacted topic, a timestamp that the topic does not accept.
    """

    retriable = False


class ClusterMismatchError(BrokerError):
    """The id's row names another Kafka cluster. Nothing was claimed, changed or sent.

    Attributes: `stored_cluster_id` (in the row) and `seen_cluster_id` (the `cluster.id` that Kafka returned).
    """

    stored_cluster_id: str
    seen_cluster_id: str


class ProducerFencedError(BrokerError):
    """The broker fenced this producer: another process took over its id or ended its transaction."""


class TransactionTimeoutError(BrokerError):
    """Too little of `transaction.timeout.ms` is left to commit safely; both sides were rolled back before the commit point.

    Attributes: `elapsed`, `timeout` (seconds).
    """

    elapsed: float
    timeout: float

    retriable = True


class TransactionTimeoutRefusedError(BrokerError, ConfigurationError):
    """The broker rejected `transaction.timeout.ms` because it is above the broker's `transaction.max.timeout.ms`."""


class TwoPhaseCommitRefusedError(BrokerAuthorizationError, ConfigurationError):
    """Two-phase commit was required, and the broker, its settings or its ACLs do not allow it (KIP-939)."""


class PrepareError(BrokerError):
    """The broker does not show the transaction as ongoing and ours, so it can't be prepared; both sides were rolled back."""

    retriable = True
