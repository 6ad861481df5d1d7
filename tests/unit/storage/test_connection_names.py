"""Names of connections: which one wins."""

from __future__ import annotations

import pytest

from durable.storage.connection_names import of_service


@pytest.fixture(autouse=True)
def _without_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGAPPNAME", raising=False)


def test_name_has_the_service_and_the_purpose() -> None:
    assert of_service("orders", "agents").asyncpg({}, pooled=False) == {"application_name": "durable orders agents"}


def test_pools_of_a_service_share_one_name_behind_a_pooler() -> None:
    names = [of_service("orders", purpose).psycopg({}, pooled=True) for purpose in ("agents", "sync")]
    assert names == 2 * [{"fallback_application_name": "durable orders"}]


def test_purpose_of_a_long_service_is_kept() -> None:
    name = of_service("é" * 60, "agents").direct
    assert name.endswith("é agents")
    assert len(name.encode()) <= 63


def test_variable_of_libpq_comes_first_for_asyncpg_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGAPPNAME", "mine")
    assert of_service("orders", "agents").asyncpg({}, pooled=False) == {"application_name": "mine"}


def test_name_in_options_is_left_alone() -> None:
    params = {"options": "-c application_name=mine"}
    name = of_service("orders", "agents")
    assert (name.asyncpg(params, pooled=False), name.psycopg(params, pooled=False)) == ({}, {})
