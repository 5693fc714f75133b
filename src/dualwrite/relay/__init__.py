"""A relay."""
