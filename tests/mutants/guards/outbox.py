"""Guards of outbox: what a commit stores, and what a rollback forgets."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_SCOPE = "tests/integration/outbox/unit_of_work/test_scope.py"
_SHAPES = "tests/unit/outbox/test_scope.py"
_SAVEPOINTS = "tests/integration/outbox/unit_of_work/test_savepoints.py"
_COMMITS = "tests/integration/outbox/unit_of_work/test_commits.py::TestCommits"
_ENGINES = "tests/integration/outbox/unit_of_work/test_several_engines.py"
_KINDS = "tests/integration/outbox/unit_of_work/test_kinds_of_sessions.py"
_TEXTS = "tests/integration/outbox/test_sql_text.py"
_LIFESPAN = "tests/unit/asgi/test_lifespan.py::TestLifespan"
_THREADS = (
    "tests/integration/asgi/test_middleware.py::TestRequests::test_threads_of_one_request_send_in_its_unit_of_work"
)
_CANCELLED_ENDS = "tests/integration/outbox/unit_of_work/test_cancelled_ends.py"
_CANCELLED = f"{_CANCELLED_ENDS}::test_session_beside_a_statement_gives_its_connection_back_when_cancelled"
_ENDS = "tests/integration/outbox/unit_of_work/test_ends_of_sessions.py"
_LEFT_IN_USE = "tests/integration/outbox/unit_of_work/test_left_in_use.py"
_SET_BODIES = "tests/unit/messages/test_codecs_set_bodies.py"
_USES = "tests/unit/application/test_handlers.py::TestCauses::test_ids_tell_apart_the_uses_of_an_id"
_REFUSED_SETS = f"{_SET_BODIES}::test_set_is_refused_by_its_path_in_a_field_of_another_type"

ROWS = (
    Mutant(
        "outbox",
        "a business key is another one under another version",
        "durable/outbox/envelope_factory.py",
        before="{self.service}/{unversioned(message_type)}/{plain_text(key)}",
        after="{self.service}/{message_type}/{plain_text(key)}",
        killed_by=(
            "tests/unit/messages/test_versions.py::test_versions_of_a_type_share_an_id[First-Second-of_a_business_key]",
        ),
    ),
    Mutant(
        "outbox",
        "what follows from messages of two peers under one id is one message",
        "durable/outbox/envelope_factory.py",
        before='of_peer = "" if peer is None else f"<-{peer}"',
        after='of_peer = "" if peer is None else ""',
        killed_by=(_USES,),
    ),
    Mutant(
        "outbox",
        "what follows from two uses of a business key is one message",
        "durable/outbox/envelope_factory.py",
        before='sent_at = "" if is_generated(envelope.id) else ',
        after='sent_at = "" if envelope.id else ',
        killed_by=(_USES,),
    ),
    Mutant(
        "outbox",
        "a message that a handler sends has another id as another version",
        "durable/outbox/envelope_factory.py",
        before="/{self._sent}/{unversioned(message_type)}{told}",
        after="/{self._sent}/{message_type}{told}",
        killed_by=(
            "tests/unit/messages/test_versions.py::test_versions_of_a_type_share_an_id[First-Second-of_a_cause]",
        ),
    ),
    Mutant(
        "outbox",
        "an empty batch that comes again is compared by columns that it has not",
        "durable/storage/staging.py",
        before='    if given["rows"] == "0":\n        return []\n',
        after="",
        killed_by=(
            "tests/pipeline/test_empty_batches.py::"
            "test_batches_without_a_name_are_known_by_whether_they_have_rows[plain-0-0]",
        ),
    ),
    Mutant(
        "outbox",
        "an empty batch is compared by columns with one of rows",
        "durable/storage/staging.py",
        before='    if known["rows"] != given["rows"]:\n        return ["rows"]\n',
        after="",
        killed_by=(
            "tests/pipeline/test_empty_batches.py::"
            "test_rows_under_the_name_of_a_batch_are_refused_unless_both_are_none[atomic-plain-0-2]",
        ),
    ),
    Mutant(
        "outbox",
        "a word for once that is none means false",
        "durable/pipeline/writer.py",
        before="    if once.lower() not in _BOOLEANS:\n",
        after='    if once not in _BOOLEANS and (once := "false") is None:\n',
        killed_by=("tests/pipeline/test_publish.py::test_option_with_another_word_is_refused[ja-once]",),
    ),
    Mutant(
        "outbox",
        "an option of a stream is ignored by a batch read",
        "durable/pipeline/read_options.py",
        before="        if name.lower() in others:\n",
        after="        if False:\n",
        killed_by=("tests/pipeline/test_source.py::test_option_of_the_other_kind_of_read_is_refused",),
    ),
    Mutant(
        "outbox",
        "a batch that Postgres ends for another one is not tried again",
        "durable/pipeline/copying.py",
        before="            if error.__cause__ is None or not is_conflict(error.__cause__):\n                raise\n",
        after="            raise\n",
        killed_by=(
            "tests/pipeline/test_publish_conflicts.py::"
            "test_batches_with_the_same_rows_in_other_orders_are_both_published[false-outbox-batches]",
        ),
    ),
    Mutant(
        "outbox",
        "a lost connection at the end of fast mode does not tell that all is published",
        "durable/pipeline/writer.py",
        before='    with _telling("all parts are published, and the batch may not be remembered; publish the same rows again"):\n',
        after='    with _telling("the database is away"):\n',
        killed_by=(
            "tests/pipeline/test_publish_conflicts.py::"
            "test_lost_connection_of_fast_mode_is_told_with_the_published_parts[the batch]",
        ),
    ),
    Mutant(
        "outbox",
        "a thread of its own does not know the data source",
        "durable/pipeline/source.py",
        before="        session.setActiveSession(session)\n",
        after="        pass\n",
        killed_by=("tests/pipeline/test_publish.py::test_thread_of_its_own_publishes[publish]",),
    ),
    Mutant(
        "outbox",
        "a commit below an open savepoint stores nothing",
        "durable/outbox/transactions.py",
        before="""\
            outbox.may_commit()
""",
        after="""\
            pass
""",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_savepoints.py::TestShapes::test_a_commit_with_a_savepoint_open_stores_everything[asyncpg-messages alone-by_its_transaction]",
        ),
    ),
    Mutant(
        "outbox",
        "a connection's commit does not store what is left",
        "durable/outbox/transactions.py",
        before="""\
        outbox.store_last(connection)
""",
        after="""\
        pass
""",
        killed_by=(
            "tests/integration/outbox/test_transaction_shapes.py::test_messages_stored_and_handed_over_are_those_of_the_committed_rows[engine]",
        ),
    ),
    Mutant(
        "outbox",
        "a commit that cannot store goes on",
        "durable/outbox/transactions.py",
        before="""\
        _rollback(connection)
        raise
""",
        after="""\
        _rollback(connection)
""",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_savepoints.py::TestShapes::test_a_handlers_commit_is_refused_in_any_shape[asyncpg-in a savepoint-with data-by_its_transaction]",
        ),
    ),
    Mutant(
        "outbox",
        "a rolled back savepoint keeps its messages",
        "durable/outbox/outbox.py",
        before="""\
        self._abandon(self._pending.forget(transaction))
""",
        after="""\
        self._pending.keep(transaction)
""",
        killed_by=("tests/failure/test_guards.py::test_messages_of_a_rolled_back_transaction_are_discarded[guarded]",),
    ),
    Mutant(
        "outbox",
        "a rolled back connection keeps its messages",
        "durable/outbox/outbox.py",
        before="""\
        self._abandon(self._pending.take(self._not_connected))
        return self._connection is not None""",
        after="        return self._connection is not None",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_joined_transactions.py::TestJoinedTransactions::test_kept_rows_keep_their_messages_when_the_session_has_ended_the_joined_transaction[rollback-rollback]",
        ),
    ),
    Mutant(
        "outbox",
        "a rolled back savepoint of the connection keeps its messages",
        "durable/outbox/outbox.py",
        before="            self._abandon(self._pending.meet(verb, name, self._not_connected))\n",
        after="            pass\n",
        killed_by=(
            "tests/integration/outbox/test_transaction_shapes.py::test_messages_stored_and_handed_over_are_those_of_the_committed_rows[joined by savepoints]",
        ),
    ),
    Mutant(
        "outbox",
        "a rollback that is not over takes messages",
        "durable/outbox/outbox.py",
        before="""\
        if self._is_rolled_back:
""",
        after="""\
        if False:
""",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_commits.py::TestCommits::test_message_sent_by_a_rollback_listener_is_refused_and_later_ones_are_stored[asyncpg-savepoint]",
        ),
    ),
    Mutant(
        "outbox",
        "a closed unit of work takes messages",
        "durable/outbox/outbox.py",
        before="        if self._enlistment.is_closed or self._is_committing or",
        after="        if self._is_committing or",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_senders.py::TestOtherTasks::test_listener_of_the_end_of_a_unit_of_work_cannot_send[after_transaction_end]",
        ),
    ),
    Mutant(
        "outbox",
        "a handler's unit of work takes messages after its COMMIT",
        "durable/outbox/outbox.py",
        before="        self._enlistment.is_closed |= self._enlistment.closes_with_commit\n",
        after="",
        killed_by=(
            "tests/integration/agents/test_handling.py::TestOneTransaction::test_listener_of_the_end_cannot_send[after_transaction_end]",
        ),
    ),
    Mutant(
        "outbox",
        "messages are taken while the COMMIT is under way",
        "durable/outbox/outbox.py",
        before="        if self._enlistment.is_closed or self._is_committing or",
        after="        if self._enlistment.is_closed or",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_commits.py::TestCommits::test_a_message_sent_after_the_commit_is_refused_and_not_lost[asyncpg]",
        ),
    ),
    Mutant(
        "outbox",
        "messages are handed over before the transaction ends",
        "durable/outbox/outbox.py",
        before="""\
        elif not self._connection.in_transaction():
            self._hand_over""",
        after="""\
        else:
            self._hand_over""",
        killed_by=(
            "tests/integration/outbox/test_transaction_shapes.py::test_messages_stored_and_handed_over_are_those_of_the_committed_rows[joined by savepoints]",
        ),
    ),
    Mutant(
        "outbox",
        "a joined session owns its rows",
        "durable/outbox/outbox.py",
        before="owned=not self._is_joined",
        after="owned=True",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_joined_transactions.py::TestJoinedTransactions::test_messages_are_handed_over_by_the_outer_commit_alone[committed-conditional_savepoint]",
        ),
    ),
    Mutant(
        "outbox",
        "a key's message is owned by the node that sends it",
        "durable/outbox/outbox.py",
        before="if owned and places[key].ordering_key is None]",
        after="if owned]",
        killed_by=(
            "tests/integration/agents/test_order.py::TestAKey::test_key_is_claimed_again_without_waiting_for_the_next_poll",
        ),
    ),
    Mutant(
        "outbox",
        "a row that went with a later savepoint counts as stored",
        "durable/outbox/pending.py",
        before="lost = [entry for entry in self._entries if entry.stored_by > place.inserts]",
        after="lost: list[Entry] = []",
        killed_by=(
            "tests/integration/outbox/test_transaction_shapes.py::test_message_is_stored_again_when_a_later_savepoint_took_its_row_along",
        ),
    ),
    Mutant(
        "outbox",
        "the only message of a commit ignores that its business key is known",
        "durable/storage/outbox.py",
        before="case [only] if is_generated(only.envelope.id):",
        after="case [only]:",
        killed_by=(
            "tests/integration/storage/functions/test_storing.py::test_only_message_of_a_commit_is_stored_as_one_of_several[pg18-psycopg-free-local]",
        ),
    ),
    Mutant(
        "outbox",
        "a generator's unit of work takes the messages of its consumer",
        "durable/outbox/scope.py",
        before="        if suspended and any(not block.generators or block.generators[0] not in suspended for block in known):\n",
        after="        if False:\n",
        killed_by=(
            f"{_SCOPE}::test_consumer_of_a_generator_names_its_unit_of_work",
            f"{_SCOPE}::test_consumer_of_a_sync_generator_names_its_outbox",
        ),
    ),
    Mutant(
        "outbox",
        "a generator that runs in a greenlet is not found",
        "durable/outbox/scope.py",
        before="        lets = lets.parent\n",
        after="        lets = None\n",
        killed_by=(
            f"{_SHAPES}::test_generator_and_its_consumer_find_their_own_block_or_none[a_task_a_step-directly-in_a_listener-within another]",
        ),
    ),
    Mutant(
        "outbox",
        "a step of a generator in a task of its own sends with its consumer's unit of work",
        "durable/outbox/scope.py",
        before="            meant = of_running[-1]\n",
        after="            pass\n",
        killed_by=(
            f"{_SHAPES}::test_generator_and_its_consumer_find_their_own_block_or_none[a_task_a_step-directly-here-within another]",
        ),
    ),
    Mutant(
        "outbox",
        "a unit of work within a step of a generator is not found",
        "durable/outbox/scope.py",
        before="        if running and (innermost is None or innermost.within is not of_running[-1]):\n",
        after="        if running:\n",
        killed_by=(f"{_SHAPES}::test_function_called_by_a_generator_finds_its_own_block",),
    ),
    Mutant(
        "outbox",
        "what a later step of a generator starts sends with its consumer's unit of work",
        "durable/outbox/scope.py",
        before="and self._surrounds_a_straying_generator(meant):\n",
        after="and False:\n",
        killed_by=(
            f"{_SHAPES}::test_generator_and_its_consumer_find_their_own_block_or_none[a_task_a_step-directly-in_a_thread-within another]",
        ),
    ),
    Mutant(
        "outbox",
        "tasks beside a generator are refused the unit of work around both",
        "durable/outbox/scope.py",
        before="        return any(each.outlives_its_task and block in _chain(each.before) for each in list(self._surrounded))\n",
        after="        return any(block in _chain(each.before) for each in list(self._surrounded))\n",
        killed_by=(f"{_SHAPES}::test_tasks_beside_a_generator_find_the_block_around_both",),
    ),
    Mutant(
        "outbox",
        "a unit of work of a class is taken for that of a function",
        "durable/outbox/scope.py",
        before="        is_of_user = name in _ENTERING\n",
        after="        is_of_user = False\n",
        killed_by=(
            f"{_SHAPES}::test_generator_and_its_consumer_find_their_own_block_or_none[a_loop-by_an_object-here-within another]",
        ),
    ),
    Mutant(
        "outbox",
        "a unit of work of a stack is taken for that of a function",
        "durable/outbox/scope.py",
        before='        if module == "contextlib" and name in _STACKED:\n',
        after="        if False:\n",
        killed_by=(f"{_SHAPES}::test_block_entered_by_a_helper_of_a_stack_is_its_generators_or_nobodys",),
    ),
    Mutant(
        "outbox",
        "a context manager's unit of work is not found by its user",
        "durable/outbox/scope.py",
        before='    return _is_generator(frame) and driver is not None and driver.f_globals.get("__name__") == "contextlib"\n',
        after="    return False\n",
        killed_by=(
            f"{_SCOPE}::test_context_manager_holds_in_the_block_of_its_user",
            f"{_SCOPE}::test_sync_context_manager_holds_in_the_block_of_its_user",
        ),
    ),
    Mutant(
        "outbox",
        "calls around an event loop count as those of its tasks",
        "durable/outbox/scope.py",
        before="            if frame is first:\n                return\n",
        after="",
        killed_by=(f"{_SHAPES}::test_task_run_within_a_generator_is_not_in_its_unit_of_work",),
    ),
    Mutant(
        "outbox",
        "a unit of work that is left takes a later one along",
        "durable/outbox/scope.py",
        before="        if self._innermost.get() is block:  # otherwise it is left in another context, or before a later one\n",
        after="        if True:\n",
        killed_by=(f"{_SHAPES}::test_later_block_stays_in_scope_when_an_earlier_one_is_left",),
    ),
    Mutant(
        "outbox",
        "units of work that are over stay in memory",
        "durable/outbox/scope.py",
        before="            each.before = self._left if before is not None and before.is_over else before\n",
        after="",
        killed_by=(
            f"{_SHAPES}::test_generators_left_early_leave_nothing",
            f"{_SHAPES}::test_tasks_started_one_by_another_keep_no_blocks",
        ),
    ),
    Mutant(
        "outbox",
        "a listener of the last flush has no unit of work",
        "durable/agents/runner.py",
        before="                await self._finish(place, outbox, fence)  # listeners of its flush may send, too\n",
        after="            await self._finish(place, outbox, fence)\n",
        killed_by=(
            "tests/integration/agents/test_handling.py::TestOneTransaction::test_listener_of_the_last_flush_sends_in_the_unit_of_work",
        ),
    ),
    Mutant(
        "outbox",
        "a scoped session is that of the thread that enlisted it",
        "durable/bus.py",
        before="registry, outbox_of = session, self._outbox\n",
        after="outbox_of = self._outbox\n            first = session()\n            registry = lambda: first\n",
        killed_by=(
            f"{_SCOPE}::test_scoped_session_is_the_one_of_the_sending_thread",
            f"{_SCOPE}::test_async_scoped_session_is_the_one_of_the_sending_task",
        ),
    ),
    Mutant(
        "outbox",
        "threads of a web request begin a unit of work each",
        "durable/asgi/middleware.py",
        before="        with self._beginning:\n",
        after="        if True:\n",
        killed_by=(f"{_THREADS}[unit_of_work]",),
    ),
    Mutant(
        "outbox",
        "the lifespan of a bus that cannot start ends without its error",
        "durable/asgi/lifespan.py",
        before="            if self._failure is not None:\n                raise self._failure\n",
        after="",
        killed_by=(
            f"{_LIFESPAN}::test_test_client_of_starlette_raises_the_error_of_the_bus[start]",
            f"{_LIFESPAN}::test_test_client_of_starlette_raises_the_error_of_the_bus[stop]",
        ),
    ),
    Mutant(
        "outbox",
        "the lifespan goes on after the server was told of its failure",
        "durable/asgi/lifespan.py",
        before="            if self._phase is not _Phase.ENDED:",
        after="            if True:",
        killed_by=(f"{_LIFESPAN}::test_lifespan_ends_at_once_when_the_server_was_told",),
    ),
    Mutant(
        "outbox",
        "threads that send at once begin the transaction of their session twice",
        "durable/outbox/outbox.py",
        before="        with self._remembering:\n",
        after="        if True:\n",
        killed_by=(f"{_THREADS}[_begin]",),
    ),
    Mutant(
        "outbox",
        "SQL text ends a transaction with messages",
        "durable/outbox/transactions.py",
        before="        if any(each.holds_messages or (each.is_in_transaction and not is_autocommit) for each in followers):\n",
        after="        if False:\n",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_commits.py::TestCommits::test_end_as_sql_text_is_refused_after_a_send[asyncpg-COMMIT]",
        ),
    ),
    Mutant(
        "outbox",
        "a savepoint as SQL text is rolled back without its messages",
        "durable/outbox/transactions.py",
        before="            outbox.savepoints_met(about * (len(parameters) if many else 1))\n",
        after="            pass\n",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_savepoints.py::test_messages_follow_savepoints_as_sql_text[asyncpg]",
            "tests/integration/outbox/test_transaction_shapes.py::test_messages_stored_and_handed_over_are_those_of_the_committed_rows[engine]",
        ),
    ),
    Mutant(
        "outbox",
        "text in quotes is read as a savepoint",
        "durable/outbox/sql_text.py",
        before='        elif kind != "space":\n',
        after='        elif kind == "text":\n            at = found.start() + 1\n        elif kind != "space":\n',
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_savepoints.py::test_text_like_a_savepoint_takes_no_message_along",
        ),
    ),
    Mutant(
        "outbox",
        "a comment ends at the first sign of its end",
        "durable/outbox/sql_text.py",
        before="        if not depth:\n",
        after='        if found.group() == "*/":\n',
        killed_by=("tests/integration/outbox/test_sql_text.py::test_text_is_read_as_by_postgres",),
    ),
    Mutant(
        "outbox",
        "a savepoint as SQL text that the database refuses is followed",
        "durable/outbox/transactions.py",
        before='@event.listens_for(Engine, "after_cursor_execute")\n',
        after='@event.listens_for(Engine, "before_cursor_execute")\n',
        killed_by=(f"{_SAVEPOINTS}::test_savepoint_refused_in_a_failed_transaction_is_not_followed",),
    ),
    Mutant(
        "outbox",
        "a transaction of which the savepoints are lost is committed",
        "durable/outbox/outbox.py",
        before="        if self._pending.is_lost:\n",
        after="        if False:\n",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_savepoints.py::test_commit_is_refused_after_a_rollback_to_a_doubtful_savepoint",
        ),
    ),
    Mutant(
        "outbox",
        "a savepoint as SQL text outlives the one around it",
        "durable/outbox/savepoints.py",
        before="        del self.open[at + 1 :]\n",
        after="",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_savepoints.py::test_savepoint_as_sql_text_ends_with_the_outer_savepoint",
        ),
    ),
    Mutant(
        "outbox",
        "a text that goes on in the next line is read as two",
        "durable/outbox/sql_text.py",
        before="[Ee]'{_IN_ESCAPES}(?:'{_NEXT_LINE}'{_IN_ESCAPES})*+'?",
        after="[Ee]'{_IN_ESCAPES}'?",
        killed_by=(f"{_TEXTS}::test_text_is_read_as_by_postgres",),
    ),
    Mutant(
        "outbox",
        "a parameter opens the body of a function",
        "durable/outbox/sql_text.py",
        before="in_body = not brackets and (",
        after="in_body = (",
        killed_by=(f"{_TEXTS}::test_text_is_read_as_by_postgres",),
    ),
    Mutant(
        "outbox",
        "a label ends the body of a function",
        "durable/outbox/sql_text.py",
        before='(token.text == "end" and before in ("atomic", ";"))',
        after='(token.text == "end")',
        killed_by=(f"{_TEXTS}::test_text_is_read_as_by_postgres",),
    ),
    Mutant(
        "outbox",
        "spaces of Unicode stand between words of SQL text",
        "durable/outbox/sql_text.py",
        before='_SPACE: Final = r"\\ \\t\\n\\r\\f\\v"',
        after='_SPACE: Final = r"\\s"',
        killed_by=(f"{_TEXTS}::test_text_is_read_as_by_postgres",),
    ),
    Mutant(
        "outbox",
        "a name in SQL text with a percent sign is taken as it stands",
        "durable/outbox/sql_text.py",
        before='    if "%" in text:',
        after="    if False:",
        killed_by=("tests/unit/outbox/test_sql_text.py::test_name_known_to_the_database_alone_is_none",),
    ),
    Mutant(
        "outbox",
        "a savepoint that is released leaves those within it open",
        "durable/outbox/savepoints.py",
        before="        del self.open[at:]\n",
        after="        del self.open[at : at + 1]\n",
        killed_by=(f"{_TEXTS}::test_text_is_read_as_by_postgres",),
    ),
    Mutant(
        "outbox",
        "a rollback to a later savepoint tells what was lost before it",
        "durable/outbox/savepoints.py",
        before="        if at < self._before_loss:\n",
        after="        if at < len(self.open):\n",
        killed_by=("tests/integration/outbox/test_sql_text.py::test_messages_are_rolled_back_with_their_rows",),
    ),
    Mutant(
        "outbox",
        "of two savepoints of one name the last is meant after a failed text",
        "durable/outbox/savepoints.py",
        before="(len(found) > 1 and found[-1] < self._doubted)",
        after="False",
        killed_by=(f"{_TEXTS}::test_messages_are_rolled_back_with_their_rows",),
    ),
    Mutant(
        "outbox",
        "a savepoint behind a rollback in a failed text is taken for one from before it",
        "durable/outbox/savepoints.py",
        before=' or any(verb == "rollback" for verb, _ in about)',
        after="",
        killed_by=(f"{_TEXTS}::test_messages_are_rolled_back_with_their_rows",),
    ),
    Mutant(
        "outbox",
        "a rollback to an unknown savepoint takes nothing along",
        "durable/outbox/savepoints.py",
        before="self.is_lost, self._before_loss = True, len(self.open)",
        after="pass",
        killed_by=(
            f"{_SAVEPOINTS}::test_commit_is_refused_after_a_rollback_to_an_unknown_savepoint",
            "tests/unit/outbox/test_savepoints.py::test_rollback_to_an_unknown_savepoint_is_lost",
        ),
    ),
    Mutant(
        "outbox",
        "a savepoint begun before the session was enlisted is unknown",
        "durable/outbox/outbox.py",
        before="late=is_new and (late or self._is_joined)",
        after="late=False",
        killed_by=(f"{_SAVEPOINTS}::test_savepoint_begun_before_the_session_was_enlisted_takes_all_messages_along",),
    ),
    Mutant(
        "outbox",
        "a savepoint of the session is rolled back by its event, not by the database",
        "durable/outbox/pending.py",
        before="        place = self._places.pop(savepoint, None)\n",
        after="        place = self._places.get(savepoint)\n",
        killed_by=(f"{_SAVEPOINTS}::test_failed_rollback_of_a_savepoint_takes_no_message_along",),
    ),
    Mutant(
        "outbox",
        "SQL text ends a transaction before its first message",
        "durable/outbox/transactions.py",
        before="each.holds_messages or (each.is_in_transaction and not is_autocommit)",
        after="each.holds_messages",
        killed_by=(f"{_COMMITS}::test_end_as_sql_text_is_refused_before_a_send",),
    ),
    Mutant(
        "outbox",
        "statements of the driver are not read",
        "durable/outbox/transactions.py",
        before="    return str(as_string(None if connection.invalidated else connection.connection.driver_connection))\n",
        after='    return ""\n',
        killed_by=(f"{_COMMITS}::test_statement_of_the_driver_is_read",),
    ),
    Mutant(
        "outbox",
        "two connections of a session commit, each by itself",
        "durable/outbox/outbox.py",
        before="            raise WiringError(_SEVERAL_CONNECTIONS)\n",
        after="            pass\n",
        killed_by=(
            f"{_ENGINES}::test_commit_on_two_connections_is_refused_with_messages",
            f"{_ENGINES}::test_messages_are_not_sent_when_another_engine_refuses_its_commit",
        ),
    ),
    Mutant(
        "outbox",
        "messages are stored on another connection than the rows",
        "durable/outbox/outbox.py",
        before="        connection = self._connection or self.session.connection()\n",
        after="        connection = self.session.connection()\n",
        killed_by=(f"{_ENGINES}::test_session_with_an_engine_for_each_statement_stores_messages_with_its_rows",),
    ),
    Mutant(
        "outbox",
        "a fork has the parent's waker",
        "durable/runtime.py",
        before="        return is_open or self._waker.is_used",
        after="        return is_open",
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_waking.py::TestWaking::test_fork_amid_a_commit_of_a_thread_sends",
        ),
    ),
    Mutant(
        "outbox",
        "a silent database keeps a process that has committed",
        "durable/agents/waking.py",
        before="_LONGEST_ALONE: Final = timedelta(seconds=3)\n",
        after="_LONGEST_ALONE: Final = timedelta(seconds=60)\n",
        killed_by=(
            "tests/failure/test_black_holes.py::test_waking_thread_ends_within_seconds_when_the_database_is_silent[no answers]",
        ),
    ),
    Mutant(
        "outbox",
        "times of pandas travel as such",
        "durable/outbox/envelope_factory.py",
        before="        return plain_time(value)\n",
        after="        return value\n",
        killed_by=(
            "tests/unit/outbox/test_envelope_factory.py::"
            "test_options_of_subclasses_make_the_envelope_of_plain_ones[deliver_by pandas]",
        ),
    ),
    Mutant(
        "outbox",
        "headers of subclasses of text travel as such",
        "durable/outbox/envelope_factory.py",
        before="    return {plain_text(name): plain_text(value) for name, value in headers.items()}\n",
        after="    return headers\n",
        killed_by=(
            "tests/unit/outbox/test_envelope_factory.py::"
            "test_options_of_subclasses_make_the_envelope_of_plain_ones[value of a header SQLAlchemy]",
        ),
    ),
    Mutant(
        "outbox",
        "a daemon's commit wakes nobody when the process ends",
        "durable/agents/waking.py",
        before='name="durable wakes nodes", daemon=False)',
        after='name="durable wakes nodes")',
        killed_by=(
            "tests/integration/outbox/unit_of_work/test_waking.py::TestWaking::"
            "test_process_wakes_the_nodes_before_its_end_when_a_daemon_or_its_exit_commits[daemon]",
        ),
    ),
    Mutant(
        "outbox",
        "an earlier micro-batch with other rows is taken as published",
        "durable/storage/staging.py",
        before="        _refuse_other_number(batch, number, known)\n        return\n",
        after="        return\n",
        killed_by=(
            "tests/pipeline/test_publishing_again.py::"
            "test_number_of_a_micro_batch_is_published_once_and_never_drops_rows[5-0-other rows-outbox]",
        ),
    ),
    Mutant(
        "outbox",
        "batches have no view under the keys of before",
        "durable/pipeline/bodies.py",
        before="            views.setdefault(_name(each), own.copy())[row] = each\n",
        after="            views.setdefault(_name(each), own.copy())\n",
        killed_by=(
            "tests/pipeline/test_publishing_under_keys.py::"
            "test_rows_published_again_are_judged_by_their_messages[a then b, a known]",
        ),
    ),
    Mutant(
        "outbox",
        "a connection goes back to the pool amid a transaction that its driver has refused to end",
        "durable/storage/left_in_use.py",
        before="    if _is_in_use(connection) or connection.driver_connection.is_in_transaction():\n",
        after="    if _is_in_use(connection):\n",
        killed_by=(f"{_LEFT_IN_USE}::test_connection_of_asyncpg_given_back_amid_a_transaction_is_not_handed_out",),
    ),
    Mutant(
        "outbox",
        "a statement of a task that was left behind commits by itself",
        "durable/storage/left_in_use.py",
        before="        dialect.do_commit = partial(_in_turn, dialect.do_commit)\n",
        after="",
        killed_by=(
            "tests/integration/agents/test_tasks_left_behind.py::test_statements_of_tasks_are_in_the_transaction_of_their_handler_or_in_none[leave_statements-asyncpg]",
        ),
    ),
    Mutant(
        "outbox",
        "the end of a transaction loses the connection for whose statement it waits",
        "durable/storage/left_in_use.py",
        before='    return getattr(connection, "dbapi_connection", connection)\n',
        after="    return connection\n",
        killed_by=(
            "tests/integration/agents/test_tasks_left_behind.py::test_commit_of_a_task_ends_as_its_connection_does",
        ),
    ),
    Mutant(
        "outbox",
        "a connection that has ended is rolled back and warned of again",
        "durable/storage/left_in_use.py",
        before="    if adapted.driver_connection.is_closed():  # with its transaction\n",
        after="    if False:\n",
        killed_by=(
            "tests/integration/agents/test_tasks_left_behind.py::test_unit_of_work_with_a_task_in_a_statement_keeps_no_lock_and_no_connection[fail_beside_statements_of_the_connection-asyncpg]",
        ),
    ),
    Mutant(
        "outbox",
        "a connection goes back to the pool while a BEGIN is on its way",
        "durable/storage/left_in_use.py",
        before="    if _is_in_use(connection) or connection.driver_connection.is_in_transaction():\n",
        after="    if connection.driver_connection.is_in_transaction():\n",
        killed_by=(f"{_LEFT_IN_USE}::test_connection_of_asyncpg_given_back_amid_a_begin_is_not_handed_out",),
    ),
    Mutant(
        "outbox",
        "a session that has ended keeps the connection that a task which was left behind has opened",
        "durable/outbox/transactions.py",
        before="    if _IS_OVER in vars(_root(transaction)):\n",
        after="    if False:\n",
        killed_by=(
            "tests/integration/agents/test_tasks_left_behind.py::test_unit_of_work_with_a_task_in_a_statement_keeps_no_lock_and_no_connection[fail_in_the_first_statement-psycopg]",
        ),
    ),
    Mutant(
        "outbox",
        "an error of a rollback takes the place of the block's",
        "durable/outbox/unit_of_work.py",
        before="    with suppress(*_ENDED_ANYHOW):\n        await session.rollback()\n",
        after="    await session.rollback()\n",
        killed_by=(
            "tests/integration/agents/test_tasks_left_behind.py::test_unit_of_work_blames_no_task_when_postgres_has_ended_its_connection[psycopg]",
        ),
    ),
    Mutant(
        "outbox",
        "an error of the driver takes the place of the timeout",
        "durable/outbox/unit_of_work.py",
        before="            raise_if_cancelled(error)\n",
        after="            pass\n",
        killed_by=(
            "tests/integration/agents/test_tasks_left_behind.py::test_unit_of_work_with_a_task_in_a_statement_keeps_no_lock_and_no_connection[shield_in_a_block-asyncpg]",
        ),
    ),
    Mutant(
        "outbox",
        "a lost connection takes the place of an async handler's error",
        "durable/outbox/unit_of_work.py",
        before="    with suppress(*_ENDED_ANYHOW):\n        try:\n            await greenlet",
        after="    with suppress():\n        try:\n            await greenlet",
        killed_by=(
            "tests/integration/agents/test_tasks_left_behind.py::test_async_handler_keeps_its_error_when_postgres_has_ended_its_connection[psycopg]",
        ),
    ),
    Mutant(
        "outbox",
        "a unit of work keeps its connection when one of its savepoints could not be released",
        "durable/outbox/unit_of_work.py",
        before="            await greenlet_spawn(close_connections, session.sync_session)\n",
        after="            pass\n",
        killed_by=(
            f"{_ENDS}::test_session_gives_its_connection_back[unit_of_work asyncpg-2]",
            f"{_ENDS}::test_session_gives_its_connection_back[handler psycopg-2]",
        ),
    ),
    Mutant(
        "outbox",
        "a Session keeps its connection when one of its savepoints could not be released",
        "durable/outbox/unit_of_work.py",
        before="            close_connections(session)\n",
        after="            pass\n",
        killed_by=(
            f"{_ENDS}::test_session_gives_its_connection_back[here-2]",
            f"{_ENDS}::test_session_gives_its_connection_back[threads-2]",
        ),
    ),
    Mutant(
        "outbox",
        "a session leaves the transaction that it has joined with savepoints that could not be released",
        "durable/outbox/transactions.py",
        before="            closing.callback(_leave_failed_savepoints, connection)\n",
        after="            pass\n",
        killed_by=(
            f"{_ENDS}::test_joined_transaction_goes_on_when_its_session_has_ended[unit_of_work asyncpg-2]",
            f"{_ENDS}::test_session_gives_an_older_connection_back[here]",
        ),
    ),
    Mutant(
        "outbox",
        "a connection is forgotten that a session has lost before it opened another",
        "durable/outbox/transactions.py",
        before="opened = [*open_connections(session), connection]\n",
        after="opened = [connection]\n",
        killed_by=(f"{_ENDS}::test_session_gives_its_connection_back_after_any_steps[here]",),
    ),
    Mutant(
        "outbox",
        "a connection that has ended is asked for its transaction",
        "durable/storage/left_in_use.py",
        before="    if connection.driver_connection.is_closed():\n        entry.inv",
        after="    if False:\n        entry.inv",
        killed_by=("tests/integration/agents/test_tasks_left_behind.py::test_ended_connection_comes_back_in_peace",),
    ),
    Mutant(
        "outbox",
        "a session finds the outboxes of another one whose info it was given",
        "durable/outbox/transactions.py",
        before="    found: Enlistment = vars(session).setdefault(_KEY, Enlistment())\n",
        after="    found: Enlistment = session.info.setdefault(_KEY, Enlistment())\n    vars(session)[_KEY] = found\n",
        killed_by=(
            f"{_KINDS}::TestEnlisted::test_session_with_the_info_of_another_has_an_outbox_of_its_own[sync-commit-before-an engine]",
        ),
    ),
    Mutant(
        "outbox",
        "an outbox follows what a session begins after its unit of work",
        "durable/outbox/outbox.py",
        before="        return None if self._enlistment.is_over else self.session.get_transaction()\n",
        after="        return self.session.get_transaction()\n",
        killed_by=(
            f"{_KINDS}::TestLent::test_async_session_stays_usable[asyncpg-unit of work-failed-a connection, create_savepoint]",
        ),
    ),
    Mutant(
        "outbox",
        "a connection that a session was given for its classes is ended with it",
        "durable/outbox/transactions.py",
        before="    return closes_it\n",
        after="    return closes_it or transaction.session.bind is None\n",
        killed_by=(
            f"{_KINDS}::TestLent::test_async_session_stays_usable[asyncpg-unit of work--a connection for each class, create_savepoint]",
        ),
    ),
    Mutant(
        "outbox",
        "a connection keeps the word of a handler that has ended: it must not commit",
        "durable/outbox/transactions.py",
        before="        self.is_over = self.is_closed = self.commit_allowed = True\n",
        after="        self.is_over = self.is_closed = True\n",
        killed_by=(
            f"{_KINDS}::TestLent::test_async_session_stays_usable[asyncpg-handler-failed-a connection, rollback_only]",
        ),
    ),
    Mutant(
        "outbox",
        "a fence stands on a connection whose handler has failed",
        "durable/agents/fence.py",
        before="            if _fence_of(connection) is self:\n",
        after="            if False:\n",
        killed_by=(
            f"{_KINDS}::TestLent::test_async_session_stays_usable[asyncpg-handler-failed-a connection, create_savepoint]",
        ),
    ),
    Mutant(
        "outbox",
        "a session that was lent keeps what an attempt in steps knew of it",
        "durable/agents/runner.py",
        before="            if not self._is_ended():  # else a thread may still be in it\n",
        after="            if False:\n",
        killed_by=(
            f"{_KINDS}::TestLent::test_sync_session_stays_usable[sync handler in steps--an engine]",
            f"{_KINDS}::TestLent::test_sync_session_stays_usable[sync handler in steps-failed-an engine]",
        ),
    ),
    Mutant(
        "outbox",
        "a session with an engine for each class stores no messages",
        "durable/outbox/outbox.py",
        before="self._engine not in (None, connection.engine):",
        after="self._engine is not connection.engine:",
        killed_by=(
            f"{_KINDS}::TestEnlisted::test_session_stores_its_messages_with_its_rows[sync-flushed-commit-an engine for each class]",
        ),
    ),
    Mutant(
        "outbox",
        "messages without an engine are refused in words of SQLAlchemy",
        "durable/outbox/outbox.py",
        before="            raise WiringError(_NO_ENGINE) from error\n",
        after="            raise\n",
        killed_by=(
            f"{_KINDS}::TestEnlisted::test_messages_of_a_session_without_an_engine_for_them_are_refused_with_advice[sync]",
        ),
    ),
    Mutant(
        "outbox",
        "a message begins a transaction in a session that begins none by itself",
        "durable/outbox/outbox.py",
        before="        if not self.session.autobegin:\n",
        after="        if False:\n",
        killed_by=(f"{_KINDS}::TestEnlisted::test_session_without_autobegin_sends_within_a_transaction_alone[sync]",),
    ),
    Mutant(
        "outbox",
        "a rehearsal enlists a session that it cannot undo",
        "durable/dead_letters/joined_sessions.py",
        before="        if sync_session not in self._opened:\n",
        after="        if False:\n",
        killed_by=(
            "tests/integration/dead_letters/test_rehearsal.py::TestRehearsal::test_a_session_of_the_applications_own_cannot_be_enlisted[with the info of the handler's]",
        ),
    ),
    Mutant(
        "outbox",
        "a rollback is left alone when its unit of work is cancelled again",
        "durable/outbox/unit_of_work.py",
        before="                await run_to_completion(_roll_back(self.session))\n",
        after="                await _roll_back(self.session)\n",
        killed_by=(f"{_CANCELLED_ENDS}::test_unit_of_work_waits_for_its_rollback_when_cancelled_again",),
    ),
    Mutant(
        "outbox",
        "a connection that the driver refuses to roll back keeps its place in the pool",
        "durable/storage/left_in_use.py",
        before="        dialect.do_rollback = partial(_roll_back_or_terminate, dialect.do_rollback)\n",
        after="",
        killed_by=(f"{_CANCELLED}[asyncpg-given-enlisted_and_closed_by_hand-twice]",),
    ),
    Mutant(
        "outbox",
        "a connection that was ended in its transaction waits for a goodbye while it comes back",
        "durable/storage/left_in_use.py",
        before="        dialect.do_terminate = _terminate\n",
        after="",
        killed_by=(f"{_LEFT_IN_USE}::test_connection_is_given_up_without_waiting",),
    ),
    Mutant(
        "outbox",
        "a connection of psycopg goes back to the pool amid a transaction",
        "durable/storage/left_in_use.py",
        before="    return driver.pgconn.transaction_status in (_IDLE, _CLOSED)\n",
        after="    return True\n",
        killed_by=(f"{_LEFT_IN_USE}::test_connection_given_back_amid_a_transaction_is_not_handed_out",),
    ),
    Mutant(
        "outbox",
        "a statement of a former user runs in the transaction of the next",
        "durable/storage/left_in_use.py",
        before="        if getattr(self._conn, _USER) is not self._durable_user:\n",
        after="        if False:\n",
        killed_by=(
            f"{_LEFT_IN_USE}::test_cursor_of_a_former_user_executes_nothing[cursor]",
            f"{_LEFT_IN_USE}::test_cursor_of_a_former_user_executes_nothing_in_a_task",
        ),
    ),
    Mutant(
        "outbox",
        "a connection is closed amid a statement of a thread",
        "durable/storage/left_in_use.py",
        before="    if not connection.lock.acquire(blocking=False):\n",
        after="    if not connection.lock.acquire(blocking=False) and connection.close():\n",
        killed_by=(f"{_LEFT_IN_USE}::test_connection_amid_a_statement_of_a_thread_is_set_aside[invalidate]",),
    ),
    Mutant(
        "outbox",
        "a connection is closed amid a statement of a task",
        "durable/storage/left_in_use.py",
        before="    if not driver.lock.locked():\n        close(",
        after="    if True:\n        close(",
        killed_by=(f"{_LEFT_IN_USE}::test_connection_amid_a_statement_of_a_task_is_closed_afterwards",),
    ),
    Mutant(
        "outbox",
        "connections of a given sync engine are not watched",
        "durable/outbox/sessions.py",
        before="            watch(sync_engine)\n",
        after="",
        killed_by=(f"{_LEFT_IN_USE}::test_cursor_of_a_former_user_executes_nothing_on_a_given_engine",),
    ),
    Mutant(
        "outbox",
        "a unit of work that nobody has entered takes messages",
        "durable/outbox/unit_of_work.py",
        before="        if not self._has_begun:\n",
        after="        if False:\n",
        killed_by=("tests/unit/test_arguments.py::test_message_before_the_block_is_refused[outbox]",),
    ),
    Mutant(
        "outbox",
        "a message with a set, sent again by another process, is another message",
        "durable/messages/codecs/sets.py",
        before="        return not _SETS.isdisjoint(_types(cls.__pydantic_core_schema__))\n    return not",
        after="        return False\n    return False and not",
        killed_by=tuple(
            f"tests/unit/messages/test_codecs_sets.py::test_equal_messages_have_one_body[{each}]"
            for each in ("json-struct", "json-model", "msgpack-struct", "msgpack-model")
        ),
    ),
    Mutant(
        "outbox",
        "the items of a set of a model have another order in MessagePack",
        "durable/messages/codecs/set_order.py",
        before="sorted((ordered(each, each) for each in made), key=_text)",
        after="[ordered(each, each) for each in made]",
        killed_by=("tests/unit/messages/test_codecs_sets.py::test_equal_messages_have_one_body[msgpack-model]",),
    ),
    Mutant(
        "outbox",
        "an item that a serializer adds to a set is left out of the body",
        "durable/messages/codecs/set_order.py",
        before="    if isinstance(value, Set) and len(value) == len(made):\n",
        after="    if isinstance(value, Set):\n",
        killed_by=(
            "tests/unit/messages/test_codecs_sets.py::"
            "test_parts_unlike_those_of_the_value_stay_unchanged[value0-made0]",
        ),
    ),
    Mutant(
        "outbox",
        "a model's field of any type counts as one without sets",
        "durable/messages/codecs/sets.py",
        before='part["type"] in _PLAIN and ',
        after="",
        killed_by=("tests/unit/messages/test_codecs_sets.py::test_type_with_room_for_a_set_is_not_plain[typing.Any]",),
    ),
    Mutant(
        "outbox",
        "sets in fields beyond the declared have no order",
        "durable/messages/codecs/sets.py",
        before=" and not _takes_extra(cls)",
        after="",
        killed_by=(
            "tests/unit/messages/test_codecs_sets.py::test_class_with_more_than_plain_fields_is_not_plain[LooseRow]",
        ),
    ),
    Mutant(
        "outbox",
        "the order of a serializer's list is lost",
        "durable/messages/codecs/set_order.py",
        before="        parts |= _written(value)\n",
        after="        pass\n",
        killed_by=(
            "tests/unit/messages/test_codecs_sets.py::"
            "test_list_of_a_serializer_stays_unchanged_beside_sets_in_order[json-field]",
        ),
    ),
    Mutant(
        "outbox",
        "a field that pydantic writes by a function leaves the sets beside it without an order",
        "durable/messages/codecs/sets.py",
        before='.startswith("pydantic.")',
        after='.startswith("of nobody")',
        killed_by=(
            "tests/unit/messages/test_codecs_sets.py::"
            "test_sets_have_one_order_beside_fields_of_any_type[built-17-json]",
        ),
    ),
    Mutant(
        "outbox",
        "a list is sorted whose name is the alias of a set",
        "durable/messages/codecs/set_order.py",
        before="    if by_alias:\n",
        after="    if True:\n",
        killed_by=(
            "tests/unit/messages/test_codecs_sets.py::"
            "test_sets_have_one_order_and_lists_keep_theirs_under_crossed_aliases[of pydantic-json]",
        ),
    ),
    Mutant(
        "outbox",
        "a set in a text of pydantic's Json has another order in each process",
        "durable/messages/codecs/set_order.py",
        before="        return _text_of_json(value, made)\n",
        after="        return made\n",
        killed_by=(f"{_SET_BODIES}::test_bodies_of_many_items_are_equal_in_each_process_or_refused",),
    ),
    Mutant(
        "outbox",
        "a set in a key of MessagePack has another order in each process",
        "durable/messages/codecs/set_order.py",
        before="_hashable(in_one_order(own, key))",
        after="key",
        killed_by=(f"{_SET_BODIES}::test_bodies_of_many_items_are_equal_in_each_process_or_refused",),
    ),
    Mutant(
        "outbox",
        "a set beside the list of a serializer has another order in each process",
        "durable/messages/codecs/set_order.py",
        before="        parts |= _written(value)\n",
        after="        parts |= dict.fromkeys(made, None)\n",
        killed_by=(f"{_SET_BODIES}::test_bodies_of_many_items_are_equal_in_each_process_or_refused",),
    ),
    Mutant(
        "outbox",
        "raw JSON beside a set is no JSON",
        "durable/messages/codecs/json.py",
        before="builtin_types=(msgspec.Raw,)",
        after="builtin_types=()",
        killed_by=(f"{_SET_BODIES}::test_bodies_of_many_items_are_equal_in_each_process_or_refused",),
    ),
    Mutant(
        "outbox",
        "a set in a field of another type is sent in the order of this process",
        "durable/messages/comparison.py",
        before="    if not may_hold_sets:\n",
        after="    if False:\n",
        killed_by=(
            *(f"{_REFUSED_SETS}[{each}]" for each in ("dataclass", "beside a set", "model")),
            f"{_SET_BODIES}::test_bodies_of_many_items_are_equal_in_each_process_or_refused",
        ),
    ),
    Mutant(
        "outbox",
        "a set in a field that is not walked is sent in the order of this process",
        "durable/messages/comparison.py",
        before="may_hold_sets and name not in without",
        after="may_hold_sets",
        killed_by=(f"{_REFUSED_SETS}[beside a set]",),
    ),
    Mutant(
        "outbox",
        "a set in a key of another type is sent in the order of this process",
        "durable/messages/comparison.py",
        before=" and not may_hold_sets and _is_with_set(key)",
        after=" and False",
        killed_by=(f"{_REFUSED_SETS}[key]",),
    ),
    Mutant(
        "outbox",
        "a set that a serializer of the application orders is refused",
        "durable/messages/comparison.py",
        before="found.read is _OF_NO_SET and name in with_serializers(type(sent))",
        after="False",
        killed_by=(f"{_SET_BODIES}::test_set_of_a_serializer_is_sent_in_a_field_of_another_type",),
    ),
    Mutant(
        "outbox",
        "a set of models is refused message by message",
        "durable/messages/codecs/msgpack.py",
        before="    refuse_sets_of_models(cls)\n",
        after="",
        killed_by=("tests/unit/messages/test_codecs_sets.py::test_set_of_models_is_refused_in_messagepack[models]",),
    ),
    Mutant(
        "outbox",
        "a business key that is a member of an Enum makes another id than its text",
        "durable/outbox/envelope_factory.py",
        before="/{plain_text(key)}",
        after="/{key}",
        killed_by=(
            "tests/unit/outbox/test_envelope_factory.py::"
            "test_business_key_of_a_subclass_makes_the_id_of_plain_text[Enum]",
        ),
    ),
    Mutant(
        "outbox",
        "a version of a message type that is named by a member of an Enum has the name of the member",
        "durable/messages/registry.py",
        before="versioned(plain_text(name), version)",
        after="plain_text(versioned(name, version))",
        killed_by=("tests/unit/messages/test_registry.py::test_version_of_a_name_of_a_subclass_has_plain_text[Enum]",),
    ),
)
