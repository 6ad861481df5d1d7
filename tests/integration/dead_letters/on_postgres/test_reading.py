"""Dead letters are found, and read page by page."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from durable.envelope import ANY_NODE, LeasedEnvelope
from durable.storage import dead_letters, outbox
from durable.storage.database import Database
from durable.storage.dead_letters import Selection
from durable.storage.outbox import Sent
from durable.storage.rows import Letter
from tests.integration.dead_letters.on_postgres.storing import ALL, WHOLE, given, stored
from tests.support import letters
from tests.support.letters import ENDPOINT, PEER, envelope
from tests.support.tables import Tables


class TestReading:
    def test_letters_are_grouped_by_cause(self, tables: Tables) -> None:
        late, early = Letter.because("no stock", "OutOfStock"), Letter.because("no such customer", "LookupError")
        given(tables, letters.incoming, [envelope(1), envelope(2)], early)
        given(tables, letters.incoming, [envelope(3)], Letter.because("no such order", "LookupError"))
        given(tables, letters.outgoing, [envelope(4, destination=PEER)], late)

        found = stored(tables, dead_letters.groups, ALL)

        assert [(g.exception_type, g.side, g.message_type, g.count, g.example) for g in found] == [
            ("LookupError", "incoming", "letters.placed", 3, "no such order"),
            ("OutOfStock", "outgoing", "letters.placed", 1, "no stock"),
        ]
        assert found[0].first < found[0].last
        assert found[0].fingerprint == early.fingerprint

    def test_pages_follow_each_other_the_newest_first(self, tables: Tables) -> None:
        given(tables, letters.incoming, [envelope(number) for number in range(5)])
        numbers = tables.rows("SELECT letter_id FROM durable.dead_letters ORDER BY letter_id DESC")
        seen: list[int] = []
        while page := stored(tables, dead_letters.page, ALL, limit=2, before=seen[-1] if seen else None):
            assert len(page) <= 2
            seen += [letter.letter_id for letter in page]
            given(tables, letters.incoming, [envelope(99)])  # what comes meanwhile is on no later page
        assert seen == numbers

    @pytest.mark.parametrize(
        ("narrowed", "numbers"),
        [
            ({"side": "incoming"}, [1, 2, 3]),
            ({"side": "outgoing"}, [4]),
            ({"message_type": "letters.other"}, [3]),
            ({"exception_type": "LookupError"}, [2]),
            ({"fingerprint": Letter.because("", "LookupError").fingerprint}, [2]),
            ({"source": "abroad"}, [3]),
            ({"address": PEER}, [4]),
            ({"since": datetime(2020, 1, 2, tzinfo=UTC)}, [2, 3, 4]),
            ({"until": datetime(2020, 1, 2, tzinfo=UTC)}, [1]),
            ({"side": "incoming", "message_type": "letters.placed", "exception_type": "test"}, [1]),
            ({"letters": [-1]}, []),
            ({"ids": []}, []),
            ({"resolved": True}, [5]),
            ({"resolved": None}, [1, 2, 3, 4, 5]),
            ({}, [1, 2, 3, 4]),
        ],
        ids=str,
    )
    async def test_each_filter_narrows_the_letters(
        self, tables: Tables, database: Database, narrowed: dict[str, Any], numbers: list[int]
    ) -> None:
        other = msgspec.structs.replace(envelope(3), message_type="letters.other", source="abroad")
        given(tables, letters.incoming, [envelope(1)])
        await tables.change("UPDATE durable.dead_letters SET failed_at = '2020-01-01Z'")
        given(tables, letters.incoming, [envelope(2)], Letter.because("", "LookupError"))
        given(tables, letters.incoming, [other])
        given(tables, letters.outgoing, [envelope(4, destination=PEER)])
        (last,) = given(tables, letters.incoming, [envelope(5)])
        await tables.change(
            "UPDATE durable.dead_letters SET resolution = 'discarded', resolved_at = now() WHERE id = %s", last.id
        )

        found = await database.transaction(dead_letters.read, Selection(**narrowed), WHOLE)

        assert [msgspec.json.decode(letter.body)["number"] for letter in found] == numbers
        assert (await database.transaction(dead_letters.survey, Selection(**narrowed))).total == len(numbers)

    def test_a_letter_is_found_by_its_number_or_by_the_id_of_its_message(self, tables: Tables) -> None:
        first, second, _ = given(tables, letters.incoming, [envelope(number) for number in range(3)])
        (number,) = tables.rows("SELECT letter_id FROM durable.dead_letters WHERE id = %s", first.id)

        found = stored(tables, dead_letters.read, Selection(letters=[number], ids=[second.id]), WHOLE)

        assert [letter.summary.id for letter in found] == [first.id, second.id]
        assert found[0].lease() == LeasedEnvelope(msgspec.structs.replace(first, destination=ENDPOINT), 0, ENDPOINT)

    def test_the_relatives_of_a_letter_are_of_its_conversation(self, tables: Tables) -> None:
        cause = envelope(1)
        effect = msgspec.structs.replace(envelope(2), correlation_id=cause.id, causation_id=cause.id)
        given(tables, letters.incoming, [effect, cause, envelope(3)])
        waiting = msgspec.structs.replace(envelope(4), id=cause.id)
        stored(tables, outbox.store, [Sent(waiting, None, ANY_NODE)])
        letter = stored(tables, dead_letters.read, Selection(ids=[effect.id]), WHOLE)[0]

        found = stored(tables, dead_letters.relatives, letter)

        assert [(each.place, each.id) for each in found] == [("dead letter", cause.id), ("outbox", cause.id)]
