from django.contrib import admin
from django.urls import path
from shop import actions, live, views

urlpatterns = [
    path("", views.orders, name="orders"),
    path("race/", live.page, name="race"),
    path("race/start/", live.start, name="race_start"),
    path("race/lines/", live.lines, name="race_lines"),
    path("orders/<int:pk>/", views.order, name="order"),
    path("orders/<int:pk>/ship/", views.change, {"act": actions.ship}, name="ship"),
    path("orders/<int:pk>/cancel/", views.change, {"act": actions.cancel}, name="cancel"),
    path("admin/", admin.site.urls),
]
