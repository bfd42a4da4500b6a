"""The app, its tasks, and what a call of one takes: options, retries, headers, middleware."""
