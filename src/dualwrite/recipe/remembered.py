"""What a writer remembers of the transactions that the database has committed on one lane: the row must not be behind it.

A database that has gone back to an earlier state has forgotten them, while their messages stay visible: an asynchronous standby
was promoted, for example. The row that each transaction reads at its beginning has an earlier number then.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime

from dualwrite.state import MAX_PLACES, Delivery, PreparedTxnState, ProducerKind
from dualwrite.stores.base import LostKind, LostTransaction, StateRow


@dataclass(frozen=True, slots=True)
class RecordedTransaction:
    """One transaction that the database has committed, or is about to commit.

    Args:
        number: Its number, as `StateRow.transaction_number`.
        state: Its state; None if it has sent nothing to Kafka.
        generation: The generation that it ran on.
        delivery: Where its messages are.
    """

    number: int
    state: PreparedTxnState | None
    generation: int
    delivery: Delivery | None


class Remembered:
    """The last transactions of one lane, as many as a row can name places of.

    Numbers can be compared with those of rows since our last unconditional claim, which has set the row's number to 0; claims
    on the condition that the id is ours keep it.

    Attributes:
        number: The number of the last one.
    """

    def __init__(self) -> None:
        self.number = 0
        self._since = 0
        self._last: deque[RecordedTransaction] = deque()
        self._places = 0

    def add(self, recorded: RecordedTransaction) -> None:
        """The database has confirmed the commit; that of one that is known already changes nothing."""
        if recorded.number == self.number:
            return
        self.number = recorded.number
        self._last.append(recorded)
        self._places += _places(recorded)
        while self._places > MAX_PLACES and len(self._last) > 1:
            self._places -= _places(self._last.popleft())

    def settle(self, recorded: RecordedTransaction, *, is_committed: bool) -> None:
        """The outcome of the last one, according to the row, after an error."""
        if is_committed:
            self.add(recorded)
        elif self._last and self._last[-1].number == recorded.number:
            self._places -= _places(self._last.pop())
            self.number = self._last[-1].number if self._last else 0  # rather silent than a false alarm

    def start(self, fence: int, number: int = 0) -> None:
        """Forget all: the id was claimed with this fence, or what the database has forgotten was reported."""
        self.__init__()  # type: ignore[misc]  # nothing else has to be set
        self._since, self.number = fence, number

    def missing_in(self, row: StateRow | None, fence: int) -> tuple[RecordedTransaction, ...]:
        """Those that a row has forgotten, as it was read while our claim had this fence; empty if somebody has claimed it."""
        if row is not None and row.fence > fence:
            return ()
        known = row.transaction_number if row is not None and row.fence >= self._since else 0
        return tuple(each for each in self._last if each.number > known)


def entry_of(missing: tuple[RecordedTransaction, ...], producer: ProducerKind, cluster_id: str) -> LostTransaction | None:
    """The entry for a row: all of the transactions together; None if none of them has sent anything to Kafka."""
    sent = [each for each in missing if each.state is not None]
    if not sent or sent[-1].state is None:
        return None
    found = [each.delivery for each in sent if each.delivery is not None]
    delivery = None
    if found:
        places = tuple(place for each in found for place in each.places)
        delivery = Delivery(sum(each.messages for each in found), places, found[-1].prepared_at)
    newest = sent[-1]
    return LostTransaction(
        LostKind.FORGOTTEN, sent[-1].state, newest.generation, datetime.now(UTC), delivery, producer, cluster_id, len(sent)
    )


def _places(recorded: RecordedTransaction) -> int:
    return 1 if recorded.delivery is None else 1 + len(recorded.delivery.places)
