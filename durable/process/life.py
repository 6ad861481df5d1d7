"""The life of a process as one node after another.

    join --> agents --> stop                                    left in good order
      ^         |
      |         +--> membership lost, or an agent broke off     its rows are taken back by the next one
      |         +--> an agent stands, or does not end           the process ends with exit code 70, or it is reported
      +-- pause (recovery.policy.RejoinPolicy), pools emptied

A watchdog in a thread of its own sees to it that none of this stands still unseen, the event loop included.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from durable.errors import StorageUnavailable, said, text_of
from durable.node import DRAINS, Node
from durable.process.last_resort import EXIT_NO_MEMBER, EXIT_STUCK, Watchdog, end_process
from durable.recovery.former_memberships import Memberships
from durable.recovery.policy import RejoinPolicy
from durable.settings import Settings
from durable.storage.outages import is_lack
from durable.tasks.cancelling import raise_if_cancelled
from durable.tasks.crew import Stuck, cancel_once, end, wait
from durable.tasks.waiting import is_set_within
from durable.telemetry import log

_REPORTED: Final = 0.5  # of its bound: a step that takes so long is told of before its node ends
_STOP_MARGIN: Final = 20.0  # seconds for all of a stop that is no draining


class Life:
    """Makes nodes and runs them, until it is stopped."""

    def __init__(
        self, settings: Settings, make_node: Callable[[Memberships], Node], empty_pools: Callable[[], Awaitable[None]]
    ) -> None:
        self.node: Node | None = None
        self.where_loop_stands: Callable[[], str] = lambda: ""
        """Where the event loop stands, when it does; called in any thread."""
        self.owns_process = False
        """True if the process is the bus's own, so that a fault without recovery ends the process."""
        self._settings = settings
        self._make_node = make_node
        self._empty_pools = empty_pools
        self._memberships = Memberships()
        self._rejoin = RejoinPolicy()
        self._stopping = asyncio.Event()
        self._living: asyncio.Task[None] | None = None
        self._left_behind: list[asyncio.Task[Any]] = []
        self._last_failure = ""
        limit = settings.membership_timeout.total_seconds()
        reason = f"it was no node, or its event loop stood still, for {limit:g} s (membership_timeout)"
        self._watchdog = Watchdog(limit, reason, self._bite)

    @property
    def is_running(self) -> bool:
        """True when the process was started, and not stopped since."""
        return self._living is not None

    @property
    def stop_seconds(self) -> float:
        """The longest time that a stop may take."""
        return DRAINS * self._settings.drain_timeout.total_seconds() + _STOP_MARGIN

    async def start(self) -> None:
        """Join the nodes and start the agents; raises when the first node cannot."""
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping.clear()
        self._watchdog.watch()
        self._living = asyncio.create_task(self._live(started), name="durable")
        try:
            await asyncio.wait([started, self._living], return_when=asyncio.FIRST_COMPLETED)
            if not started.done():
                await self._living
                raise Stuck("the node ended before it had started")
            await started
            self._living.add_done_callback(self._tell_end)  # before that, its end is what start() raises
        except BaseException:
            await cancel_once([self._living], within=self.stop_seconds)  # the node leaves
            self._living = None
            raise

    async def ended(self) -> None:
        """Return when the process was stopped. Raises Stuck, or the error that has ended it, when no node follows."""
        if self._living is None:
            await self._stopping.wait()
            return
        await asyncio.wait([self._living])
        if not self._stopping.is_set():
            self._living.result()
            raise Stuck("the bus has ended by itself")

    def bind(self) -> None:
        """Make the process end in time from now on, even after a failure, where it is the bus's own."""
        if self._exits:
            self._watchdog.bind(self.stop_seconds, f"it did not stop within {self.stop_seconds:g} s")

    async def stop(self) -> None:
        """Drain, release and leave, within `stop_seconds`."""
        self._stopping.set()
        self.bind()
        if (living := self._living) is not None:
            await wait([living], within=self.stop_seconds)
            if left := await end([living], within=1):
                self._given_up(left)
        if not self._exits:
            self._watchdog.end()

    def end_watch(self) -> None:
        """Stop watching: the process is about to do something else, or to end by itself."""
        self._watchdog.end()

    def alive(self) -> None:
        """Hear from the event loop; it is well while it runs a node, or waits for the database to start one."""
        if not self.is_running or (self.node is not None and self.node.node_id):
            self._watchdog.hear()

    def problems(self) -> Sequence[str]:
        """Return the problems for the health check."""
        found = [
            f"{task.get_name()} does not end, although its node has" for task in self._left_behind if not task.done()
        ]
        if self.node is not None and (slowest := self.node.slowest_step()) is not None and slowest.share >= _REPORTED:
            found.append(f"{slowest.name} has stood for {slowest.seconds:.0f} s")
        return found

    # ------------------------------------------------------------------ one node after another

    async def _live(self, started: asyncio.Future[None]) -> None:
        while not self._stopping.is_set():
            self.node = self._make_node(self._memberships)
            try:
                await self.node.run(self._stopping, started)
                self._rejoin.ended_well()
            except BaseException as error:
                raise_if_cancelled(error)
                if isinstance(error, StorageUnavailable):
                    self._watchdog.hear()  # nothing can be a node now
                if not started.done():
                    if isinstance(error, Stuck) and error.tasks:
                        self._given_up(error.tasks)
                    started.set_exception(error)
                    return
                self._rejoin.failed()
                self._failed(error)
            finally:
                self.node = None
            if not self._stopping.is_set():
                await self._empty_pools()
                await is_set_within(self._stopping, self._rejoin.pause())

    def _tell_end(self, living: asyncio.Task[None]) -> None:
        """Log the end of this task: none may wait for it, as in an application's lifespan."""
        if self.is_running and not self._stopping.is_set():
            error = None if living.cancelled() else living.exception()
            log.critical(
                "the bus has ended by itself and handles nothing any more: %s", said(error) if error else "no error"
            )

    def _failed(self, error: BaseException) -> None:
        """Tell of it: in full the first time, and in a line while it goes on."""
        is_away = isinstance(error, StorageUnavailable) and not is_lack(error)
        text = "no database" if is_away else text_of(error)  # one outage has many texts
        is_new, self._last_failure = self._is_another_outage(error) or text != self._last_failure, text
        match error:
            case StorageUnavailable():
                log.log(logging.WARNING if is_new else logging.DEBUG, "no node now, will try again: %s", error)
            case Stuck(tasks=[]):
                log.error("node ends and joins again: %s", error)
            case Stuck():
                self._given_up(error.tasks)
            case _:
                log.error("the node failed and starts again: %s", said(error), exc_info=error if is_new else None)

    def _is_another_outage(self, error: BaseException) -> bool:
        """Tell whether the agents have worked since the last outage."""
        has_worked = self.node is not None and self.node.agents.receiver is not None
        return isinstance(error, StorageUnavailable) and (has_worked or self._rejoin.has_failed_once)

    def _given_up(self, left: Sequence[asyncio.Task[Any]]) -> None:
        names = ", ".join(task.get_name() for task in left)
        if self._exits:
            end_process(EXIT_STUCK, "the process ends: %s did not end when cancelled", names)
        log.critical("tasks left behind, which did not end when cancelled: %s (see the setting on_stuck)", names)
        self._left_behind += left

    def _bite(self, reason: str) -> None:
        """End the process, in the watchdog's thread."""
        if place := self.where_loop_stands():
            reason += f"; the event loop stands in {place}"
        if self._exits:
            code = EXIT_STUCK if self._watchdog.is_bound else EXIT_NO_MEMBER
            end_process(code, "the process ends: %s", reason)
        log.critical("the process should end: %s (see the setting on_stuck)", reason)

    @property
    def _exits(self) -> bool:
        wish = self._settings.on_stuck
        return wish == "exit" if wish is not None else self.owns_process
