"""Inspection of a cluster and its topics, by read-only requests."""
