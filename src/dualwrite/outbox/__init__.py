"""Rows of a table that are messages: published and removed in one dual write, so that each is published once.

`Drain` is the engine of `dualwrite.relay`, and knows nothing of its leases and loops. What it drains is a `Source`: the outbox
of a program by an `OutboxLayout`, or any other table.
"""
