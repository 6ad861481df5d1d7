"""CloudEvents in structured mode: the body is one JSON object, the message in it, and what its envelope says of it.

For consumers that know nothing of durable, behind a broker for example. durable.messages.cloudevents has the format.
"""

from __future__ import annotations

from typing import Any

from durable.envelope import JSON, Envelope
from durable.errors import InvalidMessage
from durable.messages import cloudevents
from durable.messages.codecs.json import JsonCodec

_json = JsonCodec()


class CloudEventsCodec:
    content_type = cloudevents.STRUCTURED

    def encode(self, message: object, envelope: Envelope) -> bytes:
        return cloudevents.to_structured(envelope, _json.encode(message, envelope))

    def decode(self, body: bytes, cls: type[Any]) -> Any:
        return _json.decode(self.data_of(body), cls)

    def data_of(self, body: bytes) -> bytes:
        """Return the JSON of the message in an event. Raises InvalidMessage."""
        event = cloudevents.from_structured(body)
        if event.content_type != JSON:
            raise InvalidMessage(f"the data of the event is {event.content_type!r}; only {JSON} is understood")
        return event.body

    def check(self, cls: type[Any]) -> object:
        return _json.check(cls)
