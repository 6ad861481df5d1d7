"""The models of AsyncAPI 3.0, which refuse what the specification does not have."""

from __future__ import annotations

import json
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # one of its fields has the name of a method of pydantic
    from asyncapi3 import AsyncAPI3


def refuse_invalid(document: object) -> None:
    """Raise ValueError for a document that is not valid."""
    AsyncAPI3.model_validate(json.loads(json.dumps(document)))
