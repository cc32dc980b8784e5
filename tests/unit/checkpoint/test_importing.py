"""Sources that do not fit, are damaged or mean harm; optimizers whose parameters have only numbers."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

from lit_fsdp.checkpoint.importing.convert import Choices, ImportReport, import_checkpoint
from lit_fsdp.checkpoint.importing.names import Target
from lit_fsdp.checkpoint.store import load_rank_state, load_state, verify_files
from lit_fsdp.errors import CheckpointError

SHAPES = {"embed.weight": (6, 4), "a.weight": (4, 4), "a.bias": (4,), "b.weight": (4, 4), "b.bias": (4,)}
TARGET = Target(
    shapes=SHAPES,
    parameters=frozenset(SHAPES),
    ties={"head.weight": "embed.weight"},
    files={"hf/config.json": b"{}"},
)
WEIGHTS = {name: torch.randn(shape, generator=torch.Generator().manual_seed(3)) for name, shape in SHAPES.items()}
Run = Callable[..., ImportReport]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Imports something to ``tmp_path/out``, which appears only if it succeeds."""

    def call(source: Path, **choices: Any) -> ImportReport:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        try:
            return import_checkpoint(source, out, TARGET, Choices(**choices))
        except BaseException:
            assert not out.exists()
            assert not list(tmp_path.glob(".out*"))
            raise

    return call


def adam_state(groups: list[list[str]], numbers: list[list[int]] | None = None, **extra: Any) -> dict[str, Any]:
    """A state as ``AdamW.state_dict()`` gives it, each moment marked by its parameter."""
    order = [name for group in groups for name in group]
    numbers = numbers or [[order.index(name) for name in group] for group in groups]
    by_number = dict(zip([n for group in numbers for n in group], order, strict=True))
    state = {
        n: {
            "step": torch.tensor(4.0),
            "exp_avg": torch.full(SHAPES[name], float(list(SHAPES).index(name))),
            "exp_avg_sq": torch.full(SHAPES[name], 10.0 + list(SHAPES).index(name)),
        }
        for n, name in by_number.items()
    }
    return {"state": state, "param_groups": [{"params": group, "lr": 0.5, **extra} for group in numbers]}


def lightning_file(path: Path, weights: dict[str, torch.Tensor] | None = None, **content: Any) -> Path:
    state = {f"net.{name}": tensor for name, tensor in (weights or WEIGHTS).items()}
    torch.save({"state_dict": state, "global_step": 4, **content}, path)
    return path


def check_moments(out: Path) -> None:
    found = load_file(out / "tensors.safetensors")
    for index, name in enumerate(SHAPES):
        assert torch.equal(found[f"optim/model.{name}/exp_avg"], torch.full(SHAPES[name], float(index))), name
        assert torch.equal(found[f"optim/model.{name}/exp_avg_sq"], torch.full(SHAPES[name], 10.0 + index)), name


ALL = list(SHAPES)
MATRICES, VECTORS = [n for n in ALL if len(SHAPES[n]) == 2], [n for n in ALL if len(SHAPES[n]) == 1]


@pytest.mark.parametrize(
    ("groups", "numbers"),
    [
        ([ALL], None),
        ([MATRICES, VECTORS], None),
        ([VECTORS, MATRICES], None),
        ([MATRICES, VECTORS], [[0, 1, 3], [2, 4]]),  # FSDP numbers by the model's order, whatever the groups
        ([["embed.weight"], MATRICES[1:], VECTORS], None),
    ],
)
def test_numbered_parameters_are_told_apart(run: Run, tmp_path: Path, groups: Any, numbers: Any) -> None:
    source = lightning_file(tmp_path / "a.ckpt", optimizer_states=[adam_state(groups, numbers)])
    report = run(source)
    assert (len(report.optimizer.state), report.optimizer.num_dropped) == (5, 0)
    check_moments(tmp_path / "out")


def test_a_file_of_torch_before_its_zip_format(run: Run, tmp_path: Path) -> None:
    content = {"state_dict": WEIGHTS, "global_step": 2, "optimizer_states": [adam_state([ALL])]}
    torch.save(content, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert run(tmp_path / "old.ckpt").step == 2
    check_moments(tmp_path / "out")


def test_names_of_parameters_win_over_their_order(run: Run, tmp_path: Path) -> None:
    order = ["b.weight", "a.weight", "embed.weight", "b.bias", "a.bias"]
    state = adam_state([order])
    state["param_groups"][0]["param_names"] = [f"net._orig_mod.{name}" for name in order]
    assert run(lightning_file(tmp_path / "a.ckpt", optimizer_states=[state])).step == 4
    check_moments(tmp_path / "out")


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (adam_state([["a.weight", "a.bias"], ["embed.weight", "b.weight", "b.bias"]]), "the shapes of its state"),
        (adam_state([["embed.weight", "a.weight", "a.bias"]]), "numbers 3 parameters and the model has 5"),
        (adam_state([["a.weight", *[n for n in ALL if n != "a.weight"]]]), "the shapes of its state"),
        (
            {"state": {0: {"momentum_buffer": torch.zeros(6, 4)}}, "param_groups": [{"params": [0, 1, 2, 3, 4]}]},
            "AdamW",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_told_apart_is_dropped_and_counted(
    run: Run, tmp_path: Path, state: dict[str, Any], why: str
) -> None:
    report = run(lightning_file(tmp_path / "a.ckpt", optimizer_states=[state]))
    assert report.optimizer.num_dropped == len(state["state"]) > 0
    assert why in report.optimizer.why
    assert f"NOT imported: the state of {len(state['state'])} parameters" in str(report)
    assert load_file(tmp_path / "out" / "tensors.safetensors").keys() == {f"model/model.{name}" for name in SHAPES}


def test_a_parameter_never_stepped_begins_at_zero(run: Run, tmp_path: Path) -> None:
    state = adam_state([ALL])
    del state["state"][2]
    report = run(lightning_file(tmp_path / "a.ckpt", optimizer_states=[state]))
    assert report.optimizer.num_fresh == 1
    found = load_file(tmp_path / "out" / "tensors.safetensors")
    assert not found["optim/model.a.bias/exp_avg"].any()
    assert float(found["optim/model.a.bias/step"]) == 0


def test_what_is_written(run: Run, tmp_path: Path) -> None:
    wrapped = {
        f"_forward_module.module.{n.replace('a.', 'a._checkpoint_wrapped_module.')}": t for n, t in WEIGHTS.items()
    }
    torch.save(
        {"state_dict": {**wrapped, "_forward_module.module.head.weight": WEIGHTS["embed.weight"]}, "global_step": 9},
        tmp_path / "x",
    )
    report = run(tmp_path / "x", dtype="bf16")
    assert (report.step, report.prefix, report.optimizer.why) == (9, "module.", "the source has none")
    verify_files(tmp_path / "out")
    state = load_state(tmp_path / "out")
    assert (state["global_step"], state["lr_schedulers"][0]["last_epoch"]) == (9, 9)
    assert load_rank_state(tmp_path / "out", 0) is None
    found = load_file(tmp_path / "out" / "tensors.safetensors")
    assert torch.equal(found["model/model.a.weight"], WEIGHTS["a.weight"].bfloat16())
    assert (tmp_path / "out" / "hf" / "config.json").read_bytes() == b"{}"


def test_every_name_that_does_not_fit_is_listed(run: Run, tmp_path: Path) -> None:
    weights = {name: t for name, t in WEIGHTS.items() if name not in ("a.bias", "b.bias")}
    source = lightning_file(tmp_path / "a.ckpt", {**weights, "extra.x": torch.ones(1), "b.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError) as caught:
        run(source)
    text = str(caught.value)
    for line in (
        "missing in the source: net.a.bias",
        "missing in the source: net.b.bias",
        "no place in the model: net.extra.x",
    ):
        assert line in text
    assert "b.weight: [2, 2] in the source, [4, 4] in the model" in text
    source = lightning_file(tmp_path / "b.ckpt", {**WEIGHTS, "extra.x": torch.ones(1)})
    with pytest.raises(CheckpointError, match="--allow-surplus"):
        run(source)
    assert run(source, allow_surplus=True).surplus == ["net.extra.x"]


def test_a_second_copy_of_the_model_needs_a_prefix(run: Run, tmp_path: Path) -> None:
    both = {f"{kind}.{name}": t + (kind == "ema") for name, t in WEIGHTS.items() for kind in ("net", "ema")}
    torch.save({"state_dict": both, "global_step": 1}, tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"2 times, under 'ema\.', 'net\.'; say which one with --prefix"):
        run(tmp_path / "x")
    assert len(run(tmp_path / "x", prefix="ema.", allow_surplus=True).surplus) == 5
    found = load_file(tmp_path / "out" / "tensors.safetensors")
    assert torch.equal(found["model/model.a.bias"], WEIGHTS["a.bias"] + 1)


def test_tied_weights_that_differ_are_refused(run: Run, tmp_path: Path) -> None:
    source = lightning_file(tmp_path / "a.ckpt", {**WEIGHTS, "head.weight": torch.ones(6, 4)})
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        run(source)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def sharded(folder: Path, **state: Any) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("place", ["ckpt", "bin", "optimizer", "metadata", "meta", "shard", "legacy"])
def test_malice_is_refused_and_never_run(run: Run, tmp_path: Path, place: str) -> None:
    marker, source = tmp_path / "executed", tmp_path / "source"
    evil = Evil(marker)
    if place in ("ckpt", "legacy"):
        content = {"state_dict": WEIGHTS, "global_step": 1, "callbacks": evil}
        torch.save(content, source, _use_new_zipfile_serialization=place == "ckpt")
    elif place in ("bin", "optimizer"):
        source.mkdir()
        torch.save(evil if place == "bin" else WEIGHTS, source / "pytorch_model_fsdp.bin")
        torch.save(evil, source / "optimizer.bin")
    else:
        sharded(source, state_dict=WEIGHTS)
        torch.save(evil if place == "meta" else {"global_step": 1}, source / "meta.pt")
        if place == "metadata":
            (source / ".metadata").write_bytes(pickle.dumps(evil))
        if place == "shard":
            file = source / "__0_0.distcp"
            size = file.stat().st_size
            file.write_bytes(pickle.dumps(evil).ljust(size, b"\0"))
    with pytest.raises(CheckpointError, match=r"refused|damaged"):
        run(source)
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_no_source(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    good = lightning_file(tmp_path / "good.ckpt")
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(good.read_bytes()[:-500])
    garbage = tmp_path / "model.safetensors"
    garbage.write_bytes((1 << 40).to_bytes(8, "little") + b"{not json")
    shards = sharded(tmp_path / "shards", state_dict=WEIGHTS)
    torch.save({"global_step": 1}, shards / "meta.pt")
    assert run(shards).step == 1
    (shards / "__0_0.distcp").write_bytes((shards / "__0_0.distcp").read_bytes()[:-100])
    save_file(WEIGHTS, tmp_path / "plain.safetensors")
    lone = tmp_path / "hf"
    lone.mkdir()
    save_file(WEIGHTS, lone / "model.safetensors")
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    (ranks / "pytorch_model_fsdp_0_rank0.bin").touch()
    for source, choices, text in [
        (tmp_path / "nothing", {}, "does not exist"),
        (empty, {}, "no model of Accelerate or the Trainer in it; there is: nothing"),
        (cut, {}, "damaged"),
        (garbage, {}, "not a readable safetensors file"),
        (shards, {}, "was cut short"),
        (good, {"kind": "accelerate"}, "no tensors: "),
        (tmp_path / "plain.safetensors", {"kind": "lightning"}, r"plain\.safetensors: "),
        (lone, {}, "give it as model.name"),
        (lone, {"kind": "lightning"}, "meta.pt"),
        (ranks, {}, "only the same ranks can put together"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            run(source, **choices)
    assert run(tmp_path / "plain.safetensors", step=3).step == 3
    assert run(lone, kind="accelerate").step == 0
    with pytest.raises(CheckpointError, match="a lit_fsdp checkpoint already"):
        import_checkpoint(tmp_path / "out", tmp_path / "again", TARGET, Choices())
