"""Mishaps by chance, around what is sent and what is handled: for tests.

    bus.use(Chaos(fail=0.2, crash=0.01, seed=7), stage="after")

             send                                          handle
    drop     it is not sent                                it is finished, and its handler has not run
    delay    it leaves up to `longest_delay` later         its handler runs up to so much later
    fail     send() raises                                 as if its handler had raised, before it or after it
    crash    the process kills itself before it or after it: so does nothing in it, until its transaction commits, last
    duplicate  it is sent twice, as two messages           its handler runs twice, in one transaction

What a handler does in its transaction happens once all the same where it fails, is late or crashes. Where it is dropped
or run twice, that is what the test asked for: the message is still finished once.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Literal
from uuid import UUID

from durable.application.incoming import Incoming
from durable.application.middleware import HandleNext, Middleware, SendNext
from durable.errors import InvalidSetting
from durable.outbox.envelope_factory import Outgoing


class ChaosError(Exception):
    """Raised by Chaos, as if by a handler or a send; none of durable's own errors, so that it is retried."""


class Chaos(Middleware):
    """Lets each mishap happen with its chance (0 to 1), on both sides or `only` on one.

    The same seed and the same order of messages give the same mishaps. `longest_delay` is in seconds. Raises
    InvalidSetting.
    """

    def __init__(
        self,
        *,
        duplicate: float = 0,
        delay: float = 0,
        drop: float = 0,
        crash: float = 0,
        fail: float = 0,
        longest_delay: float = 0.05,
        only: Literal["send", "handle"] | None = None,
        seed: int = 0,
    ) -> None:
        self._chances = {"duplicate": duplicate, "delay": delay, "drop": drop, "crash": crash, "fail": fail}
        for name, chance in self._chances.items():
            if not 0 <= chance <= 1:
                raise InvalidSetting(f"Chaos: {name}={chance} is no chance; use one between 0 and 1")
        if longest_delay < 0 or only not in (None, "send", "handle"):
            raise InvalidSetting("Chaos: longest_delay must not be negative, and only= is 'send' or 'handle'")
        self._longest_delay = longest_delay
        self._only = only
        self._rng = random.Random(seed)

    def send(self, outgoing: Outgoing, call_next: SendNext) -> UUID | None:
        mishaps = self._mishaps("send")
        if "drop" in mishaps:
            return None
        if "delay" in mishaps and not {"delay", "at"} & outgoing.options.keys():
            outgoing = outgoing.replace(options={**outgoing.options, "delay": self._delay()})
        _befall(mishaps, "early")
        sent = call_next(outgoing)
        if "duplicate" in mishaps:
            call_next(outgoing)
        _befall(mishaps, "late")
        return sent

    async def handle(self, incoming: Incoming, call_next: HandleNext) -> object:
        mishaps = self._mishaps("handle")
        if "drop" in mishaps:
            return None
        if "delay" in mishaps:
            await asyncio.sleep(self._delay())
        _befall(mishaps, "early")
        result = await call_next(incoming)
        if "duplicate" in mishaps:
            result = await call_next(incoming)
        _befall(mishaps, "late")
        return result

    def _mishaps(self, side: Literal["send", "handle"]) -> set[str]:
        """Choose the mishaps of the next message; also "early" or "late"."""
        if self._only not in (None, side):
            return set()
        mishaps = {name for name, chance in self._chances.items() if self._rng.random() < chance}
        return mishaps | {self._rng.choice(("early", "late"))}

    def _delay(self) -> float:
        return self._rng.uniform(0, self._longest_delay)


def _befall(mishaps: set[str], when: Literal["early", "late"]) -> None:
    if when not in mishaps:
        return
    if "crash" in mishaps:
        os.kill(os.getpid(), signal.SIGKILL)
    if "fail" in mishaps:
        raise ChaosError(f"chaos, {when}")
