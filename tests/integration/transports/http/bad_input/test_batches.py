"""What is stored of a batch, what waits for room, and what is said of a fault."""

from __future__ import annotations

import logging

import msgspec
import pytest

from durable.envelope import Envelope
from durable.outcomes import BUSY, STORED, Failed, Outcome, Rejected
from durable.transports.http.wire import OUTCOMES, decode_outcomes, encode_batch
from tests.integration.transports.http.bad_input.houses import (
    GOOD,
    LETTER,
    SECRET,
    SETTINGS,
    House,
    ask,
    batch,
    open_house,
    post,
)
from tests.support.receivers import REJECTED_TYPE, envelope, envelopes


async def test_bytes_under_way_are_bounded_by_429() -> None:
    settings = SETTINGS.model_copy(update={"buffer_bytes": 100_000})
    async for house in open_house(settings):
        house.receiver.hold()
        large = encode_batch(envelopes(1, body=b"x" * 60_000))
        async with house.mallory() as first, house.mallory() as second:
            first.say(post(large))
            await house.receiver.arrived(2)  # the neighbour's was the first
            refusal = await second.ask(post(large))
            assert (refusal.problem["status"], refusal.headers["retry-after"]) == (429, "1")
            house.receiver.release()
            assert (await first.hear()).status == 200
            assert (await second.ask(post(large))).status == 200


async def test_request_larger_than_the_bound_of_bytes_under_way_goes_alone() -> None:
    settings = SETTINGS.model_copy(update={"buffer_bytes": 10_000})
    async for house in open_house(settings):
        assert (await ask(house, post(encode_batch(envelopes(1, body=b"x" * 60_000))))).status == 200
        await house.greet_neighbour()


async def test_invalid_envelope_is_rejected_and_its_neighbours_in_the_batch_are_stored(house: House) -> None:
    before, after = envelopes(2)
    naive = msgspec.structs.replace(envelope(), sent_at=envelope().sent_at.replace(tzinfo=None))
    answer = await ask(house, post(batch("no envelope", before, naive, envelope(REJECTED_TYPE), after, [])))
    match decode_outcomes(answer.body, 6):
        case [Rejected(), first, Rejected(reason), Rejected(theirs), second, Rejected()]:
            assert (first, second) == (STORED, STORED)
            assert "timezone" in reason
            assert theirs == "a type that the test rejects"
        case other:
            pytest.fail(f"unexpected: {other}")
    house.from_neighbour += [before, after]
    await house.is_unharmed()


async def test_batch_sent_twice_is_stored_once(house: House) -> None:
    data = post(GOOD)
    async with house.mallory() as mallory:
        first, second = await mallory.ask(data), await mallory.ask(data)
    assert (first.status, second.status) == (200, 200)
    assert second.headers["content-type"] == OUTCOMES
    assert decode_outcomes(first.body, 2) == [STORED] * 2
    assert [type(outcome).__name__ for outcome in decode_outcomes(second.body, 2)] == ["Duplicate"] * 2


async def test_two_requests_at_once_on_one_connection_are_answered_in_turn(house: House) -> None:
    other = encode_batch(envelopes(5))
    async with house.mallory() as mallory:
        mallory.say(post(GOOD) + post(other))
        assert decode_outcomes((await mallory.hear()).body, 2) == [STORED] * 2
        assert decode_outcomes((await mallory.hear()).body, 5) == [STORED] * 5


async def test_envelopes_beyond_the_room_of_the_receiver_are_busy(house: House) -> None:
    house.receiver.room = len(house.from_neighbour) + 2
    answer = await ask(house, post(batch(envelope(), "no envelope", *envelopes(3))))
    match decode_outcomes(answer.body, 5):
        case [first, Rejected(), second, *rest]:
            assert (first, second, rest) == (STORED, STORED, [BUSY] * 2)
        case other:
            pytest.fail(f"unexpected: {other}")
    assert len(house.receiver.batches[-1]) == 2  # it is not asked for more than it has room for


async def test_reasons_of_outcomes_are_fit_to_travel(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(endpoint: str, received: list[Envelope]) -> list[Outcome]:
        return [Failed("\x00\ud800" + "x" * 10_000)] * len(received)

    monkeypatch.setattr(house.receiver, "receive", fail)
    answer = await ask(house, post(GOOD))
    assert decode_outcomes(answer.body, 2) == [Failed(2 * "\N{REPLACEMENT CHARACTER}" + "x" * 998)] * 2


async def test_fault_of_the_receiver_gets_500_without_details(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(endpoint: str, received: list[Envelope]) -> list[Outcome]:
        raise RuntimeError("an inner detail")

    with monkeypatch.context() as patched:
        patched.setattr(house.receiver, "receive", fail)
        refusal = await ask(house, post(GOOD))
    assert refusal.problem == {
        "type": "about:blank",
        "title": "Internal Server Error",
        "status": 500,
        "detail": "a fault of this service",
    }
    assert "an inner detail" in caplog.text
    await house.is_unharmed()


async def test_bodies_and_secrets_are_not_logged(house: House, caplog: pytest.LogCaptureFixture) -> None:
    body = encode_batch(envelopes(1, body=LETTER))
    with caplog.at_level(logging.DEBUG):
        await ask(house, post(body))
        await ask(house, post(body, authorization=f"Bearer {SECRET}x"))
        await ask(house, post(body + LETTER))
        await house.greet_neighbour()
    assert caplog.text
    assert LETTER.decode() not in caplog.text
    assert SECRET not in caplog.text
