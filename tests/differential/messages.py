"""The messages of a workload: a class for each lane, each with its own kind of handler."""

from __future__ import annotations

from typing import Final

import msgspec

from durable import message, upcaster
from tests.differential.workload import Item


class Work(msgspec.Struct):
    """A message that says what becomes of it."""

    number: int
    script: list[str] = []
    sends: list[Item] = []


@message("differential.plain")
class Plain(Work): ...


@message("differential.parked")
class Parked(Work): ...


@message("differential.grouped")
class Grouped(Work): ...


@message("differential.listed")
class Listed(Work): ...


@message("differential.auto")
class Auto(Work): ...


@message("differential.whole")
class Whole(Work): ...


@message("differential.fair")
class Fair(Work): ...


@message("differential.sync")
class Sync(Work): ...


@message("differential.secret", encrypted=True)
class Secret(Work): ...


@message("differential.strict")
class Strict(Work): ...


@message("differential.aged")
class Old(Work): ...


@message("differential.aged", version=2)
class Aged(Work):
    was_old: bool = False


@upcaster(Old, to=Aged)
def renew(old: Old) -> Aged:
    if "upcaster" in old.script:
        raise LookupError("no such version")
    return Aged(old.number, old.script, old.sends, was_old=True)


@message("differential.event")
class Event(Work): ...


@message("differential.question")
class Question(Work): ...


@message("differential.guided")
class Guided(Work): ...


@message("differential.guarded")
class Guarded(Work):
    """Its handler may stop itself."""


@message("differential.answer")
class Answer(msgspec.Struct):
    number: int


@message("differential.stranger")
class Stranger(Work):
    """No service has a handler for it."""


@message("differential.unrouted")
class Unrouted(msgspec.Struct):
    number: int = 0


CLASSES: Final[dict[str, type[Work]]] = {
    "plain": Plain,
    "parked": Parked,
    "grouped": Grouped,
    "listed": Listed,
    "auto": Auto,
    "whole": Whole,
    "fair": Fair,
    "sync": Sync,
    "secret": Secret,
    "strict": Strict,
    "old": Old,
    "aged": Aged,
    "event": Event,
    "question": Question,
    "guided": Guided,
    "guarded": Guarded,
    "stranger": Stranger,
}
