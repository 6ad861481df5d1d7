"""Advisory locks, in the two-int form: a class that durable derives from its schema, and a key within it.

nodes_class(schema), node id    held by a node's own connection for as long as the node lives
jobs_class(schema), Job         held by one transaction, so that one node at a time does that job; those of ARCHIVE and
                                REPLAY by a session, because that work is many transactions. Replays share theirs, and
                                an erasure has it for itself
singletons_class(schema), number
                                of a service of which there is one: held by the own connection of its node, for as long
                                as that is the provider
keys_class(schema), hash        of an ordering key: held by one transaction, so that one node at a time claims its rows
"""

from __future__ import annotations

import enum
import struct
import zlib

from sqlalchemy import Connection

from durable.storage.sql.housekeeping import LOCK_JOB, TRY_JOB_LOCK


class Job(enum.IntEnum):
    SWEEP = 1
    PARTITIONS = 2
    MIGRATE = 3
    ARCHIVE = 4
    REPLAY = 5
    LETTERS = 6


def nodes_class(schema: str) -> int:
    return _signed_crc(f"durable:{schema}:nodes")


def jobs_class(schema: str) -> int:
    return _signed_crc(f"durable:{schema}:jobs")


def singletons_class(schema: str) -> int:
    return _signed_crc(f"durable:{schema}:singletons")


def keys_class(schema: str) -> int:
    return _signed_crc(f"durable:{schema}:keys")


def try_lock(conn: Connection, schema: str, job: Job) -> bool:
    """Take the lock of this job until the transaction ends, or return False at once."""
    params = {"class_id": jobs_class(schema), "key": int(job)}
    return bool(conn.execute(TRY_JOB_LOCK.within(schema), params).scalar_one())


def lock(conn: Connection, schema: str, job: Job) -> None:
    """Wait for the lock of this job, and keep it until the transaction ends."""
    conn.execute(LOCK_JOB.within(schema), {"class_id": jobs_class(schema), "key": int(job)})


def _signed_crc(name: str) -> int:
    """CRC-32 as Postgres's signed int4: the same in every process and version, unlike hash()."""
    (signed,) = struct.unpack("!i", struct.pack("!I", zlib.crc32(name.encode())))
    return int(signed)
