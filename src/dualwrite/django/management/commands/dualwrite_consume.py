"""`manage.py dualwrite_consume path.to.handler`: consume topics, with a handler that uses the ORM."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS
from django.utils.module_loading import import_string

from dualwrite.django.configuration import configuration
from dualwrite.django.consuming import DjangoConsumer
from dualwrite.django.pools import close_pools
from dualwrite.errors import DualWriteError
from dualwrite.processor.options import ProcessorOptions
from dualwrite.texts import error_text


class Command(BaseCommand):
    """See the module."""

    help = "Consume topics: each message takes effect once, in the database and in what the handler sends. SIGTERM ends it."

    def add_arguments(self, parser: Any) -> None:
        """The handler, what it reads, and what a processor can do about messages that fail."""
        parser.add_argument("handler", help="path.to.handler: called as handler(message, tx) in a block of atomic()")
        parser.add_argument("--topic", action="append", required=True, help="a topic; repeatable")
        parser.add_argument("--group", help="the consumer group; the PREFIX of the settings if it is left out")
        parser.add_argument("--using", help="the alias of the database")
        parser.add_argument("--batches", action="store_true", help="call handler(messages, tx), once for each transaction")
        parser.add_argument("--batch", type=int, default=ProcessorOptions().batch, help="messages of one transaction, at most")
        parser.add_argument("--attempts", type=int, default=ProcessorOptions().attempts, help="for one message")
        parser.add_argument("--dead-letter-topic", help="where messages go that can't be processed; else they stop the command")
        parser.add_argument("--start", choices=("earliest", "latest"), default="earliest", help="where a new group begins")

    def handle(self, *_: Any, handler: str, topic: list[str], **given: Any) -> None:
        """Consume until SIGTERM.

        Raises:
            CommandError: The handler can't be imported, or the processor has stopped with an error.
        """
        using = given["using"] or DEFAULT_DB_ALIAS
        chosen = {name: given[name] for name in ("batch", "attempts", "dead_letter_topic", "start")}
        try:
            function, group = import_string(handler), given["group"] or configuration(using).prefix
            options = ProcessorOptions(**chosen)
            DjangoConsumer(function, topic, group, using=using, takes_batches=given["batches"], options=options).run()
        except ImportError as error:
            raise CommandError(f"The handler can't be imported: {error}") from error
        except DualWriteError as error:
            raise CommandError(error_text(error)) from error
        finally:
            close_pools(using)
