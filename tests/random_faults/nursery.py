"""Starts the processes of a run quickly: they are forked from one that has imported everything, and die with it.

A worker is killed and replaced every few seconds; to import two frameworks and four drivers each time would take longer.
"""

import ctypes
import importlib
import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PRELOADED: Final = ["tests.random_faults.preloaded"]
SET_PARENT_DEATH_SIGNAL: Final = 1
_context: Final = multiprocessing.get_context("forkserver")


def start(module: str, log: Path, *arguments: str) -> BaseProcess:
    """Call `main(*arguments)` of a module in a new process, whose output is written to a log."""
    _context.set_forkserver_preload(PRELOADED)
    process = _context.Process(target=_begin, args=(module, str(log), arguments))
    process.start()
    return process


def _begin(module: str, log: str, arguments: tuple[str, ...]) -> None:
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    importlib.import_module(module).main(*arguments)
