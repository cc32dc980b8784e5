"""Exports: loaded again and compared before they appear; adapters alone and merged; the model card."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

from lit_fsdp.__main__ import main
from lit_fsdp.checkpoint.export import export
from lit_fsdp.checkpoint.export_verify import find_export_differences
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.config.model import LoraConfig, ModelConfig
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.models.base import base_of_folder, describe_base, weights_hash
from lit_fsdp.models.build import build_on_meta
from lit_fsdp.models.export_files import model_files
from lit_fsdp.models.generate import Chat
from lit_fsdp.models.lora import apply_lora
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.unit.checkpoint.conftest import flip

IDS = torch.arange(14).reshape(2, 7)
SIZES: dict[str, Any] = {"vocab_size": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, **SIZES}
CONFIGS = {
    "llama": LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True, **LLAMA),
    "untied": LlamaConfig(num_hidden_layers=1, tie_word_embeddings=False, **LLAMA),
    "mixtral": MixtralConfig(num_hidden_layers=1, num_local_experts=4, num_key_value_heads=2, **LLAMA),
    "sparse": MixtralConfig(num_hidden_layers=1, num_local_experts=32, num_key_value_heads=2, **LLAMA),
    "gpt2": GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, **SIZES),
}
TIED = {"llama": {"lm_head.weight": "model.embed_tokens.weight"}, "gpt2": {"lm_head.weight": "transformer.wte.weight"}}


class Saved:
    """A model with trained-looking values, its checkpoint, and its base as a folder."""

    def __init__(self, place: Path, family: str = "llama", lora: Any = None, layout: Any = "sharded", **changes: Any):
        torch.manual_seed(2)
        self.model = AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.float32).eval()
        self.base = place / "base"
        self.model.save_pretrained(self.base)
        adapter, base, frozen = None, None, set()
        if lora is not None:
            config = ModelConfig(name=str(self.base))
            base = describe_base(resolve_model(config), config, 0)
            adapter = apply_lora(self.model, LoraConfig(**lora))
            for module in self.model.modules():
                for name, param in module._parameters.items():
                    if param is not None and param.is_meta:
                        module._parameters[name] = torch.nn.Parameter(torch.randn(param.shape) * 0.2)
            self.model.eval()
            frozen = {name for name, param in self.model.named_parameters() if not param.requires_grad}
        tied = TIED.get(family, {})
        not_saved = frozen | set(tied.values() if changes.pop("saves_head", False) else tied)
        state = {f"model/model.{name}": t for name, t in self.model.state_dict().items() if name not in not_saved}
        entry = {"prefix": "model.", "tied": tied, "base": base, "hub_name": "tiny/llama", "adapter": adapter}
        metrics = {"val_loss": 1.25, "train_token_accuracy": 0.5, "val_bad": float("nan"), "step_seconds": 2.0}
        parts = {
            "tensors": {**state, "optim/x/step": torch.tensor(1.0)},
            "manifest": {"global_step": 5, "model": {**entry, "kept_with_adapter": []}, "metrics": metrics},
            "files": {f"hf/{path.name}": path.read_bytes() for path in self.base.glob("*.json")},
        }
        self.folder = step_folder(place, 5)
        save_checkpoint(self.folder, state={}, layout=layout, **{**parts, **changes})


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits


def test_a_tie_saved_under_the_other_name_is_found(tmp_path: Path) -> None:
    saved = Saved(tmp_path, saves_head=True)
    export(saved.folder, tmp_path / "out", check=find_export_differences)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(saved.model))


def test_damage_and_checkpoints_of_other_modules_are_refused(tmp_path: Path) -> None:
    for changes, match in (
        ({"manifest": {"global_step": 5}}, "only checkpoints of a CausalLMModule"),
        ({"files": {}}, r"hf/config\.json: not in the manifest"),
        ({"files": {"hf/config.json": b"[]"}}, "not a model config"),
    ):
        with pytest.raises(CheckpointError, match=match):
            export(Saved(tmp_path, **changes).folder, tmp_path / "out")
    folder = Saved(tmp_path).folder
    flip(folder / "tensors" / "rank-00000.safetensors")
    with pytest.raises(CheckpointError, match="xxh3 differs"):
        export(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "checkpoints"]


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.4"), reason="leaves the tied head of such code on meta"
)
def test_a_model_with_code_of_its_own_is_exported_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what that code imports; it is run for a comparison only where that is said."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    base = Saved(tmp_path).base
    codes = {"sizes.py": "SCALE = 1.5\n"}
    codes["configuration_own.py"] = 'from transformers import LlamaConfig\nclass Own(LlamaConfig): model_type = "own"\n'
    codes["modeling_own.py"] = """from transformers import LlamaForCausalLM
from .configuration_own import Own
from .sizes import SCALE
class OwnLM(LlamaForCausalLM):
    config_class = Own
    def forward(self, *args, **options):
        out = super().forward(*args, **options)
        out.logits = out.logits * SCALE
        return out
"""
    for name, code in codes.items():
        (base / name).write_text(code)
    auto_map = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "modeling_own.OwnLM"}
    _config(model_type="own", architectures=["OwnLM"], auto_map=auto_map)(base)
    source = resolve_model(ModelConfig(name=str(base), trust_remote_code=True))
    model = build_on_meta(source.hf_config, trust_remote_code=True)
    model.__class__ = type("Wrapped", (type(model),), {})  # as fully_shard does
    folder = Saved(tmp_path / "own", files=model_files(source, miniature_tokenizer(), model)).folder
    with pytest.raises(CheckpointError, match="has Python code: read it, and add --trust_remote_code"):
        export(folder, tmp_path / "out", check=find_export_differences)
    export(folder, tmp_path / "out", check=find_export_differences, trust_remote_code=True)
    assert {name: (tmp_path / "out" / name).read_text() for name in codes} == codes
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    torch.testing.assert_close(logits(found), logits(Saved(tmp_path / "plain").model) * 1.5)
    with pytest.raises(ConfigError, match=r"^--model: got (?s:.*)read it, and add --trust_remote_code to run it"):
        Chat(str(tmp_path / "out"))
    assert type(Chat(str(tmp_path / "out"), trust_remote_code=True).model).__name__ == "OwnLM"
    found.resize_token_embeddings(len(miniature_tokenizer()), mean_resizing=False)
    found.save_pretrained(tmp_path / "out")
    theirs = {"state_dict": found.state_dict(), "optimizer_states": [], "global_step": 3, "loops": {}}
    torch.save({**theirs, "pytorch-lightning_version": "2.6.0"}, tmp_path / "theirs.ckpt")
    words = [
        "ckpt",
        "import",
        str(tmp_path / "theirs.ckpt"),
        "-o",
        str(tmp_path / "new"),
        "--model",
        str(tmp_path / "out"),
    ]
    assert main(words) == 2
    assert not (tmp_path / "new").exists()
    assert main([*words, "--trust_remote_code"]) == 0
    assert {name: (tmp_path / "new/hf" / name).read_text() for name in codes} == codes


def test_weights_that_are_infinite_in_fp16_are_refused(tmp_path: Path) -> None:
    tensors = {f"model/model.{name}": t for name, t in Saved(tmp_path).model.state_dict().items() if name != "lm_head"}
    tensors["model/model.model.norm.weight"][0] = 65519.0  # rounded down
    folder = Saved(tmp_path, tensors=tensors).folder
    assert export(folder, tmp_path / "fits", dtype="fp16").dtype == "float16"
    tensors["model/model.model.norm.weight"][0] = -70000.0
    folder = Saved(tmp_path, tensors=tensors).folder
    given = r"model\.norm\.weight has infinite values \(number of such tensors: 1\)\n.*\n.*set --dtype bf16"
    with pytest.raises(ConfigError, match=given):
        export(folder, tmp_path / "out", dtype="fp16")
    assert not (tmp_path / "out").exists()
    export(folder, tmp_path / "out", dtype="bf16", check=find_export_differences)


def test_a_folder_among_checkpoints_is_refused(tmp_path: Path) -> None:
    """There, it would be a damaged checkpoint that stands in the way of the last one."""
    folder = Saved(tmp_path).folder
    for out in (folder.with_name("step-00000009"), folder / "hf-model"):
        with pytest.raises(ConfigError, match=r"--out: got .*, inside the checkpoints of a run"):
            export(folder, out)
        assert not out.exists()
    export(folder, tmp_path / "other" / "checkpoints" / "model")


def test_two_exports_into_one_folder_leave_each_other_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where locks tell nothing, as between two clients of a network file system; the same folder is refused."""
    monkeypatch.setattr("fcntl.flock", lambda *arguments: None)
    folder = Saved(tmp_path).folder

    def meanwhile(*arguments: Any) -> list[str]:
        export(folder, tmp_path / "two")
        with pytest.raises(CheckpointError, match=r"\.one\.draft: another export is writing .*one, or a killed export"):
            export(folder, tmp_path / "one")
        return []

    export(folder, tmp_path / "one", check=meanwhile)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "checkpoints", "one", "two"]


def _rewritten(change: Callable[[dict[str, torch.Tensor]], object], name: str = "model") -> Callable[[Path], None]:
    def rewrite(place: Path) -> None:
        tensors = load_file(place / f"{name}.safetensors")
        change(tensors)
        save_file(tensors, place / f"{name}.safetensors", metadata={"format": "pt"})

    return rewrite


def _config(**changes: Any) -> Callable[[Path], None]:
    def rewrite(place: Path) -> None:
        file = place / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return rewrite


def test_what_differs_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    adapter = Saved(tmp_path / "adapter", lora={"r": 2}).folder
    folder = Saved(tmp_path).folder
    before = sorted(path.name for path in tmp_path.iterdir())
    changes: list[tuple[Path, Callable[[Path], Any], str]] = [
        (folder, _rewritten(lambda t: t["model.norm.weight"].mul_(1.01)), "logits of a fixed input differ"),
        (folder, _rewritten(lambda t: t["model.embed_tokens.weight"][47].add_(1e-6)), "tensor model.embed_tokens"),
        (folder, _rewritten(lambda t: t.pop("model.norm.weight")), r"missing keys: model\.norm\.weight"),
        (folder, _rewritten(lambda t: t.update(x=torch.ones(1))), "unexpected keys: x"),
        (folder, _config(rms_norm_eps=0.1), "logits of a fixed input differ"),
        (folder, _config(dtype="bfloat16"), r"dtype: torch\.bfloat16, not torch\.float32"),
        (folder, lambda place: (place / "config.json").write_text("{"), "cannot load the export"),
        (adapter, _rewritten(lambda t: t.pop(sorted(t)[0]), "adapter_model"), "missing (keys|or unexpected tensors)"),
    ]
    for saved, change, text in changes:

        def check(place: Path, *rest: Any, change: Callable[[Path], Any] = change) -> list[str]:
            change(place)
            return find_export_differences(place, *rest)

        with pytest.raises(CheckpointError, match=rf"not published.*\n(.*\n)*.*({text})"):
            export(saved, tmp_path / "out", check=check)
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_logits_do_not_depend_on_the_alignment_of_a_file(tmp_path: Path) -> None:
    """Kernels for one row, as of an expert with one token, sum in another order in memory that is not aligned."""
    folder = Saved(tmp_path, "sparse").folder
    for shift in (0, 8, 16):

        def check(place: Path, *rest: Any, shift: int = shift) -> list[str]:
            file = place / "model.safetensors"
            data = file.read_bytes()
            size = int.from_bytes(data[:8], "little")
            file.write_bytes(
                (size + shift).to_bytes(8, "little") + data[8 : 8 + size] + b" " * shift + data[8 + size :]
            )
            return find_export_differences(place, *rest)

        assert export(folder, tmp_path / str(shift), check=check).dtype == "float32"


# peft 0.21 asks transformers 5.23 by the old name of a property
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_alone_and_merged_are_the_live_model(tmp_path: Path) -> None:
    """Also those of embeddings, biases, and whole modules beside them."""
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("llama", "full", {"target_modules": "all-linear", "r": 4, "alpha": 6}),
        ("llama", "sharded", {"r": 3, "alpha": 2.5, "use_rslora": True}),
        ("gpt2", "full", {"target_modules": "all-linear", "r": 4, "use_dora": True}),
        ("untied", "sharded", {"target_modules": ["q_proj", "embed_tokens"], "r": 4}),
        ("untied", "sharded", {"modules_to_save": ["lm_head", "norm"], "r": 4}),
        ("gpt2", "sharded", {"r": 4, "modules_to_save": ["ln_f"]}),
        ("mixtral", "sharded", {"r": 4, "target_modules": "all-linear"}),
    ]
    for number, (family, layout, lora) in enumerate(cases):
        place = tmp_path / str(number)
        made = Saved(place, family, lora, layout)
        assert export(made.folder, place / "adapter", check=find_export_differences).form == "adapter"
        files = sorted(path.name for path in (place / "adapter").iterdir())
        assert files == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
        assert base_of_folder(place / "adapter")["xxh3"] == weights_hash(made.base)
        live = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(made.base), place / "adapter")
        assert torch.equal(logits(live), logits(made.model)), lora
        assert export(made.folder, place / "merged", lora="merge", check=find_export_differences).form == "merge"
        if family == "mixtral":  # other software reads the names of the hub: block_sparse_moe, also of routers
            names = [set(load_file(folder / "model.safetensors")) for folder in (place / "merged", made.base)]
            assert names[0] == names[1]
            assert "model.layers.0.block_sparse_moe.gate.weight" in names[0]
        plain = AutoModelForCausalLM.from_pretrained(place / "merged")
        assert type(plain) is type(made.model)
        torch.testing.assert_close(logits(plain), logits(made.model), rtol=1e-4, atol=1e-5)
        for form, library in (("adapter", "peft"), ("merged", "transformers")):
            card = (place / form / "README.md").read_text()
            head = yaml.safe_load(card.split("---")[1])
            assert (head["library_name"], head["base_model"]) == (library, "tiny/llama")
            assert str(tmp_path) not in card
            assert card.endswith("\n\n- val_loss: 1.25\n- train_token_accuracy: 0.5\n")
    narrow = export(made.folder, tmp_path / "bf16", lora="merge", dtype="bf16", check=find_export_differences)
    assert narrow.dtype == "bfloat16"
