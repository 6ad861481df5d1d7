"""Place of a message in a queue: the order that is promised, and why it holds.

The promise (I5). Messages of one `key=` to one service are handled in the order in which they were committed, whatever
their types and whichever node has them, one at a time over all nodes, through retries, dead nodes and latches. A key
that waits keeps nobody else waiting. Of two transactions neither of which saw the other committed, either may be first.

Names. What orders is the row's `ordering_key`: the message's key, or the whole destination or handler when that was
declared `ordered`. An ordered handler goes by the oldest version of its message that the code knows, without the number
of the version: nodes with older code know no newer one, newer code may have dropped the oldest, and all of them place
their rows behind the same name. Rows without one are nobody's concern here, and cost what
they cost before.

    send ----> outbox -------- claim, one run ----> batch -----> inbox -------- claim, one run ----> handler
    seq = order of commits     of a key at a time   in order     seq = order    of a key at a time   one after another
                                                                 of arrival

Why it holds, link by link:

1. Commit order is `seq`. A unit of work inserts as the last statement before its COMMIT. So when one transaction began
   to insert after another had committed, its `seq` is higher; and within one statement rows are inserted in its order.
2. One at a time. A row with an ordering key is never born owned. A claim takes the first rows of a key (a run) when
   none of the key's rows is owned, and none before them waits for its retry. Two claims cannot both find that: each
   holds an advisory lock on the key, and looks in a statement that begins after it has the lock, so that its snapshot
   shows what the claim before it has committed. (SKIP LOCKED alone would let the second claim take the third row
   while the first has two; and rows that are committed late, below those that are owned already, would start a second
   run.)
3. In memory a run is in one queue of one agent, which hands out its head and nothing more until that is settled
   (agents.fair_queue). What fails and is put off, released or lost sends those behind it back to the table, uncounted.
4. Between services the sender has at most one unanswered batch with messages of a key. So what is stored first was
   sent first, however many connections and nodes lie between; what is stored again is known by its id. A sender that
   dies after m1 was stored and before its row was deleted has m1 sent again, perhaps after m2, as a duplicate.
   A transport stores a batch in its order, and nothing behind what it did not store (`keeps_order`); to those which
   cannot promise that, a message of a key travels only when the one before it has been answered.
5. A broker answers before the inbox has it. An ordered queue has a single active consumer, which stores what it is
   given in its order; who follows it is given the first that was not acknowledged. One that has lost its queue stores
   nothing more of what it was given: of a deleted queue nothing is given again, and others would be ahead. Where
   several consumers share a queue, the order of arrival is theirs.
6. What dies is swept: the rows of a dead node are released, which of them were begun nobody needs to know, because
   the first of them by `seq` is claimed first. A zombie may still run its handler; the epoch does not let it commit.

A message that is sent with a delay takes its place when it is due. A dead letter lets its key go on, unless the handler
says `on_dead_letter="park"`: then nothing of the key is claimed until it is resumed. A letter that is replayed is new,
and comes last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from durable.envelope import Envelope
from durable.errors import InvalidSetting
from durable.messages.digest import fingerprint
from durable.messages.upcasting import newer_types, oldest_type
from durable.messages.validation import MAX_TEXT_BYTES, utf8_bytes
from durable.messages.versions import unversioned

_WHOLE: Final = "\x1f"
"""The prefix of the name of an ordered destination or handler: a control character, which no key can have."""

BY_KEY: Final = "key"


class Fairness(NamedTuple):
    """Header, or `key`, that names the tenant of a message, and how many messages of each have a turn: 1 unless said
    otherwise."""

    header: str
    weights: Mapping[str, int]

    def share_of(self, envelope: Envelope) -> str:
        return share_of(envelope, self.header)


class QueueKeys(NamedTuple):
    """Ordering key of a message, and its tenant."""

    ordering_key: str | None = None
    fair_key: str | None = None


FREE: Final = QueueKeys()


class Rule(NamedTuple):
    """Rule for the place of each message of one type in the inbox, or for one destination in the outbox.

    `ordering_key`: of all of them, whatever keys they have; None: each has its own key. `fair_by`: the header, or
    `key`, that names their tenant.
    """

    ordering_key: str | None = None
    fair_by: str | None = None

    def place(self, partition_key: str | None, headers: Mapping[str, str]) -> QueueKeys:
        ordering_key = self.ordering_key or partition_key or None
        fair_key = None if self.fair_by is None else share(partition_key, headers, self.fair_by)
        return FREE if ordering_key is None and fair_key is None else QueueKeys(ordering_key, fair_key)


BY_ITS_KEY: Final = Rule()
"""The rule for types and destinations without a declaration."""


@dataclass
class OrderingRules:
    """Declared rules of order and fairness, from which the queue keys of every inserted row follow."""

    ordered_types: set[str] = field(default_factory=set)
    ordered_destinations: set[str] = field(default_factory=set)
    shared: dict[str, str] = field(default_factory=dict)
    """Message types whose handlers are fair, and the header by which they are."""
    fair_destinations: dict[str, Fairness] = field(default_factory=dict)

    def declare_destination(
        self, destination: str, ordered: bool, fair_by: str | None, weights: Mapping[str, int]
    ) -> None:
        """Declare in which order messages of any type leave for a destination. Raises InvalidSetting."""
        if fair_by is not None and (not fair_by or ordered or destination in self.ordered_destinations):
            raise InvalidSetting(f"{destination}: fair_by= names a header or 'key', and an ordered one has no turns")
        if weights and (fair_by is None or any(weight < 1 for weight in weights.values())):
            raise InvalidSetting(f"{destination}: weights= are whole numbers from 1 on, for the tenants of fair_by=")
        if ordered and destination in self.fair_destinations:
            raise InvalidSetting(f"{destination}: ordered= and fair_by= exclude each other; declare one of them")
        if ordered:
            self.ordered_destinations.add(destination)
        if fair_by is not None:
            declared = Fairness(fair_by, dict(weights))
            if self.fair_destinations.setdefault(destination, declared) != declared:
                raise InvalidSetting(
                    f"{destination}: fair_by={self.fair_destinations[destination].header!r} is "
                    "declared already; name one header"
                )

    def incoming(self, envelope: Envelope) -> QueueKeys:
        return self.of_type(envelope.message_type).place(envelope.partition_key, envelope.headers)

    def outgoing(self, envelope: Envelope) -> QueueKeys:
        return self.of_destination(envelope.destination).place(envelope.partition_key, envelope.headers)

    def of_type(self, message_type: str) -> Rule:
        """The rule for messages of this type in the inbox."""
        if not self.ordered_types and not self.shared:
            return BY_ITS_KEY
        handled_as = [message_type, *newer_types(message_type)]
        whole = next((each for each in handled_as if each in self.ordered_types), None)
        header = next((self.shared[each] for each in handled_as if each in self.shared), None)
        return Rule(None if whole is None else _WHOLE + stream_of(oldest_type(whole)), header)

    def of_destination(self, destination: str) -> Rule:
        """The rule for everything that goes there."""
        if destination in self.ordered_destinations:
            return Rule(_WHOLE)
        fairness = self.fair_destinations.get(destination)
        return BY_ITS_KEY if fairness is None else Rule(None, fairness.header)


def stream_of(message_type: str) -> str:
    """Return the name of all messages of an ordered handler, in whichever version the code has their type."""
    return unversioned(message_type)


def name_of_order(ordering_key: str) -> str:
    """Return the ordering key as people read it: the stream of an ordered handler by its name."""
    return ordering_key.removeprefix(_WHOLE)


def share_of(envelope: Envelope, header: str) -> str:
    """The tenant that a message is counted for; those that name none share one share."""
    return share(envelope.partition_key, envelope.headers, header)


def share(partition_key: str | None, headers: Mapping[str, str], header: str) -> str:
    """The same of these parts of a message.

    Any header may name it, of any length; a name that is too long for an index is told by its digest.
    """
    name = partition_key or "" if header == BY_KEY else headers.get(header, "")
    return name if utf8_bytes(name) <= MAX_TEXT_BYTES else f"digest:{fingerprint(name)}"
