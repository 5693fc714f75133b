"""End an open transaction by aborting it, whichever client began it (KIP-939, forceTerminateTransaction), as compare-and-set.

Apache's tool sends a plain InitProducerId, which ends whatever is open by then: perhaps the transaction of a successor. Here
the request carries the producer id and epoch that the operator has seen.

On brokers without EndTxn v5 nothing aborts and fences as one compare-and-set. InitProducerId compares the producer id only
while a transaction is ongoing, so a stale epoch aborts a successor's (measured on 3.9.1). EndTxn v4 compares the epoch, but
leaves it as it is, so that a late message of the aborted transaction may still be accepted (rule FA), and hang. Aborting what
nobody has seen is worse, so it is EndTxn v4, and InitProducerId right after it.
"""

from __future__ import annotations

from typing import Final

from dualwrite.deadline import Deadline
from dualwrite.errors import TransactionChangedError
from dualwrite.kafka.client.coordinator import CONCURRENT_TRANSACTIONS, WireTransactionCoordinator
from dualwrite.kafka.client.error_codes import ErrorCode
from dualwrite.kafka.client.retry import rounds
from dualwrite.state import TransactionDescription, TransactionStatus

_LOOK_AGAIN: Final = "nothing was done; look again with `dualwrite transactions describe`"
_RAISED: Final = (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH)  # another client has raised the epoch
_PAUSE: Final = 0.01


def force_terminate(
    coordinator: WireTransactionCoordinator, transactional_id: str, producer_id: int, epoch: int, deadline: Deadline
) -> None:
    """See `TransactionAdmin.force_terminate`."""
    described = coordinator.describe(transactional_id, timeout=deadline)
    _check_open(transactional_id, described, producer_id, epoch)
    answer = coordinator.end_transaction(transactional_id, producer_id=producer_id, epoch=epoch, commit=False, timeout=deadline)
    if not answer.proven:
        raise _changed(transactional_id, f"Kafka answered {answer.name}")
    if not coordinator.knows_end_by_epoch(timeout=deadline):  # EndTxn v4 does not raise the epoch: its producer could continue
        _fence(coordinator, transactional_id, producer_id, epoch, deadline)


def _fence(
    coordinator: WireTransactionCoordinator, transactional_id: str, producer_id: int, epoch: int, deadline: Deadline
) -> None:
    """Raise the epoch, if it still is the one of the transaction that was ended.

    The id is described before each request, which would abort the transaction of a successor: see above.
    """
    name = CONCURRENT_TRANSACTIONS.name
    for _ in rounds(deadline, pause=_PAUSE):
        described = coordinator.describe(transactional_id, timeout=deadline)
        if described is None or (described.producer_id, described.epoch) != (producer_id, epoch):
            return
        if described.status.is_ending:
            continue
        answer = coordinator.raise_epoch(transactional_id, producer_id=producer_id, epoch=epoch, timeout=deadline)
        if answer.proven or answer.code in _RAISED:
            return
        name = answer.name
        if answer.code != CONCURRENT_TRANSACTIONS:
            break
    raise TransactionChangedError(
        f"The transaction was aborted, but its producer was not fenced: Kafka answered {name}.",
        transactional_id=transactional_id,
        next_step="if its producer continues, terminate its next transaction too",
    )


def _check_open(transactional_id: str, described: TransactionDescription | None, producer_id: int, epoch: int) -> None:
    if described is None:
        raise _changed(transactional_id, "its coordinator does not know the id")
    if described.status is not TransactionStatus.ONGOING:
        raise _changed(transactional_id, f"it is in state {described.status.value}")
    if (described.producer_id, described.epoch) != (producer_id, epoch):
        raise _changed(transactional_id, f"the open one has producer id {described.producer_id} and epoch {described.epoch}")


def _changed(transactional_id: str, how: str) -> TransactionChangedError:
    return TransactionChangedError(
        f"The transaction to be terminated is not open any more: {how}.",
        transactional_id=transactional_id,
        next_step=_LOOK_AGAIN,
    )
