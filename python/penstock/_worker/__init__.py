"""Python half of a worker: loads the apps, forks children, runs jobs. Started by crates/penstock-worker."""
