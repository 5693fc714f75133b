"""dualwrite's tables as models that Django does not manage, with what the admin shows. Only dualwrite writes them."""

from __future__ import annotations

from django.db import models


class Table(models.Model):
    """A table of dualwrite's."""

    class Meta:
        """Django's options. There is nothing to add, to change or to delete by Django."""

        abstract = True
        managed = False
        default_permissions = ("view", "operate")

    def __str__(self) -> str:
        return str(self.pk)


class TransactionalId(Table):
    """An id of a writer, with the state of its last transaction, and what was lost."""

    transactional_id = models.CharField(max_length=255, primary_key=True)
    owner = models.CharField(max_length=255)
    updated_at = models.DateTimeField()
    prepared_transaction_state = models.CharField(max_length=64)
    prepared_generation = models.IntegerField()
    resolved_generation = models.IntegerField()
    lost = models.TextField()

    class Meta(Table.Meta):
        """Django's options."""

        db_table = "kafka_transaction_state"


class Lease(Table):
    """The lease of a pool on an id."""

    transactional_id = models.CharField(max_length=255, primary_key=True)
    owner = models.CharField(max_length=255)
    leased_until = models.DateTimeField()

    class Meta(Table.Meta):
        """Django's options."""

        db_table = "kafka_transaction_lease"


class JournalGate(Table):
    """The journal of a prefix: open while Kafka is down."""

    prefix = models.CharField(max_length=255, primary_key=True)
    epoch = models.BigIntegerField()
    changed_at = models.DateTimeField()
    changed_by = models.CharField(max_length=255)
    failure = models.TextField(null=True)  # noqa: DJ001  (as it is in the table)

    class Meta(Table.Meta):
        """Django's options."""

        db_table = "dualwrite_journal_gate"


class DeadLetter(Table):
    """A row that a relay, or what empties a journal, could not publish."""

    id = models.BigAutoField(primary_key=True)
    relay = models.CharField(max_length=255)
    source_table = models.CharField(max_length=255)
    source_id = models.CharField(max_length=255)
    source_row = models.TextField()
    topic = models.CharField(max_length=249, null=True)  # noqa: DJ001  (as it is in the table)
    error_kind = models.CharField(max_length=255)
    error = models.TextField()
    attempts = models.IntegerField()
    failed_at = models.DateTimeField()

    class Meta(Table.Meta):
        """Django's options."""

        db_table = "dualwrite_dead_letter"
