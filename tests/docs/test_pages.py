"""The docs don't rot: the code of every page under `docs/` runs on real servers; see `pages.py` for what a page may hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pages
import pytest

from dualwrite.devcluster import DevCluster
from fixtures.tables import table
from fixtures.zookeeper_server import ZooKeeperServer

PAGES = sorted(pages.DOCS.rglob("*.md"))


def name_of(page: Path) -> str:
    return page.relative_to(pages.ROOT).as_posix()


IN_CI = ("first-steps", "pool", "journaled", "consuming", "kafka-down", "adopt")
"""The guides that readers begin with; `pytest -m soak tests/docs` runs all pages."""


def pages_that_run() -> list[object]:
    found = []
    for page in PAGES:
        if pages.runs(page.read_text(encoding="utf-8")):
            is_in_ci = page.stem in IN_CI and page.parent.name == "guides"
            tier = pytest.mark.slow if is_in_ci else pytest.mark.soak
            found.append(pytest.param(page, marks=tier, id=name_of(page)))
    return found


# --- the pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", pages_that_run())
def test_a_page_runs(
    page: Path,
    broker: DevCluster,
    committed: Callable[[str], list[bytes | None]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    told = page.read_text(encoding="utf-8")
    text = pages.substituted(told, {kind: address(kind, request) for kind in pages.kinds_of_servers(told)})
    before = {name: pages.messages_before(broker, name, committed) for name in pages.topics(text)}
    environment = request.getfixturevalue("spark_environment") if pages.needs_spark(text) else {}
    printed = pages.run_program(text, tmp_path, name=name_of(page), environment=environment)
    pages.check(text, tmp_path, printed, committed, before)


@pytest.fixture
def zookeeper_url(zookeeper_server: ZooKeeperServer) -> str:
    return zookeeper_server.url_at(zookeeper_server.port, "/shop")


def address(kind: str, request: pytest.FixtureRequest) -> str:
    """The test's server of a kind; it is started when the first page asks for it."""
    if kind == "broker":
        broker: DevCluster = request.getfixturevalue("broker")
        return broker.bootstrap_servers
    fixtures = {"postgresql": "postgres_url", "libpq": "postgres_url", "mariadb": "mariadb_url", "zookeeper": "zookeeper_url"}
    url: str = request.getfixturevalue(fixtures[kind])
    return url.replace("+psycopg", "") if kind == "libpq" else url


@table("page", PAGES, ids=name_of)
def test_the_python_of_a_page_compiles(page: Path) -> None:
    pages.compile_all(page.read_text(encoding="utf-8"), name_of(page))


@table("page", PAGES, ids=name_of)
def test_every_mark_in_a_page_is_read(page: Path) -> None:
    assert pages.mistakes(page.read_text(encoding="utf-8")) == []


@table("page", [each.values[0] for each in pages_that_run()])
def test_a_page_that_runs_states_its_result(page: Path) -> None:
    assert pages.checks_itself(page.read_text(encoding="utf-8"))


# --- what runs them ---------------------------------------------------------------------------------------------------

PAGE = """\
# A page

<!-- file: shop.py -->
```python
ITEM = "lamp"
```

```python
import sqlite3, shop
database = sqlite3.connect("shop.db")
database.execute("CREATE TABLE orders (item TEXT)")
```

<!-- run -->
```sh
test -f shop.db
echo "between"
```

```sh
exit 1
```

<!-- not run: it fails -->
```python
raise SystemExit(1)
```

```python
database.execute("INSERT INTO orders VALUES (?)", [shop.ITEM])
database.commit()
print("after")
```

<!-- expect printed: "between\\nafter\\n" -->
<!-- expect rows sqlite:///shop.db SELECT item FROM orders: [["lamp"]] -->
<!-- expect topic orders: ["lamp", null] -->
<!-- expect topic orders in any order: [null, "lamp"] -->
"""


def run(text: str, folder: Path, *, messages: list[bytes | None]) -> None:
    """A page without servers, whose topics are as given."""
    printed = pages.run_program(text, folder, name="page.md")
    pages.check(text, folder, printed, lambda _: [b"of another page", *messages], dict.fromkeys(pages.topics(text), 1))


def test_blocks_run_in_their_order(tmp_path: Path) -> None:
    assert pages.mistakes(PAGE) == []
    assert pages.checks_itself(PAGE)
    run(PAGE, tmp_path, messages=[b"lamp", None])


@pytest.mark.parametrize(
    ("right", "wrong", "why"),
    [
        ('print("after")', 'assert shop.ITEM == "chair"', r'page.md", line 32[\s\S]*AssertionError'),
        ("test -f shop.db", "test -f other.db", "returned non-zero exit status"),
        ("<!-- not run: it fails -->\n", "", "failed with 1"),
        ('print("after")', 'print("later")', "between"),
        ('ITEM = "lamp"', 'ITEM = "chair"', "SELECT item FROM orders"),
        ('orders: ["lamp", null]', "orders: [null]", "topic orders"),
        ('orders in any order: [null, "lamp"]', 'orders in any order: ["lamp"]', "topic orders"),
        ("sqlite:///shop.db SELECT", "sqlite:///other.db SELECT", "made no other.db"),
    ],
)
def test_a_page_that_is_wrong_fails(right: str, wrong: str, why: str, tmp_path: Path) -> None:
    assert right in PAGE
    with pytest.raises(AssertionError, match=why):
        run(PAGE.replace(right, wrong), tmp_path, messages=[b"lamp", None])
