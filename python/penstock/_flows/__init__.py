"""Steps of workflows, their way to the broker, and handles of those that were sent."""
