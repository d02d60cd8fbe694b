"""Accounts, some in the shop's own database, some in the ledger's."""

from django.db import models


class Account(models.Model):
    name = models.CharField(max_length=50, unique=True)
    balance = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return self.name
