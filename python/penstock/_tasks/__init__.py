"""The app, its tasks, and the parts of a call: options, retries, headers, middleware."""
