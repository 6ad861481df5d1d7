"""One spelling of a place, and places that are refused because they would be read as another one."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from durable.errors import InvalidSetting
from durable.pipeline.lake import Lake
from durable.pipeline.spellings import absolute, spelled

FOLDER = [
    "/data/lake",
    "/data/lake/",
    "//data/lake",
    "/data//lake/.",
    "file:/data/lake",
    "file:///data/lake",
    "file:////data//lake/",
    "FILE:///data/lake",
    "file://localhost/data/lake",
    "File://LOCALHOST/data/lake//",
    "file:///d%61ta/lake",
]
STORE = [
    "s3://bucket/lake",
    "s3a://bucket/lake",
    "S3://bucket/lake/",
    "S3A://bucket//lake",
    "s3://bucket/x/../lake",
    "s3://bucket/./lake//",
    "s3://bucket/../lake",
]
AZURE = ["az://box/lake", "azure://box/lake", "ADL://box/lake/"]
SECURE = ["abfss://box@account/lake", "abfs://box@account//lake"]
PLACES = {"/data/lake": FOLDER, "s3://bucket/lake": STORE, "az://box/lake": AZURE, "abfss://box@account/lake": SECURE}


@pytest.mark.parametrize(("place", "named"), [(place, named) for place, names in PLACES.items() for named in names])
def test_names_of_one_place_have_one_spelling(place: str, named: str) -> None:
    assert spelled(named) == place


@pytest.mark.parametrize("names", PLACES.values(), ids=PLACES)
def test_names_of_one_place_are_one_lake(names: list[str]) -> None:
    assert all(Lake(one).is_at(Lake(other)) for one, other in product(names, names))


def test_bucket_is_a_place() -> None:
    assert {spelled(named) for named in ("s3://bucket", "s3://bucket/", "s3a://bucket//")} == {"s3://bucket"}


def test_relative_path_begins_at_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert spelled("lake") == spelled(f"file://{quote(str(tmp_path))}/lake") == f"{tmp_path}/lake"


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A folder with a link `near` that leads to `far/deep`, and one `there` to `far`."""
    (tmp_path / "far/deep").mkdir(parents=True)
    (tmp_path / "near").symlink_to(tmp_path / "far/deep")
    (tmp_path / "there").symlink_to(tmp_path / "far")
    return tmp_path.resolve()


UP = {
    "near/../lake": "far/lake",
    "near/.././/lake": "far/lake",
    "near/../../lake": "lake",
    "near/..": "far",
    "near/../": "far",
    "there/deep/../lake": "far/lake",
    "there/../lake": "lake",
    "near/../deep/../lake": "far/lake",
    "missing/../lake": "lake",
    "missing/../near/../lake": "far/lake",
    "missing/../near": "near",
    "near": "near",
    "near/lake": "near/lake",
    "near/..lake": "near/..lake",
    "near/lake..": "near/lake..",
}


@pytest.mark.parametrize("named", UP)
def test_path_above_a_link_follows_the_link(linked: Path, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(linked)
    place = str(linked / UP[named])
    assert [spelled(given) for given in (named, f"{linked}/{named}", f"file://{linked}/{named}")] == [place] * 3
    assert absolute(named) == absolute(f"{linked}/{named}") == place


def test_folder_above_the_root_is_the_root() -> None:
    assert spelled("/../data") == spelled("//../../data/") == "/data"


@pytest.mark.parametrize("place", ["", "s3://bucket/x/../files", "file:///data/../files"])
def test_url_of_files_stays(place: str) -> None:
    assert absolute(place) == place


def test_url_of_a_folder_with_one_slash_is_the_same_place() -> None:
    assert absolute("file:/data/files") == absolute("FILE:/data/files") == "file:///data/files"


READ_AS_ANOTHER = {
    "/data/50%25": "is read as another one",
    "/data/a\\b": "is read as another one",
    "file:///data/50%2525": "is read as another one",
    "file:///data/a%5Cb": "is read as another one",
    "file:///data/lake?x": "is cut at ? and #",
    "file:///data/lake#x": "is cut at ? and #",
    "file://elsewhere/data/lake": "is a folder of another machine",
    "s3://bucket/a%20b": "is read as another one",
    "s3://bucket/a\\b": "is read as another one",
    "s3://bucket/lake?x": "is read as another one",
    "s3://bucket/lake#x": "is read as another one",
    "s3:///lake": "has no bucket",
    "/data/la\nke": "has a line break, a tab or another control character",
    "/data/la\tke": "has a line break, a tab or another control character",
    "la\x1bke": "has a line break, a tab or another control character",
    "s3://bucket/la\nke": "has a line break, a tab or another control character",
    "file:///data/la\tke": "has a line break, a tab or another control character",
}


@pytest.mark.parametrize("named", READ_AS_ANOTHER)
def test_name_read_as_another_one_is_refused(named: str) -> None:
    with pytest.raises(InvalidSetting) as told:
        Lake(named)
    assert READ_AS_ANOTHER[named] in str(told.value)
    assert str(told.value).isprintable()
    assert "; " in str(told.value)


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1).filter(
    lambda name: "://" not in name
)


@given(
    st.sampled_from(["/", "file:///", "s3://bucket/", "S3A://bucket/"]),
    st.lists(NAMES | st.just(".."), min_size=1, max_size=4),
)
def test_spelling_of_a_spelling_is_itself(root: str, names: list[str]) -> None:
    try:
        found = spelled(root + "/".join(names))
    except InvalidSetting:
        return
    assert spelled(found) == found
    assert spelled(f"{found}/") == found
