"""What differs between a checkpoint and its manifest, and which sound one is loaded; one process, no group."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_fsdp.checkpoint import verify as verifying
from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.verify import Difference, describe, sha256_of, sound_checkpoint, verify
from lit_fsdp.errors import CheckpointError


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_no_torch_is_needed():
    code = "import sys, lit_fsdp.checkpoint.verify; print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_every_file_that_differs_is_named(save: Callable[..., Path], tmp_path: Path):
    folder = save()
    assert verify(folder) == []
    flip(folder / "hf/config.json")
    (folder / "state.json").write_bytes(b"")
    (folder / "notes.txt").write_text("mine")
    (folder / "tensors/rank-00000.safetensors").rename(tmp_path / "shard")
    (folder / "tensors/rank-00000.safetensors").symlink_to(tmp_path / "shard")
    (folder / "elsewhere").symlink_to(tmp_path)
    size = read_manifest(folder).files["state.json"].num_bytes
    assert [str(found) for found in verify(folder)] == [
        "elsewhere: not in the manifest",
        "hf/config.json: xxh3 differs from the manifest",
        "notes.txt: not in the manifest",
        f"state.json: 0 bytes, {size} in the manifest",
        f"tensors/rank-00000.safetensors: leads out of the checkpoint, to {tmp_path / 'shard'}",
    ]
    by_size = [found.file for found in verify(folder, hashes=False)]
    assert by_size == ["elsewhere", "notes.txt", "state.json", "tensors/rank-00000.safetensors"]


@pytest.mark.parametrize("harm", ["edit", "cut", "remove"])
def test_an_unreadable_manifest_is_the_only_difference(save: Callable[..., Path], harm: str):
    path = save(files={}) / "manifest.json"
    text = path.read_text()
    if harm == "remove":
        path.unlink()
    else:
        path.write_text(text[:-20] if harm == "cut" else text.replace('"global_step": 1', '"global_step": 7'))
    (found,) = verify(path.parent)
    assert found.file == "manifest.json"
    expected = {"edit": "it was changed after it was written", "cut": "damaged or not ours", "remove": "manifest.json"}
    assert expected[harm] in found.problem


def test_a_manifest_in_the_making_is_not_a_difference(save: Callable[..., Path]):
    folder = save()
    (folder / f".manifest.json.tmp-{'0' * 16}").write_text("{")
    assert verify(folder) == []
    (folder / ".manifest.json.tmp-mine").write_text("{")
    assert [found.file for found in verify(folder)] == [".manifest.json.tmp-mine"]


def test_many_differences_are_counted():
    found = [Difference(f"f{i}", "gone") for i in range(10)]
    assert describe(Path("step-1"), found).splitlines()[-1] == "  and 2 more files"
    assert len(describe(Path("step-1"), found, shown=10).splitlines()) == 11


def test_the_first_sound_one_is_taken(save: Callable[..., Path]):
    one, two, three = save(1), save(2), save(3)
    assert sound_checkpoint(three, [two, one], Ranks()) == (three, {})
    flip(three / "tensors/rank-00000.safetensors")
    (two / "state.json").write_bytes(b"{}")
    path, damaged = sound_checkpoint(three, [two, one], Ranks())
    assert path == one
    assert list(damaged) == [three, two]
    assert damaged[three] == (
        f"{three} is damaged:\n  tensors/rank-00000.safetensors: xxh3 differs from the manifest"
    )  # fmt: skip
    assert "state.json: 2 bytes" in damaged[two]
    assert sound_checkpoint(three, [], Ranks(), hashes=False)[0] == three
    assert sound_checkpoint(two, [one], Ranks(), hashes=False)[0] == one


def test_a_path_has_no_substitute(save: Callable[..., Path], tmp_path: Path):
    folder = save()
    flip(folder / "state.json")
    with pytest.raises(CheckpointError) as error:
        sound_checkpoint(folder, [], Ranks())
    assert f"{folder} is damaged:\n  state.json: xxh3 differs from the manifest\n" in str(error.value)
    assert "--resume.fallback true" in str(error.value)
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        sound_checkpoint(tmp_path / "gone", [], Ranks())


def test_none_is_sound(save: Callable[..., Path]):
    folders = [save(2), save(1)]
    for folder in folders:
        flip(folder / "state.json")
    with pytest.raises(CheckpointError) as error:
        sound_checkpoint(folders[0], folders[1:], Ranks())
    assert str(error.value).startswith("none of 2 checkpoints is sound:\n")
    assert str(error.value).count("state.json: xxh3 differs") == 2


def test_files_are_hashed_by_size_and_once(save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    folder, hashed = save(), []
    monkeypatch.setattr(verifying, "hash_file", lambda path: hashed.append(path.name) or "")
    assert len(verify(folder)) == len(read_manifest(folder).files) == len(hashed) == len(set(hashed))


def test_one_sha256_as_coreutils_compute_it(save: Callable[..., Path]):
    folder = save()
    before = sha256_of(read_manifest(folder))
    command = "find . -type f ! -name manifest.json -printf '%P\\n' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == before
    flip(folder / "state.json")
    assert sha256_of(read_manifest(folder)) != before
