"""The admin's pages: read-only, with the console's actions for those who have the permission."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone

import dualwrite
import dualwrite.django
from crash.scene import Scene
from django_project.processes import in_doubt
from dualwrite.django.models import DeadLetter

PAGES = ("transactionalid", "lease", "journalgate", "deadletter")


@pytest.fixture
def operator(shop: Scene) -> Client:
    return client_of(shop, "operator", *(f"{what}_{page}" for what in ("view", "operate") for page in PAGES))


def client_of(scene: Scene, name: str, *permissions: str) -> Client:
    user = User.objects.create_user(f"{name}-{scene.transactional_id}", is_staff=True)
    found = Permission.objects.filter(content_type__app_label="dualwrite", codename__in=permissions)
    assert found.count() == len(permissions)
    user.user_permissions.set(found)
    client = Client()
    client.force_login(user)
    return client


def act(client: Client, page: str, name: str, *rows: str) -> str:
    given: dict[str, Any] = {"action": name, "_selected_action": list(rows)}
    return client.post(f"/admin/dualwrite/{page}/", given, follow=True).content.decode()


def test_pages_are_read_only(shop: Scene, operator: Client) -> None:
    with dualwrite.django.atomic() as tx:
        tx.send(shop.topic, "1")
    for page in PAGES:
        shown = operator.get(f"/admin/dualwrite/{page}/")
        assert shown.status_code == 200
        assert operator.get(f"/admin/dualwrite/{page}/add/").status_code == 403
    shown = operator.get("/admin/dualwrite/transactionalid/", {"q": shop.transactional_id}).content.decode()
    assert f"{shop.transactional_id}.1" in shown
    row = operator.get(f"/admin/dualwrite/transactionalid/{shop.transactional_id}.1/change/").content.decode()
    assert "Save" not in row
    assert client_of(shop, "nobody").get("/admin/dualwrite/lease/").status_code == 403


def test_a_viewer_has_no_actions(shop: Scene) -> None:
    viewer = client_of(shop, "viewer", "view_transactionalid")
    with dualwrite.django.atomic() as tx:
        tx.send(shop.topic, "1")
    assert "Recover the chosen ids" not in viewer.get("/admin/dualwrite/transactionalid/").content.decode()
    assert "done for" not in act(viewer, "transactionalid", "recover", f"{shop.transactional_id}.1")


@pytest.mark.slow
def test_an_operator_recovers(shop: Scene, operator: Client) -> None:
    row = in_doubt(shop)
    assert "Recover the chosen ids" in operator.get("/admin/dualwrite/transactionalid/").content.decode()
    shown = act(operator, "transactionalid", "recover", row)
    assert "the database had committed" in shown
    assert "messagelist" in shown
    assert "success" in shown
    assert shop.agree() == [1, 2]


@pytest.mark.slow
def test_what_is_lost_is_acknowledged_and_dead_letters_are_dropped(shop: Scene, operator: Client) -> None:
    in_doubt(shop)
    assert "There was nothing left." in act(operator, "transactionalid", "acknowledge", shop.transactional_id)
    given = {
        "relay": "r",
        "source_table": "outbox",
        "source_id": "1",
        "source_row": "{}",
        "error_kind": "E",
        "error": "e",
        "attempts": 1,
    }
    letter = DeadLetter.objects.create(**given, failed_at=timezone.now())
    assert "Deleted 1 dead letter" in act(operator, "deadletter", "drop", str(letter.pk))
    assert not DeadLetter.objects.filter(pk=letter.pk).exists()
