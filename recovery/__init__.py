"""Recovery of envelopes whose node died: none is lost.

Ownership
    Every row of work is owned by one node, or by ANY_NODE. Only its owner sends or handles it. The owner and its
    epoch fence every change, so whatever this package decides about liveness, no row is finished twice:
    liveness is advice, the epoch is the truth.

Alive
    `membership` holds a session advisory lock on a connection of its own, and writes a heartbeat. A killed process
    loses the lock at once. A paused one, or one behind a half-open connection, keeps it for a while: its heartbeat
    grows stale. `policy` decides; see its table. A node that finds itself struck off, or its connection gone, drops
    everything it had in memory and joins again under a new id.

Recovered
    `dormant_nodes`   finds them and hands their rows back to ANY_NODE, each row's epoch one higher and marked as
                      interrupted. One node at a time does this, by an advisory lock, in short transactions.
    `former`          gives back the rows of the former nodes of this process
    `outgoing`        claims unowned envelopes for the destinations that are not latched, as far as there is room
    `incoming`        claims unowned messages for the handlers, as far as there is room
    `shares`          claims of each tenant as much as its weight says
    `ordered`         claims what comes in an order, a key at a time
    `scheduled`       makes due rows claimable, and finishes expired ones
    `recurring`       runs the schedules that the application declares, each occurrence once over all nodes
    `forgotten`       releases what this node owns and does not work on, after commits whose reply was lost
    `maintenance`     makes and drops partitions
    `idle_addresses`  forgets the agents of addresses without work

Of calls
    `registering`, `announcing`, `offering` and `singleton_locks` keep in the database who offers which service.

When
    `agent` runs these when it is woken: by NOTIFY from a commit that left rows unowned, by an agent that has room
    again, by the clock when something is due, and by polling in any case. A wake-up that is lost costs one poll
    interval and nothing else.
"""

if __name__ != "durable.recovery":
    raise ImportError("import durable.recovery, not recovery: a second copy of every class would be loaded")
