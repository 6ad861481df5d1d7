"""The results of all trials: a table by room and module, the survivors with their changes, and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tests.mutants.operators.known import reasons
from tests.mutants.operators.rooms import files_of
from tests.mutants.operators.trial import Fate, Tried

_HEAD = ("made", "killed", "survived", "incompetent")


def known_reason(each: Tried) -> str:
    """Return the reason of a known survivor, or nothing."""
    return reasons().get((each.mutation.file, each.mutation.before, each.mutation.after), "")


def new_survivors(results: Sequence[Tried]) -> list[Tried]:
    return [each for each in results if each.fate is Fate.SURVIVED and not known_reason(each)]


def table(results: Sequence[Tried]) -> str:
    """One line for each module, and the sums; percentages are of the mutants that are programs."""
    files = [file for file in files_of() if any(each.mutation.file == file for each in results)]
    width = max(map(len, files), default=5)
    lines = [_line("module", width, _HEAD, "killed %")]
    lines += [_sums(file, width, [each for each in results if each.mutation.file == file]) for file in files]
    lines.append(_sums("all", width, results))
    by = Counter(_killer(each) for each in results if each.fate is Fate.KILLED)
    return "\n".join([*lines, "", "killed by " + ", ".join(f"{count} {name}" for name, count in by.most_common())])


def survivors(results: Sequence[Tried]) -> str:
    """All survivors: the known ones with their reasons."""
    return "\n\n".join(_survivor(each) for each in results if each.fate is Fate.SURVIVED)


def _survivor(each: Tried) -> str:
    reason = known_reason(each)
    told = f"known: {reason}" if reason else each.said or f"{each.tests} tests execute the line"
    return f"{each.mutation.name}\n  {told}\n{each.mutation.diff}"


def as_json(results: Sequence[Tried]) -> list[dict[str, Any]]:
    rooms = files_of()
    return [
        {
            "room": rooms[each.mutation.file].name,
            "file": each.mutation.file,
            "line": each.mutation.line,
            "operator": each.mutation.operator,
            "before": each.mutation.before,
            "after": each.mutation.after,
            "fate": str(each.fate),
            "by": each.by,
            "said": each.said,
            "known": known_reason(each),
            "tests": each.tests,
            "seconds": round(each.seconds, 1),
        }
        for each in results
    ]


def _sums(name: str, width: int, results: Sequence[Tried]) -> str:
    counts = Counter(each.fate for each in results)
    programs = counts[Fate.KILLED] + counts[Fate.SURVIVED]
    share = f"{100 * counts[Fate.KILLED] / programs:.0f}" if programs else "-"
    return _line(name, width, tuple(_figures(len(results), counts)), share)


def _figures(made: int, counts: Counter[Fate]) -> Iterator[str]:
    yield str(made)
    yield from (str(counts[fate]) for fate in (Fate.KILLED, Fate.SURVIVED, Fate.INCOMPETENT))


def _line(name: str, width: int, cells: tuple[str, ...], share: str) -> str:
    return f"{name:{width}}" + "".join(f"{cell:>13}" for cell in cells) + f"{share:>10}"


def _killer(each: Tried) -> str:
    """Return the kind of a killing test: the folder of its suite, the simulation, or a timeout."""
    if "Timeout (>" in each.said or each.by == "timeout":
        return "timeouts"
    return "/".join(each.by.split("/")[:2]) if "/" in each.by else each.by
