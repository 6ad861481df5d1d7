"""All targets, by name, in the order in which `make fuzz` takes them."""

from __future__ import annotations

from tests.fuzz import amqp, codecs, described, exchanges, requests, texts, wire

TARGETS = {
    target.name: target
    for target in (
        *wire.TARGETS,
        *codecs.TARGETS,
        *texts.TARGETS,
        *amqp.TARGETS,
        *requests.TARGETS,
        *exchanges.TARGETS,
        *described.TARGETS,
    )
}
