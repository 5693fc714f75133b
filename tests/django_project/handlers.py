"""Handlers that `manage.py dualwrite_consume` calls."""

from __future__ import annotations

from typing import Any

from django.db import connection

from django_project.shop.models import Event, Topic

SESSIONS: list[Any] = []
"""The driver's connection of each call; kept, so that none has the address of an earlier one."""


def copy(message: Any, tx: Any) -> None:
    """Write an event for a message, and send it on."""
    number = int(message.value())
    SESSIONS.append(connection.connection)
    Event(number=number, writer=message.key().decode()).save(force_insert=True)
    if number == 13:
        raise ValueError("an unlucky number")
    tx.send(Topic.name(), str(number), key=message.key())


def copy_all(messages: list[Any], tx: Any) -> None:
    """The same for all messages of a transaction."""
    for message in messages:
        copy(message, tx)
