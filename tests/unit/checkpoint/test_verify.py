"""What differs between a checkpoint and its manifest, and which sound one is loaded; one process, no group."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.verify import sha256_of, sound_checkpoint, verify
from lit_fsdp.errors import CheckpointError
from tests.unit.checkpoint.conftest import flip

Save = Callable[..., Path]
SHARD = "tensors/rank-00000.safetensors"


def test_no_torch_is_needed():
    code = (
        "import sys, lit_fsdp.checkpoint.verify, lit_fsdp.checkpoint.run_folder; "
        "print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_every_file_that_differs_is_named(save: Save, tmp_path: Path):
    folder = save()
    (folder / f".manifest.json.tmp-{'0' * 16}").write_text("{")  # a kill while metrics were added
    assert verify(folder) == {}
    flip(folder / "hf/config.json")
    (folder / "state.json").write_bytes(b"")
    (folder / "notes.txt").write_text("mine")
    (folder / SHARD).rename(tmp_path / "shard")
    (folder / SHARD).symlink_to(tmp_path / "shard")
    (folder / "elsewhere").symlink_to(tmp_path)
    size = read_manifest(folder).files["state.json"].num_bytes
    assert list(verify(folder).items()) == [
        ("elsewhere", "not in the manifest"),
        ("hf/config.json", "xxh3 differs from the manifest"),
        ("notes.txt", "not in the manifest"),
        ("state.json", f"0 bytes, {size} in the manifest"),
        (SHARD, f"leads out of the checkpoint, to {tmp_path / 'shard'}"),
    ]
    assert list(verify(folder, hashes=False)) == ["elsewhere", "notes.txt", "state.json", SHARD]


def test_the_first_sound_one_is_taken(save: Save, tmp_path: Path):
    one, two, three = save(1), save(2), save(3)
    assert sound_checkpoint(three, [two, one], Ranks()) == (three, {})
    flip(three / SHARD)
    (two / "state.json").write_bytes(b"{}")
    path, damaged = sound_checkpoint(three, [two, one], Ranks())
    assert (path, list(damaged)) == (one, [three, two])
    assert damaged[three] == f"{three} is damaged:\n  {SHARD}: xxh3 differs from the manifest"
    assert "state.json: 2 bytes" in damaged[two]
    assert sound_checkpoint(three, [], Ranks(), hashes=False)[0] == three
    assert sound_checkpoint(two, [one], Ranks(), hashes=False)[0] == one
    with pytest.raises(CheckpointError) as error:  # a path has no substitute
        sound_checkpoint(three, [], Ranks())
    assert f"{three} is damaged:\n  {SHARD}: xxh3 differs from the manifest\n" in str(error.value)
    assert "--resume.fallback true" in str(error.value)
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        sound_checkpoint(tmp_path / "gone", [], Ranks())
    flip(one / "state.json")
    with pytest.raises(CheckpointError, match=r"none of 3 checkpoints is sound:\n(?s:.*)state.json: xxh3 differs"):
        sound_checkpoint(three, [two, one], Ranks())


def test_one_sha256_as_coreutils_compute_it(save: Save):
    folder = save()
    before = sha256_of(read_manifest(folder))
    command = "find . -type f ! -name manifest.json -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == before
    flip(folder / "state.json")
    assert sha256_of(read_manifest(folder)) != before
