"""Models for tests; add yours at the end."""

from django.db import models


class Counter(models.Model):
    name = models.CharField(max_length=100, unique=True)
    value = models.IntegerField(default=0)
