"""The page of settings in the repository is what the class says."""

from __future__ import annotations

from scripts.docs import settings_page


def test_page_of_settings_is_current() -> None:
    assert settings_page.PAGE.read_text() == settings_page.render(), "run: python -m scripts.docs.settings_page"
