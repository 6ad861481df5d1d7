"""Simulation: the agents, rules, recovery and units of work of whole services, on virtual time, under seeded faults.

    loop       a virtual event loop; its processes crash, freeze and resume at any await
    tables     tables in memory: transactions, row locks, savepoints
    sql        one function for each statement of durable/storage/sql that the simulation meets
    server     a database server: connections, COMMITs that are lost on their way, locks, notifications
    driver     the server as a driver of SQLAlchemy, for units of work and handlers
    network    `sim://` between the processes: drops, duplicates, delays, silence in one direction
    process    a process of a service, which is one node after another
    workload   the messages of a run, and what their handlers do
    faults     the faults of a run
    checks     the invariants
    world      one run: a seed, or a seed and some of its faults
    shrink     the fewest faults with which a seed still fails

`python -m tests.simulation` runs seeds and prints what they find. A run is a function of its seed and its faults.
"""
