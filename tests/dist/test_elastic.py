"""A run goes on from any checkpoint: other ranks, sharding, engine, accumulation; the same rows, the same state."""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config

from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.run_folder import checkpoints, choose
from lit_fsdp.config.model import OptimConfig, schedule_factor
from tests.dist.elastic_jobs import ROWS, STEPS_PER_EPOCH
from tests.dist.forks import on_ranks
from tests.dist.reference import save_tiny
from tests.runs import MORE
from tests.unit.data.conversations import say

MIDDLE, END = 3, STEPS_PER_EPOCH  # of the first epoch; its last global batch is short
AFTER = 20 if os.environ.get("LIT_FSDP_LONG") else 8  # steps that are compared, into the second epoch and the third
STEPS = END + AFTER
KEYS = ("engine", "sharding", "ranks", "micro", "num_workers")
Results = list[dict[str, Any]]
SAVING: dict[str, dict[str, Any]] = {
    "a": {"engine": "fsdp2", "sharding": "full_shard", "ranks": 2, "micro": 2, "kind": "ours", "layout": "sharded"},
    "b": {"engine": "fsdp1", "sharding": "shard_grad_op", "ranks": 4, "micro": 2, "kind": "groups", "layout": "full"},
    "c": {"engine": "fsdp2", "sharding": "hybrid_shard", "ranks": 4, "micro": 2, "kind": "frozen", "layout": "sharded"},
    "d": {"engine": "fsdp1", "sharding": "no_shard", "ranks": 2, "micro": 1, "kind": "gpt2", "layout": "sharded"},
    "e": {"engine": "single", "sharding": "no_shard", "ranks": 1, "micro": 4, "kind": "gpt2", "layout": "sharded"},
    "f": {"engine": "ddp", "sharding": "no_shard", "ranks": 2, "micro": 4, "kind": "ours", "layout": "full"},
    "g": {"engine": "fsdp1", "sharding": "full_shard", "ranks": 1, "micro": 2, "kind": "frozen", "layout": "full"},
}


# from, cut, and how it goes on: engine, sharding, ranks, micro-batch size, loader workers
CASES: list[tuple[str, int, str, str, int, int, int]] = [
    ("a", MIDDLE, "fsdp1", "full_shard", 4, 2, 0),
    ("a", END, "single", "no_shard", 1, 4, 2),
    ("b", MIDDLE, "fsdp2", "hybrid_shard", 4, 2, 0),
    ("b", END, "ddp", "no_shard", 2, 2, 0),
    ("c", END, "fsdp2", "full_shard", 1, 4, 0),
    ("d", MIDDLE, "fsdp2", "shard_grad_op", 2, 4, 0),
    ("e", END, "fsdp2", "no_shard", 2, 2, 0),
    ("f", END, "fsdp1", "hybrid_shard", 4, 1, 0),
    ("g", MIDDLE, "fsdp2", "no_shard", 4, 2, 0),
]
SHORT = {("a", MIDDLE), ("a", END), ("b", END), ("c", END)}  # in `make test`: to each engine, and to 1, 2 and 4 ranks


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 whose rows divide by neither 2 nor 4, tied, with biases."""
    config = GPT2Config(vocab_size=321, n_positions=41, n_embd=34, n_layer=2, n_head=2)
    config.update({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    return save_tiny(tmp_path_factory.mktemp("gpt2") / "model", config, seed=1)


@pytest.fixture(scope="module")
def go(tiny_model: Path, dropout_model: Path, gpt2: Path) -> Callable[..., Results]:
    """One run of the choices of a saving or a resumed run; ``dropout`` makes the random state matter."""

    def run(
        folder: Path, choices: dict[str, Any], kind: str, steps: int, dropout: bool = False, **more: Any
    ) -> Results:
        strategy = {name: choices[name] for name in ("engine", "sharding", "precision") if name in choices}
        strategy["state_dict"] = choices.get("layout", "sharded")
        if choices["sharding"] == "hybrid_shard":
            strategy["replicate_degree"] = 2
        model = gpt2 if kind == "gpt2" else dropout_model if dropout else tiny_model
        job = {"folder": model, "kind": "ours" if kind == "gpt2" else kind, "strategy": strategy, "steps": steps}
        job |= {"micro": choices["micro"], "run": folder}
        job["data"] = {"num_workers": choices.get("num_workers", 0), **choices.get("data", {})}
        return on_ranks("elastic_run", choices["ranks"], **job, **more)

    return run


@pytest.fixture(scope="module")
def saved(
    go: Callable[..., Results], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Results]]:
    """The uninterrupted run of a name, made once, which saves in the middle and at the end of its first epoch."""

    @functools.cache
    def run(name: str) -> tuple[Path, Results]:
        folder = tmp_path_factory.mktemp(name) / "run"
        return folder, go(folder, SAVING[name], SAVING[name]["kind"], STEPS, save_at=[MIDDLE, END])

    return run


def global_batches(results: Results) -> dict[int, list[int]]:
    """Sorted row ids of each step over all ranks and micro-batches, without fillers."""
    found: dict[int, list[int]] = {}
    for rank in results:
        for step, rows in rank["rows"]:
            found.setdefault(step, []).extend(row for row in rows if row >= 0)
    return {step: sorted(rows) for step, rows in found.items()}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id="-".join(map(str, case)), marks=[MORE] * (case[:2] not in SHORT)) for case in CASES],
)
def test_another_topology(go: Callable[..., Results], saved: Callable[..., Any], tmp_path: Path, case: Any) -> None:
    name, cut, *choices = case
    folder, whole = saved(name)
    path = folder / "checkpoints" / f"step-{cut:08d}"
    topology = dict(zip(KEYS, choices, strict=True))
    after = go(tmp_path / "run", topology, SAVING[name]["kind"], cut + AFTER, ckpt_path=path)
    state, wanted = after[0]["states"][str(cut)], whole[0]["states"][str(cut)]
    assert {name for name in {**state, **wanted} if state.get(name) != wanted.get(name)} == set()
    batches = {step: rows for step, rows in global_batches(whole).items() if step < cut}
    batches |= global_batches(after)
    assert batches == {step: rows for step, rows in global_batches(whole).items() if step < cut + AFTER}
    for first in range(0, len(batches) - STEPS_PER_EPOCH + 1, STEPS_PER_EPOCH):  # each row once per whole epoch
        seen = Counter(itertools.chain(*(batches[first + i] for i in range(STEPS_PER_EPOCH))))
        assert seen == Counter(range(ROWS))
    losses = whole[0]["losses"][cut : cut + AFTER]
    assert after[0]["losses"][0] == pytest.approx(losses[0], rel=1e-6)
    assert after[0]["losses"] == pytest.approx(losses, rel=1e-4)
    assert after[0]["rates"] == whole[0]["rates"][cut : cut + AFTER]


SAME: dict[str, dict[str, Any]] = {
    "fsdp2": {"sharding": "full_shard", "ranks": 2, "kind": "groups", "num_workers": 2},
    "fsdp1": {"sharding": "hybrid_shard", "ranks": 4, "kind": "frozen", "layout": "full"},
    "fsdp1 in bf16": {"sharding": "shard_grad_op", "ranks": 2, "precision": "low_precision", "cuts": [END]},
    "ddp": {"sharding": "no_shard", "ranks": 2, "precision": "mixed", "cuts": [MIDDLE, END]},
}


@pytest.mark.parametrize("name", ["fsdp2", "fsdp1", *(pytest.param(name, marks=MORE) for name in list(SAME)[2:])])
def test_the_same_topology_is_bit_equal(go: Callable[..., Results], tmp_path: Path, name: str) -> None:
    """Losses, learning rates, parameters, optimizer tensors and the rows of every rank, with dropout."""
    choices = {"engine": name.partition(" ")[0], "micro": 2, "kind": "ours", **SAME[name]}
    cuts = choices.get("cuts", [MIDDLE])
    job = {"kind": choices["kind"], "dropout": True, "steps": cuts[-1] + AFTER}
    whole = go(tmp_path / "whole", choices, save_at=cuts, **job)
    for cut in cuts:
        path = tmp_path / "whole" / "checkpoints" / f"step-{cut:08d}"
        after = go(tmp_path / str(cut), choices, ckpt_path=path, **job)
        for before, now in zip(whole, after, strict=True):
            assert len(now["losses"]) == cuts[-1] + AFTER - cut
            assert now["losses"] == before["losses"][cut:]
            assert now["rates"] == before["rates"][cut:]
            assert now["rows"] == [entry for entry in before["rows"] if entry[0] >= cut]
            assert now["digest"] == before["digest"]
            stored = {"bf16"} if choices.get("precision") == "low_precision" else {"fp32"}
            assert set(now["realized"]["parameters after resume"]) == stored
            assert set(now["realized"]["optimizer state after resume"]) == stored


FOUR = {"engine": "fsdp2", "sharding": "full_shard", "ranks": 2, "micro": 1}  # micro-batches per step
CUT: dict[str, Any] = {"kind": "ours", "dropout": True, "steps": 5}


def test_the_middle_of_an_accumulation(go: Callable[..., Results], tmp_path: Path) -> None:
    """On a signal the global batch is finished, saved, and no row of it comes again: on other ranks too.

    Without one nothing is kept of a global batch: it is run again as a whole, with the same random numbers.
    """
    uncut = go(tmp_path / "uncut", FOUR, **CUT)
    cut = go(tmp_path / "cut", FOUR, interrupt=[6, "signal"], **CUT)
    assert [rank["stopped"] for rank in cut] == [[75, 2]] * 2
    (path,) = (tmp_path / "cut" / "checkpoints").iterdir()
    assert path.name == "step-00000002"
    same = go(tmp_path / "same", FOUR, ckpt_path=path, **CUT)
    assert same[0]["losses"] == uncut[0]["losses"][2:]
    assert [a["rows"] + b["rows"] for a, b in zip(cut, same, strict=True)] == [rank["rows"] for rank in uncut]
    other = go(tmp_path / "other", {**FOUR, "ranks": 1, "micro": 4}, ckpt_path=path, **CUT)
    assert global_batches(cut) | global_batches(other) == global_batches(uncut)
    assert min(global_batches(other)) == 2
    cut = go(tmp_path / "ended", FOUR, interrupt=[6, "raise"], save_at=[1], **CUT)
    assert [rank["stopped"] for rank in cut] == [["killed here", 1]] * 2
    assert [step for step, _ in cut[0]["rows"]] == [0, 0, 0, 0, 1]
    after = go(tmp_path / "after", FOUR, ckpt_path=tmp_path / "ended" / "checkpoints" / "step-00000001", **CUT)
    for before, now in zip(uncut, after, strict=True):
        assert now["rows"] == before["rows"][4:]
        assert (now["losses"], now["digest"]) == (before["losses"][1:], before["digest"])


def test_turns_that_are_samples_of_their_own(go: Callable[..., Results], tmp_path: Path) -> None:
    """Without those of ``val_split`` each is seen once per epoch, on other ranks in the same global batches."""
    talks = [say(*(part for turn in range(1 + n % 3) for part in (f"u:{n}", f"a:{turn}"))) for n in range(20)]
    rows = "\n".join(json.dumps({"messages": talk}) for talk in talks * 2)
    (tmp_path / "rows.jsonl").write_text(rows)
    data = {"train": str(tmp_path / "rows.jsonl"), "split_turns": True, "val_split": 6, "max_seq_length": 64}
    two = go(tmp_path / "two", {**FOUR, "data": data}, save_at=[2], kind="ours", steps=9)
    path = tmp_path / "two" / "checkpoints" / "step-00000002"
    one = go(tmp_path / "one", {**FOUR, "ranks": 1, "micro": 4, "data": data}, ckpt_path=path, kind="ours", steps=9)
    batches = global_batches(two)
    assert global_batches(one) == {step: rows for step, rows in batches.items() if step >= 2}
    assert one[0]["losses"] == pytest.approx(two[0]["losses"][2:], rel=1e-4)
    assert sorted(itertools.chain(*(batches[step] for step in range(8)))) == list(range(62))  # 78, and 16 of validation


@pytest.mark.parametrize(
    ("engine", "accumulate", "first_step"), [("fsdp2", 1, 4), pytest.param("fsdp1", 3, 1, marks=MORE)]
)  # (3, 1): inside the second accumulation
def test_from_the_best_validation(
    dropout_model: Path, tmp_path: Path, engine: str, accumulate: int, first_step: int
) -> None:
    """A validation that beats all before is saved with its metrics, and a run goes on from there bit-equal."""
    job = {"folder": dropout_model, "strategy": {"engine": engine}, "val_check_interval": 4}
    job |= {"accumulate_grad_batches": accumulate}
    (whole, _) = on_ranks("train", 2, run=tmp_path / "whole", **job)
    found = checkpoints(tmp_path / "whole")
    assert next(entry.step for entry in found if "val_loss" in entry.metrics) == first_step
    losses = [entry.metrics["val_loss"] for entry in found if "val_loss" in entry.metrics]
    assert losses == sorted(losses, reverse=True)  # only what was better is saved
    top = choose("best", tmp_path / "whole", "val_loss", "min")[0]
    assert read_manifest(top).metrics["val_loss"] == losses[-1]
    (after, _) = on_ranks("train", 2, run=tmp_path / "cut", ckpt_path=found[0].path, **job)
    assert after["losses"] == whole["losses"][first_step:]
    assert after["digest"] == whole["digest"]


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_what_the_recipe_says_holds_from_the_first_step(tiny_model: Path, tmp_path: Path, engine: str) -> None:
    before = {"lr": 1e-3, "weight_decay": 0.1, "schedule": "cosine"}
    after = {"lr": 2e-3, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.7, "eps": 1e-6, "schedule": "linear"}
    job = {"folder": tiny_model, "run": tmp_path, "strategy": {"engine": engine, "precision": "fp32"}}
    on_ranks("train", 2, optim=before, steps=2, **job)  # at its end the learning rate is 0
    steps = on_ranks("train", 2, optim=after, steps=4, ckpt_path="last", **job)[0]["groups"]
    optim = OptimConfig(**after)
    assert [{group["lr"] for group in step} for step in steps] == [
        {optim.lr * schedule_factor(optim, step, 4)} for step in (2, 3)
    ]
    for step in steps:
        assert [group["weight_decay"] for group in step] == [0.3, 0.0]
        assert {(*group["betas"], group["eps"], group["fused"]) for group in step} == {(0.8, 0.7, 1e-6, True)}
