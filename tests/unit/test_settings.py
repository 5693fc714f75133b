"""Settings from arguments and from the environment, and time limits: seconds above 0, at most eleven days."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from dualwrite import PoolOptions
from dualwrite.errors import ConfigurationError
from dualwrite.processor.options import ProcessorOptions
from dualwrite.settings import Settings, Timeouts
from fixtures.tables import table


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Settings.from_environment({}) == Settings()
    assert Settings.from_environment({"PATH": "/bin", "KAFKA_SECURITY_PROTOCOL": "SSL"}) == Settings()


def test_every_variable_sets_its_setting() -> None:
    settings = Settings.from_environment(
        {
            "DUALWRITE_DATABASE_URL": "sqlite:///x.db",
            "DUALWRITE_KAFKA_BOOTSTRAP_SERVERS": "one:9092,two:9092",
            "DUALWRITE_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
            "DUALWRITE_KAFKA_SASL_MECHANISM": "SCRAM-SHA-256",
            "DUALWRITE_TRANSACTIONAL_ID": "orders",
            "DUALWRITE_PRODUCER": "librdkafka",
            "DUALWRITE_LANES": "3",
            "DUALWRITE_ON_LOST": "report",
            "DUALWRITE_TIMEOUT_CLAIM": "1.5",
            "DUALWRITE_TIMEOUT_KAFKA": "2",
            "DUALWRITE_TIMEOUT_DELIVERY": "3",
        }
    )
    assert settings == Settings(
        database_url="sqlite:///x.db",
        kafka={
            "bootstrap.servers": "one:9092,two:9092",
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-256",
        },
        transactional_id="orders",
        producer="librdkafka",
        lanes=3,
        on_lost="report",
        timeouts=Timeouts(claim=1.5, kafka=2, delivery=3),
    )


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALWRITE_TRANSACTIONAL_ID", "from-the-process")
    assert Settings.from_environment().transactional_id == "from-the-process"


def test_an_empty_variable_counts_as_unset() -> None:
    assert Settings.from_environment({"DUALWRITE_DATABASE_URL": "", "DUALWRITE_TIMEOUT_KAFKA": ""}) == Settings()


@table(
    ("variable", "text", "named"),
    [
        ("DUALWRITE_PRODUCER", "java", "producer is 'java'"),
        ("DUALWRITE_ON_LOST", "ignore", "on_lost is 'ignore'"),
        *(
            ("DUALWRITE_LANES", text, "lanes must be .*not 0|DUALWRITE_LANES is")
            for text in ("0", "-1", "3.0", "three", " 3", "٣", "9" * 5000)
        ),
        ("DUALWRITE_LANES", "101", "lanes must be .*not 101"),
        ("DUALWRITE_TIMEOUT_CLAIM", "soon", "DUALWRITE_TIMEOUT_CLAIM is 'soon'"),
        ("DUALWRITE_TIMEOUT_KAFKA", "inf", "'kafka'"),
        ("DUALWRITE_TIMEOUT_KAFKA", "0", "'kafka' must be .*not 0.0"),
        ("DUALWRITE_TIMEOUT_DELIVERY", "-1", "'delivery' must be .*not -1.0"),
    ],
)
def test_an_invalid_value_is_refused_by_name(variable: str, text: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        Settings.from_environment({variable: text})


@table("lanes", [0, -1, 101, "3", 2.0, True, False])
def test_an_invalid_number_of_lanes_is_refused(lanes: object) -> None:
    with pytest.raises(ConfigurationError, match="lanes must be an integer from 1 to 100, not"):
        Settings(lanes=lanes)  # type: ignore[arg-type]  # what a user may do


def test_the_error_lists_the_allowed_values() -> None:
    with pytest.raises(ConfigurationError, match="one of auto, native, librdkafka"):
        Settings(producer="java")  # type: ignore[arg-type]  # what a user may do


def test_changes_to_none_are_ignored() -> None:
    settings = Settings(transactional_id="a", on_lost="report")
    assert settings.with_changes(transactional_id=None, on_lost=None) == settings
    assert settings.with_changes(transactional_id="b").transactional_id == "b"
    assert settings.with_changes(transactional_id="b").on_lost == "report"


def test_passwords_are_not_shown_in_repr() -> None:
    settings = Settings.from_environment(
        {
            "DUALWRITE_KAFKA_SASL_PASSWORD": "s3cret",
            "DUALWRITE_DATABASE_URL": "postgresql+psycopg://me:s3cret@localhost/db",
        }
    )
    assert settings.kafka["sasl.password"] == "s3cret"
    assert "s3cret" not in repr(settings)


# --- time limits ------------------------------------------------------------------------------------------------------------


def test_a_pool_has_another_default_and_keeps_what_was_given() -> None:
    assert Timeouts() == Timeouts(claim=30.0, kafka=60.0, delivery=None)
    assert (Timeouts().for_delivery, Timeouts().in_pool().for_delivery) == (60.0, 20.0)
    assert Timeouts(delivery=60.0).in_pool() == Timeouts(delivery=60.0)


@table(
    ("name", "bad"),
    [
        *product(["claim", "kafka", "delivery"], [0, -1, -0.5, float("nan"), "5", True, [], b"1"]),
        ("claim", None),
        ("kafka", None),
    ],
)
def test_anything_but_a_positive_number_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}'"):
        Timeouts(**{name: bad})


@table("bad", [math.inf, 1e11, 1_000_001, 10**400], ids=["inf", "1e11", "1000001", "10**400"])
@table(
    "give",
    [
        lambda seconds: Timeouts(claim=seconds),
        lambda seconds: Timeouts(kafka=seconds),
        lambda seconds: Timeouts(delivery=seconds),
        lambda seconds: PoolOptions(timeout=seconds),
        lambda seconds: PoolOptions(lease=seconds),
        lambda seconds: ProcessorOptions(pause=seconds),
        lambda seconds: ProcessorOptions(longest_pause=seconds),
    ],
    ids=["claim", "kafka", "delivery", "pool timeout", "lease", "pause", "longest_pause"],
)
def test_a_limit_that_is_too_long_for_a_wait_is_refused(give: Callable[[float], object], bad: float) -> None:
    with pytest.raises(ConfigurationError, match="up to 1000000"):
        give(bad)
