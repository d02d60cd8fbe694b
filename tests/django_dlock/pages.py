"""What a browser would send from a page."""

from html.parser import HTMLParser
from typing import Any


class _Reader(HTMLParser):
    def __init__(self, which: int) -> None:
        super().__init__()
        self.form, self.which = -1, which
        self.sent: dict[str, list[str]] = {}
        self.select = self.area = None

    def add(self, name: str | None, value: str) -> None:
        if name and self.form == self.which:
            self.sent.setdefault(name, []).append(value)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        at = dict(attrs)
        if tag == "form":
            self.form += 1
        elif tag == "input" and at.get("name") == "_save":
            self.add("_save", at.get("value", ""))  # the button that is pressed, unless a test says otherwise
        elif tag == "input" and at.get("type") not in {"submit", "file", "button"} and "disabled" not in at:
            is_switch = at.get("type") in {"checkbox", "radio"}
            if not is_switch or "checked" in at:
                self.add(at.get("name"), at.get("value", "on" if is_switch else ""))
        elif tag == "select":
            self.select, self.first, self.chosen = at, None, False
        elif tag == "option" and self.select is not None:
            self.first = at.get("value", "") if self.first is None else self.first
            if "selected" in at:
                self.chosen = True
                self.add(self.select.get("name"), at.get("value", ""))
        elif tag == "textarea":
            self.area, self.text = at.get("name"), ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "select" and self.select is not None:
            if not self.chosen and "multiple" not in self.select and self.first is not None:
                self.add(self.select.get("name"), self.first)
            self.select = None
        elif tag == "textarea" and self.area:
            self.add(self.area, self.text.removeprefix("\n").replace("\n", "\r\n"))
            self.area = None

    def handle_data(self, data: str) -> None:
        if self.area:
            self.text += data


def form(response: Any, which: int = -1, **changes: Any) -> dict[str, Any]:
    """Return what a form of a page sends after these changes; by default the last form that has inputs."""
    html = response.content.decode()
    for number in [which] if which >= 0 else reversed(range(html.count("<form"))):
        reader = _Reader(number)
        reader.feed(html)
        if reader.sent:
            break
    return {**reader.sent, **changes}


def sent_by(formset: Any, **changes: Any) -> dict[str, Any]:
    """Return what the page of a formset sends after these changes."""
    data = {bound.html_name: bound.value() or "" for each in (formset.management_form, *formset) for bound in each}
    return data | changes
