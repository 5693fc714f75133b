"""The views of the tests' project."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.urls import path

import dualwrite.django
from django_project.shop.models import Order, Topic


def order(request: HttpRequest) -> HttpResponse:
    """Write an order and its message."""
    with dualwrite.django.atomic() as tx:
        made = Order.objects.create(item=request.POST["item"])
        tx.send(Topic.name(), made.item, key=str(made.pk))
    return HttpResponse(tx.outcome or "rolled back")


async def order_async(request: HttpRequest) -> HttpResponse:
    """The same in a coroutine."""
    return HttpResponse(await dualwrite.django.arun(_order, request.POST["item"]))


def _order(item: str) -> str | None:
    with dualwrite.django.atomic() as tx:
        Order.objects.create(item=item)
        tx.send(Topic.name(), item)
    return tx.outcome


@transaction.atomic
def order_in_atomic(request: HttpRequest) -> HttpResponse:
    """A block of Django's, in which only our ENGINE can send."""
    Order.objects.create(item=request.POST["item"])
    dualwrite.django.send(Topic.name(), request.POST["item"])
    if request.POST.get("fails"):
        transaction.set_rollback(True)
    return HttpResponse("done")


urlpatterns: list[Any] = [
    path("order/", order),
    path("order-async/", order_async),
    path("order-in-atomic/", order_in_atomic),
    path("admin/", admin.site.urls),
]
