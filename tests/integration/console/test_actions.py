"""What the console records, who may do what, and edits and rehearsals of dead letters."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from durable import Bus
from durable.console import console_app
from durable.errors import InvalidSetting
from durable.storage.rows import Letter
from durable.testing import eventually
from tests.integration.console.visiting import (
    ADMIN,
    OPERATOR,
    TOKENS,
    VIEWER,
    add_letters,
    bearer,
    browser,
    logged_in,
    submit,
)
from tests.support.tables import Tables

APPLICATION = """
import os
import msgspec
from durable import Bus, Context, message
bus = Bus("shop", os.environ["SHOP_URL"], handler_timeout=5)

@message("letters.placed")
class Ping(msgspec.Struct):
    number: int

@message("shop.pong")
class Pong(msgspec.Struct):
    number: int

@bus.handles(Ping)
async def handle(ping: Ping, ctx: Context) -> None:
    print("{\\n  a handler prints {\\n}")
    if ping.number < 0:
        raise ValueError(f"{ping.number} is negative")
    ctx.send(Pong(ping.number))

@bus.handles(Pong)
async def finish(pong: Pong) -> None: ...
"""


@pytest.fixture
def rehearsing(bus: Bus, tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starlette:
    """A console which knows the application."""
    (tmp_path / "shopping.py").write_text(APPLICATION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOP_URL", tables.url)
    return Starlette(routes=[Mount("/console", console_app(bus, tokens=TOKENS, app="shopping:bus"))])


def body_of(tables: Tables) -> bytes:
    return bytes(tables.one("SELECT body FROM durable.incoming_envelopes"))


class TestRecord:
    async def test_page_lists_actions_and_obeys_filters(self, app: Starlette, tables: Tables) -> None:
        async with logged_in(app) as client:
            pause = {"kind": "destination", "key": "tcp://stock:2302", "reason": "<b>moved</b>"}
            tables.execute(
                "INSERT INTO durable.circuits (kind, key, reason, actor, probing) "
                "VALUES ('destination', %s, '', 'x', true)",
                pause["key"],
            )
            assert (await submit(client, "/circuits", "/circuits/pause", **pause)).status_code == 303
            page = (await client.get("/actions")).text
            assert ("tcp://stock:2302" in page, "&lt;b&gt;moved" in page, "console: olga" in page) == (True, True, True)
            assert "tcp://stock:2302" in (await client.get("/actions?verb=pause&since=1h")).text
            assert "No action fits" in (await client.get("/actions?verb=resume")).text
            assert "No action fits" in (await client.get("/actions?until=1h")).text
            assert (await client.get("/actions?since=yesterday")).status_code == 422

    async def test_export_is_whole_and_has_no_formula(self, app: Starlette, tables: Tables) -> None:
        for number in range(60):
            tables.execute(
                "INSERT INTO durable.actions (id, actor, verb, target, changed) "
                "VALUES (gen_random_uuid(), 'ada', 'pause', %s, 1)",
                f"=cmd|{number}",
            )
        async with bearer(app, ADMIN) as client:
            rows = list(csv.DictReader(io.StringIO((await client.get("/actions/export?as=csv")).text)))
            assert [row["target"] for row in rows] == [f"'=cmd|{number}" for number in reversed(range(60))]
            told = json.loads((await client.get("/actions/export?as=json")).text)
            assert [row["target"] for row in told] == [f"=cmd|{number}" for number in reversed(range(60))]
            assert (await client.get("/actions/export?as=xml")).status_code == 422
        async with bearer(app, OPERATOR) as client:
            assert (await client.get("/actions/export")).status_code == 403

    async def test_run_over_a_group_is_one_action(self, app: Starlette, tables: Tables) -> None:
        add_letters(tables, 250)
        cause = tables.one("SELECT DISTINCT fingerprint FROM durable.dead_letters")
        async with logged_in(app) as client:
            page = f"/dead-letters/all?fingerprint={cause}"
            await submit(client, page, "/dead-letters/resolve", verb="replay", reason="mended")
            told = "SELECT actor, verb, target, reason, changed FROM durable.actions"
            newest = max(tables.rows("SELECT letter_id FROM durable.dead_letters"))
            target = f"dead letters: those shown: fingerprint={cause}, up_to={newest}"
            expected = [("console: olga", "replay", target, "mended", 250)]
            await eventually(lambda: tables.rows(told) == expected, what="the whole run in one row")

    async def test_rate_paces_a_run(self, app: Starlette, tables: Tables) -> None:
        add_letters(tables, 200)
        cause = tables.one("SELECT DISTINCT fingerprint FROM durable.dead_letters")
        resolve = {"verb": "replay"}
        async with logged_in(app) as client:
            page = f"/dead-letters/all?fingerprint={cause}"
            for rate in ("0", "-1", "nan", "many", "1e9"):
                assert (await submit(client, page, "/dead-letters/resolve", **resolve, rate=rate)).status_code == 422
            await submit(client, page, "/dead-letters/resolve", **resolve, rate="8")
            await eventually(lambda: tables.count("incoming_envelopes") > 0, what="the first batch")
            assert tables.count("incoming_envelopes") < 100  # a batch of 2 each quarter of a second


class TestRoles:
    async def test_operator_discards_letters_but_no_group(self, app: Starlette, tables: Tables) -> None:
        letter, _ = add_letters(tables, 2)
        cause = tables.one("SELECT DISTINCT fingerprint FROM durable.dead_letters")
        page, reason = f"/dead-letters/all?fingerprint={cause}", {"verb": "discard", "reason": "no"}
        async with logged_in(app) as client:
            assert "Discard 2 letters" not in (await client.get(page)).text
            refused = await submit(client, page, "/dead-letters/resolve", **reason)
            assert (refused.status_code, "one at a time" in refused.text) == (403, True)
            assert (
                await submit(client, page, "/dead-letters/resolve", letter=str(letter), **reason)
            ).status_code == 303
        async with logged_in(app, ADMIN) as client:
            assert (await submit(client, page, "/dead-letters/resolve", **reason)).status_code == 303
        told = "SELECT count(*)::int FROM durable.dead_letters WHERE resolution = 'discarded'"
        await eventually(lambda: tables.one(told) == 2, what="both discarded")

    async def test_operator_edits_no_body(self, app: Starlette, tables: Tables) -> None:
        (letter,) = add_letters(tables, 1)
        page = f"/dead-letters/{letter}"
        async with logged_in(app) as client:
            assert "textarea" not in (await client.get(page)).text
            form = {"body": '{"number": 2}', "reason": "mended"}
            assert (await submit(client, page, f"{page}/edit", **form)).status_code == 403
            assert (await submit(client, page, f"{page}/rehearse", **form)).status_code == 403
        assert tables.count("incoming_envelopes") == 0

    async def test_viewer_searches_no_contents(self, app: Starlette, tables: Tables) -> None:
        add_letters(tables, 1)
        async with bearer(app, VIEWER) as client:
            assert (await client.get("/dead-letters/all?text=secret")).status_code == 403
            assert 'name="text"' not in (await client.get("/dead-letters/all")).text


class TestSearch:
    @pytest.mark.parametrize(
        ("query", "found"),
        [
            ("text=CARD", True),
            ("text=card+4112", False),
            ("text=%22number%22", True),
            ("key=tenant-7", True),
            ("key=tenant-8", False),
            ("address=tcp://localhost:9", True),
            ("address=tcp://localhost:8", False),
            ("since=1h", True),
            ("until=1h", False),
            ("since=2000-01-01", True),
        ],
    )
    async def test_letter_is_found_by(self, app: Starlette, tables: Tables, query: str, found: bool) -> None:
        add_letters(tables, 1, Letter.because("Card 4111 refused", "x"))
        tables.execute("UPDATE durable.dead_letters SET partition_key = 'tenant-7', address = 'tcp://127.0.0.1:9'")
        async with bearer(app, OPERATOR) as client:
            page = (await client.get(f"/dead-letters/all?{query}")).text
            assert ("No unresolved letter fits" not in page) == found

    async def test_time_without_sense_is_refused(self, app: Starlette) -> None:
        async with bearer(app, OPERATOR) as client:
            assert (await client.get("/dead-letters/all?since=soon")).status_code == 422


class TestEditing:
    async def test_edited_body_is_replayed_and_recorded(self, app: Starlette, tables: Tables) -> None:
        (letter,) = add_letters(tables, 1)
        page = f"/dead-letters/{letter}"
        async with logged_in(app, ADMIN) as client:
            assert "textarea" in (await client.get(page)).text
            form = {"body": '{\r\n "number": 17\r\n}', "reason": "mended"}
            assert (await submit(client, page, f"{page}/edit", **form)).status_code == 303
            assert (await submit(client, page, f"{page}/edit", **form)).status_code == 409
        assert json.loads(body_of(tables)) == {"number": 17}
        assert tables.rows("SELECT actor, verb, target, reason FROM durable.actions") == [
            ("console: ada", "edit", f"dead letters: letter {letter}", "mended")
        ]

    @pytest.mark.parametrize(
        "form", [{"body": "{", "reason": "x"}, {"body": '{"number": 1}'}, {"body": '{"number": 1}', "reason": " "}]
    )
    async def test_bad_edit_is_refused(self, app: Starlette, tables: Tables, form: dict[str, str]) -> None:
        (letter,) = add_letters(tables, 1)
        async with logged_in(app, ADMIN) as client:
            response = await submit(client, f"/dead-letters/{letter}", f"/dead-letters/{letter}/edit", **form)
            assert response.status_code == 422
        assert tables.count("incoming_envelopes") == 0

    async def test_long_body_is_edited_within_a_limit(self, app: Starlette, tables: Tables) -> None:
        letter, other = add_letters(tables, 2)
        note = '"\u20ac' * 10_000  # each of them grows in a form
        body = json.dumps({"number": 1, "note": note}, ensure_ascii=False)
        tables.execute("UPDATE durable.dead_letters SET body = %s WHERE letter_id = %s", body.encode(), letter)
        tables.execute("UPDATE durable.dead_letters SET body = %s WHERE letter_id = %s", (body * 2).encode(), other)
        async with logged_in(app, ADMIN) as client:
            page = f"/dead-letters/{letter}"
            assert (await submit(client, page, f"{page}/edit", body=body, reason="mended")).status_code == 303
            assert ("textarea" in (await client.get(f"/dead-letters/{other}")).text) is False
            assert "dead-letters edit" in (await client.get(f"/dead-letters/{other}")).text
        assert json.loads(body_of(tables))["note"] == note

    async def test_body_is_refused_by_its_class(self, rehearsing: Starlette, tables: Tables, tmp_path: Path) -> None:
        (letter,) = add_letters(tables, 1)
        async with logged_in(rehearsing, ADMIN) as client:
            page = f"/dead-letters/{letter}"
            response = await submit(client, page, f"{page}/rehearse", body='{"number": "seventeen"}')
            assert (response.status_code, "seventeen" in response.text or "int" in response.text) == (409, True)

    async def test_unknown_field_is_refused_by_its_name(
        self, rehearsing: Starlette, tables: Tables, tmp_path: Path
    ) -> None:
        (letter,) = add_letters(tables, 1)
        async with logged_in(rehearsing, ADMIN) as client:
            page = f"/dead-letters/{letter}"
            response = await submit(client, page, f"{page}/rehearse", body='{"number": 1, "numbr": 2}')
            assert (response.status_code, "unknown field" in response.text) == (409, True)


class TestRehearsing:
    async def rehearse(self, client: httpx.AsyncClient, letter: int, **form: str) -> httpx.Response:
        page = f"/dead-letters/{letter}"
        return await submit(client, page, f"{page}/rehearse", **form)

    async def test_rehearsal_shows_the_messages_of_the_handler(self, rehearsing: Starlette, tables: Tables) -> None:
        (letter,) = add_letters(tables, 1)
        async with logged_in(rehearsing, OPERATOR) as client:
            response = await self.rehearse(client, letter)
            assert response.status_code == 200, response.text
            assert ("would succeed" in response.text, "shop.pong" in response.text) == (True, True)
        counts = [tables.count(name) for name in ("incoming_envelopes", "outgoing_envelopes", "actions")]
        assert counts == [0, 0, 0]
        assert tables.one("SELECT resolved_at FROM durable.dead_letters") is None

    async def test_rehearsal_of_an_edited_body_shows_its_failure(self, rehearsing: Starlette, tables: Tables) -> None:
        (letter,) = add_letters(tables, 1)
        async with logged_in(rehearsing, ADMIN) as client:
            response = await self.rehearse(client, letter, body='{"number": -4}')
            assert ("would fail" in response.text, "-4 is negative" in response.text) == (True, True)

    async def test_third_rehearsal_at_once_is_told_to_wait(self, rehearsing: Starlette, tables: Tables) -> None:
        (letter,) = add_letters(tables, 1)
        async with logged_in(rehearsing) as client:
            answers = await asyncio.gather(*(self.rehearse(client, letter) for _ in range(3)))
            told = ["2 rehearsals are under way already" in answer.text for answer in answers]
        assert sorted(zip([answer.status_code for answer in answers], told, strict=True)) == [
            (200, False),
            (200, False),
            (409, True),
        ]

    async def test_rehearsal_needs_the_application(self, app: Starlette, tables: Tables) -> None:
        (letter,) = add_letters(tables, 1)
        async with logged_in(app) as client:
            response = await self.rehearse(client, letter)
            assert (response.status_code, "durable-agent dead-letters replay" in response.text) == (409, True)

    async def test_broken_application_is_told(self, rehearsing: Starlette, tables: Tables, tmp_path: Path) -> None:
        (letter,) = add_letters(tables, 1)
        (tmp_path / "shopping.py").write_text("raise RuntimeError('no licence')")
        async with logged_in(rehearsing) as client:
            response = await self.rehearse(client, letter)
            assert (response.status_code, "no licence" in response.text) == (409, True)


_BROKEN_TABLES = """
CREATE SCHEMA other;
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'durable' LOOP
        EXECUTE 'CREATE VIEW other.' || quote_ident(name) || ' AS SELECT * FROM durable.' || quote_ident(name)
            || ' WHERE 1 / (random() * 0)::integer = 1';
    END LOOP;
END $$
"""


class TestServices:
    async def test_one_login_is_for_all_services(self, bus: Bus, tables: Tables) -> None:
        add_letters(tables, 3)
        stock, away = Bus("stock", tables.url), Bus("away", "postgresql://nobody@127.0.0.1:1/none")
        app = Starlette(routes=[Mount("/console", console_app(bus, stock, away, tokens=TOKENS))])
        async with browser(app) as client:
            assert (await client.get("/")).headers["location"] == "/console/shop/services"
            assert (await client.get("/stock/")).headers["location"] == "/console/stock/login"
            assert (await submit(client, "/stock/login", "/stock/login", token=OPERATOR)).status_code == 303
            page = (await client.get("/shop/services")).text
            assert 'href="/console/stock/"' in page
            assert ("3 dead letters" in page, ">away<" in page) == (True, True)
            assert (await client.get("/stock/dead-letters")).status_code == 200
            assert (await client.get("/away/")).status_code == 503
            out = await submit(client, "/stock/circuits", "/stock/logout")
            assert out.status_code == 303
            assert (await client.get("/shop/")).status_code == 303
        for each in (stock, away):
            await each.runtime.stop()

    @pytest.mark.parametrize(
        ("path", "led_to"),
        [
            ("/login", "/console/shop/login"),
            ("/stock", "/console/stock/"),
            ("/handlers?q=1", "/console/shop/handlers"),
            ("/no/such page", "/console/shop/no/such%20page"),
            ("//elsewhere.example/a", "/console/shop//elsewhere.example/a"),
        ],
    )
    async def test_page_outside_every_service_is_looked_for_in_the_first_one(
        self, bus: Bus, tables: Tables, path: str, led_to: str
    ) -> None:
        stock = Bus("stock", tables.url)
        app = Starlette(routes=[Mount("/console", console_app(bus, stock, tokens=TOKENS))])
        async with browser(app) as client:
            assert (await client.get(f"https://durable.example/console{path}")).headers["location"] == led_to
            await submit(client, "/stock/login", "/stock/login", token=OPERATOR)
            page = await client.get("/no-such-page", follow_redirects=True)
            assert (page.status_code, "<title>" in page.text) == (404, True)
        await stock.runtime.stop()

    async def test_service_of_other_tables_leaves_the_others(self, bus: Bus, tables: Tables) -> None:
        add_letters(tables, 1)
        tables.execute(_BROKEN_TABLES)
        other = Bus("other", tables.url, db_schema="other")
        app = Starlette(routes=[Mount("/console", console_app(bus, other, tokens=TOKENS))])
        async with browser(app) as client:
            await submit(client, "/shop/login", "/shop/login", token=OPERATOR)
            page = await client.get("/shop/services")
            assert (page.status_code, ">away<" in page.text, "DivisionByZero" in page.text) == (200, True, True)
        tables.execute("DROP SCHEMA other CASCADE")
        await other.runtime.stop()

    async def test_routes_of_the_application_are_no_pages_of_the_console(self, bus: Bus) -> None:
        async def own(request: Request) -> Response:
            return Response("the application's own")

        names = ("overview", "login", "logout", "static", "letters", "groups", "circuits")
        routes = [Route(f"/own/{name}", own, name=name) for name in names]
        app = Starlette(routes=[*routes, Mount("/console", console_app(bus, tokens=TOKENS))])
        async with browser(app) as client:
            response = await client.get("/")
            assert response.headers["location"] == "/console/login"
            assert "/own/" not in (await client.get("/login")).text
            assert (await submit(client, "/login", "/login", token=OPERATOR)).headers["location"] == "/console/"
            assert "/own/" not in (await client.get("/")).text

    async def test_service_is_given_once(self, bus: Bus, tables: Tables) -> None:
        with pytest.raises(InvalidSetting, match="each service once"):
            console_app(bus, Bus("shop", tables.url), tokens=TOKENS)
