"""Damaged lakes: verify sees whatever changes a file or its log, purge drops nothing then, readers name the file."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pyarrow.parquet as pq
import pytest

from durable.errors import DurableError
from durable.pipeline import audit, blanking, checksums, choosing, erasing, few_conversations, iceberg, places
from durable.pipeline.audit import Question
from durable.pipeline.blanking import Wanted
from durable.pipeline.checksums import Compared
from durable.pipeline.choosing import Choice
from durable.pipeline.compaction import compact, vacuum
from durable.pipeline.known import KnownRows
from durable.pipeline.lake import Lake
from durable.pipeline.lake_tables import Whose
from durable.pipeline.leftovers import Scrubbed
from durable.pipeline.purge import Retention, purge
from durable.pipeline.verify import Verified
from durable.storage.erasures import Chosen
from tests.support.archiving import Archiver
from tests.support.history import add_history, add_old_day

MONTH = Retention(timedelta(days=30), timedelta(days=30))
ONE = UUID(int=1)
ALL = Choice()
HERE: dict[str, Any] = {"local_rows": 1_000}


@pytest.fixture
def filled(archiver: Archiver, conn: psycopg.Connection[Any]) -> Archiver:
    """Three files of an old day."""
    for part in range(3):
        add_old_day(conn, 40, 20, first=1 + 100 * part)
        conn.execute("UPDATE durable.envelope_history SET partition_key = 'anna' WHERE id = %s", (ONE,))
        archiver.run(**HERE)
    return archiver


def log(lake: Lake) -> list[Path]:
    return sorted(Path(lake.table_url("history"), "_delta_log").glob("*.json"))


def listed(lake: Lake) -> list[Path]:
    return [Path(lake.table_url("history"), path) for path in lake.sizes("history")]


def damaged(found: Verified) -> set[str]:
    return {Path(path).name for path in found.unreadable}


def file_of_one(archiver: Archiver) -> Path:
    (file,) = (each for each in listed(archiver.lake) if ONE.bytes in pq.ParquetFile(each).read()["id"].to_pylist())
    return file


def keeps_all(archiver: Archiver) -> bool:
    """Tell whether a purge refuses."""
    with pytest.raises(DurableError, match="nothing was purged"):
        purge(lambda: archiver.spark, archiver.lake, archiver.origin, MONTH, **HERE)
    return True


# ---------------------------------------------------------------- the bytes of a file


def archived(_: Archiver) -> None:
    """As the archiver has written it."""


def compacted(archiver: Archiver) -> None:
    compact(archiver.lake, "history")


def erased(archiver: Archiver) -> None:
    erasing.erase(archiver.origin, archiver.lake, Chosen(ids=[ONE]), actor="a test", reason="4711")


@pytest.mark.parametrize("written", [archived, compacted, erased])
def test_one_bit_anywhere_in_a_file_is_seen(filled: Archiver, written: Callable[[Archiver], None]) -> None:
    """Whoever wrote the file: in its pages, its page index, each part of its footer, and its ends."""
    written(filled)
    found = filled.verify(**HERE)
    assert (found.is_whole, found.without_checksum) == (True, 0)
    file = min(listed(filled.lake), key=lambda each: "part-erase" not in each.name)
    sound, chosen = file.read_bytes(), random.Random(7)
    footer = len(sound) - 8 - int.from_bytes(sound[-8:-4], "little")
    places = [0, len(sound) - 1, *chosen.sample(range(footer), 25), *chosen.sample(range(footer, len(sound)), 40)]
    for place in places:
        file.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << chosen.randrange(8)]) + sound[place + 1 :])
        assert damaged(filled.verify(**HERE)) == {file.name}, f"byte {place}"
    assert keeps_all(filled)
    file.write_bytes(sound)
    assert filled.verify(**HERE).is_whole


def test_flipped_statistics_are_seen_on_the_workers(filled: Archiver) -> None:
    """Arrow reads all rows of such a file; readers with a filter pass them over."""
    (file, *_) = listed(filled.lake)
    sound = file.read_bytes()
    place = sound.rindex(b"shop")
    file.write_bytes(sound[:place] + b"shoq" + sound[place + 4 :])
    assert pq.ParquetFile(file).read().num_rows == 20
    assert damaged(filled.verify(local_rows=0)) == {file.name}


def test_file_without_a_checksum_is_compared_by_its_rows(filled: Archiver) -> None:
    """Those of older versions have none, and neither have those of other programs."""
    (file, *_) = listed(filled.lake)
    checksums.remove(filled.lake.table_url("history"), str(file.relative_to(filled.lake.table_url("history"))))
    for rows in (0, 1_000):
        found = filled.verify(local_rows=rows)
        assert (found.is_whole, found.without_checksum, found.missing) == (True, 1, 0)
    filled.run("dead_letters", **HERE)
    assert purge(lambda: filled.spark, filled.lake, filled.origin, MONTH, **HERE).rows == 60


def _checksum_of(archiver: Archiver, file: Path) -> Path:
    table_url = archiver.lake.table_url("history")
    return Path(table_url, checksums.FOLDER, f"{file.relative_to(table_url)}.blake2b")


NO_CHECKSUM: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "cut short": lambda text: text[:10],
    "one character less": lambda text: text[:-1],
    "one character more": lambda text: text + b"0",
    "a newline": lambda text: text + b"\n",
    "capital letters": lambda text: b"ABCDEF" + text[6:],
    "other characters": lambda text: b"xyz" + text[3:],
    "no text": lambda text: b"\xff" + text[1:],
    "zeros of a lost page": lambda text: bytes(len(text)),
}


@pytest.mark.parametrize("what", NO_CHECKSUM)
def test_malformed_checksum_counts_as_none(filled: Archiver, what: str) -> None:
    """As a disk that fills up leaves it: the file is sound, and nothing refuses it; verify says that it has none."""
    noted = _checksum_of(filled, file_of_one(filled))
    noted.write_bytes(NO_CHECKSUM[what](noted.read_bytes()))
    found = filled.verify(**HERE)
    assert (found.is_whole, found.without_checksum) == (True, 1)
    erased(filled)
    compacted(filled)
    found = filled.verify(**HERE)
    assert (found.is_whole, found.without_checksum) == (True, 0)


@pytest.mark.parametrize("what", NO_CHECKSUM)
def test_malformed_checksum_hides_no_damage_to_rows(filled: Archiver, what: str) -> None:
    noted = _checksum_of(filled, file := file_of_one(filled))
    noted.write_bytes(NO_CHECKSUM[what](noted.read_bytes()))
    HIDDEN["keys"](file)
    found = filled.verify(**HERE)
    assert (found.is_whole, damaged(found)) == (False, {file.name})


def test_checksum_is_there_as_a_whole_or_not_at_all(filled: Archiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the disk fills up after the commit of a compaction, and for who reads meanwhile."""
    table_url = filled.lake.table_url("history")
    before = {*Path(table_url, checksums.FOLDER).rglob("*")}

    def full(_: int) -> None:
        (new,) = {*Path(table_url, checksums.FOLDER).rglob("*")} - before
        assert new.name.endswith(places.NEW)
        raise OSError(errno.ENOSPC, "no room")

    with monkeypatch.context() as patch:
        patch.setattr("durable.pipeline.places.os.fsync", full)
        with pytest.raises(DurableError, match=r"blake2b.new cannot be written: No space left on device; make room"):
            compacted(filled)
    assert {*Path(table_url, checksums.FOLDER).rglob("*")} == before
    found = filled.verify(**HERE)
    assert (found.is_whole, found.without_checksum) == (True, 1)


def test_vacuum_leaves_the_checksum_of_a_writer_at_work(filled: Archiver) -> None:
    at_work = [_checksum_of(filled, each).with_name(f"{each.name}.blake2b{places.NEW}") for each in listed(filled.lake)]
    dead = at_work[0].with_name(f"part-gone.parquet.blake2b{places.NEW}")
    for each in (*at_work, dead):
        each.write_bytes(b"0a")
    vacuum(filled.lake, "history", timedelta(hours=1))
    assert [each.exists() for each in (*at_work, dead)] == [True, True, True, False]


def _to_folder(noted: Path) -> None:
    noted.unlink()
    noted.mkdir()


def _to_loop(noted: Path) -> None:
    noted.unlink()
    noted.symlink_to(noted.name)


def _below_a_file(noted: Path) -> None:
    shutil.rmtree(noted.parent.parent)
    noted.parent.parent.write_text("no folder")


UNOPENED = {"a folder": _to_folder, "a link to itself": _to_loop, "below a file": _below_a_file}


@pytest.mark.parametrize(("use", "what"), [*product((compacted, erased), UNOPENED)])
def test_unopened_checksum_is_told_in_one_line(filled: Archiver, use: Callable[[Archiver], None], what: str) -> None:
    """Whether it holds the checksum of the file nobody knows."""
    UNOPENED[what](_checksum_of(filled, file := listed(filled.lake)[0]))
    assert file.name in damaged(filled.verify(**HERE))
    with pytest.raises(DurableError, match=r"^lake: .*parquet cannot be read: .*_checksums.*; put it back") as raised:
        use(filled)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("rewriting", [compacted, erased])
def test_damage_is_not_written_anew(filled: Archiver, rewriting: Callable[[Archiver], None]) -> None:
    """What is made of a file would have a checksum of its own."""
    file = file_of_one(filled)
    sound = file.read_bytes()
    place = sound.rindex(b"shop")
    file.write_bytes(sound[:place] + b"shoq" + sound[place + 4 :])
    with pytest.raises(DurableError, match=f"{file.name} cannot be read: .* checksum differs; put it back"):
        rewriting(filled)
    assert len(listed(filled.lake)) == 3


# ---------------------------------------------------------------- rows that damage hides from an erasure


def _with(file: Path, column: str, value: object) -> None:
    """Write a file anew with one column of another content: it can be read, and filters find other rows."""
    import pyarrow as pa

    rows = pq.ParquetFile(file).read()
    at = rows.schema.get_field_index(column)
    changed = pa.array([value] * len(rows), rows.schema.field(at).type)
    pq.write_table(rows.set_column(at, rows.schema.field(at), changed), file)


HIDDEN: dict[str, Callable[[Path], None]] = {
    "keys": lambda file: _with(file, "partition_key", "berta"),
    "ids": lambda file: _with(file, "id", UUID(int=4711).bytes),
    "services": lambda file: _with(file, "service", "shoq"),
    "databases": lambda file: _with(file, "database", "another"),
    "erasures": lambda file: _with(file, "erasure_id", UUID(int=4711).bytes),
}
CHOSEN = {"by key": Chosen(keys=["anna"]), "by id": Chosen(ids=[ONE])}


def _surveyed(archiver: Archiver, chosen: Chosen) -> object:
    return erasing.survey(archiver.origin, archiver.lake, chosen)


def _erased(archiver: Archiver, chosen: Chosen) -> object:
    return erasing.erase(archiver.origin, archiver.lake, chosen, actor="a test", reason="4711")


def _rewritten(archiver: Archiver, chosen: Chosen) -> object:
    """As after a conflict: files have come since the erasure began."""
    return blanking.rewritten(archiver.lake, "history", Wanted(chosen.ids, chosen.keys), ONE, "0-0-x0", Compared())


@pytest.mark.parametrize(("use", "what", "chosen"), [*product((_surveyed, _erased, _rewritten), HIDDEN, CHOSEN)])
def test_damage_hides_no_row_from_an_erasure(
    filled: Archiver,
    conn: psycopg.Connection[Any],
    use: Callable[[Archiver, Chosen], object],
    what: str,
    chosen: str,
) -> None:
    """Also where it makes a file look as if none of its rows were wanted; and the database has erased nothing then."""
    file = file_of_one(filled)
    HIDDEN[what](file)
    with pytest.raises(DurableError, match=f"{file.name} cannot be read: .* checksum differs; put it back"):
        use(filled, CHOSEN[chosen])
    assert conn.execute("SELECT count(*) FROM durable.erasures").fetchone() == (0,)
    assert conn.execute("SELECT count(*) FROM durable.envelope_history WHERE partition_key = 'anna'").fetchone() == (1,)


def test_erasure_compares_each_file_once(filled: Archiver, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def differs(table_url: str, path: str, of: Callable[[str, str], bool] = checksums.differs) -> bool:
        read.append(path)
        return of(table_url, path)

    monkeypatch.setattr(checksums, "differs", differs)
    before, compared, chosen = {*filled.lake.sizes("history")}, Compared(), CHOSEN["by key"]
    erasing.survey(filled.origin, filled.lake, chosen, (), compared)
    erasing.erase(filled.origin, filled.lake, chosen, actor="a test", reason="4711", compared=compared)
    erasing.scrub(filled.origin, filled.lake, chosen, (), compared)
    assert sorted(read) == sorted(before)


@pytest.mark.parametrize(("minutes", "found"), [(1, Scrubbed(busy=1)), (61, Scrubbed(removed=1))])
def test_damage_hides_no_row_of_a_dead_writer(filled: Archiver, minutes: int, found: Scrubbed) -> None:
    """A file of another erasure that has died before its commit."""
    _erased(filled, CHOSEN["by key"])
    erasing.scrub(filled.origin, filled.lake, CHOSEN["by key"])
    of_one = file_of_one(filled)
    left = of_one.with_name("part-0a1b2c3d-0-x1a2b3c4-0-0.parquet")
    left.write_bytes(of_one.read_bytes())
    _with(left, "erasure_id", None)
    table_url = filled.lake.table_url("history")
    checksums.note(table_url, str(left.relative_to(table_url)), checksums.of(left.read_bytes()))
    _with(left, "id", UUID(int=4711).bytes)
    moment = time.time() - 60 * minutes
    os.utime(left, (moment, moment))
    assert erasing.scrub(filled.origin, filled.lake, CHOSEN["by key"]) == found
    assert left.exists() == (not found.removed)


def test_damaged_file_of_the_table_is_named_where_orphans_are_judged(filled: Archiver) -> None:
    """Of which rows the table has erased it would say nothing."""
    _erased(filled, CHOSEN["by key"])
    erasing.scrub(filled.origin, filled.lake, CHOSEN["by key"])
    of_one = file_of_one(filled)
    left = of_one.with_name("part-00000-0a1b2c3d-c000.zstd.parquet")
    left.write_bytes(of_one.read_bytes())
    _with(of_one, "erasure_id", None)
    with pytest.raises(DurableError, match=f"{of_one.name} cannot be read: .* checksum differs"):
        vacuum(filled.lake, "history", timedelta(hours=1))
    assert left.exists()


# ---------------------------------------------------------------- days that only the lake has


@pytest.mark.parametrize("rows", [0, 1_000])
@pytest.mark.parametrize("what", [*HIDDEN, "one bit", "gone"])
def test_damage_of_a_purged_day_is_seen(filled: Archiver, conn: psycopg.Connection[Any], what: str, rows: int) -> None:
    """Its files are all that is left of it."""
    filled.run("dead_letters", **HERE)
    assert len(purge(lambda: filled.spark, filled.lake, filled.origin, MONTH, **HERE).days) == 1
    add_history(conn, 5, first=1_000)
    filled.run(**HERE)
    found = filled.verify(local_rows=rows)
    assert (found.is_whole, found.days, found.rows, found.files, found.file_days) == (True, 1, 5, 4, 2)
    file, damages = file_of_one(filled), {**HIDDEN, "one bit": _with_one_bit, "gone": _gone}
    damages[what](file)
    found = filled.verify(local_rows=rows)
    assert (found.is_whole, damaged(found), found.missing) == (False, {file.name}, 0)


def test_purge_reads_the_files_of_its_days_alone(filled: Archiver, conn: psycopg.Connection[Any]) -> None:
    """Damage of a later day does not keep the older ones in the database."""
    add_history(conn, 5, first=1_000)
    filled.run(**HERE)
    filled.run("dead_letters", **HERE)
    (file,) = (each for each in listed(filled.lake) if pq.read_metadata(each).num_rows == 5)
    _with_one_bit(file)
    assert damaged(filled.verify(**HERE)) == {file.name}
    assert purge(lambda: filled.spark, filled.lake, filled.origin, MONTH, **HERE).rows == 60


def _with_one_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


# ---------------------------------------------------------------- what is published of damage


def _chosen(archiver: Archiver, choice: Choice = ALL) -> object:
    return choosing.choose(archiver.spark, archiver.lake, choice).count()


@pytest.mark.parametrize("what", HIDDEN)
def test_replay_chooses_no_message_of_a_damaged_file(filled: Archiver, what: str) -> None:
    file = file_of_one(filled)
    assert _chosen(filled) == 60
    HIDDEN[what](file)
    with pytest.raises(DurableError, match=f"{file.name} cannot be read: .* checksum differs; put it back"):
        _chosen(filled)


def test_replay_reads_the_files_of_its_days_alone(filled: Archiver, conn: psycopg.Connection[Any]) -> None:
    add_history(conn, 5, first=1_000)
    filled.run(**HERE)
    HIDDEN["keys"](file_of_one(filled))
    assert _chosen(filled, Choice(since=datetime.now(UTC) - timedelta(days=1))) == 5


def test_keys_of_a_damaged_file_are_no_known_rows(filled: Archiver) -> None:
    """Of a database that takes the place of another one: a row that looks as if it were there would not be archived."""
    file = file_of_one(filled)
    rows = pq.ParquetFile(file).read().to_batches()[0]
    known = KnownRows.of(filled.lake, "history", Whose("shop", rows["database"][0].as_py()))
    assert known.without(rows).num_rows == 0
    HIDDEN["ids"](file)
    with pytest.raises(DurableError, match=f"{file.name} cannot be read: .* checksum differs"):
        KnownRows.of(filled.lake, "history", known.whose).without(rows)


@pytest.mark.parametrize("column", ["side", "outcome", "message_type", "source", "address", "service", "error"])
def test_broken_text_makes_its_file_unreadable(
    filled: Archiver, conn: psycopg.Connection[Any], column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrow reads such text, and only decoding it fails: of a file without a checksum, too."""
    (file, *_) = listed(filled.lake)
    rows = pq.ParquetFile(file).read()
    at = rows.schema.get_field_index(column)
    bad = rows.column(column).cast("binary").combine_chunks().fill_null(b"x")
    changed = type(bad).from_buffers(bad.type, len(bad), [None, bad.buffers()[1], _unicode_broken(bad.buffers()[2])])
    pq.write_table(rows.set_column(at, rows.schema.field(at), changed.view("string")), file, store_schema=False)
    monkeypatch.setattr(checksums, "noted", lambda *_: None)
    found = filled.verify(**HERE)
    assert damaged(found) == {file.name}
    assert found.missing == 20
    assert keeps_all(filled)


def _unicode_broken(buffer: Any) -> Any:
    import pyarrow as pa

    content = bytearray(buffer.to_pybytes())
    content[0] |= 0x80
    return pa.py_buffer(bytes(content))


def test_checksums_go_with_their_files(filled: Archiver) -> None:
    table_url = filled.lake.table_url("history")
    noted = Path(table_url, checksums.FOLDER)
    compact(filled.lake, "history")
    assert len([*noted.glob("*/*")]) == 4
    vacuum(filled.lake, "history", timedelta(hours=1))
    assert len([*noted.glob("*/*")]) == 4
    (path,) = filled.lake.sizes("history")
    for file in filled.files():
        if file != Path(table_url, path):
            file.unlink()
    vacuum(filled.lake, "history", timedelta(hours=1))
    assert [each.name for each in noted.glob("*/*")] == [f"{Path(path).name}.blake2b"]


# ---------------------------------------------------------------- what the log says of a file


def _statistics(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], None]:
    def changed(add: dict[str, Any]) -> None:
        statistics = json.loads(add["stats"])
        change(statistics)
        add["stats"] = json.dumps(statistics)

    return changed


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "size": lambda add: add.update(size=add["size"] // 2),
    "rows": _statistics(lambda found: found.update(numRecords=found["numRecords"] + 1)),
    "no rows": _statistics(lambda found: found.update(numRecords=0)),
    "lowest number": _statistics(lambda found: found["minValues"].update(xid=1 << 40)),
    "highest number": _statistics(lambda found: found["maxValues"].update(xid=1)),
    "lowest text": _statistics(lambda found: found["minValues"].update(side="zzz")),
    "highest text": _statistics(lambda found: found["maxValues"].update(message_type="A")),
    "lowest time": _statistics(lambda found: found["minValues"].update(finished_at="2199-01-01T00:00:00.000000Z")),
    "highest time": _statistics(lambda found: found["maxValues"].update(finished_at="2019-01-01T00:00:00.000000Z")),
    "NULLs": _statistics(lambda found: found["nullCount"].update(service=3)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_log_is_compared_with_its_files(filled: Archiver, what: str) -> None:
    last = log(filled.lake)[-1]
    lines = [json.loads(line) for line in last.read_text().splitlines()]
    (add,) = [line["add"] for line in lines if "add" in line]
    CHANGES[what](add)
    last.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert damaged(filled.verify(**HERE)) == {Path(add["path"]).name}
    assert keeps_all(filled)


# ---------------------------------------------------------------- what readers say


def _gone(file: Path) -> None:
    file.unlink()


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _emptied(file: Path) -> None:
    file.write_bytes(b"")


def _audited(archiver: Archiver) -> object:
    return audit.audit_here([archiver.lake], [archiver.lake], Question())


def _found(archiver: Archiver) -> object:
    return few_conversations.find([archiver.lake], ONE)


def _read(archiver: Archiver) -> object:
    return archiver.lake.read(archiver.spark, "history").count()


def _exported(archiver: Archiver) -> object:
    return iceberg.export(archiver.lake, "history")


DAMAGE = (_gone, _folder, _cut, _emptied)
READERS = (_audited, _found, erased, compacted, _exported, _chosen)
MET = [*product(READERS, DAMAGE), (_read, _gone), (_read, _folder)]
"""A file that is there is read by Spark, which names one that is damaged itself."""


@pytest.mark.parametrize(("reader", "damage"), MET)
def test_reader_names_the_damaged_file(
    filled: Archiver, reader: Callable[[Archiver], object], damage: Callable[[Path], None]
) -> None:
    file = listed(filled.lake)[1]
    damage(file)
    with pytest.raises(DurableError) as raised:
        reader(filled)
    said = str(raised.value)
    assert file.name in said
    assert "cannot be read" in said
    assert "\n" not in said


def _without(number: int) -> Callable[[Lake], str]:
    def removed(lake: Lake) -> str:
        log(lake)[number].unlink()
        return log(lake)[number].name.replace(f"{number + 1:020}", f"{number:020}")

    return removed


def _last_cut(lake: Lake) -> str:
    last = log(lake)[-1]
    last.write_bytes(last.read_bytes()[:-30])
    return last.name


@pytest.mark.parametrize("damage", [_without(1), _last_cut])
def test_damaged_log_is_named(filled: Archiver, damage: Callable[[Lake], str]) -> None:
    named = damage(filled.lake)

    def uses() -> Iterator[Callable[[], object]]:
        yield lambda: filled.verify(**HERE)
        yield lambda: filled.run(**HERE)
        yield lambda: filled.lake.listed("history")
        yield lambda: filled.lake.table_id("history")
        yield lambda: compact(filled.lake, "history")
        yield lambda: vacuum(filled.lake, "history", timedelta(hours=1))
        yield lambda: purge(lambda: filled.spark, filled.lake, filled.origin, MONTH, **HERE)

    for use in uses():
        filled.lake = Lake(filled.lake.url)  # a process reads the files of a log once
        with pytest.raises(DurableError, match=rf"_delta_log/{named}: is .*; put _delta_log back from a backup"):
            use()
