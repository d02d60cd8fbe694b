"""The admin's page "Locks": all holders and waiters, live, and the release of a lease by an operator.

Viewing requires the permission `view_lock`, and releasing `release_lock` as well.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.core.signing import BadSignature, Signer
from django.http import HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils import timezone
from django.utils.translation import gettext as _

from django_dlock.conf import InvalidStore, is_declared, stores
from django_dlock.inspect import databases
from django_dlock.models import Lock
from dlock_core.errors import DLockError
from dlock_core.inspect import Snapshot, Unreadable, take_snapshot
from dlock_core.stores import force_release

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django.http import HttpRequest, HttpResponse

    from dlock_core.backend import Backend
    from dlock_core.inspect import Entry

    _ModelAdmin = admin.ModelAdmin[Lock]
else:
    _ModelAdmin = admin.ModelAdmin


__all__ = ["LockAdmin"]

MAX_CARDS: Final = 300
"""Locks on one page; the command line lists all of them."""


class LockAdmin(_ModelAdmin):
    """The page of locks, on which nothing is added, changed or deleted.

    A release is logged in the admin's history and by the logger "dlock". The holder learns of it at its next renewal,
    and can no longer commit.
    """

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_release_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("django_dlock.release_lock")

    def get_urls(self) -> list[Any]:
        wrap = self.admin_site.admin_view
        return [
            path("", wrap(self.changelist_view), name="django_dlock_lock_changelist"),
            path("release/", wrap(self.release_view), name="django_dlock_lock_release"),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        """Show all locks, or with `?name=` one of them; `?part` returns only what the page's script replaces."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method not in {"GET", "HEAD"}:
            return HttpResponseNotAllowed(["GET", "HEAD"])
        name = request.GET.get("name", "")
        context = {"name": name, **self._found(request, name), **(extra_context or {})}
        return self._page(request, "locks_part" if "part" in request.GET else "locks", _("Locks"), context)

    def release_view(self, request: HttpRequest) -> HttpResponse:
        """Ask for confirmation (GET), or release (POST) the lease that `lease` refers to, and never a newer one."""
        if not (self.has_view_permission(request) and self.has_release_permission(request)):
            raise PermissionDenied
        lease = (request.POST if request.method == "POST" else request.GET).get("lease")
        if (found := _find_grant(parse_reference(lease))) is None:
            self.message_user(request, _("Nothing was released: this lease has ended by itself."), messages.WARNING)
            return self._back()
        if isinstance(found, Unreadable):
            facts = {"source": found.source, "reason": found.reason}
            self.message_user(request, _("%(source)s could not be read: %(reason)s") % facts, messages.ERROR)
            return self._back()
        if request.method == "POST":
            self._release(request, found)
            return self._back()
        card = next(card for card in cards(Snapshot([found])))
        context = {"card": card, "row": card.holders[0], "lease": lease, "back": self._address()}
        return self._page(request, "release", _("Release this lease?"), context)

    def _release(self, request: HttpRequest, entry: Entry) -> None:
        token, by = entry.token or 0, request.user.get_username()
        backend = stores[entry.source].backend
        try:
            ended = force_release(backend, entry.name, token, by=plain(by), seconds=entry.seconds or 0.0)
        except DLockError as error:
            self.message_user(
                request,
                _("It is not known whether the lease was released, so look at the list: %s") % error,
                messages.ERROR,
            )
            return
        if not ended:
            self.message_user(request, _("Nothing was released: this lease has ended by itself."), messages.WARNING)
            return
        facts = {"token": token, "who": entry.described, "store": entry.source}
        self.log_change(request, Lock(name=entry.name), _("Released token %(token)d of %(who)s in %(store)s.") % facts)
        self.message_user(request, _("Released: %s") % plain(entry.name), messages.SUCCESS)

    def _found(self, request: HttpRequest, name: str) -> dict[str, Any]:
        try:
            found = _snapshot(_aliases(), databases(), name or None)
        except ValueError:  # No lock can have this name.
            found = Snapshot()
        all_cards = cards(found)
        return {
            "cards": all_cards[:MAX_CARDS],
            "more": len(all_cards) - MAX_CARDS,
            "snapshot": found,
            "now": timezone.localtime() if timezone.is_aware(timezone.now()) else timezone.now(),
            "can_release": self.has_release_permission(request),
        }

    def _page(self, request: HttpRequest, template: str, title: str, context: dict[str, Any]) -> TemplateResponse:
        request.current_app = self.admin_site.name
        context = {**self.admin_site.each_context(request), "title": title, "opts": self.opts, **context}
        return TemplateResponse(request, f"admin/django_dlock/{template}.html", context)

    def _address(self) -> str:
        return reverse("admin:django_dlock_lock_changelist", current_app=self.admin_site.name)

    def _back(self) -> HttpResponseRedirect:
        return HttpResponseRedirect(self._address())


def _aliases() -> list[str]:
    try:
        return list(stores) if is_declared() else []
    except InvalidStore:  # DLOCK is not a dict; the system checks report it.
        return []


def _snapshot(aliases: Iterable[str], others: Iterable[Any], name: str | None) -> Snapshot:
    """Take a snapshot of stores and databases; a store with wrong settings is listed as unreadable."""
    backends: list[tuple[str, Backend]] = []
    misconfigured: list[Unreadable] = []
    for alias in aliases:
        try:
            backends.append((alias, stores[alias].backend))
        except InvalidStore as error:
            misconfigured.append(Unreadable(alias, plain(str(error))))
    found = take_snapshot(backends, others, name)
    found.unreadable[:0] = misconfigured
    return found


def _find_grant(grant: tuple[str, str, int] | None) -> Entry | Unreadable | None:
    """Return the entry of a grant that is held now, or None; Unreadable if its store cannot be read."""
    if grant is None or grant[0] not in _aliases():
        return None
    store, name, token = grant
    found = _snapshot([store], [], name)
    if found.unreadable:
        return found.unreadable[0]
    held = (each for each in found.entries if (each.role, each.name, each.token) == ("holder", name, token))
    return next(held, None)


KINDS: Final = ("lease", "advisory", "row")
_signer: Final = Signer(salt="django_dlock.locks")


@dataclass(frozen=True, slots=True)
class CardRow:
    """A holder or a waiter, in words for people."""

    position: int | None
    who: str
    mode: str
    seconds: str
    expires_in: str
    token: int | None
    is_stuck: bool
    reference: str
    """The signed name of the grant for the page that releases it; empty if it cannot be released."""


@dataclass(frozen=True, slots=True)
class Card:
    """One lock on the page, with its holders and waiters."""

    kind: str
    source: str
    name: str
    holders: list[CardRow]
    waiters: list[CardRow]

    @property
    def is_stuck(self) -> bool:
        return any(row.is_stuck for row in (*self.holders, *self.waiters))

    def rank(self) -> tuple[Any, ...]:
        """Return the sort key: deadlocks first, then locks with waiters, and each where it was before the refresh."""
        return not self.is_stuck, not self.waiters, KINDS.index(self.kind), self.name, self.source


def cards(snapshot: Snapshot) -> list[Card]:
    """Return the locks of a snapshot, those that need attention first."""
    stuck = {wait.waiter.actor for cycle in snapshot.cycles for wait in cycle.waits}
    locks: dict[tuple[str, str, str], list[Entry]] = defaultdict(list)
    for entry in snapshot.entries:
        locks[entry.kind, entry.source, entry.name].append(entry)
    return sorted((_card(*key, entries, stuck) for key, entries in locks.items()), key=Card.rank)


def _card(kind: str, source: str, name: str, entries: Iterable[Entry], stuck: set[str]) -> Card:
    in_order = sorted(entries, key=lambda entry: entry.position or 0)
    holders = [_card_row(entry, stuck) for entry in in_order if entry.role == "holder"]
    waiters = [_card_row(entry, stuck) for entry in in_order if entry.role == "waiter"]
    return Card(kind, source, plain(name), holders, waiters)


def _card_row(entry: Entry, stuck: set[str]) -> CardRow:
    can_be_released = entry.kind == "lease" and entry.role == "holder" and entry.token is not None
    return CardRow(
        entry.position,
        entry.described or _("unknown"),
        entry.mode,
        format_seconds(entry.seconds),
        format_seconds(entry.expires_in),
        entry.token,
        entry.actor in stuck,
        reference(entry) if can_be_released else "",
    )


def reference(entry: Entry) -> str:
    """Return the signed name of a grant: any name survives an HTML form, and none can be forged."""
    return _signer.sign_object([entry.source, entry.name, entry.token])


def parse_reference(text: str | None) -> tuple[str, str, int] | None:
    """Return the store, name and token that `reference` has signed; None for any other text."""
    try:
        store, name, token = _signer.unsign_object(text or "")
    except (BadSignature, ValueError, TypeError):
        return None
    return store, name, token


def plain(text: str) -> str:
    """Replace unprintable characters by "?": they could hide text, or reverse its direction."""
    return "".join(char if char.isprintable() else "?" for char in text)


def format_seconds(seconds: float | None) -> str:
    """Format a time for people: 2.6 s, 4 min 10 s, 3 h 5 min; empty if it is unknown."""
    if seconds is None:
        return ""
    if seconds < 120:
        return _("%.1f s") % seconds
    minutes, remainder = divmod(int(seconds), 60)
    if minutes < 120:
        return _("%(minutes)d min %(seconds)d s") % {"minutes": minutes, "seconds": remainder}
    return _("%(hours)d h %(minutes)d min") % {"hours": minutes // 60, "minutes": minutes % 60}
