"""Filters of the pages, as they were typed: each is taken whole, or refused."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.exceptions import HTTPException
from starlette.requests import Request

from durable.messages.validation import text_fault


def chosen_filters(request: Request, names: Iterable[str]) -> dict[str, str]:
    """Return those of the filters that are given. Raises HTTPException (422) for a text that no message may have."""
    given = {name: value for name in names if (value := request.query_params.get(name))}
    for name, value in given.items():
        if fault := text_fault(value):
            raise HTTPException(422, f"{name}: the text {fault}; give less of it, on one line")
    return given
