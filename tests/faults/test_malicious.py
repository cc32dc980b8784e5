"""Files made by somebody who wants to run code here or to write elsewhere, with a manifest that fits them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.checkpoint import files as disk
from lit_fsdp.checkpoint import importing, run_folder, store
from lit_fsdp.checkpoint.export import export
from lit_fsdp.checkpoint.files import MANIFEST
from lit_fsdp.checkpoint.manifest import Chunk, Manifest, read_manifest
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.errors import CheckpointError

SHARD = "tensors/rank-00000.safetensors"


class Runs:
    """Unpickled anywhere, it makes a file."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.fixture
def payloads(tmp_path: Path) -> Iterator[list[Any]]:
    """Objects that make a file when they are unpickled without restriction, which never happens."""
    marker = tmp_path / "marker"
    yield [
        Runs(os.system, f"touch {marker}"),
        Runs(eval, f"open({str(marker)!r}, 'w')"),
        Runs(exec, f"open({str(marker)!r}, 'w')"),
        Runs(Path.touch, marker),
        Runs(getattr, Runs(__import__, "os"), "system"),
    ]
    assert not marker.exists()


@pytest.fixture
def victim(saved: Path, tmp_path: Path) -> Path:
    """A sound checkpoint to be changed."""
    return Path(shutil.copytree(step_folder(saved, 3), step_folder(tmp_path / "run", 3)))


def seal(folder: Path, **changes: Any) -> None:
    """Write the manifest that fits the files as they are now."""
    old = read_manifest(folder)
    paths = {name: folder / name for name in old.files}
    files = {name: disk.FileEntry(path.stat().st_size, disk.hash_file(path)) for name, path in paths.items()}
    (folder / MANIFEST).write_bytes(Manifest(**{**vars(old), "files": files, **changes}).dumps())


def blank(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors to load into."""
    tensors = read_manifest(folder).tensors
    return {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in tensors.items()}


def test_a_pickle_as_description(victim: Path, payloads: list[Any]) -> None:
    """In a checkpoint nothing reads it; in another tool's folder nothing of it runs."""
    metadata = victim / "tensors" / ".metadata"
    for payload in payloads:
        for content in (payload, [payload], {"planner_data": payload}):
            metadata.write_bytes(pickle.dumps(content))
            store.load_tensors(victim, blank(victim))
            with pytest.raises(CheckpointError, match="rejected"):
                importing.read_dcp(metadata.parent, bool)


def test_a_pickle_in_the_place_of_tensors_or_state(victim: Path, payloads: list[Any]) -> None:
    sound = {name: (victim / name).read_bytes() for name in (SHARD, "state.json")}
    for payload in payloads:
        for save in (torch.save, pickle.dump):
            for name in sound:
                with (victim / name).open("wb") as file:
                    save(payload, file)
                    file.write(bytes(1 << 20))
                seal(victim)
                store.verify_files(victim)  # the manifest fits
                with pytest.raises(CheckpointError):
                    store.load_tensors(victim, blank(victim)) if name == SHARD else store.load_state(victim)
                (victim / name).write_bytes(sound[name])


def test_torch_files_of_others(payloads: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    for payload in payloads:
        for as_zip in (True, False):
            for content in (payload, {"state_dict": {"weight": torch.ones(2)}, "hyper_parameters": payload}):
                torch.save(content, path, _use_new_zipfile_serialization=as_zip)
                with pytest.raises(
                    CheckpointError,
                    match="none of its code was run" if as_zip else "not a file of torch.save in its zip format",
                ):
                    importing.read_torch(path)


def test_safetensors_headers(victim: Path) -> None:
    """Endless, no JSON, far away, overflowing, nested, and none at all."""

    def place(shape: list[int], *offsets: int) -> bytes:
        text = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
        return struct.pack("<Q", len(text)) + text + bytes(16)

    path = victim / SHARD
    sound = path.read_bytes()
    for data in (
        struct.pack("<Q", 2**63) + sound[8:],
        sound[:8] + b"x" * (len(sound) - 8),
        place([4], 1 << 40, (1 << 40) + 16),
        place([2**62, 2**62], 0, 16),
        struct.pack("<Q", 1 << 16) + b"[" * (1 << 16),
        b"",
    ):
        path.write_bytes(data)
        seal(victim)
        store.verify_files(victim)
        with pytest.raises(CheckpointError):
            store.load_tensors(victim, blank(victim))
        with pytest.raises(CheckpointError):
            importing.read_safetensors(path)


@pytest.mark.parametrize("name", ["../outside", "/lit_fsdp_outside", "hf/../../../outside", "hf/..", "a\\..\\b", ""])
def test_names_that_lead_outside(victim: Path, tmp_path: Path, name: str) -> None:
    """In the manifest, as file or as a place of tensors, among the files to be saved, in an index of shards."""
    (victim.parent / "outside").write_text("not ours")

    def around() -> dict[Path, int]:
        found = [path for path in tmp_path.rglob("*") if not path.is_relative_to(victim)]
        return {path: path.is_file() and path.stat().st_mtime_ns for path in found}

    before = around()
    old = read_manifest(victim)
    into = blank(victim)
    seal(victim, chunks={key: (Chunk(name, (0,), (1,)),) for key in old.chunks})
    with pytest.raises(CheckpointError):
        store.load_tensors(victim, into)
    listed = Manifest(**{**vars(old), "files": {**old.files, name: disk.FileEntry(8, "0" * 64)}})
    (victim / MANIFEST).write_bytes(listed.dumps())
    for door in (read_manifest, store.verify_files, store.load_state, lambda f: export(f, tmp_path / "out")):
        with pytest.raises(CheckpointError):
            door(victim)
    with pytest.raises(CheckpointError):
        store.save_checkpoint(
            victim.parent / "step-00000004", {}, {}, {"global_step": 4}, "full", files={name: b"evil"}
        )
    (victim / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError):
        importing.read_safetensors(victim / "m.safetensors.index.json")
    assert around() == before


def test_links_out_of_the_folder(victim: Path, tmp_path: Path) -> None:
    """Never read through, and never followed by what deletes."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in (SHARD, "state.json", MANIFEST):
        path, there = victim / name, outside / os.path.basename(name)
        path.rename(there)
        path.symlink_to(there)
        with pytest.raises(CheckpointError, match="links outside the checkpoint"):
            store.verify_files(victim)
        path.unlink()
        there.rename(path)
        store.verify_files(victim)
    kept = outside / "kept"
    kept.write_text("not ours")
    (victim / "more").symlink_to(outside)
    run_folder.remove(victim)
    (victim.parent / "step-00000009").symlink_to(outside)
    run_folder.remove(victim.parent / "step-00000009")
    (victim.parent / ".step-00000009.tmp-0123456789abcdef").symlink_to(outside)
    run_folder.sweep(victim.parent.parent)
    assert kept.exists()
