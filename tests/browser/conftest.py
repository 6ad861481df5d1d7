"""A browser and a busy console, for all tests of a module."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from durable.embedded import Embedded
from tests.browser.shop import TOKEN, Shop, served
from tests.support.tables import shared_tables

# Chromium asks nobody in the world, and fills no profile but its own.
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-features=LocalNetworkAccessChecks",  # which would keep other sites out before the console does
)


expect.set_options(timeout=60_000)  # a busy machine makes no page wrong


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the Chromium of this machine; scripts/chromium.sh installs it."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    assert found is not None, "Chromium is needed: run scripts/chromium.sh"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="module")
def shop(servers: Callable[[int], Embedded]) -> Iterator[Shop]:
    with shared_tables(servers(18)) as tables, served(tables) as shop:
        yield shop


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


class Complaints(list[str]):
    """What a browser complains of while it shows a page."""


@pytest.fixture
def complaints() -> Complaints:
    return Complaints()


@pytest.fixture
def open_page(browser: Browser, shop: Shop, complaints: Complaints) -> Iterator[Callable[..., Page]]:
    """`open_page(color_scheme="dark")` returns a page that is logged in, in a profile of its own."""
    contexts: list[Any] = []

    def open_(*, logged_in: bool = True, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(60_000)
        page: Page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        if logged_in:
            page.goto(f"{shop.address}/console/login")
            page.get_by_label("Token").fill(TOKEN)
            page.get_by_role("button", name="Log in").click()
            page.wait_for_url("**/console/")
        return page

    yield open_
    for context in contexts:
        context.close()
