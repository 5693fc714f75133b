"""The models of a shop, about as many as a small project has."""

from __future__ import annotations

import os

from django.db import models


class Topic:
    """The topic of the test."""

    @staticmethod
    def name() -> str:
        """Its name."""
        return os.environ.get("SHOP_TOPIC", "orders")


class Event(models.Model):
    """The events of the crash tests' scenes; their table has no key."""

    number = models.IntegerField(primary_key=True)
    writer = models.CharField(max_length=80)

    class Meta:
        managed = False
        db_table = "events"


class Named(models.Model):
    name = models.CharField(max_length=100, unique=True)

    class Meta:
        abstract = True


class Country(Named):
    code = models.CharField(max_length=2)


class Currency(Named):
    digits = models.IntegerField(default=2)


class Category(Named):
    parent = models.ForeignKey("self", models.CASCADE, null=True)


class Brand(Named):
    country = models.ForeignKey(Country, models.CASCADE, null=True)


class Tag(Named):
    pass


class Warehouse(Named):
    country = models.ForeignKey(Country, models.CASCADE, null=True)


class Supplier(Named):
    brands = models.ManyToManyField(Brand)


class Product(Named):
    category = models.ForeignKey(Category, models.CASCADE, null=True)
    brand = models.ForeignKey(Brand, models.CASCADE, null=True)
    tags = models.ManyToManyField(Tag)
    price = models.DecimalField(max_digits=10, decimal_places=2, default=0)


class Stock(models.Model):
    product = models.ForeignKey(Product, models.CASCADE)
    warehouse = models.ForeignKey(Warehouse, models.CASCADE)
    count = models.IntegerField(default=0)


class Customer(Named):
    email = models.EmailField(blank=True)


class Address(models.Model):
    customer = models.ForeignKey(Customer, models.CASCADE)
    country = models.ForeignKey(Country, models.CASCADE)
    lines = models.TextField()


class Coupon(Named):
    percent = models.IntegerField(default=10)


class Order(models.Model):
    item = models.CharField(max_length=100)
    customer = models.ForeignKey(Customer, models.CASCADE, null=True)
    placed_at = models.DateTimeField(auto_now_add=True)


class OrderLine(models.Model):
    order = models.ForeignKey(Order, models.CASCADE)
    product = models.ForeignKey(Product, models.CASCADE)
    count = models.IntegerField(default=1)


class Payment(models.Model):
    order = models.ForeignKey(Order, models.CASCADE)
    amount = models.DecimalField(max_digits=10, decimal_places=2)


class Shipment(models.Model):
    order = models.OneToOneField(Order, models.CASCADE)
    warehouse = models.ForeignKey(Warehouse, models.CASCADE)


class Refund(models.Model):
    payment = models.ForeignKey(Payment, models.CASCADE)
    reason = models.TextField()


class Review(models.Model):
    product = models.ForeignKey(Product, models.CASCADE)
    customer = models.ForeignKey(Customer, models.CASCADE)
    text = models.TextField()


class Basket(models.Model):
    customer = models.ForeignKey(Customer, models.CASCADE)
    data = models.JSONField(default=dict)


class Wish(models.Model):
    customer = models.ForeignKey(Customer, models.CASCADE)
    product = models.ForeignKey(Product, models.CASCADE)
