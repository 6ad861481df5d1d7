"""Answers that prove who gave them: the answer to a signed request is signed with the same secret.

    request --> SignedAnswers --> app: credentials are good, proved_with(scope, secret, signature)
    answer  <-- signed        <--'

A sender deletes rows on what it is answered. Without a proof, whoever listens in place of a peer that is down could
answer "stored" to everything.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from durable.transports.http import auth as http_auth

_PROOF: Final = "durable.proof"


def proved_with(scope: MutableMapping[str, Any], secret: str, signature: http_auth.Signature, service: str) -> None:
    """Mark this request: its answer is to be signed with the secret that its own signature was made with."""
    scope[_PROOF].append((secret, signature, service))


class SignedAnswers:
    """ASGI middleware around the endpoints. An answer is sent when its body is whole."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        proofs: list[tuple[str, http_auth.Signature, str]] = []
        begun: list[Message] = []

        async def sign_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                begun.append(message)
                return
            if begun:
                start = begun.pop()
                if proofs and not message.get("more_body", False):
                    _sign(start, message.get("body", b""), *proofs[0])
                await send(start)
            await send(message)

        await self._app({**scope, _PROOF: proofs}, receive, sign_and_send)


def _sign(start: Message, body: bytes, secret: str, signature: http_auth.Signature, service: str) -> None:
    value = http_auth.sign_answer(secret, signature, service, start["status"], body)
    start["headers"] = [*start["headers"], (http_auth.ANSWERED.lower().encode(), value.encode())]
