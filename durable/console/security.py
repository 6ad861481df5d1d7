"""The headers of every answer, and the proof that a form is one of ours.

A form holds the secret of a cookie that only this site's pages know (a double submit), and where the browser says which
site a request comes from, that must be this one. Requests that show a bearer token come from no form.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from durable.transports.plaintext import is_loopback

FORM_COOKIE: Final = "durable-console-form"
FORM_FIELD: Final = "form"
_HOME: Final = "durable.console.home"
_MOST_BYTES: Final = 640 * 1024  # of the longest body in its longest encoding
_MOST_FIELDS: Final = 50

_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # with none at all, browsers hide the Origin of our own forms
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class SecureHeaders:
    """Middleware that adds them. Pages are stored nowhere; static files are asked for again by their ETag."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                secure(MutableHeaders(scope=message))
            await send(message)

        await self._app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def secure(headers: MutableHeaders) -> None:
    """Add the headers of every answer."""
    for name, value in _HEADERS.items():
        headers[name] = value
    headers.setdefault("Cache-Control", "no-cache" if "etag" in headers else "no-store")


class OwnRoutes:
    """Middleware that lets `request.url_for` know the routes of this console alone, wherever it is mounted."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own = {"router": scope["app"].router, "app_root_path": scope.get("root_path", "")}
        await self._app({**scope, **own}, receive, send)


class Home:
    """Middleware around the consoles of several services: one login, and one cookie, is for all of them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, _HOME: scope.get("root_path", "")}, receive, send)


def home(request: Request) -> str:
    """The path of the console, or of the consoles of all services, without a slash at its end."""
    path: str = request.scope.get(_HOME, request.scope.get("root_path", ""))
    return path


def form_secret(request: Request) -> str:
    """The secret of this browser's forms; a new one where it has none yet."""
    known = request.cookies.get(FORM_COOKIE, "")
    if not hasattr(request.state, "form_secret"):
        request.state.form_secret = known if len(known) == len(secrets.token_urlsafe(32)) else secrets.token_urlsafe(32)
    secret: str = request.state.form_secret
    return secret


def set_cookie(request: Request, response: Response, name: str, value: str, seconds: int | None = None) -> None:
    """Set a cookie that no script reads, and no other site sends.

    Plain HTTP carries it on this machine alone: under another name the request came through a proxy that ends TLS.
    """
    response.set_cookie(
        name,
        value,
        max_age=seconds,
        path=home(request) or "/",
        secure=request.url.scheme == "https" or not is_loopback(request.url.hostname or ""),
        httponly=True,
        samesite="strict",
    )


def redirect(request: Request, page: str, /, query: Mapping[str, str] | None = None, **params: str) -> Response:
    """Go to a page of the console. Of its address only the path is used: the host is what the client says it is."""
    path = request.url_for(page, **params).path
    return RedirectResponse(f"{path}?{urlencode(query)}" if query else path, 303)


async def check_form(request: Request) -> None:
    """Raise HTTPException (403) unless the request comes from one of our forms, or shows a bearer token."""
    if request.headers.get("authorization", "").lower().startswith("bearer "):
        return
    origin = request.headers.get("origin")
    if origin is not None and _host_of(origin) != request.headers.get("host", ""):
        raise HTTPException(
            403, "this form comes from another site; behind a proxy, let it pass the header Host on unchanged"
        )
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise HTTPException(403, "this form comes from another site")
    shown, known = (await fields(request)).get(FORM_FIELD, ""), request.cookies.get(FORM_COOKIE, "")
    if not known or not hmac.compare_digest(shown.encode(), known.encode()):
        raise HTTPException(
            403,
            "this form is too old, or not from here: load the page again. Over plain HTTP browsers keep no cookie of "
            "another machine: use HTTPS",
        )


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


async def fields(request: Request) -> dict[str, str]:
    """The fields of a form. Raises HTTPException for one that no page of ours sends."""
    if not hasattr(request.state, "fields"):
        if request.headers.get("content-type", "").partition(";")[0] != "application/x-www-form-urlencoded":
            raise HTTPException(415, "send application/x-www-form-urlencoded")
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_BYTES:
                raise HTTPException(413, f"a form of more than {_MOST_BYTES:,} bytes")
        try:
            pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS, errors="strict")
        except ValueError as error:
            raise HTTPException(422, "the form cannot be read") from error
        request.state.fields = dict(pairs)
    found: dict[str, str] = request.state.fields
    return found
