"""Django: messages that commit with `atomic()`.

    INSTALLED_APPS = [..., "dualwrite.django"]
    DUALWRITE = {"default": {"PREFIX": "shop", "KAFKA": "127.0.0.1:9092"}}

    with dualwrite.django.atomic() as tx:
        order.save()
        tx.send("orders", order.as_json(), key=str(order.pk))

The block is Django's `atomic(durable=True)` on its own connection, with its own driver. At its end both sides commit as one.
See docs/guides/django.md.
"""

from dualwrite.errors import MissingDependencyError

try:
    from dualwrite.django.asynchronous import arun
    from dualwrite.django.blocks import Atomic, atomic
    from dualwrite.django.captures import capture_messages
    from dualwrite.django.pools import close_pools, pool
    from dualwrite.django.units import current, send
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "dualwrite.django needs a package that is not installed.", cause=str(error), next_step='pip install "dualwrite[django]"'
    ) from error

__all__ = ["Atomic", "arun", "atomic", "capture_messages", "close_pools", "current", "pool", "send"]
