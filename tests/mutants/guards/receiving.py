"""Guards of receiving: stored before it is answered, and each id once."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROWS = (
    Mutant(
        "receiving",
        "a renamed service handles messages again without a word",
        "durable/runtime.py",
        before="        await former_names.warn(self.database, self.application)\n",
        after="",
        killed_by=(
            "tests/integration/agents/test_former_names.py::test_renamed_service_warns_of_its_former_name[received_ids-listen]",
        ),
    ),
    Mutant(
        "receiving",
        "a process that only stores says nothing of former names",
        "durable/runtime.py",
        before="await once_it_answers(self._enter, within",
        after="await once_it_answers(self.check, within",
        killed_by=(
            "tests/integration/agents/test_former_names.py::test_renamed_service_warns_of_its_former_name[received_ids-asgi of a process that only stores]",
        ),
    ),
    Mutant(
        "receiving",
        "another message under a known id is a duplicate",
        "durable/agents/arrivals.py",
        before="await _one_by_one(self._compare_together, known) if known else (set[Key](), {})",
        after="set[Key](), {}",
        killed_by=(
            "tests/integration/agents/test_receiving.py::TestDuplicates::test_another_body_under_a_known_id_is_quarantined[later]",
        ),
    ),
    Mutant(
        "receiving",
        "another message under an id of the same round is a duplicate",
        "durable/agents/arrivals.py",
        before="""\
        if is_another(self._ring, known, envelope, now):
            return _OTHER_BODY
""",
        after="",
        killed_by=(
            "tests/integration/agents/test_receiving.py::TestDuplicates::test_another_body_under_a_known_id_is_quarantined[in one batch]",
        ),
    ),
    Mutant(
        "receiving",
        "a waiting message expires before its duplicate",
        "durable/agents/arrivals.py",
        before="""\
        if longer and not inbox.live_longer(conn, schema, longer):
""",
        after="""\
        if False:
""",
        killed_by=(
            "tests/contract/bus/test_taken_ids.py::test_waiting_message_lives_as_long_as_its_duplicate[postgres]",
        ),
    ),
    Mutant(
        "receiving",
        "a message that expired takes its id from one that could be handled",
        "durable/messages/repeats.py",
        before="""\
    return known.expired is not None and _lives_longer(envelope, known.expired)


def outlives""",
        after="""\
    return False


def outlives""",
        killed_by=(
            "tests/integration/agents/test_taken_ids.py::test_real_message_is_an_alarm_when_its_id_was_taken_by_claimed_times[expired-one batch]",
        ),
    ),
    Mutant(
        "receiving",
        "a message put off takes its id from one that is due",
        "durable/messages/repeats.py",
        before="""\
    if known.due_at is not None and known.due_at > due + DUE_JITTER:
        return True
""",
        after="",
        killed_by=(
            "tests/integration/agents/test_taken_ids.py::test_real_message_is_an_alarm_when_its_id_was_taken_by_claimed_times[put_off-one batch]",
        ),
    ),
    Mutant(
        "receiving",
        "a digest that only looks encrypted is believed",
        "durable/encryption/repeats.py",
        before="    if not is_sealed(envelope.body) or _message(ring, envelope) is not None:",
        after="    if True:",
        killed_by=(
            "tests/unit/encryption/test_repeats.py::test_duplicate_has_the_same_bytes_or_the_same_opened_message",
        ),
    ),
    Mutant(
        "receiving",
        "a batch that cannot be stored is answered Stored",
        "durable/agents/receiving.py",
        before="            outcomes = [failure] * sum(len(waiting.batch) for waiting in taken)",
        after="""\
            from durable.outcomes import STORED
            outcomes = [STORED] * sum(len(waiting.batch) for waiting in taken)""",
        killed_by=(
            "tests/integration/agents/test_receiving.py::TestQuarantine::test_faults_of_the_database_make_no_dead_letters",
        ),
    ),
    Mutant(
        "receiving",
        "a full node takes more",
        "durable/agents/receiving.py",
        before="        return fits and count <= self.credit()",
        after="        return True",
        killed_by=(
            "tests/integration/agents/test_receiving.py::TestRoom::test_envelopes_beyond_the_credit_are_answered_busy",
        ),
    ),
    Mutant(
        "receiving",
        "the bytes of waiting batches are not bounded",
        "durable/agents/receiving.py",
        before="        return fits and count <= self.credit()",
        after="        return count <= self.credit()",
        killed_by=("tests/integration/agents/test_receiving.py::TestRoom::test_room_is_bounded_in_bytes",),
    ),
    Mutant(
        "receiving",
        "a batch has no answer when the node stops",
        "durable/agents/receiving.py",
        before="                _answer(waiting, [_STOPPED] * len(waiting.batch))\n",
        after="                pass\n",
        killed_by=(
            "tests/integration/agents/test_receiving.py::TestRoom::test_cancelled_receiver_answers_every_waiting_sender",
        ),
        hangs=True,
    ),
    Mutant(
        "receiving",
        "an envelope that the database refuses spoils its batch",
        "durable/agents/arrivals.py",
        before="        if await self._is_the_wiring(errors, len(envelopes)):",
        after="        if errors:",
        killed_by=(
            "tests/integration/agents/test_receiving.py::TestQuarantine::test_one_bad_envelope_of_a_hundred_leaves_its_neighbours_stored[0-22000]",
        ),
    ),
    Mutant(
        "receiving",
        "an envelope that is no envelope is stored",
        "durable/agents/arrivals.py",
        before="""\
            reason = self._unacceptable(envelope)
""",
        after="""\
            reason = None
""",
        killed_by=(
            "tests/integration/agents/test_receiving.py::TestQuarantine::test_envelope_older_than_the_dedupe_window_is_quarantined",
        ),
    ),
    Mutant(
        "receiving",
        "room of duplicates is not given back",
        "durable/agents/arrivals.py",
        before="""\
        if idle:
            self._intake.abandon(idle)""",
        after="""\
        if False:
            self._intake.abandon(idle)""",
        killed_by=("tests/integration/agents/test_receiving.py::TestDuplicates::test_a_duplicate_gives_its_room_back",),
    ),
    Mutant(
        "receiving",
        "a batch that is being stored gives its room back with its caller",
        "durable/agents/receiving.py",
        before="""\
            if not waiting.is_taken:
                self._queue.remove(waiting)
                self._give_room_back(waiting)
""",
        after="""\
            if not waiting.is_taken:
                self._queue.remove(waiting)
            self._give_room_back(waiting)
""",
        killed_by=(
            "tests/integration/agents/test_receiving.py::TestCancelledCallers::test_batch_being_stored_keeps_its_room_without_its_caller",
        ),
    ),
    Mutant(
        "receiving",
        "a waiting row that may not live longer keeps a round from being stored",
        "durable/storage/inbox.py",
        before='    isolated(conn, deadlines, live, left_alone("lengthen the life of", lambda each: f"{each[0]} at {each[1]}"))\n',
        after="    live(deadlines)\n",
        killed_by=(
            "tests/integration/agents/test_receiving.py::TestDuplicates::test_refused_prolongation_keeps_no_other_from_being_stored",
        ),
    ),
    Mutant(
        "receiving",
        "each try of a batch counts what it quarantines",
        "durable/agents/arrivals.py",
        before="            inbox.quarantine(conn, schema, self._node, _unfit(arrival))\n",
        after="            inbox.quarantine(conn, schema, self._node, _unfit(arrival))\n"
        "            self._tell_quarantined(_unfit(arrival))\n",
        killed_by=(
            "tests/integration/agents/test_receiving.py::TestDuplicates::test_quarantine_is_logged_and_counted_once_when_a_neighbour_is_refused[P0001]",
        ),
    ),
    Mutant(
        "receiving",
        "a resolved letter swallows what is sent anew under its key",
        "durable/storage/sql/inbox.py",
        before="(letter.resolved_at IS NULL OR letter.sent_at = CAST(:sent_at AS timestamptz))",
        after="true",
        killed_by=(
            "tests/integration/dead_letters/on_postgres/test_quarantined.py::TestQuarantined::test_only_a_repeat_of_a_letter_makes_no_other[asyncpg-sent anew after a discard]",
        ),
    ),
    Mutant(
        "receiving",
        "a letter swallows a message of another type",
        "durable/storage/sql/inbox.py",
        before=" AND letter.message_type = CAST(:message_type AS text)\n",
        after="\n",
        killed_by=(
            "tests/integration/dead_letters/on_postgres/test_quarantined.py::TestQuarantined::test_only_a_repeat_of_a_letter_makes_no_other[asyncpg-another type]",
        ),
    ),
    Mutant(
        "receiving",
        "a locked message does not live longer",
        "durable/storage/sql/inbox.py",
        before="ORDER BY row.id, row.endpoint FOR UPDATE OF row\n",
        after="ORDER BY row.id, row.endpoint FOR UPDATE OF row SKIP LOCKED\n",
        killed_by=(
            "tests/integration/storage/functions/test_ends.py::"
            "test_waiting_message_lives_longer_after_its_lock_is_rolled_back",
        ),
    ),
    Mutant(
        "receiving",
        "an envelope is quarantined although the right for it has come back",
        "durable/agents/arrivals.py",
        before="    if not doubtful:\n        return done, errors\n",
        after="    return done, errors\n",
        killed_by=(
            "tests/integration/agents/test_receiving.py::TestQuarantine::test_right_coming_back_amid_a_batch_makes_no_dead_letters",
        ),
    ),
    Mutant(
        "receiving",
        "a whole envelope that the database refuses is kept as bytes alone",
        "durable/agents/arrivals.py",
        before="        if reason != _OTHER_BODY and screening.is_whole(envelope, **self._limits):\n",
        after="        if False:\n",
        killed_by=(
            "tests/integration/agents/test_receiving.py::TestQuarantine::test_refused_whole_envelope_is_replayable",
        ),
    ),
    Mutant(
        "receiving",
        "what a listener holds of a deleted queue is dropped",
        "transports/rabbitmq/held.py",
        before="not consumer.is_lost or (consumer.is_cancelled and not self.is_ordered)",
        after="not consumer.is_lost",
        killed_by=(
            "tests/integration/transports/rabbitmq/test_listener.py::TestDown::test_unordered_listener_stores_deliveries_held_of_a_deleted_queue",
        ),
    ),
    Mutant(
        "receiving",
        "a listener declares its exchange and its bindings only when it begins to consume",
        "transports/rabbitmq/listener.py",
        before="                    await self._declare_until_lost(lost, topology)\n",
        after="                    await asyncio.shield(lost.lost)\n",
        killed_by=(
            "tests/integration/transports/rabbitmq/test_listener.py::TestDown::"
            "test_deleted_exchange_or_binding_is_declared_again_under_the_same_consumers[exchange]",
        ),
    ),
)
