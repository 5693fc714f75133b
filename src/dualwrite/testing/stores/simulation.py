"""Several writers of one id, step by step, on a real database; each step is compared with the model. Without Hypothesis.

A writer follows the recipe: claim, describe, read again, act and record, acquire a generation, begin, write, record, commit,
commit at Kafka. Kafka is simulated. The model of the row is one that `dualwrite.stores.rows` changes, which defines what each
change does to a row. A step that the model forbids must be refused by the store with the contract's error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Final

from dualwrite.errors import ClaimTimeoutError, FencedError, NotResolvedError, StoreCommitFailedError, StoreCommitUnknownError
from dualwrite.state import PreparedTxnState, ProducerKind
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.rows import (
    Claim,
    LostKind,
    LostTransaction,
    Resolution,
    StateRow,
    acknowledged,
    claimed,
    forgotten,
    new_token,
    recorded,
    with_generation,
    with_resolution,
)
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.testing import TIMEOUT
from dualwrite.testing.stores.scene import ClaimsWait, StoreScene
from dualwrite.testing.stores.steps import expect_error

WRITERS: Final = 3
_SHORT_TIMEOUT: Final = 0.03
_NOT_MODELLED: Final = ("updated_at", "claim_token", "store_id")
"""Fields that each store fills by itself."""


@dataclass
class SimulatedTransaction:
    """One Kafka transaction."""

    state: PreparedTxnState
    messages: list[int] = field(default_factory=list)
    committed: bool | None = None

    def end(self, *, commit: bool) -> bool:
        """End it if it is open; return whether it has ended in this way, as EndTxn v5 does."""
        if self.committed is None:
            self.committed = commit
        return self.committed is commit


@dataclass
class SimulatedKafka:
    """Every Kafka transaction of one id, each with its own state, as with EndTxn v5 (KIP-890)."""

    transactions: list[SimulatedTransaction] = field(default_factory=list)

    def begin(self) -> SimulatedTransaction:
        """Begin a transaction."""
        begun = SimulatedTransaction(PreparedTxnState(len(self.transactions), 0))
        self.transactions.append(begun)
        return begun

    def ongoing(self) -> list[SimulatedTransaction]:
        """The open transactions, as DescribeTransactions reports them."""
        return [transaction for transaction in self.transactions if transaction.committed is None]


@dataclass(eq=False)
class Writer:
    """One of the writers: the state of a process.

    Attributes:
        claim: Its claim, current or not.
        generation: Its generation.
        transactions: How many it has begun under the claim.
        ready: It has resolved the id's open transactions under its claim, and may begin a transaction.
        open: Its database transaction.
        numbers: What that transaction has written.
        recorded: What it has recorded, and how many changes the row had had by then.
        kafka: Its Kafka transaction, if it sends messages.
        committed: The database has committed, but Kafka has not yet.
        described: What was open at Kafka when it began to recover.
        row: The row as it was read after that.
    """

    name: str
    store: TxnStateStore
    claim: Claim | None = None
    generation: int = 0
    transactions: int = 0
    ready: bool = False
    open: StoreTransaction | None = None
    numbers: list[int] = field(default_factory=list)
    recorded: tuple[dict[str, Any], int] | None = None
    kafka: SimulatedTransaction | None = None
    committed: bool = False
    described: list[SimulatedTransaction] | None = None
    row: StateRow | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it has a claim, and no transaction on either side."""
        return self.claim is not None and self.open is None and not self.committed

    def end_transaction(self) -> None:
        """Note that its transaction has ended on both sides."""
        self.open = self.recorded = self.kafka = None
        self.committed = False
        self.numbers = []


class Simulation:
    """Writers, the model, and the steps.

    It uses an id of its own on the scene.
    """

    def __init__(self, scene: StoreScene) -> None:
        self.scene = scene
        self.id = scene.new_id("machine")
        self.observer = scene.new_store()
        self.writers = [Writer(f"writer {number}", scene.new_store()) for number in range(WRITERS)]
        self.row: StateRow | None = None
        self.changes = 0
        self.data: list[int] = []
        self.kafka = SimulatedKafka()
        self._before = set(scene.numbers())
        self._has_timed_out = False

    # --- which steps are possible -----------------------------------------------------------------------------------------

    def holder(self) -> Writer | None:
        """The writer whose transaction holds the row's lock."""
        match self.scene.capabilities.claims_wait:
            case ClaimsWait.FROM_BEGIN:
                return next((writer for writer in self.writers if writer.open is not None), None)
            case ClaimsWait.FROM_RECORD:
                return next((writer for writer in self.writers if writer.recorded is not None), None)
            case ClaimsWait.NEVER:
                return None

    @property
    def is_free(self) -> bool:
        """Whether no transaction holds the row's lock."""
        return self.holder() is None

    @property
    def may_begin(self) -> bool:
        """Whether a transaction may begin in addition to those that are open."""
        return self.is_free or self.scene.capabilities.claims_wait is ClaimsWait.FROM_RECORD

    @property
    def fence(self) -> int:
        """The newest fence; 0 before the first claim."""
        return 0 if self.row is None else self.row.fence

    def _has_fence(self, writer: Writer) -> bool:
        return writer.claim is not None and writer.claim.fence == self.fence

    def _change(self, change: Callable[..., StateRow], *arguments: Any, **options: Any) -> StateRow:
        self.row = change(self.row, *arguments, **options)
        self.changes += 1
        return self.row

    def _under_claim(self, writer: Writer, what: str, call: Callable[[Claim], Any]) -> tuple[bool, Any]:
        """Make a call that is conditional on the fence; return whether it succeeded, and its result."""
        assert writer.claim is not None
        if self._has_fence(writer):
            return True, call(writer.claim)
        with expect_error(FencedError, f"{what} by {writer.name}, whose claim {writer.claim.fence} was replaced"):
            call(writer.claim)
        self._drop_claim(writer)
        return False, None

    def _records_resolution(self, writer: Writer, resolution: Resolution) -> bool:
        record = writer.store.record_resolution
        done, _ = self._under_claim(writer, "record_resolution()", lambda claim: record(claim, resolution))
        if done:
            self._change(with_resolution, resolution)
        return done

    def _drop_claim(self, writer: Writer) -> None:
        """The writer was fenced and drops everything; the id's new owner ends what is open at Kafka."""
        if writer.open is not None:
            writer.open.rollback()
        self._restart(writer, None)

    def _restart(self, writer: Writer, claim: Claim | None, store: TxnStateStore | None = None) -> None:
        self.writers[self.writers.index(writer)] = Writer(writer.name, store or writer.store, claim)

    # --- claims -----------------------------------------------------------------------------------------------------------

    def claims(self, writer: Writer) -> None:
        """Claim the id, whoever owns it; time out if a transaction holds its lock (once per run: some databases need 1 s)."""
        if not self.is_free:
            if self._has_timed_out:
                return
            self._has_timed_out = True
            with expect_error(ClaimTimeoutError, f"claim() by {writer.name} under the transaction of another"):
                writer.store.claim(self.id, writer.name, timeout=_SHORT_TIMEOUT)
            return
        claim = writer.store.claim(self.id, writer.name, timeout=TIMEOUT)
        assert claim.fence == self.fence + 1, f"claim() returned the fence {claim.fence} after {self.fence}"
        self._change(claimed, self.id, writer.name, token=new_token())
        self._restart(writer, claim)

    def claims_again(self, writer: Writer) -> None:
        """Claim the id if the fence is still the writer's own, as after an unknown COMMIT (F8)."""
        held = writer.claim
        assert held is not None
        done, claim = self._under_claim(
            writer,
            "claim(expected_fence=…)",
            lambda _: writer.store.claim(self.id, writer.name, timeout=TIMEOUT, expected_fence=held.fence),
        )
        if done:
            assert claim.fence == held.fence + 1, f"claim(expected_fence={held.fence}) returned the fence {claim.fence}"
            self._change(claimed, self.id, writer.name, token=new_token(), expected_fence=held.fence)
            self._restart(writer, claim)

    # --- recovery ---------------------------------------------------------------------------------------------------------

    def describes(self, writer: Writer) -> None:
        """First describe what is open at Kafka (F1)."""
        writer.described, writer.row = self.kafka.ongoing(), None

    def reads(self, writer: Writer) -> None:
        """Then read the row again, on the condition of the fence (F1)."""
        done, row = self._under_claim(writer, "read_claimed()", writer.store.read_claimed)
        if done:
            writer.row = row

    def resolves(self, writer: Writer, kind: ProducerKind, *, reuse: bool) -> None:
        """End at Kafka what was described, according to the row; resolve, and acquire a generation."""
        row, described = writer.row, writer.described
        assert row is not None
        assert described is not None
        writer.row = writer.described = None
        for transaction in described:
            transaction.end(commit=transaction.state == row.prepared_state)
        resolution = Resolution(clear_state=row.prepared_state is not None, resolved_generation=row.generation)
        if not self._records_resolution(writer, resolution):
            return
        claim = writer.claim
        assert claim is not None
        writer.generation = writer.store.acquire_generation(claim, kind, reuse=reuse)
        wanted = self._change(with_generation, kind, reuse=reuse, store_id="the store's").generation
        call = f"acquire_generation({kind}, reuse={reuse})"
        assert writer.generation == wanted, f"{call} returned {writer.generation}, the contract requires {wanted}"
        writer.ready = True

    def closes(self, writer: Writer) -> None:
        """Resolve when the writer is closed: nothing is prepared, nothing is open."""
        resolution = Resolution(clear_state=True, resolved_generation=writer.generation)
        if self._records_resolution(writer, resolution):
            writer.ready = False

    def finds_lost(self, writer: Writer, number: int) -> None:
        """Add an entry to `lost`; the same one only once."""
        entry = LostTransaction(LostKind.LOST, PreparedTxnState(number, 0), 0, datetime(2026, 11, 21, tzinfo=UTC))
        self._records_resolution(writer, Resolution(lost=entry))

    def acknowledges(self, writer: Writer) -> None:
        """Remove what is lost from the row; this needs no claim."""
        assert self.row is not None
        found = writer.store.acknowledge(self.id)
        assert found == self.row.lost, f"acknowledge() returned {found}, the contract requires {self.row.lost}"
        self._change(acknowledged)

    def forgets(self, writer: Writer) -> None:
        """Drop the id if nothing is open on it."""
        assert self.row is not None
        try:
            after = forgotten(self.row)
        except NotResolvedError:
            with expect_error(NotResolvedError, "forget() of an id on which something is open"):
                writer.store.forget(self.id)
            return
        writer.store.forget(self.id)
        if after is not self.row:
            self._change(lambda _: after)

    # --- transactions -----------------------------------------------------------------------------------------------------

    def begins(self, writer: Writer, *, sends: bool) -> None:
        """Begin on both sides; the database's side checks the fence before Kafka's has a message (F2)."""
        done, transaction = self._under_claim(writer, "begin()", writer.store.begin)
        if done:
            writer.open, writer.kafka = transaction, self.kafka.begin() if sends else None
            writer.transactions += 1
            self.writes(writer)

    def writes(self, writer: Writer) -> None:
        """Write the same number to both sides."""
        assert writer.open is not None
        number = self.scene.new_number()
        self.scene.put(writer.open.handle, number)
        writer.numbers.append(number)
        if writer.kafka is not None:
            writer.kafka.messages.append(number)

    def records(self, writer: Writer) -> None:
        """Record the prepared state if the fence is current; a store that compares versions may check that at the commit."""
        assert writer.open is not None
        state = None if writer.kafka is None else writer.kafka.state
        has_fence = self._has_fence(writer)
        try:
            writer.open.record(state, generation=writer.generation, transaction_number=writer.transactions)
        except FencedError:
            assert not has_fence, f"record() raised FencedError, but {writer.claim} is the newest"
            self._drop_claim(writer)
            return
        late = self.scene.capabilities.claims_wait is ClaimsWait.NEVER
        assert has_fence or late, (
            f"record() under a claim that was replaced: the contract requires FencedError ({writer.claim})"
        )
        what = {"state": state, "generation": writer.generation, "transaction_number": writer.transactions}
        writer.recorded = (what, self.changes)

    def commits(self, writer: Writer) -> None:
        """Commit (the commit point) if the fence is current."""
        assert writer.open is not None
        assert writer.recorded is not None
        has_fence, changed = self._has_fence(writer), writer.recorded[1] != self.changes
        try:
            writer.open.commit()
        except FencedError:
            assert not has_fence, f"commit() raised FencedError, but {writer.claim} is the newest"
            self._drop_claim(writer)
        except StoreCommitFailedError:
            assert changed, "commit() raised StoreCommitFailedError, but the row was not changed since record()"
            self.rolls_back(writer)
        else:
            assert has_fence, f"commit() returned under {writer.claim}, but the newest fence is {self.fence}"
            self._is_committed(writer)

    def commits_without_an_answer(self, writer: Writer, *, arrives: bool) -> None:
        """The connection breaks during COMMIT: the writer does not know the outcome, and has to read it (F8)."""
        assert writer.open is not None
        assert writer.recorded is not None
        self.scene.cut_next_commit(arrives=arrives)
        with expect_error(StoreCommitUnknownError, "commit() whose connection broke"):
            writer.open.commit()
        writer.open.rollback()
        if not arrives or not self._has_fence(writer):
            happened = False
        elif self.scene.capabilities.claims_wait is ClaimsWait.NEVER and writer.recorded[1] != self.changes:
            happened = set(writer.numbers) <= set(self.scene.numbers())  # it may have failed as a conflict
        else:
            happened = True
        if happened:
            self._is_committed(writer)
        self._restart(writer, writer.claim)  # its recovery ends what is open at Kafka

    def _is_committed(self, writer: Writer) -> None:
        assert writer.recorded is not None
        self._change(recorded, **writer.recorded[0])
        self.data += writer.numbers
        kafka = writer.kafka
        writer.end_transaction()
        writer.kafka, writer.committed = kafka, kafka is not None

    def commits_at_kafka(self, writer: Writer) -> None:
        """Commit at Kafka; a successor may have done it already, but must not have aborted it."""
        assert writer.kafka is not None
        assert writer.kafka.end(commit=True), f"{writer.kafka} was aborted at Kafka, but the database has committed it"
        writer.end_transaction()

    def rolls_back(self, writer: Writer) -> None:
        """Roll back both sides."""
        assert writer.open is not None
        for _ in range(2):
            writer.open.rollback()
        if writer.kafka is not None:
            writer.kafka.end(commit=False)
        writer.end_transaction()

    def crashes(self, writer: Writer) -> None:
        """The process dies: its connections break, its Kafka transaction stays open, and a new process has a new store."""
        self.scene.crash(writer.store)
        self._restart(writer, None, self.scene.new_store())

    # --- invariants -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that row and data match the model, and agree with Kafka."""
        self._check_row()
        data = set(self.scene.numbers()) - self._before
        assert data == set(self.data), f"the database has {sorted(data)}, committed was {sorted(self.data)}"
        for transaction in self.kafka.transactions:
            sent = set(transaction.messages)
            if transaction.committed is not None:
                wanted = sent if transaction.committed else set()
                assert sent & data == wanted, f"{transaction}, the database has {sorted(data)}"
            if self.row is not None and transaction.state == self.row.prepared_state:
                assert sent <= data, f"the row has the state of {transaction}, the database has {sorted(data)}"

    def _check_row(self) -> None:
        row = self.observer.read(self.id)
        if self.row is None:
            assert row is None, f"the id was never claimed, but there is {row}"
            return
        assert row is not None, "the row is gone"
        unknown = (*_NOT_MODELLED, *(("prepared_generation",) if self.row.prepared_state is None else ()))
        names = [each.name for each in fields(row) if each.name not in unknown]
        found = {name: (getattr(row, name), getattr(self.row, name)) for name in names}
        wrong = [
            f"{name} is {stored!r}, the model says {wanted!r}" for name, (stored, wanted) in found.items() if stored != wanted
        ]
        assert not wrong, f"the row: {'; '.join(wrong)}"

    def end(self) -> None:
        """All writers stop where they are, another one recovers, and both sides must agree."""
        for writer in self.writers:
            if writer.open is not None:
                writer.open.rollback()
        last = Writer("the last", self.observer)
        self.writers = [last]
        self.claims(last)
        last = self.writers[0]
        self.describes(last)
        self.reads(last)
        self.resolves(last, ProducerKind.LIBRDKAFKA, reuse=False)
        self.check()
        assert not self.kafka.ongoing()
        self.scene.close_stores()
