"""No URL by default: a test that needs some names its own module with `override_settings(ROOT_URLCONF=...)`."""

from django.urls import URLPattern

urlpatterns: list[URLPattern] = []
