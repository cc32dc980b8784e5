"""Each choice of the factory, read back from the live engine, and what it does when a run goes wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.dist.forks import RankError, on_ranks
from tests.dist.reference import reference_losses

ENGINES = ("fsdp2", "fsdp1")


def look(folder: Path, ranks: int = 2, options: dict[str, Any] | None = None, **strategy: Any) -> Any:
    """The first rank's view of a short run."""
    return on_ranks("look", ranks, folder=folder, strategy=strategy, **(options or {}))[0]


def test_fsdp1_is_set_as_the_recipe_says(tiny_model: Path) -> None:
    options: dict[str, Any] = {"sharding": "hybrid_shard_zero2", "shard_degree": 2, "timeout_seconds": 77}
    found = look(tiny_model, 4, {"cores": 8}, engine="fsdp1", **options)
    assert found["threads"] == 2
    assert found["sharding"] == ["_HYBRID_SHARD_ZERO2"]
    assert set(found["timeouts"]) == {77.0}  # of every group
    assert found["backward_prefetch"] == ["BackwardPrefetch.BACKWARD_PRE"]
    assert (found["forward_prefetch"], found["limit_all_gathers"]) == ([False], [True])
    options = {"backward_prefetch": "post", "forward_prefetch": True, "limit_all_gathers": False}
    found = look(tiny_model, engine="fsdp1", **options)
    assert found["sharding"] == ["FULL_SHARD", "SHARD_GRAD_OP"]  # the last unit stays gathered
    assert found["backward_prefetch"] == ["BackwardPrefetch.BACKWARD_POST"]
    assert (found["forward_prefetch"], found["limit_all_gathers"]) == ([True], [False])


def test_fsdp2_is_set_as_the_recipe_says(tiny_model: Path) -> None:
    found = look(tiny_model)  # the root first, then three blocks; the embedding is tied
    assert (found["forward"], found["backward"]) == ([[], [], [], []], [[], [], [], []])
    assert (found["offload"], found["reads_parts"]) == (["OffloadPolicy"], True)
    options = {"cpu_offload": True, "process_group_backend": "cpu:gloo"}
    found = look(tiny_model, forward_prefetch=2, backward_prefetch=2, **options)
    assert (found["forward"], found["backward"]) == ([[], [2, 3], [3], []], [[], [], [1], [2, 1]])
    assert (found["offload"], found["backend"]) == (["CPUOffloadPolicy"], "cpu:gloo")
    found = look(tiny_model, forward_prefetch=True, backward_prefetch="none")
    assert (found["forward"], found["backward"]) == ([[], [2], [3], []], [[], [1], [2], [3]])
    for sharding, reshards in (("hybrid_shard", ["False", "True"]), ("hybrid_shard_zero2", ["False"])):
        found = look(tiny_model, 4, sharding=sharding, shard_degree=2, timeout_seconds=77)
        assert found["reshards"] == reshards  # the root never reshards
        assert set(found["timeouts"]) == {77.0}


def test_one_rank_and_the_other_way_to_load_train_as_the_loop(tiny_model: Path) -> None:
    wanted = reference_losses(str(tiny_model))
    found = look(tiny_model, 1, {"accumulate_grad_batches": 2, "steps": 10}, precision="fp32")
    assert found["losses"] == pytest.approx(wanted, rel=1e-5)
    options = {"cpu_ram_efficient_loading": False, "sync_module_states": False}
    for engine in ENGINES:
        found = look(tiny_model, engine=engine, precision="fp32", **options)
        assert found["losses"] == pytest.approx(wanted[:3], rel=1e-6)
        assert not found["reads_parts"]


def test_ddp_replaces_what_is_about_shards_and_says_so(tiny_model: Path) -> None:
    """A comparison of engines changes one line. It looks for unused parameters unless told otherwise."""
    given = {"precision": "fp32", "sharding": "hybrid_shard", "replicate_degree": 2, "cpu_offload": True}
    ours, ddp = (look(tiny_model, engine=engine, **given, timeout_seconds=77) for engine in ("fsdp2", "ddp"))
    assert ddp["losses"] == pytest.approx(ours["losses"], rel=1e-6)
    assert sorted(ddp["audit"]["replaced"]) == ["cpu_offload", "replicate_degree", "sharding"]
    assert ours["audit"]["replaced"] == {}
    assert set(ddp["timeouts"]) == {77.0}
    trusts = look(tiny_model, engine="ddp", precision="fp32", find_unused_parameters=False)
    assert (ddp["finds_unused"], trusts["finds_unused"]) == (True, False)
    assert trusts["losses"] == ddp["losses"]


def test_reductions_are_held_back_until_the_last_micro_batch(tiny_model: Path) -> None:
    """Gradients that are held back add up in the dtype of the reductions; of tied weights only from torch 2.15 on."""
    for engine, sharding, precision in (
        ("fsdp2", "full_shard", "mixed"),
        ("fsdp1", "full_shard", "fp32"),
        ("fsdp1", "no_shard", "fp32"),
        ("ddp", "no_shard", "fp32"),
    ):
        options = {"accumulate_grad_batches": 3}
        job: dict[str, Any] = {"engine": engine, "precision": precision, "sharding": sharding, "options": options}
        each, last = look(tiny_model, **job), look(tiny_model, **job, sync_each_micro_batch=False)
        num = each["reductions"][0]
        assert num >= 1
        assert each["reductions"] == [num] * 9
        assert last["reductions"] == [0, 0, num] * 3
        assert last["losses"] == pytest.approx(each["losses"], rel=2e-4 if precision == "mixed" else 1e-6)
        assert set(last["dtypes"]["realized"]["reductions"]) == {"fp32"}


@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
def test_parts_of_a_precision_mode(tiny_model: Path, engine: str) -> None:
    changed = {"mode": "mixed", "buffer_dtype": "bf16", "reduce_dtype": "bf16"}
    found = look(tiny_model, engine=engine, precision=changed)["dtypes"]["realized"]
    dtypes = {"reductions": {"bf16"}, "buffers": {"bf16"}, "gradients": {"fp32"}}
    assert {what: set(found[what]) for what in dtypes} == dtypes


def test_auto_is_the_same_on_all_ranks_and_resumes_on_another_cpu(tiny_model: Path, tmp_path: Path) -> None:
    fp32 = {"mode": "auto", "buffer_dtype": "fp32"}
    bf16, without = "INFO: precision auto: mixed, as every CPU has bf16", "INFO: precision auto: fp32, as"
    for run, engine, given, has_bf16, mode, line in (
        ("first", "fsdp2", "auto", [True, True], "mixed", bf16),
        ("first", "fsdp2", fp32, [True, False], "fp32", without),
        ("second", "ddp", "auto", [True, True], "mixed", bf16),
        ("second", "ddp", fp32, [False, False], "fp32", without),
        ("third", "fsdp2", "mixed", [False, False], "mixed", "WARNING: precision mixed computes in bf16, about eight"),
        ("fourth", "fsdp2", "mixed", [True, True], "mixed", ""),
        ("fifth", "fsdp2", "fp32", [False, False], "fp32", ""),
    ):
        job = {"folder": tiny_model, "strategy": {"engine": engine, "precision": given}, "run": tmp_path / run}
        resumes = {"ckpt_path": "last", "steps": 4} if given is fp32 else {}
        found = on_ranks("settled", 2, **job, has_bf16=has_bf16, **resumes)
        for rank in found:
            assert rank["dtypes"]["mode"] == mode
            assert rank["dtypes"]["declared"]["compute"] == ("bf16" if mode == "mixed" else "fp32")
            assert len(rank["losses"]) == 2
            assert not resumes or set(rank["dtypes"]["realized"]["parameters after resume"]) == {"fp32"}
        said = [text for rank in found for text in rank["lines"]]
        assert len(said) == bool(line)
        assert "".join(said).startswith(line)


def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(tiny_model: Path) -> None:
    for engine, sharding, value in (
        ("fsdp2", "full_shard", math.nan),
        ("fsdp2", "no_shard", math.inf),
        ("fsdp1", "full_shard", math.inf),
        ("fsdp1", "no_shard", math.nan),
        ("ddp", "no_shard", math.nan),
    ):
        strategy = {"engine": engine, "sharding": sharding, "precision": "fp32", "nonfinite_gradients": "skip"}
        job = {"folder": tiny_model, "strategy": strategy, "steps": [2], "value": value}
        job |= {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"} if sharding == "full_shard" else {}
        for result in on_ranks("poisoned", 2, **job):
            assert (result["error"], result["guard"]["num_skipped_steps"]) == ("", 1)
            digests = result["digests"]
            assert digests[2] == digests[3]  # parameters and optimizer of step 2 went untouched into step 3
            assert len(set(digests)) == 6


@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
def test_an_error_and_the_end_of_patience_are_those_of_all_ranks(tiny_model: Path, engine: str) -> None:
    """By default one bad gradient ends a run, with ``skip`` a row of them; an overflow of fp16 lowers the scale."""
    job: dict[str, Any] = {"folder": tiny_model, "value": math.inf, "patience": 2}
    for result in on_ranks("poisoned", 2, strategy={"engine": engine}, steps=[1], **job):
        text = "NonFiniteGradientError: the gradients contain inf or nan"
        assert result["error"].startswith(text)
        assert len(result["losses"]) == 1
    strategy = {"engine": engine, "nonfinite_gradients": "skip"}
    for result in on_ranks("poisoned", 2, strategy=strategy, steps=[1, 3, 4], **job):
        assert result["error"].startswith("NonFiniteGradientError: 2 optimizer steps in a row")
        assert (result["guard"]["num_skipped_steps"], len(result["losses"])) == (3, 4)
    for result in on_ranks("poisoned", 2, strategy={"engine": engine, "precision": "fp16_mixed"}, steps=[1, 2], **job):
        guard, digests = result["guard"], result["digests"]
        assert (result["error"], guard["num_overflow_steps"], guard["num_skipped_steps"]) == ("", 2, 0)
        assert guard["loss_scale"] == 2.0**14
        assert digests[1] == digests[2] == digests[3] != digests[4]


def test_a_module_that_wraps_itself() -> None:
    plain = {"engine": "single", "precision": "fp32"}
    (alone,) = on_ranks("train_wrapped_by_hand", 1, strategy=plain, how="nothing")
    for engine, how in (("fsdp2", "fully_shard"), ("fsdp2", "device_mesh"), ("fsdp1", "wrap")):
        strategy = {"engine": engine, "precision": "fp32", "wrap": "manual"}
        for result in on_ranks("train_wrapped_by_hand", 2, strategy=strategy, how=how):
            assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
            assert result["units"] == ["layers.0", "layers.1", "layers.2"]
            assert result["audit"]["num_params"] == 3 * (12 * 12 + 12) + 13 + 5
            assert sum(unit["num_params"] for unit in result["audit"]["units"]) == result["audit"]["num_params"]


def test_what_cannot_be_is_refused(tiny_model: Path) -> None:
    for strategy, words in (
        ({"engine": "fsdp1", "cpu_offload": True}, "true with engine fsdp1 on CPU"),
        ({"precision": "fp8"}, "fp8 "),
        ({"engine": "single"}, "single on 2 ranks"),
        ({"wrap": ["GPT2Block"]}, "got 'GPT2Block', which matches no module"),
    ):
        with pytest.raises(RankError, match=words):
            on_ranks("train", 2, folder=tiny_model, strategy=strategy)
    for how, strategy, words in (
        ("nothing", {"wrap": "manual"}, "nothing in the model is wrapped"),
        ("fully_shard", {}, "or wrap: manual"),
        ("bare", {"engine": "fsdp1", "wrap": "manual"}, "units of another engine"),
    ):
        with pytest.raises(RankError, match=words):
            on_ranks("train_wrapped_by_hand", 2, strategy=strategy, how=how)


@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
def test_verbose_ranks_tell_their_parts_of_the_model_and_where_they_are(
    tiny_model: Path, tmp_path: Path, engine: str
) -> None:
    strategy = {"engine": engine, "verbose": True}
    on_ranks("train", 2, folder=tiny_model, strategy=strategy, run=tmp_path, steps=1)
    debug = tmp_path / "debug"
    ranks: list[dict[str, Any]] = [json.loads((debug / f"rank-{i}.json").read_text()) for i in range(2)]
    for first, second in zip(ranks[0]["states"], ranks[1]["states"], strict=True):
        assert first["name"] == second["name"]
        whole = 2 * first["num_whole"] if engine == "ddp" else first["num_whole"]
        assert first["num_here"] + second["num_here"] == whole
    assert [rank["mesh"] for rank in ranks] == ([[0, 0], [1, 0]] if engine == "ddp" else [[0], [1]])


def test_a_rank_that_does_not_come_is_waited_for_with_a_word() -> None:
    said, error = on_ranks("waits_alone", 1)[0]
    assert "still waits for all 2 ranks to meet at " in said
    assert said.endswith(", at most 1 s")
    assert error == "DistStoreError"
