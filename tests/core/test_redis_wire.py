"""What is sent to a Redis is the same whether or not hiredis is installed."""

from typing import Any

import pytest

from dlock_core.backends.redis import wire


@pytest.mark.parametrize("command", [("PING",), ("SET", "clé:1", 30_000, b"\x00\r\n", "", 0.5)])
def test_commands_are_packed_alike_with_and_without_hiredis(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hiredis")
    fast = wire.packed([command, command])
    monkeypatch.setattr(wire, "_pack", wire._in_python)
    assert wire.packed([command, command]) == fast
