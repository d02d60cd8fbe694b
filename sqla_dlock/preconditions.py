"""HTTP preconditions for FastAPI, Starlette and Flask: ETag from the version, and If-Match without a race."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm.attributes import instance_state

from dlock_core.web.preconditions import READ_METHODS, entity_tag, evaluate
from sqla_dlock.versions.in_memory import read_version
from sqla_dlock.versions.mapping import version_column

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlock_core.web.preconditions import HttpRequest

__all__ = ["check_preconditions", "conditional", "etag_of"]


def etag_of(instance: Any, *, variant: str = "") -> str:
    """Return the ETag of a versioned instance as it was read or flushed, for the header of a response.

    Args:
        instance: An instance of a versioned class.
        variant: Distinguishes the representations of one URL, by the Accept header or for different users.

    Raises TypeError for a class without a version, and ValueError for an instance that was not flushed or whose version
    was deferred.
    """
    state = _state(instance)
    table = str(version_column(state.mapper).table)
    return entity_tag(table, state.identity, read_version(instance), variant)


def check_preconditions(
    request: HttpRequest, instance: Any, *, required: bool = True, accept_weak: bool = False, variant: str = ""
) -> bool:
    """Check If-Match and If-None-Match against an instance that was just read; True means: answer 304 to this GET.

    There is no race with a write of *this* instance afterwards by `save_with_version`, a flush or `session.delete`,
    because these check the version again; a StaleObject from there is answered with 412 as well. Do not refresh the
    instance in between. Before statements that check nothing, read it with `lock_row`. With an AsyncSession the
    instance must not have expired.

    Args:
        request: The request of FastAPI, Starlette or Flask.
        instance: The object of the request.
        required: Whether a method that changes the object needs If-Match.
        accept_weak: Accept W/ tags as well, into which compression turns ours.
        variant: See `etag_of`.

    Raises PreconditionFailed, PreconditionRequired and PreconditionMalformed.
    """
    tag, name = etag_of(instance, variant=variant), _name(instance)
    return evaluate(request, instance, tag, name=name, required=required, accept_weak=accept_weak)


def conditional(get: Any, *, required: bool = True, accept_weak: bool = False, variant: str = "") -> Callable[..., Any]:
    """Return a dependency of FastAPI that yields the object of another dependency once its preconditions hold.

    Use it as `Depends(conditional(get_order))`. For a GET it adds the ETag to the response, or answers 304 in place of
    the endpoint. An endpoint that changes the object sets the new ETag itself.

    Args:
        get: The other dependency, exactly as the endpoint would have it.
        required: See `check_preconditions`, like the other options, the errors and what is free of races.
        accept_weak: See `check_preconditions`.
        variant: See `etag_of`.
    """
    from fastapi import HTTPException, Request, Response

    from sqla_dlock.handlers import annotated

    async def dependency(dlock_object: Any, request: Request, response: Response) -> Any:
        is_known = check_preconditions(
            request, dlock_object, required=required, accept_weak=accept_weak, variant=variant
        )
        if request.method in READ_METHODS:
            response.headers["ETag"] = etag = etag_of(dlock_object, variant=variant)
            if is_known:
                raise HTTPException(304, headers={"ETag": etag})
        return dlock_object

    kinds = {"dlock_object": annotated(get), "request": Request, "response": Response}
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kinds[name]) for name in kinds]
    dependency.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return dependency


def _state(instance: Any) -> Any:
    state: Any = getattr(instance, "_sa_instance_state", None)
    if state is None or version_column(state.mapper) is None:
        raise TypeError(f"{type(instance).__name__} has no version: add VersionedMixin to its bases")
    if state.key is None:
        raise ValueError(f"this {type(instance).__name__} is not in the database yet: flush the session first")
    return state


def _name(instance: Any) -> str:
    identity = instance_state(instance).identity
    key = identity[0] if identity is not None and len(identity) == 1 else identity
    return f"{type(instance).__name__}({key!r})"
