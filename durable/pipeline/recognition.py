"""Recognition of messages that are replayed under the same ids: a receiver knows them by id and endpoint.

of another service                        refused: that service knows what it received, and is known by its name
incoming                                  back to the endpoint where it came in
incoming, to `local`                      the same
incoming, to an address                   refused: it would come in elsewhere
outgoing                                  to its address once more
outgoing, to another address              there, where a receiver has moved
outgoing, to `local` or the own address   refused: it would come in here, and nothing tells whether it was here
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from durable.errors import InvalidSetting
from durable.messages.routing import LOCAL
from durable.pipeline.choosing import Group
from durable.transports.addresses import canonical_name
from durable.transports.announcements import place_of

_EVERYWHERE: Final = ("0.0.0.0", "::")
_NEW_IDS: Final = "or replay them under new ids, without --same-ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The service of a database: its names, and the addresses of its listeners as far as they are known."""

    services: Collection[str]
    addresses: Collection[str] = ()
    host: str | None = None
    """Another name of this machine."""

    def listens_at(self, address: str) -> bool:
        """Tell whether a listener of this service is known at an address."""
        return self._place(address) in {self._place(each) for each in self.addresses}

    def _place(self, address: str) -> str:
        hosts = {name.lower() for name in (platform.node(), self.host, *_EVERYWHERE) if name}
        with suppress(InvalidSetting):
            return place_of(address, hosts)
        return canonical_name(address)


def refuse_unrecognised(groups: Sequence[Group], destination: str | None, here: Here) -> None:
    """Raise InvalidSetting when messages of these kinds would come in, under the same ids, at a receiver or an endpoint
    that does not know whether it has handled them.
    """
    of = [each for each in groups if each.messages > each.without_body]
    _refuse_others(of, here)
    moved = [each for each in of if destination is not None and not _is_same(each, destination)]
    if incoming := _count([each for each in moved if each.side == "incoming"]):
        raise InvalidSetting(
            f"same_ids: {incoming:,} of these messages came in, and whoever is at {destination} could not tell whether "
            f"they were handled; leave --destination out, {_NEW_IDS}"
        )
    if moved and destination is not None and (destination == LOCAL or here.listens_at(destination)):
        raise InvalidSetting(
            f"same_ids: {_count(moved):,} of these messages were sent elsewhere, and {destination} is this service, "
            f"which could not tell whether it has handled them; leave --destination out, {_NEW_IDS}"
        )


def _refuse_others(groups: Sequence[Group], here: Here) -> None:
    others = [each for each in groups if each.service is not None and each.service not in here.services]
    if not here.services:
        others = [each for each in others if each.side == "incoming" or each.address == LOCAL]
    if not others:
        return
    names = " and ".join(sorted({str(each.service) for each in others}))
    if not here.services:
        raise InvalidSetting(
            f"same_ids: {_count(others):,} of these messages are of {names}, and the service of this database is "
            f"unknown; give APP:BUS, {_NEW_IDS}"
        )
    raise InvalidSetting(
        f"same_ids: {_count(others):,} of these messages are of {names}, and this is the database of "
        f"{' and '.join(sorted(here.services))}; replay them with the database of {names}, {_NEW_IDS}"
    )


def _is_same(group: Group, destination: str) -> bool:
    """Tell whether messages go to where they were before."""
    if group.side == "incoming":
        return destination == LOCAL
    return canonical_name(group.address) == canonical_name(destination)


def _count(groups: Sequence[Group]) -> int:
    return sum(each.messages - each.without_body for each in groups)
