"""The options of the data source, with the names known from Spark's Kafka and JDBC sinks. Does not import Spark."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar, cast, get_args

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

T = TypeVar("T")

KAFKA_PREFIX: Final = "kafka."
NAMES: Final = (
    "url",
    "user",
    "password",
    "dbtable",
    "upsertKeys",
    "stagingSchema",
    "stateSchema",
    "topic",
    "transactionalIdPrefix",
    "jobId",
    "batchId",
    "queryId",
    "numPartitions",
    "producer",
    "twoPhase",
    "markRepublished",
    "observe",
    "traceparent",
    "tracestate",
    "baggage",
    "claimTimeout",
    "kafkaTimeout",
    "deliveryTimeout",
    "commitTimeout",
    "leaseTimeout",
)
"""All options except `kafka.*`; Spark treats option names as case-insensitive."""

_SPARK_OPTIONS: Final = frozenset({"checkpointlocation", "path", "queryname"})
_BY_LOWER: Final = {name.lower(): name for name in NAMES}
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
        reader = _Reader(given)
        problems = [*_unknown(given), *_missing(given, kafka), *_batch_without_job(given)]
        read: dict[str, Any] = {}

        def parse(name: str, how: Callable[[], Any]) -> None:
            try:
                read[name] = how()
            except ConfigurationError as error:
                problems.append(str(error))

        parse("url", lambda: database_url(given["url"], given.get("user"), given.get("password")) if "url" in given else "")
        parse("prefix", lambda: validate_prefix(given["transactionalidprefix"]) if "transactionalidprefix" in given else "")
        parse("producer", lambda: reader.one_of("producer", get_args(ProducerName)) or "auto")
        parse("two_phase", lambda: {"true": True, "false": False, None: None}[reader.one_of("twoPhase", ("true", "false"))])
        parse("marked", lambda: reader.one_of("markRepublished", ("true", "false")) == "true")
        parse("job_id", lambda: validate_job_id(given["jobid"]) if "jobid" in given else None)
        parse("observe", lambda: _function(given["observe"]) if "observe" in given else None)
        parse("batch_id", lambda: reader.integer("batchId", 0))
        parse("num_partitions", lambda: reader.integer("numPartitions", 1))
        for name, option, default in (
            ("claim", "claimTimeout", _LIMITS.claim),
            ("kafka", "kafkaTimeout", _LIMITS.kafka),
            ("delivery", "deliveryTimeout", _LIMITS.for_delivery),
            ("commit", "commitTimeout", DEFAULT_COMMIT_TIMEOUT),
            ("lease", "leaseTimeout", DEFAULT_LEASE_TIMEOUT),
        ):
            parse(name, lambda option=option, default=default: reader.seconds(option, default))  # type: ignore[misc]
        if problems:
            raise ConfigurationError(f"The options of format 'dualwrite' are not valid: {'; '.join(problems)}")
        return cls(
            site=JobSite(
                read["url"],
                kafka,
                producer=cast("ProducerName", read["producer"]),
                two_phase=read["two_phase"],
                timeouts=Timeouts(claim=read["claim"], kafka=read["kafka"], delivery=read["delivery"]),
                commit_timeout=read["commit"],
                lease_timeout=read["lease"],
                schema=given.get("stateschema"),
                mark_republished=read["marked"],
            ),
            frame=FrameSettings(
                given["dbtable"],
                topic=given.get("topic"),
                upsert_keys=tuple(reader.names("upsertKeys")),
                staging_schema=given.get("stagingschema"),
            ),
            prefix=read["prefix"],
            job_id=read["job_id"],
            batch_id=read["batch_id"],
            query_id=given.get("queryid"),
            num_partitions=read["num_partitions"],
            observe=read["observe"],
            carrier=tuple((name, given[name]) for name in _TRACE if name in given),
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


def _function(name: str) -> str:
    module, _, function = name.partition(":")
    if not (function.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ConfigurationError(f"observe must be module:function, not {name!r}")
    return name


def _batch_without_job(given: Mapping[str, str]) -> Iterator[str]:
    """A job with batches keeps its prefix; under a random name it could never return, and nobody else could use the prefix."""
    if "batchid" in given and "jobid" not in given:
        yield "batchId needs jobId"


@dataclass(frozen=True)
class _Reader:
    """Parses one option; the result is None, empty or the default if the option is not set."""

    given: Mapping[str, str]

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str | None:
        text = self.given.get(name.lower())
        if text is not None and text.lower() not in allowed:
            raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, not {text!r}")
        return None if text is None else text.lower()

    def names(self, name: str) -> list[str]:
        return [part.strip() for part in self.given.get(name.lower(), "").split(",") if part.strip()]

    def integer(self, name: str, minimum: int) -> int | None:
        text = self.given.get(name.lower())
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal() and len(text) < 19) or int(text) < minimum:  # noqa: PLR2004  (64 bits)
            raise ConfigurationError(f"{name} must be an integer of at least {minimum}, not {text!r}")
        return int(text)

    def seconds(self, name: str, default: float) -> float:
        text = self.given.get(name.lower())
        try:
            seconds = default if text is None else float(text)
        except ValueError:
            seconds = -1.0
        if not seconds > 0:
            raise ConfigurationError(f"{name} must be a number of seconds greater than 0, not {text!r}")
        return seconds
