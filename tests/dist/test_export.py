"""An exported checkpoint is the live model: plain transformers loads it, its logits are bit-equal, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.gemma3 import Gemma3Config, Gemma3ForCausalLM, Gemma3ForConditionalGeneration

from lit_fsdp import CausalLMModule, load_weights
from lit_fsdp.checkpoint.export import export
from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.checkpoint.store import save_checkpoint
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.dist.forks import Outcome, command, on_ranks
from tests.runs import content

IDS = torch.arange(24).reshape(2, 12)


@pytest.mark.parametrize(
    ("strategy", "tied"),
    [
        ({"engine": "fsdp2"}, True),
        ({"engine": "fsdp2", "state_dict": "full", "precision": "low_precision"}, False),
        ({"engine": "fsdp1", "state_dict": "full"}, True),
        ({"engine": "fsdp1", "sharding": "shard_grad_op"}, False),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "tied" if value else "untied",
)
def test_logits_of_the_live_model(
    tiny_model: Path, untied_model: Path, tmp_path: Path, strategy: dict, tied: bool
) -> None:
    folder = tiny_model if tied else untied_model
    on_ranks("train", 2, folder=folder, run=tmp_path, strategy=strategy, steps=3, every=3)
    state = torch.load(tmp_path / "live.pt", weights_only=True)
    checkpoint = tmp_path / "checkpoints" / "step-00000003"
    averages = torch.load(tmp_path / "averages.pt", weights_only=True)
    assert {tensor.dtype for tensor in averages.values()} == {torch.float32}
    live_state = state
    for dtype, ema in (("fp32", True), ("fp32", False), ("bf16", False), (None, True), (None, False)):
        out = tmp_path / f"out-{dtype}{'-ema' * ema}"
        export(checkpoint, out, dtype=dtype, ema=ema)
        state = {**live_state, **averages} if ema else live_state
        kept = torch.bfloat16 if dtype == "bf16" or ("precision" in strategy and dtype is None) else torch.float32
        loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert loaded.dtype == kept
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        live = AutoModelForCausalLM.from_pretrained(folder, dtype=kept)  # buffers stay fp32, unlike with .to()
        live.load_state_dict({name: tensor.to(kept) for name, tensor in state.items()}, strict=not tied)
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, live(IDS).logits)
    module = load_weights(CausalLMModule(name=str(folder)), checkpoint).model
    assert all(torch.equal(module.state_dict()[name], tensor.float()) for name, tensor in state.items())
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    averaged = load_weights(CausalLMModule(name=str(folder)), checkpoint, ema=True).model.state_dict()
    assert all(torch.equal(averaged[name], tensor) for name, tensor in averages.items())
    tokenizers = (AutoTokenizer.from_pretrained(tmp_path / "out-fp32"), miniature_tokenizer())
    question = [{"role": "user", "content": "2 + 2?"}]
    found, wanted = (tokenizer.apply_chat_template(question, tokenize=False) for tokenizer in tokenizers)
    assert found == wanted


def test_the_command(tiny_model: Path, tmp_path: Path) -> None:
    """It overwrites nothing, verifies, publishes nothing that differs, and the result answers through its template."""
    on_ranks("train", 2, folder=tiny_model, run=tmp_path, strategy={"engine": "fsdp2"}, steps=3, every=3)

    def export_to(out: str, *flags: str, job: str = "program") -> Outcome:
        return command(1, ["export", "--ckpt", "checkpoints/step-00000003", "--out", out, *flags], tmp_path, job)[0]

    done = export_to("out", "--dtype", "fp32")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("out: 29 tensors in float32, ")
    assert done.out.splitlines()[1:] == ["next: lit-fsdp generate --model out"]
    before = content(tmp_path / "out")
    done = export_to("out", "--dtype", "bf16")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: --out: got out\n")
    assert content(tmp_path / "out") == before
    (done,) = command(1, ["generate", "--model", "out", "--prompt", "2 + 2?", "--max_new_tokens", "3"], tmp_path)
    assert done.code == 0, done.err
    assert done.out.endswith("\n")
    assert "<|im_start|>" not in done.out

    sharded = ["--dtype", "fp16", "--max_shard_gib", "1e-4", "--verify"]
    done = export_to("good", *sharded)
    assert (done.code, done.err) == (0, "")
    assert "; verified: " in done.out
    files = {path.relative_to(tmp_path / "good").as_posix() for path in (tmp_path / "good").rglob("*")}
    shards = {name for name in files if name.endswith(".safetensors")}
    assert len(shards) > 1
    assert files - shards >= {
        *("README.md", "config.json", "generation_config.json", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    assert not [name for name in files if name.startswith(".")]
    names = sorted(path.name for path in tmp_path.iterdir())
    done = export_to("bad", *sharded, job="tampered_export")
    assert (done.code, done.out) == (1, "")
    assert "bad: not published, it differs from checkpoints/step-00000003:\n  tensor model." in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    done = export_to("bad", *sharded, "--merge")
    assert (done.code, done.out) == (2, "")
    assert "--merge: got a checkpoint without adapters" in done.err


def test_what_is_imported(tiny_model: Path, tmp_path: Path) -> None:
    """An export takes torch and little more; the start of a fit nothing that its recipe does not ask for."""
    on_ranks("train", 2, folder=tiny_model, run=tmp_path, strategy={"engine": "fsdp2"}, steps=1, every=1)
    code = """
import json, sys
from lit_fsdp.commands import run
run(["export", "--ckpt", "checkpoints/step-00000001", "--out", "out"])
exported = sorted(sys.modules)
import lit_fsdp.cli
print(json.dumps([exported, sorted(sys.modules)]), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    exported, started = map(set, json.loads(done.stderr.splitlines()[-1]))
    unused = {"datasets", "pandas", "pyarrow", "scipy", "sklearn", "tensorboard", "peft", "bitsandbytes", "gguf"}
    optional = {"matplotlib", "torchao", "triton", "torchvision", "sympy"}
    compiling = {"torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.tensor"}
    others = {"transformers", "lightning", "torchmetrics", "lit_fsdp.models.weights"}
    assert exported.isdisjoint(unused | optional | compiling | others)
    assert started.isdisjoint(unused)


TEXT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "max_position_embeddings": 64},
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}


def test_gemma_3_is_trained_and_exported_as_a_text_model(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    tokenizer = miniature_tokenizer()
    torch.manual_seed(0)
    config = Gemma3Config(text_config={**TEXT, "vocab_size": len(tokenizer)}, vision_config=VISION)
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    on_ranks("train", 2, folder=folder, run=tmp_path, strategy={"engine": "fsdp2"}, steps=3, every=3)
    export(tmp_path / "checkpoints" / "step-00000003", out, dtype="fp32")
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(loaded) is Gemma3ForCausalLM
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = torch.load(tmp_path / "live.pt", weights_only=True)
    before = whole.model.language_model.state_dict()
    assert any(not torch.equal(state[f"model.{name}"], tensor) for name, tensor in before.items())
    whole.model.language_model.load_state_dict({name: state[f"model.{name}"] for name in before})
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).logits, whole(IDS).logits)


_MIB = 2**20
_LAYERS, _ROWS, _COLUMNS = 20, 2048, 2048  # 16 MiB each in fp32, 320 MiB together

# VmHWM after an export of a tiny checkpoint is what the imports and the machinery need anyway
_MEASURE = """
import json, sys
from pathlib import Path
from lit_fsdp.checkpoint.export import export
def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:"))) * 1024
tiny, ckpt, out, dtype, shard = sys.argv[1:]
options = dict(dtype=dtype if dtype != "none" else None, max_shard_gib=float(shard))
export(Path(tiny), Path(out) / "tiny", **options)
before = peak()
plan = export(Path(ckpt), Path(out) / "big", **options)
print(json.dumps([peak() - before, plan.num_bytes]))
"""


def _save(folder: Path, layout: Any, layers: int, rows: int, columns: int) -> Path:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    manifest = {"global_step": 1, "model": {"prefix": "model.", "tied": {}}}
    one = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    tensors = {f"model/model.layers.{i:02d}.weight": one + i for i in range(layers)}
    files = {"hf/config.json": json.dumps(config).encode()}
    save_checkpoint(folder, tensors=tensors, state={}, manifest=manifest, layout=layout, files=files)
    return folder


@pytest.mark.parametrize(("layout", "dtype"), [("sharded", "none"), ("full", "bf16")])
def test_peak_memory_is_far_below_the_models_size(tmp_path: Path, layout: str, dtype: str) -> None:
    tiny = _save(step_folder(tmp_path / "tiny", 1), layout, 2, 4, 4)
    big = _save(step_folder(tmp_path / "big", 1), layout, _LAYERS, _ROWS, _COLUMNS)
    words = [sys.executable, "-c", _MEASURE, *map(str, (tiny, big, tmp_path / "out", dtype, 0.05))]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    grown, written = json.loads(done.stdout.splitlines()[-1])
    assert written == _LAYERS * _ROWS * _COLUMNS * (2 if dtype == "bf16" else 4)
    assert grown < 250 * _MIB, f"grew by {grown / _MIB:.0f} MiB"  # half of what is promised; the model is 320 MiB
