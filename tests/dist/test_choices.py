"""Each choice of the factory, read back from the live engine, and what it does when a run goes wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.dist.workers import RankError, Workers

ENGINES = ("fsdp2", "fsdp1")


def look(workers: Workers, folder: Path, ranks: int = 2, options: dict[str, Any] | None = None, **strategy: Any) -> Any:
    """The first rank's view of a short run."""
    return workers.run("look", ranks, folder=str(folder), strategy=strategy, **(options or {}))[0]


def test_fsdp1_is_set_as_the_recipe_says(workers: Workers, tiny_model: Path) -> None:
    found = look(workers, tiny_model, 4, engine="fsdp1", sharding="hybrid_shard_zero2", shard_degree=2)
    assert found["sharding"] == ["_HYBRID_SHARD_ZERO2"]
    assert found["backward_prefetch"] == ["BackwardPrefetch.BACKWARD_PRE"]
    assert (found["forward_prefetch"], found["limit_all_gathers"]) == ([False], [True])
    options = {"backward_prefetch": "post", "forward_prefetch": True, "limit_all_gathers": False}
    found = look(workers, tiny_model, engine="fsdp1", **options)
    assert found["sharding"] == ["FULL_SHARD", "SHARD_GRAD_OP"]  # the last unit stays gathered
    assert found["backward_prefetch"] == ["BackwardPrefetch.BACKWARD_POST"]
    assert (found["forward_prefetch"], found["limit_all_gathers"]) == ([True], [False])
    assert look(workers, tiny_model, engine="fsdp1", backward_prefetch="none")["backward_prefetch"] == ["None"]


def test_fsdp2_is_set_as_the_recipe_says(workers: Workers, tiny_model: Path) -> None:
    found = look(workers, tiny_model)  # the root first, then three blocks; the embedding is tied
    assert (found["forward_depths"], found["backward_depths"]) == ([0, 0, 0, 0], [0, 0, 0, 0])
    assert found["is_over_all_ranks"]  # device_mesh["data_parallel"], for which no group of its own is made
    found = look(workers, tiny_model, forward_prefetch=2, backward_prefetch=2)
    assert (found["forward_depths"], found["backward_depths"]) == ([0, 2, 1, 0], [0, 0, 1, 2])
    found = look(workers, tiny_model, forward_prefetch=True, backward_prefetch="none")
    assert (found["forward_depths"], found["backward_depths"]) == ([0, 1, 1, 0], [0, 1, 1, 1])
    assert found["backend"] == "gloo"
    for sharding, reshards in (("hybrid_shard", ["False", "True"]), ("hybrid_shard_zero2", ["False"])):
        found = look(workers, tiny_model, 4, sharding=sharding, shard_degree=2)
        assert found["reshards"] == reshards  # the root never reshards


@pytest.mark.parametrize(("engine", "ranks"), [("fsdp2", 4), ("fsdp1", 2), ("ddp", 2)])
def test_every_group_waits_as_long_as_the_recipe_says(
    workers: Workers, tiny_model: Path, engine: str, ranks: int
) -> None:
    options = {"sharding": "hybrid_shard", "shard_degree": 2, "replicate_degree": -1} if ranks == 4 else {}
    for more in (options, {"sharding": "no_shard"}):
        found = look(workers, tiny_model, ranks, engine=engine, timeout_seconds=77, **more)
        assert set(found["timeouts"]) == {77.0}


def test_ddp_looks_for_unused_parameters_unless_told_otherwise(workers: Workers, tiny_model: Path) -> None:
    job = {"engine": "ddp", "precision": "fp32"}
    looks, trusts = look(workers, tiny_model, **job), look(workers, tiny_model, **job, find_unused_parameters=False)
    assert (looks["finds_unused"], trusts["finds_unused"]) == (True, False)
    assert trusts["losses"] == looks["losses"]


def test_ddp_replaces_what_is_about_shards_and_says_so(workers: Workers, tiny_model: Path) -> None:
    """A comparison of engines changes one line."""
    given = {"precision": "fp32", "sharding": "hybrid_shard", "replicate_degree": 2, "cpu_offload": True}
    ours, ddp = (look(workers, tiny_model, engine=engine, **given) for engine in ("fsdp2", "ddp"))
    assert ddp["losses"] == pytest.approx(ours["losses"], rel=1e-6)
    assert sorted(ddp["audit"]["replaced"]) == ["cpu_offload", "replicate_degree", "sharding"]
    assert ours["audit"]["replaced"] == {}


@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
@pytest.mark.parametrize("sharding", ["full_shard", "no_shard"])
def test_reductions_are_held_back_until_the_last_micro_batch(
    workers: Workers, tiny_model: Path, engine: str, sharding: str
) -> None:
    job = {"options": {"accumulate_grad_batches": 3}, "engine": engine, "precision": "fp32", "sharding": sharding}
    each, last = look(workers, tiny_model, **job), look(workers, tiny_model, **job, sync_each_micro_batch=False)
    num = each["reductions"][0]
    assert num >= 1
    assert each["reductions"] == [num] * 9
    assert last["reductions"] == [0, 0, num] * 3
    assert last["losses"] == pytest.approx(each["losses"], rel=1e-6)


def test_held_back_gradients_add_up_in_the_reduce_dtype(workers: Workers, tiny_model: Path) -> None:
    job = {"options": {"accumulate_grad_batches": 3}, "steps": 6}
    runs = [
        workers.run(
            "look", 2, folder=str(tiny_model), strategy={"sync_each_micro_batch": each}, steps=6, **job["options"]
        )
        for each in (True, False)
    ]
    assert runs[1][0]["losses"] == pytest.approx(runs[0][0]["losses"], rel=1e-5)
    assert set(runs[1][0]["dtypes"]["reductions"]) == {"fp32"}


@pytest.mark.parametrize("engine", ENGINES)
def test_parts_of_a_precision_mode(workers: Workers, tiny_model: Path, engine: str) -> None:
    plain = look(workers, tiny_model, engine=engine)
    assert plain["buffers"] == ["torch.float32"]
    changed = {"mode": "mixed", "buffer_dtype": "bf16", "reduce_dtype": "bf16"}
    found = look(workers, tiny_model, engine=engine, precision=changed)
    assert found["buffers"] == ["torch.bfloat16"]
    assert set(found["dtypes"]["reductions"]) == {"bf16"}
    assert set(found["dtypes"]["buffers"]) == {"bf16"}
    assert set(found["dtypes"]["gradients"]) == {"fp32"}


@pytest.mark.parametrize("engine", [*ENGINES, "ddp", "single"])
def test_auto_is_the_same_on_all_ranks_and_resumes_on_another_cpu(
    workers: Workers, tiny_model: Path, tmp_path: Path, engine: str
) -> None:
    ranks, every = (1, [True]) if engine == "single" else (2, [True, True])
    some, none = [*every[1:], False], [False] * ranks

    def run(precision: Any, has_bf16: list[bool], name: str, **more: Any) -> list[dict[str, Any]]:
        strategy, folder = {"engine": engine, "precision": precision}, str(tmp_path / name)
        job = {"folder": str(tiny_model), "run": folder, "strategy": strategy, "has_bf16": has_bf16}
        return workers.run("settled", ranks, **job, **more)

    for number, (given, has_bf16, mode, line) in enumerate(
        [
            ("auto", every, "mixed", "INFO: precision auto: mixed, as this CPU has bf16 instructions"),
            ("auto", some, "fp32", "INFO: precision auto: fp32, as"),
            ({"mode": "auto", "buffer_dtype": "fp32"}, none, "fp32", "INFO: precision auto: fp32, as this CPU has no"),
            ("mixed", none, "mixed", "WARNING: precision mixed computes in bf16, about eight times slower than fp32"),
            ("mixed", every, "mixed", None),
            ("fp32", none, "fp32", None),
        ]
    ):
        found = run(given, has_bf16, str(number))
        for rank in found:
            assert rank["dtypes"]["mode"] == mode
            assert rank["dtypes"]["declared"]["compute"] == ("bf16" if mode == "mixed" else "fp32")
        said = [text for rank in found for text in rank["lines"]]
        assert len(said) == (line is not None)
        assert not line or said[0].startswith(line)
    for start, then in ((every, none), (none, every)):
        name = f"from {start[0]}"
        run("auto", start, name)
        last = str(tmp_path / name / "checkpoints" / "step-00000002")
        again = run("auto", then, name, ckpt_path=last, steps=4)[0]
        assert len(again["losses"]) == 2
        assert set(again["dtypes"]["realized"]["parameters after resume"]) == {"fp32"}


@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
def test_fp16_scales_its_loss(workers: Workers, tiny_model: Path, engine: str) -> None:
    found = look(workers, tiny_model, engine=engine, precision="fp16_mixed")
    assert found["guard"]["loss_scale"] == 2.0**16
    assert found["guard"]["num_overflow_steps"] == 0
    computed = "linear layers under autocast" if engine == "ddp" else "activations"
    assert set(found["dtypes"][computed]) == {"fp16"}
    assert set(found["dtypes"]["parameters after the first step"]) == {"fp32"}


@pytest.mark.parametrize("sharding", ["full_shard", "no_shard"])
@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(
    workers: Workers, tiny_model: Path, engine: str, sharding: str, value: float
) -> None:
    strategy = {"engine": engine, "sharding": sharding, "precision": "fp32", "nonfinite_gradients": "skip"}
    job = {"folder": str(tiny_model), "strategy": strategy, "steps": [2], "value": value}
    for result in workers.run("poisoned", 2, **job):
        assert (result["error"], result["skipped"]) == ("", 1)
        digests = result["digests"]
        assert digests[2] == digests[3]  # parameters and optimizer of step 2 went untouched into step 3
        assert len(set(digests)) == 6
    for result in workers.run("poisoned", 2, **job, gradient_clip_val=0.01, gradient_clip_algorithm="value"):
        assert result["skipped"] == 1


@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
def test_too_many_bad_steps_in_a_row_end_the_run_on_all_ranks(workers: Workers, tiny_model: Path, engine: str) -> None:
    strategy = {"engine": engine, "nonfinite_gradients": "skip", "max_skipped_steps": 2}
    results = workers.run("poisoned", 2, folder=str(tiny_model), strategy=strategy, steps=[1, 3, 4], value=math.nan)
    for result in results:
        assert result["error"].startswith("NonFiniteGradientError: 2 optimizer steps in a row")
        assert result["skipped"] == 3
        assert len(result["losses"]) == 4


@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
def test_by_default_a_bad_gradient_is_an_error_on_all_ranks(workers: Workers, tiny_model: Path, engine: str) -> None:
    results = workers.run("poisoned", 2, folder=str(tiny_model), strategy={"engine": engine}, steps=[1], value=math.inf)
    for result in results:
        assert result["error"].startswith("NonFiniteGradientError: the gradients hold inf or nan")
        assert len(result["losses"]) == 1


@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
def test_an_fp16_overflow_is_skipped_and_counted(workers: Workers, tiny_model: Path, engine: str) -> None:
    strategy = {"engine": engine, "precision": "fp16_mixed"}
    for result in workers.run("poisoned", 2, folder=str(tiny_model), strategy=strategy, steps=[1, 2], value=math.inf):
        assert result["error"] == ""
        assert result["guard"]["num_overflow_steps"] == 2
        assert result["guard"]["loss_scale"] == 2.0**14
        assert result["skipped"] == 0
        assert result["digests"][1] == result["digests"][2] == result["digests"][3] != result["digests"][4]


@pytest.mark.parametrize(("engine", "how"), [("fsdp2", "fully_shard"), ("fsdp2", "device_mesh"), ("fsdp1", "wrap")])
def test_a_module_that_wraps_itself(workers: Workers, engine: str, how: str) -> None:
    (alone,) = workers.run(
        "train_wrapped_by_hand", 1, strategy={"engine": "single", "precision": "fp32"}, how="nothing"
    )
    strategy = {"engine": engine, "precision": "fp32", "wrap": "manual"}
    for result in workers.run("train_wrapped_by_hand", 2, strategy=strategy, how=how):
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert result["units"] == ["", "layers.0", "layers.1", "layers.2"]
        assert result["audit"]["num_params"] == 3 * (12 * 12 + 12) + 13 + 5
        assert sum(unit["num_params"] for unit in result["audit"]["units"]) == result["audit"]["num_params"]


def test_manual_without_anything_wrapped_is_refused(workers: Workers) -> None:
    with pytest.raises(RankError, match="nothing in the model is wrapped"):
        workers.run("train_wrapped_by_hand", 2, strategy={"wrap": "manual"}, how="nothing")


def test_train_wrapped_by_hand_without_saying_so_is_refused(workers: Workers) -> None:
    with pytest.raises(RankError, match="or wrap: manual"):
        workers.run("train_wrapped_by_hand", 2, strategy={}, how="fully_shard")


def test_what_the_cpu_cannot_do_is_refused(workers: Workers, tiny_model: Path) -> None:
    for strategy, words in (
        ({"engine": "fsdp1", "cpu_offload": True}, "true with engine fsdp1 on CPU"),
        ({"precision": "fp8"}, "fp8 "),
        ({"process_group_backend": "nccl"}, "nccl on CPU"),
        ({"engine": "single"}, "single on 2 ranks"),
    ):
        with pytest.raises(RankError, match=words):
            workers.run("train", 2, folder=str(tiny_model), strategy=strategy)


@pytest.mark.parametrize("options", [{}, {"cpu_ram_efficient_loading": False, "sync_module_states": False}])
@pytest.mark.parametrize("engine", ENGINES)
def test_both_ways_to_load_give_the_same_run(
    workers: Workers, tiny_model: Path, engine: str, options: dict[str, Any]
) -> None:
    found = look(workers, tiny_model, engine=engine, precision="fp32", **options)
    wanted = look(workers, tiny_model, 1, engine="single", precision="fp32")
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
