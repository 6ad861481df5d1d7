"""Certificates for 127.0.0.1, of an authority whose key is forgotten as soon as it has signed them."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HOST: Final = "127.0.0.1"
_VALID: Final = timedelta(days=30)


def write(folder: Path) -> dict[str, str]:
    """Write an authority, a certificate and its key into this folder; return the settings of mutual TLS."""
    folder.mkdir(parents=True, exist_ok=True)
    of_authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "durable demo")])
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOST)])
    root = (
        _certificate(authority, authority, of_authority.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(of_authority, hashes.SHA256())
    )
    signed = (
        _certificate(name, authority, own.public_key())
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST))]), critical=False)
        .sign(of_authority, hashes.SHA256())
    )
    key = own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files = {
        "DURABLE_TLS_CA": _written(folder / "authority.pem", root.public_bytes(serialization.Encoding.PEM)),
        "DURABLE_TLS_CERTIFICATE": _written(folder / "node.pem", signed.public_bytes(serialization.Encoding.PEM)),
        "DURABLE_TLS_KEY": _written(folder / "node-key.pem", key),
    }
    return {name: str(path) for name, path in files.items()}


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _VALID)
    )


def _written(path: Path, content: bytes) -> Path:
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)
    return path
