"""Errors that a user can fix are printed without a traceback, and with one under ``--debug``."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lit_fsdp import __main__
from lit_fsdp.errors import CheckpointError, ConfigError, DataError
from lit_fsdp.exit_codes import exit_code_of
from lit_fsdp.parallel.base import _is_lost


def _fail(kind: str) -> int:
    if kind == "memory":
        error = MemoryError("no room")
        error.add_note("set a smaller batch")
        raise error
    raise {"config": ConfigError("key", 1, "2"), "data": DataError("row 3"), "files": CheckpointError("gone")}[kind]


@pytest.mark.parametrize(
    ("kind", "code", "text"),
    [
        ("config", 2, "error: key: got 1\n  allowed: 2"),
        ("data", 1, "error: row 3"),
        ("files", 1, "error: gone"),
        ("memory", 1, "line 20: raise error\nno room\nset a smaller batch"),
    ],
)
def test_the_traceback_is_for_debug_only(kind: str, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for debug in (False, True):
        assert exit_code_of(lambda: _fail(kind), debug) == code
        shown.append(capsys.readouterr().err)
    plain, long = shown
    assert plain.rstrip().endswith(text)
    assert "Traceback" not in plain
    assert long.startswith("Traceback")
    assert kind == "memory" or long.endswith(plain)


def test_whoever_replaces_exit_sees_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As W&B does to mark a run as failed."""
    codes: list[Any] = []

    def main() -> int:
        monkeypatch.setattr(sys, "exit", codes.append)
        return 3

    monkeypatch.setattr(__main__, "main", main)
    __main__.entry()
    assert codes == [3]


def test_a_connection_of_a_callback_is_none_of_other_ranks() -> None:
    def fail(text: str) -> None:
        raise RuntimeError(text)

    for text, is_lost in (("tracking server: Connection refused", False), ("[gloo] Connection closed by peer", True)):
        with pytest.raises(RuntimeError) as caught:
            fail(text)
        assert _is_lost(caught.value) == is_lost
    assert _is_lost(RuntimeError("Connection reset by peer"))  # from C++, without a traceback
