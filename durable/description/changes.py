"""Changes between two descriptions of an application, and which of them others notice.

    incompatible    somebody who was deployed before, and is not deployed again, is refused, or cannot decode
    compatible      nobody notices

A message that is handled, and the arguments of an offered method, are judged with their old schema as what is written;
a message that is sent, and a result, with their new one. Services have one rule more: of one version, both ends compare
the digests of their methods, so every change of a method needs another version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from durable.description.compatibility import Misfit, misfits
from durable.description.document import DescribedMessage, DescribedMethod, DescribedService, Description
from durable.messages.schemas import Json

T = TypeVar("T")

_UPCAST: Final = "keep its class and add an upcaster to it, until nobody sends it"
_NEW_VERSION: Final = "declare a new version of the message, with an upcaster from this one"
_SENT_VERSION: Final = "send a new version of the message, and deploy its receivers first"


class Change(NamedTuple):
    """A change. `advice` says what to do about an incompatible one; it is empty for one that nobody notices."""

    subject: str
    what: str
    advice: str = ""

    @property
    def is_compatible(self) -> bool:
        return not self.advice


def changes(old: Description, new: Description) -> list[Change]:
    """Return all changes of what others see, the incompatible ones first."""
    found = [*_services(old, new), *_messages(old, new)]
    return sorted(dict.fromkeys(found), key=lambda change: change.is_compatible)


# Services --------------------------------------------------------------------------------------------------------


def _services(old: Description, new: Description) -> Iterator[Change]:
    for role in ("offers", "calls"):
        before = {each.name: each for each in old.services if each.role == role}
        after = {each.name: each for each in new.services if each.role == role}
        for name, service, now in _pairs(before, after):
            subject = f"service {name}"
            if role == "calls":
                yield from _called(subject, service, now)
            elif service is None:
                yield Change(subject, "is offered")
            elif now is None:
                yield Change(subject, "is offered no more", "offer it until no caller of it is deployed")
            else:
                yield from _offered(subject, service, now)


def _called(subject: str, old: DescribedService | None, new: DescribedService | None) -> Iterator[Change]:
    """Compare a service that is called. Only its provider can tell whether the new version is there already."""
    if old is None and new is not None:
        yield Change(subject, f"{new.version} is called")
    elif new is None:
        yield Change(subject, "is called no more")
    elif old is not None and old.version != new.version:
        yield Change(
            subject, f"{new.version} is called, and no longer {old.version}: its provider has to offer that first"
        )


def _offered(subject: str, old: DescribedService, new: DescribedService) -> Iterator[Change]:
    before, after = _numbers(old.version), _numbers(new.version)
    if before[0] != after[0]:
        yield Change(
            subject,
            f"is offered as {new.version}, and callers of {old.version} are refused",
            f"keep offering {old.version}, and offer {new.version} under another name until they are deployed",
        )
        return
    if after < before:
        yield Change(subject, f"goes back from {old.version} to {new.version}", f"give a version above {old.version}")
    is_same = before == after
    if not is_same:
        yield Change(subject, f"is offered as {new.version}, and no longer as {old.version}")
    methods = {each.name: each for each in old.methods}
    for name, method, now in _pairs(methods, {each.name: each for each in new.methods}):
        whole = f"{subject}: {name}"
        if now is None:
            yield Change(whole, "is removed", f"keep it, or offer version {before[0] + 1}.0 under another name")
        elif method is None:
            advice = f"raise the version to {_next(old)}: a provider that says {old.version} may lack it"
            yield Change(whole, "is added", advice if is_same else "")
        else:
            yield from _method(whole, method, now, old, is_same)


def _method(
    subject: str, old: DescribedMethod, new: DescribedMethod, service: DescribedService, is_same: bool
) -> Iterator[Change]:
    found = [
        *(Change(subject, f"argument {_said(each)}", "") for each in misfits(old.arguments, new.arguments)),
        *(Change(subject, f"result {_said(each)}", "") for each in misfits(new.result, old.result)),
    ]
    major = f"{_numbers(service.version)[0] + 1}.0"
    for change in found:
        yield change._replace(advice=f"add a method instead, or offer version {major} under another name")
    if found or old.digest == new.digest:
        return
    if is_same:
        yield Change(
            subject,
            f"has another schema in the same version {service.version}: {new.signature}",
            f"raise the version to {_next(service)}",
        )
    else:
        yield Change(subject, f"is now {new.signature}")


def _next(service: DescribedService) -> str:
    first, second = _numbers(service.version)
    return f"{first}.{second + 1}"


def _numbers(version: str) -> tuple[int, int]:
    first, _, second = version.partition(".")
    return int(first), int(second)


# Messages --------------------------------------------------------------------------------------------------------


def _messages(old: Description, new: Description) -> Iterator[Change]:
    before, after = {each.type: each for each in old.messages}, {each.type: each for each in new.messages}
    yield from _handled(before, after)
    yield from _sent(before, after)
    for name in sorted(before.keys() & after.keys()):
        yield from _details(before[name], after[name])


def _handled(before: dict[str, DescribedMessage], after: dict[str, DescribedMessage]) -> Iterator[Change]:
    was, now = _by(before, lambda each: each.received), _by(after, lambda each: each.received)
    for name, old, new in _pairs(was, now):
        subject = f"message {name}"
        if old is None:
            yield Change(subject, "is handled")
        elif new is None:
            later = _later(before[name], now, after)
            what = f"is handled no more, and {later} is, without an upcaster from it" if later else "is handled no more"
            yield Change(subject, what, _UPCAST if later else "handle it until nobody sends it, or it is a dead letter")
        else:
            yield from _judged(subject, "handled", old, new, misfits(old, new), _NEW_VERSION)


def _sent(before: dict[str, DescribedMessage], after: dict[str, DescribedMessage]) -> Iterator[Change]:
    was, now = _by(before, lambda each: each.sent), _by(after, lambda each: each.sent)
    for name, old, new in _pairs(was, now):
        subject = f"message {name}"
        if old is None:
            yield Change(subject, "is sent")
        elif new is None:
            later = _later(before[name], now, after)
            what = f"is sent no more, but as {later}" if later else "is sent no more"
            advice = f"deploy receivers that handle {later} first" if later else "deploy those that wait for it first"
            yield Change(subject, what, advice)
        else:
            yield from _judged(subject, "sent", old, new, misfits(new, old), _SENT_VERSION)


def _judged(subject: str, how: str, old: Json, new: Json, found: Sequence[Misfit], advice: str) -> Iterator[Change]:
    for each in found:
        yield Change(subject, f"as it is {how}: {_said(each)}", advice)
    if not found and old != new:
        yield Change(subject, f"as it is {how}: has another schema, and fits")


def _details(old: DescribedMessage, new: DescribedMessage) -> Iterator[Change]:
    """Compare a message apart from its fields. Another codec is compatible: both ends know every codec."""
    subject = f"message {new.type}"
    if old.content_type != new.content_type:
        yield Change(subject, f"is encoded as {new.content_type}, and no longer as {old.content_type}")
    if new.encrypted and not old.encrypted:
        yield Change(subject, "is encrypted: its receivers need the key")
    for uri in sorted(set(new.destinations) ^ set(old.destinations)):
        yield Change(subject, f"is sent to {uri}" if uri in new.destinations else f"is sent to {uri} no more")


def _later(old: DescribedMessage, now: dict[str, Json], after: dict[str, DescribedMessage]) -> str | None:
    """A later version of the same message."""
    versions = {after[name].version: name for name in now if after[name].name == old.name}
    return versions[max(versions)] if versions and max(versions) > old.version else None


def _by(messages: dict[str, DescribedMessage], schema: Callable[[DescribedMessage], Json | None]) -> dict[str, Json]:
    return {name: found for name, each in messages.items() if (found := schema(each)) is not None}


def _pairs(old: dict[str, T], new: dict[str, T]) -> Iterator[tuple[str, T | None, T | None]]:
    for name in sorted(old.keys() | new.keys()):
        yield name, old.get(name), new.get(name)


def _said(misfit: Misfit) -> str:
    return f"{misfit.path or 'the whole'}: {misfit.text}"
