"""Weights by name, read from files or drawn: equal to transformers', by rows; what is wrong with a folder is named."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.models import tensor_files
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.weights import ModelSource, headers_of, open_weights
from tests.unit.models.conftest import fill, opened, tensors, to_mxfp4
from tests.unit.models.conftest import rewrite as _rewrite
from tests.unit.models.families import FAMILIES


@pytest.mark.parametrize(
    "family", ["laguna", "mimo_v2_flash", "kolibri1", "exaone_moe", "phimoe", "granitemoe", "minimax_m2"]
)
def test_files_of_families_that_only_rename_tensors_and_fuse_experts(saved, family):
    """They are read as they are, and exported under the same names."""
    if family not in FAMILIES:
        pytest.skip("not a family of this release")
    folder = saved(family)
    source, *both = opened(folder)
    assert source.weights_folder == folder, "nothing is converted"
    filled, expected = fill(*both), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, tensor in tensors(expected).items():
        assert torch.equal(tensors(filled)[name], tensor), name
    stored, apart = set(headers_of(folder.glob("*.safetensors"))), both[0].experts_apart
    assert (family == "granitemoe") == (not apart)
    exported = {name for name in expected.state_dict() if name not in apart}
    for name, (owner, *words) in apart.items():
        experts = range(tensors(expected)[name].shape[0] if words else 1)
        exported |= {f"{owner}.{i}.{word}.weight" for i in experts for word in words} if words else {owner}
    assert not apart or exported == stored


def test_files_as_they_are_found(saved):
    """Several with an index, experts one by one, and names without the prefix of the base model."""
    for family, options in (("qwen3", {"max_shard_size": "40KB"}), ("mixtral", {}), ("gpt2", {}), ("llama", {})):
        folder = saved(family, **options)
        assert (len(list(folder.glob("*.safetensors"))) > 2) == bool(options)
        if family == "gpt2":
            _rewrite(folder, lambda stored: {name.removeprefix("transformer."): t for name, t in stored.items()})
        if family == "llama":  # a tied weight under its other name
            _rewrite(folder, lambda stored: {n.replace("model.embed_tokens", "lm_head"): t for n, t in stored.items()})
        source, *both = opened(folder)
        assert source.weights_folder == folder, "nothing is converted"
        filled = fill(*both)
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        assert list(tensors(filled)) == list(tensors(expected))
        for name, tensor in tensors(expected).items():
            assert torch.equal(tensors(filled)[name], tensor), name


def test_experts_in_mxfp4_are_unpacked_as_they_are_read(saved):
    """To the numbers of transformers, and a rank's experts alone; GPT-OSS is published so."""
    folder = saved("gpt_oss", config={"intermediate_size": 64})
    packed = to_mxfp4(folder)
    source, weights, model = opened(folder)
    assert (source.weights_folder, len(packed)) == (folder, 4)
    for name, whole in packed.items():
        assert whole.shape == model.get_parameter(name).shape
        assert torch.equal(weights.read_named(name), whole)
        assert torch.equal(weights.read_named(name, slice(1, 3)), whole[1:3])
    _rewrite(folder, lambda stored: {name: t for name, t in stored.items() if not name.endswith("gate_up_proj_scales")})
    with pytest.raises(ConfigError, match=r"which is quantized: it contains .*gate_up_proj_blocks"):
        resolve_model(ModelConfig(name=str(folder)))


def test_missing_and_misshapen_tensors_are_named(saved):
    folder = saved("llama")
    source = resolve_model(ModelConfig(name=str(folder)))
    source.hf_config.intermediate_size = 100
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight: \(128, 64\) in the folder, \(100, 64\)"):
        open_weights(source, build_on_meta(source.hf_config), 1)
    _rewrite(folder, lambda stored: {n: t for n, t in stored.items() if "layers.1.mlp" not in n})
    with pytest.raises(CheckpointError, match=r"3 tensors of LlamaForCausalLM are missing: model\.layers\.1\.mlp"):
        opened(folder)


def test_unexpected_tensors_are_one_warning(saved, caplog):
    folder = saved("llama")
    extra = {"model.vision.weight": torch.zeros(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    _rewrite(folder, lambda stored: stored | extra)
    with caplog.at_level(logging.WARNING):
        opened(folder)
    assert len(caplog.records) == 1
    assert caplog.text.endswith(" not loaded: model.vision.weight\n")


def test_damaged_files_are_named(saved):
    folder = saved("llama", max_shard_size="60KB")
    file = sorted(folder.glob("*.safetensors"))[0]
    whole = file.read_bytes()
    for left in (whole[:1000], b"", None):
        file.unlink() if left is None else file.write_bytes(left)
        with pytest.raises(CheckpointError, match=file.name):
            opened(folder)


def test_tensors_of_every_dtype_and_their_rows_equal_those_of_safetensors(tmp_path):
    file = tmp_path / "model.safetensors"
    stored = {
        "whole": torch.randn(3, 4, 5),
        "narrow": torch.randn(7, 3).to(torch.bfloat16),
        "scale": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "ids": torch.randint(0, 9, (5,)),
        "mask": torch.tensor([True, False, True]),
        "eight": torch.randn(4, 2).to(torch.float8_e4m3fn),
    }
    save_file(stored, file, metadata={"format": "pt"})
    entries = headers_of([file])
    assert entries.keys() == stored.keys()
    for name, tensor in stored.items():
        for rows in (None, *([slice(1, 3), slice(2, 2), slice(2, 99)] if tensor.dim() else [])):
            found, expected = entries[name].read(rows), tensor if rows is None else tensor[rows]
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (name, rows)
            same = torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))
            assert same, (name, rows)
    file.write_bytes(file.read_bytes()[:-1])  # after the header has been read
    last = max(entries.values(), key=lambda entry: entry.start)
    with pytest.raises(CheckpointError, match=rf"cannot read {last.name} \(the file ends before the tensor does\)"):
        last.read()


def test_the_header_of_a_file_is_read_once_for_all_of_its_tensors(tmp_path, monkeypatch):
    """Reading it for each took 20 s for a file of 4,000 tensors."""
    file = tmp_path / "model.safetensors"
    save_file({f"experts.{i}.weight": torch.full((2,), float(i)) for i in range(300)}, file)
    opened_files = []
    monkeypatch.setattr(tensor_files, "safe_open", lambda path, **_: opened_files.append(path) or safe_open(path, "pt"))
    read = {name: entry.read() for name, entry in headers_of([file]).items()}
    assert opened_files == [file]
    assert all(torch.equal(read[f"experts.{i}.weight"], torch.full((2,), float(i))) for i in range(300))


def _random(config):
    model = build_on_meta(config, "eager")
    return open_weights(ModelSource(config, None, None), model, 3), model


def test_distribution_is_that_of_from_config(tiny):
    for family in ("llama", "gpt2", "mixtral", "gpt_neox"):
        model = fill(*_random(tiny(family)))
        torch.manual_seed(1)
        expected = AutoModelForCausalLM.from_config(tiny(family), attn_implementation="eager")
        for name, tensor in tensors(expected).items():
            found = torch.std_mean(tensors(model)[name].float(), correction=0)
            wanted = torch.std_mean(tensor.float(), correction=0)
            assert [one.item() for one in found] == pytest.approx([one.item() for one in wanted], abs=3e-3), name


def test_padding_row_is_zero_and_nothing_is_drawn_from_the_global_state(tiny):
    weights, model = _random(tiny("llama"))
    state = torch.get_rng_state()
    embeddings = weights.read("model.embed_tokens", model.model.embed_tokens, "weight")
    assert torch.equal(torch.get_rng_state(), state)
    assert embeddings.any(dim=1).tolist() == [row != 5 for row in range(len(embeddings))]


def test_code_that_initializes_nothing_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "_init_weights", lambda self, module: None)
    weights, model = _random(tiny("llama", tie_word_embeddings=False))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: the model's code"):
        weights.read("lm_head", model.lm_head, "weight")
