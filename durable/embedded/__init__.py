"""Private servers for the demo, for tests and for a first try: a Postgres from a wheel, a RabbitMQ from its package.

Each belongs to the process that started it, touches no other server of the machine, and ends with the `with` block.
"""

from durable.embedded.postgres import Embedded, postgres

__all__ = ["Embedded", "postgres"]
