"""Values as the pages show them."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from markupsafe import Markup
from starlette.exceptions import HTTPException

from durable.console.plots import plot
from durable.dead_letters.bodies import row
from durable.duration import duration
from durable.envelope import JSON
from durable.grammar import lasting
from durable.storage.dead_letters import DeadLetter
from durable.storage.flow import SLICES, Flow


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
    per_minute, ago = SLICES / found.minutes, f"{age(found.length)} ago"
    slices = found.slices
    return Markup("").join(
        [
            plot(
                "Messages a minute",
                {
                    "handled": [each.handled * per_minute for each in slices],
                    "sent": [each.sent * per_minute for each in slices],
                },
                ago,
            ),
            plot(
                "Seconds from send to handled",
                {"p50": [each.p50 for each in slices], "p99": [each.p99 for each in slices]},
                ago,
            ),
            plot("Dead letters a minute", {"failed": [each.failed * per_minute for each in slices]}, ago),
        ]
    )


def as_json(value: object) -> str:
    """A value of JSON, on one line."""
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def moment_of(name: str, text: str, now: datetime) -> datetime:
    """Read a time: ISO 8601, in UTC where no zone is given, or a length of time that has passed since.

    Raises HTTPException (422).
    """
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
