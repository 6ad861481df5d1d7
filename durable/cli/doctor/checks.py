"""Results of the checks of `doctor`, including checks that cannot be made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from durable.errors import DurableError
from durable.storage.outages import advice_of, described


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; `advice` is empty when the verdict is ok."""

    name: str
    verdict: Verdict
    detail: str
    advice: str = ""


def ok(name: str, detail: str) -> Check:
    return Check(name, Verdict.OK, detail)


def warn(name: str, detail: str, advice: str) -> Check:
    return Check(name, Verdict.WARN, detail, advice)


def fail(name: str, detail: str, advice: str) -> Check:
    return Check(name, Verdict.FAIL, detail, advice)


def attempted(name: str, check: Callable[[], Check], advice: str) -> Check:
    """Run a check; a database or network error makes it fail. `advice`: for what has none of its own."""
    from psycopg import Error as DriverError  # with the drivers, which load when used

    try:
        return check()
    except DurableError as error:
        return fail(name, str(error), advice)
    except DBAPIError as error:
        return fail(name, described(error), advice_of(error) or advice)
    except (OSError, TimeoutError, SQLAlchemyError, DriverError) as error:
        return fail(name, described(error), advice)
