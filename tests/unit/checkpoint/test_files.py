"""Folders that appear whole, in no place but their own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.errors import CheckpointError


def test_a_folder_made_again_clears_away_what_is_left_of_it(tmp_path: Path):
    """And nothing else: another folder in the making beside it may belong to a process that lives."""
    dead = [tmp_path / ".step-1.tmp-0123456789abcdef", tmp_path / ".step-1.removed-0123456789abcdef"]
    others = [tmp_path / name for name in (".tmp-x", ".step-1.tmp-short", "step-1", ".step-2.tmp-0123456789abcdef")]
    for path in dead + others:
        (path / "sub").mkdir(parents=True)
    (tmp_path / "step-1" / "manifest.json").touch()
    draft = disk.stage(tmp_path / "step-1")
    assert not any(path.exists() for path in dead)
    assert all(path.is_dir() for path in [*others, draft])


def test_only_checkpoints_files_and_links_give_their_place_up(tmp_path: Path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine").touch()
    with pytest.raises(CheckpointError, match="not replaced, because it is no checkpoint"):
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

    def refused(*paths: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "rename", refused)
    with pytest.raises(CheckpointError, match=r"/step-1: Read-only file system"):
        disk.restore(tmp_path / "step-1")
