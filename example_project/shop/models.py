"""The tables of the shop. An order is paid, then either shipped or cancelled: never both."""

from django.db import models

from django_dlock.models import RowLockMixin, VersionedMixin


class Product(models.Model):
    name = models.CharField(max_length=100)
    price = models.DecimalField(max_digits=9, decimal_places=2)
    stock = models.IntegerField(help_text="pieces on the shelf that are promised to nobody")

    def __str__(self) -> str:
        return self.name


class Order(RowLockMixin, VersionedMixin, models.Model):
    class State(models.TextChoices):
        PAID = "paid"
        SHIPPED = "shipped"
        CANCELLED = "cancelled"

    product = models.ForeignKey(Product, models.PROTECT, related_name="orders")
    quantity = models.PositiveIntegerField()
    amount = models.DecimalField(max_digits=9, decimal_places=2)
    state = models.CharField(max_length=9, choices=State, default=State.PAID)
    events = models.PositiveIntegerField(default=0, help_text="how many lines the history has: shows lost updates")

    def __str__(self) -> str:
        return f"Order {self.pk}"

    def save_unchecked(self) -> None:
        """Overwrite the row, whatever it says by now: `save()` would check the version, as only one strategy does."""
        Order.objects.filter(pk=self.pk).update(state=self.state, events=self.events)

    def note(self, kind: str, text: str) -> "Event":
        """Write a line into the history and count it, as everyday code counts: read, add one, write."""
        self.events += 1
        return Event.objects.create(order=self, kind=kind, text=text)


class Event(models.Model):
    class Kind(models.TextChoices):
        PAID = "paid"
        SHIPPED = "shipped"
        CANCELLED = "cancelled"
        REFUSED = "refused"

    order = models.ForeignKey(Order, models.CASCADE, related_name="history")
    kind = models.CharField(max_length=9, choices=Kind)
    text = models.CharField(max_length=200)
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["-pk"]

    def __str__(self) -> str:
        return self.text


class Payment(models.Model):
    class Kind(models.TextChoices):
        CHARGE = "charge"
        REFUND = "refund"

    order = models.ForeignKey(Order, models.CASCADE, related_name="payments")
    kind = models.CharField(max_length=6, choices=Kind)
    amount = models.DecimalField(max_digits=9, decimal_places=2)

    def __str__(self) -> str:
        return f"{self.kind} of {self.amount}"


class Shipment(models.Model):
    order = models.ForeignKey(Order, models.CASCADE, related_name="shipments")
    quantity = models.PositiveIntegerField(help_text="pieces that left the shop")

    def __str__(self) -> str:
        return f"{self.quantity} pieces of {self.order}"
