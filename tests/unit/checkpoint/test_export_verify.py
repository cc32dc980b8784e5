"""What is exported is loaded again and compared before it appears; adapters alone and merged; the model card."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Mamba2Config

from lit_fsdp.checkpoint.export import export
from lit_fsdp.checkpoint.export_verify import find_export_differences
from lit_fsdp.checkpoint.manifest import Manifest
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.config.model import LoraConfig, ModelConfig
from lit_fsdp.errors import CheckpointError
from lit_fsdp.models.base import base_of_folder, describe_base, open_base, weights_hash
from lit_fsdp.models.lora import apply_lora
from lit_fsdp.models.resolve import resolve_model

IDS = torch.arange(14).reshape(2, 7)
SIZES: dict[str, Any] = {"vocab_size": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {
    "llama": LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=True, **SIZES,
    ),
    "untied": LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        tie_word_embeddings=False, **SIZES,
    ),
    "gpt2": GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, **SIZES),
    "mamba2": Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, state_size=8, n_groups=1, num_hidden_layers=1, chunk_size=8, **SIZES
    ),
}  # fmt: skip
# peft 0.21 asks transformers 5.23 by the old name of a property
_PEFTS_OWN = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def _base_of(manifest: Manifest) -> Any:
    return open_base(manifest.extra["model"]["base"], manifest.folder)


CHECK = functools.partial(find_export_differences, open_base=_base_of)


class Saved:
    """A model with trained-looking values, its checkpoint, and its base as a folder."""

    def __init__(
        self,
        tmp_path: Path,
        family: str,
        lora: dict[str, Any] | None,
        layout: Any,
        num_rows: int | None = None,
        **changes: Any,
    ) -> None:
        torch.manual_seed(2)
        self.model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32).eval()
        self.base = tmp_path / "base"
        self.model.save_pretrained(self.base)
        adapter, base, frozen = None, None, set()
        if lora is not None:
            config = ModelConfig(name=str(self.base))
            base = describe_base(resolve_model(config, 0), config, 0)
            if num_rows is not None:
                self.model.resize_token_embeddings(num_rows, mean_resizing=False)
            adapter = apply_lora(self.model, LoraConfig(**lora))
            for module in self.model.modules():
                for name, param in module._parameters.items():
                    if param is not None and param.is_meta:
                        module._parameters[name] = torch.nn.Parameter(torch.randn(param.shape) * 0.2)
            self.model.eval()
            frozen = {name for name, param in self.model.named_parameters() if not param.requires_grad}
        names = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}
        tied = {"lm_head.weight": names[family]} if family in names else {}
        state = {name: t for name, t in self.model.state_dict().items() if name not in tied and name not in frozen}
        tensors = {f"model/model.{name}": t for name, t in state.items()}
        hf = {f"hf/{path.name}": path.read_bytes() for path in self.base.iterdir() if path.suffix == ".json"}
        if num_rows is not None:
            hf["hf/config.json"] = self.model.config.to_json_string().encode()
        entry = {"prefix": "model.", "tied": tied, "base": base, "hub_name": "tiny/llama", "adapter": adapter}
        entry["kept_with_adapter"] = []
        manifest = {"global_step": 5, "model": entry, "metrics": {"val_loss": 1.25, "bad": float("nan")}}
        self.folder = step_folder(tmp_path, 5)
        files = {**hf, **changes.get("files", {})}
        save_checkpoint(self.folder, tensors, {}, manifest, layout, files=files)

    def logits(self) -> torch.Tensor:
        with torch.no_grad():
            return self.model(IDS, use_cache=False).logits


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Saved]:
    """Makes a checkpoint of a family, with or without adapters."""

    def make(family: str = "llama", lora: Any = None, layout: Any = "sharded", **changes: Any) -> Saved:
        return Saved(tmp_path, family, lora, layout, **changes)

    return make


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits


def _tampering(change: Callable[[Path], None]) -> Callable[..., list[str]]:
    def check(place: Path, *rest: Any) -> list[str]:
        change(place)
        return CHECK(place, *rest)

    return check


def _rewritten(place: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(place / "model.safetensors")
    change(tensors)
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})


def _config(place: Path, **changes: Any) -> None:
    file = place / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_what_differs_is_named_and_nothing_is_published(saved, tmp_path):
    folder = saved().folder
    before = sorted(path.name for path in tmp_path.iterdir())
    for change, text in (
        (lambda p: _rewritten(p, lambda t: t["model.norm.weight"].mul_(1.01)), r"logits of a fixed input differ"),
        (lambda p: _rewritten(p, lambda t: t["model.embed_tokens.weight"][47].add_(1e-6)), "tensor model.embed_tokens"),
        (lambda p: _rewritten(p, lambda t: t.pop("model.norm.weight")), r"missing keys: model\.norm\.weight"),
        (lambda p: _rewritten(p, lambda t: t.update(x=torch.ones(1))), "unexpected keys: x"),
        (lambda p: _config(p, rms_norm_eps=0.1), "logits of a fixed input differ"),
        (lambda p: _config(p, dtype="bfloat16"), r"dtype: torch\.bfloat16, not torch\.float32"),
        (lambda p: (p / "config.json").write_text("{"), "cannot be loaded"),
    ):
        with pytest.raises(CheckpointError, match=text) as error:
            export(folder, tmp_path / "out", check=_tampering(change))
        assert "not published" in str(error.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == before


@_PEFTS_OWN
def test_adapters_alone_and_merged_are_the_live_model(tmp_path):
    """Also those of embeddings, biases, and whole modules beside them."""
    for number, (family, layout, lora) in enumerate(
        (
            ("llama", "full", {"target_modules": "all-linear", "r": 4, "alpha": 6}),
            ("llama", "sharded", {"r": 3, "alpha": 2.5, "use_rslora": True}),
            ("gpt2", "full", {"target_modules": "all-linear", "r": 4, "use_dora": True}),
            ("untied", "sharded", {"target_modules": ["q_proj", "embed_tokens"], "r": 4}),
            ("untied", "sharded", {"modules_to_save": ["lm_head", "norm"], "r": 4}),
            ("gpt2", "sharded", {"r": 4, "modules_to_save": ["ln_f"]}),
        )
    ):
        place = tmp_path / str(number)
        made = Saved(place, family, lora, layout)
        assert export(made.folder, place / "adapter", check=CHECK).form == "adapter"
        files = sorted(path.name for path in (place / "adapter").iterdir())
        assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
        assert base_of_folder(place / "adapter")["xxh3"] == weights_hash(made.base)
        live = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(made.base), place / "adapter")
        assert torch.equal(logits(live), made.logits()), lora
        assert export(made.folder, place / "merged", lora="merge", check=CHECK, open_base=_base_of).form == "merge"
        plain = AutoModelForCausalLM.from_pretrained(place / "merged")
        assert type(plain) is type(made.model)
        torch.testing.assert_close(logits(plain), made.logits(), rtol=1e-4, atol=1e-5)
    narrow = export(made.folder, tmp_path / "bf16", lora="merge", dtype="bf16", check=CHECK, open_base=_base_of)
    assert narrow.dtype == "bfloat16"


def test_the_card_tells_what_the_checkpoint_knows_and_no_path(tmp_path):
    recipe = {"model": {"name": "/home/somebody/model"}, "logger": {"api_key": "sk-canary"}}
    for lora, library in ((None, "transformers"), ({"r": 4}, "peft")):
        files = {"recipe.yaml": yaml.safe_dump(recipe).encode()}
        export(Saved(tmp_path / library, "llama", lora, "full", files=files).folder, tmp_path / library / "out")
        card = (tmp_path / library / "out" / "README.md").read_text()
        head = yaml.safe_load(card.split("---")[1])
        assert head["library_name"] == library
        assert (head["base_model"], head["pipeline_tag"]) == ("tiny/llama", "text-generation")
        assert head["tags"] == ["lit_fsdp"] + ["lora"] * (lora is not None)
        assert "step 5" in card
        assert "- val_loss: 1.25\n" in card
        assert not [word for word in ("/home", "canary", "bad", str(tmp_path)) if word in card]


def test_a_tampered_adapter_is_not_published(saved, tmp_path):
    def change(place: Path) -> None:
        file = place / "adapter_model.safetensors"
        tensors = load_file(file)
        tensors.pop(sorted(tensors)[0])
        save_file(tensors, file)

    folder = saved(lora={"r": 2}).folder
    with pytest.raises(CheckpointError, match="not published"):
        export(folder, tmp_path / "out", check=_tampering(change))
    assert not (tmp_path / "out").exists()
