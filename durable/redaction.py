"""Texts as they may be shown: without secrets, and without characters that a log or a terminal would obey.

    printable       names and reasons of peers, brokers and databases, as one line
    redacted        passwords in URLs and DSNs, values of `secret=` and the like, and every secret of this process
    shown           both: for log lines, errors and reasons that are stored
    has_password    whether the form of a text shows a password, that of this process or another

Every argument of a log line of durable and every text of a DurableError goes through here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

LONGEST: Final = 4_000
"""Characters of a text that are shown."""
HIDDEN: Final = "***"

_SHORTEST_SECRET: Final = 6  # a shorter one would be found in words that are no secrets
_SURE_SECRET: Final = 12  # characters from which on one is hidden within words, too
_MOST_SECRETS: Final = 1_000

_BREAKS: Final = re.compile(r"[^\S ]+")
# Texts come from peers: no pattern may look at the rest of a long one again for each of its characters.
_SCHEME: Final = r"[a-z][a-z0-9+.-]{0,30}://"
_BEFORE_PASSWORD: Final = re.compile(rf"{_SCHEME}[^\s:@/\"'<>]*:", re.IGNORECASE)
_IN_URL: Final = re.compile(rf"[^\s\"'<>]{{1,{LONGEST}}}")
_PORT: Final = re.compile(r"\d{1,5}(?:[\s\"'<>,;)/]|: |\Z)")  # also of "address: what failed there"
_ODD_PASSWORD: Final = re.compile(r"[^\r\n@<>]{1,100}@")  # it has a space or a quote
_TOKEN_IN_URL: Final = re.compile(rf"\b((?!postgres|amqp){_SCHEME})[^\s:@/\"'<>]+@", re.IGNORECASE)
_NAME: Final = r"(?:password|passwd|pwd|passphrase|secret|token|api[_-]?key|access[_-]?key)"
_QUOTED: Final = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_HIDDEN_YET: Final = r"[\"']?\*\*\*"
_IN_DSN: Final = re.compile(
    rf"({_NAME}\s*=\s*)(?!{_HIDDEN_YET})({_QUOTED}|[^\s&;,\"']+)"  # password=x
    rf"|({_NAME}[\"']\s*:\s*)(?!{_HIDDEN_YET})({_QUOTED}|[^\s,}}\"']+)"  # "password": "x"
    rf"|({_NAME}:\s+)(?!{_HIDDEN_YET})({_QUOTED}|[^\s,;\"']+)(?=\s*(?:[,;)\]}}\r\n]|\Z))",  # password: x
    re.IGNORECASE,
)
_IN_HEADER: Final = re.compile(r"\b(Bearer|Basic) (?!realm=)[\w.~+/=-]{8,}")

_secrets: dict[str, None] = {}


def printable(text: str, longest: int = LONGEST) -> str:
    """Return one line of this text: without NUL, escapes, lone surrogates and marks that change its direction."""
    text = text[:longest]
    if text.isprintable():
        return text
    line = _BREAKS.sub(" ", text)
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)


def redacted(text: str) -> str:
    """Return the text with *** in the places of secrets."""
    if _secrets:
        text = _known(tuple(_secrets)).sub(HIDDEN, text)
    if "=" in text or ":" in text:
        text = _IN_DSN.sub(_without_value, text)
    if "://" in text:
        text = _TOKEN_IN_URL.sub(rf"\1{HIDDEN}@", _without_passwords(text))
    return _IN_HEADER.sub(rf"\1 {HIDDEN}", text)


def has_password(text: str) -> bool:
    """Tell whether a URL in this text has a password, or `secret=` and the like a value; a user alone is no secret."""
    return bool(any(_passwords(text)) or _IN_DSN.search(text) or _IN_HEADER.search(text))


def shown(text: str, longest: int = LONGEST) -> str:
    """Return one line of this text, without secrets; of a secret at the end of what is looked at, no part either."""
    looked_at = longest + LONGEST
    line = redacted(text[:looked_at])
    return printable(line if len(text) <= looked_at else line[:-LONGEST], longest)


def keep_secret(values: Iterable[str]) -> None:
    """Show these values nowhere, as they are or percent-encoded; of URLs, their passwords."""
    for value in values:
        for secret in _parts(value):
            for form in {secret, unquote(secret), _quoted(secret, ""), _quoted(secret, "/")}:
                if len(form) >= _SHORTEST_SECRET:
                    _secrets.pop(form, None)
                    _secrets[form] = None
    while len(_secrets) > _MOST_SECRETS:
        del _secrets[next(iter(_secrets))]


def _quoted(secret: str, safe: str) -> str:
    return quote(secret, safe=safe, errors="surrogatepass")  # it may be bytes of the environment that are not UTF-8


def _parts(value: str) -> list[str]:
    """Return what is secret in a value: of a URL the password, unless it is the name of something else in it."""
    scheme, is_url, rest = value.partition("://")
    if not is_url or not scheme.replace("+", "").replace("-", "").replace(".", "").isalnum():
        return [value]
    userinfo, is_user, place = rest.rpartition("@")
    user, _, password = userinfo.partition(":")
    if not is_user or not password:
        return []
    names = {user, *re.split(r"[/?:&=,]", place)}
    return [] if password in names else [password]


@lru_cache(maxsize=1)
def _known(secrets: tuple[str, ...]) -> re.Pattern[str]:
    """Longest first: one may be a part of another. A short one may be a part of a word that is no secret."""
    return re.compile("|".join(map(_form, sorted(secrets, key=len, reverse=True))))


def _form(secret: str) -> str:
    form = re.escape(secret)
    return form if len(secret) >= _SURE_SECRET else rf"(?<!\w){form}(?!\w)"


def _passwords(text: str) -> Iterator[slice]:
    """Find the passwords in URLs, by hand: a pattern would look at a long text again for each of its beginnings."""
    at = 0
    while "@" in text and (found := _BEFORE_PASSWORD.search(text, at)):
        begin = at = found.end()
        end = -1
        if rest := _IN_URL.match(text, begin):
            end = text.rfind("@", begin + 1, rest.end())
        if end < 0 and not _PORT.match(text, begin) and (odd := _ODD_PASSWORD.match(text, begin)):
            end = odd.end() - 1
        if end > begin:
            yield slice(begin, end)
            at = end


def _without_passwords(text: str) -> str:
    shown, at = [], 0
    for password in _passwords(text):
        shown += [text[at : password.start], HIDDEN]
        at = password.stop
    return "".join([*shown, text[at:]])


def _without_value(found: re.Match[str]) -> str:
    return f"{found[1] or found[3] or found[5]}{HIDDEN}"
