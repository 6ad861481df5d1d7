"""The advice of doctor for a peer that does not answer."""

from __future__ import annotations

import ssl

import pytest

from durable.cli.doctor.remedies import remedy
from durable.errors import ConnectionFailed, PeerTimeout, ProtocolViolation, TransportError


def caused(error: Exception, *causes: Exception) -> Exception:
    """Chain errors as a transport does."""
    lower: BaseException = error
    for cause in causes:
        lower.__cause__ = cause
        lower = cause
    return error


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (caused(ConnectionFailed("x"), ConnectionRefusedError()), "start the peer"),
        (caused(ConnectionFailed("x"), ExceptionGroup("each", [ConnectionRefusedError()])), "start the peer"),
        (caused(ConnectionFailed("x"), FileNotFoundError()), "start the peer"),
        (PeerTimeout("x"), "start the peer"),
        (TimeoutError(), "start the peer"),
        (caused(ConnectionFailed("x"), ssl.SSLCertVerificationError()), "correct the peer's certificate"),
        (caused(ConnectionFailed("x"), OSError(), ssl.SSLCertVerificationError()), "correct the peer's certificate"),
        (caused(ConnectionFailed("x"), ssl.SSLError()), "correct the settings of TLS"),
        (caused(ConnectionFailed("x"), ConnectionResetError()), "correct it here or at the peer"),
        (ConnectionFailed("refused: wrong secret"), "correct it here or at the peer"),
        (ProtocolViolation("x"), "correct it here or at the peer"),
        (TransportError("the peer cannot store anything now"), "correct it here or at the peer"),
    ],
)
def test_remedy_follows_the_cause(error: Exception, advice: str) -> None:
    assert remedy(error).startswith(advice)
