"""TLS of HTTP: the certificate of listeners, and what senders trust and show.

Listeners take any client, who proves itself by a secret; senders show `tls_certificate` where a server, or a proxy
before it, asks for one. The files are read again when they change, as those of TCP are.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx

from durable.errors import InvalidSetting
from durable.settings import Settings
from durable.transports.tls import MISSING_CERTIFICATE, Context, Reloaded, show_certificate, unusable


class Encryption:
    """Contexts for new connections of https://, made of the files as they are now."""

    def __init__(self, settings: Settings) -> None:
        self._certificate, self._key, self._ca = settings.tls_certificate, settings.tls_key, settings.tls_ca
        own = [path for path in (self._certificate, self._key) if path is not None]
        self._of_listeners = Reloaded(own, self._for_listeners)
        self._of_senders = Reloaded([*own, self._ca] if self._ca is not None else own, self._for_senders)

    def for_listeners(self) -> ssl.SSLContext:
        """Return the context of the next accepted connection. Raises InvalidSetting when it never could be made."""
        return self._of_listeners.current().tls

    def for_senders(self) -> ssl.SSLContext:
        """Return the context of the next opened connection. Raises InvalidSetting when it never could be made."""
        return self._of_senders.current().tls

    def _for_listeners(self) -> Context:
        if self._certificate is None or self._key is None:
            raise InvalidSetting(f"tls_certificate: https:// {MISSING_CERTIFICATE}")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        show_certificate(context, self._certificate, self._key)
        return Context(context)

    def _for_senders(self) -> Context:
        context = httpx.create_ssl_context(trust_env=False) if self._ca is None else _trusting(self._ca)
        if self._certificate is not None and self._key is not None:
            show_certificate(context, self._certificate, self._key)
        return Context(context)


def _trusting(authorities: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:  # ssl.SSLError is one
        raise unusable("tls_ca", authorities, error) from error
