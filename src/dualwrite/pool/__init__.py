"""A pool of writers for services: units of work from many threads share commits (docs/guides/pool.md)."""
