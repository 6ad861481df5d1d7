"""The message in an envelope: opened, decoded, and upcast."""

from __future__ import annotations

from typing import Any

from durable.encryption.ring import KeyRing
from durable.envelope import LeasedEnvelope
from durable.errors import InvalidMessage
from durable.messages import upcasting


def decode(ring: KeyRing, lease: LeasedEnvelope, cls: type[Any]) -> Any:
    """The message of this class in the envelope, as durable.messages.upcasting.decode().

    Raises InvalidMessage, Forged and MissingKey. The reasons of codecs and upcasters quote what they have read, and
    are stored with a dead letter: of an encrypted body only their kind is told.
    """
    envelope = ring.opened(lease.envelope, lease.endpoint)
    if envelope is lease.envelope:
        return upcasting.decode(envelope, cls)
    try:
        return upcasting.decode(envelope, cls)
    except InvalidMessage as error:
        cause = type(error.__cause__ or error).__qualname__
    raise InvalidMessage(
        f"the encrypted body is no {cls.__qualname__} ({cause}); the reason is not kept, because it may quote the body"
    )
