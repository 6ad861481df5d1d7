"""Observers, such as those of a tracer: their own errors never change what they observe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from durable.tasks.cancelling import raise_if_cancelled
from durable.telemetry import log


@contextmanager
def forgiving(observe: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Observe this block; it is told of the block's error, and may not raise one of its own."""
    observer = ExitStack()
    try:
        observer.enter_context(observe())
    except BaseException as error:
        _tell(error)
    try:
        yield
    except BaseException as error:
        _leave(observer, error)
        raise
    _leave(observer, None)


def _leave(observer: ExitStack, observed: BaseException | None) -> None:
    try:
        observer.__exit__(type(observed) if observed else None, observed, observed.__traceback__ if observed else None)
    except BaseException as error:
        if error is not observed:
            _tell(error)


def _tell(error: BaseException) -> None:
    raise_if_cancelled(error)
    log.exception("a hook for spans failed, and is ignored")
