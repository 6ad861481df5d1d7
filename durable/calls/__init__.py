"""Calls between services: fast, typed, and not durable. See docs/calls.md.

contract    @service and @call: the declaration that both ends share
payload     arguments and results as bytes, and the digest of their schema
provider    the services that this process offers
singletons  those of which one provider over all nodes runs
registry    who offers which service where, as far as this process knows
stored      the same, as it is in the database
choice      which provider a call goes to
places      what is called: an address, this process
providers   what callers share, and the place of those that are told no address
links       the connections to other addresses
caller      an object with the methods of a service, each of which is a call
"""

from durable.calls.contract import call, service
from durable.calls.providers import Provider

__all__ = ["Provider", "call", "service"]
