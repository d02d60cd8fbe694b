"""A holder whose lease an operator ends learns of it from the next renewal, and its transaction cannot commit."""

from queue import SimpleQueue

import pytest
from django.core.management import call_command
from django.test import override_settings

from tests.processes import Link, worker

TTL = 9.0
"""The lease is renewed after 3 s, so a machine that stalls for less than 6 s does not lose it."""


@pytest.mark.parametrize(
    ("database", "fence"), [("postgresql", "transaction"), ("mariadb", False)], indirect=["database"]
)
def test_displaced_holder_is_told_and_cannot_commit(database, redis_store, redis_server, fence, capsys):
    from django_dlock import lock
    from tests.testapp.models import Counter

    with worker(hold, redis_server.url, database, fence) as holder:
        token = holder.hear()
        call_command("dlock", "release", "order:42", "--token", str(token), "--no-input")
        assert f"token {token}" in capsys.readouterr().out
        holder.say("wait until it is lost")
        assert holder.hear() == ("the store granted it to another holder, or lost it", True)
        with lock("order", 42, using=database, fence=False, wait=0):  # the first holder is still at work
            holder.say("commit")
            assert holder.result() == "LeaseLost"
    assert not Counter.objects.using(database).exists()


def hold(link: Link, url: str, database: str, fence: object) -> str:
    from django.db import transaction

    from django_dlock import lock
    from django_dlock.errors import LeaseLost
    from dlock_core.observability import hooks
    from tests.testapp.models import Counter

    told = SimpleQueue()
    hooks.subscribe(lambda event: told.put(event.reason) if event.kind == "lost" else None)
    with override_settings(DLOCK={"default": {"BACKEND": url, "TTL": TTL}}):
        try:
            with lock("order", 42, using=database, fence=fence) as lease, transaction.atomic(using=database):
                Counter.objects.using(database).create(name="work of a displaced holder")
                link.say(lease.token)
                link.hear()
                link.say((told.get(timeout=60), lease.lost))
                link.hear()
        except LeaseLost as error:
            return type(error).__name__
    return "it committed"
