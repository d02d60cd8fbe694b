"""Load the shop: throughput, waits and errors of each strategy, and what happens when Redis is slow or dies.

    python -m benchmarks.load --customers 1,4,16,64 --orders 150
    python -m benchmarks.load --ladder 0 --only killed --wait 3

The example project is served by gunicorn (processes, and threads) and uvicorn, on PostgreSQL and Redis; customers ship
and cancel the same orders at once. Then, under the strategy `lease`, Redis answers 200 ms late for a while; is killed
and restarted with its data; and is killed and restarted without. The exit status is 1 if a promise was broken.

The customers share the machine with the servers: the figures compare strategies, and say little about another machine.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from threading import Thread
from typing import Any, Final

import psycopg

from benchmarks import measure, promises
from benchmarks.customers import Answer, Crowd
from benchmarks.promises import DONE, IN_GOOD_TIMES, LOCKED, UNAVAILABLE, Fault
from tests import servers
from tests.proxy import Proxy

EXAMPLE: Final = Path(__file__).parent.parent / "example_project"
PAUSE_S: Final = 0.04
SLOW_S: Final = 0.2
CALM_S: Final = 2.5


@dataclass(frozen=True)
class Place:
    """Running servers; the shops find their addresses in the environment."""

    home: Path
    redis: servers.Server
    postgresql: servers.Server


@contextmanager
def place() -> Iterator[Place]:
    """Start PostgreSQL, with a database for each shop, and Redis, and prepare the environment for the shops."""
    with measure.scratch() as home, ExitStack() as stack:
        redis, postgresql = servers.redis(home / "redis"), servers.postgresql(home / "postgresql", servers.free_port())
        for server in (redis, postgresql):
            server.start()
            stack.callback(server.stop)
        with psycopg.connect(
            f"postgresql://postgres@127.0.0.1:{postgresql.port}/postgres", autocommit=True
        ) as connection:
            connection.execute("CREATE DATABASE django")
            connection.execute("CREATE DATABASE sqlalchemy")
        os.environ |= {
            "REDIS_URL": redis.url,
            "DJANGO_SETTINGS_MODULE": "benchmarks.load_settings",
            "DATABASE_URL": url_of(postgresql, "django"),
            "PYTHONPATH": os.pathsep.join([str(EXAMPLE), str(EXAMPLE.parent)]),
        }
        sys.path.insert(0, str(EXAMPLE))
        yield Place(home, redis, postgresql)


def url_of(postgresql: servers.Server, name: str) -> str:
    return f"postgresql://postgres@127.0.0.1:{postgresql.port}/{name}"


def shops() -> dict[str, tuple[Any, str, int]]:
    """Return the ways to serve, each with its shop, database, and number of processes."""
    import django

    django.setup()
    from shop.racing import DjangoShop

    from example_project.sqla_shop.racing import SqlaShop

    class Threaded(DjangoShop):
        def command(self, fd: int, processes: int) -> list[str]:
            return [*super().command(fd, processes), "--threads=16"]

    return {
        "gunicorn, 4 processes": (DjangoShop(), "django", 4),
        "gunicorn, 2 x 16 threads": (Threaded(), "django", 2),
        "uvicorn, 2 processes": (SqlaShop(), "sqlalchemy", 2),
    }


def ladder(where: Place, name: str, options: Any) -> Iterator[tuple[measure.Row, list[str]]]:
    """Yield a row for each strategy and number of customers, and the promises that were broken."""
    from example_project.race.servers import serving

    shop, database, processes = shops()[name]
    os.environ["DATABASE_URL"] = url_of(where.postgresql, database)
    with shop.database(os.environ["DATABASE_URL"]):
        for strategy in options.strategies.split(","):
            with serving(shop, strategy, processes, where.home) as port:
                for customers in map(int, options.customers.split(",")):
                    with shop.paid_orders(options.orders) as (orders, count):
                        crowd = Crowd(shop, port, orders)
                        crowd.run(customers)
                        found = [] if strategy == "none" else list(promises.of_data(count(), crowd.answers))
                        row = told(crowd.answers)
                        row["errors"] = sum(answer.status not in IN_GOOD_TIMES for answer in crowd.answers)
                        anomalies = count().both_shipped_and_cancelled + count().lost_updates
                        yield (
                            {"contestant": strategy, "customers": customers, **row, "anomalies": anomalies},
                            [f"{name}, {strategy}, {customers} customers: {what}" for what in found],
                        )


def told(answers: Sequence[Answer]) -> measure.Row:
    """Return throughput and latencies of answers."""
    if len(answers) < 2:
        return {"requests/s": 0.0, "p50 ms": None, "p99 ms": None}
    cuts = quantiles([answer.seconds * 1000 for answer in answers], n=100, method="inclusive")
    duration = max(answer.ended for answer in answers) - min(answer.sent for answer in answers)
    return {"requests/s": round(len(answers) / duration, 1), "p50 ms": round(cuts[49], 1), "p99 ms": round(cuts[98], 1)}


@dataclass(frozen=True)
class Trouble:
    """Something that happens to Redis: how it begins and how it ends."""

    name: str
    begin: Callable[[Place, Proxy], None]
    end: Callable[[Place, Proxy], None]
    is_dead: bool


def start_empty(where: Place) -> None:
    for file in where.redis.directory.rglob("appendonly*.aof*"):
        file.unlink()
    where.redis.start()


TROUBLES: Final = (
    Trouble(
        "200 ms late", lambda _, proxy: proxy.slow_down(SLOW_S / 2), lambda _, proxy: proxy.forward(), is_dead=False
    ),
    Trouble(
        "killed, data kept", lambda where, _: where.redis.kill(), lambda where, _: where.redis.start(), is_dead=True
    ),
    Trouble(
        "killed, data lost", lambda where, _: where.redis.kill(), lambda where, _: start_empty(where), is_dead=True
    ),
)


def in_trouble(where: Place, trouble: Trouble, wait: float, slack: float) -> tuple[list[measure.Row], list[str]]:
    """Return figures from before, during and after the trouble, and the promises that were broken."""
    from example_project.race.servers import serving

    shop, database, processes = shops()["gunicorn, 2 x 16 threads"]
    os.environ |= {"DATABASE_URL": url_of(where.postgresql, database), "LOAD_WAIT": str(wait)}
    seconds = 2 * wait + 1 + slack / 2
    moments: list[float] = []
    with Proxy(where.redis.port) as proxy, shop.database(os.environ["DATABASE_URL"]), ExitStack() as stack:
        os.environ["REDIS_URL"] = where.redis.url if trouble.is_dead else proxy.redis_url
        orders, count = stack.enter_context(shop.paid_orders(int((seconds + 2 * CALM_S + slack) * 60)))
        port = stack.enter_context(serving(shop, "lease", processes, where.home))
        crowd = Crowd(shop, port, orders, pause=PAUSE_S)
        over: list[bool] = []
        buying = Thread(target=crowd.run, args=(8, 4), kwargs={"until": lambda: bool(over)})
        buying.start()
        for act in (trouble.begin, trouble.end):
            time.sleep(CALM_S if act is trouble.begin else seconds)
            moments.append(time.monotonic())
            act(where, proxy)
            moments.append(time.monotonic())
        time.sleep(CALM_S + promises.RECOVERY_S + slack)
        over.append(True)
        buying.join()
        tally = count()
    _, begin, healing, end = moments
    fault = Fault(begin, healing, end, wait, trouble.is_dead, slack)
    found = [*promises.of_data(tally, crowd.answers), *promises.of_answers(crowd.answers, fault)]
    return list(phases(crowd.answers, fault)), [f"Redis {trouble.name}: {what}" for what in found]


def phases(answers: Sequence[Answer], fault: Fault) -> Iterator[measure.Row]:
    """Yield a row for orders and one for pages in each phase, and one for the recovery."""
    for phase, begin, end in (
        ("before", 0.0, fault.begin),
        ("during", fault.begin, fault.end),
        ("after", fault.end, 9e9),
    ):
        for kind in ("order", "page"):
            these = [answer for answer in answers if answer.kind == kind and begin <= answer.sent < end]
            statuses = [answer.status for answer in these]
            yield {
                "contestant": f"{phase}, {kind}s",
                **told(these),
                "served": sum(status in DONE for status in statuses),
                "423": statuses.count(LOCKED),
                "503": statuses.count(UNAVAILABLE),
            }
    yield {"contestant": "first order served after the end, s", "p50 ms": round(promises.recovery(answers, fault), 2)}


def main() -> int:
    options = measure.arguments(
        __doc__, customers="1,4,16,64", orders=150, strategies="none,row,version,lease", wait=3.0, slack=0.0, ladder=1
    )
    report, violations = measure.Report(options.format), []
    with place() as where:
        for name in shops() if options.ladder else ():
            rows = []
            for row, wrong in ladder(where, name, options):
                rows.append(row)
                violations += wrong
            report.add(f"Orders shipped and cancelled, {name}", rows)
        for trouble in [one for one in TROUBLES if options.only in one.name]:
            rows, wrong = in_trouble(where, trouble, options.wait, options.slack)
            violations += wrong
            report.add(f"Redis {trouble.name}", rows)
    report.end()
    for violation in violations:
        print(f"VIOLATION: {violation}", file=sys.stderr)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
