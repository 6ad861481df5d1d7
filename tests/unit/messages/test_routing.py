"""Where messages go: a command to one destination, an event to any number."""

from __future__ import annotations

import msgspec
import pytest

from durable import message, upcaster
from durable.errors import RoutingError
from durable.messages.routing import LOCAL, Routes

PLACED = "orders.placed"
BILLING = "tcp://billing:1"
MAIL = "tcp://mail:1"


@message("routing.placed")
class Placed(msgspec.Struct):
    number: int = 1


@message("routing.placed", version=2)
class PlacedV2(msgspec.Struct):
    number: int = 1


@upcaster(Placed, to=PlacedV2)
def newer(placed: Placed) -> PlacedV2:
    return PlacedV2(placed.number)


@pytest.fixture
def routes() -> Routes:
    return Routes()


class TestCommands:
    def test_destination_of_the_caller_precedes_all_routes(self, routes: Routes) -> None:
        routes.route(PLACED, BILLING)
        routes.handled_here(PLACED)
        assert routes.for_send(PLACED, MAIL) == MAIL

    def test_route_precedes_the_handler_here(self, routes: Routes) -> None:
        routes.handled_here(PLACED)
        routes.route(PLACED, BILLING)
        assert routes.for_send(PLACED) == BILLING

    def test_handler_here_precedes_a_subscriber(self, routes: Routes) -> None:
        routes.subscribe(PLACED, BILLING)
        routes.handled_here(PLACED)
        assert routes.for_send(PLACED) == LOCAL

    def test_command_goes_to_its_only_subscriber(self, routes: Routes) -> None:
        routes.subscribe(PLACED, BILLING)
        routes.subscribe(PLACED, BILLING)
        assert routes.for_send(PLACED) == BILLING

    def test_command_with_several_subscribers_is_refused_with_advice_to_publish(self, routes: Routes) -> None:
        routes.subscribe(PLACED, BILLING)
        routes.subscribe(PLACED, MAIL)
        with pytest.raises(RoutingError, match=r"2 subscribers: use publish\(\)"):
            routes.for_send(PLACED)

    def test_command_without_a_destination_is_refused_with_advice(self, routes: Routes) -> None:
        with pytest.raises(RoutingError, match=r"bus\.route\(Placed, to=\.\.\.\).*send\(\.\.\., to=\.\.\.\)"):
            routes.for_send("routing.placed")

    def test_command_of_an_older_version_is_refused_with_the_newer_class(self, routes: Routes) -> None:
        routes.route("routing.placed.v2", BILLING)
        with pytest.raises(RoutingError, match=r"routing\.placed\.v2 has one: send the newer class, PlacedV2"):
            routes.for_send("routing.placed")

    def test_command_has_one_route_and_accepts_the_same_again(self, routes: Routes) -> None:
        routes.route(PLACED, BILLING)
        routes.route(PLACED, BILLING)
        with pytest.raises(RoutingError, match="cannot also go to"):
            routes.route(PLACED, MAIL)
        assert routes.for_send(PLACED) == BILLING


class TestEvents:
    def test_event_goes_to_every_subscriber_once_and_to_the_handler_here(self, routes: Routes) -> None:
        for destination in (BILLING, MAIL, BILLING):
            routes.subscribe(PLACED, destination)
        routes.handled_here(PLACED)
        assert routes.for_publish(PLACED) == [BILLING, MAIL, LOCAL]

    def test_event_may_have_no_subscribers(self, routes: Routes) -> None:
        assert routes.for_publish(PLACED) == []

    def test_a_command_is_not_published(self, routes: Routes) -> None:
        routes.route(PLACED, BILLING)
        with pytest.raises(RoutingError, match=r"use send\(\)"):
            routes.for_publish(PLACED)

    def test_type_with_subscribers_and_no_route_is_an_event(self, routes: Routes) -> None:
        routes.handled_here(PLACED)
        assert not routes.is_event(PLACED)
        routes.subscribe(PLACED, BILLING)
        assert routes.is_event(PLACED)
        routes.route(PLACED, BILLING)
        assert not routes.is_event(PLACED)


def test_every_declared_destination_is_shown_by_message_type(routes: Routes) -> None:
    routes.subscribe("b", MAIL)
    routes.handled_here("b")
    routes.route("a", BILLING)
    assert routes.destinations() == {"a": [BILLING], "b": [MAIL, LOCAL]}
