"""Names and options of a `rabbitmq://` URI."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, cast
from urllib.parse import unquote

from durable.errors import InvalidSetting
from durable.grammar import suggestion

QueueType = Literal["quorum", "classic"]

LONGEST_NAME: Final = 255
"""Bytes in the name of a queue and in a routing key: AMQP 0.9.1 counts them in one byte."""
LONGEST_EXCHANGE: Final = 127

_PLAIN: Final = re.compile(r"[a-zA-Z0-9\-_.:@#,/+ ]+")
_LARGEST_PREFETCH: Final = 65_535


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """Options of the queues of a listener; None leaves one to the settings, or to the broker."""

    type: QueueType | None = None
    max_length: int | None = None
    prefetch: int | None = None
    ordered: Literal["yes", "no"] | None = None
    """True if one consumer at a time gets all messages of a queue."""
    unsigned: Literal["yes"] | None = None
    """True if messages without a signature are taken although secrets are set."""


AS_SET: Final = QueueOptions()
"""Options that leave every value to the settings."""


def short(name: str, what: str, longest: int = LONGEST_NAME) -> str:
    """The name, unless it is longer than AMQP allows: InvalidSetting."""
    size = len(name.encode())
    if size > longest:
        raise InvalidSetting(f"{what} has {size} bytes, more than the {longest} of AMQP: {name}; shorten it")
    return name


def queue_name(name: str, what: str) -> str:
    """The name, unless no queue can have it: InvalidSetting."""
    return _plain(short(name, what), what)


def exchange_name(name: str, what: str) -> str:
    """The name, unless no exchange can have it: InvalidSetting."""
    return _plain(short(name, what, LONGEST_EXCHANGE), what)


def decoded(text: str, uri: str, what: str) -> str:
    """A part of a URI. Raises InvalidSetting for one that is empty or unprintable."""
    try:
        name = unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise InvalidSetting(f"{uri}: {what} is not UTF-8; percent-encode it as such, as in %C3%A9") from None
    if not name or not name.isprintable():
        raise InvalidSetting(f"{uri}: {what} has no printable name; write one, as in rabbitmq://default/queue/mail")
    return name


def _plain(name: str, what: str) -> str:
    if not _PLAIN.fullmatch(name):
        raise InvalidSetting(f"{what} is {name!r}; AMQP allows ASCII letters, digits, spaces and -_.:@#,/+ there")
    return name


class Query:
    """Options after the `?` of a URI. Every method raises InvalidSetting, with the text to write instead."""

    def __init__(self, uri: str, text: str) -> None:
        self.uri = uri
        self._given: dict[str, str] = {}
        for option in text.split("&") if text else ():
            name, _, value = option.partition("=")
            if not name or not value:
                raise self.wrong(f"{name or 'an option'} has no value; write options as in ?prefetch=100")
            if name in self._given:
                raise self.wrong(f"{name} is given twice; write it once")
            self._given[name] = value

    def wrong(self, reason: str) -> InvalidSetting:
        return InvalidSetting(f"{self.uri}: {reason}")

    def allow(self, *known: str) -> None:
        """Refuse every other option."""
        for name in self._given:
            if name not in known:
                choice = f"this address takes {', '.join(known)}" if known else "this address takes none"
                raise self.wrong(f"unknown option {name}{suggestion(name, known)}; {choice}")

    def choice(self, name: str, *choices: str) -> str | None:
        value = self._given.get(name)
        if value is not None and value not in choices:
            raise self.wrong(f"{name}={value}; write {' or '.join(f'{name}={choice}' for choice in choices)}")
        return value

    def number(self, name: str, largest: int | None = None) -> int | None:
        text = self._given.get(name)
        if text is None:
            return None
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
        if value < 1 or (largest is not None and value > largest):
            limits = f"from 1 to {largest}" if largest is not None else "from 1 on"
            raise self.wrong(f"{name}={text}; write a whole number {limits}")
        return value

    def name(self, option: str) -> str | None:
        text = self._given.get(option)
        return None if text is None else self._name(text, option)

    def names(self, option: str) -> tuple[str, ...]:
        """Parse names with commas between them, each once."""
        given = self._given[option].split(",") if option in self._given else []
        return tuple(dict.fromkeys(self._name(text, option) for text in given))

    def queue_options(self) -> QueueOptions:
        chosen = cast(QueueType | None, self.choice("type", "quorum", "classic"))
        ordered = cast(Literal["yes", "no"] | None, self.choice("ordered", "yes", "no"))
        unsigned = cast(Literal["yes"] | None, self.choice("unsigned", "yes"))
        prefetch = self.number("prefetch", _LARGEST_PREFETCH)
        return QueueOptions(chosen, self.number("max_length"), prefetch, ordered, unsigned)

    def _name(self, text: str, option: str) -> str:
        return short(decoded(text, self.uri, option), f"{self.uri}: {option}")
