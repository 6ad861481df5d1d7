"""Names of batches and replays, and texts that Spark could not be given."""

from __future__ import annotations

import pytest

from durable.errors import InvalidSetting
from durable.pipeline.choosing import Choice
from durable.pipeline.texts import check_name, check_texts


@pytest.mark.parametrize("name", ["prices were wrong in May", "é" * 500, "a" * 1_000])
def test_printable_name_is_taken_up_to_its_limit(name: str) -> None:
    check_name("batch", name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "batch: '' is no name; give printable text, such as 'prices were wrong in May'"),
        (" ", "batch: ' ' is no name"),
        ("a\0b", r"batch: 'a\x00b' is no name"),
        ("a\ud800b", r"batch: 'a\ud800b' is no name"),
        ("a" * 1_001, "batch: has 1,001 bytes in UTF-8; give a name of at most 1,000"),
        ("é" * 501, "batch: has 1,002 bytes"),
    ],
)
def test_unfit_name_is_refused_with_advice(name: str, said: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        check_name("batch", name)
    assert said in str(refused.value)


def test_lone_surrogate_is_refused_in_any_text() -> None:
    check_texts(first=None, second="é", third=["a", 7], fourth=())
    with pytest.raises(InvalidSetting, match=r"^third: 'a\\ud800b' has a lone surrogate; give text in UTF-8$"):
        check_texts(first="a", third=["x", "a\ud800b"])
    with pytest.raises(InvalidSetting, match="where: "):
        Choice(where="id = '\udcff'")
