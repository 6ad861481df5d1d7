"""Survivors that are no fault of the tests, each with its reason.

A row names the file, and the changed lines as they are and as the mutant has them: rows stay right when lines move.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Known(NamedTuple):
    file: str
    before: str
    after: str
    reason: str


KNOWN: Final[tuple[Known, ...]] = (
    Known(
        "durable/agents/arrivals.py",
        "except InvalidMessage:",
        "except CosmicRayTestingException:",
        "the caller raises the same refusal then",
    ),
    Known(
        "durable/agents/fence.py",
        "@property\ndef is_disturbed(self) -> bool:",
        "def is_disturbed(self) -> bool:",
        "check() is called each time then, and does nothing when it has nothing to do: this spares a step",
    ),
    Known(
        "durable/agents/receiving.py",
        "self._queued_bytes = 0",
        "self._queued_bytes = 1",
        "one byte less fits into a bound of millions",
    ),
    Known(
        "recovery/membership.py",
        "except BaseException:",
        "except CosmicRayTestingException:",
        "the membership ends all the same; the log names the failed ROLLBACK instead of its cause",
    ),
    Known(
        "recovery/ordered_claims.py",
        "return 0.0 if claimed else _REST * (time.monotonic() - began)",
        "return 0.0 if claimed else _REST * (time.monotonic() / began)",
        "the length of a rest between two looks that find nothing; a new message is claimed by its hint",
    ),
    Known(
        "recovery/incoming_claims.py",
        "return inbox.claim(conn, schema, message_type=message_type, batch_size=100, node=node)",
        "return inbox.claim(conn, schema, message_type=message_type, batch_size= 101, node=node)",
        "the size of a batch; the rest follows in the next one",
    ),
    Known(
        "recovery/due_rows.py",
        "there_is_more |= expired == most",
        "there_is_more |= expired >= most",
        "a statement changes no more rows than its limit",
    ),
    Known(
        "transports/frames.py",
        "size_bytes: int = field(default=0, compare=False)",
        "size_bytes: int = field(default= 1, compare=False)",
        "a frame that was not read has no size that is used",
    ),
    Known(
        "transports/tcp/server_side.py",
        "fitting = self.peer_max_frame_bytes // (8 * len(outcomes))",
        "fitting = self.peer_max_frame_bytes // ( 9 * len(outcomes))",
        "reasons that do not fit into a frame are cut a little shorter",
    ),
    Known(
        "transports/tcp/stream.py",
        'reason = error.strerror or str(error) or "the peer closed the connection"',
        'reason = error.strerror and str(error) or "the peer closed the connection"',
        "the words of an error: `[Errno 104]` stands before them",
    ),
)


def reasons() -> dict[tuple[str, str, str], str]:
    return {(each.file, each.before, each.after): each.reason for each in KNOWN}
