"""Backends of Django in whose transactions every block can send."""
