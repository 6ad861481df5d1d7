"""Remedies for peers that do not answer a ping."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from typing import Final

from durable.errors import PeerTimeout

_ANSWERS: Final = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)
"""Errors of a connection that a peer has accepted."""


def remedy(error: BaseException) -> str:
    """Return what helps against the failure of a ping, by its cause."""
    causes = list(_causes(error))
    if any(isinstance(each, ssl.SSLCertVerificationError) for each in causes):
        return "correct the peer's certificate, or tls_ca here"
    if any(isinstance(each, ssl.SSLError) for each in causes):
        return "correct the settings of TLS here or at the peer"
    is_silent = any(isinstance(each, PeerTimeout | OSError) and not isinstance(each, _ANSWERS) for each in causes)
    return "start the peer" if is_silent else "correct it here or at the peer, whose log may say more"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an error and the errors below it."""
    met = set[int]()
    while error is not None and id(error) not in met:
        met.add(id(error))
        yield error
        lower = error.__cause__ or error.__context__
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else lower
