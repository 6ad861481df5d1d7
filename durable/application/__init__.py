"""Declarations of an application: handlers, routes, schedules, middleware, retry policies, circuit breakers."""
