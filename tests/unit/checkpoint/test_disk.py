"""Hashed files, names that stay inside, folders that appear whole."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import subprocess
import sys

import pytest

from lit_fsdp.checkpoint import disk, staging
from lit_fsdp.errors import CheckpointError


def test_a_hashed_file_knows_its_size_and_hash(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_WRITEBACK_BYTES", 1 << 19)
    pieces = [b"", b"small", os.urandom(1 << 19), b"x" * 3, os.urandom((1 << 20) + 1), memoryview(b"")]
    with disk.HashedFile(tmp_path / "f") as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
        assert file.tell() == sum(map(len, pieces))
    content = b"".join(bytes(piece) for piece in pieces)
    assert (tmp_path / "f").read_bytes() == content
    assert file.entry == disk.FileEntry(len(content), hashlib.sha256(content).hexdigest())
    assert disk.hash_file(tmp_path / "f") == file.entry.sha256


def test_a_file_and_its_folder_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    place = tmp_path / "p"
    place.mkdir()
    disk.write_bytes(place / "sub" / "f", b"1")
    staging.publish(place, tmp_path / "final")
    expected = [place / "sub" / "f", place, place / "sub", tmp_path]
    assert synced == [str(path) for path in expected]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_error_names_the_file(tmp_path, monkeypatch, code):
    def fail(handle):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError) as error:
        disk.write_bytes(tmp_path / "f", b"1")
    assert str(error.value) == f"{tmp_path / 'f'}: {os.strerror(code)}"


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(CheckpointError, match="File exists"):
        disk.write_bytes(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"


def test_replacing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"old")
    disk.replace_bytes(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(CheckpointError, match="broken"):
        disk.replace_bytes(tmp_path / "f", b"newer")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_bytes() == b"new"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/../b", "/etc/passwd", "a//b", "a/", "./a", "a\\b", "a\nb", "a\x00b", 3]
)
def test_names_that_leave_the_folder_are_refused(name):
    with pytest.raises(CheckpointError, match="not a file name inside a checkpoint"):
        disk.checked_name(name)


def test_links_out_of_the_folder_are_refused(tmp_path):
    folder = tmp_path / "c"
    (folder / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_text("s")
    (folder / "f").write_text("x")
    (folder / "in").symlink_to("f")
    (folder / "out").symlink_to("../secret")
    (folder / "up").symlink_to("..")
    assert disk.inside(folder, "in") == folder / "in"
    for name, text in [("out", "leads out"), ("up/secret", "leads out"), ("sub", "not a regular"), ("gone", "No such")]:
        with pytest.raises(CheckpointError, match=text):
            disk.inside(folder, name)


def test_dead_folders_are_swept_and_live_ones_left(tmp_path):
    dead = [tmp_path / ".step-1.tmp-0123456789abcdef", tmp_path / ".step-1.removed-0123456789abcdef"]
    others = [tmp_path / ".tmp-x", tmp_path / ".step-1.tmp-short", tmp_path / "step-1", tmp_path / ".git"]
    for path in dead + others:
        (path / "sub").mkdir(parents=True)
    with contextlib.ExitStack() as held:
        live = staging.stage(tmp_path / "step-2", held)
        assert not any(path.exists() for path in dead)
        assert staging.sweep(tmp_path) == []
        assert live.is_dir()
    assert all(path.is_dir() for path in others)
    assert staging.sweep(tmp_path) == [live]


def test_the_lock_ends_with_its_process(tmp_path):
    code = (
        "import contextlib, os, sys; from pathlib import Path; from lit_fsdp.checkpoint import staging\n"
        "staging.stage(Path(sys.argv[1]), contextlib.ExitStack()); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], env=dict(os.environ, PYTHONPATH="."))
    assert done.returncode == -9
    assert len(list(tmp_path.iterdir())) == 1
    staging.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_checkpoints_files_and_links_give_their_place_up(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine").touch()
    with pytest.raises(CheckpointError, match="not replaced, because it is no checkpoint"), contextlib.ExitStack() as h:
        staging.stage(tmp_path / "notes", h)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("notes")
    for name in ("empty", "file", "link"):
        with contextlib.ExitStack() as held:
            place = staging.stage(tmp_path / name, held)
            (place / "new").touch()
            staging.publish(place, tmp_path / name)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "link", "notes"]
    assert (tmp_path / "notes" / "mine").exists()
