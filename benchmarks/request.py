"""Measure what `@locked` adds to a whole request of Django, compared with redis-py and django-pglock.

    python -m benchmarks.request --rounds 15 --count 100 [--latency 0.5]

A request goes through Django's handler with ATOMIC_REQUESTS, reads one row and saves it, on PostgreSQL; leases are in
Redis. Both servers share our CPU; with --latency, they are a round trip of that many milliseconds away, and every
process may use all CPUs. `benchmarks.sqlalchemy_lock` measures a transaction of SQLAlchemy.
"""

from typing import Final

from django.core.handlers.base import BaseHandler
from django.test import RequestFactory

from benchmarks import measure, project
from benchmarks.django_orm import table

FLOOR: Final = "bare request"


def requests() -> dict[str, measure.Operation]:
    """Return a request for each view of `benchmarks.views`, each with its own row."""
    from benchmarks.models import BareOrder
    from benchmarks.views import PATHS

    handler = BaseHandler()
    handler.load_middleware()
    factory = RequestFactory()

    def post(path: str) -> measure.Operation:
        address = f"/{path}{BareOrder.objects.create().pk}"

        def operation() -> None:
            response = handler.get_response(factory.post(address))
            assert response.status_code == 200

        return operation

    return {name: post(path) for name, path in PATHS.items()}


def main() -> None:
    options = measure.arguments(__doc__, rounds=15, count=100, latency=0.0)
    report = measure.Report(options.format)
    with project.running(options.latency) as servers:
        pids = project.backends(["default"], servers)
        if not options.latency:
            measure.pin("same", *pids)
        ways = measure.chosen(requests(), options.only, FLOOR)
        where = f", {options.latency} ms away" if options.latency else ""
        report.add(f"A request that reads and saves a row, PostgreSQL{where}", table("default", ways, options, pids))
    report.end()


if __name__ == "__main__":
    main()
