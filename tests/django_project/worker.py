"""The process that the crash tests kill: threads that write events in blocks of `dualwrite.django.atomic()`.

With SHOP_ENGINE, a backend of ours, in blocks of Django's own.

python -m django_project.worker URL BOOTSTRAP PREFIX TOPIC FIRST COUNT CALLERS   write events FIRST … FIRST+COUNT-1

It prints `open`, and `told N` when the caller knows that event N is committed. SIZE is the number of writers.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import django
from django.conf import settings
from django.db import DatabaseError, connection, transaction

import dualwrite
from crash.worker import say
from fixtures.pace import LIMIT


def main() -> None:
    url, bootstrap, prefix, topic = sys.argv[1:5]
    first, count, callers = map(int, sys.argv[5:8])
    os.environ |= {"SHOP_DATABASE": url, "SHOP_KAFKA": bootstrap, "SHOP_PREFIX": prefix}
    os.environ["DJANGO_SETTINGS_MODULE"] = "django_project.settings"
    settings.DUALWRITE["default"] |= {
        "TIMEOUTS": {"claim": LIMIT, "kafka": LIMIT, "delivery": LIMIT},
        "OPTIONS": {"size": int(os.environ.get("SIZE", "2")), "timeout": LIMIT},
    }
    django.setup()
    import dualwrite.django as dualwrite_django  # noqa: PLC0415  (Django may be missing)
    from django_project.shop.models import Event  # noqa: PLC0415  (after the setup)

    atomic = transaction.atomic if "SHOP_ENGINE" in os.environ else dualwrite_django.atomic

    def one(number: int) -> None:
        try:
            with atomic():
                Event(number=number, writer=prefix).save(force_insert=True)
                dualwrite_django.send(topic, str(number), key=prefix)
        except (dualwrite.DualWriteError, DatabaseError) as error:
            say("error", number, type(error).__name__, error)
        else:
            say("told", number)

    say("open", *dualwrite_django.pool().transactional_ids)
    with ThreadPoolExecutor(1 if connection.vendor == "sqlite" else callers) as threads:
        list(threads.map(one, range(first, first + count)))
    dualwrite_django.close_pools()
    say("closed")


if __name__ == "__main__":
    main()
