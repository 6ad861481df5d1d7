"""A batch without rows is a batch: the same again adds nothing, and other rows under its name are others."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from itertools import product
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession

from durable.errors import InvalidMessage
from durable.pipeline import publish
from durable.pipeline.writer import EnvelopeStreamWriter, EnvelopeWriter
from durable.settings import load_settings
from durable.storage.staging import Published
from tests.support.publishing import COLUMNS, Outbox, messages, orders, staged

ATOMIC: Final = {"mode": "atomic"}
FAST: Final = {"mode": "fast"}
PAIRS: Final = [each for each in product((0, 2), repeat=2) if 0 in each]
OF_PAIRS = pytest.mark.parametrize(("before", "after"), PAIRS)
ENCRYPTED = pytest.mark.parametrize(
    "encrypted", [*product((False, True), repeat=2)], ids=["plain", "later", "earlier", "encrypted"]
)


@pytest.fixture
def database_url(emptied_url: str) -> str:
    return emptied_url


class Writing:
    """Publishing without Spark, readable or encrypted."""

    def __init__(self, url: str, patch: pytest.MonkeyPatch) -> None:
        self.url = url
        self._patch = patch

    def batch(self, count: int, is_encrypted: bool = False, **options: str) -> None:
        to = EnvelopeWriter(self._options(is_encrypted) | options, COLUMNS, overwrite=False)
        to.commit([staged(to._target, range(count))])

    def micro_batch(self, number: int, count: int, is_encrypted: bool = False) -> None:
        to = EnvelopeStreamWriter(self._options(is_encrypted), COLUMNS, overwrite=False)
        to.commit([staged(to._target, range(count))], number)

    def _options(self, is_encrypted: bool) -> dict[str, str]:
        keys = {"a": base64.b64encode(b"a" * 32).decode()} if is_encrypted else {}
        self._patch.setenv("DURABLE_ENCRYPTION_KEYS", json.dumps(keys))
        self._patch.setenv("DURABLE_ENCRYPT_ALL", str(is_encrypted).lower())
        return {"url": self.url}


@pytest.fixture
def writing(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Writing:
    return Writing(database_url, monkeypatch)


def waiting(url: str) -> int:
    return int(Outbox(url).one("SELECT count(*) FROM durable.outgoing_envelopes"))


@OF_PAIRS
@ENCRYPTED
@pytest.mark.parametrize("mode", [ATOMIC, FAST], ids=["atomic", "fast"])
def test_rows_under_the_name_of_a_batch_are_refused_unless_both_are_none(
    writing: Writing, mode: Mapping[str, str], encrypted: tuple[bool, bool], before: int, after: int
) -> None:
    """Whatever the mode of the first one; the second is atomic, which alone refuses."""
    writing.batch(before, encrypted[0], batch="May", **mode)
    if before == after:
        writing.batch(after, encrypted[1], batch="May")
    else:
        with pytest.raises(InvalidMessage, match=rf"'May' was published before, with other rows \({before}, and now "):
            writing.batch(after, encrypted[1], batch="May")
    assert waiting(writing.url) == before
    writing.batch(after, encrypted[1], batch="May", **FAST)
    assert waiting(writing.url) == max(before, after)


@OF_PAIRS
@ENCRYPTED
def test_batches_without_a_name_are_known_by_whether_they_have_rows(
    writing: Writing, encrypted: tuple[bool, bool], before: int, after: int
) -> None:
    for _ in range(2):
        writing.batch(before, encrypted[0])
        writing.batch(after, encrypted[1])
    assert waiting(writing.url) == max(before, after)
    assert Outbox(writing.url).one("SELECT count(*) FROM durable.published_batches") == len({before, after})


@OF_PAIRS
@ENCRYPTED
def test_repeated_micro_batch_is_refused_unless_both_have_no_rows(
    writing: Writing, encrypted: tuple[bool, bool], before: int, after: int
) -> None:
    writing.micro_batch(3, before, encrypted[0])
    if before == after:
        writing.micro_batch(3, after, encrypted[1])
    else:
        with pytest.raises(InvalidMessage, match=rf"micro-batch 3 of .* with other rows \({before}, and now {after}\)"):
            writing.micro_batch(3, after, encrypted[1])
    assert waiting(writing.url) == before
    writing.micro_batch(4, after, encrypted[1])
    assert waiting(writing.url) == max(before, after)


def test_contents_of_an_empty_batch_of_before_are_known(writing: Writing) -> None:
    """They have no columns."""
    Outbox(writing.url).rows(
        "INSERT INTO durable.published_batches (batch, job, contents) "
        """VALUES ('May', gen_random_uuid(), '{"rows": "0", "sealed": "0"}')"""
    )
    writing.batch(0, batch="May")
    with pytest.raises(InvalidMessage, match=r"with other rows \(0, and now 2\)"):
        writing.batch(2, batch="May")


def test_empty_dataframes_are_published_in_any_order(spark: SparkSession, database_url: str) -> None:
    settings: Any = load_settings(database_url=database_url)
    some, none = (messages(orders(spark, count)) for count in (3, 0))
    for batch in (None, "May"):
        found = publish.publish(none, settings, batch=batch)
        assert found is not None
        assert found == Published(found.batch, 0, 0)
        assert publish.publish(none, settings, batch=batch) is None
    with pytest.raises(InvalidMessage, match=r"with other rows \(0, and now 3\)"):
        publish.publish(some, settings, batch="May")
    assert Outbox(database_url).orders == []
