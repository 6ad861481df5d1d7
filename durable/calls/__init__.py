"""Calls between services: fast, typed, and not durable. See docs/calls.md.

contract    @service and @call: the declaration that both ends share
payload     arguments and results as bytes, and the digest of their schema
provider    the services that this process offers
links       the connections to other addresses
caller      an object with the methods of a service, each of which is a call
"""

from durable.calls.contract import call, service

__all__ = ["call", "service"]
