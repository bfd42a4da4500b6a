"""Workflows: steps, their encoding for the broker, and handles of sent workflows."""
