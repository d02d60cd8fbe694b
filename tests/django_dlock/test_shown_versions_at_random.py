"""Random programs of a view: a client with the tag of an answer overwrites nothing of others that the answer did not show."""

import random

import pytest
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from rest_framework import serializers
from rest_framework.response import Response

from django_dlock.errors import DLockError
from django_dlock.preconditions import etag_of
from tests.django_dlock.rest_views import Lenient, send
from tests.testapp.models import Draft

PROGRAMS = 100
"""In one test; it takes a third of a second."""
MAX_STEPS = 5


class Undo(Exception):
    """Rolls a block back."""


class OwnSerializer(serializers.ModelSerializer):
    class Meta:
        model = Draft
        fields = ("title", "revision")


class Program:
    """What a view does with one object, of which it may have several instances."""

    def __init__(self, view, key, chance):
        self.view, self.key, self.chance = view, key, chance
        self.instances, self.bodies, self.number = [], [], 0
        self.read_again = []

    def run(self):
        for _ in range(self.chance.randrange(MAX_STEPS)):
            self.step()
        self.get_again()
        for _ in range(self.chance.randint(1, MAX_STEPS)):
            self.step()
        if not self.bodies:
            self.show()
        body = self.chance.choice(self.bodies)
        return Response(self.chance.choice([body, {"one": body}, {"all": self.bodies}]))

    def step(self):
        steps = [self.read, self.change_by_others]
        if self.instances:
            steps += [self.refresh, self.save, self.preview, self.show, self.show, self.show]
        if self.view._dlock_checked:
            steps.append(self.get_again)
        if not connections[DEFAULT_DB_ALIAS].in_atomic_block:
            steps.append(self.work_in_vain)
        self.chance.choice(steps)()

    def read(self):
        self.instances.append(Draft.objects.get(pk=self.key))

    def get_again(self):
        self.instances.append(self.view.get_object())

    def change_by_others(self):
        self.number += 1
        Draft.objects.filter(pk=self.key).update(title=f"theirs {self.number}.")

    def refresh(self):
        self.read_again.append(self.chance.choice(self.instances))
        self.read_again[-1].refresh_from_db()

    def save(self, *, is_undone=False):
        instance, self.number = self.chance.choice(self.instances), self.number + 1
        former, instance.title = instance.title, f"mine {self.number}."
        try:
            with transaction.atomic():
                instance.save_with_version()
                if self.chance.random() < 0.5:
                    self.bodies.append(self.view.get_serializer(instance).data)
                if is_undone:
                    raise Undo
        except Undo:
            pass
        except DLockError:
            instance.title = former

    def preview(self):
        self.save(is_undone=True)

    def show(self):
        instance = self.chance.choice(self.instances)
        ways = [
            lambda: self.view.get_serializer(instance).data,
            lambda: dict(self.view.get_serializer(instance).data, links=[]),
            lambda: {"all": self.view.get_serializer([instance], many=True).data},
            lambda: self.shown_before(instance),
        ]
        if self.view._dlock_checked and len(self.instances) == 1:  # it is promised for no other instance
            ways.append(lambda: OwnSerializer(instance).data)
        self.bodies.append(self.chance.choice(ways)())

    def shown_before(self, instance):
        serializer = self.view.get_serializer(self.chance.choice(self.instances))
        shown = serializer.data
        serializer.instance = instance
        assert shown == serializer.data
        return shown

    def work_in_vain(self):
        """Do some steps that are rolled back; instances that were read in it have to be discarded, as documented."""
        before, self.read_again = list(self.instances), []
        with transaction.atomic():
            for _ in range(self.chance.randint(1, 3)):
                self.step()
            if self.chance.random() < 0.3:
                self.view.get_object()
            transaction.set_rollback(True)
        self.instances = [each for each in before if not any(each is one for one in self.read_again)] or [
            self.view.get_object()
        ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("method", "if_match"), [("get", ""), ("put", "its tag"), ("put", "*")])
def test_client_with_the_tag_overwrites_no_change_of_others_that_it_was_not_shown(use_database, seed, method, if_match):
    class View(Lenient):
        def retrieve(self, request, **kwargs):
            return Program(self, kwargs["pk"], chance).run()

        update = retrieve

    use_database("default")
    chance, overwritten = random.Random(seed), 0
    for number in range(PROGRAMS):
        draft = Draft.objects.create(title="first.")
        options = {"if_match": if_match.replace("its tag", etag_of(draft))} if if_match else {}
        try:
            answer = send(View.as_view(), method, draft, {"title": "any"}, **options)
            row = Draft.objects.get(pk=draft.pk)
            tag = answer.headers.get("ETag", '"none"')
            send(Lenient.as_view(), "put", draft, {"title": "next"}, if_match=tag)
        except DLockError:
            continue
        overwritten += 1
        assert not row.title.startswith("theirs") or row.title in str(answer.data), number
    assert overwritten > PROGRAMS / 10
