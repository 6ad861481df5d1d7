import sys
from dataclasses import dataclass

from durable import Bus, Settings, message
from tests.support.pages import EXAMPLES

sys.path.insert(0, str(EXAMPLES / "lines"))
from lines import LineTransport

sys.path.pop(0)
settings = Settings()


@message("orders.order-placed")
@dataclass
class OrderPlaced:
    number: int
