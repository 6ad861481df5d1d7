"""Words that depend on a name or a number."""

from __future__ import annotations

import pytest

from durable.grammar import several, with_article


@pytest.mark.parametrize(
    ("count", "words", "told"),
    [
        (0, ("nodes",), "0 nodes"),
        (1, ("nodes",), "1 node"),
        (2_000, ("nodes",), "2,000 nodes"),
        (1, ("dead letters", "wait"), "1 dead letter waits"),
        (3, ("dead letters", "wait"), "3 dead letters wait"),
        (1, ("threads", "are"), "1 thread is"),
        (1, ("days", "were"), "1 day was"),
        (1, ("readable bodies",), "1 readable body"),
        (1, ("addresses", "were"), "1 address was"),
        (1, ("batches",), "1 batch"),
        (1, ("boxes",), "1 box"),
        (1, ("releases",), "1 release"),
    ],
)
def test_noun_and_verb_agree_with_their_number(count: int, words: tuple[str, ...], told: str) -> None:
    assert several(count, *words) == told


def test_number_may_be_written_in_another_form() -> None:
    assert several(1_000, "messages", "wait", written="1000 or more") == "1000 or more messages wait"


@pytest.mark.parametrize(
    ("name", "told"),
    [("Retry", "a Retry"), ("AsyncEngine", "an AsyncEngine"), ("UUID", "a UUID"), ("admin", "an admin")],
)
def test_class_has_its_article(name: str, told: str) -> None:
    assert with_article(name) == told
