"""The ledger: tables that durable knows nothing of, which say what was sent and what took effect.

    sent      a row in the transaction that sends
    effects   a row in the transaction that handles

The role of the nodes may insert into both and change neither. `switches` turns faults on that are made inside of the
database: a full disk, and a storm of failures.
"""

from __future__ import annotations

import os
from datetime import datetime
from uuid import UUID

from sqlalchemy import text

from tests.chaos.messages import Kind, kind_of

ROLE = "app"

TABLES = f"""
CREATE TABLE sent (envelope_id uuid PRIMARY KEY, kind text NOT NULL, key text NOT NULL, number bigint NOT NULL,
    behaviour text NOT NULL, due_at timestamptz, deliver_by timestamptz, process integer NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE effects (position bigint GENERATED ALWAYS AS IDENTITY, envelope_id uuid NOT NULL, kind text NOT NULL,
    key text NOT NULL, number bigint NOT NULL, process integer NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE counters (key text PRIMARY KEY, number bigint NOT NULL);
CREATE TABLE switches (name text PRIMARY KEY);
GRANT SELECT, INSERT ON sent, effects TO {ROLE};
GRANT SELECT, INSERT, UPDATE ON counters TO {ROLE};
GRANT SELECT ON switches TO {ROLE};
CREATE FUNCTION refuse_when_full() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM public.switches WHERE name = 'disk full') THEN
        RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full';
    END IF;
    RETURN NULL;
END $$;
"""

FULL = """
CREATE TRIGGER full_disk BEFORE INSERT ON durable.{table} FOR EACH STATEMENT EXECUTE FUNCTION refuse_when_full()
"""
FULL_TABLES = ("incoming_envelopes", "outgoing_envelopes", "envelope_history", "dead_letters")

ADD_SENT = text(
    "INSERT INTO sent (envelope_id, kind, key, number, behaviour, due_at, deliver_by, process) "
    "VALUES (:envelope_id, :kind, :key, :number, :behaviour, :due_at, :deliver_by, :process)"
)
ADD_EFFECT = text(
    "INSERT INTO effects (envelope_id, kind, key, number, process) "
    "VALUES (:envelope_id, :kind, :key, :number, :process)"
)
# The lock on the counter's row lasts until COMMIT: the numbers of a key are in the order of the commits.
NEXT_NUMBER = text(
    "INSERT INTO counters (key, number) VALUES (:key, 1) "
    "ON CONFLICT (key) DO UPDATE SET number = counters.number + 1 RETURNING number"
)
IS_STORMY = text("SELECT EXISTS (SELECT FROM switches WHERE name = 'storm')")


def sent_row(
    envelope_id: UUID, message: Kind, *, due_at: datetime | None = None, deliver_by: datetime | None = None
) -> dict[str, object]:
    return {
        "envelope_id": envelope_id,
        "kind": kind_of(message),
        "key": message.key,
        "number": message.number,
        "behaviour": message.behaviour,
        "due_at": due_at,
        "deliver_by": deliver_by,
        "process": os.getpid(),
    }


def effect_row(envelope_id: UUID, kind: str, key: str, number: int) -> dict[str, object]:
    return {"envelope_id": envelope_id, "kind": kind, "key": key, "number": number, "process": os.getpid()}
