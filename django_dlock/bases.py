"""The order of bases: a mixin guards what stands to the right of it, and never hears of what stands to the left."""

from __future__ import annotations

__all__ = ["require_left_of"]


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
