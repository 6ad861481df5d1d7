"""Damage to bytes and text that were good: what a fault or an attacker on the way makes of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

_BOUNDARIES = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1]
_TOKENS = [
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\x00", b" ", b"\t", b":", b",", b";", b"%", b'"', b"\\", b"0\r\n\r\n",
    b"\xc0", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91" * 600,
    b"[" * 600, b'{"a":' * 600, b"NaN", b"-1e999", b"9" * 5_000, b"\xed\xa0\x80", b"\xff\xfe", b"\\ud800", b"\x1b[2J",
]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes], most: int = 4) -> bytes:
    """These bytes after up to `most` faults; often they are left whole."""
    data = draw(whole)
    for _ in range(draw(st.integers(0, most))):
        fault = draw(st.sampled_from(_FAULTS))
        data = fault(draw, data)
    return data


def _place(draw: st.DrawFn, data: bytes) -> int:
    return draw(st.integers(0, len(data)))


def _flip(draw: st.DrawFn, data: bytes) -> bytes:
    at = _place(draw, data)
    return data[:at] + bytes(byte ^ draw(st.integers(1, 255)) for byte in data[at : at + 1]) + data[at + 1 :]


def _cut(draw: st.DrawFn, data: bytes) -> bytes:
    return data[: _place(draw, data)]


def _leave_out(draw: st.DrawFn, data: bytes) -> bytes:
    at = _place(draw, data)
    return data[:at] + data[at + draw(st.integers(1, 8)) :]


def _repeat(draw: st.DrawFn, data: bytes) -> bytes:
    at, size = _place(draw, data), draw(st.integers(1, 64))
    return data[:at] + data[at : at + size] * draw(st.integers(2, 4)) + data[at + size :]


def _insert(draw: st.DrawFn, data: bytes) -> bytes:
    at = _place(draw, data)
    return data[:at] + draw(st.sampled_from(_TOKENS) | st.binary(min_size=1, max_size=8)) + data[at:]


def _overwrite(draw: st.DrawFn, data: bytes) -> bytes:
    at, number = _place(draw, data), draw(st.sampled_from(_BOUNDARIES))
    written = struct.pack("!I", number)[-draw(st.sampled_from([1, 2, 4])) :]
    return data[:at] + written + data[at + len(written) :]


_FAULTS: list[Callable[[Any, bytes], bytes]] = [_flip, _cut, _leave_out, _repeat, _insert, _overwrite]

scalars = st.text(st.characters(codec="utf-8"), max_size=20)
hostile_text = st.one_of(
    scalars,
    st.text(max_size=20),  # with lone surrogates
    st.sampled_from(
        [
            "",
            " ",
            "\x00",
            "a\r\nb: c",
            "\x1b[2J",
            "\ud800",
            "é" * 200,
            "a" * 1_001,
            "os.system",
            "\u0663",
            "\uff11",
            "../..",
            "%2F",
            "%23",
            "%25",
            "%0A",
            "%00",
            "%ff",
            "?",
            "#",
            "@",
            "\n",
            "\t",
            "\udcff",
            "\u2028",
        ]
    ),
)


@st.composite
def damaged_text(draw: st.DrawFn, whole: st.SearchStrategy[str], most: int = 3) -> str:
    """This text, with parts of it repeated, left out, or other characters in their places."""
    text = draw(whole)
    for _ in range(draw(st.integers(0, most))):
        at, size = draw(st.integers(0, len(text))), draw(st.integers(0, 6))
        text = text[:at] + draw(hostile_text | st.just(text[at : at + size] * 2)) + text[at + size :]
    return text


@st.composite
def pieces(draw: st.DrawFn, whole: st.SearchStrategy[bytes], most: int = 4) -> list[bytes]:
    """These bytes as they arrive: in a few pieces, cut anywhere."""
    data = draw(whole)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=most)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
