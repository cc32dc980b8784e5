"""Packed training is padded training of the same samples, it resumes bit-equal, and leaking attention is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.forks import RankError, on_ranks

WHOLE = {"global_batch_size": 64, "micro_batch_size": 4, "max_seq_length": 160}  # all 60 rows in one global batch
STEPS = {"packing": True, "global_batch_size": 4, "micro_batch_size": 2, "max_seq_length": 160}  # 29 packs: 8 steps


@pytest.mark.parametrize(("ranks", "engine"), [(1, "single"), (2, "fsdp2"), (2, "fsdp1")])
def test_packed_and_padded_have_the_same_loss_and_gradients(
    tiny_model: Path, tmp_path: Path, ranks: int, engine: str
) -> None:
    """All rows are one global batch, so that both ways train on the same samples."""
    found: dict[bool, dict[str, Any]] = {}
    for packing in (False, True):
        name = tmp_path / str(packing)
        options = {"run": name, "grads": f"{name}.pt", "data": {**WHOLE, "packing": packing}}
        job = {"folder": tiny_model, "strategy": {"engine": engine}, "steps": 2}
        found[packing] = on_ranks("packed_run", ranks, **job, **options)[0]
    assert found[True]["losses"] == pytest.approx(found[False]["losses"], rel=1e-5)
    assert found[True]["supervised"] == found[False]["supervised"] > 0
    assert found[True]["slots"] < found[False]["slots"]
    padded, packed = (torch.load(tmp_path / f"{packing}.pt") for packing in (False, True))
    assert (packed - padded).norm() / padded.norm() <= 1e-5
    assert found[False]["proofs"] == []
    (proof,) = found[True]["proofs"]
    assert (proof["largest_change"], proof["tolerance"]) == (0.0, 0.0)
    assert (proof["engine"], proof["attn_implementation"]) == (engine, "sdpa")


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_resumed_in_an_epoch_the_next_losses_are_bit_equal(dropout_model: Path, tmp_path: Path, engine: str) -> None:
    """With dropout, so that a proof that drew random numbers would show; the resumed run is made to prove again."""
    job: dict[str, Any] = {"folder": dropout_model, "strategy": {"engine": engine}, "data": STEPS, "steps": 15}
    whole = on_ranks("packed_run", 2, run=tmp_path / "whole", every=5, **job)
    shutil.rmtree(tmp_path / "cache" / "isolation")
    cut = tmp_path / "whole" / "checkpoints" / "step-00000005"
    resumed = on_ranks("packed_run", 2, run=tmp_path / "resumed", ckpt_path=cut, **job)
    for before, after in zip(whole, resumed, strict=True):
        assert len(after["losses"]) == 10
        assert after["losses"] == before["losses"][5:]
        assert after["digest"] == before["digest"]
        assert [proof["step"] for proof in before["proofs"] + after["proofs"]] == [0, 5]
        assert all(proof["left_alone"] for proof in before["proofs"] + after["proofs"])


def test_resumed_on_other_ranks(tiny_model: Path, tmp_path: Path) -> None:
    job = {"folder": tiny_model, "strategy": {"engine": "fsdp2"}, "data": STEPS, "steps": 15}
    job["model"] = {"lora": {}}
    whole = on_ranks("packed_run", 2, run=tmp_path / "whole", every=5, **job)[0]
    cut = tmp_path / "whole" / "checkpoints" / "step-00000005"
    (other,) = on_ranks("packed_run", 1, run=tmp_path / "other", ckpt_path=cut, **job)
    assert other["losses"] == pytest.approx(whole["losses"][5:], rel=1e-5)
    assert len(set(other["losses"])) == 10
    assert other["epoch"] == whole["epoch"]


def test_isolation_holds_in_bf16(tiny_model: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"engine": "fsdp1", "precision": "mixed", "activation_checkpointing": "full"}, {"lora": {}}),
        ({"engine": "ddp", "precision": "mixed"}, {"attn_implementation": "eager"}),
        ({"engine": "fsdp2", "precision": "low_precision", "sharding": "no_shard"}, {}),
    ]
    for strategy, model in cases:
        job = {"folder": tiny_model, "strategy": strategy, "model": model, "data": STEPS, "steps": 1}
        (proof,) = on_ranks("packed_run", 2, run=tmp_path / strategy["engine"], **job)[0]["proofs"]
        assert proof["largest_change"] == 0
        assert proof["compute_dtype"] == "bf16"
        assert proof["tokens"] <= 4 * 64  # of four forward passes: no more than a step's
        assert 0 <= proof["largest_change_when_moved"] < proof["tolerance_when_moved"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("mask", r"with other tokens in the other samples one changes by"),
        ("2d", r"a 2-D attention_mask"),
        ("positions", r"its states depend on a sample's place in the pack"),
    ],
)
def test_what_leaks_is_refused_on_all_ranks(tiny_model: Path, tmp_path: Path, how: str, words: str) -> None:
    job = {"folder": tiny_model, "run": tmp_path / "run", "strategy": {"engine": "fsdp2"}, "how": how}
    with pytest.raises(RankError, match=words) as refused:
        on_ranks("leaking_run", 2, **job)
    assert str(refused.value).count("data.packing: got true, but llama with attn_implementation sdpa") >= 2
    assert "set data.packing: false" in str(refused.value)
    assert not (tmp_path / "run" / "isolation.json").exists()
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))


def test_a_proof_is_remembered_by_model_attention_and_dtype(tiny_model: Path, tmp_path: Path) -> None:
    """And its four forward passes of 64 tokens are no more than a step's."""
    job: dict[str, Any] = {"folder": tiny_model, "data": STEPS, "steps": 1}
    for precision, attention, is_proved in (
        ("fp32", "sdpa", True),
        ("fp32", "sdpa", False),
        ("fp32", "eager", True),
        ("low_precision", "sdpa", True),
    ):
        strategy, model = {"engine": "fsdp2", "precision": precision}, {"attn_implementation": attention}
        run = tmp_path / f"{precision}-{attention}-{is_proved}"
        found = on_ranks("packed_run", 2, run=run, strategy=strategy, model=model, **job)[0]
        assert len(found["proofs"]) == is_proved
        record = json.loads((run / "isolation.json").read_text())
        assert (record["largest_change"], record["attn_implementation"]) == (0, attention)
        assert all(proof["tokens"] <= 4 * 64 for proof in found["proofs"])
    assert len(list((tmp_path / "cache" / "isolation").iterdir())) == 3


def test_uneven_validation_counts_every_row_once(tiny_model: Path, tmp_path: Path) -> None:
    """Seven rows in few packs, on more ranks than packs; the same validation loss as one rank finds without packs."""
    found = []
    for ranks, packing in ((1, False), (1, True), (4, True), (4, False)):
        data = {"val": "generated:7", "max_seq_length": 160, "packing": packing, "cache_dir": str(tmp_path / "cache")}
        job = {"folder": tiny_model, "data": data, "strategy": {"engine": "fsdp2"}}
        found.append(on_ranks("validate_run", ranks, **job)[0])
    assert found[0]["supervised"] > 0
    for other in found[1:]:
        assert other["val_loss"] == pytest.approx(found[0]["val_loss"], rel=1e-6)
        assert other["supervised"] == found[0]["supervised"]
