"""Packed training is padded training of the same samples, it resumes bit-equal, and leaking attention is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.dist.forks import RankError, on_ranks
from tests.runs import MORE
from tests.unit.models.families import saved

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
    assert (proof["engine"], proof["attn_implementation"]) == (engine, "sdpa_by_sample")


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("fsdp1", marks=MORE)])
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


def test_what_leaks_is_refused_on_all_ranks(tiny_model: Path, tmp_path: Path) -> None:
    for how, words in {
        "mask": "a sample changes by",
        "2d": "a 2-D attention_mask",
        "positions": "hidden states depend on the position in the pack",
        "scale": "beyond 319 tokens it scales queries by their position in the row",
    }.items():
        job = {"folder": tiny_model, "run": tmp_path / how, "strategy": {"engine": "fsdp2"}, "how": how}
        with pytest.raises(RankError, match=words) as refused:
            on_ranks("leaking_run", 2, **job)
        assert str(refused.value).count("data.packing: got true, but llama with attn_implementation sdpa") >= 2
        assert not (tmp_path / how / "isolation.json").exists()
        assert not list((tmp_path / how).glob("checkpoints/step-*"))


def test_experts_do_not_hide_a_state_that_is_carried_over(tmp_path: Path) -> None:
    """In bf16 the rounding of experts is allowed for, which is more than what a Jamba of initial weights carries."""
    saved("jamba", tmp_path / "jamba")
    miniature_tokenizer().save_pretrained(tmp_path / "jamba")
    data = {"packing": True, "global_batch_size": 4, "micro_batch_size": 2, "format": "text"}
    job = {"folder": tmp_path / "jamba", "run": tmp_path / "run", "data": data, "steps": 1}
    with pytest.raises(RankError, match=r"a sample changes by \S+ of its norm when other samples swap places"):
        on_ranks("packed_run", 2, strategy={"engine": "fsdp2", "precision": "mixed"}, **job)


def test_a_proof_is_remembered_by_model_attention_and_dtype(tiny_model: Path, tmp_path: Path) -> None:
    """And its six forward passes of 64 tokens are no more than a step's."""
    lora, eager = {"lora": {}}, {"attn_implementation": "eager"}
    for run, (engine, precision, model, is_proved, more) in enumerate(
        [
            ("fsdp2", "fp32", {}, True, {}),
            ("fsdp2", "fp32", {}, False, {}),
            ("fsdp2", "fp32", eager, True, {}),
            ("fsdp1", "mixed", lora, True, {"activation_checkpointing": "full"}),
            ("ddp", "mixed", eager, True, {}),
            ("fsdp2", "low_precision", {}, True, {"sharding": "no_shard"}),
        ]
    ):
        strategy = {"engine": engine, "precision": precision, **more}
        job = {"folder": tiny_model, "strategy": strategy, "model": model, "data": STEPS, "steps": 1}
        proofs = on_ranks("packed_run", 2, run=tmp_path / str(run), **job)[0]["proofs"]
        assert len(proofs) == is_proved
        assert all(proof["tokens"] <= 6 * 64 for proof in proofs)
        record = json.loads((tmp_path / str(run) / "isolation.json").read_text())
        assert (record["largest_change"], record["compute_dtype"]) == (0, "fp32" if precision == "fp32" else "bf16")
        assert record["attn_implementation"] == model.get("attn_implementation", "sdpa_by_sample")
        assert 0 <= record["largest_change_when_moved"] < record["tolerance_when_moved"]


def test_uneven_validation_counts_every_row_once(tiny_model: Path, tmp_path: Path) -> None:
    """Seven rows in few packs, on more ranks than packs; the same validation loss as one rank finds without packs."""
    found = []
    for ranks, packing in ((1, False), (1, True), (4, True), (4, False)):
        data = {"val": "generated:7", "max_seq_length": 160, "packing": packing, "cache_dir": str(tmp_path / "cache")}
        found += on_ranks("validate_run", ranks, folder=tiny_model, data=data, strategy={"engine": "fsdp2"})[:1]
    assert [one["val_loss"] for one in found] == pytest.approx([found[0]["val_loss"]] * 4, rel=1e-6)


@pytest.mark.parametrize("engine", ["fsdp2", *(pytest.param(one, marks=MORE) for one in ("fsdp1", "ddp", "single"))])
def test_named_sets_have_metrics_of_their_own(tiny_model: Path, tmp_path: Path, engine: str) -> None:
    """Each those of its rows alone, all together those of one list; on more ranks than packs."""
    sources = {"easy": ["generated:7"], "hard": ["generated:1", "generated:2"]}
    together = [source for part in sources.values() for source in part]
    for packing in (False, True):
        job = {"max_seq_length": 160, "packing": packing, "cache_dir": str(tmp_path), "micro_batch_size": 2}
        ranks, run = 1 if engine == "single" else 3, {"folder": tiny_model, "strategy": {"engine": engine}}
        found = on_ranks("validate_run", ranks, data={**job, "val": sources}, **run)
        wanted: dict[str, float] = {}
        for name, part in {"": together, **sources}.items():
            (alone,) = on_ranks("validate_run", 1, folder=tiny_model, data={**job, "val": part}, strategy={})
            wanted |= {f"{kind}/{name}".removesuffix("/"): value for kind, value in alone.items()}
        assert found == [pytest.approx(wanted, rel=1e-5)] * ranks
        (few,) = on_ranks(
            "validate_run", 1, data={**job, "val": sources}, limit_val_batches=2, folder=tiny_model, strategy={}
        )
        assert 0 < few["val_loss/hard"] < float("inf")  # as of each set first
