"""Guards of handling: one transaction for each attempt, and the fence at its end."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_FAULTS = "tests/integration/agents/test_faults_in_other_words.py"
_FREED = "tests/integration/agents/test_freed_sessions.py"
_LOOPS = "tests/failure/test_ended_loops.py"
_GROUPS = "tests/integration/agents/test_handling_groups.py"

ROWS = (
    Mutant(
        "handling",
        "a task of a handler that exits ends the event loop",
        "durable/tasks/enclosed.py",
        before="Enclosed(work) if isinstance(work, Coroutine) else work",
        after="work",
        killed_by=(f"{_LOOPS}::test_node_lives_when_a_task_of_a_handler_exits[in_task-exits]",),
    ),
    Mutant(
        "handling",
        "the factory of tasks of a handler stays with the loop",
        "durable/tasks/enclosed.py",
        before="                    loop.set_task_factory(before)\n",
        after="                    pass\n",
        killed_by=("tests/unit/tasks/test_enclosed.py::test_loop_has_its_own_factory_between_the_steps",),
    ),
    Mutant(
        "handling",
        "an exit of a task is told by another name",
        "durable/errors.py",
        before="        elif isinstance(each, BrokeOff) and each.__cause__ is not None:",
        after="        elif False:",
        killed_by=(f"{_LOOPS}::test_node_lives_when_a_task_of_a_handler_exits[in_group-exits]",),
    ),
    Mutant(
        "handling",
        "a message whose handler ends the event loop is handed back unmarked",
        "durable/node.py",
        before="self._interrupted() if is_cut_off else ()",
        after="()",
        killed_by=(
            f"{_LOOPS}::test_message_becomes_a_dead_letter_when_its_handler_ends_the_loop_at_each_start[stop_the_loop]",
        ),
    ),
    Mutant(
        "handling",
        "a stop that is asked for marks what it cuts off",
        "durable/node.py",
        before="self._interrupted() if is_cut_off else ()",
        after="self._interrupted()",
        killed_by=(f"{_LOOPS}::test_ordered_stop_marks_no_message[leaving]",),
    ),
    Mutant(
        "handling",
        "every cancellation of its task is taken for that of the agent",
        "durable/agents/attempts.py",
        before="        return group.timeout.expired() or group.bound.expired() or self.is_cancelled()\n",
        after="        task = current_task()\n        return task is not None and task.cancelling() > 0\n",
        killed_by=(
            f"{_FAULTS}::test_fault_of_the_database_counts_no_attempt_when_the_handler_cancels_its_own_task[asyncpg-conflict-cancel_and_wait-1]",
        ),
    ),
    Mutant(
        "handling",
        "the end of an attempt meets a cancellation that the handler has left behind",
        "durable/agents/runner.py",
        before="                await self._forget_cancellations()\n",
        after="                pass\n",
        killed_by=(
            f"{_FAULTS}::test_error_beside_a_cancellation_of_the_own_task_is_named_by_the_dead_letter[asyncpg-cancel_and_return]",
        ),
    ),
    Mutant(
        "handling",
        "a cancellation while the session is closed replaces the error of the handler",
        "durable/agents/runner.py",
        before="            with suppress(asyncio.CancelledError):  # one that the handler left behind must not replace its error\n",
        after="            with suppress():\n",
        killed_by=(
            f"{_FAULTS}::test_error_beside_a_cancellation_of_the_own_task_is_named_by_the_dead_letter[asyncpg-raise_before_a_timer]",
        ),
    ),
    Mutant(
        "handling",
        "the next attempt of a thread begins before the session of the last one is closed",
        "durable/agents/threads.py",
        before="        while not (closed.done() or is_ended()):\n",
        after="        while False:\n",
        killed_by=(
            f"{_FAULTS}::test_next_attempt_of_a_thread_meets_none_of_its_locks[psycopg-a timeout of the middleware]",
        ),
    ),
    Mutant(
        "handling",
        "a message that meets an error of durable each time is handled again without an end",
        "durable/agents/handling.py",
        before="hand_back(interrupted, is_interrupted=True)",
        after="hand_back(interrupted)",
        killed_by=tuple(
            "tests/integration/agents/test_internal_errors.py::"
            f"test_message_meeting_internal_errors_becomes_a_dead_letter[{each}-its failures]"
            for each in (1, 5, "auto")
        ),
    ),
    Mutant(
        "handling",
        "a message whose key has gone is not put back for another tenant, and is tried without an end",
        "durable/agents/settling.py",
        before="                await self.park([lease], error.key_id)\n                return\n",
        after="                raise error\n",
        killed_by=(
            "tests/integration/encryption/test_missing_keys.py::"
            "test_message_put_back_for_another_tenant_waits_for_its_key",
        ),
    ),
    Mutant(
        "handling",
        "a completion that met too few rows commits",
        "durable/agents/attempts.py",
        before="""\
        if met != len(owned):
            raise LeaseLost
""",
        after="",
        killed_by=("tests/failure/test_guards.py::test_node_declared_dead_leaves_no_second_effect[guarded]",),
    ),
    Mutant(
        "handling",
        "a completion does not look at the owner",
        "durable/storage/sql/work.py",
        before="row.epoch = mine.epoch AND row.owner_id + 0 = :node",
        after="row.epoch = mine.epoch",
        killed_by=(
            "tests/integration/storage/functions/test_fence.py::test_a_row_is_changed_only_by_its_owner_in_its_epoch[pg18-psycopg-delete sent]",
        ),
    ),
    Mutant(
        "handling",
        "a completion does not look at the epoch",
        "durable/storage/sql/work.py",
        before="row.id = mine.id AND row.epoch = mine.epoch AND",
        after="row.id = mine.id AND",
        killed_by=(
            "tests/integration/storage/functions/test_fence.py::test_a_row_is_changed_only_by_its_owner_in_its_epoch[pg18-psycopg-delete sent]",
        ),
    ),
    Mutant(
        "handling",
        "a serialization failure is a failed attempt",
        "durable/agents/delivery.py",
        before="elif (group.conflict is not None or is_conflict(error)) and conflicts < _FREE_CONFLICTS:",
        after="elif False:",
        killed_by=(
            "tests/integration/agents/test_isolation_levels.py::test_conflicts_in_a_row_count_beyond_a_bound[serializable-20-0]",
        ),
    ),
    Mutant(
        "handling",
        "agents have the isolation level of the database",
        "durable/storage/database.py",
        before='isolation_level="READ COMMITTED",  # whatever',
        after="# whatever",
        killed_by=(
            "tests/integration/agents/test_isolation_levels.py::test_agents_work_in_read_committed[serializable]",
        ),
    ),
    Mutant(
        "handling",
        "a claim looks for its rows by their ids",
        "durable/storage/sql/work.py",
        before='condition: str = "row.ctid = picked.tid"',
        after='condition: str = "row.id = picked.id"',
        killed_by=("tests/integration/storage/test_floors.py::test_claim_finds_its_rows_by_their_places[incoming]",),
    ),
    Mutant(
        "handling",
        "a settlement does not look at the epoch",
        "durable/storage/sql/inbox.py",
        before=' AND owner_id + 0 = :node AND epoch = :epoch"',
        after=' AND owner_id + 0 = :node"',
        killed_by=(
            "tests/integration/storage/functions/test_fence.py::test_a_row_is_changed_only_by_its_owner_in_its_epoch[pg18-psycopg-begin a suspect attempt]",
        ),
    ),
    Mutant(
        "handling",
        "a settlement does not look at the owner",
        "durable/storage/sql/inbox.py",
        before=' AND owner_id + 0 = :node AND epoch = :epoch"',
        after=' AND epoch = :epoch"',
        killed_by=(
            "tests/integration/storage/functions/test_fence.py::test_a_row_is_changed_only_by_its_owner_in_its_epoch[pg18-psycopg-begin a suspect attempt]",
        ),
    ),
    Mutant(
        "handling",
        "a handler may end its transaction",
        "durable/agents/fence.py",
        before="""\
        if self._has_ended:
            raise TransactionEnded
""",
        after="",
        killed_by=(
            "tests/integration/agents/test_handling_groups.py::test_message_between_others_leaves_its_neighbours_unchanged[roll back-async]",
        ),
    ),
    Mutant(
        "handling",
        "a handler may send COMMIT as text",
        "durable/agents/fence.py",
        before="    if control.ends:",
        after="    if False:",
        killed_by=(
            "tests/integration/agents/test_handling_groups.py::test_message_between_others_leaves_its_neighbours_unchanged[roll back by text-async]",
        ),
    ),
    Mutant(
        "handling",
        "a message rolls back to a savepoint of its neighbour",
        "durable/agents/fence.py",
        before="            if savepoint is None or savepoint.mark != self._message:\n",
        after="            if savepoint is None:\n",
        killed_by=(f"{_GROUPS}::test_message_cannot_reach_a_savepoint_of_its_neighbour[async]",),
    ),
    Mutant(
        "handling",
        "messages wait behind a long one of their group",
        "durable/agents/delivery.py",
        before="        ends = None if group.budget is None else asyncio.get_running_loop().call_later(group.budget, cut)",
        after="        ends: asyncio.TimerHandle | None = None",
        killed_by=(f"{_GROUPS}::test_messages_behind_a_long_one_are_handled_by_another_worker",),
    ),
    Mutant(
        "handling",
        "a group goes on when its handler has paused itself",
        "durable/agents/attempts.py",
        before="            if self._asked or group.trace",
        after="            if group.trace",
        killed_by=(f"{_GROUPS}::test_no_message_of_a_group_begins_after_its_handler_has_paused[10]",),
    ),
    Mutant(
        "handling",
        "a handler whose groups meet locks goes on with them",
        "durable/agents/delivery.py",
        before="            self._size.stay_alone()",
        after="            pass",
        killed_by=(f"{_GROUPS}::test_handler_stays_alone_when_its_group_met_a_lock",),
    ),
    Mutant(
        "handling",
        "a group goes on after a message that waits elsewhere, or changes the transaction",
        "durable/agents/attempts.py",
        before="            if self._asked or group.trace or (",
        after="            if self._asked or (",
        killed_by=(
            f"{_GROUPS}::test_group_ends_when_a_message_waits_beside_its_session[a pause]",
            f"{_GROUPS}::test_group_ends_when_a_message_leaves_traces_in_the_transaction[set a setting]",
        ),
    ),
    Mutant(
        "handling",
        "waits of a handler beside its session are overlooked",
        "durable/agents/runner.py",
        before="Enclosed(variables.run(self.handle, call)), fence.traces.when_waiting)",
        after="Enclosed(variables.run(self.handle, call)), int)",
        killed_by=(f"{_GROUPS}::test_group_ends_when_a_message_waits_beside_its_session[a turn of the loop]",),
    ),
    Mutant(
        "handling",
        "a wait after a statement is taken for one of the statement",
        "durable/agents/fence.py",
        before="""\
    fence.traces.end_statement()
    if about""",
        after="""\
    if about""",
        killed_by=(f"{_GROUPS}::test_group_ends_when_a_message_waits_beside_its_session[a thread]",),
    ),
    Mutant(
        "handling",
        "a wait for a statement is taken for one of something else",
        "durable/agents/traces.py",
        before="        self._in_statement = True",
        after="        pass",
        killed_by=(f"{_GROUPS}::test_group_goes_on_when_a_message_waits_for_its_session[a slow statement]",),
    ),
    Mutant(
        "handling",
        "a setting of a message is there for the next one of its group",
        "durable/agents/traces.py",
        before="        if control.lasts:",
        after="        if False:",
        killed_by=(f"{_GROUPS}::test_group_ends_when_a_message_leaves_traces_in_the_transaction[set a setting]",),
    ),
    Mutant(
        "handling",
        "a setting that a function sets is overlooked",
        "durable/outbox/sql_text.py",
        before="any(map(_lasts, statements)) or _has_lasting(sql.lower(), may_make_a_table=not _inserts(statements))",
        after="any(map(_lasts, statements))",
        killed_by=(
            f"{_GROUPS}::test_group_ends_when_a_message_leaves_traces_in_the_transaction[set a setting by a function]",
        ),
    ),
    Mutant(
        "handling",
        "what a block leaves in its transaction is overlooked",
        "durable/outbox/sql_text.py",
        before="any(map(_lasts, statements)) or _has_lasting(sql.lower(), may_make_a_table=not _inserts(statements))",
        after="_has_lasting(sql.lower(), may_make_a_table=not _inserts(statements))",
        killed_by=(
            f"{_GROUPS}::test_group_ends_when_a_message_leaves_traces_in_the_transaction[keep rows in a block]",
        ),
    ),
    Mutant(
        "handling",
        "a comment hides a temporary table of a query",
        "durable/outbox/sql_text.py",
        before=r"into\s*(?:--|/\*|(?:local|global|temp|temporary)\b)",
        after=r"into\s*(?:(?:local|global|temp|temporary)\b)",
        killed_by=("tests/unit/outbox/test_sql_text.py::test_temporary_table_of_a_query_is_seen_in_any_spelling",),
    ),
    Mutant(
        "handling",
        "a message finds the objects of the one before in its session",
        "durable/agents/runner.py",
        before="                place.sync_session.expunge_all()",
        after="                pass",
        killed_by=(f"{_GROUPS}::test_objects_of_a_message_are_read_anew_by_the_next_one",),
    ),
    Mutant(
        "handling",
        "a message finds the flags and listeners of another one's session",
        "durable/agents/runner.py",
        before="                fence.traces.compare()",
        after="                pass",
        killed_by=(f"{_GROUPS}::test_group_ends_when_a_message_leaves_traces_in_the_transaction[mute autoflush]",),
    ),
    Mutant(
        "handling",
        "an attribute that a message leaves on its session is overlooked",
        "durable/agents/marks.py",
        before="[*self._attributes] != self._names and self._has_other_names()",
        after="False",
        killed_by=("tests/unit/agents/test_marks.py::test_mark_is_noticed[an attribute]",),
    ),
    Mutant(
        "handling",
        "another value of an attribute of the session is overlooked",
        "durable/agents/marks.py",
        before="state = [*map(self._attributes.get, self._compared)]",
        after="state: list[object] = []",
        killed_by=("tests/unit/agents/test_marks.py::test_mark_is_noticed[another value of an attribute]",),
    ),
    Mutant(
        "handling",
        "what a message leaves in the info of its session is overlooked",
        "durable/agents/marks.py",
        before="[value for value in self._state() if isinstance(value, _CONTAINERS)]",
        after="[]",
        killed_by=("tests/unit/agents/test_marks.py::test_mark_is_noticed[info]",),
    ),
    Mutant(
        "handling",
        "a listener in the place of another one is overlooked",
        "durable/agents/marks.py",
        before="            state += (event, *event)",
        after="            pass",
        killed_by=("tests/unit/agents/test_marks.py::test_mark_is_noticed[another listener]",),
    ),
    Mutant(
        "handling",
        "a listener of the message's own connection is overlooked",
        "durable/agents/marks.py",
        before="return _of_connection(thing.dispatch)",
        after="return ()",
        killed_by=("tests/unit/agents/test_marks.py::test_mark_is_noticed[another listener of the connection]",),
    ),
    Mutant(
        "handling",
        "what a message leaves on its connection is overlooked",
        "durable/agents/fence.py",
        before="        self.traces.join(connection)",
        after="        pass",
        killed_by=(f"{_GROUPS}::test_group_ends_when_a_message_leaves_something_on[its connection-asyncpg]",),
    ),
    Mutant(
        "handling",
        "a task sends in the name of the message that runs meanwhile",
        "durable/outbox/outbox.py",
        before="        if outbox is not self:\n            cause",
        after="        if True:\n            cause",
        killed_by=(f"{_GROUPS}::test_task_left_behind_by_a_message_sends_nothing_in_the_next_one[by the bus]",),
    ),
    Mutant(
        "handling",
        "a task sends for a message that has ended",
        "durable/outbox/outbox.py",
        before="            self.cause.is_over = True",
        after="            pass",
        killed_by=(f"{_GROUPS}::test_task_left_behind_by_a_message_sends_nothing_in_the_next_one[by its context]",),
    ),
    Mutant(
        "handling",
        "a thread sends in the name of the message that runs meanwhile",
        "durable/application/incoming.py",
        before="        with self._outbox.caused_by(self._cause):\n            return self._outbox.send(message, to=to, **options)",
        after="        if True:\n            return self._outbox.send(message, to=to, **options)",
        killed_by=(f"{_GROUPS}::test_thread_left_behind_by_a_message_sends_nothing_in_the_next_one[by its context]",),
    ),
    Mutant(
        "handling",
        "a message finds the context variables of another one",
        "durable/agents/driving.py",
        before="variables.run(step, given)",
        after="step(given)",
        killed_by=(f"{_GROUPS}::test_context_variables_of_a_message_end_with_its_attempt[async-1]",),
    ),
    Mutant(
        "handling",
        "a result of a timeout is committed",
        "durable/agents/attempts.py",
        before="        if self.timeout.expired():",
        after="        if False:",
        killed_by=(f"{_GROUPS}::test_swallowed_timeout_counts_as_raised[1-swallow]",),
    ),
    Mutant(
        "handling",
        "a result of a message that its group has cancelled is committed",
        "durable/agents/attempts.py",
        before="        if self.bound.expired():",
        after="        if False:",
        killed_by=(
            f"{_GROUPS}::test_group_rolls_back_when_a_long_message_swallows_its_cancellation[swallow_for_a_helper]",
        ),
    ),
    Mutant(
        "handling",
        "a result of the end of the node is committed",
        "durable/agents/attempts.py",
        before="if current_task() is not None and self.is_cancelled():",
        after="if False:",
        killed_by=(f"{_GROUPS}::test_swallowed_end_of_the_node_commits_nothing[swallow]",),
    ),
    Mutant(
        "handling",
        "a TimeoutError of the handler's own ends its groups for good",
        "durable/agents/delivery.py",
        before="has_timed_out=len(group.tasks) > 1 and group.timeout.expired()",
        after="has_timed_out=isinstance(error, TimeoutError)",
        killed_by=(
            f"{_GROUPS}::test_handler_stays_alone_for_good_when_its_group_met_the_timeout[its own timeout-False]",
        ),
    ),
    Mutant(
        "handling",
        "the rollback of a single message is told as one of a group",
        "durable/agents/delivery.py",
        before="        if len(group.tasks) > 1:\n            log.info",
        after="        if True:\n            log.info",
        killed_by=(f"{_GROUPS}::test_rollback_of_a_single_message_is_not_told_as_one_of_a_group",),
    ),
    Mutant(
        "handling",
        "a long message keeps those before it from their commit",
        "durable/agents/attempts.py",
        before="            group.bound.reschedule(loop.time())",
        after="            pass",
        killed_by=(
            f"{_GROUPS}::test_messages_of_a_group_commit_before_a_long_one_ends",
            f"{_GROUPS}::test_group_releases_its_rows_when_a_message_waits_for_another_one",
        ),
    ),
    Mutant(
        "handling",
        "a fault of the database counts when the handler panics in its place",
        "durable/agents/runner.py",
        before="                except BaseException as error:\n                    if self._is_asked_for(error):",
        after="                except Exception as error:\n                    if self._is_asked_for(error):",
        killed_by=(
            f"{_FAULTS}::test_fault_of_the_database_counts_no_attempt_in_other_words[asyncpg-lost connection-panic-async]",
        ),
    ),
    Mutant(
        "handling",
        "a cancellation by the handler is taken for that of its node",
        "durable/agents/runner.py",
        before="(isinstance(error, asyncio.CancelledError) and self.is_ended())",
        after="isinstance(error, asyncio.CancelledError)",
        killed_by=(
            f"{_FAULTS}::test_fault_of_the_database_counts_no_attempt_in_other_words[asyncpg-conflict-cancellation-async]",
        ),
    ),
    Mutant(
        "handling",
        "a decision of the handler is repeated for a fault that a savepoint has survived",
        "durable/agents/fence.py",
        before="    fence.go_on(connection)\n",
        after="",
        killed_by=(
            f"{_FAULTS}::test_decision_of_a_handler_counts_when_a_savepoint_has_survived_the_fault[asyncpg-deadlock-within_a_savepoint_as_text-reject]",
        ),
    ),
    Mutant(
        "handling",
        "a fault that is raised on counts when a savepoint has survived it",
        "durable/agents/fence.py",
        before="        return None if is_decided else self._fault\n",
        after="        return None\n",
        killed_by=(
            f"{_FAULTS}::test_survived_fault_counts_no_attempt_when_raised_on[asyncpg-as the cause-full disk-within_a_savepoint_as_text]",
        ),
    ),
    Mutant(
        "handling",
        "a decision that is raised from a survived fault is repeated",
        "durable/agents/fence.py",
        before="is_decided = isinstance(told_by(error), Verdict) or all(",
        after="is_decided = all(",
        killed_by=(f"{_FAULTS}::test_decision_counts_when_raised_from_a_survived_fault[asyncpg-deadlock]",),
    ),
    Mutant(
        "handling",
        "a statement that a read-only server refuses counts as an attempt",
        "durable/storage/outages.py",
        before="return sqlstate(error) == _READ_ONLY or (",
        after="return (",
        killed_by=(
            "tests/integration/agents/test_faults_in_other_words.py::test_fault_of_the_database_counts_no_attempt_in_other_words[asyncpg-read-only-error-async]",
        ),
    ),
    Mutant(
        "handling",
        "a conflict that follows a survived shortage is taken for one",
        "durable/storage/outages.py",
        before="(_is_short(error) and sqlstate(error) != _LIMIT)",
        after="(is_shortage(error) and sqlstate(error) != _LIMIT)",
        killed_by=(f"{_FAULTS}::test_conflict_after_a_survived_shortage_is_no_shortage[asyncpg]",),
    ),
    Mutant(
        "handling",
        "a shortage that the handler has swallowed is a failed attempt",
        "durable/agents/runner.py",
        before="is_lost = fence.outage_behind(error) is not None or (",
        after="is_lost = (",
        killed_by=(
            f"{_FAULTS}::test_swallowed_fault_counts_no_attempt_without_a_savepoint[asyncpg-full disk]",
            f"{_FAULTS}::test_fault_of_the_database_counts_no_attempt_when_the_handler_cancels_its_own_task[asyncpg-full disk-cancel_and_return-1]",
        ),
    ),
    Mutant(
        "handling",
        "an exhausted pool of a listener is no room for the attempt",
        "durable/agents/runner.py",
        before="            if fence.is_connected:  # a listener",
        after="            if False:  # a listener",
        killed_by=(
            f"{_FAULTS}::test_exhausted_pool_counts_as_an_attempt_when_a_listener_waits[asyncpg-no session-after_begin-as it is]",
        ),
    ),
    Mutant(
        "handling",
        "the clock of a node decides how old a message is",
        "durable/agents/delivery.py",
        before="now = await self.settling.now() if self._policy.asks_for_age else self._clock.now()",
        after="now = self._clock.now()",
        killed_by=(
            "tests/integration/agents/test_handling.py::TestAge::test_age_of_a_message_follows_the_database_when_the_clock_of_its_node_is_wrong[0-2-24 h]",
        ),
    ),
    Mutant(
        "handling",
        "an exhausted pool of the application is an outage of the database",
        "durable/storage/outages.py",
        before="_is_of_infrastructure(each) and not isinstance(each, PoolTimeout) for each",
        after="_is_of_infrastructure(each) for each",
        killed_by=(
            f"{_FAULTS}::test_exhausted_pool_counts_as_an_attempt_when_a_listener_waits[asyncpg-sync-before_commit-as it is]",
        ),
    ),
    Mutant(
        "handling",
        "an old cause of an error is an outage of its attempt",
        "durable/agents/runner.py",
        before="isinstance(error, StorageUnavailable | SchemaMismatch) or is_outage_itself(error):",
        after="isinstance(error, StorageUnavailable | SchemaMismatch) or is_outage(error):",
        killed_by=(f"{_FAULTS}::test_error_object_is_not_taken_for_an_old_outage[asyncpg]",),
    ),
    Mutant(
        "handling",
        "a session that has ended knows its outbox",
        "durable/outbox/transactions.py",
        before="        found.end()\n",
        after="        pass\n",
        killed_by=(
            f"{_FREED}::test_session_of_a_unit_of_work_is_freed[True-asyncpg]",
            f"{_FREED}::test_session_of_a_sync_handler_is_freed[psycopg]",
        ),
    ),
    Mutant(
        "handling",
        "the causes of an error are conflicts of its attempt",
        "durable/storage/outages.py",
        before="(_SERIALIZATION_FAILURE, _DEADLOCK) for each in leaves_of(error))",
        after="(_SERIALIZATION_FAILURE, _DEADLOCK) for each in causes_of(error))",
        killed_by=(
            "tests/integration/agents/test_isolation_levels.py::test_error_object_is_not_taken_for_an_old_conflict[repeatable read-Reject-from the conflict]",
        ),
    ),
    Mutant(
        "handling",
        "an error that fails when it is asked is no failed attempt",
        "durable/agents/delivery.py",
        before="        except Exception as fault:\n            return RuntimeError(f",
        after="        except SystemExit as fault:\n            return RuntimeError(f",
        killed_by=(
            "tests/integration/agents/test_odd_errors.py::test_odd_error_counts_and_its_neighbours_are_handled[class-auto]",
        ),
    ),
    Mutant(
        "handling",
        "a deadlock is a failed attempt",
        "durable/storage/outages.py",
        before="any(_state(each) in (_SERIALIZATION_FAILURE, _DEADLOCK)",
        after="any(_state(each) in (_SERIALIZATION_FAILURE,)",
        killed_by=(
            "tests/integration/agents/test_isolation_levels.py::test_conflict_is_repeated_uncounted_as_a_cause_too[repeatable read-as_it_is-40P01]",
        ),
    ),
    Mutant(
        "handling",
        "a full disk in a statement of a handler is a failed attempt",
        "durable/agents/runner.py",
        before="if fence.has_lost_connection or fence.outage_behind(error):  # whatever",
        after="if fence.has_lost_connection:  # whatever",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_shortage_for_a_statement_of_a_handler_counts_as_no_attempt[as it is-53100-1]",
        ),
    ),
    Mutant(
        "handling",
        "a limit that one statement has met is taken for a shortage of all",
        "durable/storage/outages.py",
        before="(_is_short(error) and sqlstate(error) != _LIMIT)",
        after="_is_short(error)",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_statement_beyond_a_limit_of_the_configuration_counts_as_an_attempt",
        ),
        hangs=True,
    ),
    Mutant(
        "handling",
        "messages of a sync handler share transactions by themselves",
        "durable/application/handlers.py",
        before='batch == "auto" and (self.fair_by or not self.is_async)',
        after='batch == "auto" and self.fair_by',
        killed_by=(f"{_GROUPS}::test_messages_of_a_sync_handler_are_alone",),
    ),
    Mutant(
        "handling",
        "a serialization failure ends the groups of a handler for good",
        "durable/storage/outages.py",
        before="any(_state(each) in (_DEADLOCK, _NO_LOCK)",
        after="any(_state(each) in (_DEADLOCK, _NO_LOCK, _SERIALIZATION_FAILURE)",
        killed_by=(
            f"{_GROUPS}::test_handler_stays_alone_for_a_while_or_for_good_by_the_error_of_its_group[40001-False]",
        ),
    ),
    Mutant(
        "handling",
        "a message that failed before joins a group",
        "durable/agents/delivery.py",
        before="marked = next((lease for lease in taken if lease.attempts or lease.interruptions), None)",
        after="marked = next((lease for lease in taken if lease.attempts > 99), None)",
        killed_by=(f"{_GROUPS}::test_message_runs_alone_when_failed_or_interrupted_before",),
    ),
    Mutant(
        "handling",
        "a group goes on when its time is over",
        "durable/agents/attempts.py",
        before="now - began >= group.budget",
        after="False",
        killed_by=(f"{_GROUPS}::test_group_ends_when_its_time_is_over",),
    ),
    Mutant(
        "handling",
        "one object serves all attempts",
        "durable/agents/delivery.py",
        before="""\
            task = await self._decode(lease, attempt, held)
""",
        after="""\
            task = Task(lease, task.message, attempt)
""",
        killed_by=(
            "tests/contract/bus/test_failing.py::TestFailing::test_each_attempt_decodes_its_message_anew[postgres]",
        ),
    ),
    Mutant(
        "handling",
        "a failed group's objects are used again",
        "durable/agents/delivery.py",
        before="""\
        decoded = [await self._decode(task.lease, task.attempt, held) for task in again]
""",
        after="""\
        decoded = list(again)
""",
        killed_by=(
            "tests/integration/agents/test_handling_groups.py::test_message_between_others_leaves_its_neighbours_unchanged[raise-async]",
        ),
    ),
    Mutant(
        "handling",
        "a group goes on although its handler has stopped",
        "durable/agents/delivery.py",
        before="""\
                if await self._may_begin(task.lease, held, has_threads=self._attempts.has_last_threads):
""",
        after="""\
                if True:
""",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestStoppingAGroup::test_opened_breaker_stops_the_rest_of_a_group",
        ),
    ),
    Mutant(
        "handling",
        "the released attempt of a suspect stays counted",
        "durable/agents/settling.py",
        before="await self.give_back([lease])",
        after="await self.hand_back([lease])",
        killed_by=(
            "tests/integration/agents/test_handling.py::TestSuspects::test_uncounted_attempt_leaves_the_number_of_attempts_unchanged[Release-0-suspect]",
        ),
    ),
    Mutant(
        "handling",
        "the attempt of a suspect that stops its handler stays counted",
        "durable/agents/settling.py",
        before="    elif is_suspect(lease):",
        after="    elif False:",
        killed_by=(
            "tests/integration/agents/test_handling.py::TestSuspects::test_uncounted_attempt_leaves_the_number_of_attempts_unchanged[PauseListener-0-suspect]",
        ),
    ),
    Mutant(
        "handling",
        "a message behind a failed one of its key begins",
        "durable/agents/delivery.py",
        before="""\
        if lease.ordering_key in held:
            await release([lease])
            return False
""",
        after="",
        killed_by=(
            "tests/contract/bus/test_failing.py::TestFailing::test_failed_message_of_a_group_holds_the_rest_of_its_key[postgres]",
        ),
    ),
    Mutant(
        "handling",
        "an expired message begins",
        "durable/agents/delivery.py",
        before="        return not (is_late and await self.settling.expire(lease, Lateness(tried=tried or UNCOUNTED)))",
        after="        return True",
        killed_by=(
            "tests/integration/storage/test_expiry.py::test_message_late_at_its_turn_is_a_dead_letter_and_can_be_replayed",
        ),
    ),
    Mutant(
        "handling",
        "a message that expires within a group is handled",
        "durable/agents/attempts.py",
        before="""\
                raise LateInGroup
""",
        after="""\
                pass
""",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestStoppingAGroup::test_a_message_of_a_group_does_not_begin_after_its_deadline[within the transaction]",
        ),
    ),
    Mutant(
        "handling",
        "a suspect's attempt is not counted before it runs",
        "durable/agents/delivery.py",
        before="""\
        if is_suspect(lease):
            if lease.attempts >=""",
        after="""\
        if False:
            if lease.attempts >=""",
        killed_by=("tests/failure/test_guards.py::test_message_killing_every_node_becomes_a_dead_letter[guarded]",),
    ),
    Mutant(
        "handling",
        "a failure for lack of a connection counts",
        "durable/agents/delivery.py",
        before="""\
            if isinstance(error, NoRoom):
                await self._give_back([task], error, held)
                return
""",
        after="",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_wait_of_a_suspect_is_no_attempt",
        ),
    ),
    Mutant(
        "handling",
        "an outage in an attempt counts",
        "durable/agents/delivery.py",
        before="            if isinstance(error, Outage) and patience.bears(error):\n",
        after="            if False:\n",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_loss_of_the_database_is_no_attempt[handler-async]",
        ),
    ),
    Mutant(
        "handling",
        "a handler may hang for ever",
        "durable/agents/attempts.py",
        before="            async with asyncio.timeout(self._timeout) as group.timeout, bounded(group):",
        after="            async with asyncio.timeout(None) as group.timeout:",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_a_wait_for_a_connection_is_no_attempt",
        ),
        hangs=True,
    ),
    Mutant(
        "handling",
        "a thread that was given up enters the handler",
        "durable/agents/attempts.py",
        before="""\
            if self._is_given_up:
                raise NoRoom
""",
        after="",
        killed_by=("tests/unit/agents/test_entry.py::test_attempt_given_up_is_not_entered",),
    ),
    Mutant(
        "handling",
        "a rolled back commit of a lost connection is a failure of the handler",
        "durable/agents/runner.py",
        before="            if is_lost or isinstance(error, StorageUnavailable | SchemaMismatch) or is_outage_itself(error):",
        after="            if False:",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_loss_of_the_database_is_no_attempt[completion-async]",
        ),
    ),
    Mutant(
        "handling",
        "an answer is handled and not kept",
        "durable/agents/attempts.py",
        before="        if self.handler.keeps_answers:\n",
        after="        if False:\n",
        killed_by=("tests/contract/bus/test_answers.py::test_answer_is_given_to_all_callers_as_often_as_they_ask",),
    ),
    Mutant(
        "handling",
        "a short pause before a retry waits for the next poll",
        "durable/agents/handling.py",
        before="        self._delivery.settling.on_delayed = self._ask_when_due\n",
        after="",
        killed_by=("tests/integration/test_runtime.py::test_short_delay_of_a_retry_ends_before_the_next_poll[k]",),
    ),
    Mutant(
        "handling",
        "a retry waits for the next poll when the reply of its commit was lost",
        "durable/agents/settling.py",
        before="                self.on_delayed(delay)  # also without the lease: a lost reply of COMMIT looks like that\n",
        after="                if is_own:\n                    self.on_delayed(delay)\n",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py"
            "::test_retry_is_claimed_when_due_although_the_reply_of_its_commit_was_lost",
        ),
    ),
    Mutant(
        "handling",
        "fences keep their connections for ever",
        "durable/agents/fence.py",
        before="    return found() if found is not None else None\n",
        after="    _kept.append(found and found())\n    return found() if found is not None else None\n\n\n_kept: list[Fence | None] = []\n",
        killed_by=("tests/integration/agents/test_memory.py::test_messages_leave_nothing_in_memory[alone]",),
    ),
    Mutant(
        "handling",
        "a cancellation that a handler has left behind ends its worker",
        "durable/agents/handling.py",
        before="            except BaseException as error:  # also a cancellation that a handler has left behind\n",
        after="            except Exception as error:\n",
        killed_by=(
            "tests/integration/agents/test_handling.py::TestWorkers::test_worker_goes_on_after_a_late_cancellation_by_its_handler",
        ),
    ),
    Mutant(
        "handling",
        "a second cancellation that a handler has left behind ends its worker",
        "durable/agents/handling.py",
        before="                with suppress(asyncio.CancelledError):  # a handler may have left several of them behind\n    ",
        after="",
        killed_by=(
            "tests/integration/agents/test_stray_cancellations.py::test_cancellations_left_behind_by_a_handler_cost_no_message_no_order_and_no_node",
        ),
    ),
    Mutant(
        "handling",
        "a cancellation that a handler has left behind frees the key of a message on its way back",
        "durable/agents/handling.py",
        before="""\
            except BaseException as error:
                self._end_if_cancelled()
                if isinstance(error, KeyboardInterrupt):
""",
        after="""\
            except Exception as error:
                self._end_if_cancelled()
                if isinstance(error, KeyboardInterrupt):
""",
        killed_by=(
            "tests/integration/agents/test_stray_cancellations.py::test_cancellations_left_behind_by_a_handler_cost_no_message_no_order_and_no_node",
        ),
    ),
    Mutant(
        "handling",
        "a task that was cancelled by an accident has ended well",
        "durable/tasks/crew.py",
        before="        error = task.exception() if not task.cancelled() else self._unless_asked(task)\n",
        after="        error = task.exception() if not task.cancelled() else None\n",
        killed_by=("tests/unit/tasks/test_crew.py::test_task_cancelled_by_an_accident_breaks_its_crew_off",),
    ),
    Mutant(
        "handling",
        "a second cancellation reaches no handler",
        "durable/agents/handling.py",
        before="async with Crew() as workers:",
        after="async with asyncio.TaskGroup() as workers:",
        killed_by=(
            "tests/integration/agents/test_handling.py::TestWorkers::test_repeated_cancellation_reaches_a_handler",
        ),
    ),
    Mutant(
        "handling",
        "messages that cannot be handed back keep their room",
        "durable/agents/handling.py",
        before="            finally:  # what was not handed back is released as forgotten\n",
        after="""\
            except ZeroDivisionError:
                raise
            else:
""",
        killed_by=(
            "tests/integration/agents/test_handling.py::TestWorkers::test_room_is_given_back_when_messages_cannot_be_handed_back",
        ),
    ),
    Mutant(
        "handling",
        "a reading from before an opening closes the circuit",
        "durable/agents/latch.py",
        before="            self._writers -= 1\n            self.number += 1\n",
        after="            self._writers -= 1\n",
        killed_by=(
            "tests/unit/agents/test_handler_circuit.py::test_reading_from_before_or_during_the_write_of_an_opening_is_old_news",
        ),
    ),
    Mutant(
        "handling",
        "a reading from within the write of an opening closes the circuit",
        "durable/agents/latch.py",
        before="        return number == self.number and not self._writers",
        after="        return number == self.number",
        killed_by=(
            "tests/unit/agents/test_handler_circuit.py::test_reading_from_before_or_during_the_write_of_an_opening_is_old_news",
        ),
    ),
    Mutant(
        "handling",
        "a pause of a destination makes readings of the handler old",
        "durable/agents/handler_circuit.py",
        before="        with self.generation.writing() if pauses_itself else nullcontext():\n",
        after="        with self.generation.writing():\n",
        killed_by=(
            "tests/unit/agents/test_handler_circuit.py"
            "::test_pause_of_a_destination_leaves_readings_of_the_handler_current",
        ),
    ),
    Mutant(
        "handling",
        "a reading from within the write of a pause ends it",
        "durable/agents/handler_circuit.py",
        before="        with self.generation.writing() if pauses_itself else nullcontext():\n",
        after="        with nullcontext():\n",
        killed_by=(
            "tests/unit/agents/test_handler_circuit.py"
            "::test_pause_of_a_destination_leaves_readings_of_the_handler_current",
        ),
    ),
    Mutant(
        "handling",
        "a trial of a long handler is followed by another",
        "recovery/incoming_claims.py",
        before="                lease=(agent.handler.timeout or settings.handler_timeout) + settings.settling_time,\n",
        after="                lease=settings.handler_timeout + settings.settling_time,\n",
        killed_by=(
            "tests/integration/recovery/test_rounds.py::test_trial_is_the_only_one_for_as_long_as_its_handler_may_take",
        ),
    ),
    Mutant(
        "handling",
        "an error of the work takes the place of a cancellation",
        "durable/tasks/cancelling.py",
        before="    if cancelled is not None:\n",
        after="    if cancelled is not None and (task.cancelled() or task.exception() is None):\n",
        killed_by=(
            "tests/unit/tasks/test_cancelling.py::test_cancellation_is_raised_despite_a_later_failure_of_the_work",
        ),
    ),
    Mutant(
        "handling",
        "changes of a message are flushed by the next one of its group",
        "durable/agents/runner.py",
        before="        if _has_changes(place.sync_session) and not fence.has_failed:\n",
        after="        if False:\n",
        killed_by=(f"{_GROUPS}::test_objects_of_a_message_are_flushed_before_the_next_one",),
    ),
    Mutant(
        "handling",
        "a handler begins in autocommit",
        "durable/agents/fence.py",
        before="        if is_in_autocommit(connection):\n",
        after="        if False:\n",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_handler_in_autocommit_is_refused",
        ),
    ),
    Mutant(
        "handling",
        "a bus starts with an engine in autocommit",
        "durable/outbox/sessions.py",
        before="            if is_in_autocommit(engine):\n",
        after="            if False:\n",
        killed_by=("tests/integration/test_runtime.py::test_engine_in_autocommit_is_refused_when_the_bus_starts",),
    ),
    Mutant(
        "handling",
        "a message may not use its savepoint of a failed text",
        "durable/agents/fence.py",
        before="        fence.doubt_savepoints(context.connection, control.savepoints)\n",
        after="        pass\n",
        killed_by=(f"{_GROUPS}::test_message_may_roll_back_to_its_savepoint_of_a_failed_text",),
    ),
    Mutant(
        "handling",
        "an outage is told in the words of the handler",
        "durable/agents/runner.py",
        before="    reason = described(cause) if cause is not None else fence.loss\n",
        after="    reason = described(error)\n",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_lost_connection_is_logged_with_its_cause_and_without_the_words_of_the_handler[raises]",
        ),
    ),
    Mutant(
        "handling",
        "a table of durable that is missing counts as a failed attempt",
        "durable/agents/runner.py",
        before="isinstance(error, StorageUnavailable | SchemaMismatch) or is_outage_itself(error):",
        after="isinstance(error, StorageUnavailable) or is_outage_itself(error):",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::"
            "TestNoAttempt::test_missing_table_or_right_of_durable_counts_as_no_attempt[1-another column]",
        ),
    ),
    Mutant(
        "handling",
        "a message that lives longer expires by the deadline in memory",
        "durable/storage/expiry.py",
        before="    if late is None:\n        return False\n",
        after="    late = late or lease\n",
        killed_by=(
            "tests/integration/storage/functions/test_ends.py::"
            "test_owned_message_expires_by_the_deadline_of_its_row[pg18-asyncpg-now-dead letter]",
        ),
    ),
    Mutant(
        "handling",
        "a missing table is met again at once",
        "durable/agents/delivery.py",
        before="transaction_with_retry(self._attempts.end_nothing)",
        after="transaction_with_retry(lambda conn, schema: None)",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::"
            "TestNoAttempt::test_missing_table_or_right_of_durable_counts_as_no_attempt[1-no history]",
        ),
    ),
    Mutant(
        "handling",
        "a missing right to finish a message counts as a failed attempt",
        "durable/agents/attempts.py",
        before="if lack := lack_of(error, self._schema):",
        after="if False and (lack := lack_of(error, self._schema)):",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::"
            "TestNoAttempt::test_missing_table_or_right_of_durable_counts_as_no_attempt[1-no right to the history]",
        ),
    ),
    Mutant(
        "handling",
        "a missing right to send counts as a failed attempt",
        "durable/storage/outbox.py",
        before=" or lack_of(error, schema):",
        after=":",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::"
            "TestNoAttempt::test_missing_table_or_right_of_durable_counts_as_no_attempt[1-no right to the outbox]",
        ),
    ),
    Mutant(
        "handling",
        "a process that was suspended blames a handler for its event loop",
        "durable/observability/standstill.py",
        before="if late_by >= _LATE:",
        after="if False:",
        killed_by=("tests/unit/observability/test_standstill.py::test_suspended_process_names_none",),
    ),
    Mutant(
        "handling",
        "a shortage counts at the third attempt",
        "durable/agents/patience.py",
        before="        if isinstance(error, Shortage):\n            return self._paused < LONGEST\n",
        after="",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_shortage_at_the_end_of_an_attempt_counts_as_no_attempt[effects-True-53100-1]",
        ),
    ),
    Mutant(
        "handling",
        "a shortage is met again at once",
        "durable/agents/patience.py",
        before="            await asyncio.sleep(self._pause * random.uniform(0.8, 1.0))\n",
        after="",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_shortage_at_the_end_of_an_attempt_counts_as_no_attempt[effects-True-53100-1]",
        ),
    ),
    Mutant(
        "handling",
        "a shortage of one message holds its handler for ever",
        "durable/agents/patience.py",
        before="            return self._paused < LONGEST\n",
        after="            return True\n",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_shortage_of_one_message_alone_counts_after_a_while[effects]",
        ),
        hangs=True,
    ),
    Mutant(
        "handling",
        "messages run without room for their history",
        "durable/agents/attempts.py",
        before="        inbox.try_to_finish(conn, schema)\n",
        after="",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_message_waits_for_room_for_its_history",
        ),
    ),
    Mutant(
        "handling",
        "the try for room stays in the history",
        "durable/storage/inbox.py",
        before="        raise _Undone\n",
        after="",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_shortage_at_the_end_of_an_attempt_counts_as_no_attempt[effects-True-53100-1]",
        ),
    ),
    Mutant(
        "handling",
        "a shortage is told for each message and attempt",
        "durable/agents/delivery.py",
        before="logging.DEBUG if self._has_shortage and isinstance(error, Shortage) else logging.WARNING",
        after="logging.WARNING",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_shortage_at_the_end_of_an_attempt_counts_as_no_attempt[effects-True-53100-1]",
        ),
    ),
    Mutant(
        "handling",
        "a right that a trigger lacks at the commit counts as no attempt",
        "durable/agents/runner.py",
        before="isinstance(error, StorageUnavailable | SchemaMismatch) or is_outage_itself(error):",
        after="isinstance(error, StorageUnavailable | SchemaMismatch) or is_outage_itself(error) or fence.is_complete:",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::"
            "test_fault_of_a_trigger_of_the_application_counts_as_an_attempt_and_keeps_its_error"
            "[effects-an error of its own]",
        ),
    ),
    Mutant(
        "handling",
        "a lost connection counts when the handler raises something in its place",
        "durable/agents/runner.py",
        before="if fence.has_lost_connection or fence.outage_behind(error):  # whatever",
        after="if fence.has_lost_connection and is_outage(error) or fence.outage_behind(error):  # whatever",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_lost_connection_is_logged_with_its_cause_and_without_the_words_of_the_handler[raises in its place]",
        ),
    ),
    Mutant(
        "handling",
        "a conflict counts when the handler raises something in its place",
        "durable/agents/delivery.py",
        before="(group.conflict is not None or is_conflict(error)) and",
        after="is_conflict(error) and",
        killed_by=(
            "tests/integration/agents/test_isolation_levels.py::test_conflict_is_repeated_uncounted_as_a_cause_too[repeatable read-in_other_words-40P01]",
        ),
    ),
    Mutant(
        "handling",
        "what a group of errors holds is not looked at",
        "durable/storage/outages.py",
        before="reversed(each.exceptions) if isinstance(each, BaseExceptionGroup) else ()",
        after="()",
        killed_by=(
            "tests/unit/application/test_error_groups.py::test_fault_of_the_database_is_found_anywhere_in_a_group",
        ),
    ),
    Mutant(
        "handling",
        "the only error of a group is hidden by it",
        "durable/errors.py",
        before="    return leaves[0] if len(leaves) == 1 else error",
        after="    return error",
        killed_by=("tests/unit/application/test_error_groups.py::test_group_tells_the_only_error_or_names_them_all",),
    ),
    Mutant(
        "handling",
        "a signal of durable is lost among other errors",
        "durable/errors.py",
        before="    if signal is not None:",
        after="    if False:",
        killed_by=("tests/unit/application/test_error_groups.py::test_signal_of_durable_wins_among_others",),
    ),
    Mutant(
        "handling",
        "the rules for errors know nothing of those in a group",
        "durable/application/retry.py",
        before="in (*leaves_of(error), error):",
        after="in (error,):",
        killed_by=("tests/unit/application/test_error_groups.py::test_policy_is_asked_for_each_error_in_order",),
    ),
    Mutant(
        "handling",
        "policies get the group of errors that a handler raised",
        "durable/agents/delivery.py",
        before="            told = told_by(error)\n",
        after="            told = error\n",
        killed_by=(
            "tests/integration/agents/test_handling_faults.py::TestNoAttempt::test_rules_and_letters_know_the_error_in_a_group",
        ),
    ),
    Mutant(
        "handling",
        "messages of an older version wait behind a paused handler, and are told to lag",
        "durable/observability/stops.py",
        before="self._handlers.get(message_type, [message_type])",
        after="[message_type]",
        killed_by=(
            "tests/unit/observability/test_stops.py::TestStoppedVersions::"
            "test_stopped_messages_do_not_lag[paused-po.order]",
        ),
    ),
    Mutant(
        "handling",
        "a type waits behind the stop of one release while a living node of another handles it",
        "durable/storage/nodes.py",
        before="        found[name] = list(dict.fromkeys(node.handlers[name] for node in living if name in node.handlers))\n",
        after="        found[name] = found[name]\n",
        killed_by=("tests/unit/observability/test_stops.py::test_type_with_a_living_handler_waits_behind_no_stop",),
    ),
    Mutant(
        "handling",
        "a type that one of its handlers could take waits behind the others",
        "durable/observability/stops.py",
        before="handlers if all(each in self._open for each in handlers) else []",
        after="handlers",
        killed_by=("tests/unit/observability/test_stops.py::test_type_with_a_living_handler_waits_behind_no_stop",),
    ),
    Mutant(
        "handling",
        "a statement that outlasts the handler's time takes the place of its error",
        "durable/agents/attempts.py",
        before="            self.timeout.reschedule(None)\n",
        after="            pass\n",
        killed_by=(
            "tests/integration/agents/test_tasks_left_behind.py::test_error_of_a_handler_stays_when_a_statement_outlasts_its_time[psycopg]",
        ),
    ),
    Mutant(
        "handling",
        "a lost connection takes the place of a sync handler's error",
        "durable/outbox/unit_of_work.py",
        before="    with suppress(*_ENDED_ANYHOW):\n        try:\n            close_connections",
        after="    with suppress():\n        try:\n            close_connections",
        killed_by=(
            "tests/integration/agents/test_tasks_left_behind.py::test_sync_handler_keeps_its_error_when_postgres_has_ended_its_connection[False]",
        ),
    ),
    Mutant(
        "handling",
        "an answer is upcast to the class that is waited for",
        "durable/application/application.py",
        before="        types = envelope.message_type, *upcasting.newer_types(envelope.message_type)",
        after="        types = (envelope.message_type,)",
        killed_by=(
            "tests/integration/requests/test_answers.py::test_answer_is_told_to_a_bus_with_only_the_same_settings",
        ),
    ),
    Mutant(
        "handling",
        "attempts that ran again at once are counted when the message is handled",
        "durable/agents/attempts.py",
        before="sum(task.uncounted for task in tasks[:1])",
        after="0",
        killed_by=("tests/contract/bus/test_receipts.py::test_end_of_a_message_tells_its_failed_attempts",),
    ),
    Mutant(
        "handling",
        "the attempt that handles a suspect is no failed one",
        "durable/agents/attempts.py",
        before=" - int(is_suspect(self.lease))",
        after="",
        killed_by=(
            "tests/integration/dead_letters/on_postgres/test_attempts.py::TestAttempts::test_attempt_of_a_handled_suspect_is_no_failed_one",
        ),
    ),
    Mutant(
        "handling",
        "what expires instead of a retry has failed",
        "durable/agents/settling.py",
        before="Lateness(delay, storable(reason, LONGEST_REASON), tried)",
        after="Lateness(delay, storable(reason, LONGEST_REASON))",
        killed_by=("tests/contract/bus/test_receipts.py::test_end_of_a_message_tells_its_failed_attempts",),
    ),
    Mutant(
        "handling",
        "a number of transactions at once that handles fewer messages is kept",
        "durable/agents/at_once.py",
        before="            self.count = self._best\n            self._tries_more",
        after="            self._tries_more",
        killed_by=("tests/unit/agents/test_at_once.py::test_number_with_the_highest_rate_is_found_and_kept[rates0-2]",),
    ),
    Mutant(
        "handling",
        "messages that are alone are handled by all workers",
        "durable/agents/delivery.py",
        before="if not self.is_sized or waiting <= self._workers:",
        after="if not self.is_sized or self.at_most(waiting) == 1:",
        killed_by=(
            "tests/integration/agents/test_handling_groups.py::test_messages_of_a_backlog_are_alone_with_two_workers_at_first",
        ),
    ),
    Mutant(
        "handling",
        "workers that could handle the last messages side by side sleep",
        "durable/agents/handling.py",
        before="        if len(self.buffer) and self._may_take():\n            self._changed.set()\n",
        after="",
        killed_by=(
            "tests/integration/agents/test_handling_groups.py::test_last_messages_of_a_backlog_are_handled_side_by_side",
        ),
    ),
    Mutant(
        "handling",
        "a long message keeps the others of its handler waiting",
        "durable/agents/handling.py",
        before="        too_long = asyncio.get_running_loop().call_later(self._settings.group_time.total_seconds(), self._leave, work)\n",
        after="        too_long = asyncio.get_running_loop().call_later(3_600, self._leave, work)\n",
        killed_by=("tests/integration/agents/test_handling_groups.py::test_long_messages_keep_no_other_one_waiting",),
    ),
    Mutant(
        "handling",
        "a worker takes the connection of a given engine before those who wait",
        "durable/agents/handling.py",
        before="            await asyncio.sleep(0)  # whoever",
        after="            pass  # whoever",
        killed_by=(
            "tests/integration/storage/test_fair_pools.py::"
            "test_unit_of_work_is_not_passed_by_a_worker_in_a_given_engine",
        ),
    ),
    Mutant(
        "handling",
        "a park of an ordered handler stops the nodes of one release alone",
        "durable/storage/sql/ordering.py",
        before="kind = 'handler' AND parked AND ordering_key = found.key",
        after="kind = 'handler' AND parked AND ordering_key = found.key AND false",
        killed_by=tuple(
            "tests/integration/messages/test_version_pairs.py::"
            f"test_ordered_handler_is_parked_for_nodes_of_both_releases[{each}]"
            for each in ("old-0-2", "new-0-1", "new-2-1")
        ),
    ),
    Mutant(
        "handling",
        "the stream of an ordered handler is another one once the code of its oldest version is gone",
        "durable/messages/ordering.py",
        before="    return unversioned(message_type)\n",
        after="    return message_type\n",
        killed_by=(
            "tests/unit/messages/test_ordering.py::"
            "test_ordered_handler_has_one_ordering_key_with_and_without_the_code_of_older_versions",
        ),
    ),
    Mutant(
        "handling",
        "a stopped key stops the claims of an ordered handler",
        "durable/storage/sql/ordering.py",
        before="kind = 'key' AND key = found.key AND {_OPEN})",
        after="""kind = 'key' AND {_OPEN} AND key = (
                    SELECT partition_key FROM {{schema}}.incoming_envelopes AS own WHERE own.id = first.id))""",
        killed_by=tuple(
            f"tests/contract/bus/test_order.py::TestOrder::test_ordered_handler_ignores_stops_of_keys[postgres-{how}]"
            for how in ("paused", "parked")
        ),
    ),
    Mutant(
        "handling",
        "a stopped key stops a message that an ordered handler has claimed",
        "durable/agents/delivery.py",
        before="if lease.ordering_key in self.parked or",
        after="if lease.envelope.partition_key in self.parked or",
        killed_by=tuple(
            f"tests/contract/bus/test_order.py::TestOrder::test_ordered_handler_ignores_stops_of_keys[postgres-{how}]"
            for how in ("paused", "parked")
        ),
    ),
    Mutant(
        "handling",
        "a stopped key stops an ordered handler in memory",
        "durable/testing/mailbox.py",
        before="self.circuits.stops_order(row.ordering_key)",
        after="self.circuits.stops_order(row.envelope.partition_key)",
        killed_by=tuple(
            f"tests/contract/bus/test_order.py::TestOrder::test_ordered_handler_ignores_stops_of_keys[memory-{how}]"
            for how in ("paused", "parked")
        ),
    ),
    Mutant(
        "handling",
        "messages of ordered handlers count as behind their own keys",
        "durable/storage/sql/circuits.py",
        before="SELECT FROM {INBOX.rows} WHERE {ORDERED} AND ordering_key = parked.key",
        after="SELECT FROM {INBOX.rows} WHERE {ORDERED} AND partition_key = parked.key",
        killed_by=(
            "tests/integration/storage/test_parks.py::"
            "test_message_of_an_ordered_handler_is_not_counted_behind_its_own_key",
        ),
    ),
    Mutant(
        "handling",
        "a crowd of conflicts is over for none of its messages",
        "durable/agents/delivery.py",
        before="longest = min(_CONFLICT_PAUSE * 2**conflicts, _LONGEST_CONFLICT_PAUSE)",
        after="longest = _CONFLICT_PAUSE",
        killed_by=(
            "tests/integration/agents/test_isolation_levels.py::test_pauses_after_conflicts_double_up_to_a_bound[serializable]",
        ),
    ),
    Mutant(
        "handling",
        "figures know no park of another release",
        "durable/observability/stops.py",
        before="orders = self._parked_types.get(message_type, ())",
        after="orders = ()",
        killed_by=(
            "tests/unit/observability/test_stops.py::TestStoppedVersions::"
            "test_stopped_messages_do_not_lag[parked under another name-po.order.v2]",
        ),
    ),
    Mutant(
        "handling",
        "messages behind a park are counted by the name of their type",
        "durable/observability/stops.py",
        before="        if circuit.order is not None:\n",
        after="        if circuit.kind == CircuitKind.KEY and circuit.order is not None:\n",
        killed_by=("tests/unit/observability/test_stops.py::test_pause_beside_a_park_stops_the_same_messages",),
    ),
    Mutant(
        "handling",
        "a type waits behind the park of an order that nodes declare, and not behind that of its rows",
        "durable/storage/sql/circuits.py",
        before="row.message_type = found.name AND row.ordering_key = parks.ordering_key)",
        after="row.message_type = found.name AND false)",
        killed_by=(
            "tests/integration/storage/test_gauges.py::test_types_behind_a_park_are_those_placed_in_its_order[pg18-rows]",
        ),
    ),
    Mutant(
        "handling",
        "a type without messages waits behind no park",
        "durable/storage/sql/circuits.py",
        before="JOIN parks USING (ordering_key) WHERE side = 'incoming'",
        after="JOIN parks USING (ordering_key) WHERE side = ''",
        killed_by=(
            "tests/integration/storage/test_gauges.py::"
            "test_types_behind_a_park_are_those_placed_in_its_order[pg18-declaration]",
        ),
    ),
    Mutant(
        "handling",
        "a resume ends the park of its own name alone",
        "durable/storage/sql/circuits.py",
        before=" OR ordering_key = ANY (CAST(:orders AS text[])))",
        after=" OR ordering_key = ANY (CAST(:orders AS text[])) AND false)",
        killed_by=(
            "tests/contract/bus/test_order.py::TestOrder::"
            "test_park_of_a_renamed_handler_is_ended_under_both_names[postgres-Booking-Booking]",
        ),
    ),
    Mutant(
        "handling",
        "a bus in memory ends the park of its own name alone",
        "durable/testing/circuits.py",
        before="orders.add(self.places.of_type(key).ordering_key)",
        after="pass",
        killed_by=(
            "tests/contract/bus/test_order.py::TestOrder::"
            "test_park_of_a_renamed_handler_is_ended_under_both_names[memory-Booking-Booking]",
        ),
    ),
    Mutant(
        "handling",
        "a resume ends no park of another version",
        "durable/storage/circuits.py",
        before="return stream_of(key) if kind is CircuitKind.HANDLER else key",
        after="return key",
        killed_by=("tests/integration/storage/test_gauges.py::test_resume_of_a_version_ends_the_park_of_all[pg18]",),
    ),
    Mutant(
        "handling",
        "the bus resumes no key of white space",
        "durable/bus.py",
        before="if not (key if kind is CircuitKind.KEY else key.strip()):",
        after="if not key.strip():",
        killed_by=(
            "tests/contract/bus/test_order.py::TestOrder::test_key_of_white_space_is_parked_and_resumed[memory- ]",
        ),
    ),
    Mutant(
        "handling",
        "the command resumes no key of white space",
        "durable/cli/command.py",
        before='= ("--key", "--tenant", "--id-from")',
        after='= ("--tenant", "--id-from")',
        killed_by=("tests/integration/agents/test_pauses.py::test_key_of_white_space_is_paused_and_resumed[ ]",),
    ),
    Mutant(
        "handling",
        "a handler that is parked in one order is parked in no other",
        "durable/storage/sql/circuits.py",
        before="    VALUES (:kind, :key, :reason, :actor, true, :ordering_key)\n",
        after="""    SELECT :kind, :key, :reason, :actor, true, :ordering_key
    WHERE NOT EXISTS (SELECT FROM {schema}.circuits WHERE kind = :kind AND key = :key AND parked)\n""",
        killed_by=tuple(
            "tests/integration/storage/test_parks.py::"
            f"test_handler_is_parked_in_each_order_and_resumed_in_all[postgres-declared {each}]"
            for each in ("first", "last")
        ),
    ),
    Mutant(
        "handling",
        "a handler that is parked in one order in memory is parked in no other",
        "durable/testing/circuits.py",
        before="        self._parks.setdefault((kind, key, ordering_key), park)\n",
        after="""        if not any(each[:2] == (kind, key) for each in self._parks):
            self._parks[kind, key, ordering_key] = park\n""",
        killed_by=tuple(
            "tests/integration/storage/test_parks.py::"
            f"test_handler_is_parked_in_each_order_and_resumed_in_all[memory-declared {each}]"
            for each in ("first", "last")
        ),
    ),
    Mutant(
        "handling",
        "a resume under an older name leaves the parks of its handler in other orders",
        "durable/storage/sql/circuits.py",
        before="SELECT ordering_key FROM {schema}.circuits JOIN names USING (key)\nWHERE",
        after="SELECT ordering_key FROM {schema}.circuits JOIN names USING (key)\nWHERE false AND",
        killed_by=(
            "tests/integration/storage/test_parks.py::"
            "test_resume_under_an_older_name_ends_the_parks_of_its_handler_in_all_orders",
        ),
    ),
    Mutant(
        "handling",
        "a pause of a key that is a member of an Enum pauses the name of the member",
        "durable/bus.py",
        before="plain_text(key)) for kind, key in given.items()",
        after="str(key)) for kind, key in given.items()",
        killed_by=tuple(
            "tests/contract/bus/test_order.py::TestOrder::"
            f"test_key_of_a_subclass_of_text_is_paused_and_resumed[{world}-Enum]"
            for world in ("postgres", "memory")
        ),
    ),
    Mutant(
        "handling",
        "a schedule is named by a member of an Enum, and its messages by another text",
        "durable/bus.py",
        before="        name = plain_text(name)\n",
        after="",
        killed_by=("tests/unit/testing/test_bus.py::test_declared_names_of_subclasses_of_text_are_plain_text[Enum]",),
    ),
    Mutant(
        "handling",
        "a command refuses a name that is one of very many",
        "durable/storage/sql/known_names.py",
        before="ORDER BY name = ANY (CAST(:asked AS text[])) DESC, name LIMIT",
        after="ORDER BY CAST(:asked AS text[]) IS NULL, name LIMIT",
        killed_by=(
            *(
                f"tests/integration/storage/test_known_names.py::test_name_of_a_kind_is_known_among_very_many[{kind}]"
                for kind in ("destination", "handler", "key", "listener", "schedule")
            ),
            "tests/integration/storage/test_known_names.py::"
            "test_name_in_delayed_messages_is_known_among_very_many[address]",
            "tests/integration/storage/test_known_names.py::test_name_in_letters_is_known_among_very_many[source]",
        ),
    ),
    Mutant(
        "handling",
        "a resume tells of a park that it has ended as of a pause that stays",
        "durable/cli/pauses.py",
        before="handler in paused:",
        after="handler in open_now:",
        killed_by=(
            "tests/integration/agents/test_pauses.py::test_resume_under_an_older_name_tells_of_a_pause_alone[parked]",
        ),
    ),
    Mutant(
        "handling",
        "a release warns of no message that waits in an order that it leaves",
        "durable/storage/sql/placements.py",
        before="WHERE {ORDERED} AND row.ordering_key = known.ordering_key)",
        after="WHERE false)",
        killed_by=(
            "tests/integration/agents/test_left_orders.py::test_release_warns_of_a_left_order[messages that wait]",
        ),
    ),
    Mutant(
        "handling",
        "a release warns of no retry in an order that it leaves",
        "durable/storage/sql/placements.py",
        before="WHERE {HELD} AND row.ordering_key = known.ordering_key)",
        after="WHERE false)",
        killed_by=(
            "tests/integration/agents/test_left_orders.py::test_release_warns_of_a_left_order[a message that waits for its retry]",
        ),
    ),
    Mutant(
        "handling",
        "a release warns of no park in an order that it leaves",
        "durable/storage/sql/placements.py",
        before="parked AND circuits.ordering_key = known.ordering_key))",
        after="parked AND false))",
        killed_by=("tests/integration/agents/test_left_orders.py::test_release_warns_of_a_left_order[a park]",),
    ),
)
