"""Middleware that comes with durable: `bus.use(Logging())`."""
