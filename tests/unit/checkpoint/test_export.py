"""Export: what plain transformers loads equals what was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lit_fsdp.checkpoint import export as export_module
from lit_fsdp.checkpoint.export import export
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.errors import CheckpointError
from tests.unit.checkpoint.conftest import flip

TIED = {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Two layers, tied embeddings, random weights in fp32."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def hf_files(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a module saves beside the tensors; the tokenizer is in tests/dist."""
    folder = tmp_path_factory.mktemp("hf")
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return {f"hf/{path.name}": path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def checkpoint(tmp_path: Path, model: LlamaForCausalLM, hf_files: dict[str, bytes]) -> Callable[..., Path]:
    """A function that saves the model the way the training module does."""

    def write(layout: Any = "sharded", tied: dict[str, str] = TIED, **changes: Any) -> Path:
        state = model.state_dict()
        tensors = {f"model/model.{name}": tensor for name, tensor in state.items() if name not in tied}
        tensors |= {"optim/model.norm/step": torch.tensor(1.0), "model/scale": torch.ones(1)}
        manifest = {"global_step": 5, "model": {"prefix": "model.", "tied": tied}}
        parts = {"tensors": tensors, "state": {}, "manifest": manifest, "files": hf_files, **changes}
        folder = step_folder(tmp_path, 5)
        save_checkpoint(folder, layout=layout, **parts)
        return folder

    return write


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(10)[None]).logits


def test_a_tie_saved_under_the_other_name_is_found(checkpoint, model, tmp_path):
    tensors = {f"model/model.{name}": t for name, t in model.state_dict().items() if name != TIED["lm_head.weight"]}
    export(checkpoint(tensors=tensors), tmp_path / "out")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_a_checkpoint_of_another_module_is_refused(checkpoint, tmp_path):
    for changes, match in (
        ({"manifest": {"global_step": 5}}, "only checkpoints of a CausalLMModule"),
        ({"files": {}}, r"hf/config\.json: not in the manifest"),
        ({"files": {"hf/config.json": b"[]"}}, "not the config of a model"),
    ):
        with pytest.raises(CheckpointError, match=match):
            export(checkpoint(**changes), tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_damage_and_failures_leave_nothing(checkpoint, tmp_path, monkeypatch):
    folder = checkpoint()

    def fail(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "_write_file", fail)
        with pytest.raises(KeyboardInterrupt):
            export(folder, tmp_path / "out")
    flip(folder / "tensors" / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="xxh3 differs"):
        export(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_two_exports_into_one_folder_leave_each_other_alone(checkpoint, tmp_path, monkeypatch):
    """Also where locks tell nothing, as between two clients of a network file system; the same folder is refused."""
    monkeypatch.setattr("fcntl.flock", lambda *arguments: None)
    folder = checkpoint()

    def meanwhile(*arguments):
        export(folder, tmp_path / "two")
        with pytest.raises(CheckpointError, match=r"\.one\.draft: File exists; .*another export is writing"):
            export(folder, tmp_path / "one")
        return []

    export(folder, tmp_path / "one", check=meanwhile)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "one", "two"]
