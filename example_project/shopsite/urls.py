from django.urls import path
from shop import actions, views

urlpatterns = [
    path("", views.orders, name="orders"),
    path("orders/<int:pk>/", views.order, name="order"),
    path("orders/<int:pk>/ship/", views.change, {"act": actions.ship}, name="ship"),
    path("orders/<int:pk>/cancel/", views.change, {"act": actions.cancel}, name="cancel"),
]
