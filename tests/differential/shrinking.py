"""The smallest workload that still differs: steps, messages and options are left out, one after another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence

from msgspec.structs import replace

from tests.differential.workload import Item, Refused, Step, Unit, Workload

Fails = Callable[[Workload], Awaitable[bool]]


async def shrink(workload: Workload, fails: Fails, *, at_most: int = 150) -> Workload:
    """Return a smaller workload that fails, after this many runs at most."""
    best, size = workload, len(workload.steps) // 2
    while size and at_most > 0:
        start = 0
        while start < len(best.steps) and at_most > 0:
            fewer = replace(best, steps=[*best.steps[:start], *best.steps[start + size :]])
            at_most -= 1
            if fewer.steps and await fails(fewer):
                best = fewer
            else:
                start += size
        size //= 2
    while at_most > 0:
        for smaller in _smaller(best):
            at_most -= 1
            if await fails(smaller):
                best = smaller
                break
            if at_most <= 0:
                break
        else:
            break
    return best


def _smaller(workload: Workload) -> Iterator[Workload]:
    for place, step in enumerate(workload.steps):
        for other in _smaller_steps(step):
            yield replace(workload, steps=[*workload.steps[:place], *other, *workload.steps[place + 1 :]])


def _smaller_steps(step: Step) -> Iterator[Sequence[Step]]:
    yield []
    if isinstance(step, Unit):
        if step.end != "commit":
            yield [replace(step, end="commit")]
        for items in _smaller_lists(step.items):
            if items:
                yield [replace(step, items=items)]
    elif isinstance(step, Refused):
        yield from ([replace(step, item=item)] for item in _smaller_items(step.item))


def _smaller_lists(items: list[Item]) -> Iterator[list[Item]]:
    for place, item in enumerate(items):
        yield [*items[:place], *items[place + 1 :]]
        for other in _smaller_items(item):
            yield [*items[:place], other, *items[place + 1 :]]


def _smaller_items(item: Item) -> Iterator[Item]:
    for sends in _smaller_lists(item.sends):
        yield replace(item, sends=sends)
    for option in ("key", "tenant", "delay", "deliver_by", "business_key"):
        if getattr(item, option) is not None:
            yield replace(item, **{option: None})
    if item.is_undone:
        yield replace(item, is_undone=False)
    if item.script:
        yield replace(item, script=item.script[1:])
    if item.lane != "plain":
        yield replace(item, lane="plain")
