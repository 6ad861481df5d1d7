"""What an application declares: handlers, routes, schedules, middleware, retry policies and circuit breakers."""
