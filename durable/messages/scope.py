"""The key under which the messages of a peer are recognised, that has proven its name: `billing<-orders`.

A peer can take no id away from another one: under the same id, the message of each is its own. The key begins with the
endpoint of the listener; without a proven name it is that alone.
"""

from __future__ import annotations

from typing import Final

_FROM: Final = "<-"


def scoped(endpoint: str, peer: str | None) -> str:
    """Return the endpoint of one peer."""
    return endpoint if peer is None else f"{endpoint}{_FROM}{peer}"


def listener_of(endpoint: str) -> str:
    """Return the endpoint of the listener, for all peers."""
    return endpoint.partition(_FROM)[0]


def peer_of(endpoint: str) -> str | None:
    """Return the peer of an endpoint; None for that of a listener."""
    return endpoint.partition(_FROM)[2] or None
