"""Guards of lost lives, of which rows of a lake their database has lost and what the audit makes of them; and of erased
content, which comes back by no replay.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TESTS = "tests/pipeline/test_lost_lives.py"
_MATCHING = "tests/pipeline/test_matching.py"
_LATE = f"{_TESTS}::test_late_message_counts_once_and_in_a_living_row_alone"
_ERASED = "tests/pipeline/test_erased_replays.py"

ROWS = (
    Mutant(
        "lives",
        "rows of a lost life are not listed",
        "durable/pipeline/beginning.py",
        before="            if found.keys is not None:\n",
        after="            if found.keys is None:\n",
        killed_by=(f"{_TESTS}::test_each_lost_life_is_known",),
    ),
    Mutant(
        "lives",
        "a second lost life hides the first one",
        "durable/pipeline/foreign.py",
        before="keys += [rows.select(KEYS[self.table]), known.unknown(before, rows, KEYS[self.table])]",
        after="keys += [rows.select(KEYS[self.table])]",
        killed_by=(f"{_TESTS}::test_each_lost_life_is_known",),
    ),
    Mutant(
        "lives",
        "a row that the database may have dropped is lost",
        "durable/pipeline/foreign.py",
        before="        if begins is None:\n            return rows\n",
        after="        return rows\n",
        killed_by=(f"{_TESTS}::test_rows_of_before_the_history_are_not_lost",),
    ),
    Mutant(
        "lives",
        "a lake that was put back stays without its list",
        "durable/pipeline/archive.py",
        before="if noted and (begun.lost_below is not None or not lost_lives.has_list(lake, table, whose)):",
        after="if noted and begun.lost_below is not None and lost_lives.has_list(lake, table, whose):",
        killed_by=(f"{_TESTS}::test_lake_without_a_list_gets_one_again",),
    ),
    Mutant(
        "lives",
        "an end in a lost life is an end",
        "durable/pipeline/matching.py",
        before="            (undone if row.key in lost_keys else living)[row.role].append(row)\n",
        after="            living[row.role].append(row)\n",
        killed_by=(f"{_TESTS}::test_message_handled_in_a_lost_life_is_undone_until_handled_again",),
    ),
    Mutant(
        "lives",
        "a message that balances with a row of a lost life is not looked at",
        "durable/pipeline/audit.py",
        before='        suspects = {*ids, *lost["id"].to_pylist()}\n',
        after="        suspects = {*ids}\n",
        killed_by=(f"{_TESTS}::test_message_handled_in_a_lost_life_is_undone_until_handled_again",),
    ),
    Mutant(
        "lives",
        "a letter of a lost life is an end",
        "durable/pipeline/matching.py",
        before='        if self.role in (LETTER, LOST["dead_letters"]):\n            return self.service, self.letter_id, self.failed_at\n',
        after="",
        killed_by=(f"{_TESTS}::test_message_quarantined_in_a_lost_life_is_undone",),
    ),
    Mutant(
        "lives",
        "a message that a lost life has sent is not forgotten",
        "durable/pipeline/matching.py",
        before="is_forgotten=bool(undone[SENT])",
        after="is_forgotten=False",
        killed_by=(f"{_TESTS}::test_message_sent_in_a_lost_life_is_forgotten_until_sent_again",),
    ),
    Mutant(
        "lives",
        "content is erased beside a replay that has read it",
        "durable/pipeline/origin.py",
        before="    if not patiently(replays.try_lock, conn, schema, is_shared=False):",
        after="    if False:",
        killed_by=(f"{_ERASED}::test_erasure_is_refused_while_a_replay_is_at_work",),
    ),
    Mutant(
        "lives",
        "a replay begins beside an erasure",
        "durable/pipeline/undisturbed.py",
        before="        if not patiently(replays.try_lock, conn, schema, is_shared=True):",
        after="        if False:",
        killed_by=(f"{_ERASED}::test_replay_is_refused_while_an_erasure_is_at_work",),
    ),
    Mutant(
        "lives",
        "a replay into another database goes on with what was erased from its lake",
        "durable/pipeline/undisturbed.py",
        before="        if self._records() != self._erased:",
        after="        if False:",
        killed_by=(f"{_ERASED}::test_replay_into_another_database_ends_when_its_lake_was_erased_from",),
    ),
    Mutant(
        "lives",
        "a replay goes on without the lock that keeps erasures away",
        "durable/pipeline/undisturbed.py",
        before="        if not is_held:",
        after="        if False:",
        killed_by=(f"{_ERASED}::test_replay_ends_when_its_lock_is_lost",),
    ),
    Mutant(
        "lives",
        "a replay reads a lake that an erasure has not come to",
        "durable/pipeline/undisturbed.py",
        before="            _refuse_undone(conn, schema, lake)\n",
        after="",
        killed_by=(f"{_ERASED}::test_replay_is_refused_while_the_lake_has_content_of_an_erasure",),
    ),
    Mutant(
        "lives",
        "a late message of a lost life is late",
        "durable/pipeline/matching.py",
        before="        yield from self._late(living[MAY_BE_LATE])\n",
        after="        yield from self._late(living[MAY_BE_LATE] + undone[MAY_BE_LATE])\n",
        killed_by=(f"{_LATE}[1-lost]",),
    ),
    Mutant(
        "lives",
        "a late message of two lakes is late twice",
        "durable/pipeline/matching.py",
        before="in {row.identity: row for row in rows}.values() if",
        after="in rows if",
        killed_by=(f"{_LATE}[2-now]",),
    ),
    Mutant(
        "lives",
        "a replay to another address asks for another copy",
        "durable/pipeline/matching.py",
        before="return any(row.sent_at < each <= row.finished_at for each in began)",
        after="return False",
        killed_by=(f"{_MATCHING}::test_replay_under_the_same_id_asks_for_no_other_copy",),
    ),
    Mutant(
        "lives",
        "an event after a replay is taken for the replay",
        "durable/pipeline/matching.py",
        before="return any(row.sent_at < each <= row.finished_at for each in began)",
        after="return any(each <= row.finished_at for each in began)",
        killed_by=(f"{_MATCHING}::test_replay_under_the_same_id_asks_for_no_other_copy",),
    ),
    Mutant(
        "lives",
        "an archive does not note where replays went",
        "durable/pipeline/archive.py",
        before="                readdressed.note(conn, schema, lake, whose)\n",
        after="                pass\n",
        killed_by=(
            f"{_TESTS}::test_message_replayed_to_the_new_address_of_its_receiver_is_no_loss"
            "[elsewhere under the same ids]",
        ),
    ),
    Mutant(
        "lives",
        "a successor tells which rows the lake alone has",
        "durable/pipeline/archive.py",
        before="lost=lost_lives.by_day(lake, table, whose) if wish.is_successor else {},",
        after="lost={},",
        killed_by=("tests/pipeline/test_lost_lives.py::test_command_lists_lost_rows_with_the_next_command",),
    ),
)
