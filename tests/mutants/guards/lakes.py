"""Guards of the files of a lake: of what verify sees in them and in their log, and of who rewrites them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_TESTS = "tests/pipeline/test_damaged_lakes.py"

ROWS = (
    Mutant(
        "lakes",
        "damage that leaves the rows as they are is not seen",
        "durable/pipeline/lake_digests.py",
        before="    if checksum is not None and checksums.of(content) != checksum:\n",
        after="    if False:\n",
        killed_by=(f"{_TESTS}::test_one_bit_anywhere_in_a_file_is_seen[archived]",),
    ),
    Mutant(
        "lakes",
        "a compacted file has no checksum",
        "durable/pipeline/compaction.py",
        before="            _note_checksums(lake, table, {*lake.files_by_day(table).get(day, ())} - {*files})\n",
        after="",
        killed_by=(f"{_TESTS}::test_one_bit_anywhere_in_a_file_is_seen[compacted]",),
    ),
    Mutant(
        "lakes",
        "a compaction hides damage under a new checksum",
        "durable/pipeline/compaction.py",
        before="        checksums.check(lake.table_url(table), files)\n",
        after="",
        killed_by=(f"{_TESTS}::test_damage_is_not_written_anew[compacted]",),
    ),
    Mutant(
        "lakes",
        "an erasure believes files that have come since it began",
        "durable/pipeline/blanking.py",
        before="    compared.check(lake.table_url(table), chain.from_iterable(by_day.values()))\n",
        after="",
        killed_by=(f"{_TESTS}::test_damage_hides_no_row_from_an_erasure[_rewritten-keys-by key]",),
    ),
    Mutant(
        "lakes",
        "rows that damage hides are not erased",
        "durable/pipeline/blanking.py",
        before="    paths = [*lake.sizes(table)]\n    compared.check(lake.table_url(table), paths)\n",
        after="    paths = [*lake.sizes(table)]\n",
        killed_by=(
            f"{_TESTS}::test_damage_hides_no_row_from_an_erasure[_surveyed-ids-by id]",
            f"{_TESTS}::test_damaged_file_of_the_table_is_named_where_orphans_are_judged",
        ),
    ),
    Mutant(
        "lakes",
        "an erasure begins in the database before the lake is known to be sound",
        "durable/pipeline/erasing.py",
        before="                compared.check(place.table_url(table), place.sizes(table))\n",
        after="",
        killed_by=(f"{_TESTS}::test_damage_hides_no_row_from_an_erasure[_erased-keys-by key]",),
    ),
    Mutant(
        "lakes",
        "a file is compared again and again by one command",
        "durable/pipeline/checksums.py",
        before="            self._known |= {(table_url, path) for path in fresh}\n",
        after="",
        killed_by=(f"{_TESTS}::test_erasure_compares_each_file_once",),
    ),
    Mutant(
        "lakes",
        "damage hides the content in the file of a dead erasure",
        "durable/pipeline/leftovers.py",
        before="        checksums.check(self._table_url, [file.path])\n",
        after="",
        killed_by=(f"{_TESTS}::test_damage_hides_no_row_of_a_dead_writer[61-found1]",),
    ),
    Mutant(
        "lakes",
        "the size in the log is not compared",
        "durable/pipeline/lake_digests.py",
        before="    if len(content) != size:\n",
        after="    if False:\n",
        killed_by=(f"{_TESTS}::test_log_is_compared_with_its_files[size]",),
    ),
    Mutant(
        "lakes",
        "a log that says a file has no rows is believed",
        "durable/pipeline/lake_digests.py",
        before="    if expected is not None and metadata.num_rows != expected:\n",
        after="    if expected and metadata.num_rows != expected:\n",
        killed_by=(f"{_TESTS}::test_log_is_compared_with_its_files[no rows]",),
    ),
    Mutant(
        "lakes",
        "statistics in the log are not compared",
        "durable/pipeline/lake_digests.py",
        before="                statistics.add(batch)\n",
        after="",
        killed_by=(f"{_TESTS}::test_log_is_compared_with_its_files[highest number]",),
    ),
    Mutant(
        "lakes",
        "text that is no UTF-8 ends verify",
        "durable/pipeline/lake_digests.py",
        before="            rows.validate(full=True)\n",
        after="",
        killed_by=(f"{_TESTS}::test_broken_text_makes_its_file_unreadable[side]",),
    ),
    Mutant(
        "lakes",
        "Spark reads past a folder in place of a file",
        "durable/pipeline/lake.py",
        before="        places.check_present(self.table_url(table), paths)\n",
        after="",
        killed_by=(f"{_TESTS}::test_reader_names_the_damaged_file[_read-_folder]",),
    ),
    Mutant(
        "lakes",
        "a damaged log is told in the words of the library",
        "durable/pipeline/lake.py",
        before="        with lake_log.readable(self.url), lake_log.sound_log(self.table_url(table)):\n",
        after="        with lake_log.readable(self.url):\n",
        killed_by=(f"{_TESTS}::test_damaged_log_is_named[_last_cut]",),
    ),
    Mutant(
        "lakes",
        "local messages of another database are handled again under their ids",
        "durable/pipeline/replay.py",
        before="    if foreign:\n",
        after="    if False:\n",
        killed_by=(
            "tests/pipeline/test_replay.py::test_local_messages_of_another_database_are_refused_under_their_ids",
        ),
    ),
)
