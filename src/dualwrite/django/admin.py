"""Read-only pages of Django's admin: ids, leases, journals and dead letters, with the actions of the console.

Whoever has the permission `view` sees them, and `operate` carries out actions. They are those of `dualwrite.console`, which is
needed for them, and show and log the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from asgiref.sync import async_to_sync
from django.contrib import admin, messages
from django.contrib.auth import get_permission_codename

from dualwrite.django.configuration import aliases, configuration
from dualwrite.django.models import DeadLetter, JournalGate, Lease, TransactionalId
from dualwrite.django.pools import pool
from dualwrite.errors import DualWriteError
from dualwrite.recovery.recoverer import ids_with_lanes
from dualwrite.stores.base import TxnStateStore
from dualwrite.transactional_id import TransactionalId as Id

if TYPE_CHECKING:
    from dualwrite.console.actions import Form


def _alias() -> str:
    """The database that the pages show: `default` if it is dualwrite's, or else the first one that is."""
    found = aliases()
    return "default" if "default" in found or not found else found[0]


def _carried_out(name: str, description: str, forms: Callable[[TxnStateStore, Iterable[Any]], Iterable[Form]]) -> Any:
    """An action of the admin that carries out an action of the console, once for each form."""

    @admin.action(permissions=["operate"], description=description)
    def action(model_admin: Any, request: Any, chosen: Any) -> None:
        try:
            from dualwrite.console.actions import Actions  # noqa: PLC0415  (it needs an extra)
            from dualwrite.console.subject import Subject  # noqa: PLC0415  (as above)

            store, settings = pool(_alias()).store, configuration(_alias()).settings
            actions = Actions(Subject(settings, store), done=lambda: None)
            for form in forms(store, chosen):
                carried = async_to_sync(actions.carry_out)(name, form, request.user.get_username())
                level = messages.SUCCESS if carried.succeeded else messages.WARNING
                model_admin.message_user(request, f"{carried.what}: {carried.outcome or 'This goes on.'}", level)
        except DualWriteError as error:
            model_admin.message_user(request, f"{error}", messages.ERROR)

    action.__name__ = name
    return action


def _logical(chosen: Iterable[TransactionalId]) -> list[str]:
    """The ids without their lanes."""
    return sorted({Id.of_row(row.transactional_id).logical for row in chosen})


def _ids(store: TxnStateStore, chosen: Iterable[TransactionalId]) -> Iterable[Form]:
    for name in _logical(chosen):
        lanes = ids_with_lanes(store, [name])
        fences = [f"{lane} {row.fence}" for lane in lanes if (row := store.read(lane)) is not None]
        yield {"id": [name], "fence": fences}


def _entries(store: TxnStateStore, chosen: Iterable[TransactionalId]) -> Iterable[Form]:
    from dualwrite.console.actions import entry_key  # noqa: PLC0415  (as above)

    for name in _logical(chosen):
        rows = ((lane, store.read(lane)) for lane in ids_with_lanes(store, [name]))
        keys = [entry_key(lane, entry) for lane, row in rows if row is not None for entry in row.lost]
        yield {"id": [name], "entry": keys}


def _gates(_: TxnStateStore, chosen: Iterable[JournalGate]) -> Iterable[Form]:
    return ({"prefix": [gate.prefix]} for gate in chosen)


def _letters(_: TxnStateStore, chosen: Iterable[DeadLetter]) -> Iterable[Form]:
    letters = list(chosen)
    for relay in sorted({each.relay for each in letters}):
        yield {"relay": [relay], "letter": [str(each.id) for each in letters if each.relay == relay]}


class ReadOnlyAdmin(admin.ModelAdmin):
    """A page that changes nothing by itself."""

    def get_queryset(self, request: Any) -> Any:
        """Of dualwrite's database."""
        return super().get_queryset(request).using(_alias())

    def _nobody(self, *_: Any) -> bool:
        return False

    has_add_permission = has_change_permission = has_delete_permission = _nobody

    def has_operate_permission(self, request: Any) -> bool:
        """Whoever has the permission `operate` of the model."""
        return bool(request.user.has_perm(f"{self.opts.app_label}.{get_permission_codename('operate', self.opts)}"))


@admin.register(TransactionalId)
class TransactionalIdAdmin(ReadOnlyAdmin):
    """Ids, and what waits on them."""

    list_display = ("transactional_id", "owner", "updated_at", "prepared_transaction_state", "waits", "has_lost")
    search_fields = ("transactional_id", "owner")
    actions = (
        _carried_out("recover", "Recover the chosen ids", _ids),
        _carried_out("publish", "Publish the lost messages of the chosen ids again", _ids),
        _carried_out("acknowledge", "Acknowledge what is lost or unverified on the chosen ids", _entries),
    )

    @admin.display(boolean=True)
    def waits(self, row: TransactionalId) -> bool:
        """Whether the last transaction may be undecided at Kafka; a live writer clears that when it is idle."""
        return bool(row.prepared_transaction_state) and row.prepared_generation > row.resolved_generation

    @admin.display(boolean=True)
    def has_lost(self, row: TransactionalId) -> bool:
        """Whether transactions were lost, or could not be verified."""
        return row.lost not in ("", "[]")


@admin.register(Lease)
class LeaseAdmin(ReadOnlyAdmin):
    """Which process has which id."""

    list_display = ("transactional_id", "owner", "leased_until")
    search_fields = ("transactional_id", "owner")


@admin.register(JournalGate)
class JournalGateAdmin(ReadOnlyAdmin):
    """Journals."""

    list_display = ("prefix", "epoch", "changed_at", "changed_by", "failure")
    actions = (_carried_out("drain", "Publish the journals of the chosen prefixes", _gates),)


@admin.register(DeadLetter)
class DeadLetterAdmin(ReadOnlyAdmin):
    """Dead letters of relays and journals."""

    list_display = ("id", "relay", "topic", "error_kind", "attempts", "failed_at")
    list_filter = ("relay", "topic")
    actions = (
        _carried_out("replay", "Publish the chosen dead letters", _letters),
        _carried_out("drop", "Delete the chosen dead letters", _letters),
    )
