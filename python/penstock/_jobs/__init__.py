"""Jobs that were enqueued: their state, their results, waiting for many, and the one that runs here."""
