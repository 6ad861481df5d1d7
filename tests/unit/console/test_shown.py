"""Values as the pages show them: rates, addresses and cells."""

from __future__ import annotations

import pytest
from jinja2 import Environment

from durable.console.shown import a_minute, address, harmless, labelled


def test_rate_is_taken_over_a_minute_or_more() -> None:
    counts = [0] * 60
    counts[30] = 2  # within three seconds

    rates = a_minute(counts, 3)

    assert len(rates) == 60
    assert max(rates) == 2
    assert sum(rate > 0 for rate in rates) == 20


@pytest.mark.parametrize("minutes", [0.5, 1, 1.5, 7, 59.99, 60])
def test_rates_keep_the_number_of_messages(minutes: float) -> None:
    rates = a_minute(list(range(60)), minutes)

    assert sum(rates) / 60 * max(1, minutes) == pytest.approx(sum(range(60)), rel=1e-6)
    assert max(rates) <= sum(range(60))


def test_rates_of_an_hour_are_those_of_its_minutes() -> None:
    assert a_minute(list(range(60)), 60) == list(range(60))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("tcp://127.0.0.1:2302", 'tcp://127.0.0.1<span class="port">:2302</span>'),
        ("http://b:80/in?a=<b>", 'http://b<span class="port">:80</span>/in?a=&lt;b&gt;'),
        ("tcp://[::1]:9", 'tcp://[::1]<span class="port">:9</span>'),
        ("rabbitmq://orders", "rabbitmq://orders"),
        ("key:17", "key:17"),
        ("<script>", "&lt;script&gt;"),
    ],
)
def test_address_keeps_its_port_whole(given: str, shown: str) -> None:
    assert str(address(given)) == shown


def test_cells_carry_the_names_of_their_columns() -> None:
    head = '<table><thead><tr><th>Name</th><td class="meter"></td><th class="num">Oldest</th></tr></thead>'
    rows = (
        '<tbody><tr class="a"><td class="name">x</td><td></td><td>1</td></tr><tr><td colspan="2">y</td><td>2</td></tr>'
    )

    page = labelled(f"<p>{head}{rows}</tbody></table><table><tr><td>z</td></tr></table>")

    assert '<td data-label="Name" class="name">x</td><td data-label=""></td><td data-label="Oldest">1</td>' in page
    assert '<td colspan="2" data-label="Name">y</td><td data-label="Oldest">2</td>' in page
    assert "<td>z</td>" in page


@pytest.mark.parametrize("mark", ["\u202e", "\u2066", "\u200f", "\u061c", "\x1b", "\x00", "\x85"])
@pytest.mark.parametrize("template", ["{{ text }}", "{{ text | address }}", "{{ text | truncate(80) }}"])
def test_page_obeys_no_mark_in_a_text(mark: str, template: str) -> None:
    pages = Environment(autoescape=True, finalize=harmless)
    pages.filters["address"] = address

    assert pages.from_string(template).render(text=f"<a>{mark}:1") == "&lt;a&gt;\ufffd:1"


@pytest.mark.parametrize("text", ["a\tb\r\nc", "\u05d0\u05d1", "\N{FAMILY}\u200d\N{WOMAN}", "\u3000\xa0", 7, None])
def test_other_values_of_a_page_are_left_unchanged(text: object) -> None:
    assert harmless(text) == text
