"""The unit of work in which `bus.send()` finds itself.

Tasks and threads that are started in a block inherit it. Within one task it holds for the code of the block and what
that calls, until the block ends:

    the block is entered in     it holds in
    a function or coroutine     that, and what it calls
    a context manager           the block of its user: `@contextmanager def orders(): with bus.enlist(...): yield`
    an iterated generator       that, and what it calls; and between two of its values, if there is no other one

Between two values of a generator with a block of its own nobody can tell whether its consumer means that, as the user
of a context manager does, or the one from before. So where there are both, bus.send() raises NoUnitOfWork, and the
consumer names the one that it means; so do tasks that are started meanwhile. A generator whose first step was a task
of its own, as `wait_for(anext(rows))` makes one, may have other steps anywhere: what inherits the block around it may
have been started by one of these, and is refused, too.

A block may be left in another context than it was entered in, and before one that was entered later: a generator that
is not run to its end is closed by a task of the event loop, and web frameworks run the parts of a dependency in
threads.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from opcode import opmap
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
    "itself, by its send(), or by ctx.send() in a handler; and close a generator that is not run to its end, by "
    "`async with contextlib.aclosing(...)`"
)
_ENTERED: Final = (
    "unit of work: entered before, and it is for one block; make another by bus.unit_of_work() or bus.enlist()"
)
_GENERATORS: Final = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_YIELD_FROM, _CACHE = opmap["SEND"], opmap["CACHE"]
_STEPS: Final = ("__next__", "__anext__")
_ENTERING: Final = ("__enter__", "__aenter__")
_STACKED: Final = ("enter_context", "enter_async_context")


class Block:
    """Block of code in which an outbox is in scope. It is entered once."""

    def __init__(self, scope: Scope, outbox: Callable[[], Outbox]) -> None:
        self.outbox = outbox
        self.before: Block | None = None
        """The one that was in scope here before."""
        self.within: Block | None = None
        """The one of the generator that has entered it, which may have been entered elsewhere."""
        self.generators: Sequence[FrameType] = ()
        """The iterated generators between whose values it may stay open, from the inside out, while it is open."""
        self.is_over = False
        self._scope = scope
        self._entered_by: ref[object] | None = None

    def __enter__(self) -> None:
        if self._entered_by is not None:
            raise WiringError(_ENTERED)
        self._entered_by = ref(_runner())
        self.generators = _iterated_generators() if _may_stay_open() else ()
        self._scope.enter(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over = True
        self._scope.leave(self)
        self.generators, self.within = (), None
        self.outbox = _nothing  # tasks that go on know this block for as long as they run

    @property
    def is_inherited(self) -> bool:
        """Tell whether it was entered by another task or thread than the present one."""
        return self._entered_by is None or self._entered_by() is not _runner()

    @property
    def outlives_its_task(self) -> bool:
        """Tell whether the task that has entered it is done, and it goes on."""
        entered_by = None if self._entered_by is None else self._entered_by()
        return entered_by is None or (isinstance(entered_by, asyncio.Future) and entered_by.done())


class Scope:
    """The unit of work in scope: one for each task and thread.

    What is in scope is a function: the unit of work of a web request begins with the first message that is sent, and a
    scoped session is that of the thread or task that sends.
    """

    def __init__(self) -> None:
        self._innermost: ContextVar[Block | None] = ContextVar("durable.outbox.scope", default=None)
        self._of_generators: dict[FrameType, list[Block]] = {}
        """The open blocks of iterated generators, wherever they run, from the outside in."""
        self._surrounded: dict[Block, None] = {}
        """Those of them that were entered within another one."""
        self._left = Block(self, _nothing)
        self._left.is_over = True

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

        The context tells which blocks were entered here, the frames which generators run and which are suspended.
        """
        meant, running = innermost, self._running()
        of_running = self._of_generators[running[0]] if running else []
        if running and (innermost is None or innermost.within is not of_running[-1]):
            meant = of_running[-1]
        suspended = {block.generators[0] for block in (innermost, meant) if block is not None and block.generators}
        suspended.difference_update(running)
        known = [block for block in (*_chain(innermost), *of_running) if not block.is_over]
        if suspended and any(not block.generators or block.generators[0] not in suspended for block in known):
            raise NoUnitOfWork(_AMBIGUOUS)
        if not running and meant is not None and meant.is_inherited and self._surrounds_a_straying_generator(meant):
            raise NoUnitOfWork(_AMBIGUOUS)
        return meant

    def _running(self) -> Sequence[FrameType]:
        """The generators with open blocks that run here, from the inside out."""
        return [frame for frame in _calls() if frame in self._of_generators]

    def _surrounds_a_straying_generator(self, block: Block) -> bool:
        return any(each.outlives_its_task and block in _chain(each.before) for each in list(self._surrounded))

    def enter(self, block: Block) -> None:
        block.before = self._open_block(self._innermost.get())
        each: Block | None = block
        while each is not None:
            before = self._open_block(each.before)  # or they would stay as long as this task
            each.before = self._left if before is not None and before.is_over else before
            each = each.before
        self._innermost.set(block)
        if self._of_generators and (running := self._running()):
            block.within = self._of_generators[running[0]][-1]
        for generator in block.generators:
            self._of_generators.setdefault(generator, []).append(block)
        if block.generators and block.before is not None:
            self._surrounded[block] = None

    def leave(self, block: Block) -> None:
        self._surrounded.pop(block, None)
        if self._innermost.get() is block:  # otherwise it is left in another context, or before a later one
            self._innermost.set(self._open_block(block.before))
        for generator in block.generators:
            self._of_generators[generator].remove(block)
            if not self._of_generators[generator]:
                del self._of_generators[generator]

    def _open_block(self, block: Block | None) -> Block | None:
        """The innermost one that is not over, of those that were entered here; or the one that was inherited."""
        while block is not None and block.is_over and not block.is_inherited:
            block = block.before
        return block


def _nothing() -> Outbox:
    raise NoUnitOfWork(_LEFT)


def _chain(block: Block | None) -> Iterator[Block]:
    """Yield this block and those around it, each once."""
    waiting, known = [block], set[int]()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            yield each
            waiting += (each.before, each.within)


def _runner() -> object:
    """The task or thread that runs here."""
    task = asyncio.current_task() if asyncio._get_running_loop() is not None else None
    return threading.current_thread() if task is None else task


def _calls() -> Iterator[FrameType]:
    """Yield what this task or thread is calling, from the inside out.

    Behind the first step of a task is the event loop, and what has started that. Sessions call listeners in a greenlet
    of their own.
    """
    first = _first_call(_runner())
    frame: FrameType | None = sys._getframe(1)
    lets: Any = greenlet.getcurrent()
    while lets is not None:
        while frame is not None and frame.f_globals.get("__name__") != asyncio.events.__name__:
            if frame.f_globals is not globals():
                yield frame
            if frame is first:
                return
            frame = frame.f_back
        lets = lets.parent
        frame = lets.gr_frame if lets is not None else None


def _first_call(runner: object) -> FrameType | None:
    if not isinstance(runner, asyncio.Task):
        return None
    work: Any = runner.get_coro()
    return getattr(work, "cr_frame", None) or getattr(work, "gi_frame", None)


def _may_stay_open() -> bool:
    """Tell whether the block that is entered now may stay open between two values of a generator.

    A function's block ends before its caller goes on. That of a context manager of the application ends with the block
    of its user, whoever enters it there, and that of an ExitStack with the stack.
    """
    is_of_user = True
    for frame in _calls():
        name, module = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if module == "contextlib" and name in _STACKED:
            return True
        if module == "contextlib" or module.startswith("durable.") or _is_of_manager(frame):
            continue
        if _is_generator(frame):
            return is_of_user
        is_of_user = name in _ENTERING
    return False


def _iterated_generators() -> Sequence[FrameType]:
    """The generators among the calls here, from the inside out, without those of context managers."""
    return [frame for frame in _calls() if _is_generator(frame) and not _is_of_manager(frame)]


def _is_generator(frame: FrameType) -> bool:
    """Tell whether it yields values one by one: an iterator of the application does so by its method, and is alike."""
    flags = frame.f_code.co_flags
    return bool(flags & _GENERATORS and not flags & inspect.CO_ITERABLE_COROUTINE) or frame.f_code.co_name in _STEPS


def _is_of_manager(frame: FrameType) -> bool:
    """Tell whether it is a generator that contextlib makes a context manager of: its user goes on within its block."""
    driver = frame.f_back
    while driver is not None and driver.f_code.co_flags & inspect.CO_GENERATOR and _delegates(driver):
        driver = driver.f_back
    return _is_generator(frame) and driver is not None and driver.f_globals.get("__name__") == "contextlib"


def _delegates(generator: FrameType) -> bool:
    """Tell whether it runs another one by `yield from`."""
    code, at = generator.f_code.co_code, generator.f_lasti
    while at > 0 and code[at] == _CACHE:  # Python 3.12 is already behind the instruction
        at -= 2
    return code[at] == _YIELD_FROM
