"""What `manage.py dualwrite_consume` runs: a handler whose blocks are Django's, so that it may use the ORM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from django.db import Error, close_old_connections

from dualwrite.django.blocks import atomic
from dualwrite.django.pools import pool
from dualwrite.errors import FencedError
from dualwrite.process import stopped_by_sigterm
from dualwrite.processor.attempts import Content, Runner
from dualwrite.processor.options import ProcessorOptions
from dualwrite.processor.processor import Handle, check_journal, make_loop
from dualwrite.processor.progress import Finish
from dualwrite.transaction import Transaction
from dualwrite.transactional import check_has_run, name_of

_OF_STORES_DRIVERS: Final = ("psycopg.", "pymysql.", "sqlite3")
_PASSING: Final = (1205, 1213, 2002, 2003, 2006, 2013)
"""Of mysqlclient: a lock's time limit, a deadlock, and connections that can't be made or are lost."""


class DjangoConsumer:
    """Reads topics as a member of a consumer group; a DualProcessor whose transactions are blocks of `atomic()`.

    The rows that the handler writes, the messages that it sends and the group's positions commit together.

    Args:
        handle: Called as `handle(message, tx)`, or with a list of messages if it `takes_batches`.
        topics: Their names.
        group: The consumer group.
        using: The alias of the database.
        takes_batches: Whether the handler is called with all messages of a transaction.
        options: As for DualProcessor.

    Raises:
        ConfigurationError: As for `pool`, and for DualProcessor.
    """

    def __init__(
        self,
        handle: Callable[[Any, Transaction[Any]], object],
        topics: Sequence[str],
        group: str,
        *,
        using: str | None = None,
        takes_batches: bool = False,
        options: ProcessorOptions | None = None,
    ) -> None:
        made = pool(using)
        options = options or ProcessorOptions()
        check_journal(made.options.when_kafka_is_down, options)
        runner = _BlockRunner(using, handle if takes_batches else _each_of(handle))
        self._loop = make_loop(runner, made.store, {**made.settings.kafka, "group.id": group}, topics, options)

    def stop(self) -> None:
        """End `run` once the transaction in progress has ended. May be called from any thread."""
        self._loop.stop()

    def run(self) -> None:
        """Process messages until `stop`, or SIGTERM. Raises: as `DualProcessor.run`."""
        self._loop.begin()
        with stopped_by_sigterm(self.stop):
            self._loop.run()


class _BlockRunner(Runner):
    def __init__(self, using: str | None, handle: Handle) -> None:
        self._using = using
        self._handle = handle

    def run(self, content: Content | None, finish: Finish) -> None:
        """Between two blocks Django closes connections that are broken, or older than CONN_MAX_AGE."""
        close_old_connections()
        try:
            with atomic(self._using) as tx:
                messages = None if content is None else content()
                if messages:
                    check_has_run(self._handle(messages, tx), name_of(self._handle))
                finish(tx)
        finally:
            close_old_connections()

    def is_transient(self, error: BaseException) -> bool:
        """The store knows the errors of its own driver; mysqlclient's have the same numbers."""
        cause = (error.__cause__ or error) if isinstance(error, Error) else error
        if cause is error or type(cause).__module__.startswith(_OF_STORES_DRIVERS):
            return isinstance(error, FencedError) or pool(self._using).store.passes(cause)  # fenced: a pool uses another id
        return bool(cause.args) and cause.args[0] in _PASSING


def _each_of(handle: Callable[[Any, Transaction[Any]], object]) -> Handle:
    name = name_of(handle)

    def all_of(messages: list[Any], tx: Transaction[Any]) -> None:
        for message in messages:
            check_has_run(handle(message, tx), name)

    return all_of
