from shop import OrderPlaced, Shipment

from durable import Bus
from durable.testing import eventually


async def test_placed_order_is_shipped(node: Bus) -> None:
    async with node.unit_of_work():
        message = node.send(OrderPlaced(17))
    receipt = await node.wait_for(message)  # handled, or a dead letter
    assert receipt.outcome == "handled"
    async with node.unit_of_work() as uow:
        assert await uow.session.get(Shipment, 17) is not None


async def test_order_of_another_service_is_shipped(node: Bus) -> None:
    async def shipped() -> bool:
        async with node.unit_of_work() as uow:
            return await uow.session.get(Shipment, 18) is not None

    async with node.unit_of_work():
        node.send(OrderPlaced(18))
    await eventually(shipped, what="the shipment of order 18")
