"""Certificates of an authority that nobody else trusts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme


@dataclass(frozen=True)
class Pem:
    """Files: the authority that signs, and a signed certificate with its key."""

    ca: Path
    certificate: Path
    key: Path

    @property
    def settings(self) -> dict[str, Any]:
        """The three settings of mutual TLS."""
        return {"tls_ca": self.ca, "tls_certificate": self.certificate, "tls_key": self.key}


class Authority:
    """An authority, whose files lie in this folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self._folder = folder
        self.pem = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.pem))

    def issue(
        self, name: str, *others: str, into: str = "", expired: bool = False, common_name: str | None = None
    ) -> Pem:
        """A certificate for this address or name, and others, in files that are replaced when they are there."""
        stem = into or name
        pem = Pem(self.pem, self._folder / f"{stem}.certificate.pem", self._folder / f"{stem}.key.pem")
        now = datetime.now(UTC)
        begin, end = (now - timedelta(days=2), now - timedelta(days=1)) if expired else (None, None)
        issued = self._ca.issue_cert(name, *others, common_name=common_name, not_before=begin, not_after=end)
        pem.certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        pem.key.write_bytes(issued.private_key_pem.bytes())
        pem.key.chmod(0o600)
        return pem


def issue(folder: Path) -> Pem:
    return Authority(folder).issue("127.0.0.1")
