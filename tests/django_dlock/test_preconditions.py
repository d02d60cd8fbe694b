"""ETag, If-Match and If-None-Match work on Django views; above all, of two clients with the same tag one is refused."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.contrib.auth.models import User
from django.db import connections, models, transaction
from django.http import Http404, HttpResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.test.utils import isolate_apps
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.functional import SimpleLazyObject
from django.views import View
from django.views.generic import DetailView
from rest_framework.decorators import api_view
from rest_framework.exceptions import Throttled, ValidationError
from rest_framework.response import Response
from rest_framework.views import APIView

from django_dlock import arg
from django_dlock.models import VersionField
from django_dlock.preconditions import check_preconditions, conditional, etag_of
from dlock_core.web.preconditions import entity_tag
from tests.django_dlock.parties import unlocked, until_blocked
from tests.testapp.models import Account, Article, ArticleProxy, Code, Counter, Draft, Shop

pytestmark = pytest.mark.usefixtures("versions_from_1")

TOGETHER = threading.Barrier(2)
MIDDLEWARE = ["django_dlock.middleware.LockMiddleware"]


def database_of(request):
    return request.headers.get("X-Database", "default")


def rename_lazily(request, pk):
    """Do as `rename` does, with an object like `request.user`."""
    article = SimpleLazyObject(lambda: Article.objects.get(pk=pk))
    check_preconditions(request, article)
    if "overtaken" in request.GET:
        Article.objects.update(reads=1)
    article.title = request.GET["title"]
    article.save()
    return HttpResponse(headers={"ETag": etag_of(article)})


def rename(request, pk):
    """Read an instance, check it, and write the same instance."""
    article = Article.objects.using(database_of(request)).get(pk=pk)
    if check_preconditions(request, article, required="optional" not in request.GET):
        return HttpResponse(status=304)
    if request.method == "GET":
        return HttpResponse(article.title, headers={"ETag": etag_of(article)})
    if "together" in request.GET:
        TOGETHER.wait(60)
    article.title = request.GET["title"]
    article.save_with_version() if request.method == "PUT" else article.delete()
    return HttpResponse("done", headers={"ETag": etag_of(article)} if request.method == "PUT" else {})


async def arename(request, pk):
    article = await Article.objects.aget(pk=pk)
    check_preconditions(request, article)
    article.title = request.GET["title"]
    await article.asave_with_version()
    return HttpResponse("done", headers={"ETag": etag_of(article)})


def count(request, pk):
    """Read again and write without any check: only the row lock protects it."""
    if request.method == "GET":
        return HttpResponse("shown")
    rows = Article.objects.using(database_of(request)).filter(pk=pk)
    rows.update(reads=rows.get().reads + 1)
    return HttpResponse("counted")


def count_on(alias):
    return conditional(Article, "pk", using=alias)(count)


@conditional(Draft)
class Drafts(DetailView):
    model = Draft

    def render_to_response(self, context):
        return HttpResponse(self.object.title)

    def post(self, request, pk):
        Draft.objects.filter(pk=pk).update(title="posted")
        return HttpResponse("posted")


class Methods(View):
    @conditional(Code, "code")
    def put(self, request, code):
        return HttpResponse("put")

    @method_decorator(conditional(Code, "code", required=False, accept_weak=True))
    def delete(self, request, code):
        return HttpResponse("deleted")


def show(request, pk):
    return HttpResponse("shown", headers={"Vary": "Accept"})


def show_much(request, pk):
    return HttpResponse("shown " * 100)


urlpatterns = [
    path("articles/<int:pk>", rename),
    path("async/<int:pk>", arename),
    path("lazy/<int:pk>", rename_lazily),
    path("default/<int:pk>", count_on("default")),
    path("postgresql/<int:pk>", count_on("postgresql")),
    path("mariadb/<int:pk>", count_on("mariadb")),
    path("drafts/<int:pk>", Drafts.as_view()),
    path("codes/<code>", Methods.as_view()),
    path("weak/<int:pk>", conditional(Article, accept_weak=True)(show_much)),
    path("html/<int:pk>", conditional(Article, variant="html")(show)),
    path("any/<str:pk>", conditional(Article)(show)),
]


@pytest.fixture(autouse=True)
def _site():
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=MIDDLEWARE):
        yield


@pytest.fixture
def article(use_database):
    use_database("default")
    return Article.objects.create(title="first")


def put(path, tag=None, method="PUT", **headers):
    given = {} if tag is None else {"If-Match": tag}
    return Client().generic(method, path, headers={**given, **headers})


def test_tag_that_was_read_lets_one_change_through_and_the_next_needs_the_new_one(article):
    url = f"/articles/{article.pk}?title=second"
    tag = Client().get(url).headers["ETag"]
    changed = put(url, tag)
    again = put(url, tag)
    assert (changed.status_code, again.status_code) == (200, 412)
    assert again.headers["Content-Type"] == "application/problem+json"
    assert again.json()["type"] == "urn:dlock:precondition-failed"
    assert again.json()["object"] == f"Article({article.pk})"
    assert "ETag" not in again.headers  # with it, the client could repeat the change and overwrite what it has not seen
    assert put(url, changed.headers["ETag"]).status_code == 200


def test_lazy_object_is_checked_like_the_one_inside(article):
    url = f"/lazy/{article.pk}?title=second"
    changed = put(url, etag_of(article))
    article.refresh_from_db()
    assert changed.headers["ETag"] == etag_of(SimpleLazyObject(lambda: article)) == etag_of(article)
    assert (article.title, article.version) == ("second", 2)
    assert [put(url).status_code, put(url, '"old"').status_code] == [428, 412]
    assert put(f"{url}&overtaken", etag_of(article)).status_code == 412


def test_change_without_if_match_is_428_and_with_nonsense_400_and_writes_nothing(article):
    url = f"/articles/{article.pk}?title=second"
    assert [put(url).status_code, put(url, "abc").status_code] == [428, 400]
    article.refresh_from_db()
    assert article.title == "first"
    assert put(f"{url}&optional").status_code == 200


def test_delete_needs_the_tag_too(article):
    url = f"/articles/{article.pk}?title="
    assert put(url, method="DELETE").status_code == 428
    assert put(url, etag_of(article), "DELETE").status_code == 200
    assert not Article.objects.exists()


def test_reader_who_has_the_version_gets_304(article):
    url = f"/articles/{article.pk}"
    tag = Client().get(url).headers["ETag"]
    assert Client().get(url, headers={"If-None-Match": tag}).status_code == 304
    assert Client().get(url, headers={"If-None-Match": f"W/{tag}"}).status_code == 304
    article.save_with_version()
    assert Client().get(url, headers={"If-None-Match": tag}).status_code == 200


async def test_async_view_checks_as_well(article):
    from asgiref.sync import sync_to_async

    client, url, tag = AsyncClient(), f"/async/{article.pk}?title=second", etag_of(article)
    assert (await client.put(url)).status_code == 428
    assert (await client.put(url, headers={"If-Match": tag})).status_code == 200
    assert (await client.put(url, headers={"If-Match": tag})).status_code == 412
    await sync_to_async(connections.close_all)()


def put_once(url, tag, alias):
    """Send one PUT, as a client in its own thread."""
    try:
        return put(url, tag, **{"X-Database": alias}).status_code
    finally:
        connections.close_all()


def twice(url, tag, alias):
    """Send the PUT from two clients at once, with the same tag."""
    with ThreadPoolExecutor(2) as clients:
        return sorted(clients.map(lambda _: put_once(url, tag, alias), range(2)))


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_of_two_clients_with_the_same_tag_exactly_one_changes_the_object(database):
    """Both have passed the check when the first one writes, so the UPDATE refuses; the answer is still 412."""
    article = Article.objects.using(database).create(title="first")
    TOGETHER.reset()
    for _ in range(3):
        article.refresh_from_db()
        assert twice(f"/articles/{article.pk}?title=second&together", etag_of(article), database) == [200, 412]


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_row_lock_of_conditional_protects_what_checks_nothing_itself(database, party):
    article = Article.objects.using(database).create()
    other = party()
    other.begin(database)
    other.now(lambda: Article.objects.using(database).filter(pk=article.pk).update(reads=7))
    with ThreadPoolExecutor(1) as client:
        waiting = client.submit(put_once, f"/{database}/{article.pk}", etag_of(article), database)
        until_blocked(database)  # it compares under the lock, so not before the other has committed
        other.commit()
        assert waiting.result(60) == 412
    article.refresh_from_db()
    assert article.reads == 7
    assert put_once(f"/{database}/{article.pk}", etag_of(article), database) == 200
    article.refresh_from_db()
    assert article.reads == 8


def test_conditional_on_sqlite_lets_one_of_two_changes_through(article):
    url, tag = f"/default/{article.pk}", etag_of(article)
    assert twice(url, tag, "default") == [200, 412]
    article.refresh_from_db()
    assert article.reads == 1


def test_conditional_gives_etag_and_304_and_leaves_other_headers(article):
    url = f"/html/{article.pk}"
    shown = Client().get(url)
    assert (shown.headers["Vary"], shown.headers["ETag"]) == ("Accept", etag_of(article, variant="html"))
    known = Client().get(url, headers={"If-None-Match": shown.headers["ETag"]})
    assert (known.status_code, known.content, known.headers["ETag"]) == (304, b"", shown.headers["ETag"])
    assert Client().get(url, headers={"If-None-Match": etag_of(article)}).status_code == 200
    assert put(url, etag_of(article)).status_code == 200


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_conditional_locks_its_row_only_whatever_the_model_is_ordered_by(database, monkeypatch, party):
    monkeypatch.setattr(Article._meta, "ordering", ["counter__name"])
    counter = Counter.objects.using(database).create(name="c")
    other, free = party(), []

    @conditional(Article, using=database)
    def view(request, pk):
        free.append(other.now(unlocked, Counter, database) == {counter.pk})
        free.append(other.now(unlocked, Article, database) == set())
        return HttpResponse("changed")

    article = Article.objects.using(database).create(counter=counter)
    request = RequestFactory().put("/", headers={"If-Match": etag_of(article)})
    assert view(request, pk=article.pk).content == b"changed"
    assert free == [True, True]


def test_conditional_on_a_class_and_on_its_methods(use_database):
    use_database("default")
    draft, code = Draft.objects.create(title="first"), Code.objects.create(code="a/b", title="x")
    url = f"/drafts/{draft.pk}"
    tag = Client().get(url).headers["ETag"]
    assert tag == etag_of(draft)
    assert [put(url, method="POST").status_code, put(url, tag, "POST").status_code] == [428, 200]
    assert put(url, tag, "POST").status_code == 412
    code = Code.objects.create(code="ab")
    assert [put("/codes/ab").status_code, put("/codes/ab", etag_of(code)).status_code] == [428, 200]
    assert put("/codes/ab", f"W/{etag_of(code)}").status_code == 412
    assert put("/codes/ab", f"W/{etag_of(code)}", "DELETE").status_code == 200
    assert put("/codes/ab", method="DELETE").status_code == 200
    assert put("/codes/ab", method="OPTIONS").status_code == 200


def test_object_that_is_not_there_is_404_whatever_the_header_says(article):
    assert [put("/html/999", tag).status_code for tag in (None, "*", '"abc"', "abc")] == [404] * 4


def test_refusal_rolls_nothing_back_but_itself(article):
    """The transaction of a test case or ATOMIC_REQUESTS around the view stays usable."""
    with transaction.atomic():
        article.title = "inside"
        article.save_with_version()
        assert put(f"/default/{article.pk}", '"old"').status_code == 412
        assert Article.objects.get().title == "inside"


@pytest.mark.parametrize("error", [ValidationError("half done"), Http404(), Throttled()])
def test_refusal_of_rest_framework_after_a_write_rolls_it_back(article, error):
    @conditional(Article)
    class Renames(APIView):
        authentication_classes = ()

        def put(self, request, pk):
            Article.objects.filter(pk=pk).update(title="half done")
            raise error

    request = RequestFactory().put("/", headers={"If-Match": etag_of(article)})
    assert Renames.as_view()(request, pk=article.pk).status_code in {400, 404, 429}
    assert Article.objects.get(pk=article.pk).title == "first"


@pytest.mark.parametrize(
    "answer_with", [lambda rows: map(str, rows), lambda rows: (row for row in rows), lambda rows: rows]
)
def test_answer_to_a_change_that_would_be_read_after_the_row_lock_is_refused(article, answer_with):
    @conditional(Article)
    class Renames(APIView):
        authentication_classes = ()

        def put(self, request, pk):
            Article.objects.filter(pk=pk).update(title="half done")
            return Response(answer_with(Article.objects.values()))

    request = RequestFactory().put("/", headers={"If-Match": etag_of(article)})
    with pytest.raises(
        TypeError, match=r"^@conditional: .* returned a .*, which runs after the transaction: return a list"
    ):
        Renames.as_view()(request, pk=article.pk)
    assert Article.objects.get(pk=article.pk).title == "first"


def test_generator_is_refused_as_a_conditional_view():
    def shows(request, pk):
        yield pk

    with pytest.raises(TypeError, match=r"^@conditional cannot cover the generator .*: return a response"):
        conditional(Article)(shows)


def test_answer_to_a_reader_may_be_read_after_the_view_because_its_tag_is_older(article):
    @conditional(Article)
    class Shows(APIView):
        authentication_classes = ()

        def get(self, request, pk):
            return Response(Article.objects.filter(pk=pk).values("title"))

    response = Shows.as_view()(RequestFactory().get("/"), pk=article.pk)
    assert response.headers["ETag"] == etag_of(article)
    assert b"first" in response.render().content


def test_refusal_of_atomic_requests_is_answered_too(article, monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    url = f"/articles/{article.pk}?title=second"
    assert [put(url, '"old"').status_code, put(url, etag_of(article)).status_code] == [412, 200]


def audited(view):
    def around(request, pk):
        Article.objects.create(title="audited")
        return view(request, pk=pk)

    return around


def test_refusal_of_rest_framework_rolls_back_atomic_requests_around_the_row_lock_too(article, monkeypatch):
    @audited
    @conditional(Article)
    @api_view(["PUT"])
    def renames(request, pk):
        Article.objects.filter(pk=pk).update(title="half done")
        raise ValidationError("half done")

    monkeypatch.setitem(connections["default"].settings_dict, "ATOMIC_REQUESTS", True)
    request = RequestFactory().put("/", headers={"If-Match": etag_of(article)})
    with transaction.atomic():  # as ATOMIC_REQUESTS does it
        assert renames(request, pk=article.pk).status_code == 400
    assert [each.title for each in Article.objects.all()] == ["first"]


def test_refusal_of_rest_framework_leaves_a_transaction_of_yours_to_you(article):
    @audited
    @conditional(Article)
    @api_view(["PUT"])
    def renames(request, pk):
        raise ValidationError("half done")

    request = RequestFactory().put("/", headers={"If-Match": etag_of(article)})
    with transaction.atomic():
        assert renames(request, pk=article.pk).status_code == 400
    assert {each.title for each in Article.objects.all()} == {"first", "audited"}


def test_compression_makes_tags_weak_and_they_are_taken_where_it_is_said(article):
    """django.middleware.gzip and nginx do this to tags."""
    zipping = override_settings(MIDDLEWARE=["django.middleware.gzip.GZipMiddleware", *MIDDLEWARE])
    with zipping:
        tag = Client().get(f"/weak/{article.pk}", headers={"Accept-Encoding": "gzip"}).headers["ETag"]
        assert tag == f"W/{etag_of(article)}"
        assert put(f"/default/{article.pk}", tag).status_code == 412
        assert put(f"/weak/{article.pk}", tag).status_code == 200
        assert Client().get(f"/weak/{article.pk}", headers={"If-None-Match": tag}).status_code == 304


def test_tag_of_a_page_is_that_of_the_row_in_the_database_of_the_page(use_database):
    for database in ("default", "other"):
        use_database(database)
    article = Article.objects.using("other").create(title="first")
    shown = conditional(Article, using="other")(show)(RequestFactory().get("/"), pk=article.pk)
    assert shown["ETag"] == etag_of(article)
    with pytest.raises(Http404):
        conditional(Article)(show)(RequestFactory().get("/"), pk=article.pk)


def test_tag_belongs_to_one_row_of_one_model(use_database):
    use_database("default")
    article = Article.objects.create()
    tag = etag_of(article)
    others = [Article.objects.create(), Draft.objects.create(pk=article.pk), Account.objects.create(pk=article.pk)]
    assert tag not in {etag_of(other) for other in others}
    assert tag == entity_tag("testapp_article", article.pk, 1)  # the same as with SQLAlchemy
    assert etag_of(ArticleProxy.objects.get(pk=article.pk)) == tag
    shop = Shop.objects.create(name="x")
    tag = etag_of(shop)
    shop.save()
    assert etag_of(shop) != tag


def test_what_has_no_version_to_check_is_refused(use_database):
    use_database("default")
    with pytest.raises(TypeError, match="User has no version"):
        conditional(User)
    with pytest.raises(TypeError, match="User has no version"):
        etag_of(User())
    Article.objects.create()
    with pytest.raises(ValueError, match="was deferred"):
        etag_of(Article.objects.only("title").get())

    class Rename:
        async def __call__(self, request, pk):
            raise AssertionError("it is refused")

    for view in (arename, Rename()):
        with pytest.raises(TypeError, match="use check_preconditions"):
            conditional(Article)(view)
    with pytest.raises(TypeError, match="no argument 'article_id'"):
        conditional(Article, "article_id")(rename)


@isolate_apps("tests.testapp")
def test_version_that_no_save_checks_is_refused():
    class Counted(models.Model):
        version = VersionField()

        class Meta:
            app_label = "testapp"

    counted = Counted(pk=1)
    put = RequestFactory().put("/", headers={"If-Match": "*"})
    for use in (lambda: conditional(Counted), lambda: etag_of(counted), lambda: check_preconditions(put, counted)):
        with pytest.raises(TypeError, match="Counted has no version that is checked: add VersionedMixin"):
            use()


def test_error_names_the_object_and_is_django_s(article):
    from django.db import DatabaseError

    from django_dlock.errors import PreconditionFailed, PreconditionRequired

    with pytest.raises(PreconditionRequired, match=f"Article\\({article.pk}\\)") as required:
        check_preconditions(RequestFactory().put("/"), article)
    with pytest.raises(PreconditionFailed, match="read it again"):
        check_preconditions(RequestFactory().put("/", headers={"If-Match": '"old"'}), article)
    assert isinstance(required.value, DatabaseError)


def test_key_is_converted_as_its_argument_says(use_database):
    use_database("default")
    code = Code.objects.create(code="abc")
    upper, wrong = (
        conditional(Code, arg("code", kind), required=False)(lambda request, code: HttpResponse(code))
        for kind in (str.lower, int)
    )
    for method in ("GET", "PUT"):
        request = RequestFactory().generic(method, "/", headers={"If-Match": etag_of(code)})
        assert upper(request, code="ABC").content == b"ABC", "the view gets its argument as it was sent"
        with pytest.raises(Http404):
            wrong(request, code="ABC")


@pytest.mark.parametrize("key", ["abc", "9" * 40, "-1", "1e3", "%00", "%F0%9F%92%A5"])
def test_key_that_no_row_can_have_is_not_found(article, key):
    assert [Client().get(f"/any/{key}").status_code, put(f"/any/{key}", "*").status_code] == [404, 404]
