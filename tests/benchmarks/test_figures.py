"""The benchmarks' calculations: percentiles, ratios of rounds, the order of measurements, and records that are damaged."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import StaticPool, create_engine, text

from fixtures.tables import table

Import = Callable[[str], ModuleType]

WRITTEN = {0: 5, 7: 3}
DAMAGES: dict[str, Callable[[list[bytes], bytes], list[bytes]]] = {
    "lost": lambda found, _: found[:3] + found[4:],
    "last one lost": lambda found, _: found[:-1],
    "doubled": lambda found, _: [*found, found[3]],
    "altered": lambda found, altered: [*found[:3], altered, *found[4:]],
    "added": lambda found, altered: [*found, altered],
    "all lost": lambda _found, _altered: [],
}


@pytest.fixture
def records(benchmark_module: Import) -> ModuleType:
    return benchmark_module("records")


@pytest.fixture
def contents(records: ModuleType) -> list[bytes]:
    return [records.record(writer, number) for writer, total in WRITTEN.items() for number in range(total)]


def test_percentiles_are_values_that_were_measured(benchmark_module: Import) -> None:
    percentile = benchmark_module("figures").percentile

    assert percentile([], 0.5) is None
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.01, 0.5, 0.75, 0.76, 1)] == [1.0, 2.0, 3.0, 4.0, 4.0]


def test_a_ratio_is_the_median_of_the_rounds_ratios(benchmark_module: Import) -> None:
    spread = benchmark_module("figures").Spread

    found = spread.of_ratios([10.0, 100.0, 3.0, None, 1.0], [100.0, 50.0, 1.0, 2.0, None])

    assert (found.least, found.median, found.greatest) == (0.1, 2.0, 3.0), "not 10 / 50"
    assert benchmark_module("figures").with_range(found, 1) == "2.0 (0.1 … 3.0)"
    assert spread.of_ratios([None], [1.0]) is None


# --- what is written ----------------------------------------------------------------------------------------------------------


@table("damage", DAMAGES.values(), ids=list(DAMAGES))
@table("altered", ["in its padding", "unknown writer", "never reached", "another size", "text"])
def test_damaged_records_are_noticed(records: ModuleType, contents: list[bytes], damage: Any, altered: str) -> None:
    content = {
        "in its padding": records.record(0, 3)[:-1] + b"y",
        "unknown writer": records.record(3, 0),
        "never reached": records.record(7, 3),
        "another size": records.record(0, 3)[:-1],
        "text": b"x" * 200,
    }[altered]

    assert records.check_records("x", "rows", WRITTEN, reversed(contents)) == 8, "in any order"
    assert {len(each) for each in contents} == {200}
    with pytest.raises(records.VerificationError):
        records.check_records("x", "rows", WRITTEN, damage(contents, content))


@table("damage", ["row", "message", "balance", "outbox", None])
def test_damaged_orders_are_noticed(benchmark_module: Import, records: ModuleType, contents: list[bytes], damage: str) -> None:
    orders = benchmark_module("orders")
    database = create_engine("sqlite://", poolclass=StaticPool)
    orders.prepare(database)
    with database.begin() as connection:
        for number, content in enumerate(contents):
            order = orders.Order(*records.place_of(content))
            connection.execute(text("INSERT INTO benchmark_orders VALUES (:id, :body)"), {"id": number, "body": order.body})
            debit = "UPDATE benchmark_accounts SET balance = balance - :amount WHERE id = :account"
            connection.execute(text(debit), order.debit)
        if damage == "row":
            connection.execute(text("DELETE FROM benchmark_orders WHERE id = 3"))
        if damage == "balance":
            connection.execute(text("UPDATE benchmark_accounts SET balance = balance + 1 WHERE id = 0"))
        if damage == "outbox":
            connection.execute(text("INSERT INTO benchmark_outbox VALUES (1, 'topic', NULL, NULL)"))
    messages = contents[:-1] if damage == "message" else contents

    def verify(messages: list[bytes], *, sends: bool) -> int:
        found: int = orders.verify("recipe", database, WRITTEN, messages, sends=sends, debits=True)
        return found

    if damage is None:
        assert (verify(messages, sends=True), verify([], sends=False)) == (8, 0)
    for sends in (True, False) if damage else ():
        with pytest.raises(records.VerificationError):
            verify(messages, sends=sends)
    database.dispose()


@table("name", ["OURS", "DATABASE", "KAFKA"])
@table("damage", ["lost", "last one lost", "doubled", "altered"])
@table("what", ["rows", "messages"])
def test_what_a_consumer_has_damaged_is_noticed(
    benchmark_module: Import, records: ModuleType, contents: list[bytes], name: str, damage: str, what: str
) -> None:
    """Rows may be doubled by the consumer that commits its offsets last; and each writes only what it promises."""
    processor = benchmark_module("processor")
    clock = SimpleNamespace(messages=8, after=Counter(WRITTEN))
    damaged = DAMAGES[damage](contents, contents[-1][:-1] + b"?")
    rows, messages = (damaged if what == each else contents for each in ("rows", "messages"))

    def verify() -> None:
        numbered = [(records.place_of(row)[1], row.decode()) for row in rows]
        processor.verify(getattr(processor, name), clock, numbered, messages)

    if (name, what) in {("DATABASE", "messages"), ("KAFKA", "rows")} or (name, damage) == ("DATABASE", "doubled"):
        verify()
        return
    with pytest.raises(records.VerificationError):
        verify()


def test_only_code_is_counted(benchmark_module: Import, tmp_path: Path) -> None:
    file = tmp_path / "counted.py"
    title, constant = '"""Title.\n\nMore."""\n\n# why\nX = 1\n', '"""About X."""\n\n\n'
    function = 'def call(\n    one: int,  # first\n):\n    """Do."""\n    return """a\n\nb"""\n'
    file.write_text(title + constant + function)

    assert benchmark_module("lines").code_lines(file) == 1 + 3 + 3


def test_limits_of_lines_refuse_growth_and_are_only_lowered(benchmark_module: Import) -> None:
    lines = benchmark_module("lines")
    found = {"pool": 90, "recipe": 120, "new": 5}
    limits = '# head\n"pool" = 100\n"recipe" = 110  # paid by journaled\n"gone" = 3\n'

    assert [sentence.split()[0] for sentence in lines.excess(found, {"pool": 100, "recipe": 110})] == ["recipe", "new"]
    assert lines.lowered(limits, found) == '# head\n"pool" = 90\n"recipe" = 110  # paid by journaled\n'
