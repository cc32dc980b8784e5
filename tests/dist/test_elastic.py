"""A run goes on from any checkpoint: other ranks, sharding, engine, accumulation; the same rows, the same state.

Saving runs and the runs that resume them are paired so that every pair of their choices occurs (see
:func:`tests.dist.matrix.cover`), not the full product.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dist.elastic_jobs import GLOBAL_BATCH, ROWS, STEPS_PER_EPOCH
from tests.dist.matrix import cover
from tests.dist.workers import Workers

MIDDLE, END = 3, STEPS_PER_EPOCH  # of the first epoch; its last global batch is short
STEPS = END + 20
Results = list[dict[str, Any]]
SAVING: dict[str, dict[str, Any]] = {
    "a": {"engine": "fsdp2", "sharding": "full_shard", "ranks": 2, "micro": 2, "kind": "ours", "layout": "sharded"},
    "b": {"engine": "fsdp1", "sharding": "shard_grad_op", "ranks": 4, "micro": 1, "kind": "groups", "layout": "full"},
    "c": {"engine": "fsdp2", "sharding": "hybrid_shard", "ranks": 4, "micro": 2, "kind": "frozen", "layout": "sharded"},
    "d": {"engine": "fsdp1", "sharding": "no_shard", "ranks": 2, "micro": 1, "kind": "gpt2", "layout": "sharded"},
    "e": {"engine": "single", "sharding": "no_shard", "ranks": 1, "micro": 4, "kind": "gpt2", "layout": "sharded"},
    "f": {"engine": "ddp", "sharding": "no_shard", "ranks": 2, "micro": 4, "kind": "ours", "layout": "full"},
    "g": {"engine": "fsdp1", "sharding": "full_shard", "ranks": 1, "micro": 1, "kind": "frozen", "layout": "full"},
}


def targets() -> list[dict[str, Any]]:
    """Engine, sharding, ranks and micro-batch size to go on with."""
    found = []
    engines = [("fsdp1", s) for s in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")]
    engines += [("fsdp2", s) for _, s in engines] + [("ddp", "no_shard"), ("single", "no_shard")]
    for (engine, sharding), ranks, micro in itertools.product(engines, (1, 2, 4), (1, 2, 4)):
        fits = GLOBAL_BATCH % (ranks * micro) == 0
        if fits and (sharding != "hybrid_shard" or ranks == 4) and (engine != "single" or ranks == 1):
            found.append({"engine": engine, "sharding": sharding, "ranks": ranks, "micro": micro})
    return found


def pairs(case: dict[str, Any]) -> set[Any]:
    """Of a choice of the saving run with one of the resumed run; and every topology of the resumed run."""
    before = {name: case["before"][name] for name in ("engine", "sharding", "ranks", "kind")} | {"cut": case["cut"]}
    after = {name: case[name] for name in ("engine", "sharding", "ranks", "micro", "num_workers")}
    topology = {(case["engine"], case["sharding"], case["ranks"])}
    return {(*b, "→", *a) for b in before.items() for a in after.items()} | topology


def cases() -> list[dict[str, Any]]:
    """Few of them, with every pair."""
    possible = [
        {"from": name, "before": SAVING[name], "cut": cut, "num_workers": num_workers, **target}
        for name, cut, num_workers, target in itertools.product(SAVING, (MIDDLE, END), (0, 2), targets())
        if target != {key: SAVING[name][key] for key in target}
    ]
    return sorted(cover(possible, pairs, set()), key=lambda case: case["from"])


def name_of(case: dict[str, Any]) -> str:
    """For the test's id."""
    place = "middle" if case["cut"] == MIDDLE else "end"
    return "-".join(map(str, (case["from"], place, case["engine"], case["sharding"], case["ranks"], case["micro"]))) + (
        "-workers" if case["num_workers"] else ""
    )


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 whose rows divide by neither 2 nor 4, tied, with biases."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from lit_fsdp.models.tokenizers import miniature_tokenizer

    folder = tmp_path_factory.mktemp("gpt2") / "model"
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=321, n_positions=41, n_embd=34, n_layer=2, n_head=2)
    config.update({"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    GPT2LMHeadModel(config).save_pretrained(folder)
    miniature_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def go(workers: Workers, tiny_model: Path, dropout_model: Path, gpt2: Path) -> Callable[..., Results]:
    """One run of the choices of a saving or a resumed run; ``dropout`` makes the random state matter."""

    def run(folder: Path, choices: dict[str, Any], kind: str, dropout: bool = False, **more: Any) -> Results:
        strategy = {"engine": choices["engine"], "sharding": choices["sharding"]}
        strategy["state_dict"] = choices.get("layout", "sharded")
        if choices["sharding"] == "hybrid_shard":
            strategy["replicate_degree"] = 2
        folders = {"gpt2": gpt2}
        place = folders.get(kind, dropout_model if dropout else tiny_model)
        model = {"folder": str(place), "kind": "ours" if kind in folders else kind}
        job = {"strategy": strategy, "micro": choices["micro"], "run": str(folder), **model, **more}
        job["data"] = {"num_workers": choices.get("num_workers", 0)}
        return workers.run("elastic_run", choices["ranks"], **job)

    return run


@pytest.fixture(scope="module")
def saved(
    go: Callable[..., Results], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Results]]:
    """The uninterrupted run of a name, made once, which saves in the middle and at the end of its first epoch."""
    root, done = tmp_path_factory.mktemp("saved"), {}

    def run(name: str) -> tuple[Path, Results]:
        if name not in done:
            choices = SAVING[name]
            folder = Path(tempfile.mkdtemp(dir=root))
            done[name] = folder, go(folder, choices, choices["kind"], steps=STEPS, save_at=[MIDDLE, END])
        return done[name]

    return run


def global_batches(results: Results) -> dict[int, list[int]]:
    """Sorted row ids of each step over all ranks and micro-batches, without fillers."""
    found: dict[int, list[int]] = {}
    for rank in results:
        for step, rows in rank["rows"]:
            found.setdefault(step, []).extend(row for row in rows if row >= 0)
    return {step: sorted(rows) for step, rows in found.items()}


def check_epochs(batches: dict[int, list[int]]) -> None:
    """Each row once per whole epoch."""
    for first in range(0, len(batches) - STEPS_PER_EPOCH + 1, STEPS_PER_EPOCH):
        seen = Counter(itertools.chain(*(batches[first + i] for i in range(STEPS_PER_EPOCH))))
        assert seen == Counter(range(ROWS))


def test_every_pair_of_choices_is_there() -> None:
    chosen = cases()
    assert 15 <= len(chosen) <= 40
    for before, after in itertools.product((1, 2, 4), repeat=2):
        assert any((case["before"]["ranks"], case["ranks"]) == (before, after) for case in chosen)
    for before, after in itertools.product(("fsdp1", "fsdp2", "ddp", "single"), repeat=2):
        assert any((case["before"]["engine"], case["engine"]) == (before, after) for case in chosen)
    for before, after in itertools.product(("full_shard", "shard_grad_op", "no_shard", "hybrid_shard"), repeat=2):
        assert any((case["before"]["sharding"], case["sharding"]) == (before, after) for case in chosen)


@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_another_topology(
    go: Callable[..., Results], saved: Callable[..., Any], tmp_path: Path, case: dict[str, Any]
) -> None:
    folder, whole = saved(case["from"])
    cut = case["cut"]
    path = folder / "checkpoints" / f"step-{cut:08d}"
    after = go(tmp_path / "run", case, case["before"]["kind"], steps=cut + 20, ckpt_path=str(path))
    state, wanted = after[0]["states"][str(cut)], whole[0]["states"][str(cut)]
    assert {name for name in {**state, **wanted} if state.get(name) != wanted.get(name)} == set()
    batches = {step: rows for step, rows in global_batches(whole).items() if step < cut}
    batches |= global_batches(after)
    assert batches == {step: rows for step, rows in global_batches(whole).items() if step < cut + 20}
    check_epochs(batches)
    losses = whole[0]["losses"][cut : cut + 20]
    assert after[0]["losses"][0] == pytest.approx(losses[0], rel=1e-6)
    assert after[0]["losses"] == pytest.approx(losses, rel=1e-4)
    assert after[0]["rates"] == whole[0]["rates"][cut : cut + 20]


SAME: dict[str, dict[str, Any]] = {
    "fsdp2": {"sharding": "full_shard", "ranks": 2, "micro": 2, "kind": "groups", "num_workers": 2},
    "fsdp1": {"sharding": "hybrid_shard", "ranks": 4, "micro": 1, "kind": "frozen", "layout": "full"},
    "ddp": {"sharding": "no_shard", "ranks": 2, "micro": 1, "kind": "ours"},
}


# every other one by default: each engine, and each place
@pytest.mark.parametrize(
    ("engine", "cut"),
    [("fsdp2", MIDDLE), ("fsdp2", END), ("fsdp1", END), ("fsdp1", MIDDLE), ("ddp", MIDDLE), ("ddp", END)],
)
def test_the_same_topology_is_bit_equal(go: Callable[..., Results], tmp_path: Path, engine: str, cut: int) -> None:
    """Losses, learning rates, parameters, optimizer tensors and the rows of every rank, with dropout."""
    choices = {"engine": engine, **SAME[engine]}
    job = {"kind": choices["kind"], "dropout": True, "steps": STEPS}
    whole = go(tmp_path / "whole", choices, save_at=[cut], **job)
    path = tmp_path / "whole" / "checkpoints" / f"step-{cut:08d}"
    after = go(tmp_path / "after", choices, ckpt_path=str(path), **job)
    for before, now in zip(whole, after, strict=True):
        assert len(now["losses"]) == STEPS - cut
        assert now["losses"] == before["losses"][cut:]
        assert now["rates"] == before["rates"][cut:]
        assert now["rows"] == [entry for entry in before["rows"] if entry[0] >= cut]
        assert now["digest"] == before["digest"]


FOUR = {"engine": "fsdp2", "sharding": "full_shard", "ranks": 2, "micro": 1, "kind": "ours"}  # micro-batches per step


def test_a_signal_in_an_accumulation(go: Callable[..., Results], tmp_path: Path) -> None:
    """The global batch is finished, saved, and no row of it comes again: on other ranks too."""
    job: dict[str, Any] = {"kind": "ours", "steps": 8}
    whole = go(tmp_path / "whole", FOUR, **job)
    cut = go(tmp_path / "cut", FOUR, interrupt=[6, "signal"], **job)
    assert [rank["stopped"] for rank in cut] == [[75, 2]] * 2
    assert [path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step-00000002"]
    path = str(tmp_path / "cut" / "checkpoints" / "step-00000002")
    same = go(tmp_path / "same", FOUR, ckpt_path=path, **job)
    assert same[0]["losses"] == whole[0]["losses"][2:]
    assert [a["rows"] + b["rows"] for a, b in zip(cut, same, strict=True)] == [rank["rows"] for rank in whole]
    other = go(tmp_path / "other", {**FOUR, "ranks": 1, "micro": 4}, ckpt_path=path, **job)
    assert global_batches(cut) | global_batches(other) == global_batches(whole)
    assert min(global_batches(other)) == 2


def test_an_end_in_an_accumulation(go: Callable[..., Results], tmp_path: Path) -> None:
    """Of a global batch that was begun, nothing is kept: it is run again as a whole, with the same random numbers."""
    job: dict[str, Any] = {"kind": "ours", "dropout": True, "steps": 8}
    whole = go(tmp_path / "whole", FOUR, **job)
    cut = go(tmp_path / "cut", FOUR, interrupt=[6, "raise"], save_at=[1], **job)
    assert [rank["stopped"] for rank in cut] == [["killed here", 1]] * 2
    assert [step for step, _ in cut[0]["rows"]] == [0, 0, 0, 0, 1]
    path = str(tmp_path / "cut" / "checkpoints" / "step-00000001")
    after = go(tmp_path / "after", FOUR, ckpt_path=path, **job)
    for before, now in zip(whole, after, strict=True):
        assert now["rows"] == before["rows"][4:]
        assert (now["losses"], now["digest"]) == (before["losses"][1:], before["digest"])
