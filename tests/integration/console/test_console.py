"""The console on a real Postgres: its door, its pages and its forms."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from durable import Bus, message
from durable.console import Person, Role, access, console_app
from durable.console.reading import Reading
from durable.envelope import new_id
from durable.errors import InvalidSetting
from durable.storage.rows import Letter
from durable.testing import eventually
from tests.integration.console.visiting import OPERATOR, TOKENS, VIEWER, add_letters, bearer, browser, logged_in, submit
from tests.support.tables import Tables

PAGES = [
    "/",
    "/dead-letters",
    "/dead-letters/all",
    "/messages",
    "/scheduled",
    "/circuits",
    "/nodes",
    "/database",
    "/pipeline",
    "/actions",
    "/handlers",
]
ACTIONS = [
    "/dead-letters/resolve",
    "/dead-letters/1/rehearse",
    "/scheduled/change",
    "/circuits/pause",
    "/circuits/resume",
    "/circuits/ping",
    "/runs/any/stop",
]
MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'>"
SCHEDULE = """
INSERT INTO durable.schedules (name, cron, tz, misfire, declaration, declared_by, due_at, occurrence_at)
VALUES ('nightly', '0 3 * * *', 'UTC', 'once', 'x', 7, now() + interval '1 h', now() + interval '1 h')
"""


@message("console.ordered")
class Ordered(msgspec.Struct):
    number: int


@pytest_asyncio.fixture
async def bus(tables: Tables) -> AsyncIterator[Bus]:
    bus = Bus("shop", tables.url)
    bus.handles(Ordered)(handle)
    yield bus
    await bus.runtime.stop()


async def handle(ordered: Ordered) -> None: ...


@pytest.fixture
def app(bus: Bus) -> Starlette:
    return Starlette(routes=[Mount("/console", console_app(bus, tokens=TOKENS))])


class TestComingIn:
    @pytest.mark.parametrize("page", PAGES)
    async def test_page_asks_a_stranger_to_log_in(self, app: Starlette, page: str) -> None:
        async with browser(app) as client:
            response = await client.get(page)
            assert (response.status_code, response.headers["location"]) == (303, "/console/login")
        async with browser(app, accept="*/*", authorization="Bearer wrong") as client:
            assert (await client.get(page)).status_code == 401

    async def test_login_gives_a_cookie_for_this_site_alone(self, app: Starlette) -> None:
        async with browser(app) as client:
            response = await submit(client, "/login", "/login", token=OPERATOR)
            (cookie,) = [
                each for each in response.headers.get_list("set-cookie") if each.startswith("durable-console=")
            ]
            assert OPERATOR not in cookie
            for attribute in ("HttpOnly", "SameSite=strict", "Secure", "Path=/console"):
                assert attribute in cookie
            assert "olga" in (await client.get("/")).text
            assert (await submit(client, "/", "/logout")).headers["location"] == "/console/login"
            assert (await client.get("/")).status_code == 303

    @pytest.mark.parametrize("cookie", ["", "olga", "olga|9999999999|00", "olga|x|y", "vic|9999999999|{mac}", "|||"])
    async def test_forged_cookie_opens_nothing(self, app: Starlette, cookie: str) -> None:
        async with logged_in(app) as client:
            mac = client.cookies["durable-console"].rpartition("|")[2]
        async with browser(app, cookie="durable-console=" + cookie.format(mac=mac)) as stranger:
            assert (await stranger.get("/")).status_code == 303

    async def test_wrong_tokens_close_the_login_for_their_address_alone(self, app: Starlette) -> None:
        async with browser(app) as client:
            tried = [(await submit(client, "/login", "/login", token=f"guess {n}")).status_code for n in range(11)]
            assert tried == [401] * 10 + [429]
            assert (await submit(client, "/login", "/login", token=OPERATOR)).status_code == 429
        async with bearer(app, "another guess") as client:
            assert (await client.get("/")).status_code == 303
        async with bearer(app, OPERATOR) as client:
            assert (await client.get("/")).status_code == 200
        async with browser(app, address="10.0.0.2") as client:
            assert (await submit(client, "/login", "/login", token=OPERATOR)).status_code == 303

    async def test_failures_of_few_addresses_are_remembered(
        self, app: Starlette, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(access, "_MOST_ADDRESSES", 2)
        for host in (1, 2, 3):
            async with browser(app, address=f"10.0.0.{host}") as client:
                tried = [(await submit(client, "/login", "/login", token="guess")).status_code for _ in range(11)]
                assert tried[-1] == 429
        for host, status in ((1, 303), (2, 429), (3, 429)):
            async with browser(app, address=f"10.0.0.{host}") as client:
                assert (await submit(client, "/login", "/login", token=OPERATOR)).status_code == status

    @pytest.mark.parametrize(
        ("url", "is_secure"),
        [
            ("https://shop.example", True),
            ("http://shop.example", True),
            ("https://localhost", True),
            ("http://127.0.0.1:8089", False),
            ("http://localhost:8089", False),
            ("http://[::1]:8089", False),
        ],
    )
    async def test_cookie_travels_in_plain_text_on_this_machine_alone(
        self, app: Starlette, url: str, is_secure: bool
    ) -> None:
        async with browser(app) as client:
            client.base_url = httpx.URL(f"{url}/console")
            response = await client.get("/login")
            assert ("Secure" in response.headers["set-cookie"]) == is_secure

    async def test_application_decides_by_its_own_check(self, bus: Bus) -> None:
        async def by_header(request: Request) -> Person | None:
            return Person("app", Role.VIEWER) if request.headers.get("x-user") == "known" else None

        app = Starlette(routes=[Mount("/console", console_app(bus, authorize=by_header))])
        async with browser(app) as client:
            assert (await client.get("/")).status_code == 401
            assert (await client.get("/login")).status_code == 404
        async with browser(app, **{"x-user": "known"}) as client:
            assert "app · viewer" in (await client.get("/")).text

    @pytest.mark.parametrize("given", [{}, {"tokens": {}}, {"tokens": {"short": Person("a", Role.VIEWER)}}])
    async def test_console_without_a_door_is_refused(self, bus: Bus, given: dict[str, Any]) -> None:
        with pytest.raises(InvalidSetting, match="console: "):
            console_app(bus, **given)


class TestForms:
    @pytest.mark.parametrize("action", ACTIONS)
    async def test_viewer_does_nothing(self, app: Starlette, tables: Tables, action: str) -> None:
        async with logged_in(app, VIEWER) as client:
            response = await submit(client, "/", action, kind="handler", key="console.ordered", reason="r", letter="1")
            assert response.status_code == 403
            assert "vic is a viewer" in response.text
        assert tables.count("circuits") == 0

    @pytest.mark.parametrize("action", [*ACTIONS, "/login", "/logout"])
    @pytest.mark.parametrize("secret", [None, "", "x" * 43])
    async def test_form_of_another_site_does_nothing(self, app: Starlette, action: str, secret: str | None) -> None:
        async with logged_in(app) as client:
            fields = {"kind": "handler", "key": "console.ordered", "reason": "r"}
            response = await client.post(action, data=fields if secret is None else fields | {"form": secret})
            assert response.status_code == 403

    @pytest.mark.parametrize("header", [("origin", "https://evil.example"), ("sec-fetch-site", "cross-site")])
    async def test_form_sent_by_another_site_with_our_secret_does_nothing(
        self, app: Starlette, header: tuple[str, str]
    ) -> None:
        async with logged_in(app) as client:
            client.headers[header[0]] = header[1]
            assert (await submit(client, "/", "/logout")).status_code == 403

    @pytest.mark.parametrize("action", ACTIONS)
    async def test_action_is_no_link(self, app: Starlette, action: str) -> None:
        async with logged_in(app) as client:
            assert (await client.get(action)).status_code == 405

    @pytest.mark.parametrize(
        ("action", "fields"),
        [
            ("/circuits/pause", {}),
            ("/circuits/pause", {"kind": "moon", "key": "a", "reason": "r"}),
            ("/circuits/pause", {"kind": "schedule", "key": "a", "reason": "r"}),
            ("/circuits/pause", {"kind": "handler", "key": " ", "reason": "r"}),
            ("/circuits/pause", {"kind": "handler", "key": "console.ordered"}),
            ("/circuits/pause", {"kind": "handler", "key": "console.orderd", "reason": "r"}),
            ("/circuits/pause", {"kind": "destination", "key": "tcp://nowhere.example:1", "reason": "r"}),
            ("/circuits/pause", {"kind": "destination", "key": "no address", "reason": "r"}),
            ("/circuits/pause", {"kind": "handler", "key": "console.ordered", "reason": "r", "for": "soon"}),
            ("/circuits/pause", {"kind": "handler", "key": "console.ordered", "reason": "r", "for": "0s"}),
            ("/circuits/pause", {"kind": "handler", "key": "a" * 501, "reason": "r"}),
            ("/circuits/pause", {"kind": "handler", "key": "a\0b", "reason": "r"}),
            ("/dead-letters/resolve", {"letter": "one", "verb": "replay"}),
            ("/dead-letters/resolve", {"letter": "9" * 30, "verb": "replay"}),
            ("/dead-letters/resolve", {"letter": "1", "verb": "discard"}),
            ("/dead-letters/resolve", {"letter": "1", "verb": "shred", "reason": "r"}),
            ("/dead-letters/resolve", {"verb": "replay"}),
            ("/scheduled/change", {"message": "17", "verb": "cancel"}),
            ("/scheduled/change", {"message": str(new_id()), "verb": "shred"}),
            ("/scheduled/change", {"message": str(new_id())}),
            ("/scheduled/change", {"verb": "run-now"}),
        ],
    )
    async def test_bad_field_is_refused_with_its_name(
        self, app: Starlette, tables: Tables, action: str, fields: dict[str, str]
    ) -> None:
        async with logged_in(app) as client:
            response = await submit(client, "/", action, **fields)
            assert response.status_code == 422
            assert "<h1>422</h1>" in response.text
        assert tables.count("circuits") == 0

    async def test_body_of_another_kind_than_a_form_is_refused(self, app: Starlette) -> None:
        async with logged_in(app) as client:
            assert (await client.post("/logout", json={})).status_code == 415
            kind = {"content-type": "application/x-www-form-urlencoded"}
            assert (await client.post("/logout", content=b"a" * 700_000, headers=kind)).status_code == 413
            assert (await client.post("/logout", content=b"a=%ff&b=\xff", headers=kind)).status_code == 422
            assert (await client.post("/logout", content=b"&".join([b"a=b"] * 60), headers=kind)).status_code == 422


class TestPages:
    @pytest.mark.parametrize("page", [*PAGES, "/login", "/dead-letters/1", "/no-such-page", "/static/console.css"])
    async def test_answer_allows_no_foreign_scripts_and_no_frames(self, app: Starlette, page: str) -> None:
        async with bearer(app, OPERATOR) as client:
            response = await client.get(page)
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy
            assert response.headers["x-content-type-options"] == "nosniff"
            assert "<style" not in response.text
            assert not re.search(r"<script(?! src=)|\son\w+=|\sstyle=|https?://", response.text)

    async def test_overview_lists_the_work_for_operators(self, app: Starlette, tables: Tables) -> None:
        async with bearer(app, VIEWER) as client:
            assert "All is well" in (await client.get("/")).text
            add_letters(tables, 3)
            page = (await client.get("/")).text
            assert "1 thing needs you" in page
            assert "3 dead letters wait to be replayed or discarded" in page
            tables.execute(
                "INSERT INTO durable.circuits (kind, key, reason, until, actor, probing) VALUES"
                " ('destination', 'tcp://b.example:1', 'refused', now() + '1 min', 'node 1', true)"
            )
            page = (await client.get("/")).text
            assert "2 things need you" in page
            assert "destination tcp://b.example:1 has been stopped by failures" in page
            part = (await client.get("/", headers={"hx-request": "true"})).text
            assert "2 things need you" in part
            assert "<html" not in part

    async def test_markup_in_messages_is_shown_as_text(self, app: Starlette, tables: Tables) -> None:
        broken = Letter.because(MARKUP, MARKUP)
        (letter,) = add_letters(tables, 1, broken, message_type="console.<b>", field=MARKUP)
        tables.execute(
            "UPDATE durable.dead_letters SET headers = jsonb_build_object(%s::text, %s::text)", MARKUP, MARKUP
        )
        tables.execute(
            "INSERT INTO durable.circuits (kind, key, reason, actor, probing) VALUES ('handler', %s, %s, %s, false)",
            *[MARKUP] * 3,
        )
        async with bearer(app, OPERATOR) as client:
            texts = [(await client.get(page)).text for page in (*PAGES, f"/dead-letters/{letter}")]
            for text in texts:
                assert "<img" not in text
                assert "<script>" not in text
                assert "console.<b>" not in text
            assert "&lt;script&gt;alert(2)" in texts[-1]

    async def test_viewer_sees_no_contents(self, app: Starlette, tables: Tables) -> None:
        """Errors quote what they fail on: neither they nor the reasons of circuits are shown."""
        quoted = Letter("ValueError", "the salary", "raise ValueError(salary)", "f")
        (letter,) = add_letters(tables, 1, quoted, field="salary")
        tables.execute("UPDATE durable.dead_letters SET headers = jsonb_build_object('salary', 'salary')")
        tables.execute(
            "INSERT INTO durable.failed_attempts (id, endpoint, number, failed_at, node_id, exception_type, reason,"
            " traceback, letter_id) VALUES (gen_random_uuid(), 'a', 1, now(), 1, 'E', 'the salary', 'salary', %s)",
            letter,
        )
        for kind, actor, probing in [
            ("handler", "node 1", True),
            ("key", "node 1", False),
            ("handler", "x", True),
            ("handler", "shop, before its start", False),
            ("handler", "shop, in its code", False),
        ]:
            tables.execute(
                "INSERT INTO durable.circuits (kind, key, reason, actor, probing)"
                " VALUES (%s, %s, 'the salary', %s, %s)",
                *[kind, f"circuit {actor} {probing}", actor, probing],
            )
        tables.execute(SCHEDULE)
        tables.execute(
            "UPDATE durable.schedules SET error = 'the salary', due_at = now(), failing_since = now() - interval '1 h'"
        )
        found = tables.one("SELECT id FROM durable.dead_letters")
        pages = [*PAGES, f"/dead-letters/{letter}", f"/messages?id={found}"]
        async with bearer(app, OPERATOR) as client:
            told = [page for page in pages if "salary" in (await client.get(page)).text]
            assert told == [
                page for page in pages if page not in ("/nodes", "/messages", "/actions", "/database", "/pipeline")
            ]
        async with bearer(app, VIEWER) as client:
            for page in pages:
                response = await client.get(page)
                assert response.status_code == 200
                assert "salary" not in response.text

    async def test_chosen_letters_come_in_pages(self, app: Starlette, tables: Tables) -> None:
        every = add_letters(tables, 60)
        add_letters(tables, 1, message_type="console.other")
        async with bearer(app, VIEWER) as client:
            seen: list[int] = []
            url = "/dead-letters/all?message_type=letters.placed"
            while url:
                text = (await client.get(url)).text
                seen += map(int, re.findall(r'/console/dead-letters/(\d+)"', text))
                found = re.search(r'rel="next" href="([^"]+)"', text)
                url = "/dead-letters/all" + found[1].replace("&amp;", "&") if found else ""
            assert seen == every[::-1]

    async def test_message_is_found_by_its_id_in_each_place(self, app: Starlette, bus: Bus, tables: Tables) -> None:
        (letter,) = add_letters(tables, 1)
        dead = tables.one("SELECT id FROM durable.dead_letters")
        async with bus.unit_of_work() as uow:
            waiting = uow.send(Ordered(1))
        async with bearer(app, VIEWER) as client:
            page = (await client.get(f"/messages?id={waiting}")).text
            assert ("waiting" in page, "inbox of local" in page) == (True, True)
            page = (await client.get(f"/messages?id=%20{dead}%20")).text
            assert (page.count(">dead-lettered<"), f"/console/dead-letters/{letter}" in page) == (2, True), (
                "it, and its conversation"
            )
            assert "knows no message" in (await client.get(f"/messages?id={new_id()}")).text
            for odd in ("17", "%00", "x" * 9_000):
                assert (await client.get(f"/messages?id={odd}")).status_code == 422

    @pytest.mark.parametrize("query", ["before=x", "before=" + "9" * 40, "before=%00"])
    async def test_odd_query_is_no_failure(self, app: Starlette, query: str) -> None:
        async with bearer(app, VIEWER) as client:
            assert (await client.get(f"/dead-letters/{'9' * 30}")).status_code == 404
            assert (await client.get(f"/dead-letters/all?{query}")).status_code == 200
            assert (await client.get("/dead-letters/all?message_type=%00")).status_code == 422

    async def test_outage_of_the_database_is_a_page_of_its_own(self) -> None:
        bus = Bus("shop", "postgresql://nobody@127.0.0.1:9/none")
        async with bearer(Starlette(routes=[Mount("/console", console_app(bus, tokens=TOKENS))]), OPERATOR) as client:
            for page in [*(page for page in PAGES if page != "/messages"), f"/messages?id={new_id()}"]:
                response = await client.get(page)
                assert response.status_code == 503
                assert "The database does not answer" in response.text
        await bus.runtime.stop()


class TestFaults:
    async def test_fault_of_the_console_shows_no_detail(self, app: Starlette, monkeypatch: pytest.MonkeyPatch) -> None:
        async def fail(*_: object) -> None:
            raise RuntimeError("the password is 1234")

        monkeypatch.setattr(Reading, "groups", fail)
        async with bearer(app, OPERATOR) as client:
            response = await client.get("/dead-letters")
            assert (response.status_code, "1234" in response.text) == (500, False)
            assert "frame-ancestors" in response.headers["content-security-policy"]


class TestActions:
    async def test_paused_handler_is_stopped_until_a_resume(self, app: Starlette, tables: Tables) -> None:
        async with logged_in(app) as client:
            fields = {"kind": "handler", "key": "console.ordered", "reason": "new prices", "for": "2h"}
            assert (await submit(client, "/circuits", "/circuits/pause", **fields)).status_code == 303
            (row,) = tables.rows("SELECT kind, key, reason, actor, until > now() + '110 min' FROM durable.circuits")
            assert row == ("handler", "console.ordered", "new prices", "console: olga", True)
            assert "new prices" in (await client.get("/circuits")).text
            response = await submit(client, "/circuits", "/circuits/resume", kind="handler", key="console.ordered")
            assert response.status_code == 303
        assert tables.count("circuits") == 0
        told = (
            "SELECT verb, actor, target, reason, changed, before IS NULL, after IS NULL FROM durable.actions ORDER BY 1"
        )
        assert tables.rows(told) == [
            ("pause", "console: olga", "handler console.ordered", "new prices", 1, False, False),
            ("resume", "console: olga", "handler console.ordered", None, 1, False, True),
        ]

    async def test_replayed_group_waits_again_and_names_its_actor(self, app: Starlette, tables: Tables) -> None:
        add_letters(tables, 250)
        add_letters(tables, 1, Letter.because("another cause", "other"))
        cause = tables.one("SELECT fingerprint FROM durable.dead_letters LIMIT 1")
        page = f"/dead-letters/all?fingerprint={cause}"
        async with logged_in(app) as client:
            response = await submit(client, page, "/dead-letters/resolve", verb="replay")
            run = response.headers["location"].removeprefix("/console")

            async def text() -> str:
                return (await client.get(run)).text

            while "every 1s" in (told := await text()):
                assert "Stop after this batch" in told
                await asyncio.sleep(0.05)
            assert "250 of 250 replayed: done" in await text()
        assert tables.count("incoming_envelopes") == 250
        resolved = "SELECT resolution, resolved_by, count(*)::int FROM durable.dead_letters GROUP BY 1, 2 ORDER BY 3"
        assert tables.rows(resolved) == [(None, None, 1), ("replayed", "console: olga", 250)]

    async def test_conversation_names_the_resolution_beside_the_error(self, app: Starlette, tables: Tables) -> None:
        first, second = add_letters(tables, 2)
        tables.execute(
            "UPDATE durable.dead_letters SET correlation_id = '01a21cab-bba7-736d-9019-22513fafa7ae'::uuid,"
            " resolution = CASE letter_id WHEN %s THEN 'replayed' END,"
            " resolved_at = CASE letter_id WHEN %s THEN now() END,"
            " resolved_by = CASE letter_id WHEN %s THEN 'olga' END",
            first, first, first,
        )  # fmt: skip
        error = tables.one("SELECT exception_type FROM durable.dead_letters LIMIT 1")
        async with bearer(app, VIEWER) as client:
            assert f">replayed ({error})</td>" in (await client.get(f"/dead-letters/{second}")).text
            assert f">unresolved ({error})</td>" in (await client.get(f"/dead-letters/{first}")).text

    async def test_ping_is_offered_for_latched_destinations_alone(self, app: Starlette, tables: Tables) -> None:
        insert = (
            "INSERT INTO durable.circuits (kind, key, reason, actor, probing)"
            " VALUES ('destination', %s, 'refused', 'node 1', %s)"
        )
        tables.execute(insert, "tcp://b.example:1", False)
        async with bearer(app, OPERATOR) as client:
            assert "Ping now" not in (await client.get("/circuits")).text
            tables.execute(insert, "tcp://b.example:2", True)
            assert (await client.get("/circuits")).text.count("Ping now") == 1

    async def test_discarded_letter_keeps_the_reason(self, app: Starlette, tables: Tables) -> None:
        letter, _ = add_letters(tables, 2)
        page = f"/dead-letters/{letter}"
        async with logged_in(app) as client:
            fields = {"letter": str(letter), "verb": "discard", "reason": "a test order"}
            assert (await submit(client, page, "/dead-letters/resolve", **fields)).status_code == 303
            resolved = "FROM durable.dead_letters WHERE resolved_at IS NOT NULL"
            told = f"SELECT letter_id, resolution, resolution_reason {resolved}"
            await eventually(lambda: tables.rows(told) == [(letter, "discarded", "a test order")], within=20, what="it")
            assert "a test order" in (await client.get(page)).text

    async def test_delayed_message_is_cancelled_or_run_now(self, app: Starlette, bus: Bus, tables: Tables) -> None:
        async with bus.unit_of_work() as uow:
            cancelled, hastened = uow.send(Ordered(1), delay=3600), uow.send(Ordered(2), delay=3600)
        async with logged_in(app) as client:
            assert str(cancelled) in (await client.get("/scheduled")).text
            fields = {"message": str(cancelled), "verb": "cancel"}
            assert (await submit(client, "/scheduled", "/scheduled/change", **fields)).status_code == 303
            again = await submit(client, "/scheduled", "/scheduled/change", **fields)
            assert (again.status_code, "does not wait" in again.text) == (409, True)
            fields = {"message": str(hastened), "verb": "run-now"}
            assert (await submit(client, "/scheduled", "/scheduled/change", **fields)).status_code == 303
            found = await client.get(f"/messages?id={cancelled}")
            assert ("cancelled" in found.text, "console: olga" in found.text) == (True, True)
        assert tables.rows("SELECT id FROM durable.incoming_envelopes WHERE execution_time IS NULL") == [hastened]

    async def test_schedule_is_paused_resumed_and_run_now(self, app: Starlette, tables: Tables) -> None:
        tables.execute("INSERT INTO durable.nodes (node_id, service, description, version) VALUES (7, 'shop', '', '')")
        tables.execute(SCHEDULE)

        async def change(verb: str, schedule: str = "nightly") -> int:
            return (await submit(client, "/scheduled", "/scheduled/change", schedule=schedule, verb=verb)).status_code

        async with logged_in(app) as client:
            assert "nightly" in (await client.get("/scheduled")).text
            assert await change("pause") == 303
            assert tables.rows("SELECT kind, key, actor FROM durable.circuits") == [
                ("schedule", "nightly", "console: olga")
            ]
            assert "Resume" in (await client.get("/scheduled")).text
            assert await change("resume") == 303
            assert await change("run-now") == 303
            assert tables.rows("SELECT asked_at IS NOT NULL, changed_by FROM durable.schedules") == [
                (True, "console: olga")
            ]
            assert [await change(verb, "weekly") for verb in ("pause", "resume", "run-now")] == [409, 409, 409]
            assert await change("cancel") == 422
        assert tables.rows("SELECT until <= now() FROM durable.circuits") == [True]

    async def test_unknown_run_is_not_found(self, app: Starlette) -> None:
        async with bearer(app, OPERATOR) as client:
            assert (await client.get("/runs/none")).status_code == 404
