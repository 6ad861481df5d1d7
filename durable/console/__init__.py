"""The console: what an operator sees, and mends, in a browser.

    app.mount("/console", console_app(bus, tokens={"a long secret": Person("alice", Role.OPERATOR)}))
    durable-agent console app:bus --port 8089

    access     who may come in, and as what; the login
    security   headers of every answer, and the proof that a form was ours
    reading    what the pages show: the same reads as those of /health, /metrics and the command line
    pages      the pages
    actions    what forms do: each names who did it
    runs       resolutions of many dead letters, with progress

Pages are made here, whole, and work without scripts; htmx (vendored) keeps them up to date.
"""

from durable.errors import needs

with needs("durable.console", extra="console"):
    from durable.console.access import Authorize, Person, Role
    from durable.console.app import console_app

__all__ = ["Authorize", "Person", "Role", "console_app"]
