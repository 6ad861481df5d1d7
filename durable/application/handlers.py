"""Handlers of the application.

    @bus.handles(OrderPlaced)
    async def reserve(order: OrderPlaced, session: AsyncSession, ctx: Context, clock: Annotated[Clock, Depends(clock)])

With `max_batch=N` the message may be annotated list[OrderPlaced]: the handler is then called once for all messages of
its transaction.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from durable.application import signatures
from durable.application.circuit_breaker import CircuitBreaker
from durable.application.incoming import Incoming
from durable.application.injection import CONTEXT, SESSION, Asking, Injected, resolve, takes_list
from durable.application.retry import ByError, RetryPolicy
from durable.arguments import Argument, annotations_of, refuse_misfits
from durable.envelope import Envelope, LeasedEnvelope
from durable.errors import InvalidSetting, Verdict
from durable.messages.ordering import share_of
from durable.outbox.envelope_factory import Cause, Parent

MaxBatch = int | Literal["auto"]
OnDeadLetter = Literal["continue", "park"]
OnExpiry = Literal["forget", "dead-letter"]

_SHOWN_AS = {"by_error": "on_error"}
"""Parameters of Bus.handles() that have another name here."""


@dataclass(frozen=True)
class Handler:
    """A declared handler of one message type."""

    message_type: str
    cls: type[Any]
    function: Callable[..., Any]
    retry: RetryPolicy | None
    """None: as the settings say."""
    concurrency: int | None
    """The number of messages that run at once on each node; None: as the settings say."""
    max_batch: MaxBatch | None
    """The number of waiting messages that may share one transaction; 1: each has its own; "auto": as many as take
    `group_time` together, as long as nobody can tell, see durable.agents.group_size; None: as the settings say."""
    timeout: timedelta | None
    """The bound of one attempt; None: as the settings say."""
    by_error: ByError = field(default_factory=dict)
    """Retry policies by class of error, used instead of `retry`."""
    circuit_breaker: CircuitBreaker | None = None
    """The rule by which failures stop the handler; None: they never do."""
    inherit_deliver_by: bool = False
    """True if messages sent by the handler expire with its message, unless they have a deadline of their own."""
    ordered: bool = False
    """One message at a time over all nodes, in their order."""
    on_dead_letter: OnDeadLetter | None = None
    """The fate of messages behind a dead letter in their order; None: as the settings say."""
    on_expiry: OnExpiry | None = None
    """The fate of an expired message; None: as the settings say."""
    fair_by: str | None = None
    """The header, or `key`, that names the tenant of a message; None: first come, first served."""
    weights: Mapping[str, int] = field(default_factory=dict)
    """The number of messages of a tenant that are handled in its turn, 1 by default."""
    keeps_answers: bool = False
    """True for the handler of answers that are awaited: its attempts keep them."""
    is_async: bool = field(init=False)
    takes_list: bool = field(init=False)
    """True if the handler is called once with all messages of its transaction."""
    _injected: Injected = field(init=False, repr=False)

    def __post_init__(self) -> None:
        signatures.refuse_unfit(self.function, self.name)
        refuse_misfits(f"handler {self.name}", self._given())
        refuse_verdicts(f"handler {self.name}", self.by_error)
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise InvalidSetting(f"{self.name}: timeout must be above 0 (got {self.timeout})")
        if self.run_of_key < 1 or (self.concurrency is not None and self.concurrency < 1):
            raise InvalidSetting(f"{self.name}: concurrency and max_batch must be at least 1")
        if self.on_dead_letter not in (None, "continue", "park"):
            raise InvalidSetting(f"{self.name}: on_dead_letter={self.on_dead_letter!r}; use 'continue' or 'park'")
        if self.on_expiry not in (None, "forget", "dead-letter"):
            raise InvalidSetting(f"{self.name}: on_expiry={self.on_expiry!r}; use 'forget' or 'dead-letter'")
        if self.fair_by is not None and (self.ordered or not self.fair_by):
            raise InvalidSetting(f"{self.name}: fair_by= names a header or 'key', and an ordered handler has no turns")
        if self.weights and (self.fair_by is None or any(weight < 1 for weight in self.weights.values())):
            raise InvalidSetting(f"{self.name}: weights= are whole numbers from 1 on, for the tenants of fair_by=")
        is_async = inspect.iscoroutinefunction(self.function)
        object.__setattr__(self, "is_async", is_async)
        object.__setattr__(self, "takes_list", takes_list(self.function, self.cls, of=self.name))
        if self.takes_list and self.max_batch == "auto":
            raise InvalidSetting(f"{self.name}: one call for a list has no time for each; give max_batch a number")
        if self.takes_list and self.max_batch in (None, 1):
            raise InvalidSetting(f"{self.name}: a list has one message with max_batch=1; give max_batch=, such as 100")
        if self.takes_list and self.inherit_deliver_by:
            raise InvalidSetting(f"{self.name}: a list of messages has no one deliver_by to inherit; take them singly")
        asking = Asking(self.name, self.cls, is_async, self.takes_list)
        object.__setattr__(self, "_injected", resolve(self.function, asking))
        if self.takes_list and self._injected.takes(CONTEXT):
            raise InvalidSetting(
                f"handler {self.name}: a provider takes a Context, and there is no one Context for a list of messages; "
                "take them singly, or leave the Context out"
            )

    @property
    def name(self) -> str:
        """The dotted name of its function; that of an answer which is kept is the declaration."""
        return "bus.expects()" if self.keeps_answers else signatures.dotted_name(self.function)

    def parks(self, by_default: OnDeadLetter) -> bool:
        """Return True if a dead letter stops its key, or its ordered handler; `by_default` is the setting."""
        return (self.on_dead_letter or by_default) == "park"

    @property
    def run_of_key(self) -> int:
        """Return the number of messages of one key that may be taken together."""
        return self.max_batch if isinstance(self.max_batch, int) else 1

    def batch(self, unsaid: MaxBatch) -> MaxBatch:
        """Return `max_batch`, or `unsaid` where it was not given. "auto" is for the messages of async handlers."""
        batch = self.max_batch or unsaid
        # Waits of a thread cannot be watched; messages that are put back would lose the turns of their tenants.
        return 1 if batch == "auto" and (self.fair_by or not self.is_async) else batch

    @property
    def returns(self) -> Sequence[type]:
        """The classes of the messages that it returns, by its annotation."""
        return signatures.returned_classes(signatures.hints_of(self.function, self.name).get("return"))

    def _given(self) -> list[Argument]:
        """The parameters of Bus.handles()."""
        hints = annotations_of(Handler)
        given = [each.name for each in fields(self) if each.init]
        return [Argument(_SHOWN_AS.get(name, name), getattr(self, name), hints[name]) for name in given]

    def cause(self, lease: LeasedEnvelope) -> Cause:
        """Return the cause for messages that follow from this one."""
        deliver_by = lease.envelope.deliver_by if self.inherit_deliver_by else None
        return Cause(lease.envelope, deliver_by, handler=self.name, parents=[Parent.of(lease)])

    def cause_of_list(self, leases: Sequence[LeasedEnvelope]) -> Cause:
        """The same for all messages of one call: their list sends the same ids each time, and is no conversation."""
        return Cause(None, handler=self.name, parents=[Parent.of(lease) for lease in leases])

    @property
    def takes_session(self) -> bool:
        """True when the handler, or a provider, is given the session."""
        return self._injected.takes(SESSION)

    @property
    def share_of(self) -> Callable[[Envelope], str] | None:
        """Function that returns the tenant of a message; None without fair_by."""
        return None if self.fair_by is None else partial(share_of, header=self.fair_by)

    async def run(self, call: Incoming) -> Any:
        """Run an async handler, send the messages that it returned, and return them."""
        failures: list[BaseException] = []
        async with AsyncExitStack() as stack:
            with _noted(failures):
                result = await self._injected.call(call, stack)
        _raise_swallowed(failures)
        call.context.cascade(result)
        return result

    def run_sync(self, call: Incoming) -> Any:
        """Run a sync handler in the calling thread, as run() does."""
        try:
            failures: list[BaseException] = []
            with ExitStack() as stack, _noted(failures):
                result = self._injected.call_sync(call, stack)
            _raise_swallowed(failures)
            call.context.cascade(result)
            return result
        except (StopIteration, GeneratorExit) as error:  # no Future can carry them; coroutines do the same (PEP 479)
            raise RuntimeError(f"the handler raised {type(error).__name__}") from error


@contextmanager
def _noted(failures: list[BaseException]) -> Iterator[None]:
    """Note the error that ends this block: a provider around it may not make a success of the handler's failure."""
    try:
        yield
    except BaseException as error:
        failures.append(error)
        raise


def _raise_swallowed(failures: list[BaseException]) -> None:
    if failures:
        raise failures.pop()


def refuse_verdicts(of: str, errors: Iterable[type[Exception]]) -> None:
    """Raise InvalidSetting for a rule for an error that is a handler's own decision."""
    for error in errors:
        if issubclass(error, Verdict):
            raise InvalidSetting(f"{of}: {error.__name__} is a verdict of the handler, and is obeyed as it is")
