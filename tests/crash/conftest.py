"""What the crash tests share."""

from collections.abc import Iterator

import pytest

from crash.databases import Databases
from dualwrite.testing.postgres import PostgresServer


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    with PostgresServer() as server:
        yield Databases(tmp_path_factory.mktemp("crash"), server)
