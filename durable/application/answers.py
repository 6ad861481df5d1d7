"""Answers that are awaited: a handler keeps them, and Bus.wait_for() returns them.

ctx.reply() --in-reply-to: the request--> inbox --> keep_answer --> answers, in the transaction that finishes it
                                                                       |
                                         Bus.wait_for(request, Reply) <-'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from durable.application.incoming import Context
from durable.errors import Reject

GROUP: Final = 100
"""The number of answers that are kept in one transaction."""


def keeper_of(cls: type) -> Callable[..., Any]:
    """Make the handler of answers of this class: its attempt keeps those that it does not refuse."""

    async def keep_answer(answer: Any, ctx: Context) -> None:
        if ctx.request_id is None:
            raise Reject("the answer names no request: its header in-reply-to is missing, or no UUID; use ctx.reply()")

    keep_answer.__annotations__ = {"answer": cls, "ctx": Context, "return": None}
    keep_answer.__qualname__ = keep_answer.__name__
    return keep_answer
