"""The tables of the tests themselves."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from tests.tables import Emptier
from tests.testapp.models import Counter


def test_tables_that_a_thread_has_made_are_emptied_by_another(use_database):
    database = use_database("default")
    with ThreadPoolExecutor() as thread:
        emptier = thread.submit(Emptier, database).result()
        thread.submit(emptier.empty).result()
    Counter.objects.using(database).create(name="left")
    with closing(emptier):
        emptier.empty()
    assert not Counter.objects.using(database).exists()
