"""Enqueued jobs: their state, their results, waiting for many, and the job that runs here."""
