"""Trials: one message for a handler whose circuit is to be tried, in its turn, for one node alone."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

from sqlalchemy import Connection

from durable.envelope import LeasedEnvelope, NodeId
from durable.storage import circuits, inbox, ordering

_KEYS_AT_ONCE = 100
_LOOKS = 20  # in one trial: more keys may be held, or have their turn at other types, before the one that is looked for


class Looked(NamedTuple):
    """Position in the tenants and keys of a type, where the next trial goes on."""

    tenant: str = ""
    key: str = ""


class Trial(NamedTuple):
    """The message with which a handler is tried, if one was found."""

    lease: LeasedEnvelope | None
    looked: Looked


def claim_trial(
    conn: Connection,
    schema: str,
    *,
    handler: str,
    message_type: str,
    node: NodeId,
    lease: timedelta,
    looked: Looked = Looked(),  # noqa: B008  immutable
) -> Trial:
    """The one message with which this node may try a handler, if its circuit is due and nobody tries it already.

    The message is of this type, the handler's own or an older version. Nobody else is given one before `lease` is over.
    """
    if not circuits.begin_trial(conn, schema, handler, lease=lease):
        return Trial(None, looked)
    claimed = inbox.claim(conn, schema, message_type=message_type, batch_size=1, node=node, is_trial=True)
    if not claimed:
        claimed, tenant = _claim_share(conn, schema, message_type, node, looked.tenant)
        looked = looked._replace(tenant=tenant)
    if not claimed:
        claimed, key = _claim_in_order(conn, schema, message_type, node, looked.key)
        looked = looked._replace(key=key)
    if not claimed:
        circuits.try_again(conn, schema, handler)  # it is still due: nothing waited that it could be tried with
    return Trial(claimed[0] if claimed else None, looked)


def _claim_share(
    conn: Connection, schema: str, message_type: str, node: NodeId, tenant: str
) -> tuple[list[LeasedEnvelope], str]:
    """Claim from the share of the next tenant; '' is the first, and ends the round."""
    claimed: list[LeasedEnvelope] = []
    for _ in range(_LOOKS):
        share = ordering.Share(message_type, tenant, {}, 1)
        claimed, tenant = ordering.claim_shares(conn, schema, share, node=node, is_trial=True)
        if claimed or not tenant:
            break
    return claimed, tenant


def _claim_in_order(
    conn: Connection, schema: str, message_type: str, node: NodeId, after: str
) -> tuple[list[LeasedEnvelope], str]:
    """Claim from the next key in order. Returns the key to go on behind; the empty key is before the first."""
    lane = ordering.Lane(message_type=message_type)
    for _ in range(_LOOKS):
        found = ordering.scan(conn, schema, {lane: after}, count=_KEYS_AT_ONCE)[lane]
        keys = [ordering.Turn(waiting.key) for waiting in found if waiting.message_type == message_type]
        turns = ordering.Turns(keys, {message_type: message_type}, is_trial=True)
        claimed = ordering.claim(conn, schema, turns, batch_size=1, node=node).leases
        if claimed:
            return claimed, after
        if len(found) == _KEYS_AT_ONCE:
            after = found[-1].key
        elif after:
            after = ""  # the keys before the one where the look began have their turn too
        else:
            break
    return [], after
