"""Tasks of asyncio that end together, that must end, or whose errors must not spread."""
