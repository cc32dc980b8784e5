"""Manifests: what they say, and that nothing else passes for one."""

from __future__ import annotations

import json
import math

import pytest
import torch

from lit_fsdp.checkpoint.files import hash_file
from lit_fsdp.checkpoint.manifest import TensorSpec, read_manifest, record_metrics
from lit_fsdp.errors import CheckpointError


def test_a_manifest_describes_every_file_and_tensor(save):
    folder = save(3, layout="full")
    manifest = read_manifest(folder)
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert set(manifest.files) == there - {"manifest.json"}
    for name, entry in manifest.files.items():
        assert (entry.num_bytes, entry.xxh3) == ((folder / name).stat().st_size, hash_file(folder / name))
    assert manifest.tensors["model/model.transposed"] == TensorSpec("bfloat16", (4, 3))
    assert manifest.tensors["model/model.number"] == TensorSpec("float32", ())
    assert (manifest.global_step, manifest.world_size, manifest.layout) == (3, 1, "full")
    assert set(manifest.versions) >= {"python", "torch", "lightning", "transformers"}
    assert 0 < manifest.extra["save_seconds"] < 60
    assert manifest.extra["model"] == {"prefix": "model.", "tied": {}}
    assert str(folder) not in (folder / "manifest.json").read_text()


def test_metrics_are_added_atomically_and_survive_non_finite_values(save):
    folder = save()
    before = read_manifest(folder)
    record_metrics(folder, {"val_loss": 0.25, "nan": math.nan, "inf": -math.inf})
    after = read_manifest(folder)
    assert (after.metrics["val_loss"], after.metrics["inf"]) == (0.25, -math.inf)
    assert math.isnan(after.metrics["nan"])
    assert (after.files, after.tensors, after.extra) == (before.files, before.tensors, before.extra)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_every_change_of_a_manifest_is_noticed(save):
    """Also one that leaves every value as it was: an exponent in capitals, the last digit of a long number, a space."""
    path = save(manifest={"global_step": 1, "metrics": {"lr": torch.tensor(6.5e-06)}}) / "manifest.json"
    text = path.read_text()
    document = json.loads(text)
    changed = [json.dumps({**document, key: "other"}) for key in document]
    changed += [json.dumps({k: v for k, v in document.items() if k != key}) for key in document]
    changed += ["", "[]", text[:-40], text + " ", text.replace('"global_step": 1', '"global_step": 2')]
    changed += [text.replace("e-06", "E-06"), text.replace("9e-06", "8e-06").replace("5e-06", "4e-06")]
    for broken in changed:
        assert broken != text
        path.write_text(broken)
        with pytest.raises(CheckpointError, match=r"manifest\.json: damaged or not ours"):
            read_manifest(path.parent)
