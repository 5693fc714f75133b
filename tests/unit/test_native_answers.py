"""What each of Kafka's error codes means for a transaction: retry, look up the broker again, or raise which error."""

from __future__ import annotations

import inspect
import pickle

import kafka.errors
from confluent_kafka import KafkaError

from dualwrite.errors import (
    BrokerAuthorizationError,
    BrokerError,
    BrokerUnavailableError,
    DeliveryError,
    MessageRefusedError,
    MessageTooLargeError,
    ProducerFencedError,
    UnknownTopicError,
)
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.kafka_errors import PERMANENT, error_name
from dualwrite.kafka.librdkafka.librdkafka_errors import broker_error
from dualwrite.kafka.native.native_settings import NativeSettings
from dualwrite.kafka.native.retry_policy import Reaction, failure, reaction_to, retry_pause
from fixtures.tables import table

CODES = sorted(
    {
        code
        for kind in vars(kafka.errors).values()
        if inspect.isclass(kind) and isinstance(code := getattr(kind, "errno", None), int)
    }
)
TRANSIENT = {Reaction.AGAIN, Reaction.LOOK_UP, Reaction.IN_ORDER}

# What the broker may answer to Produce and TxnOffsetCommit and Java's producer retries (RetriableException).
RETRIABLE = [2, 3, 5, 6, 7, 8, 9, 13, 14, 15, 16, 19, 20, 51, 56, 72, 74, 75]


def test_transient_errors_are_retried() -> None:
    assert {reaction_to(code) for code in RETRIABLE} == {Reaction.AGAIN, Reaction.LOOK_UP}


def test_errors_of_a_moved_leader_cause_a_lookup() -> None:
    assert {reaction_to(code) for code in (3, 5, 6, 13, 15, 16, 74, 75)} == {Reaction.LOOK_UP}


def test_other_errors_fail_the_transaction() -> None:
    others = {*CODES, 999, -1} - {0, 10, 18, 45, 46, 59, *RETRIABLE}
    assert {code for code in others if reaction_to(code) is not Reaction.FAILED} == set()


@table(
    ("code", "reaction"),
    [
        (0, Reaction.STORED),
        (46, Reaction.STORED),
        (45, Reaction.IN_ORDER),
        (59, Reaction.IN_ORDER),
        (10, Reaction.SPLIT),
        (18, Reaction.SPLIT),
    ],
)
def test_codes_with_special_verdicts(code: int, reaction: Reaction) -> None:
    assert reaction_to(code) is reaction


@table(
    ("codes", "error"),
    [
        ((47, 48, 49, 90, 22, 25, 82), ProducerFencedError),
        ((10, 18), MessageTooLargeError),
        ((29, 30, 31, 53), BrokerAuthorizationError),
        ((3, 17), UnknownTopicError),
        ((19, 20, 45, 59), DeliveryError),
        ((21, 32, 35, 42, 43, 44, 54, 76, 87), MessageRefusedError),
        ((5, 6, 7, 13, 14, 15, 16), BrokerUnavailableError),
    ],
)
def test_the_error_is_the_one_that_users_catch(codes: tuple[int, ...], error: type[BrokerError]) -> None:
    for code in codes:
        assert type(failure(code, "x", "id")) is error


def test_a_code_without_an_error_of_its_own_is_a_failed_delivery_or_what_the_caller_says() -> None:
    assert type(failure(999, "x", "id")) is DeliveryError
    assert type(failure(999, "x", "id", otherwise=BrokerError)) is BrokerError


def test_a_delivery_is_retriable_by_the_brokers_code() -> None:
    """With both producers: an error that the broker would return again is not retriable."""
    for code in (*CODES, 999):
        native = failure(code, "delivery to topic 't', partition 3", "orders")
        librdkafka = broker_error(KafkaError(code), "orders", "delivery to topic 't'")
        for error in (native, librdkafka):
            assert isinstance(error, MessageRefusedError) is (code in PERMANENT), code
            if isinstance(error, DeliveryError):
                assert error.retriable is (code not in PERMANENT), code


def test_other_errors_are_not_refused_messages() -> None:
    for code in PERMANENT:
        assert type(failure(code, "EndTxn", "orders", otherwise=BrokerError)) is BrokerError, code
        assert type(broker_error(KafkaError(code), "orders", "commit_transaction")) is BrokerError, code


def test_an_error_says_what_for_which_id_and_by_which_code_and_survives_pickling() -> None:
    for code in (*CODES, 999):
        error = failure(code, "delivery to topic 't', partition 3", "orders", message="the broker's words", size=12)
        for read in (error, pickle.loads(pickle.dumps(error))):
            assert (read.code, read.name, read.transactional_id, read.size) == (code, error_name(code), "orders", 12)
            for part in ("topic 't', partition 3", error_name(code), "the broker's words", "'orders'"):
                assert part in str(read)


def test_retries_that_timed_out_have_a_cause_and_a_next_step() -> None:
    codes = [code for code in CODES if reaction_to(code) in TRANSIENT and code not in (2, 51)]
    assert codes
    for code in codes:
        error = failure(code, "x", "id")
        assert error.cause, code
        assert error.next_step, code


def test_the_pause_before_a_retry_doubles_up_to_the_settings_maximum() -> None:
    settings = NativeSettings.of(
        KafkaConfig.of({"bootstrap.servers": "b", "retry.backoff.ms": 100, "retry.backoff.max.ms": 350})
    )
    for attempts, longest in ((1, 0.1), (2, 0.2), (3, 0.35), (1000, 0.35)):
        assert 0.8 * longest <= retry_pause(6, attempts, settings) <= 1.2 * longest


def test_the_pause_while_markers_are_written_does_not_follow_the_settings() -> None:
    settings = NativeSettings.of(KafkaConfig.of({"bootstrap.servers": "b", "retry.backoff.ms": 1000}))
    assert [retry_pause(51, attempts, settings) for attempts in (1, 2, 5, 6, 1000)] == [0.002, 0.004, 0.032, 0.05, 0.05]
