"""Models for tests; add yours at the end."""

from django.db import models


class Counter(models.Model):
    name = models.CharField(max_length=100, unique=True)
    value = models.IntegerField(default=0)


class Note(models.Model):
    """Its foreign key is checked at COMMIT on PostgreSQL and SQLite."""

    counter = models.ForeignKey(Counter, on_delete=models.CASCADE)
