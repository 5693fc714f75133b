"""A transaction that its user begins and ends: what was sent is kept, and committed with it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from dualwrite import process
from dualwrite.errors import WriterClosedError
from dualwrite.kafka.base import GivenMessage, GroupMetadata, Message, progress_of
from dualwrite.kafka.messages import checked
from dualwrite.state import ConsumedOffset, PreparedTxnState
from dualwrite.transaction import OpenTransaction

Savepoints = frozenset[Hashable]


class JoinedOpenTransaction(OpenTransaction):
    """What a pool has of a transaction that the user has begun, or begins next.

    No writer is needed, and nothing is sent, before the user commits: a transaction that ends in any other way leaves nothing
    behind.

    Args:
        prefix: Of the pool.
        commit: Commits the user's transaction on a connection, with what this has kept.
        savepoints: The savepoints that the user's transaction is in now.
        handle: What the user writes with.
    """

    def __init__(
        self,
        prefix: str,
        commit: Callable[[Any, JoinedOpenTransaction], None],
        savepoints: Callable[[], Savepoints],
        handle: Any,
    ) -> None:
        self.transactional_id = prefix
        self.number = 0
        self.state: PreparedTxnState | None = None
        self.messages: list[tuple[Message, Savepoints]] = []
        self.offsets: list[tuple[list[ConsumedOffset], GroupMetadata, Savepoints]] = []
        self._commit = commit
        self._savepoints = savepoints
        self._handle = handle
        self._pid = process.pid
        self._open = True

    # --- for the user's code ----------------------------------------------------------------------------------------------

    @property
    def db(self) -> Any:
        self._check()
        return self._handle()

    @property
    def session(self) -> Any:
        self._check()
        return self._handle()

    def send_messages(self, messages: Iterable[GivenMessage]) -> None:
        """The messages are checked now and sent when the user commits: if a topic is missing, the commit fails."""
        self._check()
        inside = self._savepoints()
        self.messages += [(checked(message), inside) for message in messages]

    def send_offsets(self, consumer: Any, offsets: Mapping[tuple[str, int], int] | None = None) -> None:
        self._check()
        positions, group = progress_of(consumer, offsets)
        self.offsets.append((list(positions), group, self._savepoints()))

    def _check(self) -> None:
        if not self._open:
            raise WriterClosedError(
                "The transaction that was joined has ended.",
                transactional_id=self.transactional_id,
                next_step="join the next one: tx = pool.join(session)",
            )
        if process.pid != self._pid:
            process.check_not_forked("the transaction", self._pid, self.transactional_id)

    def pass_on(self, begun: OpenTransaction) -> None:
        """Send what was kept, in the transaction that a writer has begun."""
        if self.messages:
            begun.send_messages([message for message, _ in self.messages])
        for positions, group, _ in self.offsets:
            begun.send_positions(positions, group)

    # --- for the store ----------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._open

    @property
    def has_content(self) -> bool:
        return bool(self.messages or self.offsets)

    def commit(self, connection: Any) -> None:
        self._commit(connection, self)

    def forget_since(self, savepoint: Hashable) -> None:
        self.messages = [each for each in self.messages if savepoint not in each[1]]
        self.offsets = [each for each in self.offsets if savepoint not in each[2]]
