"""From facts to findings: what is broken, what weakens the guarantee, what improves it. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from dualwrite.diagnosis.promise import LIBRDKAFKA, NATIVE, Guarantee, duration, promise
from dualwrite.kafka.inspect.capabilities import BrokerCapabilities, TwoPhaseObstacle
from dualwrite.kafka.inspect.topics import TRANSACTION_STATE_TOPIC, TopicFacts

_SHORT_BUDGET_MS: Final = 60_000
_DEFAULT_MESSAGE_MAX_BYTES: Final = 1_000_000  # librdkafka's message.max.bytes


class Severity(Enum):
    """How much a finding matters, most severe first."""

    BROKEN = "broken"
    """Dual writes can't work with this setup."""

    WEAK = "weak"
    """Dual writes work, but acknowledged data may still be lost, or is lost more easily than necessary."""

    NOTE = "note"
    """Worth knowing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Args:
        severity: How much it matters.
        about: What it concerns: `kafka`, `topic <name>` or `database`.
        what: The finding, as a sentence.
        change: The setting or step that fixes it, if there is one.
    """

    severity: Severity
    about: str
    what: str
    change: str | None = None


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """A database that could be reached.

    Args:
        address: Its address for people, without the password.
        revision: The revision that dualwrite's migrations recorded in it, or None.
        newest_revision: The newest revision of this release; None for a database without migrations (RocksDB, ZooKeeper).
        table_error: Why the table can't be used, and the step that fixes it; None if it can be used.
        settings: The settings that decide whether an acknowledged commit is durable; see `TxnStateStore.durability`.
        copied: The finding for a database that was copied or moved, and whether that is certain; None for any other.
        why_no_marks: Why a copy of the database can't be recognised, if so; see `TxnStateStore.why_no_marks`.
        elsewhere: Ids that are on another Kafka cluster than the inspected one.
    """

    address: str
    revision: str | None
    newest_revision: str | None
    table_error: tuple[str, str | None] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    copied: tuple[str, bool] | None = None
    why_no_marks: str | None = None
    elsewhere: tuple[str, ...] = ()


# --- Kafka --------------------------------------------------------------------------------------------------------------


def judge_kafka(
    capabilities: BrokerCapabilities,
    *,
    producer: str = "auto",
    transaction_timeout_ms: int | None = None,
    two_phase: bool | None = None,
) -> list[Finding]:
    """The findings about the cluster for a writer with these settings; arguments as for `promise`."""
    found = [*_producer(capabilities, producer), *_timeout(capabilities, producer, transaction_timeout_ms, two_phase)]
    if two_phase and (producer == LIBRDKAFKA or not (capabilities.native and capabilities.two_phase)):
        found.append(
            _kafka(Severity.BROKEN, "two_phase=true requires two-phase commit, which is not available here.", "two_phase")
        )
    if capabilities.native and not capabilities.two_phase:
        found.append(_two_phase(capabilities))
    if capabilities.may_skip_markers:
        found.append(_kafka(Severity.WEAK, _MARKERS_SKIPPED, "three replicas of each topic; a release that fixes it, or 4.2.2"))
    return found


_MARKERS_SKIPPED: Final = (
    "Kafka 4.3.0 to 4.4.0 ends a transaction without writing its marker to a partition that has no leader (KAFKA-20734), and "
    "this is 4.3 or newer. Writers and recovery wait for leaders, but can't detect one that is lost during a commit."
)


def _producer(capabilities: BrokerCapabilities, producer: str) -> list[Finding]:
    if capabilities.native:
        if producer != LIBRDKAFKA:
            return []
        gain = "two-phase commit and one epoch for each transaction" if capabilities.two_phase else "one epoch per transaction"
        return [_kafka(Severity.NOTE, f"producer=librdkafka is set; the native producer has {gain} here.", "producer=auto")]
    level = capabilities.transaction_version
    if capabilities.end_txn_v5 and capabilities.produce_v12:
        change = "kafka-features.sh upgrade --feature transaction.version=2"
    else:
        change = "upgrade the brokers to Apache Kafka 4.1 or newer, then: kafka-features.sh upgrade --release-version <theirs>"
    severity = Severity.BROKEN if producer == NATIVE else Severity.NOTE
    what = f"transaction.version is {level}, and the native producer needs 2: only librdkafka can be used"
    return [_kafka(severity, f"{what}, without two-phase commit.", change)]


def _timeout(capabilities: BrokerCapabilities, producer: str, timeout_ms: int | None, two_phase: bool | None) -> list[Finding]:
    promised = promise(capabilities, producer=producer, transaction_timeout_ms=timeout_ms, two_phase=two_phase)
    if promised.guarantee is Guarantee.TWO_PHASE:
        if timeout_ms is None:
            return []
        what = f"transaction.timeout.ms is set to {timeout_ms}; with two-phase commit no transaction times out (KIP-939)."
        return [_kafka(Severity.BROKEN, what, "remove transaction.timeout.ms from the settings, or set two_phase=false")]
    limit = capabilities.transaction_max_timeout_ms
    if timeout_ms is not None and limit is not None and timeout_ms > limit:
        what = f"transaction.timeout.ms is {timeout_ms}, but the broker allows {limit} at most: it rejects every producer."
        return [_kafka(Severity.BROKEN, what, "lower or remove it, or raise the brokers' transaction.max.timeout.ms")]
    if promised.budget_ms is not None and promised.budget_ms < _SHORT_BUDGET_MS:
        what = f"A crashed transaction must be recovered within {duration(promised.budget_ms)} of its first message."
        is_set = timeout_ms is not None
        change = "remove transaction.timeout.ms" if is_set else "raise the brokers' transaction.max.timeout.ms"
        return [_kafka(Severity.WEAK, what, f"{change}; consumers wait only until recovery, not for the whole timeout")]
    return []


_SWITCH_ON: Final = "transaction.two.phase.commit.enable=true"
_UNSTABLE_ON: Final = "unstable.api.versions.enable=true"
_GRANT: Final = "grant the principal TwoPhaseCommit on its transactional ids (kafka-acls.sh --operation TwoPhaseCommit)"
_REMEDIES: Final[Mapping[TwoPhaseObstacle, str]] = {
    TwoPhaseObstacle.BROKER_TOO_OLD: f"Apache Kafka 4.1 or newer, with {_SWITCH_ON} and {_UNSTABLE_ON} on every broker",
    TwoPhaseObstacle.UNSTABLE_VERSIONS_OFF: f"{_UNSTABLE_ON} on every broker",
    TwoPhaseObstacle.NO_INIT_PRODUCER_ID_V6: f"Apache Kafka 4.1 or newer, with {_SWITCH_ON} and {_UNSTABLE_ON} on every broker",
    TwoPhaseObstacle.SWITCHED_OFF: f"{_SWITCH_ON} on every broker; where the cluster has ACLs, also {_GRANT}",
    TwoPhaseObstacle.FORBIDDEN: _GRANT,
    TwoPhaseObstacle.OFF_OR_FORBIDDEN: f"{_SWITCH_ON} on every broker, or {_GRANT}",
}


def _two_phase(capabilities: BrokerCapabilities) -> Finding:
    obstacle = capabilities.two_phase_obstacle or TwoPhaseObstacle.UNKNOWN
    change = _REMEDIES.get(obstacle)
    if obstacle is TwoPhaseObstacle.UNSTABLE_VERSIONS_OFF and capabilities.two_phase_setting is False:
        change = f"{_SWITCH_ON} and {change}"
    return _kafka(Severity.NOTE, f"Two-phase commit is not available: {obstacle.value}.", change)


def _kafka(severity: Severity, what: str, change: str | None) -> Finding:
    return Finding(severity, "kafka", what, change)


# --- topics -------------------------------------------------------------------------------------------------------------


def judge_topic(topic: TopicFacts, *, message_max_bytes: int = _DEFAULT_MESSAGE_MAX_BYTES) -> list[Finding]:
    """The findings about a topic that a writer sends to, or about the topic in which Kafka stores its transactions.

    Args:
        topic: What is known about it.
        message_max_bytes: The producer's limit for one message.
    """
    if not topic.exists:
        return _missing(topic)
    found = [*_replication(topic), *_sizes(topic, message_max_bytes)]
    if topic.writable is False and topic.name != TRANSACTION_STATE_TOPIC:
        found.append(_topic(topic, Severity.BROKEN, "The principal may not write to it.", "grant it Write on the topic"))
    if topic.without_leader:
        what = f"{topic.without_leader} of {topic.partitions} partitions have no leader: nothing can be written there now."
        found.append(_topic(topic, Severity.BROKEN, what, "see which brokers are down"))
    if topic.unclean_leader_election:
        what = "unclean.leader.election.enable is on: a lagging replica may become leader, and the messages it lacks are lost."
        found.append(_topic(topic, Severity.WEAK, what, "unclean.leader.election.enable=false"))
    return found


def _missing(topic: TopicFacts) -> list[Finding]:
    if topic.name == TRANSACTION_STATE_TOPIC:
        return []  # few principals may describe Kafka's internal topics
    if topic.error is not None:
        what = f"Kafka reports {topic.error} for it."
        return [_topic(topic, Severity.BROKEN, what, "check its name, and that the principal has Describe and Write on it")]
    if topic.made_at_first_use:
        what = "It does not exist; the broker creates it at the first message, with the broker's default replication."
        return [_topic(topic, Severity.WEAK, what, "create it first, with the replication and settings that you want")]
    what = "It does not exist" + (", and the broker does not create topics." if topic.made_at_first_use is False else ".")
    return [_topic(topic, Severity.BROKEN, what, "create it")]


def _replication(topic: TopicFacts) -> list[Finding]:
    replicas, in_sync, least = topic.replicas, topic.in_sync, topic.min_insync_replicas
    if topic.name == TRANSACTION_STATE_TOPIC:
        lost = "the outcome of a transaction"
        advice = "three replicas, min.insync.replicas=2 (new cluster: transaction.state.log.replication.factor, .min.isr)"
    else:
        lost, advice = "an acknowledged message", "three replicas, min.insync.replicas=2"
    severity, what, change = Severity.WEAK, None, advice
    if least is not None and least > replicas:
        severity, change = Severity.BROKEN, f"min.insync.replicas={max(replicas - 1, 1)}, or more replicas"
        what = f"min.insync.replicas is {least}, but there are {replicas} replicas: no message can be acknowledged."
    elif least is not None and in_sync < least:
        severity, change = Severity.BROKEN, "see which brokers are down"
        what = f"Only {in_sync} of {replicas} replicas are in sync, but min.insync.replicas is {least}: writes fail now."
    elif replicas == 1:
        what = f"It has one replica: {lost} is lost with that broker's disk, and nothing works while the broker is down."
    elif least == 1:
        what = f"min.insync.replicas is 1: while the other replicas lag, {lost} is on one disk only."
    elif least == replicas:
        severity = Severity.NOTE
        what = f"min.insync.replicas is {least}, the number of replicas: one broker down stops every write."
    return [] if what is None else [_topic(topic, severity, what, change)]


def _sizes(topic: TopicFacts, message_max_bytes: int) -> list[Finding]:
    limit = topic.max_message_bytes
    if limit is None or limit >= message_max_bytes or topic.name == TRANSACTION_STATE_TOPIC:
        return []
    what = f"Its max.message.bytes is {limit}; the producer allows messages of up to {message_max_bytes} bytes."
    return [_topic(topic, Severity.NOTE, what, f"the topic's max.message.bytes, or the producer's message.max.bytes={limit}")]


def _topic(topic: TopicFacts, severity: Severity, what: str, change: str) -> Finding:
    return Finding(severity, f"topic {topic.name}", what, change)


# --- the database -------------------------------------------------------------------------------------------------------

_CRASH: Final = "a crash of the server or its machine"
_LOST_COMMIT: Final = "may lose acknowledged commits: their messages are then visible without their rows"
_WEAK_VALUES: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("synchronous_commit", "off"): (f"{_CRASH} {_LOST_COMMIT}", "synchronous_commit=on"),
    ("fsync", "off"): ("a power failure may lose acknowledged commits, and corrupt the whole database", "fsync=on"),
    ("full_page_writes", "off"): ("a power failure may corrupt committed pages", "full_page_writes=on"),
}
"""PostgreSQL: by setting and value, what may happen, and the better value."""


def judge_database(database: DatabaseFacts) -> list[Finding]:
    """The findings about the database: its table, and the durability of acknowledged commits."""
    found = []
    if database.table_error is not None:
        what, step = database.table_error
        found.append(_database(Severity.BROKEN, what, step))
    elif database.newest_revision is None:
        pass
    elif database.revision is None:
        what = "The table is complete, but was not created by `dualwrite db upgrade`: keep it up to date yourself."
        found.append(_database(Severity.NOTE, what, None))
    elif database.revision != database.newest_revision:
        what = f"The table is at revision {database.revision}; the newest of this release is {database.newest_revision}."
        found.append(_database(Severity.WEAK, what, "dualwrite db upgrade"))
    if database.copied is not None:
        what, is_sure = database.copied
        step = "`dualwrite db new-store-id` if the original is still in use, else `dualwrite db keep-store-id`"
        found.append(_database(Severity.BROKEN if is_sure else Severity.WEAK, what, step))
    if database.why_no_marks is not None:
        what = f"A copy of this database could not be recognised: {database.why_no_marks}."
        step = "run `dualwrite db new-store-id` on each copy before its first writer starts; PostgreSQL: let the user execute "
        found.append(_database(Severity.NOTE, what, f"{step}pg_control_system()"))
    if database.elsewhere:
        found.append(_on_other_clusters(database.elsewhere))
    return [*found, *_postgresql(database.settings), *_mysql(database.settings), *_sqlite(database.settings)]


_NAMED: Final = 5


def _on_other_clusters(ids: tuple[str, ...]) -> Finding:
    named = ", ".join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")
    what = f"Transactional ids of another Kafka cluster, which can't be used with this one: {named}."
    step = "connect to their cluster; or, if they have moved to this one for good, run `dualwrite db move-cluster`"
    return _database(Severity.BROKEN, what, step)


def _postgresql(settings: Mapping[str, str]) -> list[Finding]:
    if settings.get("transaction_read_only") == "on":
        what = "The database is read-only (transaction_read_only): a standby, or a read-only user."
        return [_database(Severity.BROKEN, what, "connect to the primary, as a user that may write")]
    found = [
        _database(Severity.WEAK, f"{name} is {value}: {consequence}.", change)
        for (name, value), (consequence, change) in _WEAK_VALUES.items()
        if settings.get(name) == value
    ]
    standbys = settings.get("synchronous_standby_names")
    if standbys == "":
        what = "A commit waits for no standby: one that is promoted after a failure may lack the last commits."
        found.append(_database(Severity.NOTE, what, "set synchronous_standby_names, if there are standbys"))
    elif standbys and settings.get("synchronous_commit") == "local":
        what = f"synchronous_commit is local: promoting a standby {_LOST_COMMIT}."
        found.append(_database(Severity.WEAK, what, "synchronous_commit=on"))
    return found


def _mysql(settings: Mapping[str, str]) -> list[Finding]:
    """MariaDB and MySQL, by the names of their variables."""
    if settings.get("engine", "InnoDB") != "InnoDB":
        what = f"The table's engine is {settings['engine']}: without transactions there is no guarantee."
        return [_database(Severity.BROKEN, what, "ALTER TABLE kafka_transaction_state ENGINE=InnoDB")]
    read_only = [name for name in _MYSQL_READ_ONLY if settings.get(name) == "ON"]
    if read_only:
        what = f"The database is read-only ({', '.join(read_only)}): a replica, or a read-only user."
        return [_database(Severity.BROKEN, what, "connect to the primary, as a user that may write")]
    found = []
    if settings.get("innodb_flush_log_at_trx_commit", "1") != "1":
        value = settings["innodb_flush_log_at_trx_commit"]
        what = f"innodb_flush_log_at_trx_commit is {value}: {_CRASH} {_LOST_COMMIT}."
        found.append(_database(Severity.WEAK, what, "innodb_flush_log_at_trx_commit=1"))
    if settings.get("innodb_doublewrite") in ("OFF", "0"):
        what = "innodb_doublewrite is off: a power failure may corrupt committed pages."
        found.append(_database(Severity.WEAK, what, "innodb_doublewrite=ON"))
    return [*found, *_binary_log(settings)]


_MYSQL_READ_ONLY: Final = ("super_read_only", "read_only", "tx_read_only", "transaction_read_only")


def _binary_log(settings: Mapping[str, str]) -> list[Finding]:
    if settings.get("log_bin") != "ON":
        return []
    found = []
    if settings.get("sync_binlog") != "1":
        what = f"sync_binlog is {settings.get('sync_binlog')}: after a power failure, replicas may lack commits that are here."
        found.append(_database(Severity.WEAK, what, "sync_binlog=1"))
    waits = ("rpl_semi_sync_master_enabled", "rpl_semi_sync_source_enabled", "wsrep_on")
    if not any(settings.get(name) == "ON" for name in waits):
        what = "A commit waits for no replica: one that is promoted after a failure may lack the last commits."
        found.append(_database(Severity.NOTE, what, "enable semi-synchronous replication, if there are replicas"))
    return found


def _sqlite(settings: Mapping[str, str]) -> list[Finding]:
    mode, level = settings.get("journal_mode"), settings.get("synchronous")
    if mode is None:
        return []
    if mode in ("off", "memory"):
        what = f"journal_mode is {mode}: a crash in the middle of a transaction may corrupt the database."
        return [_database(Severity.WEAK, what, "PRAGMA journal_mode = WAL")]
    if level == "off":
        what = "synchronous is off: a power failure may lose acknowledged commits, and corrupt the database."
        return [_database(Severity.WEAK, what, "PRAGMA synchronous = FULL")]
    if level == "normal":
        if mode == "wal":
            what = f"synchronous is normal with WAL: a power failure {_LOST_COMMIT}."
        else:
            what = f"synchronous is normal: with journal_mode {mode}, a power failure may corrupt the database."
        return [_database(Severity.WEAK, what, "PRAGMA synchronous = FULL")]
    if level == "full" and mode == "delete":  # the commit is the journal's removal, after which the directory is not synced
        what = "journal_mode is delete: a power failure right after a commit may roll it back."
        return [_database(Severity.WEAK, what, "PRAGMA journal_mode = WAL, or PRAGMA synchronous = EXTRA")]
    return []


def _database(severity: Severity, what: str, change: str | None) -> Finding:
    return Finding(severity, "database", what, change)
