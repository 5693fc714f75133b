"""The rules of the protocol (docs/how-it-works/rules.md): the code of each one, and the tests that fail without it."""

from __future__ import annotations

from typing import Final

from removal import Removal

PROTOCOL: Final = (
    Removal(
        rule="DF a writer and a pool see that the row is behind",
        module="recipe/lane.py",
        text="        self._check_row(store_transaction)\n",
        without="",
        tests=(
            "crash/test_forgotten_commits.py::test_a_living_writer_reports_what_the_database_has_forgotten",
            "crash/test_forgotten_commits.py::test_a_pool_reports_it_and_goes_on",
            "crash/test_forgotten_commits.py::test_a_writer_on_another_database_sees_it",
        ),
    ),
    Removal(
        "DF a writer that is closed sees it, too",
        "recipe/ownership.py",
        "            if self.remembered.number:\n",
        "            if not self:\n",
        (
            "crash/test_forgotten_commits.py::test_a_writer_that_is_closed_reports_it",
            "crash/test_forgotten_commits.py::test_a_writer_whose_claim_is_forgotten_reports_it_when_it_is_closed",
        ),
    ),
    Removal(
        "DF what the database had confirmed is not called rolled back if it has forgotten it",
        "recipe/lane.py",
        "            if database_committed or not was_confirmed:",
        "            if True:",
        ("crash/test_forgotten_commits.py::test_what_is_forgotten_before_kafka_confirmed_it_is_not_called_rolled_back",),
    ),
    Removal(
        "DF a writer that is closed, and whose claim is forgotten, reports it",
        "recipe/lane.py",
        '            self._note_forgotten(fenced)\n            log.warning("closing',
        '            log.warning("closing',
        ("crash/test_forgotten_commits.py::test_a_writer_whose_claim_is_forgotten_reports_it_when_it_is_closed",),
    ),
    Removal(
        "F1 the row is read after the description",  # the failpoint moves with it, to where the recoverer is paused
        "recovery/resolve.py",
        """\
        described, self._described_at = found or (yield from described_now(self._kafka_id))
        hit("recover_after_describe")
        row = yield from read(self._claim)
""",
        """\
        row = yield from read(self._claim)
        hit("recover_after_describe")
        described, self._described_at = found or (yield from described_now(self._kafka_id))
""",
        ("crash/test_traces.py::test_f1_a_recoverer_with_a_stale_state_does_not_touch_its_successors_transaction",),
    ),
    Removal(
        "F2 a transaction that its user has begun checks the fencing token under the row's lock",
        "stores/sql/postgresql_outgoing.py",
        'query = f"{self._check_of(text, mark)} FOR UPDATE"',
        "query = self._check_of(text, mark)",
        ("joined/test_sessions.py::test_a_transaction_that_is_older_than_a_claim_sends_nothing",),
    ),
    Removal(
        "F2 a transaction begins with a check of the fencing token",
        "stores/sql/sql_transaction.py",
        "current.fence != self._claim.fence:\n            raise self._errors.fenced(current)\n        self._store",
        "False:\n            raise self._errors.fenced(current)\n        self._store",
        ("crash/test_traces.py::test_f2_a_writer_that_was_claimed_begins_no_further_transaction",),
    ),
    Removal(
        "F2 the check that was left to the first statement comes before the first message",
        "transaction.py",
        "self._may_send = not is_fenced",
        "self._may_send = True",
        ("writer/test_fenced_blocks.py::test_a_fenced_writer_sends_nothing",),
    ),
    Removal(
        "F2 it comes before the messages of a group",
        "transaction.py",
        "        if not self._may_send:\n            self.check_fence()\n        self.producer.send_messages",
        "        self.producer.send_messages",
        ("writer/test_fenced_blocks.py::test_a_fenced_writer_sends_nothing",),
    ),
    Removal(
        "F3 only NONE proves an outcome",
        "recovery/resolve.py",
        """\
        if answer.proven:
            return answer
        log.debug("EndTxn answered %s; describing again\"""",
        """\
        if answer is not None:
            return answer
        log.debug("EndTxn answered %s; describing again\"""",
        ("crash/test_traces.py::test_f3_a_transaction_that_its_writer_ends_after_recovery_described_it_is_not_called_lost",),
    ),
    Removal(
        "F5 an id is taken over by compare-and-set",
        "recipe/ownership.py",
        """\
        if found.transaction is None:
            if not self._is_new:
                return False
            self._is_new = False
            answer = yield from create(producer.creation(timeout=deadline))
            return producer.created(answer, timeout=deadline)
        if found.transaction.timeout_ms""",
        """\
        producer.init_transactions(timeout=deadline)
        if found is not self:
            return True
        if found.transaction.timeout_ms""",
        (
            "crash/test_native_traces.py::test_a_zombies_late_take_over_does_not_end_its_successors_prepared_transaction",
            "crash/test_native_traces.py::test_an_id_that_is_created_twice_at_once_has_one_holder",
        ),
    ),
    Removal(
        "NG an unknown id is registered only under a new generation",
        "recipe/ownership.py",
        "if described is None:  # rule NG\n            return False",
        "if described is None:\n            return True",
        ("crash/test_native_traces.py::test_a_zombies_late_registration_does_not_end_its_successors_prepared_transaction",),
    ),
    Removal(
        "NG a registration without an answer is not sent again",
        "kafka/client/coordinator.py",
        "            if only_once:\n",
        "            if only_once is self:\n",
        ("kafka/test_registration.py::test_a_request_without_an_answer_is_not_sent_again",),
    ),
    Removal(
        "F7 the outcome is recorded before the epoch is raised",  # and a failpoint is between, at which recovery dies
        "recovery/resolve.py",
        """\
        yield from self._record_resolution(outcome, stored)  # rule F7: before the epoch is raised
        if described is None:
            return True
        if self._ends_by_epoch():
            answer = yield from self._end_txn(described, commit=False)
            self.raised = answer if answer.proven else None
            return answer.proven
""",
        """\
        if described is None:
            yield from self._record_resolution(outcome, stored)
            return True
        if self._ends_by_epoch():
            answer = yield from self._end_txn(described, commit=False)
            hit("recover_after_resolution")
            self.raised = answer if answer.proven else None
            if answer.proven:
                yield from self._record_resolution(outcome, stored)
            return answer.proven
""",
        ("crash/test_timeout.py::test_a_recovery_that_dies_between_finding_lost_and_reporting_it_keeps_it",),
    ),
    Removal(
        "F8 after an unknown COMMIT the claim requires our fencing token",
        "recipe/ownership.py",
        "                expected_fence=self.claim.fence,\n",
        "                expected_fence=None,\n",
        ("crash/test_unknown_outcome.py::test_a_successor_came_after_commit_was_processed",),
    ),
    Removal(
        "F8 a claim whose answer was lost is repeated under its token",
        "recipe/ownership.py",
        "self._intended = self._intended or new_token()",
        "self._intended = new_token()",
        ("crash/test_unknown_outcome.py::test_a_writer_whose_own_claim_got_no_answer_is_not_fenced_by_it",),
        hangs=True,
    ),
    Removal(
        "F9 a repeated EndTxn ends the session",
        "kafka/librdkafka/librdkafka_producer.py",
        "                    self._must_be_replaced = self._must_be_replaced or ends or not is_step\n",
        "",
        ("crash/test_traces.py::test_f9_after_a_commit_that_was_sent_again_the_next_transaction_has_another_id_at_kafka",),
    ),
    Removal(
        "FA without EndTxn v5, InitProducerId aborts",
        "recovery/resolve.py",
        "        if not commit and not self._ends_by_epoch():\n",
        "        if not commit and not self._ends_by_epoch() and described is None:\n",
        ("crash/test_old_broker.py::test_fa_a_message_that_arrives_after_its_transaction_was_aborted_is_refused",),
    ),
    Removal(
        "FB a transaction is ended only while its partitions have leaders",
        "kafka/client/requests.py",
        "if missing := sorted(leaderless & partitions):",
        "if missing := sorted(leaderless - leaderless):",
        ("crash/test_leaderless.py::test_a_producer_and_recovery_wait_for_the_leader",),
    ),
    Removal(
        "O2 every claim of a librdkafka writer acquires a generation",
        "stores/rows.py",
        "elif reuse and kind.takes_over and row.generation_kind is kind and",
        "elif row.generation_kind is kind and",
        (
            "crash/test_traces.py::test_o2_a_late_init_producer_id_of_a_zombie_does_not_kill_its_successors_prepared_transaction",
        ),
    ),
    Removal(
        "KU a commit that Kafka does not confirm is unknown",
        "recipe/lane.py",
        "if phase in (Phase.COMMITTING_DATABASE, Phase.COMMITTING_KAFKA):",
        "if phase is Phase.COMMITTING_DATABASE:",
        ("crash/test_zombie.py::test_a_writer_stopped_past_its_commit_point_learns_that_it_committed_and_is_fenced",),
    ),
    Removal(
        "SA S is cleared before a later transaction is aborted",
        "recovery/resolve.py",
        "            yield from self._clear_state(stored, lost=None)\n            stored = None\n",
        "            log.debug('not cleared')\n",
        ("crash/test_traces.py::test_sa_a_state_is_cleared_before_a_later_transaction_is_aborted",),
    ),
    Removal(
        "SG resolved generations are not described again",
        "stores/rows.py",
        "return range(self.resolved_generation + 1, self.generation + 1)",
        "return range(1, self.generation + 1)",
        ("unit/test_state_row.py::test_resolved_generations_are_not_examined_again",),
    ),
    Removal(
        "CL another cluster than the row's is refused before anything is claimed",
        "stores/rows.py",
        'if row.forgotten or row.cluster_id in ("", cluster_id):',
        "if cluster_id or not cluster_id:",
        (
            "crash/test_wrong_cluster.py::test_recovery_on_another_cluster_changes_nothing",
            "crash/test_wrong_cluster.py::test_a_live_writer_is_not_fenced_from_another_cluster",
        ),
    ),
    Removal(
        "ST the id at Kafka names the database",
        "stores/rows.py",
        "at(generation, self.store_id)",
        "at(generation, '0')",
        ("crash/test_shared_id.py::test_opening_an_id_in_another_database_aborts_nothing",),
    ),
    Removal(
        "QN our statements name the schema of our tables",
        "stores/sql/home.py",
        "return self._found.get(table) or self._found.get(TABLE_NAME)",
        "return None",
        (
            "crash/test_shared_id.py::test_a_block_that_changes_search_path_does_not_change_where_its_state_is_recorded",
            "stores/test_settings_of_the_session.py::test_settings_of_postgresql",
            "stores/test_settings_of_the_session.py::test_settings_of_mariadb",
            "stores/test_settings_of_the_session.py::test_settings_of_sqlite",
        ),
    ),
    Removal(
        "QN the schema is looked up on a new connection",
        "stores/sql/home.py",
        "self._engine.pool if self._is_ours else self._engine.pool.recreate()",
        "self._engine.pool",
        ("stores/test_settings_of_the_session.py::test_a_search_path_that_an_earlier_block_has_left_on_a_connection",),
    ),
    Removal(
        "QN the record with COMMIT names its store",
        "stores/sql/postgresql_outgoing.py",
        'f"AND store_id = {text.of(record.held_store)}{gate} RETURNING 1) "',
        'f"{gate} RETURNING 1) "',
        ("stores/test_settings_of_the_session.py::test_settings_that_make_the_record_impossible",),
    ),
    Removal(
        "QN the record names its store",
        "stores/sql/sql_context.py",
        '            t.c.store_id == bindparam("held_store"),  # rule QN\n',
        "",
        ("stores/test_settings_of_the_session.py::test_settings_that_make_the_record_impossible",),
    ),
    Removal(
        "UC an UNVERIFIED transaction that is found ongoing is committed",
        "stores/rows.py",
        "return next((entry for entry in entries if names(entry.state, described)), None)",
        "return next((entry for entry in entries if described is generation), None)",
        ("crash/test_wrong_cluster.py::test_a_transaction_left_unverified_by_a_wrong_cluster_is_committed_on_the_right_one",),
    ),
    Removal(
        "UC the log of another cluster proves nothing",
        "recovery/resolve.py",
        "if entry.cluster_id and entry.cluster_id == row.cluster_id",
        "if entry.state",
        ("crash/test_forgotten_ids.py::test_the_log_of_another_cluster_proves_nothing",),
    ),
    Removal(
        "UG a generation with an UNVERIFIED entry is not used again",
        "stores/rows.py",
        "has_unverified = any(entry.generation == row.generation for entry in row.unverified)",
        "has_unverified = False",
        ("unit/test_state_row.py::test_a_generation_with_an_unverified_entry_is_not_used_again",),
    ),
    Removal(
        "RA the record of a copy and the entry of the lost transaction are one write",  # here the entry is left to a later one
        "recipe/republish.py",
        """\
            store.record_resolution(ownership.claim, Resolution(republished=new))
""",
        """\
            before = store.read_claimed(ownership.claim)
            store.record_resolution(ownership.claim, Resolution(republished=new))
            store.record_resolution(ownership.claim, Resolution(lost=before.lost[0]))
            hit("republish_after_record")
            store.record_resolution(ownership.claim, Resolution(resolved_entry=before.lost[0]))
""",
        ("crash/test_republish.py::test_the_next_one_completes_what_a_publisher_that_died_has_begun",),
    ),
    Removal(
        "RE the record of a copy requires the entry",
        "stores/rows.py",
        "    if not has_entry(row, new.entry):\n        raise",
        "    if False:\n        raise",
        ("crash/test_republish.py::test_what_is_acknowledged_meanwhile_is_not_published",),
    ),
    Removal(
        "RI a record that was written before is recognized",
        "stores/rows.py",
        "    if (row.prepared_state, row.prepared_generation) == (new.state, new.generation):",
        "    if False:",
        ("crash/test_republish.py::test_a_record_without_an_answer_is_not_followed_by_an_abort",),
    ),
    Removal(
        "RS a repeated resolution adds no entry again",
        "stores/rows.py",
        "    if added is not None and resolution.clear_state and not _ends(row.prepared_state, added):",
        "    if False:",
        ("unit/test_state_row.py::test_a_repeated_resolution_does_not_add_an_acknowledged_entry_again",),
    ),
    Removal(
        "RL only what is proven lost is published again",
        "recipe/republish.py",
        "for entry in proven_lost(ownership.report.unacknowledged):",
        "for entry in ownership.report.unacknowledged:",
        ("crash/test_republish.py::test_an_unverified_transaction_is_not_published_again",),
    ),
    Removal(
        "RC only on the cluster that the entry names",
        "recovery/resolve.py",
        "    if not entry.cluster_id or entry.cluster_id != cluster_id:",
        "    if False:",
        ("crash/test_republish.py::test_what_was_lost_on_another_cluster_is_not_published",),
    ),
    Removal(
        "RD a copied database has no entries",
        "recovery/clusters.py",
        "clear_lost=True",
        "clear_lost=False",
        ("crash/test_republish.py::test_a_copied_database_publishes_nothing_of_its_original",),
    ),
    Removal(
        "RO what is lost is published before the next transaction",
        "recipe/routes.py",
        "        if self._lost is not None:\n",
        "        if self._lost is self:\n",
        ("crash/test_republish.py::test_what_a_writer_could_not_publish_at_once_is_published_before_its_next_transaction",),
    ),
    Removal(
        "RO a copy that lacked the time is not overtaken",
        "recipe/republish.py",
        "                raise _too_slow(ownership, entry, error) from error\n",
        "                self._keep(ownership, entry, (error.what,))\n                return\n",
        ("crash/test_republish.py::test_no_transaction_overtakes_messages_that_were_not_published_again_in_time",),
    ),
    Removal(
        "RP a copy that is lost keeps the place of its original",
        "recipe/republish.py",
        "replace(delivery, prepared_at=_prepared_at(entry), copy_of",
        "replace(delivery, copy_of",
        ("crash/test_republish.py::test_a_copy_that_is_lost_keeps_its_place",),
    ),
    Removal(
        "RP what is lost later has a later time, whatever the clocks say",
        "stores/rows.py",
        "        added = _after(left, added)\n",
        "        pass\n",
        ("unit/test_state_row.py::test_what_is_lost_later_has_a_later_time_whatever_the_clocks_say",),
    ),
    Removal(
        "RW an entry that is gone does not prove that its messages are visible",
        "recipe/ownership.py",
        "left = (each for each in found if (each.transactional_id, each.generation, each.state) not in again)",
        "left = (each for each in found if again is not None and each.lost in self.report.unacknowledged)",
        ("crash/test_republish.py::test_a_writer_whose_lost_transaction_was_acknowledged_does_not_report_it_as_committed",),
    ),
)
