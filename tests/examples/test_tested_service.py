"""The example of a service with tests: its tests run, with the fixtures of the pytest plugin, on our servers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualwrite.devcluster import DevCluster
from fixtures.broker import started
from fixtures.pace import LIMIT
from fixtures.tiers import thinned

EXAMPLE = Path(__file__).parents[2] / "examples" / "tested_service"
MOST = "not crash or before_db_commit or after_db_commit"


@pytest.fixture
def own_broker() -> Iterator[DevCluster]:
    """A broker without the topics of other tests: a service names its topics itself."""
    with started() as cluster:
        yield cluster


@pytest.mark.parametrize("which", thinned([MOST, "crash"], kept=[MOST]))
@pytest.mark.soak
def test_the_services_tests_pass(own_broker: DevCluster, postgres_url: str, tmp_path: Path, which: str) -> None:
    environment = {
        **os.environ,
        "DUALWRITE_TEST_KAFKA": own_broker.bootstrap_servers,
        "DUALWRITE_TEST_POSTGRES": postgres_url,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(EXAMPLE), "-c", os.devnull, "-k", which]
    command = [sys.executable, "-m", "pytest", *options, str(EXAMPLE)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=8 * LIMIT, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
