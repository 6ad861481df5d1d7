"""Pictures of the console's pages for the documentation: `python -m tests.browser.screenshots FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Browser

from tests.browser.conftest import chromium
from tests.browser.shop import TOKEN, Shop, served
from tests.support.servers import EMBEDDED, shared_postgres
from tests.support.tables import shared_tables

ROOT = Path(__file__).parents[2]
PAGES = {
    "overview": "/",
    "handlers": "/handlers",
    "dead-letters": "/dead-letters",
    "letter": "/dead-letters/{letter}",
    "messages": "/messages?id={message}",
    "scheduled": "/scheduled",
    "circuits": "/circuits",
    "nodes": "/nodes",
    "database": "/database",
    "pipeline": "/pipeline",
    "actions": "/actions",
}
LOOKS = {
    "": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "-dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "-phone": {"viewport": {"width": 390, "height": 800}, "color_scheme": "light"},
}


def picture(browser: Browser, shop: Shop, folder: Path) -> None:
    """Save each page in each look."""
    for table in ("dead_letters", "failed_attempts"):  # whose machine it was is nobody's concern
        shop.tables.execute(f"UPDATE durable.{table} SET traceback = replace(traceback, %s, '')", f"{ROOT}/")
    named = {
        "letter": shop.tables.one("SELECT max(letter_id) FROM durable.dead_letters"),
        "message": shop.tables.one("SELECT id FROM durable.dead_letters ORDER BY letter_id DESC LIMIT 1"),
    }
    for suffix, look in LOOKS.items():
        context = browser.new_context(timezone_id="Europe/Vienna", locale="en-GB", **look)  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(f"{shop.address}/console/login")
        page.get_by_label("Token").fill(TOKEN)
        page.get_by_role("button", name="Log in").click()
        page.wait_for_url("**/console/")
        for name, path in PAGES.items():
            page.goto(f"{shop.address}/console{path.format(**named)}")
            page.screenshot(path=folder / f"console-{name}{suffix}.png", full_page=not suffix)
        context.close()


def main() -> None:
    (folder,) = (Path(each) for each in sys.argv[1:])
    with (
        shared_postgres(EMBEDDED) as server,
        shared_tables(server) as tables,
        served(tables, note="left on the doorstep", reason="stocktaking") as shop,
        chromium() as browser,
    ):
        picture(browser, shop, folder)


if __name__ == "__main__":
    main()
