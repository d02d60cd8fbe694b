"""Fill the shop with a few products and paid orders."""

from decimal import Decimal
from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand
from django.db import transaction
from django.utils.crypto import get_random_string

from shop.actions import pay
from shop.models import Product

PRODUCTS = {"Teapot, cast iron": "48.00", "Espresso cups, set of six": "36.50", "Kettle": "79.90", "Oak tray": "24.00"}


class Command(BaseCommand):
    help = "Adds a few products and twelve paid orders, to ship and to cancel by hand."

    @transaction.atomic
    def handle(self, **options: Any) -> None:
        products = [
            Product.objects.create(name=name, price=Decimal(price), stock=40) for name, price in PRODUCTS.items()
        ]
        for number in range(12):
            pay(products[number % len(products)], quantity=1 + number % 3)
        self.stdout.write("12 paid orders added. Look at them: python manage.py runserver")
        if not User.objects.exists():
            password = get_random_string(12)
            User.objects.create_superuser("admin", password=password)
            self.stdout.write(f"For the admin: user admin, password {password}")
