"""Targets: the bytes of TCP and of batches over HTTP, and the talk of the two ends over them, without a socket."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from hypothesis import strategies as st
from msgspec.structs import replace

from durable.errors import ConnectionFailed, InvalidMessage, ProtocolViolation
from durable.outcomes import BUSY, STORED, Outcome, Rejected, tidy
from durable.settings import load_settings
from durable.transports.announcements import Announcer, accepted, learned
from durable.transports.directories import parts_of
from durable.transports.frames import (
    KINDS,
    TYPES,
    Announce,
    Batch,
    Call,
    Cancel,
    Connect,
    Content,
    Credit,
    Directory,
    Fault,
    FaultKind,
    Frame,
    FrameKind,
    Goodbye,
    Hello,
    Listing,
    Lookup,
    Offer,
    Offers,
    Outcomes,
    PartlyReadable,
    Ping,
    Pong,
    Received,
    Refused,
    Reset,
    Result,
    Signature,
    Welcome,
)
from durable.transports.http.wire import decode_batch, decode_outcomes, encode_batch, encode_outcomes
from durable.transports.tcp.calling import CallingSide, Ended
from durable.transports.tcp.client_side import Answered, ClientSide, ClientState, Sendable, Unsendable
from durable.transports.tcp.connecting import ConnectingSide, Learned
from durable.transports.tcp.conversation import Reply
from durable.transports.tcp.server_side import (
    Abandon,
    Begin,
    Deliver,
    Leave,
    Probe,
    Register,
    ServerSide,
    Tell,
    TurnAway,
)
from durable.transports.wire import MAGIC, Decoder, DecoderState, encode
from tests.fuzz import values
from tests.fuzz.damage import damaged, pieces
from tests.fuzz.targets import of_rules
from tests.support.frames import raw_frame
from tests.support.receivers import envelopes

LIMIT = 1 << 16
ROOM = 100
_ENVELOPES = envelopes(3)

_kinds = st.sampled_from(list(TYPES))
_channels = st.integers(0, 9) | st.sampled_from([0, 1, 2**32 - 1])


@st.composite
def frames(draw: st.DrawFn, kinds: st.SearchStrategy[FrameKind] = _kinds) -> bytes:
    """A frame with a fitting length and CRC whose payload is right, almost right, or damaged."""
    kind = draw(kinds)
    payload = draw(damaged(values.of(TYPES[kind]).map(values.encode) | values.almost(TYPES[kind]), most=2))
    return raw_frame(kind, payload, draw(_channels))


def streams(of: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Frames behind the magic, with some damage."""
    return damaged(st.lists(of, max_size=6).map(lambda some: MAGIC + b"".join(some)), most=2)


# The bytes --------------------------------------------------------------------------------------------------------


def _heard(arriving: Sequence[bytes]) -> tuple[list[Received], str]:
    """What a decoder makes of these pieces, and the violation that it found."""
    decoder = Decoder(LIMIT)
    received: list[Received] = []
    try:
        for piece in arriving:
            received += decoder.feed(piece)
        received += decoder.feed(b"")
    except ProtocolViolation as violation:
        assert decoder.state is DecoderState.BROKEN
        assert not decoder.pending
        return received, str(violation)
    assert decoder.announced_bytes <= LIMIT + 4
    return received, ""


def check_stream(arriving: list[bytes]) -> str:
    received, violation = _heard(arriving)
    assert (received, violation) == _heard([b"".join(arriving)]), "the cuts made a difference"
    for item in received:
        if isinstance(item, Frame):
            _check_frame(item)
    words = {type(item.content).__name__ if isinstance(item, Frame) else "Damaged" for item in received}
    return " ".join(sorted(words)) + (" violation" if violation else "")


def _check_frame(frame: Frame) -> None:
    content = frame.content
    if isinstance(content, PartlyReadable):
        assert sorted(content.rejected) == list(content.rejected)
        assert all(isinstance(verdict, Rejected) for verdict in content.rejected.values())
        assert max(content.rejected) < len(content.envelopes) + len(content.rejected)
        frame = Frame(Batch(len(content.envelopes), content.envelopes, content.clock), frame.channel)
    again, violation = _heard([MAGIC + encode(frame)])
    assert (again, violation) == ([frame], "")


def check_batch(body: bytes) -> str:
    try:
        batch = decode_batch(body)
    except ProtocolViolation:
        return "no batch"
    assert batch.count == len(batch.envelopes) + len(batch.rejected) > 0
    if batch.envelopes:
        assert decode_batch(encode_batch(batch.envelopes)).envelopes == batch.envelopes
    return "partly readable" if batch.rejected else "batch"


def check_outcomes(answer: tuple[bytes, int]) -> str:
    body, count = answer
    try:
        outcomes = decode_outcomes(body, count)
    except ProtocolViolation:
        return "no outcomes"
    assert len(outcomes) == count
    assert tidy(outcomes) == outcomes
    assert decode_outcomes(encode_outcomes(outcomes), count) == outcomes
    return " ".join(sorted({type(outcome).__name__ for outcome in outcomes}))


# The talk ---------------------------------------------------------------------------------------------------------


def _frames(stream: bytes) -> list[Received]:
    return _heard([stream])[0]


def check_server(stream: bytes) -> str:
    """What a client says to a listener: every action is one that it knows, and credit and batches are counted."""
    side = ServerSide("billing", 2, LIMIT)
    under_way: dict[int, int] = {}
    calls: set[int] = set()
    done: list[str] = []
    for item in _frames(stream):
        try:
            action = side.hear(item, ROOM)
        except ProtocolViolation:
            return " ".join([*done, "violation"])
        match action:
            case Deliver() as batch:
                assert batch.channel not in under_way
                under_way[batch.channel] = len(batch.envelopes) + len(batch.rejected)
            case Reply(frame) | TurnAway(frame, _):
                assert len(encode(frame)) <= LIMIT
            case Probe(channel):
                side.pong(channel, ready=True)
            case Begin(channel, _):
                assert channel not in calls
                calls.add(channel)
            case Abandon(channel):
                assert side.end(channel, Result(b"")) is None
                calls.discard(channel)
            case Tell() | Register():
                pass
            case Leave():
                break
        assert side.calls_under_way == len(calls)
        if len(calls) > 1:
            data = side.end(calls.pop(), Result(b"x" * LIMIT))
            assert data is not None
            assert len(data) <= LIMIT
        assert side.under_way == sum(under_way.values())
        assert 0 <= side.unspent <= ROOM
        if len(under_way) > 2:
            channel, count = under_way.popitem()
            outcomes: list[Outcome] = [Rejected("no")] * count
            side.answer(channel, outcomes, ROOM)
        done = sorted({*done, type(action).__name__})
    return " ".join(done)


def check_client(stream: bytes) -> str:
    """What a server answers to a sender: each batch has one outcome for each envelope, or the connection ends."""
    side = ClientSide("orders", 1, LIMIT)
    sent: dict[int, int] = {}
    said: list[str] = []
    for item in _frames(stream):
        try:
            heard = side.hear(item)
        except (ProtocolViolation, ConnectionFailed) as error:
            return " ".join([*said, type(error).__name__])
        assert side.credit >= 0
        match heard:
            case Answered(channel, outcomes):
                assert len(outcomes) == sent.pop(channel)
                assert tidy(outcomes) == outcomes
            case _:
                pass
        match side.offer(_ENVELOPES):
            case Sendable(channel, data):
                assert channel not in sent
                assert len(data) <= LIMIT + 4
                [frame] = _frames(MAGIC + data)
                assert isinstance(frame, Frame)
                assert isinstance(frame.content, Batch)
                sent[channel] = len(frame.content.envelopes)
            case Unsendable() | None:
                pass
        assert side.outstanding == sum(sent.values())
        said = sorted({*said, type(heard).__name__})
    return " ".join(said)


def check_caller(stream: bytes) -> str:
    """What a provider answers to a caller: each call has one answer, or the connection ends."""
    side = CallingSide("orders", 1, LIMIT)
    sent: set[int] = set()
    said: list[str] = []
    for item in _frames(stream):
        try:
            heard = side.listen(item)
        except (ProtocolViolation, ConnectionFailed) as error:
            return " ".join([*said, type(error).__name__])
        if isinstance(heard, Ended):
            sent.remove(heard.channel)
        if side.state is ClientState.OPEN:
            sendable = side.call(Call("stock", "count", b""))
            if isinstance(sendable, Sendable):  # else the provider takes only frames that are shorter
                sent.add(sendable.channel)
        if len(sent) > 5:
            channel = min(sent)
            assert side.cancel(channel) == Frame(Cancel(), channel)
            sent.remove(channel)
        assert side.outstanding == len(sent)
        said = sorted({*said, type(heard).__name__})
    return " ".join(said)


def check_spoke(stream: bytes) -> str:
    """What a hub tells a connected process: whole directories within their bounds, or the connection ends."""
    side = ConnectingSide("orders", 1, LIMIT, most_bytes=LIMIT)
    said: list[str] = []
    for item in _frames(stream):
        try:
            heard = side.listen(item)
        except (ProtocolViolation, ConnectionFailed) as error:
            return " ".join([*said, type(error).__name__])
        if isinstance(heard, Learned):
            parts = parts_of(heard.listings, LIMIT)
            assert sum(len(part.listings) for part in parts) + parts[-1].left_out == len(heard.listings)
            for known in heard.listings:
                assert set(learned(known, "10.0.0.7").addresses) & set(known.addresses) <= set(known.addresses)
        if side.bounds is not None:
            assert 0 < side.bounds.shortest <= side.bounds.longest
        said = sorted({*said, type(heard).__name__})
    return " ".join(said)


def check_announcement(said: tuple[str, int, str | None, str, list[Listing]]) -> str:
    """An announcement is refused, or every address in it leads where its peer is, under the name of the peer."""
    application, node, proven, host, listings = said
    announcer = Announcer(application, node, proven, host)
    try:
        known = accepted(_SETTINGS, "hub", announcer, listings)
    except InvalidMessage:
        return "refused"
    assert len(known) == len(listings)
    for each in known:
        assert each.application == announcer.name != "hub"
        assert each.addresses
        for address in each.addresses:
            here = ("127.", "localhost", "unix:///", "[::1]", "[0:", "0.0.0.0", "[::]")
            assert any(place in address.lower() for place in ((host,) if host else here)), address
    return "known"


def _talk(greeting: Content, others: Sequence[FrameKind], good: Sequence[Content]) -> st.SearchStrategy[bytes]:
    """A greeting, which is mostly good, and what follows."""
    whole = st.builds(lambda content, channel: encode(Frame(content, channel)), st.sampled_from(good), _channels)
    first = st.just(encode(Frame(greeting))) | frames(st.just(KINDS[type(greeting)]))
    rest = st.lists(whole | frames(st.sampled_from(others)), max_size=8).map(b"".join)
    return st.builds(lambda greeting, more: MAGIC + greeting + more, first, rest)


_HELLO = Hello([1], "orders", 1, LIMIT)
_WELCOME = Welcome(1, "billing", 2, LIMIT, 1_000, ROOM)
_HUB = Welcome(1, "hub", 2, LIMIT, 1_000, ROOM, 15.0, 120.0, "a hub", "1.0")
_GOOD_OF_CLIENTS: list[Content] = [
    Batch(3, _ENVELOPES),
    Batch(1, _ENVELOPES[:1]),
    Batch(0, []),
    Batch(2, _ENVELOPES),
    Ping(),
    Lookup(),
    Call("stock", "count", b""),
    Call("stock", "count", b"x" * 100, 0.5, awaited=False),
    Cancel(),
    Connect("a shop", "1.0"),
    Announce([]),
    Reset(30.0),
    Goodbye(),
]
_GOOD_OF_SERVERS: list[Content] = [
    Outcomes([STORED] * 3, 3),
    Outcomes([BUSY], 1),
    Credit(ROOM),
    Pong(True),
    Refused("no"),
    Goodbye(),
]
_SETTINGS = load_settings()
_LISTING = Listing(
    Offer("stock", "1.0", [Signature("count", b"x", "count() -> int")]),
    "orders",
    1,
    ["tcp://127.0.0.1:1"],
    datetime(2026, 1, 1, tzinfo=UTC),
)
_GOOD_OF_HUBS: list[Content] = [
    Directory([_LISTING]),
    Directory([_LISTING] * 300, more=True),
    Directory([], left_out=1),
    Offers([]),
    Refused("no"),
    Pong(True),
    Goodbye(),
]
_addresses = st.sampled_from(["tcp://127.0.0.1:1", "tcp://10.0.0.7:1", "unix:///x", "tcp://0.0.0.0:1"]) | st.from_regex(
    r"(tcp|unix|http)://[ -~]{0,30}", fullmatch=True
)
_listings = st.lists(
    values.of(Listing)
    | st.builds(
        lambda at, service: replace(_LISTING, addresses=at, offer=Offer(service, "1", [])),
        st.lists(_addresses, max_size=3),
        st.text(max_size=3),
    ),
    max_size=4,
)
_announcements = st.tuples(
    st.sampled_from(["orders", "hub"]),
    st.sampled_from([1, 2]),
    st.sampled_from([None, "orders", "hub"]),
    st.sampled_from(["", "10.0.0.7"]),
    _listings,
)
_GOOD_OF_PROVIDERS: list[Content] = [
    Result(b"\x01"),
    Fault(FaultKind.OVERLOADED, "too many"),
    Offers([Offer("stock", "1.0", [Signature("count", b"x", "count() -> int")])]),
    Refused("no"),
    Pong(True),
    Goodbye(),
]
_OF_CLIENTS = [FrameKind.BATCH, FrameKind.PING, FrameKind.GOODBYE, FrameKind.PROOF, FrameKind.LOOKUP]
_OF_CLIENTS += [FrameKind.CALL, FrameKind.CANCEL, FrameKind.CONNECT, FrameKind.ANNOUNCE, FrameKind.RESET]
_OF_HUBS = [FrameKind.DIRECTORY, FrameKind.OFFERS, FrameKind.REFUSED, FrameKind.PONG]
_OF_PROVIDERS = [FrameKind.RESULT, FrameKind.FAULT, FrameKind.OFFERS, FrameKind.OUTCOMES, FrameKind.REFUSED]
_OF_SERVERS = [FrameKind.OUTCOMES, FrameKind.CREDIT, FrameKind.PONG, FrameKind.REFUSED, FrameKind.GOODBYE]
batches = st.builds(
    lambda version, some, more: values.encode([version, len(some) + more, some]),
    st.sampled_from([1, 1, 1, 0, 2, -1, "1"]),
    st.lists(
        values.of(Batch).map(lambda batch: batch.envelopes).filter(bool).map(lambda some: some[0]) | values.anything,
        max_size=4,
    ),
    st.sampled_from([0, 0, 0, 1, -1]),
)
_answers = st.lists(values.of(Outcome) | values.anything, max_size=4).map(values.encode)

_torn = st.integers(1 << 10, 1 << 18).map(lambda size: raw_frame(FrameKind.BATCH, b"x" * (size // 2), length=size))
torn = MAGIC + encode(Frame(_HELLO)) + raw_frame(FrameKind.BATCH, b"x" * 100_000, length=200_000)
of_clients = st.builds(bytes.__add__, _talk(_HELLO, _OF_CLIENTS, _GOOD_OF_CLIENTS), st.just(b"") | _torn)

TARGETS = [
    of_rules("wire", pieces(streams(frames())), check_stream),
    of_rules("tcp-server", of_clients, check_server),
    of_rules("tcp-client", _talk(_WELCOME, _OF_SERVERS, _GOOD_OF_SERVERS), check_client),
    of_rules("tcp-caller", _talk(_WELCOME, _OF_PROVIDERS, _GOOD_OF_PROVIDERS), check_caller),
    of_rules("tcp-spoke", _talk(_HUB, _OF_HUBS, _GOOD_OF_HUBS), check_spoke),
    of_rules("announcements", _announcements, check_announcement),
    of_rules("http-batches", damaged(batches), check_batch),
    of_rules("http-outcomes", st.tuples(damaged(_answers, most=2), st.integers(0, 4)), check_outcomes),
]
