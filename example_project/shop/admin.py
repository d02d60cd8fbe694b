"""The admin: a save never silently overwrites what another user has done to the order since the page was shown."""

from django.contrib import admin

from django_dlock.admin import VersionedModelAdmin
from shop.models import Event, Order, Product


class History(admin.TabularInline):
    model = Event
    fields = readonly_fields = ["at", "text"]
    extra = max_num = 0
    can_delete = False


@admin.register(Order)
class OrderAdmin(VersionedModelAdmin):
    list_display = ["id", "product", "amount", "quantity", "state"]
    list_display_links = ["id", "product"]
    list_editable = ["quantity"]
    list_filter = ["state"]
    list_select_related = ["product"]
    readonly_fields = ["events"]
    inlines = [History]


admin.site.register(Product)
