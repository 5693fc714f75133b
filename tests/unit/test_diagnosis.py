"""The diagnosis of `dualwrite doctor`: from facts to the guarantee and to findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from dualwrite.diagnosis import DatabaseFacts, Finding, Guarantee, Severity, judge_database
from dualwrite.diagnosis.findings import Promise, duration, promise
from dualwrite.diagnosis.kafka_findings import judge_kafka, judge_retention, judge_topic, judge_two_phase, records_last
from dualwrite.kafka import BrokerCapabilities, TwoPhaseObstacle
from dualwrite.kafka.inspect import TRANSACTION_STATE_TOPIC, Retention, TopicFacts
from fixtures.capabilities import EVERYTHING
from fixtures.tables import table

BROKEN, WEAK, UNKNOWN, NOTE = Severity
BEST = replace(EVERYTHING, brokers=3)
PLAIN = replace(BEST, two_phase=False, two_phase_obstacle=TwoPhaseObstacle.SWITCHED_OFF, two_phase_setting=False)
LEVEL_1 = replace(BEST, transaction_version=1)
OLD = replace(
    PLAIN,
    transaction_version=0,
    end_txn_v5=False,
    init_producer_id_v6=False,
    produce_v12=False,
    two_phase_obstacle=TwoPhaseObstacle.BROKER_TOO_OLD,
    two_phase_setting=None,
)
GOOD = TopicFacts(
    "orders",
    exists=True,
    partitions=6,
    replicas=3,
    in_sync=3,
    writable=True,
    min_insync_replicas=2,
    unclean_leader_election=False,
    max_message_bytes=1_048_588,
)
POSTGRESQL = {
    "fsync": "on",
    "full_page_writes": "on",
    "synchronous_commit": "on",
    "synchronous_standby_names": "s1",
    "transaction_read_only": "off",
    "persistence": "p",
    "attached standbys": "1",
    "synchronous standbys": "1",
}


def told(findings: Iterable[Finding]) -> list[tuple[Severity, str]]:
    return [(finding.severity, f"{finding.what} | {finding.change}") for finding in findings]


def only(findings: list[Finding]) -> tuple[Severity, str]:
    (one,) = told(findings)
    return one


# --- the guarantee ----------------------------------------------------------------------------------------------------


@table(
    ("capabilities", "producer", "expected"),
    [
        (BEST, "auto", Promise(Guarantee.TWO_PHASE, "native", None)),
        (BEST, "native", Promise(Guarantee.TWO_PHASE, "native", None)),
        (BEST, "librdkafka", Promise(Guarantee.BOUNDED, "librdkafka", 900_000)),
        (PLAIN, "auto", Promise(Guarantee.BOUNDED, "native", 900_000)),
        (LEVEL_1, "auto", Promise(Guarantee.BOUNDED, "librdkafka", 900_000)),
        (OLD, "auto", Promise(Guarantee.BOUNDED, "librdkafka", 900_000)),
        (replace(PLAIN, transaction_max_timeout_ms=None), "auto", Promise(Guarantee.BOUNDED, "native", None)),
    ],
)
def test_the_guarantee_follows_from_cluster_and_producer(
    capabilities: BrokerCapabilities, producer: str, expected: Promise
) -> None:
    assert promise(capabilities, producer=producer, transaction_timeout_ms=None) == expected


def test_a_timeout_of_the_user_is_the_budget() -> None:
    assert promise(PLAIN, producer="auto", transaction_timeout_ms=90_000).budget_ms == 90_000


def test_a_bounded_guarantee_names_its_limit_and_its_consequence() -> None:
    text = str(Promise(Guarantee.BOUNDED, "librdkafka", 900_000))
    assert "here 15 min" in text
    assert "LOST and reported, never silent" in text
    assert "here" not in str(Promise(Guarantee.BOUNDED, "librdkafka", None))
    assert "Nothing is lost" in str(Promise(Guarantee.TWO_PHASE, "native", None))


@table(("milliseconds", "text"), [(1500, "1.5 s"), (60_000, "60 s"), (90_000, "90 s"), (120_000, "2 min"), (900_000, "15 min")])
def test_durations_are_readable(milliseconds: int, text: str) -> None:
    assert duration(milliseconds) == text


# --- Kafka ------------------------------------------------------------------------------------------------------------


def test_a_cluster_with_everything_has_no_findings() -> None:
    assert judge_kafka(BEST) == []


@pytest.mark.parametrize(
    ("capabilities", "producer", "words"),
    [
        (BEST, "auto", []),
        (replace(BEST, checks_markers=False), "auto", ["KAFKA-19446"]),
        (replace(BEST, checks_markers=False), "librdkafka", ["With librdkafka the markers"]),
        (BEST, "librdkafka", ["With librdkafka the markers"]),
        (LEVEL_1, "auto", ["With librdkafka the markers"]),
    ],
)
def test_a_cluster_or_a_producer_whose_late_markers_do_harm(
    capabilities: BrokerCapabilities, producer: str, words: list[str]
) -> None:
    found = [finding for finding in judge_kafka(capabilities, producer=producer) if "can end the id's next" in finding.what]
    assert [(one.severity, word in one.what) for one, word in zip(found, words, strict=True)] == [(WEAK, True)] * len(words)


@pytest.mark.parametrize(("metadata_version", "affected"), [(27, False), (29, False), (30, True), (31, True)])
def test_a_release_that_skips_markers(metadata_version: int, affected: bool) -> None:
    found = judge_kafka(replace(BEST, metadata_version=metadata_version))
    assert [(one.severity, "KAFKA-20734" in one.what) for one in found] == [(WEAK, True)] * affected


KAFKA_4_0 = ["metadata.version is that of Kafka 4.0, and the native producer needs 4.1", "upgrade the brokers"]


@table(
    ("capabilities", "options", "severity", "words"),
    [
        (replace(PLAIN, metadata_level=25), {}, NOTE, KAFKA_4_0),  # of a newer release, too, while brokers of 4.0 may be left
        (replace(PLAIN, metadata_level=25), {"producer": "native"}, BROKEN, KAFKA_4_0),
        (replace(BEST, metadata_level=25), {"two_phase": False}, NOTE, ["only librdkafka can be used"]),
        (LEVEL_1, {}, NOTE, ["only librdkafka", "kafka-features.sh upgrade"]),
        (OLD, {}, NOTE, ["upgrade the brokers"]),
        (OLD, {"producer": "native"}, BROKEN, ["upgrade the brokers"]),
        (BEST, {"producer": "librdkafka"}, NOTE, ["two-phase commit", "producer=auto"]),
        (BEST, {"transaction_timeout_ms": 60_000}, BROKEN, ["KIP-939"]),
        (LEVEL_1, {"transaction_timeout_ms": 900_001}, BROKEN, ["900000 at most"]),
        (LEVEL_1, {"transaction_timeout_ms": 30_000}, WEAK, ["30 s"]),
        (replace(LEVEL_1, transaction_max_timeout_ms=20_000), {}, WEAK, ["the brokers' transaction.max.timeout.ms"]),
    ],
)
def test_what_a_cluster_or_a_setting_prevents_is_reported(
    capabilities: BrokerCapabilities, options: dict[str, Any], severity: Severity, words: list[str]
) -> None:
    found = told(judge_kafka(capabilities, **options))
    assert [one for one, text in found if all(word in text for word in words)] == [severity]


def test_a_timeout_within_the_limit_of_the_broker_is_not_reported() -> None:
    assert len(judge_kafka(LEVEL_1, transaction_timeout_ms=600_000)) == 2  # the level, and what librdkafka's markers are
    assert len(judge_kafka(replace(LEVEL_1, transaction_max_timeout_ms=None), transaction_timeout_ms=600_000)) == 2


def test_two_phase_commit_does_not_depend_on_the_metadata_version() -> None:
    """Nothing times out, so no epoch is raised by two; the coordinator that accepts it is 4.1 or newer."""
    found = replace(BEST, metadata_level=25)
    assert judge_kafka(found) == []
    assert promise(found, producer="auto", transaction_timeout_ms=None).guarantee is Guarantee.TWO_PHASE
    assert promise(replace(PLAIN, metadata_level=25), producer="auto", transaction_timeout_ms=None).producer == "librdkafka"


@table("obstacle", TwoPhaseObstacle)
def test_every_obstacle_to_two_phase_commit_is_reported_with_its_remedy(obstacle: TwoPhaseObstacle) -> None:
    severity, text = only(judge_kafka(replace(PLAIN, two_phase_obstacle=obstacle, two_phase_setting=None)))
    assert severity is NOTE
    assert obstacle.value in text
    assert text.endswith("| None") is (obstacle is TwoPhaseObstacle.UNKNOWN)


@pytest.mark.parametrize(
    ("obstacle", "setting", "wanted", "unwanted"),
    [
        (TwoPhaseObstacle.SWITCHED_OFF, False, ["transaction.two.phase.commit.enable=true"], ["unstable"]),
        (TwoPhaseObstacle.UNSTABLE_VERSIONS_OFF, True, ["unstable.api.versions.enable=true"], ["phase.commit.enable"]),
        (
            TwoPhaseObstacle.UNSTABLE_VERSIONS_OFF,
            False,
            ["transaction.two.phase.commit.enable=true", "unstable.api.versions.enable=true"],
            [],
        ),
        (TwoPhaseObstacle.FORBIDDEN, True, ["TwoPhaseCommit"], ["enable=true"]),
    ],
)
def test_only_the_settings_that_are_missing_are_named(
    obstacle: TwoPhaseObstacle, setting: bool, wanted: list[str], unwanted: list[str]
) -> None:
    (finding,) = judge_kafka(replace(PLAIN, two_phase_obstacle=obstacle, two_phase_setting=setting))
    assert finding.change is not None
    assert [text for text in wanted if text not in finding.change] == []
    assert [text for text in unwanted if text in finding.change] == []


# --- topics -----------------------------------------------------------------------------------------------------------


def test_a_safe_topic_has_no_findings() -> None:
    assert judge_topic(GOOD) == []
    assert judge_topic(replace(GOOD, name=TRANSACTION_STATE_TOPIC, writable=False, max_message_bytes=1000)) == []


@table(
    ("changes", "severity", "words"),
    [
        ({"replicas": 1, "in_sync": 1, "min_insync_replicas": 1}, WEAK, "one replica"),
        ({"replicas": 1, "in_sync": 1, "min_insync_replicas": None}, WEAK, "in a power failure"),
        ({"min_insync_replicas": 1}, WEAK, "min.insync.replicas is 1"),
        ({"min_insync_replicas": 3}, NOTE, "one broker down stops every write"),
        ({"min_insync_replicas": 4}, BROKEN, "no message can be acknowledged"),
        ({"replicas": 1, "in_sync": 1, "min_insync_replicas": 2}, BROKEN, "min.insync.replicas=1"),
        ({"in_sync": 1}, BROKEN, "Only 1 of 3 replicas are in sync"),
        ({"without_leader": 2}, BROKEN, "2 of 6 partitions have no leader"),
        ({"unclean_leader_election": True}, WEAK, "unclean.leader.election.enable=false"),
        ({"writable": False}, BROKEN, "Write"),
        ({"max_message_bytes": 999_999}, NOTE, "message.max.bytes=999999"),
    ],
)
def test_problems_of_a_topic_are_reported(changes: dict[str, Any], severity: Severity, words: str) -> None:
    found, text = only(judge_topic(replace(GOOD, **changes)))
    assert found is severity
    assert words in text


def test_what_is_hidden_is_not_called_safe() -> None:
    hidden = replace(GOOD, min_insync_replicas=None, unclean_leader_election=None, max_message_bytes=None, writable=None)
    severity, text = only(judge_topic(hidden))
    assert severity is UNKNOWN
    assert "min.insync.replicas and unclean.leader.election.enable can't be read: whether an acknowledged message" in text
    assert "DescribeConfigs" in text
    severity, text = only(judge_topic(replace(hidden, name=TRANSACTION_STATE_TOPIC, min_insync_replicas=2)))
    assert severity is UNKNOWN
    assert text.startswith("unclean.leader.election.enable can't be read: whether the outcome of a transaction")
    severity, text = only(judge_kafka(replace(PLAIN, transaction_max_timeout_ms=None, two_phase_obstacle=None))[:1])
    assert severity is UNKNOWN
    assert "a broker with a lower maximum rejects them" in text


def test_internal_topics_are_judged_by_their_content() -> None:
    own = replace(GOOD, name=TRANSACTION_STATE_TOPIC, replicas=1, in_sync=1, min_insync_replicas=1)
    severity, text = only(judge_topic(own))
    assert severity is WEAK
    assert "outcome of a transaction" in text
    assert "transaction.state.log.replication.factor" in text


WEEK_MS, HOUR_MS = 7 * 86_400_000, 3_600_000
KEPT = Retention(
    deletes=True, compacts=False, retention_ms=WEEK_MS, retention_bytes=None, min_compaction_lag_ms=0, segment_ms=WEEK_MS
)
BOUNDED = Promise(Guarantee.BOUNDED, "native", 900_000)


@pytest.mark.parametrize(
    ("changes", "lasts", "severity", "words"),
    [
        ({}, "7 days", None, ""),
        ({"retention_ms": None}, "no limit", None, ""),
        ({"retention_ms": 24 * HOUR_MS}, "24 h", None, ""),
        ({"retention_ms": 23 * HOUR_MS}, "23 h", WEAK, "Its records last 23 h: later, the messages of a transaction"),
        ({"retention_ms": 90_000}, "90 s", WEAK, "retention.ms=604800000 (7 days)"),
        ({"retention_bytes": 5000}, "7 days, 5000 bytes", NOTE, "retention.bytes is 5000 for each partition"),
        ({"deletes": False, "compacts": True}, "until compacted", WEAK, "closed. That is after 7 days (segment.ms)"),
        ({"deletes": False, "compacts": True, "min_compaction_lag_ms": 24 * HOUR_MS}, "until compacted", None, ""),
        (
            {"compacts": True, "min_compaction_lag_ms": HOUR_MS},
            "7 days, until compacted",
            WEAK,
            "closed, and 60 min after they were written (min.compaction.lag.ms)",
        ),
    ],
)
def test_how_long_records_last_is_told(changes: dict[str, Any], lasts: str, severity: Severity | None, words: str) -> None:
    kept = replace(KEPT, **changes)
    topic = replace(GOOD, retention=kept)
    assert records_last(kept) == lasts
    findings = judge_retention(topic, BOUNDED)
    assert (only(findings)[0] if findings else None) is severity
    assert words in (only(findings)[1] if findings else "")
    assert judge_retention(topic, Promise(Guarantee.TWO_PHASE, "native", None)) == []
    assert judge_retention(topic, None) == []
    assert judge_retention(replace(topic, name=TRANSACTION_STATE_TOPIC), BOUNDED) == []
    assert judge_retention(replace(topic, exists=False), BOUNDED) == []


def test_retention_that_is_hidden_is_unknown() -> None:
    severity, text = only(judge_retention(GOOD, BOUNDED))
    assert severity is UNKNOWN
    assert "retention settings can't be read" in text
    assert "DescribeConfigs" in text
    settings = {
        "cleanup.policy": "delete",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "min.compaction.lag.ms": "0",
        "segment.ms": "604800000",
    }
    assert Retention.of(settings) == replace(KEPT, retention_ms=None)
    assert all(Retention.of({n: v for n, v in settings.items() if n != name}) is None for name in settings)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"made_at_first_use": True}, WEAK),
        ({"made_at_first_use": False}, BROKEN),
        ({"made_at_first_use": None}, BROKEN),
        ({"error": "TOPIC_AUTHORIZATION_FAILED"}, BROKEN),
    ],
)
def test_a_missing_topic_is_broken_unless_the_broker_creates_it(facts: dict[str, Any], expected: Severity) -> None:
    missing = TopicFacts("orders", exists=False, **facts)
    assert only(judge_topic(missing))[0] is expected
    severity, text = only(judge_topic(replace(missing, name=TRANSACTION_STATE_TOPIC)))
    assert severity is UNKNOWN
    assert "outcome of a transaction" in text


def test_the_size_limit_of_the_producer_is_considered() -> None:
    assert judge_topic(replace(GOOD, max_message_bytes=5000), message_max_bytes=5000) == []
    assert len(judge_topic(GOOD, message_max_bytes=10_000_000)) == 1


# --- the database -----------------------------------------------------------------------------------------------------


def judged(settings: dict[str, str], **facts: Any) -> list[Finding]:
    return judge_database(DatabaseFacts("db", **{"revision": "0001", "newest_revision": "0001", **facts}, settings=settings))


def test_a_durable_database_has_no_findings() -> None:
    assert judged(POSTGRESQL) == []
    assert judged({"synchronous": "full", "journal_mode": "wal"}) == []
    assert judged({"synchronous": "extra", "journal_mode": "delete"}) == []
    assert judged({"synchronous": "full", "journal_mode": "truncate"}) == []
    assert judged({"synchronous": "full", "journal_mode": "wal", "fullfsync": "on"}) == []
    assert judged(POSTGRESQL | {"synchronous_standby_names": "FIRST 2 (s1, s2)", "synchronous standbys": "2"}) == []
    assert judged({"sync": "true", "disable_wal": "false", "wal_recovery_mode": "kPointInTimeRecovery"}) == []


@table(
    ("changes", "severity", "words"),
    [
        ({"synchronous_commit": "off"}, WEAK, "without their rows"),
        ({"fsync": "off"}, WEAK, "fsync=on"),
        ({"full_page_writes": "off"}, WEAK, "full_page_writes=on"),
        ({"synchronous_commit": "local"}, WEAK, "standby"),
        ({"synchronous_standby_names": "", "synchronous_commit": "local"}, WEAK, "does not wait for an attached standby (1)"),
        ({"synchronous_standby_names": "", "attached standbys": "2"}, WEAK, "does not wait for an attached standby (2)"),
        ({"synchronous_standby_names": "", "attached standbys": "0"}, NOTE, "None is attached at present"),
        ({"synchronous_commit": "remote_write"}, WEAK, "has it in memory"),
        ({"synchronous_commit": "quorum"}, UNKNOWN, "whether a commit waits for a standby is not known"),
        ({"synchronous_standby_names": "ANY 1 (s1, s2)"}, UNKNOWN, "waits for 1 of the standbys 'ANY 1 (s1, s2)'"),
        ({"synchronous_standby_names": "*"}, UNKNOWN, "Patroni"),
        ({"attached standbys": "2"}, UNKNOWN, "If another one is promoted"),
        ({"synchronous standbys": "0"}, BROKEN, "every COMMIT hangs now"),
        ({"synchronous_standby_names": "2 (s1, s2)"}, BROKEN, "waits for 2 of '2 (s1, s2)', and 1 of them are attached"),
        ({"persistence": "u"}, BROKEN, "SET LOGGED"),
        ({"product": "Amazon Aurora", "synchronous_standby_names": ""}, UNKNOWN, "This is Amazon Aurora"),
        ({"transaction_read_only": "on", "fsync": "off"}, BROKEN, "is read-only"),
    ],
)
def test_postgresql_that_may_lose_a_commit_is_reported(changes: dict[str, str], severity: Severity, words: str) -> None:
    found, text = only(judged(POSTGRESQL | changes))
    assert found is severity
    assert words in text


@table(
    ("level", "mode", "words"),
    [
        ("off", "wal", "synchronous is off"),
        ("normal", "wal", "without their rows"),
        ("normal", "delete", "may corrupt"),
        ("full", "delete", "roll it back"),
        ("full", "memory", "in the middle of a transaction"),
        ("extra", "off", "in the middle of a transaction"),
        ("full", "wal2", "does not know what that means"),
    ],
)
def test_sqlite_that_may_lose_a_commit_is_reported(level: str, mode: str, words: str) -> None:
    severity, text = only(judged({"synchronous": level, "journal_mode": mode}))
    assert severity is (UNKNOWN if mode == "wal2" else WEAK)
    assert words in text


def test_fsync_of_macos_is_not_taken_for_a_flush() -> None:
    severity, text = only(judged({"synchronous": "full", "journal_mode": "wal", "fullfsync": "off"}))
    assert severity is WEAK
    assert "PRAGMA fullfsync = ON" in text


MYSQL = {
    "engine": "InnoDB",
    "innodb_flush_log_at_trx_commit": "1",
    "innodb_doublewrite": "ON",
    "read_only": "OFF",
    "log_bin": "ON",
    "sync_binlog": "1",
    "rpl_semi_sync_source_enabled": "ON",
    "rpl_semi_sync_source_timeout": "4294967295",
    "rpl_semi_sync_source_wait_point": "AFTER_SYNC",
    "Rpl_semi_sync_source_status": "ON",
    "wsrep_on": "ON",  # as Percona's server has it, without a provider
    "wsrep_provider": "none",
}
GALERA = {"wsrep_on": "ON", "wsrep_provider": "/usr/lib/galera/libgalera_smm.so"}
GROUP = {
    "group_replication_group_name": "aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa",
    "group_replication_single_primary_mode": "ON",
    "group_replication_consistency": "BEFORE_ON_PRIMARY_FAILOVER",
}


def test_a_durable_mysql_has_no_findings() -> None:
    assert judged(MYSQL) == []
    assert judged(MYSQL | {"log_bin": "OFF", "sync_binlog": "0", "rpl_semi_sync_source_enabled": "OFF"}) == []
    assert judged(MYSQL | {"innodb_flush_log_at_trx_commit": "3"}) == []


@table(
    ("changes", "severity", "words"),
    [
        ({"engine": "MyISAM"}, BROKEN, "ENGINE=InnoDB"),
        ({"read_only": "ON", "innodb_doublewrite": "OFF"}, BROKEN, "is read-only (read_only)"),
        ({"transaction_read_only": "ON"}, BROKEN, "is read-only"),
        ({"innodb_flush_log_at_trx_commit": "2"}, WEAK, "without their rows"),
        ({"innodb_doublewrite": "0"}, WEAK, "innodb_doublewrite=ON"),
        ({"innodb_doublewrite": "DETECT_ONLY"}, WEAK, "innodb_doublewrite=ON"),
        ({"innodb_doublewrite": "fast"}, UNKNOWN, "ON is safe"),
        ({"innodb_flush_method": "nosync"}, WEAK, "innodb_flush_method=O_DIRECT"),
        ({"Innodb_redo_log_enabled": "OFF"}, WEAK, "ENABLE INNODB REDO_LOG"),
        ({"innodb_read_only": "ON"}, BROKEN, "is read-only (innodb_read_only)"),
        ({"sync_binlog": "0"}, WEAK, "without their rows"),
        ({"sql_log_bin": "OFF"}, WEAK, "never reach a replica"),
        ({"rpl_semi_sync_source_enabled": "OFF"}, NOTE, "waits for no replica"),
        ({"rpl_semi_sync_source_enabled": "OFF", "Slaves_connected": "2"}, WEAK, "does not wait for an attached replica (2)"),
        ({"rpl_semi_sync_source_timeout": "10000"}, WEAK, "within 10 s (rpl_semi_sync_source_timeout)"),
        ({"rpl_semi_sync_source_timeout": ""}, UNKNOWN, "can't be read"),
        ({"rpl_semi_sync_source_wait_point": "AFTER_COMMIT"}, WEAK, "before a replica has it"),
        ({"rpl_semi_sync_source_wait_no_replica": "OFF"}, WEAK, "as soon as too few replicas"),
        ({"Rpl_semi_sync_source_status": "OFF"}, WEAK, "off at present"),
        (GALERA, WEAK, "loses committed transactions"),
        (GALERA | {"log_bin": "OFF"}, WEAK, "use the same one node"),
        (GROUP, UNKNOWN, "in the memory of a majority"),
        (GROUP | {"group_replication_consistency": "EVENTUAL"}, WEAK, "before it has applied the last commits"),
        (GROUP | {"group_replication_single_primary_mode": "OFF"}, WEAK, "several primaries"),
        ({"product": "TiDB", "rpl_semi_sync_source_timeout": "1"}, UNKNOWN, "This is TiDB"),
    ],
)
def test_mysql_that_may_lose_a_commit_is_reported(changes: dict[str, str], severity: Severity, words: str) -> None:
    found, text = only(judged(MYSQL | changes))
    assert found is severity
    assert words in text


@table(
    ("settings", "expected"),
    [
        ({}, [(UNKNOWN, "does not show whether an acknowledged commit is durable")]),
        ({"forceSync": "not visible", "mode": "follower"}, [(UNKNOWN, "forceSync")]),
        ({"forceSync": "not visible", "mode": "standalone"}, [(UNKNOWN, "forceSync"), (WEAK, "One server, no ensemble")]),
        ({"forceSync": "not visible"}, [(UNKNOWN, "forceSync"), (UNKNOWN, "4lw.commands.whitelist")]),
        ({"sync": "true", "disable_wal": "false", "env": "none of this file system"}, [(UNKNOWN, "in memory")]),
        ({"disable_wal": "false", "wal_recovery_mode": "kSkipAnyCorruptedRecords"}, [(WEAK, "skips damaged records")]),
    ],
)
def test_a_store_without_tables_is_judged_by_what_it_shows(
    settings: dict[str, str], expected: list[tuple[Severity, str]]
) -> None:
    found = told(judged(settings, revision=None, newest_revision=None))
    assert [severity for severity, _ in found] == [severity for severity, _ in expected]
    assert all(words in text for (_, text), (_, words) in zip(found, expected, strict=True))


def test_the_table_is_judged_by_use_before_revision() -> None:
    missing = judged(POSTGRESQL, table_error=("It is missing.", "upgrade"), revision=None)
    assert only(missing) == (BROKEN, "It is missing. | upgrade")
    assert only(judged(POSTGRESQL, revision="0000"))[0] is WEAK
    assert only(judged(POSTGRESQL, revision=None))[0] is NOTE


# --- two-phase commit on every broker ---------------------------------------------------------------------------------


def test_a_broker_without_two_phase_commit_is_reported_or_one_whose_setting_is_not_known() -> None:
    assert judge_two_phase({1: True, 2: True}) == []
    severity, text = only(judge_two_phase({1: True, 2: False, 3: None, 4: False}))
    assert severity is WEAK
    assert "off on brokers 2, 4" in text
    assert "unstable.api.versions.enable=true on every broker" in text
    severity, text = only(judge_two_phase({1: True, 2: None}))
    assert (severity, "could not be read for broker 2" in text) == (UNKNOWN, True)
