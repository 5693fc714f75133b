"""What dualwrite promises besides the protocol: where the code of each promise is, and the tests that fail without it."""

from __future__ import annotations

from typing import Final

from removal import Removal

PROMISES: Final = (
    # --- databases and their copies -------------------------------------------------------------------------------------------
    Removal(
        "a copy of a database is refused",
        "stores/base.py",
        "if is_elsewhere and self.detects_copies:",
        "if is_elsewhere and not is_elsewhere:",
        (
            "crash/test_shared_id.py::test_a_copied_file_is_refused_and_can_become_its_own_store",
            "crash/test_shared_id.py::test_a_copied_folder_is_refused",
        ),
    ),
    Removal(
        "a replica that takes over is not taken for a copy",
        "stores/base.py",
        "if is_elsewhere and self.detects_copies:",
        "if is_elsewhere:",
        ("crash/test_shared_id.py::test_a_replica_that_takes_over_is_used_with_a_warning",),
    ),
    Removal(
        "what a takeover ends is reported ABORTED, not NOTHING",
        "recipe/ownership.py",
        "        if found:\n            before =",
        "        if not found:\n            before =",
        ("crash/test_shared_id.py::test_transactions_found_open_during_a_takeover_are_reported_aborted",),
    ),
    Removal(
        "a writer fenced in Kafka only says that another process uses its id",
        "recipe/outcomes.py",
        "    error.cause = (\n",
        "    _ = (\n",
        ("crash/test_shared_id.py::test_a_writer_fenced_in_kafka_while_its_claim_holds_reports_a_possible_copy",),
    ),
    # --- ids that others claim ------------------------------------------------------------------------------------------------
    Removal(
        "a fenced producer asks the row who has claimed the id",
        "recipe/lane.py",
        "        if isinstance(error, ProducerFencedError):\n            error = self._told_by_row(error)\n",
        "",
        ("pool/test_fencing.py::test_an_id_that_is_claimed_while_a_unit_runs",),
    ),
    Removal(
        "a call of a pool that has not begun goes on when its id was claimed",
        "pool/writers.py",
        "return self._ids.are_leased and not limit.expired",
        "return self._ids.are_leased and limit.expired",
        ("pool/test_fencing.py::test_an_id_that_is_claimed_before_a_unit_runs",),
    ),
    # --- objects of the ORM ---------------------------------------------------------------------------------------------------
    Removal(
        "a rollback makes the objects that a block has added what they were",
        "stores/sql/orm.py",
        "            self._attached.restore()\n",
        "            pass\n",
        ("stores/test_attached_objects.py::test_the_next_run_finds_them_as_the_first_did",),
    ),
    Removal(
        "the sessions of units that are undone are closed",
        "stores/sql/units.py",
        "        connection.lift_guard()  # until the end of `_undo`\n",
        "",
        (
            "stores/test_attached_objects.py::test_the_next_run_finds_them_as_the_first_did",
            "pool/test_aio_units.py::test_objects_made_outside_of_their_units_are_written_when_these_run_again",
        ),
    ),
    # --- ids that expire ------------------------------------------------------------------------------------------------------
    Removal(
        "a writer looks after a pause whether Kafka still knows its id",
        "recipe/ownership.py",
        "return time.monotonic() - self._used_at >= CHECK_AFTER",
        "return False",
        ("crash/test_forgotten_ids.py::test_a_live_writer_continues_after_kafka_has_forgotten_its_ids",),
    ),
    Removal(
        "a state whose commit is known is cleared when its lane is idle",
        "recipe/ownership.py",
        "        if self._committed is None:\n            return after\n",
        "        if self._committed is None or after >= 0:\n            return after\n",
        ("writer/test_idle.py::test_the_states_of_an_idle_writer_are_cleared_and_it_continues",),
        hangs=True,
    ),
    Removal(
        "the log proves what its coordinator has forgotten",
        "recovery/log_evidence.py",
        "places = () if delivery is None else delivery.proofs",
        "places = ()",
        (
            "crash/test_forgotten_ids.py::test_a_service_opens_again_after_its_id_was_forgotten",
            "crash/test_forgotten_ids.py::test_any_topic_of_the_transaction_can_prove_its_outcome",
            "crash/test_forgotten_ids.py::test_a_transaction_aborted_and_forgotten_by_kafka_is_reported_lost_with_its_messages",
        ),
    ),
    Removal(
        "a message of another producer proves nothing",
        "kafka/client/log_proof.py",
        "and (first.producer_id, first.epoch) == (state.producer_id, state.epoch)",
        "and state is not None",
        ("kafka/test_log_proof.py::test_a_message_of_another_producer_proves_nothing",),
    ),
    # --- a look before a claim ------------------------------------------------------------------------------------------------
    Removal(
        "recovery asks Kafka before it claims an id",
        "recovery/recoverer.py",
        "        found = check.at(row)  #",
        "        found = () if planned is None else check.at(row)  #",
        (
            "cli/test_recovery_looks_first.py::test_recover_with_kafka_unreachable_does_not_claim_the_id_of_a_live_writer",
            "cli/test_recovery_looks_first.py::test_an_id_whose_coordinator_does_not_answer_is_skipped_and_the_others_are_recovered",
        ),
    ),
    Removal(
        "a dry run changes nothing",
        "cli/recover.py",
        "    if dry_run:\n",
        "    if dry_run and ids == ['no id']:\n",
        (
            "cli/test_recovery_looks_first.py::test_a_dry_run_shows_what_recovery_would_do_and_changes_nothing",
            "cli/test_recovery_looks_first.py::test_a_dry_run_does_not_fence_a_live_writer",
        ),
    ),
    # --- time limits ----------------------------------------------------------------------------------------------------------
    Removal(
        "no layer starts a time limit of its own",
        "deadline.py",
        "return Deadline(seconds, at) if at < self._at else Deadline(max(self._at - now, 0.0), self._at)",
        "return Deadline(seconds, at)",
        ("kafka/test_deadlines.py::test_a_request_that_is_never_answered_is_not_waited_for_beyond_the_limit",),
        hangs=True,
    ),
    Removal(
        "opening a connection is waited for only until the caller's limit",
        "kafka/client/cluster.py",
        "if not opening.wait(wait):",
        "if not opening.wait(self.config.connect_timeout):",
        (
            "kafka/test_deadlines.py::test_a_host_that_drops_packets_is_not_waited_for_beyond_the_limit",
            "kafka/test_deadlines.py::test_a_name_server_is_not_waited_for_beyond_the_limit",
        ),
        hangs=True,
    ),
    # --- TLS ------------------------------------------------------------------------------------------------------------------
    Removal(
        "ssl.ca.location replaces the system's authorities",
        "kafka/client/tls.py",
        "    elif not text:\n        context.load_default_certs()",
        "    context.load_default_certs()",
        (
            "kafka/test_strict_broker.py::test_ssl_ca_location_pins_the_authority_even_if_the_system_trusts_the_broker",
            "unit/test_kafka_config.py::test_with_a_ca_file_only_that_authority_is_trusted",
        ),
    ),
    Removal(
        "certificates are looked up in the revocation list",
        "kafka/client/tls.py",
        "context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF",
        "pass",
        ("kafka/test_strict_broker.py::test_a_certificate_that_was_revoked_is_not_trusted",),
    ),
    Removal(
        "the cipher suites of the settings are used",
        "kafka/client/tls.py",
        'context.set_ciphers(str(given["ssl.cipher.suites"]))',
        "pass",
        ("unit/test_kafka_config.py::test_the_cipher_suites_are_those_of_the_setting",),
    ),
    Removal(
        "a TLS setting that Python lacks is refused",
        "kafka/client/tls.py",
        "    if not lacking:\n",
        "    if lacking or not lacking:\n",
        ("kafka/test_strict_broker.py::test_an_unsupported_tls_setting_is_refused_before_the_id_is_claimed",),
    ),
    Removal(
        "a configuration has one TLS context",
        "kafka/client/config.py",
        "        if not self._tls:\n            self._tls.append(",
        "        if self._tls is not None:\n            self._tls.insert(0, ",
        ("unit/test_kafka_config.py::test_a_configuration_has_one_tls_context",),
    ),
    # --- answers of brokers ---------------------------------------------------------------------------------------------------
    *(
        Removal(
            f"{code} is permanent",
            "kafka/client/error_codes.py",
            f"        ErrorCode.{code},\n",
            "",
            ("unit/test_native_answers.py::test_the_error_is_the_one_that_users_catch",),
        )
        for code in ("INVALID_RECORD", "INVALID_TIMESTAMP", "POLICY_VIOLATION", "UNSUPPORTED_COMPRESSION_TYPE")
    ),
    Removal(
        "librdkafka's errors have the same verdicts",
        "kafka/librdkafka/errors.py",
        "if is_delivery and code in PERMANENT:",
        "if is_delivery and code is None:",
        ("unit/test_native_answers.py::test_a_delivery_is_retriable_by_the_brokers_code",),
    ),
    Removal(
        "an unknown transaction state is an error of ours",
        "kafka/client/refusals.py",
        "    except ValueError:\n",
        "    except KeyError:\n",
        ("kafka/test_native_wire.py::test_an_unknown_transaction_state_is_an_error_with_a_next_step",),
    ),
    # --- connecting -----------------------------------------------------------------------------------------------------------
    Removal(
        "an address alone keeps the environment's other Kafka settings",
        "kafka/client/config.py",
        'return cls.of({**kept, "bootstrap.servers": kafka})',
        "return cls.of(kafka)",
        ("writer/test_connect.py::test_an_address_alone_keeps_the_other_kafka_settings_of_the_environment",),
        hangs=True,
    ),
    Removal(
        "a writer does not close a store of the user",
        "api.py",
        "chosen.transactional_id, acknowledge=acknowledge, owns_store=store is not database",
        "chosen.transactional_id, acknowledge=acknowledge, owns_store=True",
        ("writer/test_connect.py::test_two_writers_on_one_store_of_the_user",),
    ),
    Removal(
        "a writer does not close an engine of the user",
        "stores/sql/store.py",
        "        if self._owns_engine:\n            self._engine.dispose()",
        "        self._engine.dispose()",
        ("writer/test_connect.py::test_an_engine_of_the_user_stays_open",),
    ),
    Removal(
        "Kafka's connections have keepalive",
        "kafka/client/sockets.py",
        "if config.keepalive:",
        "if config.keepalive and not config.keepalive:",
        ("kafka/test_connections.py::test_a_connection_uses_tcp_keepalive_unless_switched_off",),
    ),
    Removal(
        "an idle connection is checked before a request",
        "kafka/client/connection.py",
        "elif now - self._used_at >= _IDLE:",
        "elif now < 0:",
        ("kafka/test_connections.py::test_a_connection_closed_by_the_broker_is_noticed_before_anything_is_sent",),
    ),
    Removal(
        "brokers get the real version",
        "kafka/client/connection.py",
        "client_software_version=software_version()",
        'client_software_version="1"',
        ("kafka/test_native_wire.py::test_brokers_get_the_version_of_dualwrite",),
    ),
    Removal(
        "lanes and coordinator share a connection to each broker",
        "kafka/choose.py",
        "coordinator.network if share_connections else None",
        "None",
        ("kafka/test_connections.py::test_a_writer_has_one_connection_to_a_broker_for_all_its_lanes_and_its_coordinator",),
    ),
    # --- the ORM, schemas, types ----------------------------------------------------------------------------------------------
    Removal(
        "the session is of the user's class",
        "stores/sql/orm.py",
        "kind = _guarded(source.class_)",
        "kind = GuardedSession",
        ("writer/test_orm.py::test_the_session_class_of_the_user_is_used",),
    ),
    Removal(
        "before_commit is sent",
        "stores/sql/transaction.py",
        "self._sessions.dispatch_before_commit()",
        "pass",
        (
            "writer/test_orm.py::test_session_events_are_sent_after_the_facts",
            "writer/test_orm.py::test_an_error_of_a_listener_before_the_commit_rolls_back_both_sides",
        ),
    ),
    Removal(
        "after_commit is sent only after a commit",
        "stores/sql/sessions.py",
        "        if is_committed:\n",
        "        if is_committed or not is_committed:\n",
        ("writer/test_orm.py::test_after_commit_is_not_sent_if_the_database_refuses_the_commit",),
    ),
    Removal(
        "after_rollback is sent",
        "stores/sql/sessions.py",
        "    if is_known and not is_committed:\n        close_rolled_back(session)\n        return None\n",
        "",
        ("writer/test_orm.py::test_session_events_are_sent_after_the_facts",),
    ),
    Removal(
        "after_rollback is sent for a unit that is undone",
        "stores/sql/sessions.py",
        'must be lifted."""\n    quietly(session.dispatch_after_rollback)\n',
        'must be lifted."""\n',
        ("stores/test_units.py::test_sessions_get_the_outcome_of_their_unit",),
    ),
    Removal(
        "our tables are in the schema of the user's choice",
        "stores/sql/schema.py",
        "if not is_users and isinstance(statement, ClauseElement):",
        "if statement is None:",
        ("stores/test_schema.py::test_a_store_in_a_schema_does_not_touch_the_same_tables_elsewhere",),
    ),
    Removal(
        "the user's statements are not moved to another schema",
        "stores/sql/schema.py",
        "if not is_users and isinstance(statement, ClauseElement):",
        "if isinstance(statement, ClauseElement):",
        ("stores/test_schema.py::test_statements_of_the_user_are_not_changed",),
    ),
    Removal(
        "the handle of a transaction has the database's type",
        "api.py",
        "def connect(database: URL | Engine, **options: Unpack[ConnectOptions]) -> DualWriter[Connection]: ...",
        "def connect(database: URL | Engine, **options: Unpack[ConnectOptions]) -> DualWriter[Any]: ...",
        ("typing/test_typing.py::test_a_type_checker_finds_exactly_the_wrong_names",),
    ),
    Removal(
        "the attributes of an error are declared",
        "errors/ownership.py",
        "    fence: int\n",
        "    def __getattr__(self, name: str) -> int: ...\n",
        ("typing/test_typing.py::test_a_type_checker_finds_exactly_the_wrong_names",),
    ),
    # --- failpoints, sending, imports, the broker's release -------------------------------------------------------------------
    Removal(
        "a stray variable arms no failpoint",
        "__init__.py",
        '_os.environ.get("DUALWRITE_TESTING") == "1" and ',
        "",
        ("unit/test_failpoints.py::test_a_variable_without_the_switch_kills_no_process",),
    ),
    Removal(
        "what follows the value is keyword-only",
        "kafka/native/producer.py",
        "        value: bytes | str | None,\n        *,\n        key:",
        "        value: bytes | str | None,\n        key:",
        ("unit/test_send_signatures.py::test_parameters_after_topic_and_value_are_keyword_only",),
    ),
    Removal(
        "`import dualwrite` loads no library",
        "__init__.py",
        '__version__ = "0.1.0"\n',
        '__version__ = "0.1.0"\nimport sqlalchemy\n',
        ("unit/test_imports.py::test_importing_dualwrite_loads_no_library_at_all",),
    ),
    Removal(
        "a writer loads librdkafka only if it uses it",
        "api.py",
        "log = logging.getLogger(__name__)\n",
        "log = logging.getLogger(__name__)\nimport confluent_kafka\n",
        (
            "unit/test_imports.py::test_importing_what_a_writer_needs_loads_neither_librdkafka_nor_alembic",
            "writer/test_connect.py::test_a_writer_with_the_native_producer_on_postgresql_loads_only_what_it_uses",
        ),
    ),
    Removal(
        "`dualwrite dev` runs a release without KAFKA-20734",
        "devcluster/jars.py",
        'DEFAULT_KAFKA_VERSION = "4.2.2"',
        'DEFAULT_KAFKA_VERSION = "4.3.1"',
        ("crash/test_leaderless.py::test_the_release_of_the_development_cluster_writes_the_marker_when_the_leader_is_back",),
    ),
    # --- statements and commands ----------------------------------------------------------------------------------------------
    Removal(
        "a statement that commits implicitly is refused before it runs",
        "stores/sql/control_text.py",
        "    found = _IMPLICIT_COMMIT.match(sql)\n",
        "    found = None\n",
        ("stores/test_mariadb.py::test_a_statement_that_would_commit_by_itself_is_refused_before_it_runs",),
    ),
    Removal(
        "an id that does not exist is not reported forgotten",
        "recovery/recoverer.py",
        "    if not ids:\n        raise _unknown_id(store, transactional_id)\n",
        "    if not ids:\n        return (transactional_id,)\n",
        ("cli/test_recovery_commands.py::test_an_unknown_id_is_not_reported_forgotten",),
    ),
)
