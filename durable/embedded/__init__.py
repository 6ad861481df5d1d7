"""Private servers for the demo, for tests and for a first try: a Postgres from a wheel, a RabbitMQ from its package.

Each belongs to the process that started it, touches no other server of the machine, and ends with the `with` block.
"""

from durable.embedded.postgres import Embedded, postgres
from durable.embedded.rabbitmq import Broker, rabbitmq

__all__ = ["Broker", "Embedded", "postgres", "rabbitmq"]
