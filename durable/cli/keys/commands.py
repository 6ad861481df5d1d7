"""keys: which encryption keys bodies need, and bodies encrypted anew with the key of now.

list      count the bodies of each key in every place, so that an operator knows when a key can go
rotate    encrypt what waits anew, batch by batch; the first Ctrl-C ends a run after its batch
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from durable.cli.command import group
from durable.cli.keys.rotation import Rotated, rotate_all
from durable.cli.output import Block, Columns, Table, emit
from durable.cli.runs import actor_name
from durable.cli.target import Target, on_target, ring_of, schema_connection
from durable.encryption.ring import KeyRing
from durable.errors import InvalidSetting
from durable.grammar import several
from durable.messages.registry import encrypted_types
from durable.storage import encrypted
from durable.storage.encrypted import KeyUse, Wanted

app = group("Show the encryption keys in use, and encrypt what waits anew.")

DryRun = Annotated[bool, typer.Option("--dry-run", help="count the bodies, and change nothing")]
_PLACES = ("outbox", "inbox", "dead letters", "history", "answers")
_MOST_SHOWN = 20
_FORGOTTEN = ("history", "answers")
"""Places whose bodies are not encrypted anew: they go after their retention."""


@app.command("list")
@on_target()
def list_keys(target: Target) -> None:
    """List encryption keys with their number of bodies in each place; with APP:BUS, readable bodies to encrypt."""
    ring, settings = ring_of(target), target.settings
    with schema_connection(settings) as conn:
        found = encrypted.count_keys(conn, settings.db_schema, encrypted_types(), everything=ring.everything)
    rows = _rows(found, ring)
    emit({"keys": rows, "readable": _readable(found)}, *_blocks(rows, found))


@app.command()
@on_target()
def rotate(target: Target, dry_run: DryRun = False) -> None:
    """Change the key of bodies in outbox, inbox and dead letters to that of now.

    Readable bodies of classes that are encrypted by now are encrypted too, if APP:BUS is given. Nodes go on meanwhile:
    rows that a node is at work on are left, and a second run finds those that came back. History is not changed. Ends
    with 1 when bodies are left that could not be opened, or that the database refuses to change.
    """
    ring, settings = ring_of(target), target.settings
    if not ring.is_configured or (encrypts := ring.keys.encrypting_id) is None:
        raise InvalidSetting(
            "encryption_keys: no key to encrypt with; give encryption_keys or encryption_key_file, or APP:BUS with "
            "Bus.keys_from()"
        )
    wanted = Wanted(encrypts, ring.keys.tenants, encrypted_types(), ring.everything)
    rotated = asyncio.run(rotate_all(settings, ring, wanted, actor=actor_name(), dry_run=dry_run))
    rows = [asdict(each) for each in rotated]
    emit({"key": encrypts, "dry_run": dry_run, "places": rows}, *_told(rotated, encrypts, dry_run))
    if any(each.stopped for each in rotated):
        raise typer.Exit(130)
    if any(each.unopened or each.refused for each in rotated):
        raise typer.Exit(1)


def _rows(found: Sequence[KeyUse], ring: KeyRing) -> list[dict[str, Any]]:
    own = {key_id: _purpose(key_id, ring) for key_id in ring.key_ids()} if ring.is_configured else {}
    used = {each.key_id for each in found if each.key_id is not None}
    return [
        {
            "key": key_id,
            "state": own.get(key_id, "missing" if ring.is_configured else "unknown"),
            **{
                place.replace(" ", "_"): sum(
                    each.rows for each in found if (each.place, each.key_id) == (place, key_id)
                )
                for place in _PLACES
            },
        }
        for key_id in [*own, *sorted(used - own.keys())]
    ]


def _count(found: Sequence[KeyUse], place: str, key_id: str) -> int:
    return sum(each.rows for each in found if (each.place, each.key_id) == (place, key_id))


def _purpose(key_id: str, ring: KeyRing) -> str:
    tenants = sorted(tenant for tenant, each in ring.keys.tenants.items() if each == key_id)
    told = ["encrypts"] if key_id == ring.keys.encrypting_id else []
    told += [f"encrypts for {', '.join(tenants)}"] if tenants else []
    return "; ".join(told) or "decrypts"


def _readable(found: Sequence[KeyUse]) -> dict[str, int]:
    """Count the readable bodies of types that are to be encrypted."""
    return {place.replace(" ", "_"): sum(each.readable for each in found if each.place == place) for place in _PLACES}


def _blocks(rows: Sequence[dict[str, Any]], found: Sequence[KeyUse]) -> list[Block]:
    columns: Columns = {"key": "key", "state": "state", **{place: place.replace(" ", "_") for place in _PLACES}}
    blocks: list[Block] = [Table.of("encryption keys", rows, columns) if rows else "no encrypted body, and no key"]
    if waiting := sum(each.readable for each in found if each.place not in _FORGOTTEN):
        blocks += [
            "",
            f"{several(waiting, 'readable bodies')} of types that are to be encrypted: "
            "durable-agent keys rotate APP:BUS",
        ]
    return blocks


def _told(rotated: Sequence[Rotated], key_id: str, dry_run: bool) -> list[Block]:
    verb = "would be encrypted" if dry_run else "encrypted"
    lines: list[Block] = []
    for each in rotated:
        count = each.total if dry_run else each.done
        lines.append(f"{each.place}: {count:,} of {each.total:,} {verb} anew with key {key_id}")
        if each.left:
            lines.append(f"  left: {each.left:,} (a node is at work on them, or they came meanwhile); run it once more")
        for reason in each.unopened:
            lines.append(f"  not opened: {reason}")
        if each.refused:
            lines.append(f"  left: {each.refused_count:,} (the database refuses to change them)")
        for reason in each.refused[:_MOST_SHOWN]:
            lines.append(f"  refused: {reason}")
        if (more := each.refused_count - _MOST_SHOWN) > 0:
            lines.append(f"  {more:,} more: --json names all")
    if any(each.stopped for each in rotated):
        lines.append("stopped: run the same command again for the rest")
    return lines
