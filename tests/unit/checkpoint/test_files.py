"""Folders that appear in no place but their own; a file system that can do less than others."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint.run_lock import RunLock
from lit_fsdp.errors import CheckpointError


def test_only_checkpoints_files_and_links_give_their_place_up(tmp_path: Path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine").touch()
    with pytest.raises(CheckpointError, match="not replaced, because it is not a checkpoint"):
        disk.stage(tmp_path / "notes")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("notes")
    for name in ("empty", "file", "link"):
        place = disk.stage(tmp_path / name)
        (place / "new").touch()
        disk.publish(place, tmp_path / name)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "link", "notes"]
    assert (tmp_path / "notes" / "mine").exists()


def test_an_old_one_that_cannot_get_its_name_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".step-1.replaced-0123456789abcdef").mkdir()
    monkeypatch.setattr(os, "rename", mock.Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(CheckpointError, match=r"/step-1: Read-only file system"):
        disk.restore(tmp_path / "step-1")


def test_without_locks_a_warning_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with caplog.at_level(logging.WARNING):
        RunLock(tmp_path).release()
    assert "a second job could use this run folder" in caplog.text
