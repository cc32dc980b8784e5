"""An exported checkpoint is the live model: plain transformers loads it, and its logits are bit-equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from lit_fsdp import CausalLMModule
from lit_fsdp.checkpoint.export import export
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.dist.forks import Outcome, command, on_ranks
from tests.dist.reference import TINY

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
    for dtype in ("fp32", "bf16", None):
        out = tmp_path / f"out-{dtype}"
        export(checkpoint, out, dtype=dtype)
        kept = torch.bfloat16 if dtype == "bf16" or ("precision" in strategy and dtype is None) else torch.float32
        loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert loaded.dtype == kept
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        live = AutoModelForCausalLM.from_pretrained(folder, dtype=kept)  # buffers stay fp32, unlike with .to()
        live.load_state_dict({name: tensor.to(kept) for name, tensor in state.items()}, strict=not tied)
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, live(IDS).logits)
    module = CausalLMModule.load_from_checkpoint(checkpoint, name=str(folder)).model
    assert all(torch.equal(module.state_dict()[name], tensor.float()) for name, tensor in state.items())
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out-fp32")
    question = [{"role": "user", "content": "2 + 2?"}]
    assert tokenizer.apply_chat_template(question, tokenize=False) == miniature_tokenizer().apply_chat_template(
        question, tokenize=False
    )


def test_the_command(tiny_model: Path, tmp_path: Path) -> None:
    """It overwrites nothing, verifies, publishes nothing that differs, and the result answers through its template."""
    on_ranks("train", 2, folder=tiny_model, run=tmp_path, strategy={"engine": "fsdp2"}, steps=3, every=3)

    def export_to(out: str, *flags: str, job: str = "program") -> Outcome:
        return command(1, ["export", "--ckpt", "checkpoints/step-00000003", "--out", out, *flags], tmp_path, job)[0]

    done = export_to("out", "--dtype", "fp32")
    assert (done.code, done.err) == (0, "")
    num_params = sum(p.numel() for p in LlamaForCausalLM(TINY).parameters()) / 1e6
    assert done.out.startswith(f"out: 29 tensors in float32, {num_params:.1f}M parameters, 0.00 GiB, 1 tied name")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    done = export_to("out", "--dtype", "bf16")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: out: got out\n")
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
    (done,) = command(1, ["generate", "--model", "out", "--prompt", "2 + 2?", "--max_new_tokens", "3"], tmp_path)
    assert done.code == 0, done.err
    assert done.out.endswith("\n")
    assert "<|im_start|>" not in done.out

    sharded = ["--dtype", "fp16", "--max_shard_gib", "1e-4", "--verify"]
    done = export_to("good", *sharded)
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("verified: loaded again, keys, tensors and logits are equal\n")
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
