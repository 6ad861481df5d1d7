from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from durable import Bus, Envelope, JsonCodec, message, register_codec, upcaster

bus = Bus("orders")
