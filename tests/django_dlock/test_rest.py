"""Django REST framework: ETag and If-Match on a viewset."""

import contextlib
import copy
import json
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import rest_framework
from django.db import connections, transaction
from django.http import JsonResponse
from django.test import override_settings
from django.urls import include, path
from django.utils.functional import SimpleLazyObject
from rest_framework import generics, routers, serializers, viewsets
from rest_framework.decorators import action
from rest_framework.permissions import BasePermission
from rest_framework.renderers import BrowsableAPIRenderer
from rest_framework.request import clone_request
from rest_framework.response import Response
from rest_framework.test import APIClient, APIRequestFactory
from rest_framework.views import APIView

from django_dlock.errors import PreconditionFailed, PreconditionRequired, StaleObject
from django_dlock.preconditions import etag_of
from django_dlock.rest import PreconditionMixin, VersionedSerializerMixin
from tests.django_dlock.rest_views import DraftSerializer, Lenient, send
from tests.testapp.models import Article, Counter, Draft

pytestmark = pytest.mark.usefixtures("versions_from_1")

TOGETHER = threading.Barrier(2)
TEMPLATES = [  # those of the browsable API, without its app
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [Path(rest_framework.__file__).parent / "templates"],
        "OPTIONS": {"libraries": {"rest_framework": "rest_framework.templatetags.rest_framework"}},
    }
]
SITE = {
    "ROOT_URLCONF": __name__,
    "MIDDLEWARE": ["django_dlock.middleware.LockMiddleware"],
    "TEMPLATES": TEMPLATES,
    "STATIC_URL": "/static/",
}


class ArticleSerializer(VersionedSerializerMixin, serializers.ModelSerializer):
    class Meta:
        model = Article
        fields = ["id", "title"]


class NotForbidden(BasePermission):
    def has_object_permission(self, request, view, obj):
        return obj.title != "forbidden"


class Articles(PreconditionMixin, viewsets.ModelViewSet):
    serializer_class = ArticleSerializer
    permission_classes = [NotForbidden]

    def get_queryset(self):
        return Article.objects.using(self.request.headers.get("X-Database", "default")).order_by("pk")

    def perform_update(self, serializer):
        if "together" in self.request.query_params:
            TOGETHER.wait(60)
        super().perform_update(serializer)

    @action(detail=True, methods=["get", "post"])
    def summary(self, request, pk):
        return Response({"title": self.get_object().title})


class Late(generics.UpdateAPIView):
    """Another user changes the object after it was validated; the view reads it again and saves that."""

    queryset = Draft.objects.all()
    serializer_class = DraftSerializer

    def perform_update(self, serializer):
        Draft.objects.update(title="theirs")
        serializer.instance = Draft.objects.get()
        serializer.save()


class LateAndChecked(PreconditionMixin, Late):
    pass


router = routers.DefaultRouter()
router.register("articles", Articles, basename="article")
urlpatterns = [
    path("", include(router.urls)),
    path("drafts/<int:pk>/", Lenient.as_view()),
    path("late/<int:pk>/", Late.as_view()),
    path("locked/<int:pk>/", LateAndChecked.as_view()),
]


@pytest.fixture(autouse=True)
def _site():
    with override_settings(**SITE):
        yield


@pytest.fixture
def article(use_database):
    use_database("default")
    return Article.objects.create(title="first")


@pytest.fixture
def url(article):
    return f"/articles/{article.pk}/"


def ask(method, url, data=None, *, revision=None, **headers):
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    body = data and json.dumps({"title": data} if revision is None else {"title": data, "revision": revision})
    return APIClient().generic(method, url, body, "application/json", headers=given)


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_update_needs_the_tag_and_answers_with_the_new_one(url, article, method):
    shown = ask("GET", url)
    changed = ask(method, url, "second", If_Match=shown["ETag"])
    assert (changed.status_code, changed.data["version"]) == (200, 2)
    assert changed["ETag"] == ask("GET", url)["ETag"] != shown["ETag"]
    assert ask(method, url, "third", If_Match=shown["ETag"]).status_code == 412
    assert ask(method, url, "third").status_code == 428
    assert ask(method, url, "third", If_Match="abc").status_code == 400
    article.refresh_from_db()
    assert article.title == "second"


def test_destroy_needs_the_tag(url, article):
    assert [ask("DELETE", url).status_code, ask("DELETE", url, If_Match='"old"').status_code] == [428, 412]
    gone = ask("DELETE", url, If_Match=etag_of(article))
    assert (gone.status_code, "ETag" in gone) == (204, False)


def test_reader_who_has_the_object_gets_304_without_it(url, article):
    tag = ask("GET", url)["ETag"]
    known = ask("GET", url, If_None_Match=f'"other", W/{tag}')
    assert (known.status_code, known.content, known["ETag"]) == (304, b"", tag)
    article.save()
    assert ask("GET", url, If_None_Match=tag).status_code == 200


def test_browsable_api_has_a_tag_of_its_own_and_its_forms_need_none(url):
    page = ask("GET", url, Accept="text/html")
    tag = ask("GET", url)["ETag"]
    assert (page.status_code, b"<form" in page.content) == (200, True)
    assert page["ETag"] != tag
    assert ask("GET", url, Accept="text/html", If_None_Match=tag).status_code == 200
    assert ask("PUT", url, "second", If_Match=page["ETag"]).status_code == 200


def test_list_and_options_are_as_before(url):
    everything = ask("GET", "/articles/", If_None_Match="*")
    assert (everything.status_code, "ETag" in everything) == (200, False)
    assert "PUT" in ask("OPTIONS", url).data["actions"]


def test_new_object_tells_its_tag(url):
    made = ask("POST", "/articles/", "new")
    assert (made.status_code, made["ETag"]) == (201, ask("GET", f"/articles/{made.data['id']}/")["ETag"])


def test_actions_of_your_own_check_what_is_sent_and_show_no_tag(url, article):
    tag = etag_of(article)
    assert [ask("POST", f"{url}summary/").status_code, ask("POST", f"{url}summary/", If_Match=tag).status_code] == [
        200
    ] * 2
    assert ask("POST", f"{url}summary/", If_Match='"old"').status_code == 412
    shown = ask("GET", f"{url}summary/", If_None_Match=tag)
    assert (shown.status_code, "ETag" in shown) == (200, False)


def test_who_may_not_or_finds_nothing_learns_nothing_of_versions(url, article):
    Article.objects.update(title="forbidden")
    assert [ask("PUT", url, "x", If_Match='"old"').status_code, ask("PUT", url, "x").status_code] == [403, 403]
    assert ask("PUT", "/articles/999/", "x").status_code == 404


def test_view_may_make_if_match_optional_and_accept_weak_tags(use_database):
    use_database("default")
    draft = Draft.objects.create(title="first")
    url = f"/drafts/{draft.pk}/"
    weak = f"W/{ask('GET', url)['ETag']}"
    assert ask("PATCH", url, "second").status_code == 200
    assert ask("PATCH", url, "third", If_Match=weak).status_code == 412
    draft.refresh_from_db()
    assert ask("PATCH", url, "third", If_Match=f"W/{etag_of(draft)}").status_code == 200


class LowerCase(Articles):
    if_match_required = ["put"]


@pytest.mark.parametrize(
    "view",
    [
        LowerCase.as_view({"put": "update", "patch": "partial_update"}),
        Articles.as_view({"put": "update", "patch": "partial_update"}, if_match_required=["put"]),
    ],
)
def test_methods_that_need_if_match_may_be_in_lower_case(article, view):
    def status(method):
        request = APIRequestFactory().generic(method, "/", '{"title": "new"}', "application/json")
        try:
            return view(request, pk=article.pk).status_code
        except PreconditionRequired:
            return 428

    assert [status("PUT"), status("PATCH")] == [428, 200]


@pytest.mark.parametrize("methods", ["PUT", ["PUTT"], True, None, [b"PUT"]])
def test_methods_that_no_request_has_are_refused_when_the_view_is_made(methods):
    with pytest.raises(TypeError, match="if_match_required"):
        type("Own", (Articles,), {"if_match_required": methods})
    with pytest.raises(TypeError, match="if_match_required"):
        Articles.as_view({"put": "update"}, if_match_required=methods)


def test_methods_that_need_if_match_may_depend_on_the_request(article):
    class Own(Articles):
        @property
        def if_match_required(self):
            return ["put"] if "strict" in self.request.query_params else []

    view = Own.as_view({"put": "update"})
    request = APIRequestFactory().generic("PUT", "/", '{"title": "new"}', "application/json")
    assert view(request, pk=article.pk).status_code == 200
    request = APIRequestFactory().generic("PUT", "/?strict", '{"title": "new"}', "application/json")
    with pytest.raises(PreconditionRequired):
        view(request, pk=article.pk)


def test_version_is_shown_and_never_taken_from_the_client():
    article, draft = Article(title="x"), Draft(title="x", revision=7)
    assert ArticleSerializer(article).data == {"id": None, "title": "x", "version": 1}
    assert DraftSerializer(draft).data == {"title": "x", "revision": 7}
    sent = DraftSerializer(draft, data={"title": "y", "revision": 9})
    assert sent.is_valid()
    assert sent.validated_data == {"title": "y"}


@pytest.fixture
def plain_view(use_database):
    """A view that shows the version, and needs no If-Match."""
    use_database("default")

    class Plain(generics.RetrieveUpdateAPIView):
        queryset = Draft.objects.all()
        serializer_class = DraftSerializer

    return Plain.as_view()


@pytest.mark.parametrize("method", ["put", "patch"])
def test_version_that_the_client_sends_has_to_be_that_of_the_object(plain_view, method):
    draft = Draft.objects.create(title="first")
    shown = plain_view(APIRequestFactory().get("/"), pk=draft.pk).data
    changed = send(plain_view, method, draft, {**shown, "title": "theirs"})
    assert changed.data == {"title": "theirs", "revision": 2}
    with pytest.raises(StaleObject, match="at version 1: the row has version 2"):
        send(plain_view, method, draft, {**shown, "title": "mine"})
    assert Draft.objects.get().title == "theirs"
    assert send(plain_view, method, draft, {"title": "whatever"}).status_code == 200


@pytest.mark.parametrize("base", [(), (PreconditionMixin,)], ids=["plain", "preconditions"])
def test_lazy_object_is_compared_like_the_one_inside(use_database, base):
    class Me(*base, generics.RetrieveUpdateDestroyAPIView):
        serializer_class = DraftSerializer

        def get_object(self):
            return self.request.me

        def perform_update(self, serializer):
            serializer.instance = self.request.me
            super().perform_update(serializer)

        def perform_destroy(self, instance):
            super().perform_destroy(self.request.me)

    def call(method, body=None, tag=None):
        headers = {"If-Match": tag} if tag else {}
        request = getattr(APIRequestFactory(), method)("/", body, format="json", headers=headers)
        request.me = SimpleLazyObject(Draft.objects.get)  # as AuthenticationMiddleware makes request.user
        return Me.as_view()(request)

    use_database("default")
    draft = Draft.objects.create(title="first")
    assert call("get").data == {"title": "first", "revision": 1}
    changed = call("put", {"title": "second", "revision": 1}, etag_of(draft))
    assert changed.data == {"title": "second", "revision": 2}
    assert changed.get("ETag") == call("get").get("ETag")
    tag = etag_of(Draft.objects.get())
    with pytest.raises(StaleObject, match=r"cannot save Draft\(\d+\) at version 1: the row has version 2"):
        call("put", {"title": "mine", "revision": 1}, tag)
    assert call("delete", tag=tag).status_code == 204


@pytest.mark.parametrize("sent", ["x", None, [1], ""])
def test_version_that_is_none_is_an_error_of_its_field(plain_view, sent):
    draft = Draft.objects.create(title="first")
    answer = send(plain_view, "patch", draft, {"title": "mine", "revision": sent})
    assert (answer.status_code, list(answer.data)) == (400, ["revision"])
    assert send(plain_view, "patch", draft, {"title": "mine", "revision": "1"}).status_code == 200


def declaring(own=None, **meta):
    """Return a serializer of drafts with a field of the version of its own."""
    options = type("Meta", (), {"model": Draft, "fields": ["title", "revision"], **meta})
    fields = {} if own is None else {"revision": own}
    return type("Own", (VersionedSerializerMixin, serializers.ModelSerializer), {"Meta": options, **fields})


REQUIRED = [
    lambda: declaring(serializers.IntegerField()),
    lambda: declaring(extra_kwargs={"revision": {"required": True, "read_only": False}}),
]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("make", REQUIRED, ids=["declared", "extra_kwargs"])
def test_version_that_is_declared_as_required_has_to_be_in_every_change(use_database, make, partial):
    use_database("default")
    serializer, draft = make(), Draft.objects.create(title="first")
    sent = serializer(draft, data={"title": "mine"}, partial=partial)
    assert not sent.is_valid()
    assert [error.code for error in sent.errors["revision"]] == ["required"]
    with pytest.raises(StaleObject):
        serializer(draft, data={"title": "mine", "revision": 7}, partial=partial).is_valid()
    sent = serializer(draft, data={"title": "mine", "revision": 1}, partial=partial)
    assert sent.is_valid()
    assert sent.save().revision == 2


@pytest.mark.parametrize("make", REQUIRED, ids=["declared", "extra_kwargs"])
def test_new_object_needs_no_version_and_gets_its_own(use_database, make):
    use_database("default")
    for data in ({"title": "new"}, {"title": "new", "revision": 9}):
        sent = make()(data=data)
        assert sent.is_valid()
        assert sent.save().revision == 1


def test_version_field_of_your_own_is_validated_as_you_say(use_database):
    use_database("default")

    class Own(declaring(serializers.IntegerField(required=False))):
        def validate_revision(self, revision):
            raise serializers.ValidationError("no")

    draft = Draft.objects.create(title="first")
    assert not Own(draft, data={"title": "mine", "revision": 1}).is_valid()
    assert Own(draft, data={"title": "mine"}).is_valid()


@pytest.mark.parametrize("options", [{"read_only": True}, {"required": False}])
def test_version_under_another_name_is_compared_too(use_database, options):
    use_database("default")

    class Own(declaring(fields=["title", "rev"])):
        rev = serializers.IntegerField(source="revision", **options)

    draft = Draft.objects.create(title="first")
    with pytest.raises(StaleObject):
        Own(draft, data={"title": "mine", "rev": 7}).is_valid()
    sent = Own(draft, data={"title": "mine", "rev": 1})
    assert sent.is_valid()
    assert sent.save().revision == 2


def test_version_s_name_on_another_value_is_refused():
    own = serializers.CharField(source="title")
    with pytest.raises(TypeError, match="the field 'revision' of Own shows 'title' in place of the version"):
        _ = declaring(own)().fields


def test_version_in_the_body_and_if_match_have_both_to_hold(use_database):
    use_database("default")
    draft, view = Draft.objects.create(title="first"), Lenient.as_view()
    with pytest.raises(StaleObject):
        send(view, "patch", draft, {"title": "mine", "revision": 7}, if_match=etag_of(draft))
    assert send(view, "patch", draft, {"title": "mine"}, if_match=etag_of(draft)).status_code == 200


def test_version_sent_for_a_new_object_is_ignored(use_database):
    use_database("default")
    sent = DraftSerializer(data={"title": "y", "revision": 9})
    assert sent.is_valid()
    assert sent.save().revision == 1


@pytest.mark.parametrize("make", [*REQUIRED, declaring], ids=["declared", "extra_kwargs", "read_only"])
@pytest.mark.parametrize("partial", [False, True])
def test_row_that_is_read_again_to_be_saved_is_not_written_over(use_database, make, partial):
    use_database("default")
    draft = Draft.objects.create(title="first")
    sent = make()(draft, data={"title": "mine", "revision": "1"}, partial=partial)
    sent.is_valid(raise_exception=True)
    Draft.objects.update(title="theirs")
    sent.instance = Draft.objects.get()
    with pytest.raises(StaleObject, match=r"cannot save .* at version 1: the row has version 2"):
        sent.save()
    assert Draft.objects.get().title == "theirs"


@pytest.mark.parametrize("make", [*REQUIRED, declaring], ids=["declared", "extra_kwargs", "read_only"])
def test_row_that_is_read_again_in_place_to_be_saved_is_not_written_over(use_database, make):
    use_database("default")
    draft = Draft.objects.create(title="first")
    sent = make()(draft, data={"title": "mine", "revision": "1"})
    sent.is_valid(raise_exception=True)
    Draft.objects.update(title="theirs")
    draft.refresh_from_db()
    for _ in range(2):
        with pytest.raises(StaleObject):
            sent.save()
    assert Draft.objects.get().title == "theirs"


def save_twice(serializer, draft):
    serializer.save()
    serializer.save(title="again")


def save_its_instance_first(serializer, draft):
    serializer.instance.title = "submitted"
    serializer.instance.save()
    serializer.save(title="again")


def save_twice_what_was_read_again(serializer, draft):
    serializer.instance = Draft.objects.get(pk=draft.pk)
    save_twice(serializer, draft)


def refresh_between(serializer, draft):
    serializer.save()
    draft.refresh_from_db()
    serializer.save(title="again")


@pytest.mark.parametrize("save", [save_twice, save_its_instance_first, save_twice_what_was_read_again, refresh_between])
@pytest.mark.parametrize("make", [*REQUIRED, declaring], ids=["declared", "extra_kwargs", "read_only"])
def test_own_saves_of_a_request_are_no_conflict_with_the_version_that_was_sent(use_database, make, save):
    use_database("default")
    draft = Draft.objects.create(title="first")
    sent = make()(draft, data={"title": "mine", "revision": "1"})
    sent.is_valid(raise_exception=True)
    save(sent, draft)
    found = Draft.objects.get()
    assert (found.title, found.revision) == ("again", 3)


def test_conflict_found_by_the_save_is_answered_like_one_found_before(use_database):
    use_database("default")
    draft = Draft.objects.create(title="first")
    late, early = (ask("PUT", f"/late/{draft.pk}/", "mine", revision=1) for _ in range(2))
    assert (late.status_code, late.content) == (early.status_code, early.content)
    assert late.status_code == 409


def test_conflict_of_a_row_that_met_if_match_is_412_whichever_instance_is_saved(use_database):
    use_database("default")
    draft = Draft.objects.create(title="first")
    changed = ask("PUT", f"/locked/{draft.pk}/", "mine", revision=1, If_Match=etag_of(draft))
    assert changed.status_code == 412
    assert Draft.objects.get().title == "theirs"


def save_each(items):
    """Write each item over the row that it names, as a bulk endpoint does that compares the versions itself."""
    for item in items:
        draft = Draft.objects.get(pk=item["id"])
        for name, value in item.items():
            setattr(draft, name, value)
        draft.save()


def in_list(kind, data, **options):
    sent = kind(data=[data], many=True, **options)
    sent.is_valid(raise_exception=True)
    return sent.validated_data


def nested(kind, data, **options):
    outer = type("Outer", (serializers.Serializer,), {"draft": kind()})
    sent = outer(data={"draft": data}, **options)
    sent.is_valid(raise_exception=True)
    return [sent.validated_data["draft"]]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("validated", [in_list, nested])
def test_version_stays_among_the_data_where_the_object_is_not_known(use_database, validated, partial):
    class Own(declaring(fields=["id", "title", "rev"])):
        id = serializers.IntegerField()
        rev = serializers.IntegerField(source="revision")

    use_database("default")
    draft = Draft.objects.create(title="first")
    save_each(validated(Own, {"id": draft.pk, "title": "second", "rev": 1}, partial=partial))
    with pytest.raises(StaleObject):
        save_each(validated(Own, {"id": draft.pk, "title": "mine", "rev": 1}, partial=partial))
    with pytest.raises(serializers.ValidationError, match="required"):
        validated(Own, {"id": draft.pk, "title": "mine"}, partial=partial)
    assert Draft.objects.get().title == "second"


@pytest.mark.parametrize("validated", [in_list, nested])
def test_new_objects_in_lists_and_nested_ones_get_versions_of_their_own(use_database, validated):
    use_database("default")
    for item in validated(DraftSerializer, {"title": "new", "revision": 9}):
        assert Draft.objects.create(**item).revision == 1
    for sent in (9, None, "x"):
        assert validated(declaring(fields=["title"]), {"title": "new", "revision": sent}) == [{"title": "new"}]


def test_default_of_a_version_field_is_not_a_version_that_was_sent(use_database):
    use_database("default")
    draft = Draft.objects.create(title="first")
    for field in (serializers.IntegerField(default=7), serializers.HiddenField(default=7)):
        sent = declaring(field)(draft, data={"title": "second"})
        sent.is_valid(raise_exception=True)
        assert sent.validated_data == {"title": "second"}


def test_version_of_an_object_in_a_list_is_compared_where_the_list_knows_the_object(use_database):
    use_database("default")
    draft = Draft.objects.create(title="first")
    sent = DraftSerializer([draft], data=[{"title": "y", "revision": 9}], many=True)
    assert sent.is_valid()
    sent = DraftSerializer([draft], data=[{"title": "y", "revision": 9}], many=True)
    sent.child.instance = draft
    with pytest.raises(StaleObject):
        sent.is_valid()


@pytest.mark.parametrize("validated", [in_list, nested, None])
def test_version_that_may_be_null_counts_as_not_sent_if_it_is(use_database, validated):
    use_database("default")
    draft = Draft.objects.create(title="first")

    def check(kind):
        data = {"title": "second", "revision": None}
        if validated:
            return validated(kind, data)
        sent = kind(draft, data=data)
        sent.is_valid(raise_exception=True)
        return [sent.validated_data]

    optional = declaring(serializers.IntegerField(required=False, allow_null=True))
    assert check(optional) == [{"title": "second"}]
    for kind in (declaring(serializers.IntegerField(allow_null=True)), declaring(serializers.IntegerField())):
        with pytest.raises(serializers.ValidationError, match=r"required|null"):
            check(kind)


def test_model_without_a_version_fails_loudly(use_database):
    class Counters(PreconditionMixin, generics.RetrieveAPIView):
        queryset = Counter.objects.all()

    use_database("default")
    counter = Counter.objects.create(name="x")
    with pytest.raises(TypeError, match="Counter has no version"):
        Counters.as_view()(APIRequestFactory().get("/"), pk=counter.pk)


@pytest.mark.parametrize(
    ("mixin", "left"),
    [
        (PreconditionMixin, viewsets.ModelViewSet),
        (PreconditionMixin, generics.RetrieveUpdateAPIView),
        (VersionedSerializerMixin, serializers.ModelSerializer),
    ],
)
def test_mixin_to_the_right_of_what_it_guards_is_refused(mixin, left):
    with pytest.raises(TypeError, match=rf"class Own\({mixin.__name__}, {left.__name__}\)"):
        type("Own", (left, mixin), {})


def test_serializer_of_a_model_without_a_version_fails_loudly():
    class CounterSerializer(VersionedSerializerMixin, serializers.ModelSerializer):
        class Meta:
            model = Counter
            fields = ["id"]

    with pytest.raises(TypeError, match="Counter has no version"):
        CounterSerializer(Counter()).data  # noqa: B018 - asks for the fields


def test_view_that_writes_another_object_than_was_checked_fails_loudly_and_writes_nothing(use_database):
    class Careless(Lenient):
        def update(self, request, *args, **kwargs):
            serializer = self.get_serializer(Draft.objects.get(), data=request.data)
            serializer.is_valid(raise_exception=True)
            self.perform_update(serializer)

        def destroy(self, request, *args, **kwargs):
            self.perform_destroy(Draft.objects.get())

    use_database("default")
    Draft.objects.create(title="first")
    view = Careless.as_view()
    for request in (APIRequestFactory().patch("/", {"title": "second"}), APIRequestFactory().delete("/")):
        with pytest.raises(TypeError, match=r"Careless.*get_object\(\)"):
            view(request, pk=1)
    assert Draft.objects.get().title == "first"


class InContext(Lenient):
    """It reads the object once more, for its serializer."""

    def get_serializer_context(self):
        return {**super().get_serializer_context(), "before": self.get_object()}


class InBetween(Lenient):
    """It reads the object once more, for a log, and saves the one that the serializer has."""

    def perform_update(self, serializer):
        self.get_object()
        serializer.save()


class Locked(Lenient):
    """It locks the row, and saves what it has then read."""

    def perform_update(self, serializer):
        serializer.instance = Draft.objects.get(pk=self.get_object().pk)
        serializer.save()


class WithoutSerializer(Lenient):
    """It answers with data of its own."""

    def update(self, request, **kwargs):
        draft = self.get_object()
        self.get_object()
        draft.title = request.data["title"]
        draft.save()
        return Response({"title": draft.title})


def test_version_that_was_sent_may_be_passed_on_to_another_process(use_database):
    use_database("default")
    draft = Draft.objects.create(title="first")
    item = pickle.loads(pickle.dumps(validated_list(draft.pk, "mine", 0)))[0]
    draft.title, draft.revision = item["title"], item["revision"]
    with pytest.raises(StaleObject):
        draft.save()


def test_version_sent_in_a_list_is_compared_by_each_request_and_in_each_attempt(use_database):
    use_database("default")
    draft = Draft.objects.create(title="first")
    for title, version in (("second", 1), ("mine", 1), ("mine", 0)):
        (item,) = validated_list(draft.pk, title, version)
        draft.revision = item["revision"]
        draft.title = title
        for _ in range(2):
            with pytest.raises(StaleObject) if title == "mine" else contextlib.nullcontext():
                draft.save()
        draft.refresh_from_db()
    assert Draft.objects.get().title == "second"


def validated_list(key, title, version):
    """Return the data of a list of items, each with the version that its client has seen."""

    class Item(VersionedSerializerMixin, serializers.ModelSerializer):
        revision = serializers.IntegerField()

        class Meta:
            model = Draft
            fields = ["title", "revision"]

    sent = Item(data=[{"title": title, "revision": version}], many=True)
    sent.is_valid(raise_exception=True)
    return sent.validated_data


def test_object_that_get_object_reads_again_in_place_is_compared_again(use_database):
    class Locking(Lenient):
        def get_object(self):
            found = super().get_object()
            Draft.objects.update(title="theirs")
            found.refresh_from_db()
            return found

    use_database("default")
    draft = Draft.objects.create(title="first")
    for method in ("put", "delete"):
        with pytest.raises(PreconditionFailed):
            send(Locking.as_view(), method, draft, {"title": "mine"}, if_match=etag_of(draft))
    assert Draft.objects.get().title == "theirs"


@pytest.mark.parametrize("method", ["put", "delete"])
def test_object_that_a_rolled_back_write_of_the_request_has_shown_vouches_for_no_other(use_database, method):
    class Trying(Lenient):
        def initial(self, request, *args, **kwargs):
            super().initial(request, *args, **kwargs)
            with contextlib.suppress(LookupError), transaction.atomic():
                first = self.get_object()
                first.title = "undone"
                first.save()
                self.get_object()
                raise LookupError
            Draft.objects.update(title="theirs")

    use_database("default")
    draft = Draft.objects.create(title="first")
    with pytest.raises(PreconditionFailed):
        send(Trying.as_view(), method, draft, {"title": "mine"}, if_match=etag_of(draft))
    assert Draft.objects.get().title == "theirs"


def test_object_that_the_request_itself_has_written_is_not_what_the_client_has(use_database):
    class Counting(Lenient):
        def retrieve(self, request, **kwargs):
            found = self.get_object()
            found.title = "counted"
            found.save()
            return super().retrieve(request, **kwargs)

    use_database("default")
    draft = Draft.objects.create(title="first")
    seen = etag_of(draft, variant="json")
    shown = Counting.as_view()(APIRequestFactory().get("/", headers={"If-None-Match": seen}), pk=draft.pk)
    assert (shown.status_code, shown.data["title"]) == (200, "counted")


def test_version_sent_in_a_list_is_compared_in_each_attempt_of_an_instance_that_outlives_its_request(use_database):
    use_database("default")
    kept = Draft.objects.create(title="first")
    (first,), (second,) = (validated_list(kept.pk, "x", 1) for _ in range(2))
    kept.revision, kept.title = first["revision"], "second"
    kept.save()
    for _ in range(3):
        kept.revision, kept.title = second["revision"], "mine"
        with pytest.raises(StaleObject):
            kept.save()
        kept.refresh_from_db()
    assert Draft.objects.get().title == "second"


def test_object_that_was_read_again_in_place_is_not_what_the_client_has(use_database):
    class Counting(Lenient):
        def retrieve(self, request, **kwargs):
            found = self.get_object()
            Draft.objects.update(title="theirs")
            found.refresh_from_db()
            return Response(self.get_serializer(found).data)

    use_database("default")
    draft = Draft.objects.create(title="first")
    seen = etag_of(draft, variant="json")
    shown = Counting.as_view()(APIRequestFactory().get("/", headers={"If-None-Match": seen}), pk=draft.pk)
    assert (shown.status_code, shown.data["title"]) == (200, "theirs")
    assert shown["ETag"] == etag_of(Draft.objects.get(), variant="json")


def test_object_that_was_read_again_in_place_does_not_spare_the_next_one_its_check(use_database):
    class Reading(Lenient):
        def update(self, request, **kwargs):
            first = self.get_object()
            Draft.objects.update(title="theirs")
            first.refresh_from_db()
            return super().update(request, **kwargs)

    use_database("default")
    draft = Draft.objects.create(title="first")
    with pytest.raises(PreconditionFailed):
        send(Reading.as_view(), "put", draft, {"title": "mine"}, if_match=etag_of(draft))
    assert Draft.objects.get().title == "theirs"


class After(Lenient):
    """It answers with what it reads after the save."""

    def update(self, request, **kwargs):
        super().update(request, **kwargs)
        return Response(self.get_serializer(self.get_object()).data)


@pytest.mark.parametrize("kind", [InContext, InBetween, Locked, WithoutSerializer, After])
def test_object_that_is_read_twice_may_be_written_and_its_tag_is_that_of_the_next_read(use_database, kind):
    use_database("default")
    draft, view = Draft.objects.create(title="first"), kind.as_view(if_match_required=["PUT"])
    tag = view(APIRequestFactory().get("/"), pk=draft.pk)["ETag"]
    for title in ("second", "third"):
        changed = send(view, "put", draft, {"title": title}, if_match=tag)
        assert changed.data["title"] == title
        assert changed["ETag"] == view(APIRequestFactory().get("/"), pk=draft.pk)["ETag"] != tag
        tag = changed["ETag"]
    with pytest.raises(PreconditionFailed):
        send(view, "put", draft, {"title": "mine"}, if_match='"old"')


@pytest.mark.parametrize("has_serializer", [True, False])
@pytest.mark.parametrize("known", [1, 2])
def test_tag_of_an_object_that_changes_while_it_is_shown_is_that_of_what_is_shown(use_database, has_serializer, known):
    class Changing(Lenient):
        def retrieve(self, request, **kwargs):
            draft = self.get_object()
            Draft.objects.update(title="second")
            self.get_object()
            return Response(self.get_serializer(draft).data if has_serializer else {"title": draft.title})

    use_database("default")
    draft = Draft.objects.create(title="first")
    seen = etag_of(Draft(pk=draft.pk, revision=known), variant="json")
    shown = Changing.as_view()(APIRequestFactory().get("/", headers={"If-None-Match": seen}), pk=draft.pk)
    assert (shown.status_code, shown["ETag"]) == (304 if known == 1 else 200, etag_of(draft, variant="json"))


@pytest.mark.parametrize("has_mixin", [True, False])
def test_tag_of_an_object_that_changes_after_it_was_serialized_is_that_of_the_body(use_database, has_mixin):
    class Plain(serializers.ModelSerializer):
        class Meta:
            model = Draft
            fields = ["title"]

    class CountingAfterwards(Lenient):
        serializer_class = DraftSerializer if has_mixin else Plain

        def retrieve(self, request, **kwargs):
            draft = self.get_object()
            body = self.get_serializer(draft).data
            Draft.objects.update(title="theirs")
            draft.refresh_from_db()
            draft.save()
            return Response(body)

    class Indexing(CountingAfterwards):
        def update(self, request, **kwargs):
            self.found = super().get_object()
            answer = super().update(request, **kwargs)
            Draft.objects.update(title="theirs")
            self.found.refresh_from_db()
            return answer

        def get_object(self):
            return self.found

    use_database("default")
    draft = Draft.objects.create(title="first")
    view = CountingAfterwards.as_view()
    shown = send(view, "get", draft, {})
    assert (shown.data["title"], shown["ETag"]) == ("first", etag_of(draft, variant="json"))
    with pytest.raises(PreconditionFailed):
        send(view, "put", draft, {"title": "mine"}, if_match=shown["ETag"])
    draft.refresh_from_db()
    indexed = send(Indexing.as_view(), "put", draft, {"title": "second"}, if_match=etag_of(draft, variant="json"))
    assert indexed.data["title"] == "second"
    with pytest.raises(PreconditionFailed):
        send(view, "put", draft, {"title": "mine"}, if_match=indexed["ETag"])
    assert Draft.objects.get().title == "theirs"


@pytest.mark.parametrize("method", ["put", "delete"])
def test_object_that_is_refreshed_after_the_request_has_saved_it_by_another_instance_is_its_own(use_database, method):
    class Auditing(Lenient):
        def initial(self, request, *args, **kwargs):
            super().initial(request, *args, **kwargs)
            self.before = self.get_object()

        def save_and_look(self, instance):
            instance.title = "second"
            instance.save()
            self.before.refresh_from_db()

        def perform_update(self, serializer):
            self.save_and_look(serializer.instance)
            super().perform_update(serializer)

        def perform_destroy(self, instance):
            self.save_and_look(instance)
            super().perform_destroy(instance)

    use_database("default")
    draft = Draft.objects.create(title="first")
    answer = send(Auditing.as_view(), method, draft, {"title": "third"}, if_match=etag_of(draft))
    assert answer.status_code in {200, 204}
    assert [each.title for each in Draft.objects.all()] == (["third"] if method == "put" else [])


def test_version_read_late_on_one_instance_is_no_error_of_the_next_one(use_database):
    class Looking(Lenient):
        def initial(self, request, *args, **kwargs):
            super().initial(request, *args, **kwargs)
            self.get_object().refresh_from_db(fields=["revision"])

    use_database("default")
    draft = Draft.objects.create(title="first")
    assert send(Looking.as_view(), "get", draft, {}).data["title"] == "first"
    assert send(Looking.as_view(), "put", draft, {"title": "mine"}, if_match=etag_of(draft)).data["title"] == "mine"


def test_object_whose_version_was_read_after_its_save_has_no_tag(use_database):
    class Looking(Lenient):
        def perform_update(self, serializer):
            super().perform_update(serializer)
            serializer.instance.refresh_from_db(fields=["revision"])

    use_database("default")
    draft = Draft.objects.create(title="first")
    changed = send(Looking.as_view(), "put", draft, {"title": "mine"}, if_match=etag_of(draft))
    assert (changed.data["title"], changed.has_header("ETag")) == ("mine", False)


@pytest.mark.parametrize("tag", ["old", None])
def test_request_that_a_view_makes_of_another_is_checked_before_it_writes(use_database, tag):
    class Batch(PreconditionMixin, viewsets.ModelViewSet):
        queryset = Draft.objects.all()
        serializer_class = DraftSerializer

        def act(self, request, **kwargs):
            self.request = clone_request(request, "PUT")
            return self.update(self.request, **kwargs)

    use_database("default")
    draft = Draft.objects.create(title="first")
    view = Batch.as_view({"post": "act"})
    options = {} if tag is None else {"if_match": f'"{tag}"'}
    with pytest.raises(PreconditionRequired if tag is None else PreconditionFailed):
        send(view, "post", draft, {"title": "mine"}, **options)
    assert Draft.objects.get().title == "first"
    assert send(view, "post", draft, {"title": "mine"}, if_match=etag_of(draft, variant="json")).status_code == 200


def test_preview_that_is_rolled_back_has_no_tag(use_database):
    class Preview(Lenient):
        def perform_update(self, serializer):
            super().perform_update(serializer)
            transaction.set_rollback(True)

    use_database("default")
    draft = Draft.objects.create(title="first")
    with transaction.atomic():
        shown = send(Preview.as_view(), "put", draft, {"title": "mine"}, if_match=etag_of(draft))
    assert (shown.data["title"], shown.has_header("ETag")) == ("mine", False)
    assert Draft.objects.get().title == "first"


class PreviewInItsBlock(Lenient):
    def update(self, request, **kwargs):
        with transaction.atomic():
            answer = super().update(request, **kwargs)
            transaction.set_rollback(True)
        return answer


class PreviewToASavepoint(Lenient):
    def update(self, request, **kwargs):
        with transaction.atomic():
            savepoint = connections["default"].savepoint()
            answer = super().update(request, **kwargs)
            connections["default"].savepoint_rollback(savepoint)
        return answer


class PreviewOfItsData(Lenient):
    def perform_update(self, serializer):
        with transaction.atomic():
            super().perform_update(serializer)
            assert serializer.data["title"] == "mine"
            transaction.set_rollback(True)


class PreviewAroundItself(Lenient):
    def dispatch(self, request, **kwargs):
        with transaction.atomic():
            answer = super().dispatch(request, **kwargs)
            transaction.set_rollback(True)
        return answer


class PreviewThatLooksAgain(PreviewInItsBlock):
    def update(self, request, **kwargs):
        answer = super().update(request, **kwargs)
        Draft.objects.update(title="theirs")
        answer.data.serializer.instance.refresh_from_db()
        return answer


PREVIEWS = [PreviewInItsBlock, PreviewToASavepoint, PreviewOfItsData, PreviewAroundItself, PreviewThatLooksAgain]


@pytest.mark.parametrize("kind", PREVIEWS)
def test_preview_that_a_view_rolls_back_itself_has_no_tag_of_a_version_that_never_was(use_database, kind):
    use_database("default")
    draft = Draft.objects.create(title="first")
    shown = send(kind.as_view(), "put", draft, {"title": "mine"}, if_match=etag_of(draft))
    assert (shown.status_code, shown.data["title"], shown.has_header("ETag")) == (200, "mine", False)


class Enveloped(Lenient):
    def shown(self, draft):
        return {"draft": self.get_serializer(draft).data}

    def retrieve(self, request, **kwargs):
        draft = self.get_object()
        body = self.shown(draft)
        Draft.objects.update(title="theirs")
        draft.refresh_from_db()
        return Response(body)


class WithOwnSerializer(Enveloped):
    def shown(self, draft):
        return DraftSerializer(draft).data


class WithOwnGetSerializer(Enveloped):
    def get_serializer(self, *args, **kwargs):
        return DraftSerializer(*args, **kwargs)


class WithBoth(Enveloped):
    def retrieve(self, request, **kwargs):
        draft = self.get_object()
        first = self.shown(draft)
        Draft.objects.update(title="theirs")
        draft.refresh_from_db()
        return Response({"first": first, "second": self.shown(draft)})


class OfAnotherInstance(Enveloped):
    def retrieve(self, request, **kwargs):
        self.get_object()
        Draft.objects.update(title="theirs at first")
        draft = Draft.objects.get()
        body = DraftSerializer(draft).data
        Draft.objects.update(title="theirs")
        draft.refresh_from_db()
        return Response(body)


@pytest.mark.parametrize("kind", [Enveloped, WithOwnSerializer, WithOwnGetSerializer, WithBoth, OfAnotherInstance])
def test_tag_is_never_newer_than_the_body_however_the_view_has_made_it(use_database, kind):
    use_database("default")
    draft = Draft.objects.create(title="first")
    shown = send(kind.as_view(), "get", draft, {})
    assert "first" in str(shown.data)
    assert shown.headers.get("ETag") == (
        None if kind in {WithOwnSerializer, OfAnotherInstance} else etag_of(draft, variant="json")
    )


def test_view_that_looks_at_its_object_before_the_save_answers_with_the_tag_after_it(use_database):
    class Audited(Lenient):
        def perform_update(self, serializer):
            assert self.get_serializer(serializer.instance).data["title"] == "first"
            super().perform_update(serializer)

    use_database("default")
    draft = Draft.objects.create(title="first")
    changed = send(Audited.as_view(), "put", draft, {"title": "mine"}, if_match=etag_of(draft))
    assert changed["ETag"] == etag_of(Draft.objects.get(), variant="json")


@pytest.mark.parametrize("kind", [WithOwnSerializer, WithOwnGetSerializer])
def test_body_that_a_view_makes_in_its_own_way_has_a_tag_if_nobody_else_has_changed_the_object(use_database, kind):
    class Saving(kind):
        def retrieve(self, request, **kwargs):
            draft = self.get_object()
            draft.title = "read"
            draft.save()
            return Response(self.shown(draft))

    use_database("default")
    draft = Draft.objects.create(title="first")
    assert send(Saving.as_view(), "get", draft, {})["ETag"] == etag_of(Draft.objects.get(), variant="json")


def test_action_may_show_another_model_without_a_version(use_database):
    class CounterSerializer(serializers.ModelSerializer):
        class Meta:
            model = Counter
            fields = ["name"]

    class Drafts(PreconditionMixin, viewsets.ModelViewSet):
        queryset = Draft.objects.all()
        serializer_class = DraftSerializer

        @action(detail=False, methods=["post"], serializer_class=CounterSerializer)
        def count(self, request):
            serializer = self.get_serializer(data=request.data)
            serializer.is_valid(raise_exception=True)
            serializer.save()
            return Response(serializer.data, 201)

    use_database("default")
    view = Drafts.as_view({"post": "count"}, serializer_class=CounterSerializer)
    answer = view(APIRequestFactory().post("/", {"name": "a"}, format="json"))
    assert (answer.status_code, answer.data, answer.has_header("ETag")) == (201, {"name": "a"}, False)


def test_view_without_serializers_has_no_method_for_them(use_database):
    class Own(PreconditionMixin, APIView):
        def get_object(self):
            return Draft.objects.get()

        def get(self, request):
            return Response({"title": self.get_object().title})

    use_database("default")
    draft = Draft.objects.create(title="first")
    assert not hasattr(Own(), "get_serializer")
    assert Own.as_view()(APIRequestFactory().options("/")).status_code == 200
    page = Own.as_view(renderer_classes=[BrowsableAPIRenderer])(
        APIRequestFactory().get("/", headers={"Accept": "text/html"})
    )
    assert page.render().status_code == 200
    assert Own.as_view()(APIRequestFactory().get("/"))["ETag"] == etag_of(draft, variant="json")


def test_serializer_of_a_view_can_be_copied_and_passed_on_to_another_process(use_database):
    use_database("default")
    draft = Draft.objects.create(title="first")
    serializer = Lenient(request=None, format_kwarg=None).get_serializer(draft)
    serializer._context = {}  # The view cannot be pickled.
    assert pickle.loads(pickle.dumps(serializer)).data == copy.deepcopy(serializer).data == serializer.data


class OwnGetObject:
    """A mixin that finds the object in its own way; in the list of bases, it is before ours or after it."""

    def get_object(self):
        return Draft.objects.get(pk=self.kwargs["pk"])


class OwnEverything(Lenient):
    if_match_required = ("PUT", "PATCH", "DELETE")

    def get_object(self):
        return Draft.objects.get(pk=self.kwargs["pk"])

    def perform_update(self, serializer):
        serializer.save(title=f"{serializer.validated_data['title']}!")

    def perform_destroy(self, instance):
        instance.delete()


class Mixed(OwnGetObject, OwnEverything):
    pass


class AlsoMixed(OwnEverything, OwnGetObject):
    def get_object(self):
        return super().get_object()


@pytest.mark.parametrize("kind", [OwnEverything, Mixed, AlsoMixed])
def test_object_that_a_view_finds_in_its_own_way_is_checked_like_any_other(use_database, kind):
    use_database("default")
    draft = Draft.objects.create(title="first")
    view, make = kind.as_view(), APIRequestFactory()
    for ask_it in (make.patch, make.put, make.delete):
        with pytest.raises(PreconditionRequired):
            view(ask_it("/", {"title": "second"}), pk=draft.pk)
        with pytest.raises(PreconditionFailed):
            view(ask_it("/", {"title": "second"}, headers={"If-Match": '"old"'}), pk=draft.pk)
    draft.refresh_from_db()
    assert draft.title == "first"
    tag = etag_of(draft, variant="json")
    assert view(make.get("/"), pk=draft.pk)["ETag"] == tag
    changed = view(make.patch("/", {"title": "second"}, headers={"If-Match": tag}), pk=draft.pk)
    draft.refresh_from_db()
    assert (changed.status_code, changed["ETag"], draft.title) == (200, etag_of(draft, variant="json"), "second!")
    assert view(make.delete("/", headers={"If-Match": etag_of(draft)}), pk=draft.pk).status_code == 204


@pytest.mark.parametrize("method", ["put", "patch", "delete"])
def test_view_that_changes_an_object_and_never_checked_one_fails_loudly(use_database, method):
    class Careless(Lenient):
        if_match_required = ("PUT", "PATCH", "DELETE")

        def put(self, request, pk):
            Draft.objects.filter(pk=pk).update(title="second")
            return Response({})

        patch = delete = put

    use_database("default")
    draft = Draft.objects.create(title="first")
    with pytest.raises(TypeError, match=r"Careless.*get_object\(\)"), transaction.atomic():
        Careless.as_view()(getattr(APIRequestFactory(), method)("/"), pk=draft.pk)
    draft.refresh_from_db()
    assert draft.title == "first"


class Routed(Articles):
    @action(detail=True, methods=["put", "post"])
    def save(self, request, pk):
        Article.objects.filter(pk=pk).update(title="second")
        return Response({})

    @action(detail=False, methods=["put"])
    def all(self, request):
        Article.objects.update(title="second")
        return Response({})


class PostChanges(PreconditionMixin, generics.GenericAPIView):
    queryset = Article.objects.all()
    serializer_class = ArticleSerializer

    def post(self, request, pk):
        serializer = self.get_serializer(self.get_object(), data=request.data)
        serializer.is_valid(raise_exception=True)
        serializer.save()
        return Response(serializer.data)


POSTED = [Routed.as_view({"post": each}) for each in ("update", "partial_update", "destroy")] + [PostChanges.as_view()]


@pytest.mark.parametrize("view", POSTED)
def test_post_that_changes_an_object_needs_the_tag(article, view):
    def post(**headers):
        return view(APIRequestFactory().post("/", {"title": "second"}, headers=headers), pk=article.pk)

    with pytest.raises(PreconditionRequired):
        post()
    with pytest.raises(PreconditionFailed):
        post(**{"If-Match": '"old"'})
    assert post(**{"If-Match": etag_of(article)}).status_code in {200, 204}


@pytest.mark.parametrize("kind", [Routed, PostChanges])
def test_post_that_changes_an_object_needs_no_tag_if_no_method_does(article, kind):
    actions = [{"post": "update"}] if kind is Routed else []
    view = kind.as_view(*actions, if_match_required=())
    assert view(APIRequestFactory().post("/", {"title": "second"}), pk=article.pk).status_code == 200


@pytest.mark.parametrize("options", [{}, {"detail": True}])
def test_action_of_your_own_that_changes_an_object_and_never_checked_one_fails_loudly(article, options):
    view = Routed.as_view({"put": "save", "post": "save"}, **options)
    with pytest.raises(TypeError, match=r"Routed.*get_object\(\)"):
        view(APIRequestFactory().put("/"), pk=article.pk)
    assert view(APIRequestFactory().post("/"), pk=article.pk).status_code == 200


@pytest.mark.parametrize("options", [{}, {"detail": False}])
def test_action_of_your_own_on_all_objects_needs_no_tag(article, options):
    assert Routed.as_view({"put": "all"}, **options)(APIRequestFactory().put("/")).status_code == 200


def test_answer_of_django_s_own_that_something_was_made_is_left_as_it_is(article):
    class Making(PreconditionMixin, viewsets.ModelViewSet):
        queryset = Article.objects.all()

        def create(self, request):
            return JsonResponse({"made": True}, status=201)

    response = Making.as_view({"post": "create"})(APIRequestFactory().post("/"))
    assert (response.status_code, response.content) == (201, b'{"made": true}')


@pytest.mark.parametrize("status", [200, 204, 303])
@pytest.mark.parametrize("actions", [None, {"put": "update", "patch": "partial_update", "delete": "destroy"}])
@pytest.mark.parametrize("method", ["put", "patch", "delete"])
def test_address_without_a_key_needs_a_check_too(use_database, actions, method, status):
    class Mine(PreconditionMixin, *([viewsets.GenericViewSet] if actions else [generics.GenericAPIView])):
        def update(self, request):
            Draft.objects.update(title="second")
            return Response({}, status=status)

        put = patch = delete = partial_update = destroy = update

    use_database("default")
    draft = Draft.objects.create(title="first")
    view = Mine.as_view(*([actions] if actions else []))
    with pytest.raises(TypeError, match=r"Mine.*get_object\(\).*if_match_required"), transaction.atomic():
        view(getattr(APIRequestFactory(), method)("/me/"))
    draft.refresh_from_db()
    assert draft.title == "first"


def test_view_of_many_objects_may_say_that_it_needs_no_tag(use_database):
    class All(PreconditionMixin, generics.ListAPIView):
        queryset = Draft.objects.all()
        serializer_class = DraftSerializer
        if_match_required = ()

        def patch(self, request):
            Draft.objects.update(title="second")
            return self.list(request)

    use_database("default")
    Draft.objects.create(title="first")
    answer = All.as_view()(APIRequestFactory().patch("/"))
    assert (answer.status_code, answer.data[0]["title"]) == (200, "second")


def test_new_object_of_a_view_that_saves_in_its_own_way_tells_its_tag(use_database):
    class Makes(PreconditionMixin, generics.CreateAPIView):
        serializer_class = ArticleSerializer

        def perform_create(self, serializer):
            serializer.save(reads=7)

    use_database("default")
    made = Makes.as_view()(APIRequestFactory().post("/", {"title": "a"}))
    assert (made.status_code, made["ETag"]) == (201, etag_of(Article.objects.get(), variant="json"))


def test_many_new_objects_have_no_tag(use_database):
    class Many(PreconditionMixin, generics.CreateAPIView):
        serializer_class = ArticleSerializer

        def get_serializer(self, *args, **kwargs):
            return super().get_serializer(*args, **kwargs, many=True)

    use_database("default")
    made = Many.as_view()(APIRequestFactory().post("/", [{"title": "a"}, {"title": "b"}], format="json"))
    assert (made.status_code, len(made.data), "ETag" in made) == (201, 2, False)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_of_two_clients_with_the_same_tag_exactly_one_changes_the_object(database):
    article = Article.objects.using(database).create(title="first")
    url = f"/articles/{article.pk}/?together"

    def change(title):
        try:
            return ask("PUT", url, title, If_Match=etag_of(article), X_Database=database).status_code
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as clients:
        assert sorted(clients.map(change, ["second", "third"])) == [200, 412]


def overriding(get_response):
    """A middleware for clients that can only POST."""

    def middleware(request):
        request.method = request.headers.get("X-HTTP-Method-Override", request.method)
        return get_response(request)

    return middleware


def test_method_that_a_middleware_put_in_place_of_post_is_checked_like_any_other(url, article):
    with override_settings(MIDDLEWARE=[*SITE["MIDDLEWARE"], f"{__name__}.overriding"]):
        given = {"X_HTTP_Method_Override": "PUT"}
        assert ask("POST", url, "x", **given).status_code == 428
        assert ask("POST", url, "x", If_Match='"old"', **given).status_code == 412
        assert ask("POST", url, "x", If_Match=etag_of(article), **given).status_code == 200
