"""Sources that do not fit, are damaged or mean harm; optimizers whose parameters have names or only numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

from lit_fsdp.checkpoint.importing import import_checkpoint, open_source
from lit_fsdp.errors import CheckpointError

SHAPES = {"embed.weight": (6, 4), "a.weight": (4, 4), "a.bias": (4,), "b.weight": (4, 4), "b.bias": (4,)}
TARGET: Any = (SHAPES, {"head.weight": "embed.weight"}, {"hf/config.json": b"{}"}, {})
WEIGHTS = {name: torch.randn(shape, generator=torch.Generator().manual_seed(3)) for name, shape in SHAPES.items()}
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Imports something to ``tmp_path/out``, which appears only if it succeeds."""

    def call(source: Path, **choices: Any) -> str:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        try:
            return import_checkpoint(open_source(source), out, *TARGET, **choices)
        except BaseException:
            assert not out.exists()
            assert not list(tmp_path.glob(".out*"))
            raise

    return call


def adam_state(**group: Any) -> dict[str, Any]:
    """A state as ``AdamW.state_dict()`` gives it, each moment marked by its parameter."""
    state = {
        n: {"step": torch.tensor(4.0), "exp_avg": torch.full(shape, n * 1.0), "exp_avg_sq": torch.full(shape, n + 10.0)}
        for n, shape in enumerate(SHAPES.values())
    }
    return {"state": state, "param_groups": [{"params": list(state), "lr": 0.5, **group}]}


def lightning_file(path: Path, weights: dict[str, torch.Tensor] | None = None, **content: Any) -> Path:
    state = {f"net.{name}": tensor for name, tensor in (weights or WEIGHTS).items()}
    torch.save({"state_dict": state, "global_step": 4, **content}, path)
    return path


NAMED = {"param_names": [f"net._orig_mod.{name}" for name in SHAPES]}


def test_an_optimizer_that_cannot_be_told_apart_is_left_out_and_says_so(run: Run, tmp_path: Path) -> None:
    sgd = {"state": {0: {"momentum_buffer": torch.zeros(6, 4)}}, "param_groups": [{"params": [0, 1, 2, 3, 4], **NAMED}]}
    some = adam_state(**NAMED)
    del some["state"][2]  # never stepped
    for state, number in (
        (some, 4),
        (adam_state(), 0),  # numbers, not names
        (sgd, 0),
        (adam_state(param_names=NAMED["param_names"][::-1]), 0),  # of other shapes
        (adam_state(param_names=[f"other.{name}" for name in SHAPES]), 0),
    ):
        report = run(lightning_file(tmp_path / "a.ckpt", optimizer_states=[state]))
        assert f"step 4, 5 weights, AdamW state of {number} of them" in report
        names = load_file(tmp_path / "out" / "tensors.safetensors").keys()
        assert names >= {f"model/model.{name}" for name in SHAPES}
        assert len(names) == 5 + 3 * number


def test_every_name_that_does_not_fit_is_listed(run: Run, tmp_path: Path) -> None:
    weights = {name: t for name, t in WEIGHTS.items() if name not in ("a.bias", "b.bias")}
    source = lightning_file(tmp_path / "a.ckpt", {**weights, "extra.x": torch.ones(1), "b.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError) as caught:
        run(source)
    text = str(caught.value)
    for line in (
        "missing in the source: net.a.bias",
        "missing in the source: net.b.bias",
        "not in the model (--allow-surplus ignores it): net.extra.x",
    ):
        assert line in text
    assert "b.weight: [2, 2] in the source, [4, 4] in the model" in text
    source = lightning_file(tmp_path / "b.ckpt", {**WEIGHTS, "extra.x": torch.ones(1)})
    assert run(source, allow_surplus=True).endswith("\n  left out: net.extra.x")
    of_adapter: Any = (*TARGET[:3], {"adapter": {"r": 2}})
    with pytest.raises(CheckpointError, match=r"merge them with peft first, .*: net\.extra\.x$") as caught:
        import_checkpoint(open_source(source), tmp_path / "new", *of_adapter)
    assert "--allow-surplus" not in str(caught.value)


def test_a_second_copy_of_the_model_needs_a_prefix(run: Run, tmp_path: Path) -> None:
    both = {f"{kind}.{name}": t + (kind == "ema") for name, t in WEIGHTS.items() for kind in ("net", "ema")}
    torch.save({"state_dict": both, "global_step": 1}, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"2 times, under 'ema\.', 'net\.'; select one with --prefix"):
        run(tmp_path / "x")
    assert run(tmp_path / "x", prefix="ema.", allow_surplus=True).count("left out: net.") == 5
    found = load_file(tmp_path / "out" / "tensors.safetensors")
    assert torch.equal(found["model/model.a.bias"], WEIGHTS["a.bias"] + 1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_no_source_or_ties_what_differs(run: Run, tmp_path: Path) -> None:
    empty, lone, cut, garbage = (tmp_path / name for name in ("empty", "hf", "cut.ckpt", "model.safetensors"))
    empty.mkdir()
    lone.mkdir()
    save_file(WEIGHTS, lone / "model.safetensors")
    cut.write_bytes(lightning_file(tmp_path / "good.ckpt").read_bytes()[:-500])
    (tmp_path / "text.ckpt").write_text("hello")
    garbage.write_bytes((1 << 40).to_bytes(8, "little") + b"{not json")
    shards = tmp_path / "shards"
    dcp.save({"state_dict": WEIGHTS}, checkpoint_id=shards, no_dist=True)
    torch.save({"global_step": 1}, shards / "meta.pt")
    assert "step 1, " in run(shards)
    (shards / "__0_0.distcp").write_bytes((shards / "__0_0.distcp").read_bytes()[:-100])
    for source, text in (
        (tmp_path / "gone", "gone does not exist"),
        (empty, "not a checkpoint of Lightning, Accelerate or the Trainer: empty"),
        (cut, "damaged"),
        (tmp_path / "text.ckpt", r"text\.ckpt: damaged, or not a file of torch\.save in its zip format [^_]*$"),
        (garbage, "not a readable safetensors file"),
        (shards, "damaged"),
        (lightning_file(tmp_path / "b.ckpt", {**WEIGHTS, "head.weight": torch.ones(6, 4)}), "tie_word_embeddings"),
        (lone, r"model\.safetensors; use a model without training state as model\.name"),
    ):
        with pytest.raises(CheckpointError, match=text):
            run(source)
    assert "step 0, " in run(lone / "model.safetensors")
