"""The key ring of a bus: seals bodies on their way out, and opens them for handlers.

    source --at the first use, then every encryption_reload, and soon after a key was missing--> ciphers by key id
    seal(), open() --------------------------------------------------------------------------------^ nothing else

The source is the settings, a file, or a function of the application, such as one that asks a KMS. It runs in a thread
of its own, because it may take its time, and never for a message. While it fails, the keys of before are used.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from durable.encryption.cipher import Cipher
from durable.encryption.keys import NO_KEYS, Keys, of_settings, of_text
from durable.envelope import TENANT, Envelope
from durable.errors import DurableError, Forged, InvalidSetting, MissingKey, said
from durable.grammar import several
from durable.messages.digest import mark_of
from durable.messages.registry import is_encrypted
from durable.messages.routing import LOCAL
from durable.messages.sealed import Sealed, is_sealed, joined, parted
from durable.settings import Settings
from durable.telemetry import log

Source = Callable[[], Keys]

_SOONEST: Final = 1.0  # seconds between two calls of the source, however many keys are missing
_LOG_SECONDS: Final = 60.0
_MOST_TOLD: Final = 10


class _Loaded(NamedTuple):
    """The ciphers of one call of the source."""

    keys: Keys = NO_KEYS
    ciphers: Mapping[str, Cipher] = {}


_NOTHING: Final = _Loaded()


class KeyRing:
    """Keys of one bus. Without a source it seals nothing, and opens no encrypted body.

    `everything`: encrypt messages of every class, and not only of those declared with `encrypted=True`.
    """

    def __init__(
        self, source: Source | None = None, *, everything: bool = False, reload_seconds: float | None = None
    ) -> None:
        self.everything = everything
        self.trouble = ""
        """Reason why the source could not be asked the last time; empty when it could."""
        self._source = source
        self._reload_seconds = reload_seconds
        self._loaded: _Loaded | None = None
        self._told: dict[str, float] = {}
        self.begin_process()
        _rings.add(self)

    def begin_process(self) -> None:
        """Take new locks, in a process that was forked: those of before may be held, and its thread is gone."""
        self._loading = threading.Lock()
        self._wanted = threading.Event()
        self._reloading: _Reloading | None = None

    @classmethod
    def of(cls, settings: Settings) -> KeyRing:
        """Make the ring of these settings."""
        seconds = settings.encryption_reload.total_seconds()
        path = settings.encryption_key_file
        if path is not None:
            return cls(
                lambda: of_text(path.read_bytes(), f"encryption_key_file {path}"),
                everything=settings.encrypt_all,
                reload_seconds=seconds,
            )
        return cls(
            (lambda: of_settings(settings)) if settings.encryption_keys else None, everything=settings.encrypt_all
        )

    def take_from(self, source: Source, reload_seconds: float) -> None:
        """Use this source instead of that of the settings."""
        self._source, self._reload_seconds, self._loaded = source, reload_seconds, None

    # ------------------------------------------------------------------ what it has

    @property
    def is_configured(self) -> bool:
        """True when it has a source of keys."""
        return self._source is not None

    @property
    def keys(self) -> Keys:
        """The keys of now. Raises InvalidSetting when the source has never given any."""
        return self._now().keys

    def has(self, key_id: str) -> bool:
        return self._source is not None and key_id in self._now().ciphers

    def must_seal(self, message_type: str) -> bool:
        """True for a type whose messages are stored encrypted."""
        return self.everything or is_encrypted(message_type)

    def missing(self, body: bytes) -> str | None:
        """Return the id of the key that this body needs and the ring has not; None when it can be tried."""
        if not is_sealed(body):
            return None
        sealed = parted(body)
        if sealed is None or self.has(sealed.key_id):
            return None
        self._wanted.set()
        return sealed.key_id

    # ------------------------------------------------------------------ what it does

    def sealed(self, envelopes: Sequence[Envelope]) -> list[Envelope]:
        """Encrypt the readable bodies of these envelopes for their destinations. Raises InvalidSetting: no key."""
        return [
            each
            if is_sealed(each.body)
            else msgspec.structs.replace(each, body=self.seal(each, each.body, each.destination))
            for each in envelopes
        ]

    def arrived(self, envelope: Envelope) -> Envelope:
        """Encrypt an arrival that came readable, if its class is encrypted and there is a key.

        Without a key it stays readable, as everybody on the way has seen it: its neighbours must not wait for it.
        """
        if not self.must_seal(envelope.message_type) or not self.is_configured or self.keys.encrypting_id is None:
            return envelope
        return self.sealed([envelope])[0]

    def seal(
        self,
        envelope: Envelope,
        message: bytes,
        destination: str,
        *,
        digest: bytes | None = None,
        key_id: str | None = None,
    ) -> bytes:
        """Encrypt a message as the body of this envelope, with the key of its tenant or the one named.

        `digest`: that of the body before, when the same message is encrypted anew.
        """
        tenant = envelope.headers.get(TENANT, "")
        cipher = self._now().ciphers[key_id] if key_id is not None else self._encrypting(tenant)
        return joined(
            cipher.seal(
                message,
                envelope_id=envelope.id,
                message_type=envelope.message_type,
                tenant=tenant,
                destination=destination,
                digest=digest or cipher.digest(envelope.message_type, message),
            )
        )

    def opened(self, envelope: Envelope, endpoint: str | None = None) -> Envelope:
        """The envelope with its readable body. `endpoint`: where it came in; a local message is sealed for `local`.

        Raises MissingKey, and Forged.
        """
        if not is_sealed(envelope.body):
            return envelope
        sealed = self.parts(envelope)
        if endpoint is not None and (endpoint == LOCAL) != (sealed.destination == LOCAL):
            raise Forged(
                f"body of {envelope.id}: was sealed for {sealed.destination!r} and lies at {endpoint!r}; discard it"
            )
        return msgspec.structs.replace(envelope, body=self.open(envelope, sealed))

    def open(self, envelope: Envelope, sealed: Sealed) -> bytes:
        """Decrypt the body of this envelope. Raises MissingKey, and Forged."""
        cipher = self._now().ciphers.get(sealed.key_id) if self._source is not None else None
        if cipher is None:
            self._wanted.set()
            raise MissingKey(sealed.key_id)
        tenant = envelope.headers.get(TENANT, "")
        return cipher.open(sealed, envelope_id=envelope.id, message_type=envelope.message_type, tenant=tenant)

    def has_digest(self, digest: int, message_type: str, message: bytes) -> bool:
        """Tell whether this is the digest of a message under one of the keys."""
        mark = mark_of(digest)
        return mark is not None and any(
            int.from_bytes(cipher.digest(message_type, message), "big", signed=True) == digest
            for cipher in self._now().ciphers.values()
            if cipher.mark == mark
        )

    def digests(self, message_type: str, message: bytes) -> list[bytes]:
        """Return the digests of a message under each of the keys."""
        return [cipher.digest(message_type, message) for cipher in self._now().ciphers.values()]

    def parts(self, envelope: Envelope) -> Sealed:
        """The parts of an encrypted body. Raises Forged when it is broken off."""
        sealed = parted(envelope.body)
        if sealed is None:
            raise Forged(f"body of {envelope.id}: is broken off; discard it, and send the message again")
        return sealed

    def resealed(self, envelope: Envelope, changed: Envelope) -> bytes:
        """The encrypted body of an envelope for the same message in another one. Raises MissingKey, and Forged."""
        sealed = self.parts(envelope)
        return self.seal(changed, self.open(envelope, sealed), sealed.destination, digest=sealed.digest)

    def tell_missing(self, key_id: str, count: int) -> None:
        """Log that messages wait for a key, once a minute for each key, and for a few keys: senders may make ids up."""
        now = time.monotonic()
        self._told = {each: at for each, at in self._told.items() if now - at < _LOG_SECONDS}
        if key_id in self._told or len(self._told) >= _MOST_TOLD:
            return
        self._told[key_id] = now
        waiting = several(count, "messages", "wait")
        log.error("encryption key %s is missing: %s for it, and others may follow", key_id, waiting)
        if len(self._told) == _MOST_TOLD:
            log.error("encryption keys are missing: more than %d; others are not named for a while", _MOST_TOLD - 1)

    # ------------------------------------------------------------------ its source

    def load(self) -> None:
        """Read the keys, if there is a source of any. Raises InvalidSetting when it has never given any."""
        self._now()

    def refresh(self) -> None:
        """Ask the source for its keys now; after a failure those of before stay."""
        if self._source is None:
            return
        with self._loading:
            before = self._loaded or _NOTHING
            try:
                keys = self._source()
                if not isinstance(keys, Keys):
                    raise InvalidSetting(f"keys_from: the function returned {type(keys).__name__}; return durable.Keys")
                ciphers = {key_id: _cipher(key_id, key, before) for key_id, key in keys.keys.items()}
            except Exception as error:  # the application's, or of a file
                self._fail(error)
                if self._loaded is None:
                    raise InvalidSetting(f"the encryption keys cannot be read: {said(error)}") from error
                return
            self.trouble = ""
            self._loaded = _Loaded(keys, ciphers)

    def _fail(self, error: Exception) -> None:
        text = said(error)
        if text != self.trouble:
            if self._loaded is None:
                log.error("the encryption keys cannot be read: %s", text)
            else:
                log.error("the encryption keys cannot be read, those of before are used: %s", text)
        self.trouble = text

    def _now(self) -> _Loaded:
        if self._loaded is None:
            if self._source is None:
                return _NOTHING
            self.refresh()
        if self._reloading is None and self._reload_seconds is not None:
            self._keep_reloading(self._reload_seconds)
        assert self._loaded is not None
        return self._loaded

    def _keep_reloading(self, seconds: float) -> None:
        with self._loading:
            if self._reloading is None:
                self._reloading = _Reloading(self, seconds, self._wanted)
                self._reloading.start()

    def _encrypting(self, tenant: str) -> Cipher:
        loaded = self._now()
        key_id = loaded.keys.tenants.get(tenant) or loaded.keys.encrypting_id
        if key_id is None:
            raise InvalidSetting(
                "encryption_keys: no key, and a message is to be encrypted; give keys by encryption_keys, "
                "encryption_key_file or Bus.keys_from()"
            )
        return loaded.ciphers[key_id]

    def key_ids(self) -> Collection[str]:
        """Return the ids of the keys of now."""
        return self._now().ciphers.keys()


class _Reloading(threading.Thread):
    """Asks the source again and again, for as long as there is its ring. No process waits for it to end."""

    def __init__(self, ring: KeyRing, seconds: float, wanted: threading.Event) -> None:
        super().__init__(name="durable encryption keys", daemon=True)
        self._ring = weakref.ref(ring)
        self._seconds = seconds
        self._wanted = wanted

    def run(self) -> None:
        while True:
            time.sleep(min(_SOONEST, self._seconds))
            self._wanted.wait(self._seconds)
            self._wanted.clear()
            ring = self._ring()
            if ring is None:
                return
            with suppress(DurableError):  # it is logged, and tried again
                ring.refresh()
            del ring


def _cipher(key_id: str, key: bytes, before: _Loaded) -> Cipher:
    """The cipher of before for the same key."""
    return before.ciphers[key_id] if before.keys.keys.get(key_id) == key else Cipher(key_id, key)


_rings: weakref.WeakSet[KeyRing] = weakref.WeakSet()


def _begin_process() -> None:
    for ring in _rings:
        ring.begin_process()


os.register_at_fork(after_in_child=_begin_process)
