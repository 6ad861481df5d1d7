"""Metrics: what the agents have counted, and what waits in the tables, under names and labels.

families    what a metric is; labels whose values are bounded      process    those of one process
prometheus  the text that Prometheus scrapes                       service    those of the database
meters      the same as OpenTelemetry instruments
server      /metrics and /health, mounted or on a port of their own
"""
