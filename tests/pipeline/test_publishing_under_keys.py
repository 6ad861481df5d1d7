"""Publishing again under other keys: the same rows are the same, others are not, and what cannot be told is said."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, Final, NamedTuple

import pytest
from pyspark.sql import SparkSession

from durable.errors import InvalidMessage
from durable.pipeline import contents, publish, writer
from durable.pipeline.copying import connection
from durable.settings import load_settings
from durable.storage import staging
from durable.storage.staging import Batch, Published, Staged
from tests.pipeline.test_publishing_again import IDS, PLACES, ROW, _columns, settle, table, waiting
from tests.support.publishing import Outbox, messages, orders

pytestmark = pytest.mark.timeout(600)

RINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "readable": (),
    "a": ("a",),
    "b": ("b",),
    "b, a known": ("b", "a"),
    "c, b, a known": ("c", "b", "a"),
}
KEYS: Final = {each: base64.b64encode(each.encode() * 32).decode() for each in "abc"}
NAMES: Final = {"one name": ("May", "May"), "no name": (None, None), "two names": ("May", "June")}


class Case(NamedTuple):
    """How rows are published, and how again."""

    before: str
    after: str
    names: str
    place: str
    once: bool
    is_settled: bool
    is_same: bool

    @property
    def outcome(self) -> str:
        """`repeated`: nothing is added; `changed` and `untold`: refused; `sent again`: of no memory of it."""
        then, now = RINGS[self.before], RINGS[self.after]
        is_told = bool({*then} & {*now}) or then == now
        is_known_batch = self.names == "one name" or (self.names == "no name" and self.is_same)
        is_told_of_batch = is_told or not then  # bytes are compared with bytes, in the job
        if is_known_batch and is_told_of_batch and self.is_same:
            return "repeated"
        if self.names == "one name":
            return "changed" if is_told_of_batch else "untold"
        if self.place == "outbox" and self.is_settled and not self.once:
            return "sent again"
        return "untold" if not is_told else "repeated" if self.is_same else "changed"


PAIRS: Final = [
    ("readable", "a"),
    ("a", "readable"),
    ("a", "b"),
    ("a", "b, a known"),
    ("b, a known", "c, b, a known"),
]
WAYS: Final = [("outbox", False), ("outbox", True), ("inbox", False)]
CASES: Final = [
    Case(*pair, names, *way, is_settled=is_settled, is_same=is_same)
    for pair, names, way, is_settled, is_same in product(PAIRS, NAMES, WAYS, [False, True], [False, True])
]


@pytest.fixture
def write(emptied_url: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Published | None]:
    """Publish two rows under these keys, as tasks and the driver do, without Spark."""

    def written(ring: str, place: str, batch: str | None, body: bytes, *, once: bool) -> Published | None:
        monkeypatch.setenv("DURABLE_ENCRYPTION_KEYS", json.dumps({each: KEYS[each] for each in RINGS[ring]}))
        monkeypatch.setenv("DURABLE_ENCRYPT_ALL", str(bool(RINGS[ring])).lower())
        to = writer.target({"url": emptied_url}, _columns(), overwrite=False)
        intake, name = writer._Intake(to, 0), staging.table_name(to.job, 1)
        rows = [{**ROW, **PLACES[place], "id": each, "body": body} for each in IDS]
        writer._copy(to, name, intake.staged(iter([table(*rows)])))
        parts, found = [Staged(name, intake.rows, intake.local_rows, intake.ordered_rows)], intake.contents
        names = contents.names_of(found) if batch is None else [batch]
        as_read = contents.plain(found)
        of_all = Batch(names[0], contents=contents.written(found), plain=as_read, others=names[1:])
        assert not {*(as_read or {}).values()} & {*(of_all.contents or {}).values()}, "never stored"
        with connection(emptied_url) as conn:
            return staging.publish(conn, to.schema, to.job, of_all, parts, once=once)

    return written


@pytest.mark.parametrize("ring", PAIRS, ids=" then ".join)
def test_rows_published_again_are_judged_by_their_messages(
    emptied_url: str, tables: Any, write: Callable[..., Published | None], ring: tuple[str, str]
) -> None:
    seen = {}
    for case in (each for each in CASES if (each.before, each.after) == ring):
        tables.clear()
        first, second = NAMES[case.names]
        published = write(case.before, case.place, first, b"{}", once=case.once)
        assert published is not None
        assert published.added == 2
        if case.is_settled:
            settle(emptied_url, case.place)
        try:
            again = write(case.after, case.place, second, b"{}" if case.is_same else b"{ }", once=case.once)
        except InvalidMessage as error:
            said = str(error)
            seen[case] = "untold" if "cannot be compared" in said and "keys of their own" not in said else "changed"
            assert "published before" in said
            if seen[case] == "changed":
                assert "body" in said
        else:
            seen[case] = "sent again" if again is not None and again.added else "repeated"
        left = 0 if case.is_settled else 2
        assert waiting(emptied_url) == (2 if seen[case] == "sent again" else left)
    assert {case: each for case, each in seen.items() if each != case.outcome} == {}


@pytest.mark.parametrize("destination", ["tcp://127.0.0.1:2301", "local"])
@pytest.mark.parametrize("options", [{"batch": "May"}, {}, {"once": True}], ids=str)
def test_same_rows_are_no_others_after_a_rotation(
    spark: SparkSession, emptied_url: str, destination: str, options: Mapping[str, Any]
) -> None:
    """As by publish(), which encrypts before the writer."""

    def settings(*ring: str) -> Any:
        keys = {each: KEYS[each] for each in ring}
        return load_settings(database_url=emptied_url, encrypt_all=True, encryption_keys=keys)

    rows = messages(orders(spark, 10), destination)
    assert publish.publish(rows, settings("a"), **options) is not None
    assert publish.publish(rows, settings("b", "a"), **options) is None
    assert Outbox(emptied_url).one("SELECT count(*) FROM durable.published_batches") == 1
    changed = messages(orders(spark, 10).selectExpr("order_id", "total + 1 AS total"), destination)
    with pytest.raises(InvalidMessage, match=r"published before.*body.*nothing was published"):
        publish.publish(changed, settings("b", "a"), **options)
