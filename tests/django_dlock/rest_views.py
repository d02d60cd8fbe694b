"""A view of drafts, and requests to it, for the tests of Django REST framework."""

from rest_framework import generics, serializers
from rest_framework.test import APIRequestFactory

from django_dlock.rest import PreconditionMixin, VersionedSerializerMixin
from tests.testapp.models import Draft


class DraftSerializer(VersionedSerializerMixin, serializers.ModelSerializer):
    revision = serializers.IntegerField(required=False)

    class Meta:
        model = Draft
        fields = ["title", "revision"]


class Lenient(PreconditionMixin, generics.RetrieveUpdateDestroyAPIView):
    queryset = Draft.objects.all()
    serializer_class = DraftSerializer
    if_match_required = ()
    accept_weak = True


def send(view, method, draft, body, **headers):
    request = getattr(APIRequestFactory(), method)("/", body, format="json", headers=headers)
    return view(request, pk=draft.pk)
