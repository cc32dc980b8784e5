"""What a checkpoint of adapters says of its base, and the base that is found by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models import hub
from lit_fsdp.models.base import describe_base, find_base, open_base
from lit_fsdp.models.resolve import resolve_model

CHECKPOINT = Path("run/checkpoints/step-00000002")


def described(seed: int = 0, **options: Any) -> dict[str, Any]:
    """What a run with this ``model`` section says."""
    config = ModelConfig(**options)
    return describe_base(resolve_model(config), config, seed)


@pytest.fixture
def folder(tmp_path: Path, saved: Callable[..., Path]) -> Path:
    """A model in bf16."""
    (tmp_path / "snapshots").mkdir()
    config = {"dtype": "bfloat16", "tie_word_embeddings": False}
    return saved("llama", config=config).rename(tmp_path / "snapshots" / "abc")


def test_a_base_on_the_hub_has_a_revision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(name: str, allow_patterns: list[str], revision: str | None, **options: Any) -> str:
        assert {"*.safetensors", "*.tiktoken"} <= set(allow_patterns)
        assert not {"*.bin", "*.py"} & set(allow_patterns)  # which are fetched only if need be
        asked.append((name, revision))
        return str(folder)

    monkeypatch.setattr(hub, "snapshot_download", download)
    found = described(name="some/model")
    assert (found["name"], found["revision"]) == ("some/model", "abc")
    weights = open_base(found, CHECKPOINT)
    assert asked == [("some/model", None), ("some/model", "abc")]
    for saved in (found, {"name": "some/model"}):  # an adapter of others names it alone
        assert find_base(saved, CHECKPOINT).weights_folder == folder
    assert asked[2:] == [("some/model", "abc"), ("some/model", None)]
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(weights.read(name), tensor) for name, tensor in stored.items())


def test_a_base_with_code_of_its_own_is_run_only_where_that_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    lines = ("from transformers import LlamaConfig, LlamaForCausalLM", 'class Own(LlamaConfig): model_type = "own"')
    (folder / "own.py").write_text("\n".join([*lines, "class OwnLM(LlamaForCausalLM): config_class = Own"]))
    values = json.loads((folder / "config.json").read_bytes()) | {"model_type": "own", "architectures": ["OwnLM"]}
    values["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnLM"}
    (folder / "config.json").write_text(json.dumps(values))
    saved = described(name=str(folder), trust_remote_code=True)
    with pytest.raises(ConfigError, match="--trust_remote_code"):
        open_base(saved, CHECKPOINT)
    weights = open_base(saved, CHECKPOINT, trust_remote_code=True)
    assert torch.equal(weights.read("lm_head.weight"), load_file(folder / "model.safetensors")["lm_head.weight"])


def test_a_base_of_random_values_is_drawn_again_from_its_seed(tiny: Callable[..., Any]) -> None:
    name = tiny("llama").to_dict()
    found = described(3, name=name)
    first, again = (open_base(found, CHECKPOINT).read("model.embed_tokens.weight") for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, open_base(described(4, name=name), CHECKPOINT).read("model.embed_tokens.weight"))
