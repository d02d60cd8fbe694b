"""The order of bases: a mixin guards what stands to the right of it, and never hears of what stands to the left.

Django's hooks, such as `get_form`, are made to be overridden on the left, often without `super()`: those are wrapped.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    Method = Callable[..., Any]

__all__ = ["guard_override", "guards", "require_left_of"]


def require_left_of(guarded: type, mixin: type, cls: type) -> None:
    """Raise TypeError for a class that inherits from `guarded` before it inherits from the mixin.

    The methods of `guarded`, which do not call `super()`, would run in place of those of the mixin.
    """
    order = cls.__mro__
    if guarded not in order or order.index(mixin) < order.index(guarded):
        return
    wrong = next((base for base in cls.__bases__ if issubclass(base, guarded)), guarded)
    own = next((base for base in cls.__bases__ if issubclass(base, mixin)), mixin)
    raise TypeError(
        f"{cls.__name__} is not guarded, because {own.__name__} stands to the right of {wrong.__name__}: write "
        f"class {cls.__name__}({own.__name__}, {wrong.__name__})"
    )


def guards(wrapper: Callable[[Method], Method]) -> Callable[[Method], Method]:
    """Return a decorator of methods that `guard_override` recognises, so that it leaves them alone."""

    @wraps(wrapper)
    def guard(method: Method) -> Method:
        guarded = wraps(method)(wrapper(method))
        vars(guarded)["_dlock_guards"] = True
        return guarded

    return guard


def guard_override(cls: type, name: str, guard: Callable[[Method], Method]) -> None:
    """Apply a guard to the method that a class uses, if it is an override on the left of the one that is guarded."""
    method = getattr(cls, name)
    if not hasattr(method, "_dlock_guards"):
        setattr(cls, name, guard(method))
