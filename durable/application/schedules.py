"""A recurring schedule as an application declares it: when, what, where to.

    bus.every("0 3 * * *", Compact(), name="nightly", tz="Europe/Vienna")
    bus.every("*/15 * * * *", lambda at: Report(upto=at), name="quarters")

Each occurrence is one message, whose id follows from the service, the type, the name and the time: every node makes the
same message. Its headers name the schedule and the occurrence.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, get_args
from uuid import UUID

from durable.application.cron import Cron, Misfire
from durable.envelope import Envelope
from durable.errors import InvalidSetting, UnknownMessageType
from durable.messages import codec
from durable.messages.registry import name_of
from durable.outbox.envelope_factory import EnvelopeFactory, SendOptions, blank

SCHEDULE_HEADER: Final = "schedule"
OCCURRENCE_HEADER: Final = "occurrence"

Factory = Callable[[datetime], Any]
"""Makes the message of an occurrence, an aware datetime in UTC. It must be quick: a transaction waits for it."""

_OWN_OPTIONS: Final = {"at", "delay", "id_from"}
_LONGEST_NAME: Final = 100
_MOST_SHOWN: Final = 40
_ANY_TIME: Final = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Declared schedule. `declaration` tells it from declarations of other versions under its name."""

    name: str
    cron: Cron
    make: Factory
    misfire: Misfire
    to: str | None
    options: SendOptions
    message_type: str | None
    declaration: str

    def envelopes(
        self, envelope_factory: EnvelopeFactory, occurrence: datetime, *, asked_for: bool = False
    ) -> list[Envelope]:
        """The message of this occurrence for each destination, or of an extra run that somebody has asked for.

        Raises RoutingError and InvalidMessage, and whatever a factory raises.
        """
        moment = occurrence.isoformat()
        options: SendOptions = {**self.options}
        options["headers"] = {
            **(options.get("headers") or {}),
            SCHEDULE_HEADER: self.name,
            OCCURRENCE_HEADER: moment,
        }
        options["id_from"] = f"schedule {self.name} at {moment}" + (" on request" if asked_for else "")
        message = self.make(occurrence)
        if self.to is not None:
            return [envelope_factory.command(message, to=self.to, **options)]
        return envelope_factory.cascaded(message, **options)

    def check(self, envelope_factory: EnvelopeFactory) -> None:
        """Raise WiringError or InvalidMessage when its message could not be sent; a factory's cannot be looked at."""
        if self.message_type is not None:
            self.envelopes(envelope_factory, _ANY_TIME)


def declare(
    expression: str, message: object, *, name: str, tz: str, misfire: Misfire, to: str | None, options: SendOptions
) -> Schedule:
    """Build a schedule. Raises InvalidSetting for arguments that make no schedule."""
    check_name(name)
    cron = Cron(expression, tz)
    if misfire not in get_args(Misfire):
        raise InvalidSetting(f"every: misfire={misfire!r}; use 'once', 'all' or 'skip'")
    _check_options(options)
    make, message_type, content = _maker(message, name)
    parts = (expression, tz, misfire, to or "", repr(sorted(options.items())), content)
    declaration = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return Schedule(name, cron, make, misfire, to, options, message_type, declaration)


def check_name(name: str) -> None:
    """Raise InvalidSetting for a name that could be mistaken for something else on a command line."""
    if len(name) > _LONGEST_NAME:
        raise InvalidSetting(
            f"every: name={name[:_MOST_SHOWN]!r}...: the name has {len(name)} characters; give {_LONGEST_NAME} at most"
        )
    if not name or not name.isprintable() or ":" in name or name[0] in "-[" or _is_id(name):
        raise InvalidSetting(
            f"every: name={name!r}; give printable text that is no UUID, has no ':' and begins with neither '-' nor "
            "'[', such as 'nightly-report'"
        )


def _is_id(name: str) -> bool:
    try:
        UUID(name)
    except ValueError:
        return False
    return True


def _check_options(options: SendOptions) -> None:
    for given in options:
        if given in _OWN_OPTIONS or given not in SendOptions.__annotations__:
            raise InvalidSetting(f"every: {given}= cannot be given; the schedule says when, and makes the ids")
    if isinstance(options.get("deliver_by"), datetime):
        raise InvalidSetting("every: deliver_by= must be a timedelta, which counts from each occurrence's run")


def _maker(message: Any, name: str) -> tuple[Factory, str | None, str]:
    """Return the factory of the message, its type if known, and the text that tells it from others."""
    try:
        message_type = name_of(type(message))
    except UnknownMessageType:
        if not callable(message) or inspect.isclass(message) or inspect.iscoroutinefunction(message):
            raise InvalidSetting(
                f"every {name!r}: give a message, or a plain function that takes the time of the occurrence and "
                "returns one"
            ) from None
        place = f"{getattr(message, '__module__', '')}.{getattr(message, '__qualname__', type(message).__qualname__)}"
        return message, None, place
    body = codec.encode(message, blank(message))
    return lambda _: message, message_type, f"{message_type} {body.decode(errors='replace')}"
