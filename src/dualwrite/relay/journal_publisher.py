"""Publishes the journal of pools that write into it always (`acknowledge="journaled"`), as soon as something is in it.

Each process has such a thread, and one of them publishes: that with the lease on the drainer's id. It is woken by the commits
of its own process; and on PostgreSQL by those of others, whose threads notify it once for all commits of a moment. NOTIFY in
the transactions themselves would make PostgreSQL commit them one after another.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from hashlib import blake2s
from math import inf
from typing import ClassVar, Final

from dualwrite.deadline import Deadline
from dualwrite.errors import DualWriteError
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import database_at
from dualwrite.opening import Kafka
from dualwrite.pool.pool_ids import LeasedIds
from dualwrite.relay.drain import Turn, sql_store
from dualwrite.relay.journal_keeper import JournalKeeper
from dualwrite.relay.listener import NOTIFY_PAUSE_SECONDS, Listener, notification
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.journal import JournalLimits
from dualwrite.stores.sql.sql_journal import has_entries, next_due
from dualwrite.transactional_id import journaled_prefix

log = SubjectLogger(__name__)

_LOOK_SECONDS: Final = 0.5
"""Seconds between two looks at the gate, at what the journal contains, and at whether nobody publishes it."""

_POLL_SECONDS: Final = 0.05
"""Seconds between two looks for messages of other processes, if the database can't notify; and for one that is due."""

_APART_SECONDS: Final = 0.015
"""Seconds between the beginnings of two batches, unless the first takes longer: with more messages in each, they cost less."""

_END_SECONDS: Final = 5.0
"""Seconds for publishing what is left when the process ends."""

_LEASE_SECONDS: Final = 15.0
"""Seconds after which the gate may close, if this process has died."""


class JournalPublisher(JournalKeeper):
    """The journal of a prefix whose gate stays open as long as this runs, and the thread that publishes it.

    Args: as for `JournalKeeper`.

    Raises: as `JournalKeeper`.
    """

    keeps_open: ClassVar[bool] = True

    def __init__(
        self, store: TxnStateStore, prefix: str, kafka: Kafka | None, settings: Settings, limits: JournalLimits | None = None
    ) -> None:
        super().__init__(store, prefix, kafka, settings, limits)
        of_sql = sql_store(store)
        self._short = of_sql.short_transactions
        self._engine = of_sql.engine
        self._channel = f"dualwrite_{blake2s(prefix.encode(), digest_size=8).hexdigest()}"
        self._can_notify = self._engine.dialect.name == "postgresql"
        self._listening = ExitStack()
        self._leases_at = self._asks_at = 0.0
        self._due_at = inf  # when the next message is due that waits for its time
        side = database_at(store.description, is_local=store.is_local)
        self._alive = LeasedIds(of_sql.leases, journaled_prefix(prefix), seconds=_LEASE_SECONDS, database=side)
        try:
            self._alive.acquire(1)  # first: nobody may close the gate after it was opened
            self.journal.keep_open()
        except BaseException:
            self._end()
            raise

    def _is_due(self) -> bool:
        self._count.start_if_open()
        now = time.monotonic()
        if now - self._read_at >= _LOOK_SECONDS:
            self._look()
            if not self.journal.is_open:
                self.journal.keep_open()
        if self.name not in self._ids.held and not self._takes_over(now):
            if self._was_woken:
                self._notify()
            return False
        if self._drain is None:
            if now < self._asks_at:  # each commit wakes this thread
                return False
            self._asks_at = now + _LOOK_SECONDS
            return self._kafka_answers()
        return self._was_woken or self._drain.has_rows()

    def _takes_over(self, now: float) -> bool:
        """Whether this process publishes from now on; tried from time to time."""
        if now < self._leases_at:
            return False
        self._leases_at = now + _LOOK_SECONDS
        if not self._is_leased():
            return False
        if self._can_notify:
            self._listening.enter_context(Listener(self._engine, self._channel, self.journal.prefix, self.wake))
        return True

    def _notify(self) -> None:
        """Tell the process that publishes that there is something."""
        self._stopping.wait(NOTIFY_PAUSE_SECONDS)
        if self._can_notify:
            self._short.query(lambda on: on.execute(notification(self._channel)).first(), "notifying the publisher")

    def _done(self, turn: Turn) -> None:
        super()._done(turn)
        rest = self.tried_at + _APART_SECONDS - time.monotonic()
        if turn.rows and not turn.is_full and rest > 0:
            self._stopping.wait(rest)

    def _look(self) -> None:
        super()._look()
        if self.name in self._ids.held:
            found = self._short.query(lambda on: next_due(on, self.journal.prefix), "looking for messages that wait")
            self._due_at = inf if found is None else found / 1000

    def _idle_seconds(self) -> float:
        if self.name not in self._ids.held or self._drain is None:
            return _LOOK_SECONDS
        seconds = _LOOK_SECONDS if self._can_notify else _POLL_SECONDS
        left = self._due_at - time.time()
        return min(seconds, left if left > 0 else _POLL_SECONDS)  # the latter: it is published, or somebody has locked it

    def _lost(self) -> None:
        self._listening.close()
        super()._lost()

    def _end(self) -> None:
        if self._thread.ident is not None:  # otherwise nothing was written
            with suppress(DualWriteError):  # another process, or the next start, publishes it
                self._publish_rest()
        self._listening.close()
        super()._end()
        self._alive.close()

    def _publish_rest(self) -> None:
        """What this process has committed before its end; who does not publish tells the one that does."""
        limit, prefix = Deadline.after(_END_SECONDS), self.journal.prefix
        while not limit.expired and self._short.query(lambda on: has_entries(on, prefix), "looking for journal entries"):
            if not self._is_leased():
                self._notify()
                return
            if self._drain is None and not self._kafka_answers():
                return
            self.turn()
