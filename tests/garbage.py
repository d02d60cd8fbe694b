"""Garbage collection in tests: one that has certainly happened."""

import gc
import threading
from typing import Any, Final

__all__ = ["collect_garbage"]

FULL: Final = 2
"""The oldest generation."""


def collect_garbage() -> None:
    """Collect all garbage.

    `gc.collect()` does nothing while another thread is collecting, and that thread may have passed the object already.
    """
    caller, begun = threading.get_ident(), []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and info["generation"] == FULL and threading.get_ident() == caller:
            begun.append(info)

    gc.callbacks.append(note)
    try:
        while not begun:
            gc.collect()
    finally:
        gc.callbacks.remove(note)
