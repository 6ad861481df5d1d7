"""One key: AES-256-GCM, and what it authenticates besides the body.

    seal()   message, envelope --> digest, nonce, ciphertext     durable.messages.sealed
    open()   the reverse; raises Forged when a bit of any of them, or of the envelope, has changed

Additional data are the id, the type, the tenant, the destination, the key id and the digest: a body that was moved to
another row, or another envelope, does not open.

The nonce is no random number, but a keyed digest of all that is sealed. So two different messages share none (which
would break GCM) without a counter that nodes would have to share, however many messages there are, and the same
message sealed again under the same key is the same bytes: a repeat is seen as one by whatever compares bytes.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final
from uuid import UUID

from durable.errors import Forged, InvalidSetting
from durable.messages.digest import key_mark, sealed_digest
from durable.messages.sealed import NONCE_BYTES, Sealed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES: Final = 32

_NONCES: Final = b"durable nonces"
_DIGESTS: Final = b"durable digests"
_LENGTH: Final = struct.Struct("!I")


class Cipher:
    """Cipher of one key. Raises InvalidSetting when `durable-bus[encryption]` is not installed."""

    def __init__(self, key_id: str, key: bytes) -> None:
        self.key_id = key_id
        self._aes = _aes(key)
        self._for_nonces = hashlib.blake2b(key=key, digest_size=32, person=_NONCES).digest()
        self._for_digests = hashlib.blake2b(key=key, digest_size=32, person=_DIGESTS).digest()
        self.mark = key_mark(self._for_digests)
        """The 20 bits that stand for this key in the digests under it."""

    def digest(self, message_type: str, message: bytes) -> bytes:
        """The digest by which a repeat of this message is told from another message under its id."""
        return sealed_digest(message_type, message, self._for_digests)

    def seal(
        self, message: bytes, *, envelope_id: UUID, message_type: str, tenant: str, destination: str, digest: bytes
    ) -> Sealed:
        """Encrypt a message for this envelope. `digest` is that of digest(), by this key or an earlier one."""
        about = _authenticated(envelope_id, message_type, tenant, destination, self.key_id, digest)
        nonce = hashlib.blake2b(about + message, key=self._for_nonces, digest_size=NONCE_BYTES).digest()
        return Sealed(digest, nonce, self.key_id, destination, self._aes.encrypt(nonce, message, about))

    def open(self, sealed: Sealed, *, envelope_id: UUID, message_type: str, tenant: str) -> bytes:
        """Decrypt a body of this envelope. Raises Forged."""
        from cryptography.exceptions import InvalidTag

        about = _authenticated(envelope_id, message_type, tenant, sealed.destination, self.key_id, sealed.digest)
        try:
            return self._aes.decrypt(sealed.nonce, sealed.ciphertext, about)
        except InvalidTag:
            raise Forged(
                f"the encrypted body of {envelope_id} is not what was sealed with key {self.key_id!r}: the body, its "
                "id, type, tenant or destination was changed on the way, or in the table; or this key has other bytes"
            ) from None


def _aes(key: bytes) -> AESGCM:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise InvalidSetting(f"encryption needs {error.name}; run: pip install 'durable-bus[encryption]'") from error
    return AESGCM(key)


def _authenticated(
    envelope_id: UUID, message_type: str, tenant: str, destination: str, key_id: str, digest: bytes
) -> bytes:
    """Join the parts so that no two choices of them are the same bytes."""
    texts = [text.encode(errors="surrogatepass") for text in (message_type, tenant, destination, key_id)]
    return envelope_id.bytes + digest + b"".join(_LENGTH.pack(len(text)) + text for text in texts)
