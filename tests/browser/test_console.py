"""The console in a real browser: what people see, do by keyboard, and are kept from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from tests.browser.conftest import Complaints
from tests.browser.shop import TOKEN, Shop

pytestmark = pytest.mark.timeout(400)  # a service and a browser are started

Open = Callable[..., Page]
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def paths(page: Page) -> list[str]:
    """The pages that the navigation leads to, and one of each kind that lies below them."""
    found = [str(link.get_attribute("href")) for link in page.get_by_role("navigation").get_by_role("link").all()]
    page.goto(page.url.partition("/console")[0] + "/console/dead-letters")
    group = str(page.locator("tbody a").first.get_attribute("href"))
    page.goto(page.url.partition("/console")[0] + group)
    letter = str(page.locator("tbody a").first.get_attribute("href"))
    message = page.goto(page.url.partition("/console")[0] + letter) and page.locator("dd code").first.inner_text()
    return [*found, group, letter, f"/console/messages?id={message}", "/console/dead-letters/999999"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_pages_are_for_everybody(open_page: Open, shop: Shop, scheme: str, size: dict[str, int]) -> None:
    page = open_page(color_scheme=scheme, viewport=size, bypass_csp=True)  # for the script of axe alone
    axe, found = Axe(), dict[str, object]()
    for path in paths(page):
        page.goto(shop.address + path)
        violations = axe.run(page).response["violations"]
        if violations:
            found[path] = [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in violations]
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > size["width"]:
            found[f"width of {path}"] = width
    assert found == {}


@pytest.mark.parametrize("width", [1300, 1000])
def test_service_and_logout_share_the_first_line(open_page: Open, width: int) -> None:
    page = open_page(viewport={"width": width, "height": 600})
    button = page.get_by_role("button", name="Log out").bounding_box()
    service = page.locator("header strong").bounding_box()
    assert button is not None
    assert service is not None
    assert button["y"] < service["y"] < button["y"] + button["height"]


def test_navigation_fits_one_line_beside_a_link_to_services(open_page: Open) -> None:
    page = open_page(viewport={"width": 1280, "height": 600})
    page.evaluate("""() => {
        const link = document.querySelector("nav a");
        const services = link.cloneNode(); services.textContent = "Services"; link.before(services);
        document.querySelector("header strong").textContent = "warehouse";
    }""")
    tops = page.evaluate("[...document.querySelectorAll('nav a')].map((each) => each.getBoundingClientRect().top)")
    assert len(tops) == 11
    assert len(set(tops)) == 1


def test_phone_shows_rows_as_cards_with_the_names_of_columns(open_page: Open, shop: Shop) -> None:
    page = open_page(viewport=PHONE)
    for path in paths(page):
        page.goto(shop.address + path)
        hidden = page.evaluate(
            "[...document.querySelectorAll('.wide')].filter((each) => each.scrollWidth > each.clientWidth).length"
        )
        assert hidden == 0, path
    page.goto(f"{shop.address}/console/circuits")
    cell = page.locator("tbody tr").first.locator("td").nth(1)
    assert cell.evaluate("(each) => getComputedStyle(each, '::before').content") == '"State"'
    assert cell.evaluate("(each) => getComputedStyle(each).display") == "block"
    port = page.locator(".port").first
    assert port.inner_text() == ":1"
    assert port.evaluate("(each) => getComputedStyle(each).whiteSpace") == "nowrap"


def test_buttons_of_a_circuit_stand_apart_on_one_line_each(open_page: Open, shop: Shop) -> None:
    page = open_page(viewport=DESKTOP)
    page.goto(f"{shop.address}/console/circuits")
    row = page.locator("tbody tr").filter(has_text="latched")
    resume, ping = (row.get_by_role("button", name=name).bounding_box() for name in ("Resume", "Ping now"))
    assert resume is not None
    assert ping is not None
    assert ping["height"] == pytest.approx(resume["height"], abs=2)
    assert ping["y"] >= resume["y"] + resume["height"] + 3 or ping["x"] >= resume["x"] + resume["width"] + 3


def test_data_runs_no_script_and_pages_obey_their_policy(open_page: Open, shop: Shop, complaints: Complaints) -> None:
    page = open_page()
    for path in paths(page):
        page.goto(shop.address + path)
        assert "owned" not in page.title(), path
        assert page.locator("img").count() == 0, path
        assert "\u202e" not in page.inner_text("body"), path
    # The browser tells of the missing letter itself; nothing else is told of.
    assert [each for each in complaints if "404" not in each] == []


def test_group_is_replayed_by_keyboard_alone(open_page: Open, shop: Shop) -> None:
    page = open_page(logged_in=False)
    page.goto(f"{shop.address}/console/")
    page.keyboard.type(TOKEN)  # the login has the focus
    page.keyboard.press("Enter")
    page.wait_for_url("**/console/")
    expect(page.get_by_role("heading", level=1)).to_contain_text("need you")

    def go_to(role: str, name: str) -> None:
        wanted = page.get_by_role(role, name=name).first  # type: ignore[arg-type]
        for _ in range(60):
            if wanted.evaluate("each => each === document.activeElement"):
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{role} {name} cannot be reached")

    go_to("link", "Dead letters")
    page.keyboard.press("Enter")
    go_to(
        "link", "builtins.ValueError" if page.get_by_role("link", name="builtins.ValueError").count() else "ValueError"
    )
    page.keyboard.press("Enter")
    go_to("button", "Replay")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_contain_text("replayed: done")


def test_overview_without_news_says_so(open_page: Open, shop: Shop) -> None:
    page = open_page()
    page.goto(f"{shop.address}/console/")
    expect(page.get_by_role("heading", level=1)).to_contain_text("need you")
    expect(page.get_by_text("This page does not follow any more")).to_be_hidden()
    page.context.set_offline(True)
    expect(page.get_by_text("This page does not follow any more")).to_be_visible()
    page.context.set_offline(False)
    expect(page.get_by_text("This page does not follow any more")).to_be_hidden()


def test_text_selected_elsewhere_holds_no_news_up(open_page: Open, shop: Shop) -> None:
    page = open_page()
    page.goto(f"{shop.address}/console/")
    page.locator("footer").select_text()
    shown = page.locator("#live .asof time").last
    before = shown.get_attribute("datetime")
    expect(shown).not_to_have_attribute("datetime", before or "")
    page.locator("#live h1").first.select_text()
    expect(page.get_by_text("This page waits while you select text")).to_be_visible()


def test_discard_asks_for_a_reason(open_page: Open, shop: Shop) -> None:
    page = open_page()
    page.goto(f"{shop.address}/console/dead-letters/all?exception_type=LookupError")
    page.locator("tbody a").first.click()
    page.get_by_role("button", name="Discard").click()
    expect(page.get_by_text("go back and give one")).to_be_visible()
    page.go_back()
    page.get_by_label("Reason").first.fill("a test order")
    page.get_by_role("button", name="Discard").click()
    expect(page.get_by_role("status")).to_contain_text("discarded: done")


def test_pause_is_seen_on_an_open_overview_and_ended(open_page: Open, shop: Shop) -> None:
    watching, page = open_page(), open_page()
    page.goto(f"{shop.address}/console/circuits")
    page.get_by_label("What").select_option("handler")
    page.get_by_label("Name").fill("parcels.order-placed")
    page.get_by_label("Reason").fill("stocktaking")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("row", name="stocktaking")).to_be_visible()
    expect(watching.get_by_text("stocktaking")).to_be_visible(timeout=15_000)  # nobody has touched that page
    page.get_by_role("row", name="stocktaking").get_by_role("button", name="Resume").click()
    expect(watching.get_by_text("stocktaking")).to_have_count(0)
    page.goto(f"{shop.address}/console/actions")
    expect(page.get_by_role("row", name="stocktaking").first).to_be_visible()


def test_pages_work_without_scripts(open_page: Open, shop: Shop) -> None:
    page = open_page(java_script_enabled=False)
    page.goto(f"{shop.address}/console/scheduled")
    page.get_by_role("button", name="Run now nightly report").click()
    expect(page.get_by_role("heading", name="Scheduled")).to_be_visible()
    page.goto(f"{shop.address}/console/actions?verb=run-now")
    expect(page.get_by_role("row", name="nightly report").first).to_be_visible()


@pytest.mark.parametrize(("zone", "hours"), [("Asia/Tokyo", 9), ("America/Los_Angeles", -8)])
def test_times_are_those_of_the_reader(open_page: Open, shop: Shop, zone: str, hours: int) -> None:
    page = open_page(timezone_id=zone, locale="en-GB")
    page.goto(f"{shop.address}/console/nodes")
    time = page.locator("time").first
    utc, shown = str(time.get_attribute("title")), time.inner_text()
    here = page.evaluate(
        "zone => new Intl.DateTimeFormat('en-GB', {dateStyle: 'medium', timeStyle: 'medium', timeZone: zone})"
        ".format(new Date(document.querySelector('time').dateTime))",
        zone,
    )
    assert (shown, utc.endswith(" UTC")) == (here, True)
    assert (int(shown.split()[-1][:2]) - int(utc[11:13])) % 24 in (hours % 24, (hours + 1) % 24)  # and in summer


def test_other_sites_frame_no_page_and_send_no_form(open_page: Open, shop: Shop) -> None:
    page = open_page()

    def answer(route: Route) -> None:
        route.fulfill(
            content_type="text/html",
            body=f'<iframe src="{shop.address}/console/"></iframe>'
            f'<form method="post" action="{shop.address}/console/circuits/pause">'
            '<input name="kind" value="handler"><input name="key" value="parcels.order-placed">'
            '<input name="reason" value="from elsewhere"><button>Win</button></form>',
        )

    page.route("http://localhost:8123/**", answer)
    page.goto("http://localhost:8123/")
    assert page.frames[1].get_by_role("banner").count() == 0  # the load of the page has waited for that of the frame
    page.get_by_role("button", name="Win").click()
    expect(page.get_by_text("Log in").or_(page.get_by_text("another site")).first).to_be_visible()
    assert shop.tables.rows("SELECT 1 FROM durable.circuits WHERE reason = 'from elsewhere'") == []


def test_login_leads_to_no_other_site(open_page: Open, shop: Shop) -> None:
    page = open_page(logged_in=False)
    page.goto(f"{shop.address}/console/login?next=http://elsewhere.example/&redirect=//elsewhere.example")
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url("**/console/")
    assert page.url == f"{shop.address}/console/"
