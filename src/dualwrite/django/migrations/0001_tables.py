"""Revision 0001: all tables; see dualwrite.django.schema. `manage.py makemigrations dualwrite` has written the models."""

from typing import Any, ClassVar

from django.db import migrations, models

from dualwrite.django.schema import Upgrade


class Migration(migrations.Migration):
    """The tables, and their models, which `makemigrations` compares with models.py."""

    initial = True

    dependencies: ClassVar[list[tuple[str, str]]] = []

    operations: ClassVar[list[Any]] = [
        Upgrade("0001"),
        migrations.CreateModel(
            name="DeadLetter",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("relay", models.CharField(max_length=255)),
                ("source_table", models.CharField(max_length=255)),
                ("source_id", models.CharField(max_length=255)),
                ("source_row", models.TextField()),
                ("topic", models.CharField(max_length=249, null=True)),
                ("error_kind", models.CharField(max_length=255)),
                ("error", models.TextField()),
                ("attempts", models.IntegerField()),
                ("failed_at", models.DateTimeField()),
            ],
            options={
                "db_table": "dualwrite_dead_letter",
                "abstract": False,
                "managed": False,
                "default_permissions": ("view", "operate"),
            },
        ),
        migrations.CreateModel(
            name="JournalGate",
            fields=[
                ("prefix", models.CharField(max_length=255, primary_key=True, serialize=False)),
                ("epoch", models.BigIntegerField()),
                ("changed_at", models.DateTimeField()),
                ("changed_by", models.CharField(max_length=255)),
                ("failure", models.TextField(null=True)),
            ],
            options={
                "db_table": "dualwrite_journal_gate",
                "abstract": False,
                "managed": False,
                "default_permissions": ("view", "operate"),
            },
        ),
        migrations.CreateModel(
            name="Lease",
            fields=[
                ("transactional_id", models.CharField(max_length=255, primary_key=True, serialize=False)),
                ("owner", models.CharField(max_length=255)),
                ("leased_until", models.DateTimeField()),
            ],
            options={
                "db_table": "kafka_transaction_lease",
                "abstract": False,
                "managed": False,
                "default_permissions": ("view", "operate"),
            },
        ),
        migrations.CreateModel(
            name="TransactionalId",
            fields=[
                ("transactional_id", models.CharField(max_length=255, primary_key=True, serialize=False)),
                ("owner", models.CharField(max_length=255)),
                ("updated_at", models.DateTimeField()),
                ("prepared_transaction_state", models.CharField(max_length=64)),
                ("prepared_generation", models.IntegerField()),
                ("resolved_generation", models.IntegerField()),
                ("lost", models.TextField()),
            ],
            options={
                "db_table": "kafka_transaction_state",
                "abstract": False,
                "managed": False,
                "default_permissions": ("view", "operate"),
            },
        ),
    ]
