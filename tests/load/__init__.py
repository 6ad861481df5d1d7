"""A web service under wrk, with a worker killed in the middle; `make load` runs it."""
