"""Checks of the encryption keys: that they are there, that they are used, and that every body has its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy.exc import SQLAlchemyError

from durable.cli.doctor.checks import Check, fail, ok, warn
from durable.cli.target import Target, connection, ring_of
from durable.encryption.ring import KeyRing
from durable.errors import DurableError
from durable.grammar import several
from durable.messages.registry import encrypted_types
from durable.storage import encrypted, migrator
from durable.storage.encrypted import KeyUse

_MOST_NAMED = 5
_GIVE = "give them by encryption_keys, encryption_key_file or Bus.keys_from()"


def key_checks(target: Target) -> list[Check]:
    """Check the keys; nothing where nothing is encrypted, and no key is given."""
    ring = ring_of(target)
    own = [] if target.bus is None else _types_of(target)
    checks = list(_ring(ring, own, has_bus=target.bus is not None))
    if any(check.advice for check in checks if check.name == "encryption keys"):
        return checks
    return [*checks, *_bodies(target, ring)]


def _types_of(target: Target) -> list[str]:
    """The encrypted types that the bus sends or handles."""
    assert target.bus is not None
    application = target.bus.application
    used = application.by_type().keys() | application.routes.destinations().keys()
    return [name for name in encrypted_types() if name in used]


def _ring(ring: KeyRing, types: Sequence[str], *, has_bus: bool) -> Iterator[Check]:
    name = "encryption keys"
    if not ring.is_configured:
        if types or ring.everything:
            what = "encrypt_all is on" if ring.everything else f"{_named(types)} are declared with encrypted=True"
            yield fail(name, f"none, although {what}: a node would not start", _GIVE)
        return
    try:
        ring.refresh()
        keys = ring.keys
    except DurableError as error:
        yield fail(name, str(error), "correct the keys, or what gives them")
        return
    if ring.trouble:
        yield warn(name, f"the source fails, keys of before are used: {ring.trouble}", "see to the source of the keys")
    elif keys.encrypting_id is None:
        yield fail(name, "the source gave no key", _GIVE)
    elif has_bus and not types and not ring.everything:
        advice = "declare classes with @message(..., encrypted=True), or set encrypt_all; or remove the keys"
        yield warn(name, f"{_named(list(keys.keys))}, and nothing is encrypted", advice)
    else:
        yield ok(name, f"{_named(list(keys.keys))}; {keys.encrypting_id} encrypts")


def _bodies(target: Target, ring: KeyRing) -> Iterator[Check]:
    """Check that what waits can be opened, and that what should be encrypted is."""
    schema = target.settings.db_schema
    try:
        with connection(target.settings) as conn:
            if migrator.current_version(conn, schema) != migrator.SCHEMA_VERSION:
                return
            key_ids = list(ring.key_ids()) if ring.is_configured else []
            locked = encrypted.count_locked(conn, schema, key_ids)
            count = encrypted.count_readable(conn, schema, encrypted_types(), everything=ring.everything)
    except (DurableError, SQLAlchemyError):
        return  # such as a missing right: the checks of the database tell it
    if locked:
        detail = f"{_counted(locked)}: messages wait for them"
        yield fail("missing keys", detail, f"restore these keys and {_GIVE}; what waits for them goes on by itself")
    if count:
        detail = f"{several(count, 'waiting messages')} and dead letters of types that are to be encrypted"
        yield warn("readable bodies", detail, "encrypt them: durable-agent keys rotate APP:BUS")


def _counted(locked: Sequence[KeyUse]) -> str:
    told = [f"{each.rows:,} of key {each.key_id} in {each.place}" for each in locked[:_MOST_NAMED]]
    return ", ".join(told) + (f", and {len(locked) - _MOST_NAMED} more" if len(locked) > _MOST_NAMED else "")


def _named(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
