"""Agents of a running node: sending, receiving and handling of messages."""
