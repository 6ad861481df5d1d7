"""TLS 1.3 of this service: its certificate, and the authorities that sign those of its peers.

    listener    shows `tls_certificate`; with `tls_ca` each client must show one that these authorities signed
    sender      checks the name and the authorities of the listener (`tls_ca`, or the system's); shows `tls_certificate`

The files are read again for the next connection after they have changed. While files do not fit together, as in the
middle of a renewal, the last ones that did stay in use, with one warning for each state of the files. Connections that
are open stay open.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from durable.errors import InvalidSetting
from durable.settings import Settings
from durable.telemetry import log

MISSING_CERTIFICATE: Final = "needs a certificate; set tls_certificate and tls_key"


@dataclass(frozen=True, slots=True)
class Context:
    """One state of the files. `binding` is a digest of the own certificate, for proofs that hold for it alone."""

    tls: ssl.SSLContext
    binding: bytes = b""
    asks_certificates: bool = False


class Tls:
    """Contexts for new connections, made of the files as they are now."""

    def __init__(self, settings: Settings) -> None:
        self._certificate, self._key, self._ca = settings.tls_certificate, settings.tls_key, settings.tls_ca
        files = [path for path in (self._certificate, self._key, self._ca) if path is not None]
        self._of_listeners = Reloaded(files, self._for_listeners)
        self._of_senders = Reloaded(files, self._for_senders)

    @property
    def has_certificate(self) -> bool:
        """Tell whether listeners can speak TLS."""
        return self._certificate is not None

    @property
    def is_mutual(self) -> bool:
        """Tell whether listeners demand a certificate of each client."""
        return self._certificate is not None and self._ca is not None

    @property
    def is_configured(self) -> bool:
        return self._certificate is not None or self._ca is not None

    def for_listeners(self) -> Context:
        """Return the context of the next accepted connection. Raises InvalidSetting when it never could be made."""
        return self._of_listeners.current()

    def for_senders(self) -> Context:
        """Return the context of the next opened connection. Raises InvalidSetting when it never could be made."""
        return self._of_senders.current()

    def _for_listeners(self) -> Context:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # a resumed session would not show its certificate again
        self._show_certificate(context)
        if self._ca is not None:
            self._trust(context, self._ca)
            context.verify_mode = ssl.CERT_REQUIRED
        assert self._certificate is not None
        return Context(context, _first_digest(self._certificate), asks_certificates=self._ca is not None)

    def _for_senders(self) -> Context:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if self._ca is None:
            context.load_default_certs()
        else:
            self._trust(context, self._ca)
        if self._certificate is not None:
            self._show_certificate(context)
        return Context(context)

    def _show_certificate(self, context: ssl.SSLContext) -> None:
        if self._certificate is None or self._key is None:
            raise InvalidSetting(f"tls_certificate: TLS {MISSING_CERTIFICATE}")
        show_certificate(context, self._certificate, self._key)

    def _trust(self, context: ssl.SSLContext, authorities: Path) -> None:
        try:
            context.load_verify_locations(cafile=authorities)
        except OSError as error:
            raise unusable("tls_ca", authorities, error) from error


class Reloaded:
    """A context, made anew when its files have changed."""

    def __init__(self, files: list[Path], make: Callable[[], Context]) -> None:
        self._files = files
        self._make = make
        self._state: list[tuple[int, int, int] | None] = []
        self._context: Context | None = None

    def current(self) -> Context:
        state = [_state(path) for path in self._files]
        if self._context is not None and state == self._state:
            return self._context
        try:
            context = self._make()
        except InvalidSetting as error:
            if self._context is None:
                raise
            self._state = state
            log.warning("the changed TLS files cannot be used; the former ones stay in use: %s", error)
            return self._context
        if self._context is not None:
            log.info("the TLS files have changed; new connections use the new ones")
        self._state, self._context = state, context
        return context


def show_certificate(context: ssl.SSLContext, chain: Path, key: Path) -> None:
    """Load a certificate with its key. Raises InvalidSetting."""
    try:
        context.load_cert_chain(chain, key, password=_refuse_passphrase)
    except OSError as error:  # ssl.SSLError is one
        raise unusable("tls_certificate, tls_key", chain, error) from error


def names_in(certificate: dict[str, Any]) -> list[str]:
    """Return the names of a checked certificate, as getpeercert() gives it: DNS names, URIs and addresses, then the
    common name."""
    names = [name for kind, name in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI", "IP Address")]
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return list(dict.fromkeys([*names, *common]))


def digest_of(certificate: bytes | None) -> bytes:
    """Return the binding of a certificate in DER."""
    return hashlib.sha256(certificate).digest() if certificate else b""


def fault(error: ssl.SSLError) -> str:
    """Return the reason of a failed handshake, in words without OpenSSL's file names."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}"
    if error.reason in _NOT_TLS:
        return "the peer does not speak TLS 1.3 here"
    return f"TLS failed: {(error.reason or str(error)).replace('_', ' ').lower()}"


_NOT_TLS: Final = frozenset(
    {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNSUPPORTED_PROTOCOL", "RECORD_LAYER_FAILURE"}
)


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def _first_digest(chain: Path) -> bytes:
    """Return the binding of the first certificate in a PEM file."""
    _, begin, rest = chain.read_text(encoding="utf-8", errors="replace").partition("-----BEGIN CERTIFICATE-----")
    body, end, _ = rest.partition("-----END CERTIFICATE-----")
    return digest_of(ssl.PEM_cert_to_DER_cert(begin + body + end))


def _refuse_passphrase() -> NoReturn:
    """Refuse, where OpenSSL would ask at the terminal and wait."""
    raise InvalidSetting("tls_key: the key has a passphrase; give one without, in a file for its user alone")


def unusable(name: str, path: Path, error: OSError) -> InvalidSetting:
    """Return the error of a file that cannot be read, or does not hold what it should."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return InvalidSetting(f"{name}: {path} cannot be used: {reason}")
