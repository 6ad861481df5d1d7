"""Proofs of the secret: the two ends agree only when both know it, and nothing that was said can be used again."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from durable.errors import ConnectionFailed, ProtocolViolation
from durable.transports.frames import MAX_ENVELOPES, Batch, Challenge, Frame, Hello, Ping, Proof, Refused, Welcome
from durable.transports.tcp.client_side import ClientSide, ClientState
from durable.transports.tcp.conversation import Reply
from durable.transports.tcp.proofs import NONCE_BYTES, ClientProof, Known, ServerProof, binding_of, shared_key
from durable.transports.tcp.server_side import ServerSide, ServerState, TurnAway

LIMIT = 1 << 20
SECRET = b"correct horse battery"
OTHER = b"incorrect horse battery"
WELCOME = Frame(Welcome(1, "billing", 2, LIMIT, MAX_ENVELOPES, 5))


def client_proof(secret: bytes = SECRET, binding: bytes = b"") -> ClientProof:
    return ClientProof(secret, shared_key(secret), os.urandom(NONCE_BYTES), binding)


def server_proof(secret: bytes = SECRET, binding: bytes = b"") -> ServerProof:
    def find(hello: Hello) -> Known | None:
        return Known(secret, None) if hello.key == shared_key(secret) else None

    return ServerProof(find, os.urandom(NONCE_BYTES), binding)


def client(proof: ClientProof | None = None) -> ClientSide:
    return ClientSide("orders", 1, LIMIT, proof or client_proof())


def server(proof: ServerProof | None = None) -> ServerSide:
    return ServerSide("billing", 2, LIMIT, proof or server_proof())


def reply(answer: object) -> Frame:
    assert isinstance(answer, Reply)
    return answer.frame


def test_two_ends_with_the_secret_talk() -> None:
    a, b = client(), server()
    challenge = reply(b.hear(a.greet(), 5))
    assert b.state is ServerState.AWAITING_PROOF
    welcome = reply(b.hear(reply(a.hear(challenge)), 5))
    a.hear(welcome)
    assert (a.state, b.state) == (ClientState.OPEN, ServerState.OPEN)


def test_the_secret_is_never_said() -> None:
    a, b = client(), server()
    hello = a.greet()
    challenge = reply(b.hear(hello, 5))
    said = repr([hello, challenge, reply(a.hear(challenge)), a._proof, b._proof])
    assert SECRET.decode() not in said


@pytest.mark.parametrize("hello", [Hello([1], "x", 1, LIMIT), client(client_proof(OTHER)).greet().content])
def test_client_without_the_secret_is_turned_away(hello: Hello) -> None:
    side = server()
    answer = side.hear(Frame(hello), 5)
    assert isinstance(answer, TurnAway)
    assert isinstance(answer.frame.content, Refused)
    with pytest.raises(ProtocolViolation):
        side.hear(Frame(Ping(), 1), 5)


def test_client_naming_the_key_without_a_proof_is_turned_away() -> None:
    a, b = client(), server()
    b.hear(a.greet(), 5)
    for content in (Batch(0, []), Ping(), a.greet().content):
        with pytest.raises(ProtocolViolation):
            b.hear(Frame(content, 1), 5)
    assert isinstance(b.hear(Frame(Proof(bytes(32))), 5), TurnAway)
    assert b.is_greeting


def test_server_without_a_proof_is_not_believed() -> None:
    with pytest.raises(ConnectionFailed, match="did not prove"):
        client().hear(WELCOME)
    with pytest.raises(ConnectionFailed, match="does not know the secret"):
        client().hear(Frame(Challenge("billing", 2, os.urandom(NONCE_BYTES), bytes(32))))


def test_recorded_proof_does_not_fit_another_connection() -> None:
    a, b = client(), server()
    hello = a.greet()
    challenge = reply(b.hear(hello, 5))
    proof = reply(a.hear(challenge))
    again = server()
    again.hear(hello, 5)
    assert isinstance(again.hear(proof, 5), TurnAway)  # to the server
    with pytest.raises(ConnectionFailed):
        client().hear(challenge)  # to a client


def test_reflected_proof_does_not_fit() -> None:
    a, b = client(), server()
    challenge = reply(b.hear(a.greet(), 5)).content
    assert isinstance(challenge, Challenge)
    assert isinstance(b.hear(Frame(Proof(challenge.proof)), 5), TurnAway)


def test_a_proof_for_one_certificate_does_not_fit_another() -> None:
    a, b = client(client_proof(binding=b"of the impostor")), server(server_proof(binding=b"of the peer"))
    challenge = reply(b.hear(a.greet(), 5))
    with pytest.raises(ConnectionFailed, match="does not know the secret"):
        a.hear(challenge)


CLIENT, SERVER = ("127.0.0.1", 40001), ("127.0.0.1", 2301)


@pytest.mark.parametrize(
    ("from_", "to"),
    [
        (CLIENT, ("127.0.0.1", 2302)),
        (CLIENT, ("127.0.0.2", 2301)),
        (CLIENT, ("::1", 2301, 0, 0)),
        (("127.0.0.1", 40002), SERVER),
        (("127.0.0.2", 40001), SERVER),
        (SERVER, CLIENT),
    ],
)
def test_proof_for_one_connection_does_not_fit_another(from_: Any, to: Any) -> None:
    a = client(client_proof(binding=binding_of(CLIENT, SERVER)))
    b = server(server_proof(binding=binding_of(from_, to)))
    with pytest.raises(ConnectionFailed, match="or something between the two"):
        a.hear(reply(b.hear(a.greet(), 5)))


@pytest.mark.parametrize("mapped", ["::ffff:127.0.0.1", "::ffff:7f00:1", "::ffff:127.0.0.1%lo"])
def test_binding_is_the_same_for_an_address_of_ipv4_within_ipv6(mapped: str) -> None:
    as_ipv6 = [(mapped, port, 0, 0) for _, port in (CLIENT, SERVER)]
    assert binding_of(CLIENT, SERVER) == binding_of(*as_ipv6) == binding_of(CLIENT, as_ipv6[1])


@pytest.mark.parametrize("name", ["service", "node", "max_frame_bytes", "versions"])
def test_proof_holds_for_its_own_words_alone(name: str) -> None:
    a, b = client(), server()
    said = a.greet().content
    assert isinstance(said, Hello)
    changed = {"service": "mallory", "node": 7, "max_frame_bytes": 5, "versions": [1, 2]}[name]
    fields = {field: getattr(said, field) for field in said.__struct_fields__} | {name: changed}
    with pytest.raises(ConnectionFailed):
        a.hear(reply(b.hear(Frame(Hello(**fields)), 5)))


@pytest.mark.parametrize("is_welcome", [False, True], ids=["without a secret", "after the welcome"])
def test_challenge_at_another_time_is_a_violation(is_welcome: bool) -> None:
    a = client() if is_welcome else ClientSide("orders", 1, LIMIT)
    challenge = reply(server().hear(client().greet(), 5))
    if is_welcome:
        first = server()
        a.hear(reply(first.hear(reply(a.hear(reply(first.hear(a.greet(), 5)))), 5)))
        assert a.state is ClientState.OPEN
    with pytest.raises(ProtocolViolation, match="unexpected frame"):
        a.hear(challenge)


def test_a_short_nonce_is_no_challenge() -> None:
    proof = replace(client_proof(), nonce=b"short")
    assert isinstance(server().hear(client(proof).greet(), 5), TurnAway)


@pytest.mark.parametrize(("peer", "is_believed"), [("", True), ("billing", True), ("invoices", False)])
def test_server_of_another_name_is_not_believed(peer: str, is_believed: bool) -> None:
    a, b = client(replace(client_proof(), peer=peer)), server()
    challenge = reply(b.hear(a.greet(), 5))
    if is_believed:
        assert isinstance(a.hear(challenge), Reply)
        return
    with pytest.raises(ConnectionFailed, match="peer billing answers in the place of invoices"):
        a.hear(challenge)


def test_name_of_a_client_is_the_one_of_its_secret() -> None:
    own = ServerProof(lambda hello: Known(SECRET, "shop") if hello.key == "2026" else None, os.urandom(NONCE_BYTES))
    a, b = client(replace(client_proof(), key="2026")), server(own)
    b.hear(reply(a.hear(reply(b.hear(a.greet(), 5)))), 5)
    assert b.proven == "shop"
