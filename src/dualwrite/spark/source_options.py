"""The options of the data source, with the names known from Spark's Kafka and JDBC sinks. Does not import Spark."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, get_args

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from dualwrite.errors import ConfigurationError
from dualwrite.jobs.job_context import DEFAULT_COMMIT_TIMEOUT, JobSite
from dualwrite.jobs.ledger import DEFAULT_LEASE_TIMEOUT
from dualwrite.jobs.rules import validate_prefix
from dualwrite.observability.tracing import Carrier
from dualwrite.settings import ProducerName, Timeouts
from dualwrite.spark.chunks import validate_job_id
from dualwrite.spark.frame import FrameSettings
from dualwrite.stores.sql.engines import SQL_URL_EXAMPLES

KAFKA_PREFIX: Final = "kafka."

Parser = Callable[[str, str], Any]
"""Parses the text of an option, given its name first. Raises ConfigurationError."""


def _text(_name: str, text: str) -> str:
    return text


def _one_of(*allowed: str) -> Parser:
    def parse(name: str, text: str) -> str:
        if text.lower() not in allowed:
            raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, not {text!r}")
        return text.lower()

    return parse


def _boolean(name: str, text: str) -> Any:
    return _one_of("true", "false")(name, text) == "true"


def _integer(minimum: int) -> Parser:
    def parse(name: str, text: str) -> int:
        if not (text.isascii() and text.isdecimal() and len(text) < 19) or int(text) < minimum:  # noqa: PLR2004  (64 bits)
            raise ConfigurationError(f"{name} must be an integer of at least {minimum}, not {text!r}")
        return int(text)

    return parse


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ConfigurationError(f"{name} must be a number of seconds greater than 0, not {text!r}")
    return seconds


def _names(_name: str, text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _function(name: str, text: str) -> str:
    module, _, function = text.partition(":")
    if not (function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ConfigurationError(f"{name} must be module:function, not {text!r}")
    return text


OPTIONS: Final[Mapping[str, Parser]] = {
    "url": _text,
    "user": _text,
    "password": _text,
    "dbtable": _text,
    "upsertKeys": _names,
    "stagingSchema": _text,
    "stateSchema": _text,
    "topic": _text,
    "transactionalIdPrefix": lambda _, text: validate_prefix(text),
    "jobId": lambda _, text: validate_job_id(text),
    "batchId": _integer(0),
    "queryId": _text,
    "numPartitions": _integer(1),
    "producer": _one_of(*get_args(ProducerName)),
    "twoPhase": _boolean,
    "markRepublished": _boolean,
    "observe": _function,
    "traceparent": _text,
    "tracestate": _text,
    "baggage": _text,
    "claimTimeout": _seconds,
    "kafkaTimeout": _seconds,
    "deliveryTimeout": _seconds,
    "commitTimeout": _seconds,
    "leaseTimeout": _seconds,
}
"""All options except `kafka.*`; Spark treats option names as case-insensitive."""

_SPARK_OPTIONS: Final = frozenset({"checkpointlocation", "path", "queryname"})
_BY_LOWER: Final = {name.lower(): name for name in OPTIONS}
_JDBC: Final = "jdbc:"
_TRACE: Final = ("traceparent", "tracestate", "baggage")
_LIMITS: Final = Timeouts()


@dataclass(frozen=True)
class SinkOptions:
    """The parsed options; `dualwrite.spark` says what each means."""

    site: JobSite
    frame: FrameSettings
    prefix: str
    job_id: str | None = None
    batch_id: int | None = None
    query_id: str | None = None
    num_partitions: int | None = None
    observe: str | None = None
    carrier: Carrier = ()

    @property
    def bound_to(self) -> str:
        """What the job's name stands for; see JobRun."""
        if self.query_id is not None:
            return query_name(self.query_id)
        return f"table {self.frame.dbtable}, topic {self.frame.topic or 'of each row'}"

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Parse the options; names are case-insensitive.

        Raises:
            ConfigurationError: An option is missing, unknown or not valid; the text lists every such option.
        """
        given = {name.lower(): str(value) for name, value in options.items()}
        kafka = {name.removeprefix(KAFKA_PREFIX): value for name, value in given.items() if name.startswith(KAFKA_PREFIX)}
        problems = [*_unknown(given), *_missing(given, kafka), *_batch_without_job(given)]
        read: dict[str, Any] = {}
        for name, parse in OPTIONS.items():
            try:
                if name.lower() in given:
                    read[name] = parse(name, given[name.lower()])
            except ConfigurationError as error:
                problems.append(f"{error}")
        try:
            url = database_url(read["url"], read.get("user"), read.get("password")) if "url" in read else ""
        except ConfigurationError as error:
            problems.append(f"{error}")
        if problems:
            raise ConfigurationError(f"The options of format 'dualwrite' are not valid: {'; '.join(problems)}")
        return cls(
            site=JobSite(
                url,
                kafka,
                producer=read.get("producer", "auto"),
                two_phase=read.get("twoPhase"),
                timeouts=Timeouts(
                    claim=read.get("claimTimeout", _LIMITS.claim),
                    kafka=read.get("kafkaTimeout", _LIMITS.kafka),
                    delivery=read.get("deliveryTimeout", _LIMITS.for_delivery),
                ),
                commit_timeout=read.get("commitTimeout", DEFAULT_COMMIT_TIMEOUT),
                lease_timeout=read.get("leaseTimeout", DEFAULT_LEASE_TIMEOUT),
                schema=read.get("stateSchema"),
                mark_republished=read.get("markRepublished", False),
            ),
            frame=FrameSettings(
                read["dbtable"],
                topic=read.get("topic"),
                upsert_keys=read.get("upsertKeys", ()),
                staging_schema=read.get("stagingSchema"),
            ),
            prefix=read["transactionalIdPrefix"],
            job_id=read.get("jobId"),
            batch_id=read.get("batchId"),
            query_id=read.get("queryId"),
            num_partitions=read.get("numPartitions"),
            observe=read.get("observe"),
            carrier=tuple((name, read[name]) for name in _TRACE if name in read),
        )


def query_name(query_id: str) -> str:
    """A streaming query, as `JobRun.bound_to` names it. Its id is stored in its checkpoint."""
    return f"the query {query_id}"


def database_url(url: str, user: str | None = None, password: str | None = None) -> str:
    """The URL for SQLAlchemy; a JDBC URL is converted. `user` and `password` take precedence over those in the URL.

    Raises:
        ConfigurationError: The URL can't be parsed.
    """
    try:
        parsed = make_url(url.removeprefix(_JDBC))
    except (ArgumentError, ValueError) as error:
        raise ConfigurationError(
            "url can't be parsed.", next_step=f"use a URL such as {SQL_URL_EXAMPLES}, or {_JDBC}postgresql://…"
        ) from error
    if url.startswith(_JDBC):
        parsed = _from_jdbc(parsed)
    if user is not None:
        parsed = parsed.set(username=user)
    if password is not None:
        parsed = parsed.set(password=password)
    return parsed.render_as_string(hide_password=False)


def _from_jdbc(parsed: URL) -> URL:
    """Move user and password, which a JDBC URL has among its parameters, to their place in SQLAlchemy's URL."""
    secrets = {name: str(parsed.query[name]) for name in ("user", "password") if name in parsed.query}
    parsed = parsed.difference_update_query(secrets)
    return parsed.set(username=secrets.get("user"), password=secrets.get("password"))


def _unknown(given: Mapping[str, str]) -> Iterator[str]:
    for name in given:
        if name in _BY_LOWER or name in _SPARK_OPTIONS or name.startswith(KAFKA_PREFIX):
            continue
        close = difflib.get_close_matches(name, _BY_LOWER, 1)
        yield f"unknown option {name}" + (f" (did you mean {_BY_LOWER[close[0]]}?)" if close else "")


def _missing(given: Mapping[str, str], kafka: Mapping[str, str]) -> Iterator[str]:
    for name in ("url", "dbtable", "transactionalIdPrefix"):
        if not given.get(name.lower()):
            yield f"{name} is missing"
    if not kafka.get("bootstrap.servers"):
        yield "kafka.bootstrap.servers is missing"


def _batch_without_job(given: Mapping[str, str]) -> Iterator[str]:
    """A job with batches keeps its prefix; under a random name it could never return, and nobody else could use the prefix."""
    if "batchid" in given and "jobid" not in given:
        yield "batchId needs jobId"
