"""The setup of all tests: plugins for real servers, failpoints in child processes, and SIGINT, which some tests send."""

import os
import signal
import threading

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = [
    "pytester",
    "fixtures.reruns",
    "fixtures.workers",
    "fixtures.broker",
    "fixtures.token_broker",
    "fixtures.tiers",
    "fixtures.database",
    "fixtures.spark",
    "fixtures.kfake_broker",
    "fixtures.histories",
    "crash.databases",
]

os.environ["DUALWRITE_TESTING"] = "1"  # enables DUALWRITE_FAILPOINTS in the processes that tests start

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run in the background of a shell: children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

# no property depends on the machine's speed
settings.register_profile("dualwrite", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dualwrite")


@pytest.fixture
def losses_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Kafka has aborted after the database's commit is not published again, but reported."""
    monkeypatch.setenv("DUALWRITE_ON_LOST", "raise")


@pytest.fixture
def no_recovery_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that must recover its id waits for its user, however long a test takes from one step to the next."""
    monkeypatch.setattr("dualwrite.recipe.idle.RECOVER_AFTER", threading.TIMEOUT_MAX / 2)
