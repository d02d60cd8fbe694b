"""The tag of an answer is that of what it shows, however the view has made its body."""

import functools
from unittest import mock

import pytest
from django.db import transaction
from django.db.models import F, Value
from django.db.models.functions import Concat
from django.utils.decorators import method_decorator
from rest_framework import generics, serializers
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory

from django_dlock import shown_versions
from django_dlock.errors import PreconditionFailed
from django_dlock.preconditions import etag_of
from django_dlock.rest import PreconditionMixin
from tests.django_dlock.rest_views import DraftSerializer, Lenient, send
from tests.testapp.models import Counter, Draft


@pytest.fixture
def draft(use_database):
    use_database("default")
    return Draft.objects.create(title="first")


def tag_of_row():
    return etag_of(Draft.objects.get(), variant="json")


def changes_it_twice(view, draft):
    """Change a draft, and once more with the tag of the first answer, which has to be that of the row."""
    changed = send(view, "put", draft, {"title": "mine"}, if_match=etag_of(draft))
    assert changed["ETag"] == tag_of_row()
    assert send(view, "put", draft, {"title": "mine again"}, if_match=changed["ETag"]).status_code == 200


class ReadBefore(Lenient):
    """Shows an object that it has read before another client has changed it, and before `get_object()`."""

    def initial(self, *args, **kwargs):
        super().initial(*args, **kwargs)
        self.before = Draft.objects.get(pk=self.kwargs["pk"])
        if self.request.method == "GET":
            Draft.objects.update(title="theirs")

    def retrieve(self, request, **kwargs):
        self.get_object()
        return Response(self.body())

    def body(self):
        return {"draft": self.get_serializer(self.before).data}


class ReadBeforeInADict(ReadBefore):
    def body(self):
        return dict(self.get_serializer(self.before).data, links=[])


class ReadTwice(Lenient):
    """Shows what it has checked in its own way, and one value of a second instance."""

    def retrieve(self, request, **kwargs):
        draft = self.get_object()
        if request.method == "GET":
            Draft.objects.update(title="theirs")
        more = self.get_serializer(Draft.objects.get(pk=draft.pk)).data
        return Response({"title": draft.title, "revision": more["revision"]})


class ReadTwiceByItsOwn(ReadTwice):
    def retrieve(self, request, **kwargs):
        draft = self.get_object()
        body = dict(DraftSerializer(draft).data)
        Draft.objects.update(title="theirs")
        return Response({**body, "revision": self.get_serializer(Draft.objects.get(pk=draft.pk)).data["revision"]})


class ReadBeforeInAList(ReadBefore):
    def body(self):
        return {"drafts": self.get_serializer([self.before], many=True).data}


@pytest.mark.parametrize("kind", [ReadBefore, ReadBeforeInADict, ReadBeforeInAList, ReadTwice, ReadTwiceByItsOwn])
def test_body_of_an_earlier_instance_has_no_newer_tag(draft, kind):
    shown = send(kind.as_view(), "get", draft, {})
    assert "first" in str(shown.data)
    assert shown["ETag"] == etag_of(draft, variant="json")
    with pytest.raises(PreconditionFailed):
        send(kind.as_view(), "put", draft, {"title": "mine"}, if_match=shown["ETag"])


class TitleAddedLater(Lenient):
    """Shows the revision of what it has read last, and adds the title that it has read before."""

    def retrieve(self, request, **kwargs):
        title = self.get_object().title
        if request.method == "GET":
            Draft.objects.update(title="theirs")
        data = self.data()
        self.add(data, title)
        return Response(data)

    def data(self):
        return self.get_serializer(self.get_object()).data

    def add(self, data, title):
        data["title"] = title


class TitleAddedInside(TitleAddedLater):
    def add(self, data, title):
        data["more"]["title"] = title


class TitleAddedToAList(TitleAddedLater):
    def add(self, data, title):
        data["more"]["links"].append(title)


class TitleAddedToOwnSerializer(TitleAddedLater):
    def data(self):
        return MoreSerializer(self.get_object()).data


class MoreSerializer(DraftSerializer):
    class Meta(DraftSerializer.Meta):
        fields = ("revision",)

    def to_representation(self, instance):
        return super().to_representation(instance) | {"more": {"links": []}}


@pytest.mark.parametrize("kind", [TitleAddedLater, TitleAddedInside, TitleAddedToAList, TitleAddedToOwnSerializer])
def test_part_that_a_view_adds_to_its_serializer_s_data_may_be_older_than_they_are(draft, kind):
    shown = send(kind.as_view(serializer_class=MoreSerializer), "get", draft, {})
    assert "first" in str(shown.data)
    assert shown.get("ETag") in {None, etag_of(draft, variant="json")}


def test_key_that_a_serializer_adds_itself_leaves_the_tag_of_what_it_shows(draft):
    class ReadsBefore(Lenient):
        serializer_class = MoreSerializer

        def retrieve(self, request, **kwargs):
            self.get_object()
            Draft.objects.update(title="theirs")
            return super().retrieve(request, **kwargs)

    assert send(ReadsBefore.as_view(), "get", draft, {})["ETag"] == tag_of_row()


def test_new_object_keeps_its_tag_when_the_view_adds_to_its_data(draft):
    class Adds(Lenient):
        def post(self, request, **kwargs):
            serializer = self.get_serializer(data=request.data)
            serializer.is_valid(raise_exception=True)
            serializer.save()
            return Response(serializer.data, status=201)

        def finalize_response(self, request, response, *args, **named):
            response.data["links"] = []
            return super().finalize_response(request, response, *args, **named)

    added = send(Adds.as_view(), "post", draft, {"title": "new"})
    assert added["ETag"] == etag_of(Draft.objects.exclude(pk=draft.pk).get(), variant="json")


class Audited(Lenient):
    """Shows its object to a log before the save, and answers in its own way."""

    def update(self, request, **kwargs):
        answer = super().update(request, **kwargs)
        return Response(self.body(answer.data))

    def perform_update(self, serializer):
        self.before = self.get_serializer(serializer.instance).data
        super().perform_update(serializer)

    def body(self, data):
        return {"before": self.before, "after": data}


class AuditedShortly(Audited):
    def body(self, data):
        return {"ok": True}


class AuditedInADict(Audited):
    def body(self, data):
        return dict(data, links=[])


@pytest.mark.parametrize("kind", [Audited, AuditedShortly, AuditedInADict])
def test_answer_to_a_change_has_the_tag_after_it_although_the_object_was_shown_before(draft, kind):
    changes_it_twice(kind.as_view(), draft)


class ReadAfterItsChange(Lenient):
    """Answers a change with what it has written, and reads the object again after another client's change."""

    def update(self, request, **kwargs):
        body = super().update(request, **kwargs).data
        if request.data["title"] == "mine":
            Draft.objects.update(title="theirs")
        self.finish(self.get_object())
        return Response({"draft": body})

    def finish(self, draft):
        pass


class ReadAfterItsChangeAndChanged(ReadAfterItsChange):
    def finish(self, draft):
        draft.save_with_version()


class ReadWithoutAChange(ReadAfterItsChange):
    def perform_update(self, serializer):
        pass


@pytest.mark.parametrize("kind", [ReadAfterItsChange, ReadAfterItsChangeAndChanged, ReadWithoutAChange])
@pytest.mark.parametrize("headers", [{}, {"if_match": "*"}])
def test_answer_to_a_change_has_no_tag_of_what_was_only_read_afterwards(draft, kind, headers):
    shown = send(kind.as_view(), "put", draft, {"title": "mine"}, **headers)
    with pytest.raises(PreconditionFailed):
        send(kind.as_view(), "put", draft, {"title": "next"}, if_match=shown["ETag"])
    assert Draft.objects.get().title == "theirs"


def test_answer_to_two_changes_in_two_instances_has_the_tag_of_the_second(draft):
    shown = send(ReadAfterItsChangeAndChanged.as_view(), "put", draft, {"title": "next"}, if_match=etag_of(draft))
    assert shown["ETag"] == tag_of_row()


class CountsAfterItsChange(Lenient):
    """Answers a change with what it reads again after a query of its own, which could be another client's as well."""

    def perform_update(self, serializer):
        super().perform_update(serializer)
        Draft.objects.update(title="counted")
        serializer.instance.refresh_from_db()


class CountsAndAnswersInADict(CountsAfterItsChange):
    def update(self, request, **kwargs):
        return Response({"draft": super().update(request, **kwargs).data})


class ChangesByAQuery(CountsAndAnswersInADict):
    def perform_update(self, serializer):
        Draft.objects.update(title="mine")
        serializer.instance.refresh_from_db()


@pytest.mark.parametrize(
    ("kind", "has_tag"), [(CountsAfterItsChange, True), (CountsAndAnswersInADict, False), (ChangesByAQuery, False)]
)
def test_answer_to_a_change_that_is_read_again_after_a_query_has_its_tag_or_none(draft, kind, has_tag):
    shown = send(kind.as_view(), "put", draft, {"title": "mine"}, if_match=etag_of(draft))
    assert shown.get("ETag") == (tag_of_row() if has_tag else None)


class LogsInVain(Lenient):
    """Shows its object in a savepoint in which a log fails."""

    def retrieve(self, request, **kwargs):
        draft = self.get_object()
        return Response(self.logged(lambda: self.get_serializer(draft).data))

    def perform_update(self, serializer):
        super().perform_update(serializer)
        self.logged(lambda: serializer.data)

    def logged(self, show):
        with transaction.atomic():
            shown = show()
            transaction.set_rollback(True)
        return shown


def test_answer_that_was_made_in_a_savepoint_which_failed_has_the_tag_of_what_was_not_undone(draft):
    view = LogsInVain.as_view()
    tag = send(view, "get", draft, {})["ETag"]
    assert tag == tag_of_row()
    assert send(view, "put", draft, {"title": "mine"}, if_match=tag)["ETag"] == tag_of_row()


class Preview(Lenient):
    """Rolls the save back, and shows the object afterwards."""

    def perform_update(self, serializer):
        with transaction.atomic():
            super().perform_update(serializer)
            transaction.set_rollback(True)


class PreviewOfItsOwn(Preview):
    def update(self, request, **kwargs):
        super().update(request, **kwargs)
        return Response(DraftSerializer(self.dlock_draft).data)

    def perform_update(self, serializer):
        super().perform_update(serializer)
        self.dlock_draft = serializer.instance


class PreviewBesideTheRow(Lenient):
    """Shows what a change would make of the object, in other data, after it has shown the object itself."""

    def retrieve(self, request, **kwargs):
        draft, other = self.get_object(), Draft.objects.get()
        self.get_serializer(draft)
        with transaction.atomic():
            other.title = "mine"
            other.save_with_version()
            body = {"draft": self.get_serializer(other).data, "before": self.get_serializer(draft).data}
            transaction.set_rollback(True)
        return Response(body)


def test_preview_beside_the_row_has_no_tag(draft):
    assert not send(PreviewBesideTheRow.as_view(), "get", draft, {}).has_header("ETag")


class PreviewOfASecondInstance(Lenient):
    """Shows in a savepoint what other requests would read after the change, and rolls it back."""

    def update(self, request, **kwargs):
        draft = self.get_object()
        with transaction.atomic():
            self.change(draft)
            answer = self.answer(draft)
            transaction.set_rollback(True)
        return answer

    retrieve = update

    def change(self, draft):
        draft.title = "mine"
        draft.save_with_version()

    def answer(self, draft):
        return Response(self.get_serializer(Draft.objects.get(pk=draft.pk)).data)


class PreviewThatGetsItAgain(PreviewOfASecondInstance):
    def answer(self, draft):
        return Response(self.get_serializer(self.get_object()).data)


class PreviewByHand(PreviewOfASecondInstance):
    def answer(self, draft):
        return Response({"title": self.get_object().title})


class PreviewByAQuery(PreviewOfASecondInstance):
    def change(self, draft):
        Draft.objects.update(title="mine")


class PreviewByAQueryOfTheSameInstance(PreviewByAQuery):
    def answer(self, draft):
        draft.refresh_from_db()
        return Response(self.get_serializer(draft).data)


class PreviewByAQueryAndByHand(PreviewByAQuery):
    def answer(self, draft):
        return Response({"title": self.get_object().title})


PREVIEWS = [
    PreviewOfASecondInstance,
    PreviewThatGetsItAgain,
    PreviewByHand,
    PreviewByAQuery,
    PreviewByAQueryOfTheSameInstance,
]


@pytest.mark.parametrize("kind", PREVIEWS)
def test_preview_that_reads_the_row_again_has_no_tag_of_a_version_that_never_was(draft, kind):
    shown = send(kind.as_view(), "put", draft, {"title": "mine"}, if_match=etag_of(draft))
    assert (shown.data["title"], shown.has_header("ETag")) == ("mine", False)


@pytest.mark.parametrize("method", ["put", "get"])
def test_preview_that_is_not_made_by_a_serializer_has_no_tag_of_the_row_either(draft, method):
    shown = send(PreviewByAQueryAndByHand.as_view(), method, draft, {})
    assert (shown.data["title"], shown.has_header("ETag")) == ("mine", False)


class ShowsFormerStates(Lenient):
    """Shows its object, and former ones of it as instances that are not saved."""

    def retrieve(self, request, **kwargs):
        draft = self.get_object()
        former = Draft(pk=draft.pk, title="former", revision=draft.revision - 1)
        return Response({"draft": self.get_serializer(draft).data, "former": [self.get_serializer(former).data]})


def test_former_states_that_are_shown_beside_the_object_leave_its_tag(draft):
    assert send(ShowsFormerStates.as_view(), "get", draft, {})["ETag"] == tag_of_row()


class TreeSerializer(DraftSerializer):
    """Calls itself with more arguments, and has a field called child."""

    child = serializers.SerializerMethodField(method_name="child_of")

    class Meta(DraftSerializer.Meta):
        fields = [*DraftSerializer.Meta.fields, "child"]

    def to_representation(self, instance, depth=0):
        data = super().to_representation(instance)
        if depth < 1:
            data["again"] = self.to_representation(instance, depth=depth + 1)
        return data

    def child_of(self, instance):
        return "a child"


def test_serializer_that_calls_itself_with_more_arguments_is_watched(draft):
    shown = send(Lenient.as_view(serializer_class=TreeSerializer), "get", draft, {})
    assert shown.data["again"]["child"] == "a child"
    assert shown["ETag"] == tag_of_row()


def test_serializer_that_makes_its_data_twice_has_the_tag_of_the_older(draft):
    class ShowsTwice(Lenient):
        def retrieve(self, request, **kwargs):
            serializer = self.get_serializer(self.get_object())
            body = serializer.data
            Draft.objects.update(title="theirs")
            serializer.instance.refresh_from_db()
            assert serializer.to_representation(serializer.instance)["title"] == "theirs"
            return Response(body)

    assert send(ShowsTwice.as_view(), "get", draft, {})["ETag"] == etag_of(draft, variant="json")


class ShowsItsFormerInstance(Lenient):
    """Shows its object to a log, then reads it anew for an answer that is already made."""

    def retrieve(self, request, **kwargs):
        serializer = self.get_serializer(self.get_object())
        self.log(serializer)
        return Response(serializer.data)

    def post(self, request, **kwargs):
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        serializer.save()
        self.log(serializer)
        return Response(serializer.data, status=201)

    def log(self, serializer):
        assert serializer.data["title"] != "theirs"
        Draft.objects.filter(pk=serializer.instance.pk).update(title="theirs")
        serializer.instance = self.read(serializer.instance.pk)

    def read(self, pk):
        return Draft.objects.get(pk=pk)


class ShowsItsFormerObject(ShowsItsFormerInstance):
    def read(self, pk):
        self.kwargs["pk"] = pk
        return self.get_object()


@pytest.mark.parametrize("kind", [ShowsItsFormerInstance, ShowsItsFormerObject])
@pytest.mark.parametrize("method", ["get", "post"])
def test_data_that_were_made_before_their_serializer_got_another_instance_have_no_newer_tag(draft, kind, method):
    shown = send(kind.as_view(), method, draft, {"title": "first"})
    row = Draft.objects.order_by("pk").last()
    assert (shown.data["title"], row.title) == ("first", "theirs")
    with pytest.raises(PreconditionFailed):
        send(Lenient.as_view(), "put", row, {"title": "mine"}, if_match=shown["ETag"])


def test_copy_of_an_object_whose_change_was_rolled_back_has_its_own_tag(draft):
    class Copies(Lenient):
        def post(self, request, **kwargs):
            copied = self.get_object()
            with transaction.atomic():
                copied.save_with_version()
                transaction.set_rollback(True)
            copied.pk, copied._state.adding = None, True
            copied.save()
            return Response(self.get_serializer(copied).data, status=201)

    added = send(Copies.as_view(), "post", draft, {})
    assert added["ETag"] == etag_of(Draft.objects.exclude(pk=draft.pk).get(), variant="json")


class PreviewOfItsOwnThatReadsAgain(PreviewOfItsOwn):
    def update(self, request, **kwargs):
        answer = super().update(request, **kwargs)
        self.dlock_draft.refresh_from_db()
        return answer


@pytest.mark.parametrize("kind", [Preview, PreviewOfItsOwn, PreviewOfItsOwnThatReadsAgain])
def test_preview_that_is_shown_after_its_rollback_has_no_tag_of_the_row(draft, kind):
    shown = send(kind.as_view(), "put", draft, {"title": "mine"}, if_match=etag_of(draft))
    assert (shown.data["title"], shown.has_header("ETag")) == ("mine", False)


def test_object_that_is_read_again_after_a_preview_has_its_tag(draft):
    class Peeking(Preview):
        def perform_update(self, serializer):
            super().perform_update(serializer)
            serializer.instance.refresh_from_db()

    shown = send(Peeking.as_view(), "put", draft, {"title": "mine"}, if_match=etag_of(draft))
    assert (shown.data["title"], shown["ETag"]) == ("first", tag_of_row())


class SavesSomethingElse(Preview):
    """Shows values of a save that was rolled back, after another save that did not write them."""

    def finish(self, draft):
        draft.save(update_fields=["revision"])

    def update(self, request, **kwargs):
        draft = self.get_object()
        with transaction.atomic():
            draft.title = "refused"
            draft.save()
            transaction.set_rollback(True)
        self.finish(draft)
        return Response(self.get_serializer(draft).data)


class SavesEverything(SavesSomethingElse):
    def finish(self, draft):
        draft.save(update_fields=["title", "revision"])


class SavesAfterARefresh(SavesSomethingElse):
    def finish(self, draft):
        draft.refresh_from_db()
        draft.save(update_fields=["revision"])


@pytest.mark.parametrize(
    ("kind", "has_tag"), [(SavesSomethingElse, False), (SavesEverything, True), (SavesAfterARefresh, True)]
)
def test_values_whose_save_was_rolled_back_have_no_tag_until_they_are_saved_or_read_again(draft, kind, has_tag):
    shown = send(kind.as_view(), "put", draft, {"title": "mine"}, if_match=etag_of(draft))
    assert shown.get("ETag") == (tag_of_row() if has_tag else None)
    assert (shown.data["title"] == Draft.objects.get().title) is has_tag


class Numbered(Lenient):
    """Computes a value in the database when its object was saved, reads it again, and adds to the answer."""

    def perform_update(self, serializer):
        super().perform_update(serializer)
        Draft.objects.update(title=Concat(F("title"), Value("!")))
        serializer.instance.refresh_from_db()

    def update(self, request, **kwargs):
        answer = super().update(request, **kwargs)
        answer.data["message"] = "saved"
        return answer


class LogsByTheSameSerializer(Lenient):
    def perform_update(self, serializer):
        serializer.to_representation(serializer.instance)
        super().perform_update(serializer)


class LogsAndAdds(LogsByTheSameSerializer, Numbered):
    pass


@pytest.mark.parametrize("kind", [Numbered, LogsByTheSameSerializer, LogsAndAdds])
def test_answer_to_a_change_has_the_tag_of_what_its_serializer_shows_at_the_end(draft, kind):
    changes_it_twice(kind.as_view(), draft)


class CountsAndShowsWhatItReadBefore(Lenient):
    """Shows what it has read before another client has changed it, and before it counts its readers."""

    def retrieve(self, request, **kwargs):
        draft = self.get_object()
        title = draft.title
        Draft.objects.update(title="theirs")
        draft.refresh_from_db()
        return Response(self.made(title, self.get_serializer(draft).data))

    def made(self, title, data):
        return {"title": title, "revision": data["revision"]}


class CountsAndAddsWhatItReadBefore(CountsAndShowsWhatItReadBefore):
    def made(self, title, data):
        data["headline"] = title
        return data


@pytest.mark.parametrize("kind", [CountsAndShowsWhatItReadBefore, CountsAndAddsWhatItReadBefore])
def test_body_with_a_part_that_was_read_before_a_change_has_no_newer_tag(draft, kind):
    shown = send(kind.as_view(), "get", draft, {})
    assert shown.get("ETag") != tag_of_row()


class CounterSerializer(serializers.ModelSerializer):
    class Meta:
        model = Counter
        fields = ("name",)


class AddsToADraft(PreconditionMixin, generics.GenericAPIView):
    queryset = Draft.objects.all()
    if_match_required = ()

    def post(self, request, pk):
        self.get_object()
        serializer = self.get_serializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        serializer.save()
        return Response(serializer.data, status=201)

    def get(self, request, pk):
        self.get_object()
        return Response(self.get_serializer(Draft.objects.exclude(pk=pk).get()).data)


def test_answer_that_names_another_object_has_no_tag_of_the_one_that_was_checked(draft):
    added = send(AddsToADraft.as_view(serializer_class=DraftSerializer), "post", draft, {"title": "new"})
    assert added["ETag"] == etag_of(Draft.objects.exclude(pk=draft.pk).get(), variant="json")
    assert not send(AddsToADraft.as_view(serializer_class=DraftSerializer), "get", draft, {}).has_header("ETag")


def test_new_object_without_a_version_has_no_tag_of_the_one_that_was_checked(draft):
    added = send(AddsToADraft.as_view(serializer_class=CounterSerializer), "post", draft, {"name": "new"})
    assert (added.status_code, added.has_header("ETag")) == (201, False)


def test_view_remembers_some_of_many_rows_and_then_gives_no_tag(draft, monkeypatch):
    class Export(Lenient):
        def retrieve(self, request, **kwargs):
            rows = [self.get_serializer(each).data["title"] for each in Draft.objects.order_by("-pk")]
            sizes.append(len(self._dlock_shown_versions._shown))
            self.get_object()
            return Response({"rows": rows})

    sizes = []
    monkeypatch.setattr(shown_versions, "MAX_SHOWN", 3)
    Draft.objects.bulk_create([Draft(title=f"{number}") for number in range(5)])
    assert not send(Export.as_view(), "get", draft, {}).has_header("ETag")
    assert sizes == [3]


def counting(method):
    @functools.wraps(method)
    def counted(*args, **kwargs):
        CALLS.append(method.__name__)
        return method(*args, **kwargs)

    return counted


CALLS = []


def test_get_serializer_may_be_replaced_decorated_and_called_on_the_class(draft):
    @method_decorator(counting, name="get_serializer")
    class View(Lenient):
        pass

    CALLS.clear()
    assert send(View.as_view(), "get", draft, {})["ETag"] == tag_of_row()
    assert CALLS == ["get_serializer"]
    view = View()
    view.setup(APIRequestFactory().get("/"), pk=draft.pk)
    view.request, view.format_kwarg = view.initialize_request(view.request), None
    assert View.get_serializer(view, draft).data["title"] == "first"
    with mock.patch.object(view, "get_serializer", return_value="replaced"):
        assert view.get_serializer(draft) == "replaced"
    view.get_serializer = lambda _: "assigned"
    assert view.get_serializer(draft) == "assigned"
