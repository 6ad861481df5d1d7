"""People who may come in, and their roles.

    authorize=   the application's own check of a request, which returns a Person, or None
    tokens=      a secret for each person, shown as `Authorization: Bearer ...`, or once to the login page

After a login the browser holds a cookie: the name, the time at which it ends, and an HMAC over both under a key that is
derived from the token. So it ends with the token, and needs no memory of this process but of those who have logged out.
"""

from __future__ import annotations

import hmac
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from hashlib import sha256
from typing import Final, NamedTuple

from starlette.requests import Request

from durable.errors import InvalidSetting

COOKIE: Final = "durable-console"
SESSION_SECONDS: Final = 12 * 3600

_NAME: Final = re.compile(r"[A-Za-z0-9._@+-]{1,100}")
_SHORTEST_TOKEN: Final = 16
_MOST_FAILURES: Final = 10
_FAILURE_SECONDS: Final = 60.0
_MOST_ADDRESSES: Final = 10_000


class Role(IntEnum):
    """Rights of a person; each role may do what those before may."""

    VIEWER = 1
    """See everything but the contents of messages."""
    OPERATOR = 2
    """See contents, pause and resume, replay and discard dead letters, change what is scheduled."""
    ADMIN = 3
    """Edit the bodies of dead letters, discard whole groups, export the record of actions."""


class Person(NamedTuple):
    """A person who has come in."""

    name: str
    role: Role


Authorize = Callable[[Request], Awaitable[Person | None]]
"""The application's own check of a request: a person, or None for nobody."""


class Tokens:
    """People by their secrets."""

    def __init__(self, people: Mapping[str, Person]) -> None:
        for token, person in people.items():
            if len(token) < _SHORTEST_TOKEN:
                raise InvalidSetting(
                    f"console: the token of {person.name} has {len(token)} characters; give {_SHORTEST_TOKEN} or more"
                )
            if not _NAME.fullmatch(person.name):
                raise InvalidSetting(f"console: {person.name!r} is no name; give letters, digits and any of ._@+-")
        self._people = dict(people)
        self._failures: dict[str, deque[float]] = {}
        self._ended: dict[str, float] = {}

    async def __call__(self, request: Request) -> Person | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._known(token.strip())
        return self._of_cookie(request.cookies.get(cookie_name(request), ""))

    def is_closed(self, request: Request) -> bool:
        """Tell whether so many wrong tokens came from this address within a minute that the login looks at no more."""
        failures, now = self._failures.get(_address(request), deque[float]()), time.monotonic()
        return len(failures) == _MOST_FAILURES and now - failures[0] < _FAILURE_SECONDS

    def log_in(self, request: Request, token: str) -> str | None:
        """Return the value of the cookie; None for a wrong token."""
        person = self._known(token)
        if person is None:
            self._count_failure(_address(request))
            return None
        return _cookie(token, person, int(time.time()) + SESSION_SECONDS)

    def log_out(self, request: Request) -> None:
        """Let the cookie of this request in no more, also a copy of it, until this process ends."""
        cookie, now = request.cookies.get(cookie_name(request), ""), time.time()
        self._ended = {each: ends for each, ends in self._ended.items() if ends > now}
        if self._of_cookie(cookie) is not None:
            self._ended[cookie] = now + SESSION_SECONDS

    def _known(self, token: str) -> Person | None:
        """Find a person by a token: nobody guesses one, so wrong ones close nothing but the login."""
        found = [person for each, person in self._people.items() if _is_same(each, token)]
        return found[0] if found else None

    def _count_failure(self, address: str) -> None:
        failures = self._failures.pop(address, deque(maxlen=_MOST_FAILURES))
        failures.append(time.monotonic())
        self._failures[address] = failures  # as the latest
        if len(self._failures) > _MOST_ADDRESSES:
            del self._failures[next(iter(self._failures))]

    def _of_cookie(self, cookie: str) -> Person | None:
        if cookie in self._ended:
            return None
        _, ends, _ = cookie.split("|") if cookie.count("|") == 2 else ("", "", "")
        if not (ends.isascii() and ends.isdigit() and len(ends) < 12) or int(ends) < time.time():
            return None
        found = [each for token, each in self._people.items() if _is_same(_cookie(token, each, int(ends)), cookie)]
        return found[0] if found else None


def cookie_name(request: Request) -> str:
    """The name of the cookie: browsers send those of one port of a machine to the others, too."""
    return f"{COOKIE}-{request.url.port}" if request.url.port else COOKIE


def _address(request: Request) -> str:
    return "" if request.client is None else request.client.host


def _cookie(token: str, person: Person, ends: int) -> str:
    """Return the only spelling of this cookie: a logout remembers it."""
    said = f"durable console\n{person.name}\n{int(person.role)}\n{ends}"
    mac = hmac.new(token.encode(errors="surrogatepass"), said.encode(), sha256).hexdigest()
    return f"{person.name}|{ends}|{mac}"


def _is_same(first: str, second: str) -> bool:
    return hmac.compare_digest(first.encode(errors="surrogatepass"), second.encode(errors="surrogatepass"))
