"""Addresses for answers: `reply-to` is a header, which a stranger may have written.

    the message was sent by this service itself      anywhere: its own code says so
    the address is declared by route or subscribe    there
    it is allowed by `answer_to`                     there: exactly, or below what ends with /*
    any other                                        refused

With http_auth=bearer the secret goes along with each request. So an http:// or https:// address must be declared, or
written out in answer_to, then: nothing that ends with /* allows one.

An address with a space, a tab or a control character is refused: a library for URLs drops some of them, so that what
is judged here would be another address than what is called.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from durable.schemes import normal_scheme
from durable.settings import Settings

_ANY: Final = "*"
_BELOW: Final = "/*"
_SHOWS_SECRETS: Final = ("http://", "https://")
_UNREADABLE: Final = re.compile(r"[\s\x00-\x20\x7f-\xa0]")


class Answers:
    """The rule of one service."""

    def __init__(self, settings: Settings) -> None:
        self._exact = frozenset(map(normal_scheme, settings.answer_to))
        self._prefixes = tuple(each.removesuffix(_ANY) for each in self._exact if each.endswith(_BELOW))
        self._any = _ANY in self._exact
        self._keeps_secret = settings.http_auth == "bearer" and _has_secret(settings)

    @property
    def written_out(self) -> frozenset[str]:
        """The whole addresses among those that are allowed."""
        return frozenset(each for each in self._exact if not each.endswith(_ANY))

    def may_go(self, address: str, declared: Collection[str]) -> bool:
        """True for an address that is declared, or allowed."""
        address = normal_scheme(address)
        if address in declared or address in self._exact:
            return True
        if _UNREADABLE.search(address):
            return False
        if self._keeps_secret and address.startswith(_SHOWS_SECRETS):
            return False
        return self._any or address.startswith(self._prefixes)


def _has_secret(settings: Settings) -> bool:
    return settings.shared_secret is not None or any(peer.at for peer in settings.peers.values())
