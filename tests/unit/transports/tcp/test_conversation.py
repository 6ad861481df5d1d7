"""The talk between the two ends of a TCP connection: what may be said when, and that credit is never overdrawn."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from durable.envelope import Envelope
from durable.errors import ConnectionFailed, ProtocolViolation
from durable.outcomes import BUSY, STORED, Failed, Outcome, Rejected
from durable.transports.frames import (
    MAX_ENVELOPES,
    Batch,
    Content,
    Credit,
    Damaged,
    Frame,
    Goodbye,
    Hello,
    Outcomes,
    PartlyReadable,
    Ping,
    Pong,
    Received,
    Refused,
    Welcome,
)
from durable.transports.tcp.client_side import Answered, ClientSide, ClientState, Ponged, Sendable, Stray, Unsendable
from durable.transports.tcp.conversation import MAX_PINGS, Reply
from durable.transports.tcp.server_side import Deliver, Leave, Probe, ServerSide, ServerState
from durable.transports.wire import MAGIC, Decoder, encode
from tests.support.receivers import envelope, envelopes

LIMIT = 1 << 20
MOST_ROOM = 40


def read(data: bytes) -> Received:
    """The one frame in these bytes."""
    (item,) = Decoder(LIMIT).feed(MAGIC + data)
    return item


def client(credit: int = 100, max_frame_bytes: int = LIMIT) -> ClientSide:
    """A client that has been welcomed."""
    side = ClientSide("orders", 1, LIMIT)
    side.hear(Frame(Welcome(1, "billing", 2, max_frame_bytes, MAX_ENVELOPES, credit)))
    return side


def server(room: int = 100) -> ServerSide:
    """A server that has heard HELLO."""
    side = ServerSide("billing", 2, LIMIT)
    side.hear(Frame(Hello([1], "orders", 1, LIMIT)), room)
    return side


def batch(count: int, channel: int = 1) -> Frame:
    return Frame(Batch(count, envelopes(count)), channel)


def sent(side: ClientSide, some: list[Envelope]) -> tuple[int, int]:
    """The channel and the number of envelopes of what the client offers to write."""
    offer = side.offer(some)
    assert isinstance(offer, Sendable)
    match read(offer.data):
        case Frame(Batch(count), channel):
            assert channel == offer.channel
            return channel, count
        case other:
            pytest.fail(f"unexpected: {other}")


class TestHandshake:
    def test_client_and_server_agree_on_a_version_and_exchange_their_limits(self) -> None:
        a, b = ClientSide("orders", 1, LIMIT), ServerSide("billing", 2, LIMIT)
        match b.hear(a.greet(), room=42):
            case Reply(frame):
                assert frame.content == Welcome(1, "billing", 2, LIMIT, MAX_ENVELOPES, 42)
                a.hear(frame)
            case other:
                pytest.fail(f"unexpected: {other}")
        assert (a.state, a.credit) == (ClientState.OPEN, 42)
        assert (b.state, b.unspent, b.peer) == (ServerState.OPEN, 42, "orders node 1")

    def test_a_future_version_is_refused_and_the_client_may_say_hello_again(self) -> None:
        side = ServerSide("billing", 2, LIMIT)
        refusal = side.hear(Frame(Hello([7, 8], "orders", 1, LIMIT)), 42)
        assert refusal == Reply(Frame(Refused("no version in common", [1])))
        welcome = side.hear(Frame(Hello([7, 1], "orders", 1, LIMIT)), 42)
        assert welcome == Reply(Frame(Welcome(1, "billing", 2, LIMIT, MAX_ENVELOPES, 42)))

    def test_refused_client_learns_the_versions_of_the_peer(self) -> None:
        with pytest.raises(ConnectionFailed, match=r"no version in common; the peer speaks versions \[9\]"):
            ClientSide("orders", 1, LIMIT).hear(Frame(Refused("no version in common", [9])))

    @pytest.mark.parametrize("content", [Batch(0, []), Ping(), Credit(1), Pong(True), Outcomes([])])
    def test_first_frame_of_a_client_must_be_hello(self, content: Content) -> None:
        with pytest.raises(ProtocolViolation):
            ServerSide("billing", 2, LIMIT).hear(Frame(content, 1), 42)

    @pytest.mark.parametrize("content", [Outcomes([]), Credit(1), Pong(True), Ping(), Hello([1], "x", 1, LIMIT)])
    def test_first_answer_of_a_server_must_be_welcome(self, content: Content) -> None:
        with pytest.raises(ProtocolViolation):
            ClientSide("orders", 1, LIMIT).hear(Frame(content, 1))

    def test_a_second_hello_is_a_violation(self) -> None:
        with pytest.raises(ProtocolViolation):
            server().hear(Frame(Hello([1], "orders", 1, LIMIT)), 42)

    def test_a_second_welcome_is_a_violation(self) -> None:
        with pytest.raises(ProtocolViolation):
            client().hear(Frame(Welcome(1, "billing", 2, LIMIT, MAX_ENVELOPES, 5)))

    def test_welcome_to_a_version_not_offered_is_a_violation(self) -> None:
        with pytest.raises(ProtocolViolation):
            ClientSide("orders", 1, LIMIT).hear(Frame(Welcome(2, "billing", 2, LIMIT, MAX_ENVELOPES, 5)))


class TestClient:
    def test_client_pays_credit_for_its_batches_and_waits_without_credit(self) -> None:
        side = client(credit=10)
        assert sent(side, envelopes(10)) == (1, 10)
        assert (side.credit, side.outstanding) == (0, 10)
        assert side.offer(envelopes(1)) is None

    def test_client_welcomed_without_credit_sends_nothing(self) -> None:
        side = client(credit=0)
        assert side.offer(envelopes(1)) is None
        assert side.outstanding == 0

    def test_an_answer_brings_the_outcomes_and_more_credit(self) -> None:
        side = client(credit=2)
        channel, _ = sent(side, envelopes(2))
        outcomes: list[Outcome] = [STORED, Rejected("why")]
        assert side.hear(Frame(Outcomes(outcomes, 5), channel)) == Answered(channel, outcomes)
        assert (side.credit, side.outstanding) == (5, 0)

    def test_a_repeated_answer_is_ignored_with_its_credit(self) -> None:
        side = client(credit=2)
        channel, _ = sent(side, envelopes(2))
        answer = Frame(Outcomes([STORED, STORED], 2), channel)
        side.hear(answer)
        assert side.hear(answer) == Stray(channel)
        assert side.credit == 2

    def test_an_answer_with_too_few_outcomes_is_a_violation(self) -> None:
        side = client()
        channel, _ = sent(side, envelopes(2))
        with pytest.raises(ProtocolViolation, match="1 outcome for 2 envelopes"):
            side.hear(Frame(Outcomes([STORED]), channel))

    def test_a_refused_batch_fails_as_a_whole_and_costs_no_credit(self) -> None:
        side = client(credit=5)
        channel, _ = sent(side, envelopes(2))
        assert side.hear(Frame(Refused("bad\x00luck"), channel)) == Answered(channel, [Failed("bad�luck")] * 2)
        assert (side.credit, side.outstanding) == (5, 0)

    def test_client_splits_a_batch_for_its_credit_only_when_no_answer_is_outstanding(self) -> None:
        side = client(credit=5)
        channel, _ = sent(side, envelopes(2))
        assert side.offer(envelopes(4)) is None
        side.hear(Frame(Outcomes([STORED] * 2), channel))
        assert sent(side, envelopes(4)) == (2, 3)

    def test_a_batch_above_the_frame_limit_of_the_peer_travels_in_parts(self) -> None:
        side = client(max_frame_bytes=10_000)
        some = envelopes(8, body=b"x" * 2_000)
        assert sent(side, some) == (1, 4)
        assert (side.credit, side.outstanding) == (96, 4)

    def test_envelope_above_the_limit_is_named_and_costs_no_credit(self) -> None:
        side = client(max_frame_bytes=10_000)
        giant = envelope(body=b"x" * 10_000)
        offer = side.offer([giant, *envelopes(3)])
        assert isinstance(offer, Unsendable)
        assert str(giant.id) in offer.reason
        assert "the peer takes 10,000" in offer.reason
        assert (side.credit, side.outstanding) == (100, 0)

    def test_no_batch_has_more_envelopes_than_the_protocol_allows(self) -> None:
        assert sent(client(credit=5_000), envelopes(MAX_ENVELOPES + 1))[1] == MAX_ENVELOPES

    def test_client_offers_nothing_after_goodbye_and_still_takes_answers(self) -> None:
        side = client()
        channel, _ = sent(side, envelopes(1))
        side.hear(Frame(Goodbye()))
        assert side.offer(envelopes(1)) is None
        assert side.hear(Frame(Outcomes([STORED]), channel)) == Answered(channel, [STORED])

    def test_a_pong_is_for_the_channel_of_its_ping(self) -> None:
        side = client()
        assert side.hear(Frame(Pong(True), side.ping().channel)) == Ponged(1, True)

    def test_damaged_answer_is_a_violation(self) -> None:
        with pytest.raises(ProtocolViolation):
            client().hear(Damaged(1, "the CRC of the frame is wrong"))

    def test_reasons_from_the_peer_are_cut_and_made_storable(self) -> None:
        side = client()
        channel, _ = sent(side, envelopes(1))
        match side.hear(Frame(Outcomes([Rejected("\x00" * 5_000)]), channel)):
            case Answered(_, [Rejected(reason)]):
                assert reason == "�" * 1_000
            case other:
                pytest.fail(f"unexpected: {other}")


class TestServer:
    def test_batch_within_the_credit_is_delivered_and_answered_with_new_credit(self) -> None:
        side = server(room=10)
        frame = batch(4)
        assert isinstance(frame.content, Batch)
        assert side.hear(frame, 10) == Deliver(1, frame.content.envelopes, 0)
        assert (side.unspent, side.under_way) == (6, 4)
        assert side.answer(1, [STORED] * 4, room=8) == Frame(Outcomes([STORED] * 4, 2), 1)
        assert (side.unspent, side.under_way) == (8, 0)

    def test_a_batch_beyond_the_credit_is_busy_and_costs_nothing(self) -> None:
        side = server(room=3)
        assert side.hear(batch(4), room=3) == Reply(Frame(Outcomes([BUSY] * 4, 0), 1))
        assert (side.unspent, side.under_way) == (3, 0)

    @pytest.mark.parametrize(("says", "holds"), [(10, 9), (9, 10), (0, 0), (1, 0)])
    def test_batch_with_a_false_count_is_refused(self, says: int, holds: int) -> None:
        side = server()
        match side.hear(Frame(Batch(says, envelopes(holds)), 5), 100):
            case Reply(Frame(Refused(reason), 5)):
                assert reason == f"malformed batch: the count says {says} envelopes, and {holds} are there"
            case other:
                pytest.fail(f"unexpected: {other}")
        assert side.unspent == 100

    def test_a_damaged_frame_is_refused_on_its_channel(self) -> None:
        assert server().hear(Damaged(5, "why"), 100) == Reply(Frame(Refused("why"), 5))

    def test_unreadable_envelopes_are_rejected_in_their_places(self) -> None:
        side = server()
        some = envelopes(2)
        rejected = {0: Rejected("first"), 2: Rejected("third"), 4: Rejected("last")}
        match side.hear(Frame(PartlyReadable(5, some, rejected), 1), 100):
            case Deliver(1, delivered) as delivery:
                assert delivered == some
                outcomes = delivery.outcomes([STORED, BUSY])
                assert outcomes == [rejected[0], STORED, rejected[2], BUSY, rejected[4]]
                assert side.answer(1, outcomes, 100).channel == 1
            case other:
                pytest.fail(f"unexpected: {other}")

    def test_unanswered_channel_cannot_be_used_again(self) -> None:
        side = server()
        side.hear(batch(1), 100)
        with pytest.raises(ProtocolViolation, match="used twice"):
            side.hear(batch(1), 100)

    def test_batches_are_answered_in_any_order(self) -> None:
        side = server()
        side.hear(batch(1, channel=1), 100)
        side.hear(batch(2, channel=2), 100)
        assert side.answer(2, [STORED] * 2, 100).channel == 2
        assert side.answer(1, [STORED], 100).channel == 1

    def test_credit_is_granted_without_an_answer_when_the_room_doubles(self) -> None:
        side = server(room=10)
        assert side.grant(room=10) is None
        assert side.grant(room=15) is None
        assert side.grant(room=20) == Frame(Credit(10))
        assert side.unspent == 20

    def test_a_client_without_credit_is_granted_a_single_envelope(self) -> None:
        side = server(room=0)
        assert side.grant(room=1) == Frame(Credit(1))

    def test_credit_under_way_is_not_granted_again(self) -> None:
        side = server(room=10)
        side.hear(batch(10), 10)
        assert side.grant(room=10) is None

    def test_more_pings_than_a_client_needs_are_a_violation(self) -> None:
        side = server()
        for channel in range(1, MAX_PINGS + 1):
            assert side.hear(Frame(Ping(), channel), 100) == Probe(channel)
        side.pong(1, ready=True)
        side.hear(Frame(Ping(), 1), 100)
        with pytest.raises(ProtocolViolation, match="pings"):
            side.hear(Frame(Ping(), 99), 100)

    def test_new_batches_are_busy_after_goodbye_and_old_ones_are_answered(self) -> None:
        side = server()
        side.hear(batch(1, channel=1), 100)
        assert side.leave() == Frame(Goodbye())
        assert side.hear(batch(2, channel=2), 200) == Reply(Frame(Outcomes([BUSY] * 2, 0), 2))
        assert side.answer(1, [STORED], 200) == Frame(Outcomes([STORED], 0), 1)
        assert side.grant(1_000) is None

    def test_goodbye_from_the_client_is_heeded_in_every_state(self) -> None:
        assert server().hear(Frame(Goodbye()), 100) == Leave()
        assert ServerSide("billing", 2, LIMIT).hear(Frame(Goodbye()), 100) == Leave()

    @pytest.mark.parametrize("content", [Outcomes([]), Credit(1), Pong(True), Refused("no")])
    def test_frame_reserved_for_servers_is_a_violation(self, content: Content) -> None:
        with pytest.raises(ProtocolViolation):
            server().hear(Frame(content, 1), 100)

    def test_long_reasons_are_cut_to_the_limit_of_the_client(self) -> None:
        side = ServerSide("billing", 2, LIMIT)
        side.hear(Frame(Hello([1], "orders", 1, max_frame_bytes=10_000)), 100)
        side.hear(batch(100), 100)
        answer = side.answer(1, [Rejected("\N{PILE OF POO}" * 5_000)] * 100, 100)
        assert len(encode(answer)) < 10_000


class CreditMachine(RuleBasedStateMachine):
    """A client and a server with frames under way in both directions, whatever the order of events."""

    def __init__(self) -> None:
        super().__init__()
        self.room = 20
        self.client = ClientSide("orders", 1, LIMIT)
        self.server = ServerSide("billing", 2, LIMIT)
        self.up: deque[Received] = deque([self.client.greet()])
        self.down: deque[Received] = deque()
        self.stored: list[Deliver] = []

    @rule(count=st.integers(1, 30))
    def client_offers(self, count: int) -> None:
        offer = self.client.offer(envelopes(count))
        if isinstance(offer, Sendable):
            self.up.append(read(offer.data))

    @precondition(lambda self: self.up)
    @rule(damaged=st.sampled_from([False, False, False, True]))
    def server_hears(self, damaged: bool) -> None:
        item = self.up.popleft()
        assert isinstance(item, Frame)
        if damaged and isinstance(item.content, Batch):
            decision = self.server.hear(Damaged(item.channel, "damaged"), self.room)
        else:
            decision = self.server.hear(item, self.room)
        match decision:
            case Reply(frame):
                assert not isinstance(frame.content, Outcomes), "a well-behaved client is never beyond its credit"
                self.down.append(frame)
            case Deliver() as delivery:
                self.stored.append(delivery)
            case other:
                pytest.fail(f"unexpected: {other}")

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def server_answers(self, data: st.DataObject) -> None:
        delivery = self.stored.pop(data.draw(st.integers(0, len(self.stored) - 1)))
        self.down.append(self.server.answer(delivery.channel, [STORED] * len(delivery.envelopes), self.room))

    @rule(room=st.integers(0, MOST_ROOM))
    def room_changes(self, room: int) -> None:
        self.room = room
        frame = self.server.grant(room) if self.server.state is ServerState.OPEN else None
        if frame is not None:
            self.down.append(frame)

    @precondition(lambda self: self.down)
    @rule(repeated=st.booleans())
    def client_hears(self, repeated: bool) -> None:
        item = self.down.popleft()
        self.client.hear(item)
        if repeated and isinstance(item, Frame) and isinstance(item.content, Outcomes):
            assert self.client.hear(item) == Stray(item.channel)

    @invariant()
    def nothing_is_overdrawn(self) -> None:
        assert self.client.credit >= 0
        assert self.server.unspent >= 0
        assert self.server.unspent + self.server.under_way <= MOST_ROOM

    @invariant()
    def the_two_ledgers_agree(self) -> None:
        on_their_way_up = sum(f.content.count for f in self.up if isinstance(f, Frame) and isinstance(f.content, Batch))
        on_their_way_down = 0
        refused = 0
        for frame in self.down:
            match frame:
                case Frame(Welcome() | Outcomes() | Credit() as content):
                    on_their_way_down += content.credit
                case Frame(Refused(), channel):
                    refused += self.client._outstanding[channel]
                case _:
                    pass
        assert self.server.unspent == self.client.credit + on_their_way_up + on_their_way_down + refused


CreditMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCreditIsNeverOverdrawn = CreditMachine.TestCase
