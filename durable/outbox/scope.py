"""The unit of work in which `bus.send()` finds itself.

Tasks and threads that are started in a block inherit it. Within one task it holds for the code of the block and what
that calls, until the block ends:

    the block is entered in     it holds in
    a function or coroutine     that, and what it calls
    a context manager           the block of its user: `@contextmanager def orders(): with bus.enlist(...): yield`
    an iterated generator       that, and what it calls; and between two of its values, if there is no other one

Between two values of a generator with a block of its own nobody can tell whether its consumer means that, as the user
of a context manager does, or the one from before. So where there are both, bus.send() raises NoUnitOfWork, and the
consumer names the one that it means; so do tasks that are started meanwhile.

A block may be left in another context than it was entered in, and before one that was entered later: a generator that
is not run to its end is closed by a task of the event loop, and web frameworks run the parts of a dependency in
threads.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from itertools import count
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import greenlet

from durable.errors import NoUnitOfWork, WiringError

if TYPE_CHECKING:
    from durable.outbox.outbox import Outbox

_LEFT: Final = (
    "the unit of work in which this task was started is over, and the task goes on: open another in it by "
    "`async with bus.unit_of_work()`"
)
_AMBIGUOUS: Final = (
    "a generator has a unit of work open within another one, and either may be meant here: send with the unit of work "
    "itself, by its send(), or by ctx.send() in a handler"
)
_ENTERED: Final = (
    "unit of work: entered before, and it is for one block; make another by bus.unit_of_work() or bus.enlist()"
)
_numbers: Final = count(1)
_GENERATORS: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Block:
    """Block of code in which an outbox is in scope. It is entered once."""

    def __init__(self, scope: Scope, outbox: Callable[[], Outbox]) -> None:
        self.outbox = outbox
        self.before: Block | None = None
        self.frame: FrameType | None = None
        """The function, coroutine or generator that it is a part of, while it is open."""
        self.is_of_generator = False
        self.number = 0
        """Of two, the one that was entered later has the higher one."""
        self.is_over = False
        self._scope = scope
        self._entered_by: ref[object] | None = None

    def __enter__(self) -> None:
        if self._entered_by is not None:
            raise WiringError(_ENTERED)
        self._entered_by, self.number = ref(_runner()), next(_numbers)
        self.frame = _user()
        self.is_of_generator = self.frame is not None and _is_generator(self.frame)
        self._scope.enter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over = True
        self._scope.leave(self)
        self.frame = None

    @property
    def is_inherited(self) -> bool:
        """Tell whether it was entered by another task or thread than the present one."""
        return self._entered_by is None or self._entered_by() is not _runner()


class Scope:
    """The unit of work in scope: one for each task and thread.

    What is in scope is a function: the unit of work of a web request begins with the first message that is sent, and a
    scoped session is that of the thread or task that sends.
    """

    def __init__(self) -> None:
        self._innermost: ContextVar[Block | None] = ContextVar("durable.outbox.scope", default=None)
        self._of_generators: dict[FrameType, list[Block]] = {}
        """The open blocks of iterated generators, wherever they run."""

    def entered(self, outbox: Callable[[], Outbox]) -> Block:
        """The block in which this outbox is in scope."""
        return Block(self, outbox)

    @property
    def outbox(self) -> Outbox:
        """The outbox in scope; raises NoUnitOfWork."""
        block = self._open_block(self._innermost.get())
        if self._of_generators:
            block = self._among_generators(block)
        if block is None:
            raise NoUnitOfWork
        if block.is_over:
            raise NoUnitOfWork(_LEFT)
        return block.outbox()

    def _among_generators(self, innermost: Block | None) -> Block | None:
        """Return the block that the running code is a part of; raises NoUnitOfWork where nobody can tell.

        What is known of the context tells which blocks were entered, and in which order; the frames tell which of them
        are running. A block without a frame here is inherited, or held by an object, or that of a suspended generator.
        """
        known = [block for block in _chain(innermost) if not block.is_over]
        by_frame = {block.frame: block for block in reversed(known)}
        running = [found for frame in _frames() if (found := self._block_of(frame, by_frame)) is not None]
        if not running:
            suspended = innermost.frame if innermost is not None and innermost.is_of_generator else None
            if suspended is not None and any(block.frame is not suspended for block in known):
                raise NoUnitOfWork(_AMBIGUOUS)
            return innermost
        meant = running[0]
        frames = {block.frame for block in running}
        later = [block for block in known if block.number > meant.number and block.frame not in frames]
        hidden = [block for block in later if not block.is_inherited]
        if any(block.is_of_generator for block in hidden):
            raise NoUnitOfWork(_AMBIGUOUS)
        return hidden[0] if hidden else meant

    def _block_of(self, frame: FrameType, by_frame: Mapping[FrameType | None, Block]) -> Block | None:
        of_generator = self._of_generators.get(frame)
        return of_generator[-1] if of_generator else by_frame.get(frame)

    def enter(self, block: Block) -> None:
        block.before = self._open_block(self._innermost.get())
        for each in _chain(block):
            each.before = self._open_block(each.before)  # or they would stay as long as this task
        self._innermost.set(block)
        if block.frame is not None and block.is_of_generator:
            self._of_generators.setdefault(block.frame, []).append(block)

    def leave(self, block: Block) -> None:
        if self._innermost.get() is block:  # otherwise it is left in another context, or before a later one
            self._innermost.set(self._open_block(block.before))
        if block.frame is not None and block.is_of_generator:
            self._of_generators[block.frame].remove(block)
            if not self._of_generators[block.frame]:
                del self._of_generators[block.frame]

    def _open_block(self, block: Block | None) -> Block | None:
        """The innermost one that is not over, of those that were entered here; or the one that was inherited."""
        while block is not None and block.is_over and not block.is_inherited:
            block = block.before
        return block


def _chain(block: Block | None) -> Iterator[Block]:
    """Yield this block and those around it, from the inside out."""
    while block is not None:
        yield block
        block = block.before


def _runner() -> object:
    """The task or thread that runs here."""
    task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
    return threading.current_thread() if task is None else task


def _frames() -> Iterator[FrameType]:
    """Yield what is being called here, from the inside out; sessions call listeners in a greenlet of their own."""
    frame: FrameType | None = sys._getframe(1)
    lets: Any = greenlet.getcurrent()
    while lets is not None:
        while frame is not None:
            yield frame
            frame = frame.f_back
        lets = lets.parent
        frame = lets.gr_frame if lets is not None else None


def _user() -> FrameType | None:
    """The function or generator whose block is entered now; of a context manager, that of its user."""
    frame: FrameType | None = sys._getframe(1)
    while True:
        while frame is not None and _is_between(frame):
            frame = frame.f_back
        driver = frame
        while driver is not None and _is_generator(driver):  # a part of another goes on when that goes on
            driver = driver.f_back
        if driver is frame or driver is None or driver.f_globals.get("__name__") != "contextlib":
            return frame
        frame = driver


def _is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & _GENERATORS)


def _is_between(frame: FrameType) -> bool:
    """Tell whether this is code of durable or contextlib, between the block and what enters it."""
    name = frame.f_globals.get("__name__", "")
    return bool(name == "contextlib" or name.startswith("durable."))
