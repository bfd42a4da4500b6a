"""Jobs that were enqueued: their state, their results, how to wait for many, and which one runs here."""
