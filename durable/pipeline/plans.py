"""Plan of a replay: what decides which messages it has, in which order, and where they go.

    first run        plan ──> the table replays, before the first chunk
    any run after    plan ──> compared with that of the table: the same goes on, another is refused

A time such as `2h ago` stands for that of the first run, or each run would choose other messages. For the same reason a
plan ends where the messages of its first run end: the copies that it makes are none of its own once they are archived.
How large a chunk is, and how many messages there are in a second, is no part of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from durable.errors import InvalidSetting
from durable.pipeline.choosing import Choice, Group
from durable.pipeline.spellings import absolute
from durable.storage.erasures import ERASED_PART

Plan = dict[str, Any]

_LAST: Final = datetime.max.replace(tzinfo=UTC)
_TIMES: Final = ("since", "until")
_FOUND: Final = ("service", "side")
_END: Final = "end"
_ONLY: Final = "only"
"""Parts of a plan that no option gives: where it ends, and the service and the side that its first run has found."""


def plan_of(
    choice: Choice,
    *,
    place: Mapping[str, str],
    times: Mapping[str, str | None],
    destination: str | None,
    same_ids: bool,
    order_by: Sequence[str] | None,
) -> Plan:
    """Make the plan of a run, by the names of the options. `times`: the texts of since and until, as they were given.

    `place`: the lake, or the files, that the messages come from.
    """
    parquet = place.get("parquet")
    moments = {"since": choice.since, "until": choice.until}
    return {
        "lake": place.get("lake"),
        "parquet": None if parquet is None else absolute(parquet),
        "from": choice.table.replace("_", "-"),
        "service": choice.service,
        "side": choice.side,
        "type": sorted(choice.types),
        "address": sorted(choice.addresses),
        "id": sorted(map(str, choice.ids)),
        **{name: _time(times[name], moments[name]) for name in _TIMES},
        "where": choice.where,
        "destination": destination,
        "same-ids": same_ids,
        "order-by": None if order_by is None else list(order_by),
    }


def continued(name: str, known: Mapping[str, Any], given: Plan) -> Plan:
    """Return the plan of the first run. Raises InvalidSetting, with what differs, unless this run has the same; and
    where a part of it was erased, which nobody can compare.
    """
    other_name = "another --name, under which all messages are replayed, also those that this one has replayed"
    if erased := [f"--{option}" for option, part in known.items() if part == ERASED_PART]:
        raise InvalidSetting(
            f"replay {name!r}: a key was erased that its {' and '.join(sorted(erased))} had named, and nobody can tell "
            f"whether this is the same; give {other_name}"
        )
    differences = "; ".join(_differences(known, given))
    if differences:
        raise InvalidSetting(
            f"replay {name!r} was begun with other options: {differences}; give the same ones to continue it, or "
            f"{other_name}"
        )
    return {_END: None, _ONLY: {}} | dict(known)


def begun(plan: Plan, groups: Sequence[Group]) -> Plan:
    """Return the plan of a first run with what it has found: its end, which is behind the last of its messages, and
    their service and side, which every run after it has too; any other plan as it is.
    """
    last = max((group.last for group in groups if group.last), default=None)
    return {
        _END: None if last is None or last == _LAST else (last + timedelta(microseconds=1)).isoformat(),
        _ONLY: {name: getattr(group, name) for group in groups[:1] for name in _FOUND},
    } | plan


def end_of(plan: Plan) -> datetime | None:
    """The end of a plan that has run before: later messages are none of it."""
    end = plan.get(_END)
    return None if end is None else datetime.fromisoformat(end)


def found_by(plan: Plan) -> Mapping[str, str | None]:
    """The service and the side that the first run has found; its messages may have been of no service."""
    return dict(plan.get(_ONLY, {}))


def chosen_by(plan: Plan, choice: Choice) -> Choice:
    """Return the choice with the times of the plan."""
    since, until = (plan[name] and datetime.fromisoformat(plan[name]["at"]) for name in _TIMES)
    return replace(choice, since=since, until=until)


def _differences(known: Mapping[str, Any], given: Plan) -> Iterator[str]:
    for option, now in given.items():
        if option in (_END, _ONLY):
            continue
        before = known.get(option)
        if before != now and not (option in _TIMES and _is_same_time(before, now)):
            yield f"--{option} was {_shown(before)}, and is now {_shown(now)}"


def _is_same_time(before: Any, now: Any) -> bool:
    return bool(before and now) and (before["given"] == now["given"] or before["at"] == now["at"])


def _shown(value: Any) -> str:
    match value:
        case None | [] | False:
            return "not given"
        case True:
            return "given"
        case {"given": given, "at": at}:
            return f"{given} ({at})"
        case [*several]:
            return ", ".join(several)
        case _:
            return repr(value)


def _time(text: str | None, moment: datetime | None) -> dict[str, str] | None:
    return None if text is None or moment is None else {"given": text.strip(), "at": moment.isoformat()}
