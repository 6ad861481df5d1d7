"""The invariants of durable, looked at in the tables themselves.

I1   every committed send has one fate: handled, a dead letter, or expired
I2   a message has at most one effect
I3   no effect of a message that was not sent, or whose transaction was rolled back
I4   epochs only rise, and a new owner has a new epoch
I5   messages of one order have their effects in the order of their commits
I6   what agents hold in memory is bounded, and nothing when there is nothing to do
I7   a destination that can be reached is unlatched within a few pings
I8   a row ends once
I9   a stop in good order leaves no owned rows
I10  no row is left with an owner that does not work on it: all work ends within a bound
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from tests.simulation.rows import Work
from tests.simulation.tables import Table

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.world import World

_FINAL: Final = ("sent", "handled", "expired", "cancelled")


class Checks:
    """Watches the tables of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._last: dict[Any, int] = {}
        for server in world.servers.values():
            server.store.watch = self._watcher(server.name)

    def _watcher(self, service: str) -> Callable[[Table[Any], Hashable, Any, Any], None]:
        def watch(table: Table[Any], key: Hashable, before: Any, after: Any) -> None:
            if before is not None and after is not None and isinstance(after, Work):
                self._changed(service, before, after)
            elif table.name == "effects" and after is not None:
                self._effect(after)

        return watch

    def _changed(self, service: str, before: Work, after: Work) -> None:
        is_new_owner = before.owner_id != after.owner_id
        if after.epoch < before.epoch or (is_new_owner and after.epoch == before.epoch):
            owners = f"{before.owner_id}, {before.epoch} -> {after.owner_id}, {after.epoch}"
            self._world.violation(f"I4: {service}: row {after.id} goes from owner, epoch {owners}")

    def _effect(self, effect: Any) -> None:
        if not effect.position:
            return
        order = effect.lane, effect.key
        if effect.position < self._last.get(order, 0):
            later = self._last[order]
            self._world.violation(f"I5: {order}: message {effect.position} was handled after {later}")
        self._last[order] = max(effect.position, self._last.get(order, 0))

    # ------------------------------------------------------------------ while it runs

    def held(self) -> None:
        """I6: buffers keep within their bounds."""
        settings = self._world.settings
        most = settings.buffer_size + settings.batch_size
        for process, name, agent in self._agents():
            if agent.buffer.used_count > most:
                self._world.violation(f"I6: {process} {name} holds {agent.buffer.used_count}, more than {most}")

    def left(self, process: Process, node: int) -> None:
        """I9: the process has stopped in good order."""
        for table in ("outgoing", "incoming"):
            rows = [row for row in process.server.store.tables[table].rows.values() if row.owner_id == node]
            if rows:
                self._world.violation(f"I9: {process} has left {len(rows)} rows of {table}, such as {rows[0]}")

    # ------------------------------------------------------------------ when all is done

    def unfinished(self) -> list[str]:
        """I10, I7: what is still to be done."""
        found = []
        for name, server in self._world.servers.items():
            tables = server.store.tables
            found += [f"{name}: {row}" for table in ("outgoing", "incoming") for row in tables[table].rows.values()]
            circuits = tables["circuits"].rows.values()
            found += [f"{name}: latched {row.key}" for row in circuits if row.kind == "destination" and row.probing]
            dead = tables["nodes"].rows.keys() - server.store.node_locks
            found += [f"{name}: node {node} is dead, and has its row" for node in sorted(dead, key=str)]
        return found

    def fates(self) -> None:
        """I1, I2, I3, I8."""
        workload, world = self._world.workload, self._world
        sent = {row.number for server in world.servers.values() for row in server.store.tables["sent"].rows.values()}
        effects = Counter(
            row.number for server in world.servers.values() for row in server.store.tables["effects"].rows.values()
        )
        letters, ends = self._ends()
        for number, count in sorted(effects.items()):
            if count > 1:
                world.violation(f"I2: message {number} has {count} effects")
            if number in workload.items and number not in sent:
                world.violation(f"I3: message {number} has an effect, and was never sent")
        for number in sorted(sent):
            id_ = workload.ids[number]
            received = int(effects[number] > 0) + (id_ in letters) + ends["expired", "incoming", id_]
            # A sender without an answer does not know that the message has arrived in time.
            fates = received or ends["expired", "outgoing", id_]
            if fates == 0:
                world.violation(f"I1: message {number} ({id_}) is lost: {workload.items[number]}")
            elif fates > 1:
                world.violation(f"I8: message {number} ({id_}) has {fates} fates")
        for (outcome, side, id_), count in ends.items():
            if count > 1:
                world.violation(f"I8: {id_} of {side} was {outcome} {count} times")
        self._occurrences(set(effects))
        of_none = [id_ for _, _, id_ in ends if id_ not in set(workload.ids.values())]
        if of_none:
            world.violation(f"I3: {of_none[0]} has a history, and was never sent")

    def _occurrences(self, numbers: set[int]) -> None:
        """I1: the last occurrence of a schedule has had its effect."""
        for server in self._world.servers.values():
            for row in server.store.tables["schedules"].rows.values():
                if row.last_at is not None and int(row.last_at.timestamp()) not in numbers:
                    self._world.violation(f"I1: the occurrence of {row.name} at {row.last_at} is lost")

    def _ends(self) -> tuple[set[UUID], Counter[tuple[str, str, UUID]]]:
        letters: set[UUID] = set()
        ends: Counter[tuple[str, str, UUID]] = Counter()
        for server in self._world.servers.values():
            letters |= {row.id for row in server.store.tables["letters"].rows.values()}
            for row in server.store.tables["history"].rows.values():
                if row.outcome in _FINAL and row.message_type != "sim.tick":
                    ends[row.outcome, row.side, row.id] += 1
        return letters, ends

    def idle(self) -> list[str]:
        """I6: what agents hold although there is nothing to do."""
        found = []
        for process, name, agent in self._agents():
            room = agent.buffer.used_count, agent.buffer.used_bytes
            if agent.held() or len(agent.buffer) or any(room):
                found.append(f"{process} {name} holds {agent.held()}, room {room}")
            queues = agent.buffer._keys, agent.buffer._busy, agent.buffer._shares
            if any(queues):
                found.append(f"{process} {name} remembers {queues}")
        for process in self._world.slots.values():
            node = process.runtime.node if process.is_ready else None
            receiver = node.agents.receiver if node is not None else None
            if receiver is not None and receiver.statistics().waiting:
                found.append(f"{process}: {receiver.statistics()}")
        return found

    def _agents(self) -> Iterator[tuple[Process, str, Any]]:
        for process in self._world.slots.values():
            node = process.runtime.node if process.is_ready else None
            if node is not None:
                for name, sender in node.agents.senders.items():
                    yield process, f"sending to {name}", sender
                for name, handler in node.agents.handlers.items():
                    yield process, f"handling {name}", handler
