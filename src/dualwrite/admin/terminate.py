"""Aborts an open transaction of any client (KIP-939, forceTerminateTransaction) by compare-and-set.

Apache's tool sends a plain InitProducerId, which ends whatever is open when it arrives, possibly the transaction of a
successor. Here the request contains the producer id and epoch that the operator has seen.

Brokers without EndTxn v5 have no request that aborts and fences by compare-and-set. InitProducerId compares only the producer
id while a transaction is ongoing, so with a stale epoch it aborts a successor's transaction (measured on 3.9.1). Their EndTxn
compares the epoch, but does not raise it, so a late message of the aborted transaction may still be accepted (rule FA), and
hang. Aborting a transaction that the operator has not seen is worse, so we send EndTxn, and InitProducerId right after it.
"""

from __future__ import annotations

from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.errors import TransactionChangedError
from dualwrite.kafka.client.coordinator import CONCURRENT_TRANSACTIONS, WireTransactionCoordinator
from dualwrite.kafka.client.error_codes import ErrorCode
from dualwrite.kafka.client.retry import rounds
from dualwrite.state import TransactionDescription, TransactionStatus

_DESCRIBE_AGAIN: Final = "nothing was done; check its state with `dualwrite transactions describe`"
_RAISED: Final = (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH)  # another client has raised the epoch
_PAUSE: Final = 0.01


def force_terminate(
    coordinator: WireTransactionCoordinator, transactional_id: str, producer_id: int, epoch: int, deadline: Deadline
) -> None:
    """See `TransactionAdmin.force_terminate`."""
    described = coordinator.describe(transactional_id, timeout=deadline)
    _check_open(transactional_id, described, producer_id, epoch)
    result = coordinator.end_transaction(transactional_id, producer_id=producer_id, epoch=epoch, commit=False, timeout=deadline)
    if not result.proven:
        raise _changed(transactional_id, f"Kafka returned {result.name}")
    if not coordinator.knows_end_by_epoch(timeout=deadline):  # the epoch was not raised: its producer could continue
        _fence(coordinator, transactional_id, producer_id, epoch, deadline)


def _fence(
    coordinator: WireTransactionCoordinator, transactional_id: str, producer_id: int, epoch: int, deadline: Deadline
) -> None:
    """Raise the epoch, if it is still that of the transaction that was ended.

    The id is described before each request, because the request would abort the transaction of a successor: see above.
    """
    name = CONCURRENT_TRANSACTIONS.name
    for _ in rounds(deadline, pause=_PAUSE):
        described = coordinator.describe(transactional_id, timeout=deadline)
        if described is None or (described.producer_id, described.epoch) != (producer_id, epoch):
            return
        if described.status.is_ending:
            continue
        result = coordinator.raise_epoch(transactional_id, producer_id=producer_id, epoch=epoch, timeout=deadline)
        if result.proven or result.code in _RAISED:
            return
        name = result.name
        if result.code != CONCURRENT_TRANSACTIONS:
            break
    raise TransactionChangedError(
        f"The transaction was aborted, but its producer was not fenced: Kafka returned {name}.",
        transactional_id=transactional_id,
        next_step="if its producer continues, terminate its next transaction too",
    )


def _check_open(transactional_id: str, described: TransactionDescription | None, producer_id: int, epoch: int) -> None:
    if described is None:
        raise _changed(transactional_id, "the coordinator does not know the id")
    if described.status is not TransactionStatus.ONGOING:
        raise _changed(transactional_id, f"it is in state {described.status.value}")
    if (described.producer_id, described.epoch) != (producer_id, epoch):
        raise _changed(
            transactional_id, f"the open transaction has producer id {described.producer_id} and epoch {described.epoch}"
        )


def _changed(transactional_id: str, how: str) -> TransactionChangedError:
    return TransactionChangedError(
        f"The transaction to terminate is no longer open: {how}.",
        transactional_id=transactional_id,
        next_step=_DESCRIBE_AGAIN,
    )
