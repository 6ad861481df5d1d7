"""`durable-agent dead-letters`."""
