"""Plans of replays: a run that is continued has the plan of the first run, or is refused with the difference."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from durable.errors import InvalidSetting
from durable.pipeline.choosing import Choice, Group
from durable.pipeline.plans import Plan, begun, chosen_by, continued, end_of, found_by, plan_of
from durable.storage.erasures import ERASED_PART

NOW = datetime(2030, 5, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def plan(**changed: Any) -> Plan:
    options: dict[str, Any] = {"place": {"lake": "/lake"}, "times": {"since": None, "until": None}}
    options |= {"destination": None, "same_ids": False, "order_by": None}
    options |= {name: value for name, value in changed.items() if name in options}
    chosen = {name: value for name, value in changed.items() if name not in options}
    return plan_of(Choice(**chosen), **options)


def messages(service: str | None = "shop", side: str = "outgoing", last: datetime | None = NOW) -> list[Group]:
    return [Group(service, side, "orders.placed", "local", 1, 0, last, last)]


def stored(found: Plan) -> Plan:
    """As the first run has written it."""
    return dict(json.loads(json.dumps(begun(found, messages()))))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "lake": ({"place": {"lake": "/other"}}, "--lake was '/lake', and is now '/other'"),
    "parquet": ({"place": {"parquet": "/files"}}, "--parquet was not given, and is now '/files'"),
    "from": ({"table": "dead_letters"}, "--from was 'history', and is now 'dead-letters'"),
    "service": ({"service": "shop"}, "--service was not given, and is now 'shop'"),
    "side": ({"side": "incoming"}, "--side was not given, and is now 'incoming'"),
    "type": ({"types": ["a", "b"]}, "--type was not given, and is now a, b"),
    "address": ({"addresses": ["a"]}, "--address was not given, and is now a"),
    "id": ({"ids": [UUID(int=1)]}, f"--id was not given, and is now {UUID(int=1)}"),
    "since": ({"since": NOW, "times": {"since": "2h", "until": None}}, "--since was not given, and is now 2h"),
    "until": ({"until": NOW, "times": {"since": None, "until": "2h"}}, "--until was not given, and is now 2h"),
    "where": ({"where": "1 = 1"}, "--where was not given, and is now '1 = 1'"),
    "destination": ({"destination": "local"}, "--destination was not given, and is now 'local'"),
    "same-ids": ({"same_ids": True}, "--same-ids was not given, and is now given"),
    "order-by": ({"order_by": ["seq"]}, "--order-by was not given, and is now seq"),
}


def test_every_part_of_a_plan_has_its_case() -> None:
    assert plan().keys() == OTHERS.keys()


@pytest.mark.parametrize("option", OTHERS)
def test_another_plan_is_refused_with_the_difference(option: str) -> None:
    changed, difference = OTHERS[option]
    with pytest.raises(InvalidSetting) as refused:
        continued("May", stored(plan()), plan(**changed))
    assert difference in str(refused.value)
    assert "another --name" in str(refused.value)
    assert continued("May", stored(plan(**changed)), plan(**changed)) == stored(plan(**changed))


@pytest.mark.parametrize("name", ["since", "until"])
def test_plan_keeps_the_relative_time_of_the_first_run(name: str) -> None:
    times = {"since": None, "until": None, name: "2h ago"}
    choice = Choice(**{name: NOW + HOUR})  # type: ignore[arg-type]  # a moment
    later = plan(**{name: NOW + HOUR}, times=times)
    found = continued("May", stored(plan(**{name: NOW}, times=times)), later)
    assert getattr(chosen_by(found, choice), name) == NOW
    with pytest.raises(
        InvalidSetting, match=rf"--{name} was 2h ago \(2030-05-01T12:.*, and is now 1h \(2030-05-01T13:"
    ):
        continued("May", found, plan(**{name: NOW + HOUR}, times=times | {name: "1h"}))


def test_time_is_the_same_in_another_notation() -> None:
    first = plan(since=NOW, times={"since": "2h", "until": None})
    same = plan(since=NOW, times={"since": "2030-05-01T12:00Z", "until": None})
    assert continued("May", stored(first), same) == stored(first)


def test_plan_ends_behind_the_messages_of_its_first_run() -> None:
    first = stored(plan())
    assert end_of(plan()) is None
    assert end_of(first) == end_of(begun(first, messages(last=NOW + HOUR))) == NOW + timedelta(microseconds=1)


def test_plan_without_an_end_stays_without_one() -> None:
    found = continued("May", plan(), plan())
    assert begun(found, messages()) == found
    assert end_of(found) is None


@pytest.mark.parametrize("service", ["shop", None])
def test_plan_has_the_service_and_the_side_of_its_first_run(service: str | None) -> None:
    first = begun(plan(), messages(service, "incoming"))
    found = continued("May", first, plan())
    for each in (first, found, begun(found, messages("billing"))):
        assert found_by(each) == {"service": service, "side": "incoming"}
        assert chosen_by(each, Choice()) == Choice()
    assert found_by(plan()) == found_by(continued("May", plan(), plan())) == found_by(begun(plan(), [])) == {}


@pytest.mark.parametrize("part", [*plan(), "end", "only"])
def test_plan_with_an_erased_part_is_refused(part: str) -> None:
    with pytest.raises(InvalidSetting, match=f"replay 'May': a key was erased that its --{part} had named, "):
        continued("May", stored(plan()) | {part: ERASED_PART}, plan())


def test_given_order_differs_from_the_default_one() -> None:
    with pytest.raises(InvalidSetting, match="--order-by was not given, and is now sent_at, seq"):
        continued("May", stored(plan()), plan(order_by=["sent_at", "seq"]))


def test_order_of_repeated_options_counts_for_the_order_alone() -> None:
    continued("May", stored(plan(types=["a", "b"])), plan(types=["b", "a"]))
    with pytest.raises(InvalidSetting, match="--order-by was a, b, and is now b, a"):
        continued("May", stored(plan(order_by=["a", "b"])), plan(order_by=["b", "a"]))
