"""Fixtures for tests of the admin: a logged-in user, a ticket, and another user who is faster."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.test import Client, override_settings

from tests.testapp.models import Ticket

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]


class Router:
    """Routes everything to one database."""

    alias = "default"

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return self.alias

    db_for_write = db_for_read


class Replica(Router):
    """Routes the reads of tickets to a replica that is late."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.model_name == "ticket" else None

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"

    def allow_relation(self, *_: Any, **__: Any) -> bool:
        return True


class ToPostgreSQL(Router):
    alias = "postgresql"


@pytest.fixture
def admin_pages(use_database: Callable[[str], str], tmp_path: Any) -> Iterator[None]:
    use_database("default")
    ContentType.objects.clear_cache()  # it outlives the rows of the previous test
    ContentType.objects.get_for_models(*apps.get_app_config("testapp").get_models())  # as migrate makes them
    with override_settings(ROOT_URLCONF="tests.django_dlock.admin_urls", MIDDLEWARE=MIDDLEWARE, MEDIA_ROOT=tmp_path):
        yield


@pytest.fixture
def on_postgresql(use_database: Callable[[str], str]) -> Iterator[None]:
    use_database("postgresql")
    with override_settings(DATABASE_ROUTERS=["tests.django_dlock.admin_fixtures.ToPostgreSQL"]):
        yield


@pytest.fixture
def late_replica(use_database: Callable[[str], str], ticket: Ticket) -> Iterator[None]:
    """A replica that misses every later change."""
    use_database("other")
    ticket.save(using="other", force_insert=True)
    ticket.refresh_from_db(using="default")
    with override_settings(DATABASE_ROUTERS=["tests.django_dlock.admin_fixtures.Replica"]):
        yield


@pytest.fixture
def browser(admin_pages: None) -> Client:
    client = Client(enforce_csrf_checks=False)
    client.force_login(User.objects.create(username="anna", is_staff=True, is_superuser=True))
    return client


@pytest.fixture
def ticket(admin_pages: None) -> Ticket:
    return Ticket.objects.create(title="old", notes="first")


def change(instance: Any, **values: Any) -> Any:
    """Change a row through another instance, as another user would."""
    other = type(instance).objects.get(pk=instance.pk)
    for name, value in values.items():
        setattr(other, name, value)
    other.save()
    return other
