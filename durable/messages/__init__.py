"""Messages and their envelopes: names, codecs, versions, routes and order. No I/O."""
