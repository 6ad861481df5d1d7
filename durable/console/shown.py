"""Values as the pages show them."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from markupsafe import Markup, escape
from starlette.exceptions import HTTPException

from durable.console.plots import plot
from durable.dead_letters.bodies import row
from durable.duration import duration
from durable.envelope import JSON
from durable.grammar import lasting
from durable.storage.dead_letters import DeadLetter
from durable.storage.flow import Flow

_COMMANDING: Final = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and marks that turn the direction of the text behind them."""


def harmless(value: object) -> object:
    """A value of a template: text comes from peers, and may turn nothing around beyond itself."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return _COMMANDING.sub("\N{REPLACEMENT CHARACTER}", value)
    return value


def age(duration: timedelta | None) -> str:
    """A length of time in its largest unit: 45 s, 12 min, 3 h, 9 days."""
    return "" if duration is None else lasting(duration)


def moment(at: datetime | None) -> Markup | str:
    """A time, in UTC; the page's script shows it in the reader's own zone."""
    if at is None:
        return ""
    shown = at.strftime("%Y-%m-%d %H:%M:%S")
    return Markup('<time datetime="{}" title="{} UTC">{} UTC</time>').format(at.isoformat(), shown, shown)


def seconds(value: float | None) -> str:
    """A length of time in its largest unit: 3 ms, 1.2 s, 4 min."""
    if value is None:
        return ""
    if value < 1:
        return f"{max(0.0, value) * 1_000:.0f} ms"
    return f"{value:.1f} s" if value < 120 else age(timedelta(seconds=value))


def flow_plots(found: Flow) -> Markup:
    """Draw the flow: messages and failures a minute, and how long messages took."""
    slices, ago = found.slices, f"{age(found.length)} ago"
    return Markup("").join(
        [
            plot(
                "Messages a minute",
                {
                    "handled": a_minute([each.handled for each in slices], found.minutes),
                    "sent": a_minute([each.sent for each in slices], found.minutes),
                },
                ago,
            ),
            plot(
                "Seconds from send to handled",
                {"p50": [each.p50 for each in slices], "p99": [each.p99 for each in slices]},
                ago,
            ),
            plot("Dead letters a minute", {"failed": a_minute([each.failed for each in slices], found.minutes)}, ago),
        ]
    )


def a_minute(counts: Sequence[int], minutes: float) -> list[float]:
    """Return the rates of counts in slices of so many minutes in all, each taken over a minute or more.

    A rate of a shorter time would be larger than any minute has seen: two dead letters within three seconds are two.
    """
    together = math.ceil(len(counts) / minutes - 1e-6)  # slices to a minute
    parts = max(1, len(counts) // max(1, together))
    ends = [len(counts) - (parts - 1 - part) * together for part in range(parts)]
    rates: list[float] = []
    for begin, end in itertools.pairwise([0, *ends]):
        length = max(1.0, (end - begin) * minutes / len(counts))
        rates += [sum(counts[begin:end]) / length] * (end - begin)
    return rates


_CELL: Final = re.compile(r"<(?:th|td)\b([^>]*)>(.*?)(?=</(?:th|td)>)", re.DOTALL)
_TABLE: Final = re.compile(r"<thead>(.*?)</thead>(.*?)</table>", re.DOTALL)
_OPENING: Final = re.compile(r'<tr\b|<td\b(?: colspan="(\d+)")?')
_PORT: Final = re.compile(r":[0-9]+$")


def labelled(page: str) -> str:
    """Name each cell of a page's tables after its column: a phone shows rows as cards."""
    return _TABLE.sub(_labelled_table, page)


def _labelled_table(table: re.Match[str]) -> str:
    titles = [title for _, title in _CELL.findall(table[1])]
    column = 0

    def opening(found: re.Match[str]) -> str:
        nonlocal column
        if found[0] == "<tr":
            column = 0
            return found[0]
        title = titles[column] if column < len(titles) else ""
        column += int(found[1] or 1)
        return f'{found[0]} data-label="{title}"'

    return f"<thead>{table[1]}</thead>{_OPENING.sub(opening, table[2])}</table>"


def address(written: str) -> Markup:
    """An address that may be broken anywhere but within its port."""
    text = str(harmless(written))
    scheme, separator, rest = text.partition("://")
    host, slash, path = rest.partition("/")
    found = _PORT.search(host) if separator else None
    if found is None:
        return escape(text)
    port = Markup('<span class="port">{}</span>').format(host[found.start() :])
    return escape(scheme + separator + host[: found.start()]) + port + escape(slash + path)


def as_json(value: object) -> str:
    """A value of JSON, on one line."""
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def moment_of(name: str, text: str, now: datetime) -> datetime:
    """Read a time: ISO 8601, in UTC where no zone is given, or a length of time that has passed since.

    Raises HTTPException (422).
    """
    text = text.strip()
    try:
        return now - duration(text)
    except (ValueError, OverflowError):
        pass
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise HTTPException(422, f"{name}: {text!r} is no time; give 2h, 7d, or 2030-12-31T23:59Z") from None


def count(number: int, most: int | None = None) -> str:
    """A number with its thousands apart; with a plus where counting ended."""
    return f"{number:,}" + ("+" if most is not None and number >= most else "")


_SPACE: Final = re.compile(r'("(?:[^"\\]|\\.)*")|\s+')
"""Space outside of texts."""
LARGEST_EDITED: Final = 48 * 1024
"""Characters of a body that a form may hold."""


def editable(letter: DeadLetter) -> str | None:
    """The body as a form shows it; None for a long one, for bytes that are no text, such as encrypted ones, and for
    line ends that a form would change.
    """
    text = _text(letter.body, letter) if letter.summary.replayable else None
    if text is None or text.replace("\r\n", "").count("\r") or ("\r\n" in text and "\n" in text.replace("\r\n", "")):
        return None
    text = _pretty(text, letter).replace("\r\n", "\n")
    return text if len(text) <= LARGEST_EDITED else None


def as_edited(letter: DeadLetter, text: str) -> bytes:
    """The body of a form as bytes: the letter's own where nothing was changed, and with its ends of lines."""
    text = text.replace("\r\n", "\n")
    if text == editable(letter):
        return letter.body
    return (text.replace("\n", "\r\n") if b"\r\n" in letter.body else text).encode()


def body(letter: DeadLetter) -> str:
    """The body as text, JSON on several lines where that changes nothing in it; of an encrypted one its key."""
    contents = letter.body if letter.edited_body is None else letter.edited_body
    told: dict[str, Any] = row("body", contents, letter.content_type, letter.summary.message_type)
    if "body_key" in told:
        return f"(encrypted with key {told['body_key'] or 'unknown'})"
    text = _text(contents, letter)
    return f"(bytes, in base64) {told['body_base64']}" if text is None else _pretty(text, letter)


def is_encrypted(letter: DeadLetter) -> bool:
    return "body_key" in row("body", letter.body, letter.content_type, letter.summary.message_type)


def _text(contents: bytes, letter: DeadLetter) -> str | None:
    """The body as text that a page can hold."""
    told: dict[str, Any] = row("body", contents, letter.content_type, letter.summary.message_type)
    text: str | None = told["body"]
    return text if text is not None and _is_sendable(text) else None


def _pretty(text: str, letter: DeadLetter) -> str:
    """JSON on several lines, where only the space between its parts becomes another: large numbers, names that come
    twice and escapes stay as they are.
    """
    if "json" not in (letter.content_type or JSON):
        return text
    try:
        pretty = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text
    return pretty if _is_sendable(pretty) and _SPACE.sub(r"\1", pretty) == _SPACE.sub(r"\1", text) else text


def _is_sendable(text: str) -> bool:
    """Tell whether UTF-8 has these characters: a lone surrogate it has not."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
