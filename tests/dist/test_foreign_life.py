"""Other people's modules, through validation, prediction, second fits, second Trainers and resumes: as plain Lightning.

The reference is Lightning itself in one process on the whole batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.forks import on_ranks

ENGINES = ("fsdp2", "fsdp1", "ddp")
LIVES: dict[str, dict[str, Any]] = {
    "validate and predict, then fit": {"module": "Predicts", "calls": ["validate", "predict", "fit"]},
    "fit twice": {"module": "ForeignNetWithValidation", "calls": ["fit", "fit"], "validates": True},
    "a Trainer each": {"module": "ForeignNetWithValidation", "calls": ["validate", "fit", "fit"], "second": True},
    "layers without gradients": {"module": "Unused"},
    "accumulation": {"module": "Unused", "accumulate_grad_batches": 2},
    "clipping": {"module": "Bare", "gradient_clip_val": 0.05},
    "a call between backward and step": {"module": "Looks"},
    "convolutions": {"module": "Conv"},
    "an LSTM": {"module": "Lstm"},
    "a shared layer, and one frozen at first": {"module": "Thawed"},
    "an optimizer without empty shards": {"module": "Uneven"},
    "saved before the first step": {"module": "SavesFirst"},
    "a search for a learning rate": {"module": "Tuned"},
    "weights changed between steps": {"module": "Shrinks", "calls": ["fit", "fit"], "validates": True},
}
UNDER_DDP_TOO = (
    "a Trainer each",
    "saved before the first step",
    "layers without gradients",
    "a shared layer, and one frozen at first",
)


def largest_difference(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> float:
    assert found.keys() <= wanted.keys()  # what is shared is saved once
    return max(abs(x - y) for name in found for x, y in zip(found[name], wanted[name], strict=True))


@pytest.mark.parametrize("life", LIVES)
def test_weights_and_outputs_are_those_of_plain_lightning(life: str) -> None:
    """Outputs are of ``self(x)`` in ``on_train_epoch_end`` and after everything, outside of any step."""
    wanted = on_ranks("live", 1, strategy=None, **LIVES[life])[0]
    for engine in ENGINES if life in UNDER_DDP_TOO else ENGINES[:2]:
        for found in on_ranks("live", 2, strategy={"engine": engine, "precision": "fp32"}, **LIVES[life]):
            assert largest_difference(found["weights"], wanted["weights"]) < 1e-6, engine
            for mine, theirs in zip(found["outputs"], wanted["outputs"], strict=True):
                assert mine == pytest.approx(theirs, abs=1e-5), engine


def test_two_optimizers_and_two_backward_passes() -> None:
    """Manual optimization with toggles; fsdp1 would train wrong weights, so it is refused."""
    wanted = on_ranks("live", 1, module="Gan", strategy=None)[0]["weights"]
    for engine in ("fsdp2", "ddp"):
        for found in on_ranks("live", 2, module="Gan", strategy={"engine": engine, "precision": "fp32"}):
            assert largest_difference(found["weights"], wanted) < 1e-6, engine
    for text in on_ranks("refused", 2, module="Gan", strategy={"engine": "fsdp1"}):
        assert text.startswith("ConfigError: fsdp_strategy.engine: got fsdp1 with manual optimization (Gan")


@pytest.mark.parametrize("module", ["Sgd", "Unused", "Chosen", "Averaged"])
def test_a_resume_has_the_learning_rates_and_weights_of_one_run(tmp_path: Path, module: str) -> None:
    """SGD without momentum has no tensors of state; parameters that were never used have none under AdamW."""
    wanted = on_ranks("resumed", 1, module=module, strategy=None, folder=tmp_path / "plain")[0]
    for engine in ("ddp", "single") if module == "Averaged" else ENGINES:
        job = {"strategy": {"engine": engine, "precision": "fp32"}, "folder": tmp_path / engine}
        for found in on_ranks("resumed", 1 if engine == "single" else 2, module=module, **job):
            assert found["rates"] == wanted["rates"]
            assert largest_difference(found["weights"], wanted["weights"]) < 1e-6


def test_the_batch_arrives_as_the_loader_gives_it() -> None:
    """What is cast is what goes into layers; targets of 1000 and more keep their fractions on every engine."""
    wanted = [one["targets"] for one in on_ranks("live", 2, module="Exact", strategy={"engine": "ddp"})]
    for engine, precision in (("fsdp2", "fp16_mixed"), ("fsdp1", "mixed")):
        found = on_ranks("live", 2, module="Exact", strategy={"engine": engine, "precision": precision})
        assert [one["targets"] for one in found] == wanted


def test_batch_norm_validates_as_its_checkpoint(tmp_path: Path) -> None:
    """Every rank has statistics of its own rows; from the validation on they are rank 0's."""
    for engine, precision in (("fsdp2", "mixed"), ("fsdp1", "mixed"), ("ddp", "fp32")):
        job = {"strategy": {"engine": engine, "precision": precision}, "folder": tmp_path / engine}
        for live, saved in on_ranks("validated_again", 2, **job):
            assert live == saved


def test_batch_norms_are_synchronized() -> None:
    """``sync_batchnorm=True`` puts in torch's layers, which refuse CPUs."""
    job = {"strategy": {"engine": "fsdp2", "precision": "fp32"}, "sync_batchnorm": True}
    for text in on_ranks("refused", 2, module="Norm", **job):
        assert text.startswith("ValueError: SyncBatchNorm ")


def test_what_would_train_nothing_is_refused() -> None:
    """An optimizer of tensors from before the sharding; parameters that a second backward pass would not find."""
    for text in on_ranks("refused", 2, module="Detached", strategy={"engine": "fsdp2"}):
        assert "ContractError: optimizer 0 moves a tensor of shape (1, 12) that is no parameter" in text
    for text in on_ranks("refused", 2, module="Own", strategy={"engine": "fsdp2"}):
        assert text.startswith("ConfigError: Own.automatic_optimization: got False with the parameter scale")


def test_layers_and_matrices_in_the_root_take_rows_as_they_come() -> None:
    for module, precision in (("Looks", "mixed"), ("Conv", "low_precision")):
        wanted = on_ranks("live", 1, module=module, strategy=None)[0]["weights"]
        for engine in ENGINES:
            for found in on_ranks("live", 2, module=module, strategy={"engine": engine, "precision": precision}):
                assert largest_difference(found["weights"], wanted) < 0.05, (module, engine, precision)


def test_a_batch_more_on_one_rank_is_refused_instead_of_waited_for() -> None:
    """Of seven rows Lightning gives rank 0 four and rank 1 three: two batches and one."""
    for rows in (8, 7):
        wanted = on_ranks("predicted", 2, strategy={"engine": "ddp", "precision": "fp32"}, rows=rows)
        assert [len(one) for one in wanted] == [4, rows - 4]
        for engine in ("fsdp2", "fsdp1"):
            found = on_ranks("predicted", 2, strategy={"engine": engine, "precision": "fp32"}, rows=rows)
            if rows == 7:
                assert [one.splitlines()[0] for one in found] == ["trainer.num_predict_batches: got [2] and [1]"] * 2
            else:
                assert found == [pytest.approx(one, abs=1e-5) for one in wanted]


def test_a_second_trainer_with_other_arguments_is_refused() -> None:
    job = {"module": "Conv", "strategy": {"precision": "fp32"}, "again": {"precision": "mixed", "state_dict": "full"}}
    for text in on_ranks("refused", 2, **job):
        assert text.startswith("ConfigError: fsdp_strategy.precision: got mixed for a module that another Trainer")
        assert "load_weights" in text


def test_dtypes_of_somebody_elses_module_are_its_own_business() -> None:
    """They are said; ``contract: error`` makes them an error."""
    wanted = on_ranks("live", 1, module="OwnReduction", strategy=None)[0]["weights"]
    for engine in ENGINES:
        strategy = {"engine": engine, "precision": "fp32"}
        for found in on_ranks("live", 2, module="OwnReduction", strategy=strategy):
            assert largest_difference(found["weights"], wanted) < 1e-6
        for text in on_ranks("refused", 2, module="OwnReduction", strategy={**strategy, "contract": "error"}):
            assert text.startswith("ContractError: precision contract broken: reductions: all_reduce")


def test_autocast_and_optimizer_state_of_somebody_else() -> None:
    """Not under fsdp2: the Adafactor of transformers does not know DTensors."""
    wanted = on_ranks("live", 1, module="OwnPrecision", strategy=None)[0]["weights"]
    for precision in ("mixed", "low_precision"):
        strategy = {"engine": "ddp", "precision": precision}
        for found in on_ranks("live", 2, module="OwnPrecision", strategy=strategy):
            assert largest_difference(found["weights"], wanted) < 0.05
    for text in on_ranks("refused", 2, module="OwnPrecision", strategy={**strategy, "contract": "error"}):
        assert text.startswith("ContractError: precision contract broken: optimizer state after the first step")


@pytest.mark.parametrize("module", ["PartlyMeta", "WhollyMeta"])
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_a_module_that_is_on_meta_is_the_same_on_all_ranks(engine: str, module: str) -> None:
    for sharding, ranks, more in (("no_shard", 2, {}), ("hybrid_shard", 4, {"replicate_degree": 2})):
        strategy = {"engine": engine, "precision": "fp32", "sharding": sharding, **more}
        first, *others = on_ranks("live", ranks, module=module, strategy=strategy)
        assert all(abs(weight) < 2 for weights in first["weights"].values() for weight in weights)
        for other in others:
            assert other["weights"] == first["weights"]
