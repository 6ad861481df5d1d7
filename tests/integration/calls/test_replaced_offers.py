"""Calls that were made against an offer which another has replaced meanwhile: what does not fit any more is not run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
import msgspec
import pytest

from durable.calls import service
from durable.calls.caller import RemoteService
from durable.calls.contract import contract_of
from durable.calls.places import Pinned, Target
from durable.errors import IncompatibleService
from durable.transports.base import Answer, Caller
from durable.transports.frames import Call, Offers
from durable.transports.http.wire import ARGUMENTS
from tests.support.calling import SOON, Offering, offering


@service("transfer", version="1.1")
class Transfer(Protocol):
    async def move(self, source: str, target: str) -> str: ...


@service("transfer", version="1.2")
class Later(Protocol):
    async def move(self, source: str, target: str, note: str = "") -> str: ...

    async def undo(self) -> None: ...


@service("transfer", version="2.1")
class Swapped(Protocol):
    async def move(self, target: str, source: str) -> str: ...


@service("transfer", version="1.1")
class Unraised(Protocol):
    async def move(self, target: str, source: str) -> str: ...


@service("transfer", version="1.0")
class Older(Protocol):
    async def move(self, source: str, target: str) -> str: ...


@dataclass
class Books:
    """Implementation of them all, as far as a contract lets it be one."""

    moved: list[tuple[str, str]] = field(default_factory=list)

    async def move(self, source: str, target: str, note: str = "") -> str:
        self.moved.append((source, target))
        return f"{source} > {target}"

    async def undo(self) -> None:
        self.moved.pop()


class SwappedBooks(Books):
    async def move(self, target: str, source: str) -> str:  # type: ignore[override]
        return await super().move(source, target)


class Remembering:
    """A caller that remembers the first offers, on whichever connection it calls by now."""

    def __init__(self, at: Offering) -> None:
        self.at = at
        self._offers: Offers | None = None

    async def caller(self) -> Any:
        return self

    async def offers(self) -> Offers:
        if self._offers is None:
            self._offers = await (await self._connection()).offers()
        return self._offers

    async def call(self, call: Call, sent: Callable[[], None]) -> Answer:
        return await (await self._connection()).call(call, sent)

    async def _connection(self) -> Caller:
        target = self.at.place.choose(())
        assert target is not None
        return await target.caller()


class Bench:
    """A provider, another one that takes its place, and a caller that remembers the offers of the first."""

    def __init__(self, first: Offering, second: Offering) -> None:
        self.books, self._first, self._second = Books(), first, second
        first.provider.offer(contract_of(Transfer), self.books)
        self._remembering = Remembering(first)
        place = Pinned(Target("the books", self._remembering.caller))
        self.caller = RemoteService(contract_of(Transfer), place, timeout=SOON, options={}, on_error=None).stub()

    def offer_anew(self, contract: type, books: Books) -> None:
        """Offer another contract in the same process."""
        self._first.provider.withdraw(contract_of(Transfer))
        self._first.provider.offer(contract_of(contract), books)

    def move(self, contract: type, books: Books) -> None:
        """Let another process, which offers another contract, answer the next calls."""
        self._second.provider.offer(contract_of(contract), books)
        self._remembering.at = self._second


WAYS: Final = (Bench.offer_anew, Bench.move)
ways = pytest.mark.parametrize("replace", WAYS, ids=lambda way: way.__name__)


@pytest.fixture(params=["tcp", "unix", "http"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        folders = tmp_path / "1", tmp_path / "2"
        for folder in folders:
            folder.mkdir()
        yield Bench(*[await stack.enter_async_context(offering(request.param, folder)) for folder in folders])


@ways
@pytest.mark.parametrize(
    ("contract", "text"),
    [
        (Swapped, "transfer 2.1 is offered now: another first number"),
        (Unraised, r"transfer 1.1 is offered now: the method differs: here move\(target: str, source: str\)"),
        (Older, "transfer 1.0 is offered now: it is older"),
    ],
    ids=["swapped", "unraised", "older"],
)
async def test_call_of_an_offer_replaced_meanwhile_is_refused(
    bench: Bench, replace: Callable[[Bench, type, Books], None], contract: type, text: str
) -> None:
    assert await bench.caller.move("alice", "bob") == "alice > bob"
    books = Books() if contract is Older else SwappedBooks()
    replace(bench, contract, books)
    with pytest.raises(IncompatibleService, match=text):
        await bench.caller.move("alice", "bob")
    assert (len(bench.books.moved), books.moved) == (1, [])


@ways
async def test_call_of_an_earlier_version_is_run_when_a_later_one_is_offered_meanwhile(
    bench: Bench, replace: Callable[[Bench, type, Books], None]
) -> None:
    assert await bench.caller.move("alice", "bob") == "alice > bob"
    books = Books()
    replace(bench, Later, books)
    assert await bench.caller.move("alice", "carol") == "alice > carol"
    assert books.moved == [("alice", "carol")]


@pytest.fixture
async def over_http(tmp_path: Path) -> AsyncIterator[Offering]:
    async with offering("http", tmp_path) as found:
        found.provider.offer(contract_of(Transfer), Books())
        yield found


async def test_refused_caller_looks_anew_over_http(over_http: Offering) -> None:
    assert over_http.listener is not None
    caller = over_http.caller(Transfer)
    await caller.move("alice", "bob")
    over_http.provider.withdraw(contract_of(Transfer))
    over_http.provider.offer(contract_of(Swapped), SwappedBooks())
    with pytest.raises(IncompatibleService, match="is offered now"):
        await caller.move("alice", "bob")
    with pytest.raises(IncompatibleService, match=r"offers 2.1"):
        await caller.move("alice", "bob")
    assert over_http.listener.statistics()["calls"] == 2


SCHEMA: Final = contract_of(Transfer).methods["move"].described.digest.hex()


@pytest.mark.parametrize(
    ("headers", "status", "detail"),
    [
        ({}, 200, ""),
        ({"Durable-Version": "1.0"}, 200, ""),
        ({"Durable-Version": "1.0", "Durable-Schema": "00"}, 200, ""),
        ({"Durable-Version": "1.1", "Durable-Schema": SCHEMA}, 200, ""),
        ({"Durable-Schema": SCHEMA}, 200, ""),
        ({"Durable-Version": "1.1", "Durable-Schema": "00"}, 409, "the method differs"),
        ({"Durable-Schema": "00"}, 409, "the method differs"),
        ({"Durable-Version": "1.2", "Durable-Schema": SCHEMA}, 409, "it is older than the caller"),
        ({"Durable-Version": "2.1"}, 409, "another first number"),
        ({"Durable-Version": "one"}, 400, "must be two numbers"),
        ({"Durable-Schema": "0"}, 400, "must be a digest"),
        ({"Durable-Schema": "00" * 65}, 400, "must be a digest"),
    ],
)
async def test_request_of_another_contract_is_refused(
    over_http: Offering, headers: dict[str, str], status: int, detail: str
) -> None:
    async with httpx.AsyncClient(base_url=over_http.place.name) as client:
        response = await client.post(
            "/calls/transfer/move",
            content=msgspec.msgpack.encode(["alice", "bob"]),
            headers={"Content-Type": ARGUMENTS, **headers},
        )
    assert response.status_code == status
    if status == 200:
        assert msgspec.msgpack.decode(response.content) == "alice > bob"
    else:
        assert detail in response.json()["detail"]
    assert response.status_code != 409 or response.json()["fault"] == "incompatible"
