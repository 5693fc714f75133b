"""The options of Spark's data source."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyarrow")

from dualwrite.errors import ConfigurationError
from dualwrite.spark.source_options import OPTIONS, SinkOptions, database_url
from fixtures.tables import table

LEAST = {
    "url": "postgresql+psycopg://me:s3cret@db/shop",
    "dbtable": "orders",
    "topic": "orders",
    "kafka.bootstrap.servers": "kafka:9092",
    "transactionalIdPrefix": "orders",
}


def of(**changes: Any) -> SinkOptions:
    return SinkOptions.of({**LEAST, **changes})


def test_the_required_options_are_enough() -> None:
    options = of()
    assert (options.prefix, options.job_id, options.batch_id, options.num_partitions) == ("orders", None, None, None)
    assert options.frame.topic == "orders"
    assert options.frame.upsert_keys == ()
    assert dict(options.site.kafka) == {"bootstrap.servers": "kafka:9092"}
    assert (options.site.producer, options.site.two_phase) == ("auto", None)


def test_names_are_compared_without_case() -> None:
    lower = {name.lower(): value for name, value in {**LEAST, "upsertKeys": "a, b", "twoPhase": "TRUE"}.items()}
    options = SinkOptions.of(lower)
    assert options.frame.upsert_keys == ("a", "b")
    assert options.site.two_phase is True


OTHERS = {
    "url": "postgresql+psycopg://db/other",
    "user": "you",
    "password": "other",
    "dbtable": "others",
    "upsertKeys": "id",
    "stagingSchema": "staging",
    "stateSchema": "ours",
    "topic": "others",
    "transactionalIdPrefix": "others",
    "jobId": "job",
    "batchId": "7",
    "queryId": "query",
    "numPartitions": "3",
    "producer": "native",
    "twoPhase": "true",
    "markRepublished": "true",
    "observe": "service.tracing:install",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1",
    "baggage": "user=1",
    "claimTimeout": "7",
    "kafkaTimeout": "7",
    "deliveryTimeout": "7",
    "commitTimeout": "7",
    "leaseTimeout": "7",
}


@table("name", OPTIONS)
def test_every_option_has_an_effect(name: str) -> None:
    least = {**LEAST, "url": "postgresql+psycopg://me@db/shop"}
    if name == "batchId":
        least["jobId"] = "job"
    assert SinkOptions.of({**least, name: OTHERS[name]}) != SinkOptions.of(least)


def test_secrets_are_not_shown() -> None:
    assert "s3cret" not in repr(of(**{"kafka.sasl.password": "s3cret", "password": "s3cret"}))


@table(
    "url, user, password, expected",
    [
        (
            "jdbc:postgresql://db:5433/a?user=me&password=a%40b&sslmode=x",
            None,
            None,
            "postgresql://me:a%40b@db:5433/a?sslmode=x",
        ),
        ("jdbc:mariadb://db/shop", "me", "p:w", "mariadb://me:p%3Aw@db/shop"),
        ("postgresql+psycopg://you:old@db/shop", "me", None, "postgresql+psycopg://me:old@db/shop"),
        ("sqlite:////data/shop.db", None, None, "sqlite:////data/shop.db"),
    ],
)
def test_urls(url: str, user: str | None, password: str | None, expected: str) -> None:
    assert database_url(url, user, password) == expected


@table(
    "changes, expected",
    [
        ({"url": "nonsense"}, "url can't be parsed"),
        ({"topics": "orders"}, "unknown option topics (did you mean topic?)"),
        ({"batchId": "-1"}, "batchId must be an integer of at least 0, not '-1'"),
        ({"batchId": "7"}, "batchId needs jobId"),
        ({"numPartitions": "0"}, "numPartitions must be an integer of at least 1, not '0'"),
        ({"commitTimeout": "soon"}, "commitTimeout must be a number of seconds greater than 0, not 'soon'"),
        ({"kafkaTimeout": "nan"}, "kafkaTimeout must be a number of seconds greater than 0, not 'nan'"),
        ({"observe": "install"}, "observe must be module:function, not 'install'"),
        ({"twoPhase": "maybe"}, "twoPhase must be one of true, false, not 'maybe'"),
    ],
)
def test_invalid_options(changes: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        of(**changes)
    assert expected in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        SinkOptions.of({"producer": "quick", "dbTabel": "x"})
    for part in (
        "url is missing",
        "dbtable is missing",
        "transactionalIdPrefix is missing",
        "kafka.bootstrap.servers",
        "quick",
    ):
        assert part in str(caught.value)
