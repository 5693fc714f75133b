"""ORM objects that are made or loaded outside of a block: after a rollback, the next run finds them as the first one did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship
from store_scene import commit

from dualwrite.stores.base import Claim, StoreTransaction
from dualwrite.stores.sql import SqlStateStore

places = count(1)


class Base(DeclarativeBase):
    pass


class Customer(Base):
    """With values that the database, SQLAlchemy and the mapper generate."""

    __tablename__ = "customers"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(50))
    visits: Mapped[int] = mapped_column(default=0)
    place: Mapped[int] = mapped_column(default=lambda: next(places))
    status: Mapped[str] = mapped_column(sa.String(50), server_default="new")
    version: Mapped[int] = mapped_column()
    lines: Mapped[list[Line]] = relationship(back_populates="customer", cascade="all, delete-orphan")
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012  (SQLAlchemy's declarative form)


class Line(Base):
    __tablename__ = "customers_lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer_id: Mapped[int] = mapped_column(sa.ForeignKey("customers.id"))
    item: Mapped[str] = mapped_column(sa.String(50))
    customer: Mapped[Customer] = relationship(back_populates="lines")


class Work:
    """What a block does with objects that it has not made: one is new, one was loaded and changed, one is to be deleted."""

    def __init__(self, engine: sa.Engine) -> None:
        with Session(engine, expire_on_commit=False) as session, session.begin():
            self.loaded, self.gone = Customer(name="loaded"), Customer(name="gone")
            session.add_all([self.loaded, self.gone])
        self.loaded.name = "renamed"
        self.new = Customer(name="lamp", visits=0, lines=[Line(item="outside")])

    def run(self, session: Session) -> None:
        session.add(self.new)
        session.flush()
        assert (self.new.status, self.new.version) == ("new", 1)
        self.new.visits += 1
        self.new.lines.append(Line(item="inside"))
        session.add(self.loaded)
        self.loaded.visits += 1
        session.delete(self.gone)
        session.flush()

    def assert_untouched(self) -> None:
        assert sa.inspect(self.new).transient
        assert set(vars(self.new)) == {"_sa_instance_state", "name", "visits", "lines"}
        assert (self.new.name, self.new.visits, [line.item for line in self.new.lines]) == ("lamp", 0, ["outside"])
        assert set(vars(self.new.lines[0])) == {"_sa_instance_state", "item", "customer"}
        assert sa.inspect(self.loaded).detached
        assert sa.inspect(self.gone).detached
        assert (self.loaded.name, self.loaded.visits, self.loaded.version) == ("renamed", 0, 1)
        assert [change for change in sa.inspect(self.loaded).attrs if change.history.added].pop().key == "name"


Begin = Callable[[], StoreTransaction]


@pytest.fixture
def begin(store: SqlStateStore, claim: Claim) -> Iterator[Begin]:
    """Begins a transaction. The tables are dropped in their order: the next test's database is emptied table by table."""
    Base.metadata.create_all(store.engine)
    begun: list[StoreTransaction] = []

    def one() -> StoreTransaction:
        begun.append(store.begin(claim))
        return begun[-1]

    yield one
    for transaction in begun:
        transaction.rollback()
    Base.metadata.drop_all(store.engine)


def undo_one(transaction: StoreTransaction, work: Work) -> None:
    transaction.begin_unit()
    work.run(transaction.session)
    transaction.undo_unit(ValueError())


def undo_many(transaction: StoreTransaction, work: Work) -> None:
    transaction.begin_units()
    work.run(transaction.session)
    transaction.end_unit()
    transaction.undo_units(ValueError())


def roll_back(transaction: StoreTransaction, work: Work) -> None:
    work.run(transaction.session)
    transaction.rollback()


@pytest.mark.parametrize("undo", [undo_one, undo_many, roll_back])
def test_the_next_run_finds_them_as_the_first_did(
    store: SqlStateStore, begin: Begin, undo: Callable[[StoreTransaction, Work], None]
) -> None:
    work, transaction = Work(store.engine), begin()
    for _ in range(2):
        undo(transaction, work)
        work.assert_untouched()
        transaction = begin() if undo is roll_back else transaction
    transaction.begin_unit()
    work.run(transaction.session)
    transaction.end_unit()
    commit(transaction)
    assert work.new.id
    with Session(store.engine) as session:
        lamp, renamed = session.scalars(sa.select(Customer).order_by(Customer.name))
        assert (lamp.name, lamp.visits, lamp.status, lamp.version) == ("lamp", 1, "new", 2)
        assert [line.item for line in lamp.lines] == ["outside", "inside"]
        assert (renamed.name, renamed.visits, renamed.version) == ("renamed", 1, 2)


def test_an_object_that_the_block_has_given_away_is_left_alone(store: SqlStateStore, begin: Begin) -> None:
    """To another session: that one's transaction is not rolled back."""
    given, transaction = Customer(name="given"), begin()
    transaction.session.add(given)
    transaction.session.expunge(given)
    with Session(store.engine) as other:
        other.add(given)
        given.name = "changed"
        transaction.rollback()
        assert (given.name, given in other) == ("changed", True)
