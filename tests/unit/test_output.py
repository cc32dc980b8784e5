"""Standard output and standard error that are full or closed, and what an error says there."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

from lit_fsdp import __main__
from lit_fsdp.errors import CheckpointError


def test_an_output_that_cannot_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert __main__.main(["recipes", "ls"]) == 1
        monkeypatch.undo()
    assert capsys.readouterr().err == "error: /dev/full cannot be written: No space left on device\n"


def test_errors_that_cannot_be_written_keep_their_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    full = io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)
    monkeypatch.setattr("sys.stderr", full)
    assert __main__.main(["fit", "--config", "/no/such.yaml"]) == 2
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        full.close()
    assert capsys.readouterr().out == ""


def test_closed_streams_are_no_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout", None)
    assert __main__.main(["recipes", "ls"]) == 0
    monkeypatch.setattr("sys.stderr", None)
    assert __main__.main(["fit", "--config", "/no/such.yaml"]) == 2


def test_a_rank_that_was_lost_in_a_save_is_noted(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    error = CheckpointError("step-00000002: cannot be written")
    error.add_note("rank 0 (a) lost contact: another rank failed, was killed, hangs or is cut off")
    error.add_note("this was raised on rank 0 (a)")
    monkeypatch.setattr(__main__, "run", lambda words: (_ for _ in ()).throw(error))
    assert __main__.main(["fit"]) == 76
    said = capsys.readouterr().err
    assert said == f"error: step-00000002: cannot be written\n{error.__notes__[0]}\n"
