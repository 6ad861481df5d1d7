"""The page of what operators did, and its export."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from durable.bus import Bus
from durable.console.access import Person
from durable.console.filters import chosen_filters
from durable.console.pages import Pages
from durable.console.shown import moment_of
from durable.listed import SHOWN
from durable.storage import actions
from durable.storage.actions import Recorded, Selection

_FILTERS: Final = ("actor", "verb", "target", "since", "until")
_EXPORTED_AT_ONCE: Final = 5_000
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


class Record:
    """The record of a service."""

    def __init__(self, bus: Bus, pages: Pages) -> None:
        self._bus = bus
        self._pages = pages

    async def page(self, request: Request, person: Person) -> Response:
        """Show the last actions, the newest first."""
        chosen = chosen_filters(request, _FILTERS)
        found = await self._read(selection_of(chosen), before=_before(request), limit=SHOWN + 1)
        following = found[SHOWN - 1].number if len(found) > SHOWN else None
        return self._pages.render(
            request, "actions.html", person, actions=found[:SHOWN], chosen=chosen, names=_FILTERS, following=following
        )

    async def export(self, request: Request, person: Person) -> Response:
        """Give what is selected as a file, CSV or JSON."""
        kind = request.query_params.get("as", "csv")
        if kind not in ("csv", "json"):
            raise HTTPException(422, f"as: {kind!r} is neither csv nor json")
        headers = {"Content-Disposition": f'attachment; filename="actions.{kind}"'}
        media_type = "text/csv; charset=utf-8" if kind == "csv" else "application/json"
        rows = self._rows(selection_of(chosen_filters(request, _FILTERS)))
        parts = _csv_parts(rows) if kind == "csv" else _json_parts(rows)
        return StreamingResponse(parts, media_type=media_type, headers=headers)

    async def _rows(self, selection: Selection) -> AsyncIterator[list[Recorded]]:
        """Read all of them, the newest first."""
        before = None
        while found := await self._read(selection, before=before, limit=_EXPORTED_AT_ONCE):
            yield found
            before = found[-1].number

    async def _read(self, selection: Selection, *, before: int | None, limit: int) -> list[Recorded]:
        return await self._bus.runtime.database.transaction(actions.page, selection, limit=limit, before=before)


def selection_of(chosen: Mapping[str, str]) -> Selection:
    """Make filters of what a form says. Raises HTTPException (422) for a time that is none."""
    now = datetime.now(UTC)
    since, until = (moment_of(name, chosen[name], now) if name in chosen else None for name in ("since", "until"))
    actor, verb, target = (chosen.get(name) for name in ("actor", "verb", "target"))
    return Selection(actor=actor, verb=verb, target=target, since=since, until=until)


def _before(request: Request) -> int | None:
    text = request.query_params.get("before", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


async def _csv_parts(parts: AsyncIterator[list[Recorded]]) -> AsyncIterator[str]:
    """Write the rows for spreadsheets, which take no cell for a formula."""
    yield _lines([Recorded._fields])
    async for rows in parts:
        yield _lines([[_cell(value) for value in row] for row in rows])


async def _json_parts(parts: AsyncIterator[list[Recorded]]) -> AsyncIterator[bytes]:
    comma = b"["
    async for rows in parts:
        yield comma + msgspec.json.encode([each._asdict() for each in rows])[1:-1]
        comma = b","
    yield b"]" if comma == b"," else b"[]"


def _lines(rows: Sequence[Sequence[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerows(rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    match value:
        case None:
            return ""
        case datetime():
            return value.astimezone(UTC).isoformat()
        case dict():
            return msgspec.json.encode(value).decode()
        case str() if value.lstrip().startswith(_FORMULA) or value.startswith(_FORMULA):
            return f"'{value}"
        case _:
            return value
