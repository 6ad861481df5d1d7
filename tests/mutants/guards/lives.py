"""Guards of lost lives: which rows of a lake their database has lost, and what the audit makes of them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TESTS = "tests/pipeline/test_lost_lives.py"

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
        "an audit without Spark passes over lost lives",
        "durable/pipeline/audit.py",
        before="    if lost_lives.are_named([*senders, *receivers], _first_day(question)):\n        return None\n",
        after="",
        killed_by=(f"{_TESTS}::test_message_handled_in_a_lost_life_is_undone_until_handled_again",),
    ),
    Mutant(
        "lives",
        "a message that balances with a row of a lost life is not looked at",
        "durable/pipeline/audit.py",
        before="suspects if lost.ids is None else suspects.union(lost.ids).distinct()",
        after="suspects",
        killed_by=(f"{_TESTS}::test_message_handled_in_a_lost_life_is_undone_until_handled_again",),
    ),
    Mutant(
        "lives",
        "a letter of a lost life is an end",
        "durable/pipeline/matching.py",
        before='quarantined=history.quarantined.join(lost.letters, keys, "left_anti")',
        after="quarantined=history.quarantined",
        killed_by=(f"{_TESTS}::test_message_quarantined_in_a_lost_life_is_undone",),
    ),
    Mutant(
        "lives",
        "a message that a lost life has sent is not forgotten",
        "durable/pipeline/matching.py",
        before='sent=history.sent.join(lost.rows, keys, "left_anti")',
        after="sent=history.sent",
        killed_by=(f"{_TESTS}::test_message_sent_in_a_lost_life_is_forgotten_until_sent_again",),
    ),
)
