"""Certificates for 127.0.0.1, of an authority that nobody else trusts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Pem:
    """Files: who signs, and what is signed for 127.0.0.1 alone."""

    ca: Path
    certificate: Path
    key: Path


def issue(folder: Path) -> Pem:
    pem = Pem(folder / "ca.pem", folder / "certificate.pem", folder / "key.pem")
    ca = trustme.CA()
    issued = ca.issue_cert("127.0.0.1")
    ca.cert_pem.write_to_path(str(pem.ca))
    issued.private_key_pem.write_to_path(str(pem.key))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(pem.certificate), append=True)
    return pem
