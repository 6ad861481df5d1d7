"""Guards of recovery: who is dead, what is forgotten, and who may take it over."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROWS = (
    Mutant(
        "recovery",
        "dead nodes are not swept",
        "durable/recovery/dormant_nodes.py",
        before="""\
        for node in await self._database.transaction(self._find):
            released += await self._release(node)
""",
        after="",
        killed_by=("tests/failure/test_guards.py::test_rows_of_a_dead_node_are_handled_by_another[guarded]",),
    ),
    Mutant(
        "recovery",
        "two nodes sweep at once",
        "durable/recovery/dormant_nodes.py",
        before="""\
        if not try_lock(conn, schema, Job.SWEEP):
            return []
""",
        after="",
        killed_by=("tests/integration/recovery/test_recovery.py::test_sweep_runs_on_one_node_at_a_time",),
    ),
    Mutant(
        "recovery",
        "a dead node is not struck off",
        "durable/recovery/dormant_nodes.py",
        before="""\
        for node in dormant:
            nodes.remove(conn, schema, node)
""",
        after="",
        killed_by=(
            "tests/integration/recovery/test_recovery.py::test_work_of_a_dead_node_is_taken_over_and_its_registration_removed",
        ),
    ),
    Mutant(
        "recovery",
        "the rows of a dead node keep their epoch",
        "durable/storage/sql/recovery.py",
        before='owned, free = "owner_id = :node{only}", "owner_id = 0, epoch = row.epoch + 1"',
        after='owned, free = "owner_id = :node{only}", "owner_id = 0"',
        killed_by=(
            "tests/integration/storage/functions/test_releasing.py::test_a_dead_nodes_rows_are_released_in_bounded_batches_and_marked[pg18-psycopg-outgoing]",
        ),
    ),
    Mutant(
        "recovery",
        "a death is not counted",
        "durable/storage/sql/recovery.py",
        before='f"{free}, interruptions = row.interruptions + 1"',
        after="free",
        killed_by=("tests/failure/test_guards.py::test_message_killing_every_node_becomes_a_dead_letter[guarded]",),
    ),
    Mutant(
        "recovery",
        "forgotten rows are not released",
        "durable/recovery/forgotten_rows.py",
        before="""\
        released = await self._database.transaction(leases.release, self._table, self._node, forgotten)
""",
        after="""\
        released = 0
""",
        killed_by=("tests/failure/test_guards.py::test_rows_left_by_a_lost_reply_are_handled_in_the_end[guarded]",),
    ),
    Mutant(
        "recovery",
        "a row that came meanwhile is forgotten",
        "durable/recovery/forgotten_rows.py",
        before="self._policy.forgotten(owned, held | self._held())",
        after="self._policy.forgotten(owned, held)",
        killed_by=(
            "tests/integration/recovery/test_recovery.py::test_row_coming_or_ending_during_the_look_is_not_forgotten[came meanwhile]",
        ),
    ),
    Mutant(
        "recovery",
        "a row that was finished meanwhile is forgotten",
        "durable/recovery/forgotten_rows.py",
        before="""\
        held = self._held()
""",
        after="""\
        held: set[Any] = set()
""",
        killed_by=(
            "tests/integration/recovery/test_recovery.py::test_row_coming_or_ending_during_the_look_is_not_forgotten[ended meanwhile]",
        ),
    ),
    Mutant(
        "recovery",
        "a node without its lock is dead at once",
        "durable/recovery/policy.py",
        before="if now - since >= self._grace)",
        after="if now - since >= 0)",
        killed_by=(
            "tests/unit/recovery/test_policy.py::TestDormancy::test_a_node_without_its_lock_is_dormant_a_grace_later_and_not_before",
        ),
    ),
    Mutant(
        "recovery",
        "a suspicion outlives a restart of the server",
        "durable/recovery/policy.py",
        before="            self._beats, self._suspects = {}, {}\n",
        after="",
        killed_by=(
            "tests/unit/recovery/test_policy.py::TestDormancy::test_restart_of_the_server_clears_every_suspicion[dead]",
        ),
    ),
    Mutant(
        "recovery",
        "a paused node is alive",
        "durable/recovery/policy.py",
        before=" or now - self._beats[beat] >= self._stale",
        after="",
        killed_by=(
            "tests/unit/recovery/test_policy.py::TestDormancy::test_node_with_its_lock_is_dormant_when_its_heartbeat_stays_the_same",
        ),
    ),
    Mutant(
        "recovery",
        "a heartbeat of the future is new, for as long as the database's clock was set back",
        "durable/observability/health.py",
        before="if abs(heartbeat_age) >= stale",
        after="if heartbeat_age >= stale",
        killed_by=("tests/unit/observability/test_health.py::test_heartbeat_far_from_now_is_stale[age4-stale]",),
    ),
    Mutant(
        "recovery",
        "status believes one look at an owner",
        "durable/cli/health.py",
        before="        suspects &= _owners_without_life(snapshot, settings)\n",
        after="",
        killed_by=(
            "tests/unit/cli/test_reading_twice.py::test_owner_without_life_at_two_looks_is_dormant[looks5-1-dormant5]",
        ),
    ),
    Mutant(
        "recovery",
        "a database's clock that was set back is not told",
        "durable/recovery/policy.py",
        before="        return before - most if before is not None and before - most >= self.LEAST else None\n",
        after="        return None\n",
        killed_by=("tests/unit/recovery/test_policy.py::test_backward_steps_are_told_and_nothing_else",),
    ),
    Mutant(
        "recovery",
        "a due message is not promoted",
        "durable/storage/sql/recovery.py",
        before='            "execution_time = NULL",',
        after='            "execution_time = execution_time",',
        killed_by=(
            "tests/integration/recovery/test_recovery.py::test_clock_of_the_database_decides_when_messages_are_due[slow clock]",
        ),
        hangs=True,
    ),
    Mutant(
        "recovery",
        "a node that was struck off goes on",
        "durable/recovery/membership.py",
        before='        if conn.execute(self._sql(housekeeping.HEARTBEAT), {"node": node}).first() is None:',
        after='        if conn.execute(self._sql(housekeeping.HEARTBEAT), {"node": node}) is None:',
        killed_by=(
            "tests/integration/recovery/test_recovery.py::test_unregistered_member_notices_with_its_next_heartbeat",
        ),
    ),
    Mutant(
        "recovery",
        "a node whose lock is lost goes on",
        "durable/recovery/membership.py",
        before="        if not conn.execute(self._sql(housekeeping.HOLDS_NODE_LOCK), key).scalar_one():",
        after="        if False:",
        killed_by=(
            "tests/integration/recovery/test_recovery.py::test_member_without_its_lock_notices_with_its_next_heartbeat",
        ),
    ),
    Mutant(
        "recovery",
        "a pooler may hold the lock of a node",
        "durable/recovery/membership.py",
        before="        if told != actual:",
        after="        if False:",
        killed_by=(
            "tests/integration/storage/test_pooler.py::test_node_without_a_direct_connection_names_the_setting[auto-asyncpg]",
        ),
    ),
    Mutant(
        "recovery",
        "an occurrence that failed before a pause is taken for one of it",
        "durable/application/cron.py",
        before="if occurrence is not None and (has_failed or not (pause and pause.covers(due))):",
        after="if occurrence is not None and not (pause and pause.covers(due)):",
        killed_by=(
            "tests/simulation/test_missed_occurrences.py::test_each_occurrence_outside_of_pauses_runs_and_none_of_a_pause[all]",
        ),
    ),
    Mutant(
        "recovery",
        "an occurrence with a failure gives way to the next one",
        "durable/application/cron.py",
        before="newest = [passed[-1], passed[0]] if has_failed and len(passed) > 1 else passed[:1]",
        after="newest = passed[:1]",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestTrouble::test_occurrence_with_one_failure_runs_with_the_next_one[once]",
        ),
    ),
    Mutant(
        "recovery",
        "an occurrence that fails for ever keeps those behind it from running",
        "durable/recovery/recurring_schedules.py",
        before='self.is_followed = len(found.run) > 1 and self._schedule.misfire != "all"',
        after="self.is_followed = False",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestTrouble::test_occurrence_failing_for_ever_gives_way_to_those_behind[once]",
        ),
    ),
    Mutant(
        "recovery",
        "a run that fails takes those of the same round along",
        "durable/recovery/recurring_schedules.py",
        before="""\
        following = found.run[1] if len(found.run) > 1 else found.next
""",
        after="""\
        following = found.next
""",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestTrouble::test_failing_occurrence_prevents_no_earlier_one_and_no_run_by_hand",
            "tests/simulation/test_missed_occurrences.py::test_each_occurrence_outside_of_pauses_runs_and_none_of_a_pause[all]",
        ),
    ),
    Mutant(
        "recovery",
        "a run in memory that fails takes those behind along",
        "durable/testing/schedules.py",
        before="""\
                self._looked[name] = at
""",
        after="""\
                self._looked[name] = self._clock.now()
""",
        killed_by=(
            "tests/unit/testing/test_schedules.py::TestSchedules::test_failing_occurrence_prevents_no_other_and_no_run_by_hand",
        ),
    ),
    Mutant(
        "recovery",
        "a failure is noted for what is due by then",
        "durable/recovery/recurring_schedules.py",
        before="""\
            found = _due(self._schedule, tried)
""",
        after="""\
            found = _due(self._schedule, row)
""",
        killed_by=(
            "tests/simulation/test_missed_occurrences.py::test_each_occurrence_outside_of_pauses_runs_and_none_of_a_pause[once]",
        ),
    ),
    Mutant(
        "recovery",
        "an occurrence that fails before its time is no trouble until then",
        "durable/storage/sql/schedules.py",
        before="LEAST(CAST(:occurrence_at AS timestamptz), now())",
        after="CAST(:occurrence_at AS timestamptz)",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestTrouble::test_failing_occurrence_from_before_its_time_is_told",
        ),
    ),
    Mutant(
        "recovery",
        "an occurrence missed before a pause is passed over in it",
        "durable/recovery/recurring_schedules.py",
        before="""\
        if found.run and row.is_paused:  # it runs when the pause has ended
            return False
""",
        after="",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestOperators::test_occurrence_missed_before_a_pause_runs_afterwards",
            "tests/simulation/test_missed_occurrences.py::test_each_occurrence_outside_of_pauses_runs_and_none_of_a_pause[all]",
        ),
    ),
    Mutant(
        "recovery",
        "a run by hand ends the error of an occurrence",
        "durable/storage/sql/schedules.py",
        before="error = CASE WHEN failing_since IS NOT NULL THEN error END, {_RAN}",
        after="error = NULL, {_RAN}",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestTrouble::test_error_is_shown_as_long_as_the_occurrence_fails[a run by hand]",
        ),
    ),
    Mutant(
        "recovery",
        "a declaration ends the error of an occurrence",
        "durable/storage/sql/schedules.py",
        before="""\
    error = CASE WHEN {_SAME_TIMES} THEN known.error END
""",
        after="""\
    error = NULL
""",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestTrouble::test_error_is_shown_as_long_as_the_occurrence_fails[another node]",
        ),
    ),
    Mutant(
        "recovery",
        "a pause is forgotten before those missed before it have run",
        "durable/storage/sql/schedules.py",
        before="until <= LEAST(now(), CAST(:occurrence_at AS timestamptz))",
        after="until <= now()",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestOperators::test_pause_between_missed_occurrences_passes_over_its_own",
        ),
    ),
    Mutant(
        "recovery",
        "a schedule that nobody knows is paused",
        "durable/bus.py",
        before="""\
        await self._refuse_unknown_schedule(named.get("schedule"))
""",
        after="",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestOperators::test_pause_of_an_unknown_schedule_is_refused",
        ),
    ),
    Mutant(
        "recovery",
        "a schedule that fails again and again is late only since its last occurrence",
        "durable/storage/sql/schedules.py",
        before="COALESCE(failing_since, LEAST(CAST(:occurrence_at AS timestamptz), now()))",
        after="LEAST(CAST(:occurrence_at AS timestamptz), now())",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestTrouble::test_late_and_failing_schedules_are_told",
        ),
    ),
    Mutant(
        "recovery",
        "a service whose schedules stand is healthy",
        "durable/observability/health.py",
        before="        *_late_schedules(gauges, settings),\n",
        after="",
        killed_by=(
            "tests/unit/observability/test_health.py::test_unhealthy_service_names_the_problem[a late schedule]",
        ),
    ),
    Mutant(
        "recovery",
        "a pause that is prolonged begins anew",
        "durable/storage/sql/circuits.py",
        before="THEN clock_timestamp() ELSE circuits.since END",
        after="THEN clock_timestamp() ELSE clock_timestamp() END",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestOperators::test_prolonged_pause_keeps_its_beginning",
        ),
    ),
    Mutant(
        "recovery",
        "health looks for messages behind the oldest parked keys alone",
        "durable/storage/sql/circuits.py",
        before="""\
    ORDER BY NOT EXISTS (SELECT FROM {INBOX.rows} AS row WHERE {ORDERED} AND row.ordering_key = oldest.key), since, key
""",
        after="    ORDER BY since, key\n",
        killed_by=(
            "tests/integration/storage/test_gauges.py::test_messages_behind_the_youngest_of_many_parked_keys_are_counted[pg18]",
        ),
    ),
    Mutant(
        "recovery",
        "the pause of a removed schedule waits for the next of its name",
        "durable/storage/sql/schedules.py",
        before="USING removed WHERE kind = 'schedule' AND key = name)",
        after="USING removed WHERE false)",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestOperators::test_removal_of_a_paused_schedule_removes_its_pause",
        ),
    ),
    Mutant(
        "recovery",
        "an occurrence of a schedule is stored and its schedule stays",
        "durable/recovery/recurring_schedules.py",
        before="conn, schema, self._schedule.name, occurrence_at=following, last_at",
        after="conn, schema, self._schedule.name, occurrence_at=occurrence or following, last_at",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestOnceOverAllNodes::test_each_occurrence_runs_once_and_on_time_however_many_nodes_there_are",
        ),
    ),
    Mutant(
        "recovery",
        "a round does not note when the next message is due",
        "durable/recovery/agent.py",
        before="        self._look_again_in(self._agenda.next_due_in)\n",
        after="",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestScheduledMessages::test_message_due_during_a_round_of_recovery_does_not_wait_for_the_next_poll",
        ),
    ),
    Mutant(
        "recovery",
        "a round looks for what is due before it claims",
        "durable/recovery/agent.py",
        before="""\
        await self._run(self._claims)
        self._is_due = False
        await self._run(self._times)
        if self._is_due:
            await self._run(self._claims)
""",
        after="""\
        await self._run(self._times)
        await self._run(self._claims)
""",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestScheduledMessages::test_message_of_another_process_waits_for_no_other_work_of_a_round",
        ),
    ),
    Mutant(
        "recovery",
        "what has become due in a round waits for the next",
        "durable/recovery/agent.py",
        before="""\
        if self._is_due:
            await self._run(self._claims)
""",
        after="",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestScheduledMessages::test_delayed_message_is_made_due_or_postponed",
        ),
    ),
    Mutant(
        "recovery",
        "addresses beyond the first thousand wait for the next poll",
        "recovery/outgoing_claims.py",
        before="        return bool(waiting or self.after)\n",
        after="        return bool(waiting)\n",
        killed_by=(
            "tests/integration/agents/test_many_addresses.py::test_addresses_beyond_those_of_a_look_have_their_turn_at_once[plain]",
        ),
    ),
    Mutant(
        "recovery",
        "agents of any number of idle addresses are kept",
        "recovery/idle_addresses.py",
        before="        idle += [name for name, (_, since) in by_age[_MOST_IDLE:] if since < now]\n",
        after="",
        killed_by=(
            "tests/integration/agents/test_many_addresses.py::test_agents_of_addresses_used_once_are_few_however_many_addresses_there_are",
        ),
    ),
    Mutant(
        "recovery",
        "tasks have no time to end in after a standstill of the process",
        "durable/tasks/crew.py",
        before="        longest = min(_ROUND, seconds)\n",
        after="        longest = seconds\n",
        killed_by=(
            "tests/unit/tasks/test_crew.py::test_standstill_of_the_process_is_no_time_to_end_in[end]",
            "tests/unit/tasks/test_crew.py::test_standstill_of_the_process_is_no_time_to_end_in[wait]",
        ),
    ),
    Mutant(
        "recovery",
        "a process that stood still is taken for one that hangs",
        "durable/process/last_resort.py",
        before="min(looked - before, _LONGEST_LOOK)",
        after="looked - before",
        killed_by=("tests/unit/process/test_last_resort.py::test_watchdog_does_not_count_a_standstill_of_the_process",),
    ),
    Mutant(
        "recovery",
        "claims that stand are not noticed",
        "durable/recovery/agent.py",
        before="            await self._surviving(name, story)\n",
        after="            await story()\n",
        killed_by=("tests/failure/test_memberships.py::test_standing_claims_of_recovery_are_reported",),
    ),
    Mutant(
        "recovery",
        "a task that is cancelled is cut off in what it does before it ends",
        "durable/tasks/crew.py",
        before="    await wait(cancelled, within=within)\n    return await end(cancelled, within=_OVERTIME)\n",
        after="    return await end(cancelled, within=within)\n",
        killed_by=(
            "tests/failure/test_memberships.py::test_cancelled_start_leaves_no_node",
            "tests/unit/calls/test_connections.py::test_connection_has_the_time_to_say_goodbye",
            "tests/unit/process/test_stopping.py::test_announcements_are_removed_to_the_last_one",
            "tests/unit/tasks/test_crew.py::test_cancelled_task_does_its_last_work_undisturbed",
        ),
    ),
    Mutant(
        "recovery",
        "the rest after a slow look counts as standing",
        "recovery/ordered_claims.py",
        before="        return 0.0 if claimed else _REST * (time.monotonic() - began)\n",
        after="        await asyncio.sleep(0 if claimed else _REST * (time.monotonic() - began))\n        return 0.0\n",
        killed_by=(
            "tests/failure/test_memberships.py::test_node_outlasts_the_rest_after_a_slow_look_for_ordered_work",
        ),
    ),
    Mutant(
        "recovery",
        "a connection of a pool that was replaced stays open",
        "durable/storage/fair_pool.py",
        before="                record.invalidate()\n",
        after="                pass\n",
        killed_by=(
            "tests/integration/agents/test_left_behind.py::test_connections_of_waiting_tasks_are_closed_when_their_pool_is_replaced[True-asyncpg]",
            "tests/integration/agents/test_left_behind.py::test_connections_of_waiting_threads_are_closed_when_their_pool_is_replaced",
            "tests/integration/agents/test_left_behind.py"
            "::test_connection_opened_while_its_engine_is_disposed_of_is_closed[asyncpg]",
        ),
    ),
    Mutant(
        "recovery",
        "the release of parked messages has no bound",
        "recovery/agent.py",
        before="            if time.monotonic() - began > LONGEST_STEP:\n                break\n",
        after="",
        killed_by=(
            "tests/integration/encryption/test_missing_keys.py"
            "::test_release_of_many_parked_messages_is_done_in_bounded_steps",
        ),
    ),
    Mutant(
        "recovery",
        "a node whose rows cannot be released keeps its membership",
        "durable/node.py",
        before="""\
        try:
            await self._live(membership, stopping, started)
        finally:
            singletons.close()
            await membership.leave()
""",
        after="""\
        await self._live(membership, stopping, started)
        singletons.close()
        await membership.leave()
""",
        killed_by=(
            "tests/failure/test_memberships.py::test_cancelled_start_leaves_no_node_when_its_rows_cannot_be_released",
        ),
    ),
    Mutant(
        "recovery",
        "a node waits for a thread of the loop when it leaves",
        "recovery/membership.py",
        before="        await is_set_within(self._ended, _LONGEST_LEAVING)\n",
        after="        await asyncio.to_thread(self._thread.join, _LONGEST_LEAVING)\n",
        killed_by=(
            "tests/failure/test_memberships.py::test_node_joins_again_and_stops_when_all_threads_of_the_loop_hang",
            "tests/unit/tasks/test_own_threads.py::test_default_executor_is_left_to_the_application",
        ),
    ),
    Mutant(
        "recovery",
        "a step of a stop that fails leaves the others out",
        "durable/tasks/crew.py",
        before="            errors.append(error)\n",
        after="            raise error\n",
        killed_by=(
            "tests/unit/process/test_stopping.py::test_cancelled_stop_closes_everything[close_all]",
            "tests/unit/tasks/test_crew.py::test_each_step_is_taken_when_their_owner_is_cancelled",
        ),
    ),
    Mutant(
        "recovery",
        "a process that waits to start counts as no member",
        "durable/process/life.py",
        before="        if not self.is_running or (self.node is not None and self.node.node_id):\n",
        after="        if self.node is not None and self.node.node_id:\n",
        killed_by=("tests/failure/test_memberships.py::test_start_waits_longer_than_a_membership_may_be_lost",),
    ),
    Mutant(
        "recovery",
        "a process that began no watch has no bound for its end",
        "durable/process/last_resort.py",
        before="""\
            self._silence, self._limit, self._reason, self.is_bound = 0.0, seconds, reason, True
            self.watch()
""",
        after="            self._silence, self._limit, self._reason, self.is_bound = 0.0, seconds, reason, True\n",
        killed_by=("tests/unit/process/test_last_resort.py::test_watchdog_bites_when_bound_without_a_beginning",),
    ),
    Mutant(
        "recovery",
        "the watchdog of a bus that has stopped ends the application",
        "durable/bus.py",
        before="""\
            if not life.owns_process:
                life.end_watch()
""",
        after="",
        killed_by=(
            "tests/integration/test_runtime.py::test_application_goes_on_after_a_stop_in_time[full]",
            "tests/integration/test_runtime.py::test_application_goes_on_after_a_stop_in_time[send-only]",
        ),
    ),
    Mutant(
        "recovery",
        "nothing watches the end of a process of the bus's own",
        "durable/bus.py",
        before="            if not life.owns_process:\n",
        after="            if life:\n",
        killed_by=("tests/integration/test_runtime.py::test_process_of_the_bus_is_watched_to_its_end",),
    ),
    Mutant(
        "recovery",
        "a schedule that was asked for by hand is forgotten when it fails",
        "durable/storage/sql/schedules.py",
        before="SET asked_at = now() + CAST(:delay AS interval), error",
        after="SET asked_at = NULL, error",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestTrouble::test_run_by_hand_is_tried_again_after_a_failure",
        ),
    ),
    Mutant(
        "recovery",
        "steps of an end are awaited when nothing can be awaited any more",
        "durable/tasks/crew.py",
        before="""\
        except GeneratorExit:  # nothing can be awaited any more
            for each in steps:
                each.close()
            raise
""",
        after="",
        killed_by=("tests/unit/tasks/test_crew.py::test_steps_are_closed_with_their_owner",),
    ),
    Mutant(
        "recovery",
        "doors are given up one after the other",
        "durable/agents/doors.py",
        before="    await wait(closing, within=patience + ending_seconds)\n",
        after="    for each in closing:\n        await wait([each], within=patience + ending_seconds)\n",
        killed_by=("tests/unit/agents/test_doors.py::test_doors_are_ended_together_after_their_time",),
    ),
    Mutant(
        "recovery",
        "a short drain leaves no time to end what a lost membership has begun",
        "durable/node.py",
        before="min(_LONGEST_ENDING, max(_SHORTEST_ENDING, drain_seconds))",
        after="min(_LONGEST_ENDING, drain_seconds)",
        killed_by=(
            "tests/failure/test_memberships.py::test_handler_has_time_to_end_with_its_membership_however_short_a_drain_is",
        ),
    ),
    Mutant(
        "recovery",
        "a start that is stuck ends with the exit code of any error",
        "durable/process/life.py",
        before="                    if isinstance(error, Stuck) and error.tasks:\n                        self._given_up(error.tasks)\n",
        after="",
        killed_by=(
            "tests/unit/process/test_life.py::test_stuck_task_of_a_start_ends_the_process_of_a_bus_and_is_told_to_an_application[True]",
        ),
    ),
    Mutant(
        "recovery",
        "a signal after the last drain kills the process",
        "durable/process/serving.py",
        before="        signal.signal(number, second.heard)\n",
        after="        pass\n",
        killed_by=(
            "tests/failure/test_memberships.py::test_signal_after_the_node_has_left_ends_the_process_at_once[SIGTERM]",
        ),
    ),
    Mutant(
        "recovery",
        "what a full look finds below the floor waits until nothing is claimed for a second",
        "durable/recovery/floors.py",
        before="            self._owed |= dict.fromkeys(lanes, 0)\n",
        after="            self._owed |= {}\n",
        killed_by=("tests/unit/recovery/test_floors.py::test_row_below_the_floor_is_claimed_after_the_next_full_look",),
    ),
    Mutant(
        "recovery",
        "rows below the floor are forgotten after a batch of them",
        "durable/recovery/floors.py",
        before="            if len(leases) < most or 0 < self._floor(lane) <= last:\n",
        after="            if lane in self._owed:\n",
        killed_by=(
            "tests/unit/recovery/test_floors.py::test_many_rows_below_the_floor_are_claimed_one_batch_after_another",
        ),
    ),
    Mutant(
        "recovery",
        "a short look forgets what is owed",
        "recovery/agent.py",
        before="message_types=[*looks.types.owed, *found.message_types]",
        after="message_types=found.message_types",
        killed_by=("tests/integration/storage/test_floors.py::test_rows_below_the_floor_wait_for_room_alone",),
    ),
    Mutant(
        "recovery",
        "no full look follows the short ones before the next poll",
        "recovery/agent.py",
        before="        self._look_again_in(self._looks.full_in())\n",
        after="",
        killed_by=(
            "tests/integration/storage/test_floors.py::test_rows_of_late_commits_and_other_types_are_handled_behind_a_snapshot",
        ),
    ),
    Mutant(
        "recovery",
        "a short look follows a page of destinations",
        "durable/recovery/floors.py",
        before="        if goes_on:\n            return\n",
        after="",
        killed_by=("tests/unit/recovery/test_floors.py::test_pages_of_destinations_are_all_looked_for_in_full",),
    ),
    Mutant(
        "recovery",
        "short looks never end",
        "durable/recovery/floors.py",
        before="self._now() + min(_TIMES * self._spent, _LONGEST)",
        after='float("inf")',
        killed_by=("tests/unit/recovery/test_floors.py::test_short_looks_end_after_five_seconds",),
    ),
    Mutant(
        "recovery",
        "a short look begins at the last claim",
        "durable/recovery/floors.py",
        before="places[0][1] if places and places[0][0] <= self._now() - _LATE else 0",
        after="places[-1][1] if places else 0",
        killed_by=("tests/unit/recovery/test_floors.py::test_short_look_begins_at_the_claims_of_a_second_ago",),
    ),
    Mutant(
        "recovery",
        "a look leaves its way to the planner",
        "durable/storage/agenda.py",
        before="    conn.execute(ALONG_THE_INDEX_BY_ONE_PLAN.within(schema))\n",
        after="",
        killed_by=(
            "tests/integration/storage/test_floors.py::test_primary_key_is_not_looked_through_for_destinations",
        ),
    ),
    Mutant(
        "recovery",
        "each look is planned anew",
        "durable/storage/sql/work.py",
        before=", set_config('plan_cache_mode', 'force_generic_plan', true)",
        after="",
        killed_by=("tests/integration/storage/test_floors.py::test_looks_of_a_connection_share_one_plan",),
    ),
    Mutant(
        "recovery",
        "a claim from a crowded table leaves its way to the planner",
        "durable/storage/outbox.py",
        before="    if floors:\n",
        after="    if False:\n",
        killed_by=(
            "tests/integration/storage/test_floors.py::test_primary_key_is_not_looked_through_for_destinations",
        ),
    ),
    Mutant(
        "recovery",
        "a schedule that cannot run keeps the others from running",
        "durable/recovery/recurring_schedules.py",
        before="sorted(due, key=self._failed.__contains__)",
        after="due",
        killed_by=(
            "tests/integration/application/test_schedules.py::TestTrouble::test_schedule_refused_like_an_outage_prevents_no_other[53100]",
        ),
    ),
    Mutant(
        "recovery",
        "messages of another service become dead letters",
        "durable/application/application.py",
        before="            return lease.envelope.source == self.service\n",
        after="            return True\n",
        killed_by=(
            "tests/integration/recovery/test_other_services.py::"
            "test_waiting_messages_are_handled_later_when_another_service_has_run_on_their_tables[plain]",
        ),
    ),
    Mutant(
        "recovery",
        "named work is claimed from where the last claim of a slow look has ended",
        "durable/recovery/agent.py",
        before="new.is_anywhere or looks.are_slow",
        after="new.is_anywhere",
        killed_by=("tests/integration/recovery/test_new_work.py::test_named_work_of_slow_looks_is_looked_for",),
    ),
    Mutant(
        "recovery",
        "work with a key or of a tenant is named by its lane alone",
        "durable/storage/outbox.py",
        before="        if place != FREE or envelope.execution_time is not None:\n",
        after="        if envelope.execution_time is not None:\n",
        killed_by=(
            "tests/integration/recovery/test_new_work.py::test_message_stored_by_another_process_is_handled_before_the_next_poll[of a tenant]",
        ),
    ),
    Mutant(
        "recovery",
        "work with a delay is named by its lane alone",
        "durable/storage/outbox.py",
        before="        if place != FREE or envelope.execution_time is not None:\n",
        after="        if place != FREE:\n",
        killed_by=(
            "tests/integration/recovery/test_new_work.py::test_message_stored_by_another_process_is_handled_before_the_next_poll[with a delay]",
        ),
    ),
    Mutant(
        "recovery",
        "a row that can neither be read nor be put aside is named by nobody",
        "durable/recovery/unreadable_rows.py",
        before="    except (DurableError, DBAPIError) as error:\n",
        after="    except ZeroDivisionError as error:\n",
        killed_by=(
            "tests/integration/recovery/test_unreadable_rows.py::test_unreadable_row_does_not_hold_its_neighbours_up",
        ),
    ),
    Mutant(
        "recovery",
        "addresses that somebody names have senders before they have rows",
        "recovery/outgoing_claims.py",
        before="        return await self._claim(names)\n",
        after="        return await self.claim(names)\n",
        killed_by=(
            "tests/integration/recovery/test_new_work.py::test_named_lane_without_rows_starts_no_sender[addresses]",
            "tests/integration/recovery/test_new_work.py::test_named_destination_starts_a_sender_on_one_node",
        ),
    ),
    Mutant(
        "recovery",
        "claimed rows that no transport sends are kept",
        "recovery/outgoing_claims.py",
        before="    if left:\n        await context.database.transaction(release, OUTGOING, context.node, left)\n",
        after="",
        killed_by=(
            "tests/integration/recovery/test_new_work.py::test_row_without_a_transport_goes_back_when_its_destination_is_named",
        ),
    ),
    Mutant(
        "recovery",
        "any number of lanes is read from a NOTIFY",
        "durable/storage/new_work.py",
        before="Lanes = Annotated[frozenset[Name], msgspec.Meta(max_length=MOST)]",
        after="Lanes = frozenset[Name]",
        killed_by=("tests/unit/storage/test_new_work.py::test_lanes_are_told_read_and_added_up_to_a_number",),
    ),
    Mutant(
        "recovery",
        "lanes of many NOTIFYs add up without a bound",
        "durable/storage/new_work.py",
        before=" or max(len(message_types), len(destinations)) > MOST\n",
        after="\n",
        killed_by=("tests/unit/storage/test_new_work.py::test_lanes_are_told_read_and_added_up_to_a_number",),
    ),
    Mutant(
        "recovery",
        "texts that no column holds are read from a NOTIFY",
        "durable/storage/new_work.py",
        before='Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1_000, pattern=r"\\A[^\\x00-\\x1f\\x7f\\ud800-\\udfff]+\\Z")]',
        after="Name = str",
        killed_by=(
            "tests/unit/storage/test_new_work.py::test_payload_of_lanes_without_names_is_work_anywhere[odd8]",
            "tests/integration/recovery/test_new_work.py::test_named_lane_without_rows_starts_no_sender[texts that no column holds]",
        ),
    ),
    Mutant(
        "recovery",
        "named types that no node handles wait for the next poll",
        "recovery/agent.py",
        before="            return not await unhandled(self._context, new.message_types - own)\n",
        after="            return True\n",
        killed_by=(
            "tests/integration/recovery/test_new_work.py::test_named_work_without_a_handler_becomes_a_dead_letter_before_the_next_poll",
        ),
    ),
    Mutant(
        "recovery",
        "each story tells of the same missing table, each time",
        "recovery/troubles.py",
        before="str(error) not in self._lacks.values(), str(error)",
        after="True, str(error)",
        killed_by=("tests/unit/recovery/test_troubles.py::test_lack_is_told_once_for_all_stories_and_so_is_its_end",),
    ),
    Mutant(
        "recovery",
        "an echo of a signal ends the interpreter that ends already",
        "durable/process/serving.py",
        before="        second.let_echoes_pass()\n",
        after="",
        killed_by=("tests/unit/process/test_serving.py::test_process_lives_until_no_echo_can_come",),
    ),
    Mutant(
        "recovery",
        "a signal before the bus began is taken for a second one",
        "durable/process/serving.py",
        before="        if not self._has_begun:\n",
        after="        if False:\n",
        killed_by=("tests/unit/process/test_serving.py::test_signal_without_a_first_one_ends_the_process[False-0]",),
    ),
)
