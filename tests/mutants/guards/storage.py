"""Guards of storage: what may be forgotten, and when."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LIMITS = "tests/integration/storage/test_session_settings.py"
_LACKS = "tests/integration/storage/test_lacks.py"
_OUTAGES = "tests/integration/storage/test_outages.py"
_RIGHTS = "tests/integration/cli/test_migrate_rights.py"
_ROOM = "tests/unit/storage/test_fair_pool_room.py"
_URLS = "tests/unit/test_database_url.py"
_GIVEN = "tests/integration/outbox/unit_of_work/test_given_engines.py"

ROWS = (
    Mutant(
        "storage",
        "a stream goes on after a drop of rows that it has not read",
        "durable/pipeline/stream.py",
        before="            self._check_drops(conn, start)  # after those that `end` knows of\n",
        after="",
        killed_by=(
            "tests/pipeline/test_stream_drops.py::"
            "test_stream_ends_after_a_drop_of_unread_rows[a purge of a day-1-nothing else]",
        ),
    ),
    Mutant(
        "storage",
        "a stream loses rows that are dropped between the plan and the read of a batch",
        "durable/pipeline/stream.py",
        before="            self._check_drops(conn, partition.begin)\n",
        after="            pass\n",
        killed_by=(
            "tests/pipeline/test_stream_drops.py::"
            "test_drop_between_the_plan_and_the_read_of_a_batch_is_noticed[a purge of a day]",
        ),
    ),
    Mutant(
        "storage",
        "a stream ends after a drop of rows that it has read",
        "durable/storage/sql/absent.py",
        before="AND number > :number AND below > :low\n",
        after="AND number > :number\n",
        killed_by=(
            "tests/pipeline/test_stream_drops.py::test_stream_goes_on_after_a_drop_of_read_rows[a purge of letters]",
        ),
    ),
    Mutant(
        "storage",
        "a stream takes its last row of history for dropped without a note of it",
        "durable/storage/sql/archive.py",
        before='    AND NOT {_IS_NOTED_AS_DROPPED.format(table="envelope_history")}\n',
        after="    AND false\n",
        killed_by=(
            "tests/pipeline/test_stream_drops.py::"
            "test_stream_ends_without_its_last_row_when_its_drop_is_not_noted[a purge of a day-older rows dropped-no day]",
        ),
    ),
    Mutant(
        "storage",
        "a stream takes its last letter for dropped without a note of it",
        "durable/storage/sql/archive.py",
        before='    OR NOT {_IS_NOTED_AS_DROPPED.format(table="dead_letters")})\n',
        after="    OR false)\n",
        killed_by=(
            "tests/pipeline/test_stream_drops.py::"
            "test_stream_ends_without_its_last_row_when_its_drop_is_not_noted[a purge of letters-older rows dropped-no day]",
        ),
    ),
    Mutant(
        "storage",
        "a drop of older rows excuses that the last row of a stream is missing",
        "durable/storage/sql/archive.py",
        before='AND row_count > 0 AND below > :xid)"""',
        after='AND row_count > 0)"""',
        killed_by=(
            "tests/pipeline/test_stream_drops.py::"
            "test_stream_ends_without_its_last_row_when_its_drop_is_not_noted[a purge of a day-older rows dropped-no day]",
        ),
    ),
    Mutant(
        "storage",
        "a new query ends for drops of before it",
        "durable/pipeline/stream.py",
        before='            begin = begin | {"drop": self._last_drop(conn)}\n',
        after='            begin = begin | {"drop": 0}\n',
        killed_by=(
            "tests/pipeline/test_stream_drops.py::"
            "test_new_query_begins_with_the_rows_left_by_a_drop[a purge of letters]",
        ),
    ),
    Mutant(
        "storage",
        "a drop of a day before the first archive is not noted",
        "migrations/versions/v0001_foundation.py",
        before="    IF parent = 'envelope_history' AND to_regclass(part) IS NOT NULL THEN",
        after="    IF false THEN",
        killed_by=(
            "tests/pipeline/test_stream_drops.py::"
            "test_stream_ends_after_a_drop_of_unread_rows[a day before the first archive-1-a newer row]",
        ),
    ),
    Mutant(
        "storage",
        "a local message whose history was dropped is replayed under its id",
        "durable/pipeline/replay.py",
        before="    if local:\n",
        after="    if False:\n",
        killed_by=(
            "tests/pipeline/test_replay.py::test_local_messages_are_handled_once_after_a_purge_below_the_dedupe_window",
        ),
    ),
    Mutant(
        "storage",
        "an error of a file is told as one of the database",
        "durable/storage/outages.py",
        before="        if not _is_from_a_driver(error):",
        after="        if False:",
        killed_by=(
            "tests/pipeline/test_unwritable.py::test_error_of_a_file_passes_through_database_blocks[no right-locked]",
        ),
    ),
    Mutant(
        "storage",
        "a retention of minutes drops ids",
        "migrations/versions/v0001_foundation.py",
        before="    IF keep < interval '1 hour' THEN",
        after="    IF false THEN",
        killed_by=("tests/integration/storage/test_schema.py::test_retention_below_an_hour_is_refused[pg18]",),
    ),
    Mutant(
        "storage",
        "a day that is not past its retention is dropped",
        "migrations/versions/v0001_foundation.py",
        before="    IF day + 1 >= now() - keep THEN",
        after="    IF false THEN",
        killed_by=(
            "tests/integration/storage/test_schema.py::test_day_within_its_retention_is_refused_to_be_dropped[pg18]",
        ),
    ),
    Mutant(
        "storage",
        "an archived day is dropped by a node",
        "migrations/versions/v0001_foundation.py",
        before='        IF "{schema}".archived_below(parent) IS NOT NULL THEN',
        after="        IF false THEN",
        killed_by=("tests/integration/storage/test_schema.py::test_archived_history_is_dropped_by_no_node[pg18]",),
    ),
    Mutant(
        "storage",
        "a day that is not archived whole is dropped",
        "migrations/versions/v0001_foundation.py",
        before="    IF archived IS NULL OR is_late THEN",
        after="    IF archived IS NULL THEN",
        killed_by=(
            "tests/integration/storage/test_schema.py::test_day_is_kept_for_a_row_committed_during_the_drop[pg18]",
        ),
    ),
    Mutant(
        "storage",
        "a discarded id is given up although another message holds it",
        "durable/storage/sql/columns.py",
        before="""\
    WHERE known.given_up AND known.sent_at <> excluded.sent_at
""",
        after="""\
    WHERE known.given_up
""",
        killed_by=(
            "tests/integration/storage/test_business_keys.py::test_business_key_has_one_effect_and_is_usable_when_freed",
        ),
    ),
    Mutant(
        "storage",
        "a known id without a day is stored again",
        "durable/storage/sql/columns.py",
        before="""\
    WHERE known.given_up AND known.sent_at <> excluded.sent_at
""",
        after="",
        killed_by=(
            "tests/integration/storage/test_business_keys.py::test_business_key_has_one_effect_and_is_usable_when_freed",
        ),
    ),
    Mutant(
        "storage",
        "the id of a waiting row is forgotten",
        "durable/storage/sql/housekeeping.py",
        before=") AS is_needed FROM picked",
        after=") AND false AS is_needed FROM picked",
        killed_by=("tests/integration/storage/test_schema.py::test_old_id_of_a_waiting_message_is_kept[pg18]",),
    ),
    Mutant(
        "storage",
        "a new owner of an embedded server takes over the last one, which is about to end",
        "durable/embedded/postgres.py",
        before="    end_last(server.data)\n",
        after="",
        killed_by=(
            "tests/integration/cli/test_embedded.py::test_successor_ends_a_server_without_an_owner",
            "tests/integration/cli/test_embedded.py::test_successor_of_a_killed_owner_has_a_server_of_its_own",
        ),
    ),
    Mutant(
        "storage",
        "an embedded server does not end with its killed owner",
        "durable/embedded/ownership.py",
        before='exec "$@"\'',
        after="true'",
        killed_by=(
            "tests/integration/cli/test_embedded.py::test_owner_killed_on_the_way_takes_its_server_along[start]",
            "tests/integration/cli/test_embedded.py::test_owner_killed_on_the_way_takes_its_server_along[restart]",
            "tests/integration/cli/test_embedded.py::test_owner_killed_after_a_restart_takes_its_server_along",
        ),
    ),
    Mutant(
        "storage",
        "the server of a successor ends for its killed predecessor",
        "durable/embedded/ownership.py",
        before="            if is_free:\n",
        after="            if True:\n",
        killed_by=(
            "tests/integration/cli/test_embedded.py::test_server_of_a_killed_owner_is_ended_unless_a_successor_owns_the_folder",
        ),
    ),
    Mutant(
        "storage",
        "a process with the pid of a killed server is taken for the server",
        "durable/embedded/processes.py",
        before='        (data / "postmaster.pid").unlink(missing_ok=True)\n',
        after="        pass\n",
        killed_by=(
            "tests/integration/cli/test_embedded.py::test_process_with_the_pid_of_a_killed_server_is_left_alone",
        ),
    ),
    Mutant(
        "storage",
        "any process with the pid of a server runs for it",
        "durable/embedded/processes.py",
        before='process.name() == "postgres" and _is_on(process, data)',
        after="True",
        killed_by=(
            "tests/integration/cli/test_embedded.py::test_process_with_the_pid_of_a_killed_server_is_no_server",
        ),
    ),
    Mutant(
        "storage",
        "an embedded server that recovers its data for long is given up",
        "durable/embedded/server.py",
        before="time.monotonic() + RECOVERY_SECONDS",
        after="time.monotonic() + 0.5",
        killed_by=("tests/integration/cli/test_embedded.py::test_long_recovery_of_a_server_is_waited_for",),
    ),
    Mutant(
        "storage",
        "a forked process keeps an embedded server alive",
        "durable/embedded/forks.py",
        before="os.register_at_fork(after_in_child=_close_in_child)\n",
        after="",
        killed_by=(
            "tests/integration/cli/test_embedded.py::test_forked_process_keeps_no_server_alive[leaves]",
            "tests/integration/cli/test_embedded.py::test_forked_process_keeps_no_server_alive[killed]",
        ),
    ),
    Mutant(
        "storage",
        "an engine is used in a second loop beside the first",
        "durable/storage/loops.py",
        before="        if not all(is_free(engine) for engine in engines):\n            raise another_loop()\n",
        after="",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_loops.py::test_use_in_a_second_loop_is_refused_and_costs_the_first_nothing[asyncpg]",
            "tests/integration/outbox/unit_of_work/test_given_engines.py::test_two_buses_of_one_engine_share_its_loop[asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "the pool of a closed loop is used in the next one",
        "durable/storage/loops.py",
        before="    engine.sync_engine.dispose(close=False)\n",
        after="    pass\n",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_loops.py::test_connection_in_use_when_its_loop_was_closed_is_closed_by_the_next[asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "connections of a closed loop stay open",
        "durable/storage/loops.py",
        before="            _cut(driver)\n\n\ndef _cut(",
        after="            pass\n\n\ndef _cut(",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_loops.py::test_connections_of_a_closed_loop_are_closed_by_the_next[asyncpg]",
            "tests/integration/outbox/unit_of_work/test_loops.py::test_connections_of_a_closed_loop_are_closed_by_the_next[psycopg]",
        ),
    ),
    Mutant(
        "storage",
        "a session is enlisted in another loop than that of its engine",
        "durable/bus.py",
        before="            loops.enter_with(session)\n",
        after="            pass\n",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_given_engines.py::test_second_loop_is_refused_after_an_enlisted_session[asyncpg]",
            "tests/integration/outbox/unit_of_work/test_given_engines.py::test_enlisted_session_is_refused_in_a_second_loop[asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "engines that were given are not guarded",
        "durable/storage/loops.py",
        before='        event.listen(engine, "checkout", self._checked_out, insert=True)',
        after="        pass",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_given_engines.py::test_connection_from_before_the_bus_is_given_up_in_another_loop[psycopg]",
            "tests/integration/outbox/unit_of_work/test_given_engines.py::test_connection_given_back_amid_a_transaction_is_given_up[asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "a fresh connection whose listener has begun a transaction is given up",
        "durable/storage/loops.py",
        before="    if _WAS_IN_USE in entry.info and ",
        after="    if ",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_given_engines.py::test_listeners_of_the_application_may_begin_a_transaction[psycopg]",
        ),
    ),
    Mutant(
        "storage",
        "a connection amid a transaction is handed out",
        "durable/storage/engines.py",
        before="        if not _driver(connection).is_at_rest:\n",
        after="        if False:\n",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_loops.py::test_connection_given_back_amid_a_transaction_is_closed[asyncpg]",
            "tests/integration/outbox/unit_of_work/test_loops.py::test_connection_given_back_amid_a_transaction_is_closed[psycopg]",
        ),
    ),
    Mutant(
        "storage",
        "a connection of another loop is handed out",
        "durable/storage/loops.py",
        before="    if loop is asyncio._get_running_loop():\n        return\n",
        after="    return\n",
        killed_by=(
            f"{_GIVEN}::test_connection_from_before_the_bus_is_given_up_in_another_loop[asyncpg]",
            "tests/integration/outbox/unit_of_work/test_loops.py::test_unit_of_work_made_outside_loops_is_refused_with_a_connection_of_another[asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "a connection of a given engine is opened in a second loop",
        "durable/storage/loops.py",
        before="        _refuse_strangers(given)\n",
        after="        pass\n",
        killed_by=(
            f"{_GIVEN}::test_plain_session_of_a_second_loop_opens_no_connection[asyncpg]",
            f"{_GIVEN}::test_plain_session_of_a_second_loop_opens_no_connection[psycopg]",
        ),
    ),
    Mutant(
        "storage",
        "the pool's queue belongs to the loop that waits first",
        "durable/storage/loops.py",
        before=" or not _has_bound(engine.sync_engine.pool):\n",
        after=":\n",
        killed_by=(
            f"{_GIVEN}::test_waiting_second_loop_costs_the_first_nothing[asyncpg]",
            f"{_GIVEN}::test_waiting_second_loop_costs_the_first_nothing[psycopg]",
        ),
    ),
    Mutant(
        "storage",
        "a given engine keeps its pool in a forked process",
        "durable/storage/loops.py",
        before="    renew_in_children(engine.sync_engine)\n",
        after="",
        killed_by=(
            f"{_GIVEN}::test_forked_process_has_connections_of_its_own[asyncpg]",
            f"{_GIVEN}::test_forked_process_has_connections_of_its_own[psycopg]",
        ),
    ),
    Mutant(
        "storage",
        "a given sync engine keeps its pool in a forked process",
        "durable/outbox/sessions.py",
        before="            renew_in_children(sync_engine)\n",
        after="            pass\n",
        killed_by=(f"{_GIVEN}::test_forked_process_has_sync_connections_of_its_own",),
    ),
    Mutant(
        "storage",
        "an engine whose pool shares its connections is used",
        "durable/storage/loops.py",
        before="            refuse_shared(engine.sync_engine.pool)\n",
        after="            pass\n",
        killed_by=(
            f"{_GIVEN}::test_pool_with_shared_connections_is_refused[start-StaticPool-asyncpg]",
            f"{_GIVEN}::test_pool_with_shared_connections_is_refused[start-StaticPool-psycopg]",
        ),
    ),
    Mutant(
        "storage",
        "a session stores messages on a shared connection",
        "durable/outbox/outbox.py",
        before="        refuse_shared(connection.engine.pool)\n",
        after="",
        killed_by=(f"{_GIVEN}::test_pool_with_shared_sync_connections_is_refused[enlisted-StaticPool]",),
    ),
    Mutant(
        "storage",
        "handlers share a sync connection",
        "durable/outbox/sessions.py",
        before="            refuse_shared(engine.pool)\n",
        after="",
        killed_by=(f"{_GIVEN}::test_pool_with_shared_sync_connections_is_refused[start-StaticPool]",),
    ),
    Mutant(
        "storage",
        "a refused start stops the bus that runs in this loop",
        "durable/bus.py",
        before="        self.runtime.claim()  # until then it may be another's, and nothing of it is stopped\n        try:\n",
        after="        try:\n            self.runtime.claim()\n",
        killed_by=("tests/integration/outbox/unit_of_work/test_loops.py::test_second_start_leaves_the_first_alone",),
    ),
    Mutant(
        "storage",
        "two loops start one bus at once",
        "durable/runtime.py",
        before="            if self._loop is not None:\n                raise WiringError(\n",
        after="            if False:\n                raise WiringError(\n",
        killed_by=("tests/integration/outbox/unit_of_work/test_loops.py::test_second_start_leaves_the_first_alone",),
    ),
    Mutant(
        "storage",
        "a bus starts in another loop than its connections",
        "durable/runtime.py",
        before="            loops.enter(self.sessions.engine, self.database.engine)\n",
        after="",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_loops.py::test_start_in_a_second_loop_is_refused[asyncpg]",
            "tests/integration/outbox/unit_of_work/test_loops.py::test_start_is_refused_in_another_loop_than_the_agents_connections[asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "a bus is stopped in a loop that does not use it",
        "durable/bus.py",
        before="        if self.runtime.is_of_another_loop:  # which has only used it\n            return\n",
        after="",
        killed_by=("tests/integration/outbox/unit_of_work/test_loops.py::test_refused_start_changes_nothing[asyncpg]",),
    ),
    Mutant(
        "storage",
        "a commit fails for agents that cannot be told",
        "durable/process/dispatching.py",
        before="            self._has_told = True\n",
        after="            self._has_told = True\n            raise\n",
        killed_by=(
            "tests/unit/process/test_dispatching.py::test_commit_does_not_fail_when_its_agents_cannot_be_told",
            "tests/integration/outbox/unit_of_work/test_closed_loops.py::test_process_goes_on_after_the_loop_of_its_node_was_closed[asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "a node without an event loop stays alive",
        "durable/recovery/membership.py",
        before="            if self._loop.is_closed():  # its agents are gone, and others must have its rows\n",
        after="            if False:\n",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_closed_loops.py::test_process_goes_on_after_the_loop_of_its_node_was_closed[asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "a bus whose event loop was closed stays started",
        "durable/bus.py",
        before="        if self._runtime.is_left_behind:\n",
        after="        if False:\n",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_closed_loops.py::test_process_goes_on_after_the_loop_of_its_node_was_closed[asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "a refused row ends the transaction that trusted it",
        "durable/storage/isolation.py",
        before="            raise SavepointsNeeded from error",
        after="            raise",
        killed_by=(
            "tests/integration/storage/test_refused_rows.py::test_refused_row_is_put_aside_and_its_neighbours_proceed[at once asyncpg-claim keys to send-0-the change]",
        ),
    ),
    Mutant(
        "storage",
        "a row that the COMMIT refuses takes its batch along",
        "durable/storage/isolation.py",
        before="        if _TRUSTING not in vars(conn) or refusal(error) is None:\n            raise\n",
        after="        raise\n",
        killed_by=(
            "tests/integration/storage/test_refused_rows.py::test_refused_row_is_put_aside_and_its_neighbours_proceed[at COMMIT asyncpg-claim keys to send-0-the change]",
        ),
    ),
    Mutant(
        "storage",
        "a try does not check what is put off to the COMMIT",
        "durable/storage/isolation.py",
        before="            if _CHECKING in vars(conn):\n",
        after="            if False:\n",
        killed_by=(
            "tests/integration/storage/test_refused_rows.py::test_refused_row_is_put_aside_and_its_neighbours_proceed[at COMMIT asyncpg-claim keys to send-0-the change]",
        ),
    ),
    Mutant(
        "storage",
        "refused rows of a distant database are all singled out in one transaction",
        "durable/storage/isolation.py",
        before="        if any(failed for _, failed in parts) and time.monotonic() > until:\n",
        after="        if False:\n",
        killed_by=(
            "tests/integration/storage/test_refused_rows.py::test_many_refused_rows_are_put_aside_by_several_transactions_when_each_takes_long[at once asyncpg-claim incoming]",
        ),
    ),
    Mutant(
        "storage",
        "a row is put aside although the right for it has come back",
        "durable/storage/isolation.py",
        before="    if not before.may_be_of_the_wiring:\n        return [], before\n",
        after="    return [], before\n",
        killed_by=(
            "tests/integration/storage/test_refused_rows.py::test_right_coming_back_between_statements_puts_no_row_aside",
        ),
    ),
    Mutant(
        "storage",
        "an unreadable row leaves the others of its claim in nobody's hands",
        "durable/storage/inbox.py",
        before="    return read(batch(conn, schema, statements.CLAIM_INCOMING, params, refused))\n",
        after="    found = read(batch(conn, schema, statements.CLAIM_INCOMING, params, refused))\n"
        "    put_aside(conn, schema, INCOMING, node, found.unreadable)\n"
        "    return Claimed(found.leases, [])\n",
        killed_by=(
            "tests/integration/recovery/test_unreadable_rows.py::test_unreadable_row_does_not_hold_its_neighbours_up",
        ),
    ),
    Mutant(
        "storage",
        "an id that refuses its deadline keeps late messages from their end",
        "durable/storage/inbox.py",
        before="    isolated(conn, expired, note, leave)\n",
        after="    note(expired)\n",
        killed_by=(
            "tests/integration/storage/test_refused_rows.py::test_late_message_is_a_dead_letter_when_its_id_refuses_the_deadline[at once asyncpg-unowned-0]",
        ),
    ),
    Mutant(
        "storage",
        "a rotation changes rows that a node has in its memory",
        "durable/storage/sql/encrypted.py",
        before=" AND NOT row.{OWNED} AND {place}\n",
        after=" AND {place}\n",
        killed_by=("tests/integration/encryption/test_rotation.py::test_rows_of_nodes_are_left_and_counted[99-0-2]",),
    ),
    Mutant(
        "storage",
        "a rotation does not count the rows of nodes",
        "durable/storage/sql/encrypted.py",
        before='        count=f"SELECT count(*) {stale}",\n',
        after='        count=f"SELECT count(*) {stale} AND NOT row.{OWNED}",\n',
        killed_by=("tests/integration/encryption/test_rotation.py::test_rows_of_nodes_are_left_and_counted[99-0-2]",),
    ),
    Mutant(
        "storage",
        "bytes that arrived readable are to be encrypted for ever",
        "durable/storage/sql/encrypted.py",
        before="NOT {is_sealed('body')} AND can_rotate ",
        after="NOT {is_sealed('body')} ",
        killed_by=(
            "tests/integration/encryption/test_rotation.py::"
            "test_readable_letters_are_those_of_a_rotation[bytes that arrived]",
        ),
    ),
    Mutant(
        "storage",
        "readable messages miss their key where there is none",
        "durable/storage/sql/encrypted.py",
        before="WHERE key_id IS NOT NULL AND key_id <> ALL",
        after="WHERE key_id <> ALL",
        killed_by=("tests/integration/encryption/test_rotation.py::test_broken_off_body_needs_no_key_and_is_left",),
    ),
    Mutant(
        "storage",
        "the key of a resolved letter is missing",
        "durable/storage/sql/encrypted.py",
        before="AS bodies WHERE waits) AS needed",
        after="AS bodies) AS needed",
        killed_by=(
            "tests/integration/encryption/test_rotation.py::"
            "test_missing_key_of_a_letter_is_told_while_the_letter_waits[columns1-0]",
        ),
    ),
    Mutant(
        "storage",
        "an edited letter needs its key twice",
        "durable/storage/sql/encrypted.py",
        before="edited_body IS NOT NULL AND ({is_sealed('body')}",
        after="edited_body IS NOT NULL OR ({is_sealed('body')}",
        killed_by=(
            "tests/integration/encryption/test_rotation.py::"
            "test_missing_key_of_a_letter_is_told_while_the_letter_waits[columns0-1]",
        ),
    ),
    Mutant(
        "storage",
        "marks of rows are told as nodes",
        "durable/storage/sql/columns.py",
        before='OWNED: Final = "owner_id > 0"\n',
        after='OWNED: Final = "owner_id <> 0"\n',
        killed_by=(
            "tests/integration/storage/test_owner_marks.py::"
            "test_reader_tells_nodes_from_marks[incoming--1-is refused by the database, and waits for an operator]",
        ),
    ),
    Mutant(
        "storage",
        "a service with rows that the database refuses is healthy",
        "durable/observability/health.py",
        before="        *_refused(gauges),\n",
        after="",
        killed_by=("tests/unit/observability/test_health.py::test_unhealthy_service_names_the_problem[refused]",),
    ),
    Mutant(
        "storage",
        "a refused row keeps the bodies of its batch under the old key",
        "durable/storage/encrypted.py",
        before="    done = sum(isolated(conn, resealed, write, leave))\n",
        after="    done = write(resealed)\n",
        killed_by=(
            "tests/integration/encryption/test_rotation.py::test_rows_refused_by_the_database_are_named_and_the_others_are_encrypted",
        ),
    ),
    Mutant(
        "storage",
        "a statement of its own has the isolation level of the role",
        "durable/storage/engines.py",
        before="            **({} if self._limits.search_path is None else _OWN_ISOLATION),\n",
        after="",
        killed_by=(
            "tests/integration/agents/test_isolation_levels.py::test_agents_work_in_read_committed[serializable-asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "a statement of its own has no limits behind a pooler",
        "durable/storage/database.py",
        before="            if not is_behind_pooler(conn):\n",
        after="            if True:\n",
        killed_by=(
            "tests/integration/storage/test_pooler.py::test_statement_of_its_own_has_the_limits_of_a_transaction[auto-asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "pooled sessions end when they are idle, as the role has it",
        "durable/storage/engines.py",
        before='            "idle_session_timeout": "0",  # whatever the role has: a pool keeps its connections until they are used\n',
        after="",
        killed_by=(
            "tests/integration/storage/test_session_settings.py::test_session_has_its_own_limits_for_those_of_the_role[of_agents-expected1-asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "what durable lacks is told as a mistake in a statement",
        "durable/storage/database.py",
        before="translated(self.schema):",
        after="translated():",
        killed_by=(
            "tests/integration/requests/test_waiting_through_lacks.py::test_caller_waits_through_a_lack[answers]",
        ),
    ),
    Mutant(
        "storage",
        "what a trigger of the application lacks is told as durable's",
        "durable/storage/outages.py",
        before="if advice is None or _is_within_code(error, schema):",
        after="if advice is None:",
        killed_by=(
            f"{_LACKS}::test_fault_of_a_trigger_of_the_application_is_none_of_durable[a table-at once-silent-asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "a connection that is refused is a fault of the work that asked for it",
        "durable/storage/outages.py",
        before='    return "sqlalchemy.pool.base" in _modules(error)\n',
        after="    return False\n",
        killed_by=(
            *(
                f"{_OUTAGES}::test_refused_connection_is_an_outage[asyncpg-{each}-error_of_the_applications]"
                for each in ("closed", "without a right", "a trigger on login", "no primary", "an unknown setting")
            ),
            "tests/failure/test_refusals.py::test_console_tells_of_a_refusal_and_looks_again[asyncpg-closed]",
            "tests/failure/test_refusals.py::test_receiver_answers_a_refusal_as_an_outage[asyncpg-closed]",
        ),
    ),
    Mutant(
        "storage",
        "an error of asyncpg's own that SQLAlchemy passes on is a fault of the work that asked for a connection",
        "durable/storage/outages.py",
        before="InterfaceError | InternalClientError | PostgresError",
        after="InterfaceError | PostgresError",
        killed_by=(
            f"{_OUTAGES}::test_error_passed_on_while_connecting_is_an_outage"
            "[TargetServerAttributeNotMatched('no host fits')]",
        ),
    ),
    Mutant(
        "storage",
        "the name of a role is read as an identifier of SQL",
        "durable/storage/sql/housekeeping.py",
        before="WHERE n.nspname = :schema AND pg_get_userbyid(n.nspowner) = current_user",
        after="WHERE n.nspname = :schema AND n.nspowner = CAST(current_user AS regrole)",
        killed_by=tuple(
            f"tests/integration/cli/test_odd_names.py::test_commands_take_a_role_and_database_of_an_odd_name[{name}]"
            for name in ("svc@lab.iam", "hosp node", "Hosp")
        ),
    ),
    Mutant(
        "storage",
        "a role that may not connect is advised to get rights on tables",
        "durable/storage/outages.py",
        before="return None if _is_met_while_connecting(error) else _ADVICE.get(sqlstate(error))",
        after="return _ADVICE.get(sqlstate(error))",
        killed_by=(
            f"{_OUTAGES}::test_refused_connection_is_an_outage[asyncpg-without a right-error_of_the_applications]",
        ),
    ),
    Mutant(
        "storage",
        "rights are granted to a role that may not connect",
        "durable/storage/grants.py",
        before="    _run(conn, connecting)\n",
        after="",
        killed_by=(f"{_RIGHTS}::test_owner_of_the_database_grants_the_right_to_connect",),
    ),
    Mutant(
        "storage",
        "a right to connect that cannot be granted is kept quiet about",
        "durable/storage/grants.py",
        before="    if not grantable:\n",
        after="    if False:\n",
        killed_by=(f"{_RIGHTS}::test_owner_of_the_schema_names_the_grant_of_the_right_to_connect",),
    ),
    Mutant(
        "storage",
        "a parameter of a URL that no driver takes is handed on",
        "durable/database_url.py",
        before="    _check_names([name for name, _ in pairs], query, setting)\n",
        after="",
        killed_by=(
            f"{_URLS}::test_mistake_in_a_parameter_is_told_by_its_setting[database_url-sslmod=require-"
            "parameter 1 of the URL is unknown; did you mean 'sslmode'?]",
        ),
    ),
    Mutant(
        "storage",
        "a NUL ends the name of a database",
        "durable/database_url.py",
        before="    if _NUL.search(text):\n",
        after="    if False:\n",
        killed_by=(f"{_URLS}::test_nul_is_refused_in_every_part[database_url-%00_other-postgresql://app:pw@db/{{}}]",),
    ),
    Mutant(
        "storage",
        "a host of a URL is two hosts for libpq",
        "durable/database_url.py",
        before='    if not host.isprintable() or "," in host:',
        after="    if not host.isprintable():",
        killed_by=(
            f"{_URLS}::test_text_without_a_url_is_refused_without_showing_a_part[postgresql://app:MARK@one%2Ctwo/orders]",
        ),
    ),
    Mutant(
        "storage",
        "a port is above all ports",
        "durable/database_url.py",
        before="    if text and int(text) not in _PORTS:\n",
        after="    if False:\n",
        killed_by=(f"{_URLS}::test_number_above_all_ports_is_refused[postgresql://db:{{}}/orders-99999]",),
    ),
    Mutant(
        "storage",
        "the last of two values of a parameter wins",
        "durable/database_url.py",
        before="if names.count(name) > 1), None)",
        after="if names.count(name) > 2), None)",
        killed_by=(
            f"{_URLS}::test_mistake_in_a_parameter_is_told_by_its_setting[database_url-host=one&host=two-"
            "host stands twice in the URL; give it once]",
        ),
    ),
    Mutant(
        "storage",
        "a place of a URL hides the parameter that says otherwise",
        "durable/database_url.py",
        before="    if parameters[name] not in (None, written):\n",
        after="    if False:\n",
        killed_by=(
            f"{_URLS}::test_parameter_is_refused_when_the_place_of_the_url_says_otherwise"
            "[postgresql://db/orders?dbname=other-dbname]",
        ),
    ),
    Mutant(
        "storage",
        "a word that libpq does not know is taken for an outage",
        "durable/cli/endings.py",
        before="        case StorageUnavailable() if advice := mistake(error):\n",
        after="        case StorageUnavailable() if advice := None:\n",
        killed_by=("tests/unit/cli/test_mistakes.py::test_word_unknown_to_libpq_is_a_bad_setting[service]",),
    ),
    Mutant(
        "storage",
        "half of a character is called the end of the input",
        "durable/strict_json.py",
        before="        _refuse_half_characters(body)\n        raise\n",
        after="        raise\n",
        killed_by=("tests/unit/test_strict_json.py::test_reader_of_json_refuses_odd_text[half-a message]",),
    ),
    Mutant(
        "storage",
        "the last of two values of a key counts in a setting",
        "durable/setting_types.py",
        before="    return strict_json.read(msgspec.json.decode, text.encode())\n",
        after="    return msgspec.json.decode(text.encode())\n",
        killed_by=("tests/unit/test_strict_json.py::test_reader_of_json_refuses_odd_text[twice-peers]",),
    ),
    Mutant(
        "storage",
        "a key stands twice in the edited body of a letter",
        "durable/dead_letters/bodies.py",
        before="            strict_json.read(msgspec.json.decode, body)\n",
        after="            msgspec.json.decode(body)\n",
        killed_by=("tests/unit/cli/test_mistakes.py::test_edited_body_is_strict_json_without_an_application",),
    ),
    Mutant(
        "storage",
        "the last of two values of an option wins",
        "durable/cli/arguments.py",
        before="        if name in found:\n",
        after="        if False:\n",
        killed_by=("tests/unit/cli/test_mistakes.py::test_pair_of_an_option_is_given_once",),
    ),
    Mutant(
        "storage",
        "the status of no lake is shown",
        "durable/cli/pipeline/status.py",
        before="    _refuse_no_lake(lake, named)\n",
        after="",
        killed_by=("tests/pipeline/test_commands.py::test_status_refuses_an_option_without_a_lake",),
    ),
    Mutant(
        "storage",
        "a command without a reader has failed",
        "durable/cli/app.py",
        before="            code = UNREAD\n",
        after="            code = FAILED\n",
        killed_by=("tests/unit/cli/test_streams.py::test_command_ends_quietly_without_a_reader",),
    ),
    Mutant(
        "storage",
        "one of several hosts has no port",
        "durable/database_url.py",
        before="        ports = [each or _PORT for each in ports]\n",
        after="",
        killed_by=(
            f"{_URLS}::test_each_of_several_hosts_has_a_port_on_every_path[postgresql://one,two/orders-hosts0]",
        ),
    ),
    Mutant(
        "storage",
        "a connection that has ended in the pool is handed out",
        "durable/storage/answering.py",
        before="return not self.is_closed() and not self.is_in_transaction()",
        after="return not self.is_in_transaction()",
        killed_by=("tests/integration/agents/test_tasks_left_behind.py::test_ended_connection_comes_back_in_peace",),
    ),
    Mutant(
        "storage",
        "the node's own session has the limits of the role",
        "recovery/membership.py",
        before="own = unlimited(driver.info.server_version) | _server_settings(self._settings)",
        after="own = _server_settings(self._settings)",
        killed_by=(
            "tests/integration/storage/test_session_settings.py::test_member_stays_one_when_idle_sessions_are_ended",
            "tests/integration/storage/test_session_settings.py::test_session_has_its_own_limits_for_those_of_the_role[of_node-expected0-psycopg]",
        ),
    ),
    Mutant(
        "storage",
        "a commit tells the fault of a trigger as another version of the tables",
        "durable/storage/outages.py",
        before="if fault is None or _is_within_code(error, schema):",
        after="if fault is None:",
        killed_by=(f"{_LACKS}::test_commit_raises_the_unchanged_error_of_a_trigger[a column-at once]",),
    ),
    Mutant(
        "storage",
        "parameters in an error are taken for code of the application",
        "durable/storage/outages.py",
        before='    code = _PARAMETERS.sub("", context)\n',
        after="    code = context\n",
        killed_by=(
            f"{_LACKS}::test_lack_is_named_with_its_advice[a right-with parameters-asyncpg]",
            f"{_LACKS}::test_fault_of_a_trigger_of_the_application_is_none_of_durable"
            "[a right-at once-with parameters-psycopg]",
        ),
    ),
    Mutant(
        "storage",
        "the pipeline has the limits of the role",
        "durable/pipeline/copying.py",
        before="    return _FORMATS | unlimited(_server(url).version)\n",
        after="    return _FORMATS\n",
        killed_by=(
            f"{_LIMITS}::test_pipeline_has_no_limits_of_the_role[of_lock]",
            f"{_LIMITS}::test_pipeline_has_no_limits_of_the_role[of_arrow]",
            f"{_LIMITS}::test_sessions_through_a_pooler_have_the_same_limits[of_snapshot]",
        ),
    ),
    Mutant(
        "storage",
        "migrations have the limits of the role",
        "durable/storage/migrator.py",
        before='        conn.execute(LIFT_LIMITS.within(schema), {"names": list(LIMITS)})\n',
        after="",
        killed_by=(f"{_LIMITS}::test_migrations_have_the_limit_of_the_role_for_locks_alone",),
    ),
    Mutant(
        "storage",
        "a migration waits for a table in use without a limit",
        "durable/storage/migrator.py",
        before='        conn.exec_driver_sql("SET LOCAL lock_timeout TO DEFAULT")',
        after='        conn.exec_driver_sql("SELECT 1")',
        killed_by=(f"{_LIMITS}::test_migrations_have_the_limit_of_the_role_for_locks_alone",),
    ),
    Mutant(
        "storage",
        "migrations lift a limit that the URL sets",
        "durable/storage/sql/housekeeping.py",
        before=" AND source <> 'client'\n",
        after="\n",
        killed_by=(f"{_LIMITS}::test_limits_of_the_url_stay[of_migration]",),
    ),
    Mutant(
        "storage",
        "statements of the agents wait for locks as long as the role lets them",
        "durable/storage/engines.py",
        before='{"search_path": self.search_path, "lock_timeout": "0"}',
        after='{"search_path": self.search_path}',
        killed_by=(f"{_LIMITS}::test_session_has_its_own_limits_for_those_of_the_role[of_agents-expected1-asyncpg]",),
    ),
    Mutant(
        "storage",
        "a limit that only a newer Postgres has is set on every server",
        "durable/storage/session_limits.py",
        before="LIMITS if version >= _HAS_TRANSACTION_TIMEOUT else LIMITS[:-1]",
        after="LIMITS",
        killed_by=(f"{_LIMITS}::test_pipeline_has_no_limits_of_the_role_on_every_server[pg15]",),
    ),
    Mutant(
        "storage",
        "a copy that fails amid its rows raises an error of the system",
        "durable/pipeline/copying.py",
        before="            with closing(_batches(cursor)) as batches:\n",
        after="            with closing(cursor.fetch_record_batch()) as batches:\n",
        killed_by=(
            "tests/pipeline/test_copying.py::"
            "test_fault_of_a_copy_is_told_with_its_remedy[amid-the-rows-the session is ended]",
            "tests/pipeline/test_copying.py::"
            "test_fault_of_a_copy_is_told_with_its_remedy[amid-the-rows-a right is missing]",
        ),
    ),
    Mutant(
        "storage",
        "bytes that are no text stand for the id of a key",
        "durable/storage/sql/columns.py",
        before=" AND {key_id} ~ '^[A-Za-z0-9._-]+$'",
        after="",
        killed_by=("tests/integration/encryption/test_forms.py::test_postgres_reads_any_body_as_python_does",),
    ),
    Mutant(
        "storage",
        "a body that is broken off needs a key",
        "durable/storage/sql/columns.py",
        before="octet_length({body}) >= {ends} + 2 + {address_bytes} + {TAG_BYTES}",
        after="true",
        killed_by=(
            "tests/integration/encryption/test_forms.py::test_postgres_reads_any_body_as_python_does",
            "tests/integration/encryption/test_rotation.py::test_broken_off_body_needs_no_key_and_is_left",
        ),
    ),
    Mutant(
        "storage",
        "a body whose address is no text needs a key",
        "durable/storage/sql/columns.py",
        before=" AND {address} ~ '{_UTF8_IN_HEX}'",
        after="",
        killed_by=("tests/integration/encryption/test_forms.py::test_postgres_reads_any_body_as_python_does",),
    ),
    Mutant(
        "storage",
        "a digest is read of a body that has none",
        "durable/storage/sql/columns.py",
        before="AND octet_length({body}) >= {len(MAGIC) + DIGEST_BYTES}",
        after="",
        killed_by=("tests/integration/encryption/test_forms.py::test_postgres_reads_any_body_as_python_does",),
    ),
    Mutant(
        "storage",
        "a short limit of transactions is no finding",
        "durable/cli/doctor/database.py",
        before="    if not limit or limit >= longest:\n",
        after="    if True:\n",
        killed_by=(
            "tests/integration/storage/test_session_settings.py::test_limit_of_transactions_is_examined[500ms-True]",
        ),
    ),
    Mutant(
        "storage",
        "what a function of durable lacks is told as the application's",
        "durable/storage/outages.py",
        before='    return bool(code) and not re.search(rf"\\b{re.escape(schema)}\\.", f"{_first_line(error)} {code}")\n',
        after="    return bool(code)\n",
        killed_by=(f"{_LACKS}::test_lack_of_a_function_of_durable_is_named_with_its_advice[psycopg]",),
    ),
    Mutant(
        "storage",
        "a command that lacks a table is advised to look whether Postgres runs",
        "durable/cli/endings.py",
        before="case StorageUnavailable() if is_lack(error) or tells_remedy(error):",
        after="case StorageUnavailable() if tells_remedy(error):",
        killed_by=("tests/unit/cli/test_mistakes.py::test_wrapped_lack_keeps_its_own_advice",),
    ),
    Mutant(
        "storage",
        "who has named a standby is advised to look whether Postgres runs",
        "durable/cli/endings.py",
        before="case StorageUnavailable() if is_lack(error) or tells_remedy(error):",
        after="case StorageUnavailable() if is_lack(error):",
        killed_by=(
            "tests/integration/storage/test_outages.py::"
            "test_read_only_database_is_told_with_advice[psycopg-CREATE TABLE more ()]",
        ),
    ),
    Mutant(
        "storage",
        "a command that only reads asks a standby to write",
        "durable/cli/target.py",
        before='({"postgresql_readonly": True} if read_only else {})',
        after='{"postgresql_readonly": read_only}',
        killed_by=(
            "tests/pipeline/test_odd_databases.py::"
            "test_read_only_database_is_read_and_its_writers_name_the_primary[a standby]",
        ),
    ),
    Mutant(
        "storage",
        "doctor ends at a missing table",
        "durable/cli/doctor/database.py",
        before='        yield attempted("services", lambda: services(conn, schema), _MIGRATE)\n',
        after="        yield services(conn, schema)\n",
        killed_by=("tests/integration/cli/test_lacks.py::test_doctor_makes_its_other_checks_without_a_table",),
    ),
    Mutant(
        "storage",
        "the formats of the database are those of durable's connections",
        "durable/storage/engines.py",
        before="            _set_formats(connection)",
        after="            pass",
        killed_by=(
            "tests/integration/storage/test_session_settings.py::test_times_are_read_in_every_format_of_the_database[psycopg-direct]",
            "tests/integration/storage/test_session_settings.py::test_node_runs_with_every_format_of_the_database[asyncpg]",
        ),
    ),
    Mutant(
        "storage",
        "arrays of bytes are written as the session says",
        "durable/storage/sql/statement.py",
        before='        if dialect.driver != "psycopg" or value is None:',
        after="        if True:",
        killed_by=(
            "tests/integration/storage/test_session_formats.py::test_messages_are_handled_as_sent_in_every_format_of_the_database[standard_conforming_strings-False-psycopg]",
            "tests/integration/storage/test_session_formats.py::test_messages_are_handled_as_sent_in_every_format_of_the_database[standard_conforming_strings-True-psycopg]",
        ),
    ),
    Mutant(
        "storage",
        "arrays of psycopg have no NULL where the database says so",
        "durable/storage/engines.py",
        before='            "array_nulls": "on",',
        after="",
        killed_by=(
            "tests/integration/storage/test_session_formats.py::test_messages_are_handled_as_sent_in_every_format_of_the_database[array_nulls-False-psycopg]",
        ),
    ),
    Mutant(
        "storage",
        "texts of psycopg are in the encoding of the role",
        "durable/storage/engines.py",
        before='            "client_encoding": "utf8",',
        after="",
        killed_by=(
            "tests/integration/storage/test_session_formats.py::test_messages_are_handled_as_sent_in_every_format_of_the_database[client_encoding-False-psycopg]",
        ),
    ),
    Mutant(
        "storage",
        "a row lies beyond every place in the queue",
        "migrations/versions/v0001_foundation.py",
        before=" CHECK (seq BETWEEN 1 AND 9223372036854775806)",
        after="",
        killed_by=(
            "tests/integration/storage/test_odd_rows.py::test_row_beyond_every_claim_is_refused_by_the_table[seq-0-incoming-free]",
        ),
    ),
    Mutant(
        "storage",
        "a row belongs to nobody that durable knows",
        "migrations/versions/v0001_foundation.py",
        before=" CHECK (owner_id >= -2)",
        after="",
        killed_by=(
            "tests/integration/storage/test_odd_rows.py::test_row_beyond_every_claim_is_refused_by_the_table[owner_id--77-incoming-free]",
        ),
    ),
    Mutant(
        "storage",
        "an order has no name",
        "migrations/versions/v0001_foundation.py",
        before=" CHECK (ordering_key <> '')",
        after="",
        killed_by=(
            "tests/integration/storage/test_odd_rows.py::test_row_beyond_every_claim_is_refused_by_the_table[ordering_key--incoming-free]",
        ),
    ),
    Mutant(
        "storage",
        "messages that cannot be opened are not said to decode before a deploy",
        "durable/cli/doctor/deploy.py",
        before='(Verdict.WARN, _OPEN) if trial.locked else (Verdict.OK, "")',
        after='(Verdict.OK, "")',
        killed_by=("tests/integration/cli/test_deploy.py::test_deploy_warns_of_messages_without_a_key",),
    ),
    Mutant(
        "storage",
        "gauges read every paused key",
        "durable/storage/sql/circuits.py",
        before="UNION ALL ({_OPEN_ROWS} AND kind = 'key' AND NOT parked ORDER BY since, key LIMIT :most)",
        after="UNION ALL ({_OPEN_ROWS} AND kind = 'key' AND NOT parked)",
        killed_by=(
            "tests/integration/storage/test_gauges.py::test_oldest_paused_keys_are_read_and_all_are_counted[pg18]",
        ),
    ),
    Mutant(
        "storage",
        "pauses of operators hide the keys that dead letters have parked",
        "durable/storage/sql/circuits.py",
        before="({_OPEN_ROWS} AND kind = 'key' AND parked ORDER BY since, key LIMIT :most_probed)",
        after="({_OPEN_ROWS} AND kind = 'key' AND parked AND false ORDER BY since, key LIMIT :most_probed)",
        killed_by=(
            "tests/integration/storage/test_gauges.py::test_oldest_paused_keys_are_read_and_all_are_counted[pg18]",
        ),
    ),
    Mutant(
        "storage",
        "a park is a pause without an end",
        "durable/storage/sql/circuits.py",
        before="    VALUES (:kind, :key, :reason, :actor, true, :ordering_key)\n",
        after="    VALUES (:kind, :key, :reason, :actor, false, :ordering_key)\n",
        killed_by=(
            "tests/contract/bus/test_order.py::"
            "TestOrder::test_parked_messages_wait_for_a_resume_of_their_own_beside_a_pause"
            "[postgres-False-before the dead letter-None]",
        ),
    ),
    Mutant(
        "storage",
        "a resume ends the park beside a pause",
        "durable/storage/sql/circuits.py",
        before="{_PARK_OF_IT} AND NOT EXISTS (SELECT FROM paused) AND",
        after="{_PARK_OF_IT} AND",
        killed_by=(
            "tests/integration/storage/test_parks.py::test_park_is_ended_by_a_resume_alone_in_each_pair_of_steps[key-operator pauses]",
        ),
    ),
    Mutant(
        "storage",
        "plain SQL gives a park an end",
        "migrations/versions/v0001_foundation.py",
        before="    CHECK (NOT parked OR (kind IN ('handler', 'key') AND until IS NULL AND NOT probing))\n",
        after="    CHECK (NOT parked OR kind <> '')\n",
        killed_by=("tests/integration/storage/test_parks.py::test_park_with_an_end_is_refused_by_the_table",),
    ),
    Mutant(
        "storage",
        "a trial is given a message behind a dead letter",
        "durable/storage/sql/ordering.py",
        before='_UNTRIED: Final = "NOT (probing AND CAST(:is_trial AS boolean))"',
        after='_UNTRIED: Final = "NOT CAST(:is_trial AS boolean)"',
        killed_by=(
            "tests/integration/storage/test_parks.py::test_park_is_ended_by_a_resume_alone_in_each_pair_of_steps[ordered handler-breaker opens]",
        ),
    ),
    Mutant(
        "storage",
        "a paused version is tried",
        "durable/storage/sql/inbox.py",
        before="                AND NOT (probing AND CAST(:is_trial AS boolean))\n",
        after="                AND NOT CAST(:is_trial AS boolean)\n",
        killed_by=(
            "tests/integration/storage/test_order_claims.py::TestTrials::"
            "test_paused_version_is_not_tried_with_its_handler[alone]",
        ),
    ),
    Mutant(
        "storage",
        "a park counts as the pause of a colleague",
        "durable/storage/actions.py",
        before="all(each.probing or each.parked for each in before)",
        after="all(each.probing for each in before)",
        killed_by=("tests/integration/console/test_seen.py::TestPauses::test_parked_handler_is_paused_besides",),
    ),
    Mutant(
        "storage",
        "a resume hides the park that it leaves",
        "durable/bus.py",
        before="        if resumed.still_parked is not None:\n",
        after="        if resumed.still_parked == '':\n",
        killed_by=(
            "tests/contract/bus/test_order.py::"
            "TestOrder::test_parked_messages_wait_for_a_resume_of_their_own_beside_a_pause"
            "[memory-False-before the dead letter-None]",
        ),
    ),
    Mutant(
        "storage",
        "the resume command hides the park that it leaves",
        "durable/cli/pauses.py",
        before="    if resumed.still_parked is not None:\n",
        after="    if resumed.still_parked == '':\n",
        killed_by=(
            "tests/integration/agents/test_pauses.py::test_resume_command_ends_a_pause_before_a_park[--key-key]",
        ),
    ),
    Mutant(
        "storage",
        "a resume in memory ends a park before the pause beside it",
        "durable/testing/circuits.py",
        before="        if self._unparked(kind, key) is not None:\n",
        after="        if not parks and self._unparked(kind, key) is not None:\n",
        killed_by=(
            "tests/integration/storage/test_parks.py::test_park_is_ended_by_a_resume_alone_in_each_pair_of_steps[key-operator pauses]",
        ),
    ),
    Mutant(
        "storage",
        "a pause hides the park beside it",
        "durable/observability/stops.py",
        before="                self._open.setdefault(each.key, []).append(each)\n",
        after="                self._open[each.key] = [each]\n",
        killed_by=("tests/unit/observability/test_stops.py::test_pause_beside_a_park_stops_the_same_messages",),
    ),
    Mutant(
        "storage",
        "the metrics show a park as a pause",
        "durable/observability/metrics/service.py",
        before="        key = circuit.kind, name, circuit.parked\n",
        after="        key = circuit.kind, name, False\n",
        killed_by=("tests/unit/observability/test_stops.py::test_park_has_an_age_of_its_own_beside_a_pause",),
    ),
    Mutant(
        "storage",
        "a port that is none is left to the driver",
        "durable/database_url.py",
        before='not all(map(_is_port, ports.split(",")))',
        after="False",
        killed_by=("tests/unit/cli/test_mistakes.py::test_odd_port_of_the_environment_is_a_bad_setting[abc]",),
    ),
    Mutant(
        "storage",
        "the history of a dead letter counts its last attempts",
        "durable/storage/sql/inbox.py",
        before='{INBOX.history("dead-lettered", "moved", counted=_COUNTED, error=":reason")}',
        after='{INBOX.history("dead-lettered", "moved", error=":reason")}',
        killed_by=("tests/contract/bus/test_receipts.py::test_end_of_a_message_tells_its_failed_attempts",),
    ),
    Mutant(
        "storage",
        "whoever comes by takes a connection before those who wait",
        "durable/storage/engines.py",
        before='**{"poolclass": FairAsyncPool, **options}',
        after="**options",
        killed_by=("tests/integration/storage/test_fair_pools.py::test_tasks_take_turns[asyncpg]",),
    ),
    Mutant(
        "storage",
        "a thread that comes by takes a connection before those that wait",
        "durable/storage/engines.py",
        before='**{"poolclass": FairPool, **options}',
        after="**options",
        killed_by=("tests/integration/storage/test_fair_pools.py::test_threads_take_turns",),
    ),
    Mutant(
        "storage",
        "a connection that is handed to a cancelled task is lost",
        "durable/storage/fair_pool.py",
        before="                self._give(waiting.result())\n",
        after="                pass\n",
        killed_by=(
            "tests/unit/storage/test_fair_pool.py::"
            "test_connection_goes_to_the_next_task_when_the_first_one_is_cancelled",
        ),
    ),
    Mutant(
        "storage",
        "whoever waits behind an opening that fails is not woken",
        "durable/storage/fair_pool.py",
        before="_ConnectionRecord(self, connect=False)",
        after="_ConnectionRecord(self)",
        killed_by=(f"{_ROOM}::test_tasks_wait_for_no_connection_while_there_is_room",),
    ),
    Mutant(
        "storage",
        "a thread that waits behind an opening that fails is not woken",
        "durable/storage/fair_pool.py",
        before="_ConnectionRecord(self, connect=False)",
        after="_ConnectionRecord(self)",
        killed_by=(f"{_ROOM}::test_threads_wait_for_no_connection_while_openings_fail",),
    ),
    Mutant(
        "storage",
        "whoever waits does not hear of a connection that was closed for good",
        "durable/storage/fair_pool.py",
        before="        super()._dec_overflow()\n        self._use_room()\n",
        after="        super()._dec_overflow()\n",
        killed_by=(f"{_ROOM}::test_tasks_wait_for_no_connection_while_there_is_room",),
    ),
    Mutant(
        "storage",
        "a collection of garbage amid a return to the pool waits for itself",
        "durable/storage/fair_pool.py",
        before="        self._at_rest.append(item)\n        self._serve()\n",
        after="""\
        with self.__dict__.setdefault("lock", threading.Lock()):
            self._at_rest.append(item)
            self._serve()
""",
        killed_by=(f"{_ROOM}::test_thread_ends_when_garbage_is_collected_amid_its_use_of_a_pool[give back]",),
    ),
    Mutant(
        "storage",
        "a connection for a thread that has left is lost",
        "durable/storage/fair_pool.py",
        before="return not waiting.has_left or waiting.take() is None",
        after="return True",
        killed_by=("tests/unit/storage/test_fair_pool.py::test_connection_of_a_leaving_thread_is_for_the_next_one",),
    ),
    Mutant(
        "storage",
        "a connection that is handed to a thread amid its end is lost",
        "durable/storage/fair_pool.py",
        before="            if (item := waiting.take()) is not None:\n",
        after="            if (item := waiting.take()) is not None and item is None:\n",
        killed_by=(
            "tests/unit/storage/test_fair_pool.py::test_connection_handed_to_a_leaving_thread_is_for_the_next_one",
        ),
    ),
)
