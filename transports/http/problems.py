"""Refusals as problems (RFC 9457), for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from starlette.responses import Response

PROBLEM: Final = "application/problem+json"
CLOSE: Final = {"Connection": "close"}
"""Of a refusal after which nothing on the connection can be trusted, or is worth to be read."""


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None, **more: str) -> Response:
    """Return a response with the fault, and `more` members of it."""
    title = HTTPStatus(status).phrase
    content = {"type": "about:blank", "title": title, "status": status, "detail": detail, **more}
    return Response(json.dumps(content), status, headers, media_type=PROBLEM)
