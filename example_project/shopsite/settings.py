"""Settings of the shop, all from the environment: DATABASE_URL, REDIS_URL, SHOP_STRATEGY, SHOP_DEBUG, SECRET_KEY."""

import os
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

from shopsite.database import database

BASE_DIR = Path(__file__).resolve().parent.parent
DEBUG = os.environ.get("SHOP_DEBUG", "1") == "1"
SECRET_KEY = os.environ.get("SECRET_KEY", "a shop that sells nothing needs no secret")
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_dlock",
    "shop",
    "bank",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_dlock.middleware.LockMiddleware",
]
ROOT_URLCONF = "shopsite.urls"
WSGI_APPLICATION = "shopsite.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "look"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "shop.views.strategy",
            ]
        },
    },
]

DATABASES = {
    "default": database(os.environ.get("DATABASE_URL") or f"sqlite:///{BASE_DIR / 'db.sqlite3'}"),
    "ledger": database(os.environ.get("LEDGER_URL") or f"sqlite:///{BASE_DIR / 'ledger.sqlite3'}"),
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

REDIS_URL = os.environ.get("REDIS_URL")
DLOCK = {
    "default": {"BACKEND": REDIS_URL or "redis://localhost:6379/0"},
    "ledger": {"BACKEND": "database://ledger"},  # a table in the database itself
}

# How orders are protected: one of the functions of shop.strategies.
SHOP_STRATEGY = os.environ.get("SHOP_STRATEGY") or ("lease" if REDIS_URL else "row")
if SHOP_STRATEGY not in {"none", "row", "version", "lease"}:
    raise ImproperlyConfigured(f"SHOP_STRATEGY must be none, row, version or lease, not {SHOP_STRATEGY!r}")

STATIC_URL = "/static/"
USE_TZ = True
TIME_ZONE = "UTC"
LANGUAGE_CODE = "en-gb"
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"], "level": "WARNING"},
    "loggers": {"django.request": {"level": "ERROR"}},
}
