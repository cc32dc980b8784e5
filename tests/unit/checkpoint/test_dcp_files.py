"""DCP's description is never run, and must agree with the manifest."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from lit_fsdp.checkpoint import dcp_files, store
from lit_fsdp.checkpoint.disk import FileEntry, hash_file
from lit_fsdp.checkpoint.manifest import Manifest, read_manifest
from lit_fsdp.errors import CheckpointError


class Runs:
    """Unpickling it calls ``function``."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def replace(folder: Path, data: bytes) -> None:
    """Another ``.metadata``, and a manifest that vouches for it."""
    path = folder / dcp_files.METADATA
    path.write_bytes(data)
    manifest = read_manifest(folder)
    files = {**manifest.files, dcp_files.METADATA: FileEntry(len(data), hash_file(path))}
    (folder / "manifest.json").write_bytes(Manifest(**{**vars(manifest), "files": files}).dumps())


def description(folder: Path):
    return dcp_files.read_description(read_manifest(folder))


@pytest.mark.parametrize(
    "payload",
    [
        lambda place: Runs(os.system, f"touch {place}"),
        lambda place: Runs(eval, f"open({str(place)!r}, 'w')"),
        lambda place: Runs(torch.save, 1, str(place)),
        lambda place: Runs(Path.touch, place),
        lambda place: {"nested": [Runs(os.mkdir, str(place))]},
        lambda place: Runs(torch.load, str(place)),
    ],
)
def test_a_malicious_description_runs_nothing(save, blanks, tmp_path, payload):
    folder, place = save(), tmp_path / "pwned"
    replace(folder, pickle.dumps(payload(place)))
    with pytest.raises(CheckpointError, match=r"refused: it names .* do not trust this checkpoint"):
        store.load_tensors(folder, blanks)
    assert not place.exists()


def test_a_dotted_name_does_not_reach_further(save):
    folder = save()
    replace(folder, b"\x80\x04\x8c\x05torch\x8c\x0bserialization.load\x93.".replace(b"\x0bser", b"\x12ser"))
    with pytest.raises(CheckpointError, match=r"refused: it names torch\.serialization\.load"):
        description(folder)


@pytest.mark.parametrize("data", [b"", b"junk", pickle.dumps(3), pickle.dumps({})])
def test_a_damaged_description_is_refused(save, data):
    folder = save()
    replace(folder, data)
    with pytest.raises(CheckpointError, match=r"\.metadata: (damaged|not the description)"):
        description(folder)


def test_byte_entries_are_refused(save):
    folder = save()
    found = description(folder)
    found.state_dict_metadata["model/model.number"] = BytesStorageMetadata()
    replace(folder, pickle.dumps(found))
    with pytest.raises(CheckpointError, match=r"refused: model/model\.number is no tensor but pickled bytes"):
        description(folder)


def test_other_tensors_than_the_manifest_says_are_refused(save):
    folder = save()
    found = description(folder)
    entry = found.state_dict_metadata["model/model.number"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.properties.dtype = torch.int32
    replace(folder, pickle.dumps(found))
    with pytest.raises(CheckpointError, match="describes other tensors than the manifest"):
        description(folder)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"relative_path": "../../secret"}, "not in the manifest"),
        ({"relative_path": "/etc/passwd"}, "not in the manifest"),
        ({"relative_path": "__9_0.distcp"}, "not in the manifest"),
        ({"offset": 10**9}, "lies outside"),
        ({"offset": -1}, "lies outside"),
        ({"transform_descriptors": ["zstd"]}, "stored in an unknown way"),
    ],
)
def test_places_outside_are_refused(save, change, match):
    folder = save()
    found = description(folder)
    place = found.storage_data[MetadataIndex("model/model.number", [])]
    vars(place).update(change)
    replace(folder, pickle.dumps(found))
    with pytest.raises(CheckpointError, match=match):
        description(folder)


def test_a_shard_that_is_a_link_out_is_refused(save, blanks, tmp_path):
    folder = save()
    shard = folder / "tensors" / "__0_0.distcp"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
        store.load_tensors(folder, blanks)
