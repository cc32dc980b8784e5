"""Other people's modules, through validation, prediction, second fits, second Trainers and resumes: as plain Lightning.

The reference is Lightning itself in one process on the whole batches.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.dist.forks import RankError, on_ranks, on_ranks_each

ENGINES = ("fsdp2", "fsdp1", "ddp")
IN_FP32 = [{"strategy": {"engine": engine, "precision": "fp32"}} for engine in ENGINES]
LIVES: dict[str, dict[str, Any]] = {
    "validate and predict, then fit": {"module": "ForeignNetWithValidation", "calls": ["validate", "predict", "fit"]},
    "a Trainer each": {"module": "ForeignNetWithValidation", "calls": ["validate", "fit", "fit"], "second": True},
    "layers without gradients": {"module": "Unused"},
    "accumulation": {"module": "Unused", "accumulate_grad_batches": 2},
    "clipping": {"module": "Bare", "gradient_clip_val": 0.05},
    "a call between backward and step": {"module": "Looks"},
    "convolutions": {"module": "Conv"},
    "an LSTM": {"module": "Lstm"},
    "a shared layer, and one frozen at first": {"module": "Thawed"},
    "an optimizer without empty shards": {"module": "Uneven"},
    "a search for a learning rate, which saves before the first step": {"module": "Tuned"},
    "dtypes of its own": {"module": "OwnReduction"},
    "two optimizers and two backward passes": {"module": "Gan"},
    "attributes of parameters": {"module": "Chosen", "calls": ["fit", "fit"]},
    "weights changed between steps": {"module": "Shrinks", "calls": ["fit", "fit"], "validates": True},
}
_DDP_TOO = ("ForeignNetWithValidation", "Tuned", "Unused", "Thawed", "OwnReduction")
UNDER = {**dict.fromkeys(_DDP_TOO, ENGINES), "Gan": ("fsdp2", "ddp")}
UNLIKE = {  # on rank 1: what is said, and after how many steps
    "parameter": ("Unlike.more: got nothing on rank 0 and (6,), torch.float32, trained on rank 1", 0),
    "shape": ("Unlike.scale: got (5,), torch.float32, trained on rank 0 and (6,), torch.float32, trained on rank 1", 0),
    "buffer": ("Unlike.more: got nothing on rank 0 and (6,), torch.float32, not trained on rank 1", 0),
    "dtype": ("Unlike.head.weight: got (1, 12), torch.float32, trained on rank 0 and (1, 12), torch.float64, ", 0),
    "frozen": ("Unlike.head.weight: got (1, 12), torch.float32, trained on rank 0 and (1, 12), torch.float32, not ", 0),
    "order": (
        "comparing parameters, name 1: got Unlike.layers.0.0.weight on rank 0 and Unlike.head.weight on rank 1",
        0,
    ),
    "frozen later": ("Unlike.scale: got torch.float32, trained on rank 0 and torch.float32, not trained on rank 1", 0),
    "group": ("configure_optimizers (optimizers): got ['AdamW of 2 groups'] on rank 0 and ['AdamW of 1 ", 0),
    "class": ("configure_optimizers (optimizers): got ['AdamW of 2 groups'] on rank 0 and ['Adam of ", 0),
    "scheduler": ("configure_optimizers (schedulers): got ['LambdaLR every 1 step', 'StepLR every 1 epoch'] on ", 0),
    "interval": ("configure_optimizers (schedulers): got ['LambdaLR every 1 step', 'StepLR every 1 epoch'] on ", 0),
    "schedule": ("schedulers[1] (StepLR).step_size: got 1 on rank 0 and 2 on rank 1", 0),
    "decay": ("optimizers[0].param_groups[1].weight_decay: got 0.1 on rank 0 and 0.3 on rank 1", 0),
    "at once": ("optimizers[0].param_groups[0].lr: got 0.01 on rank 0 and 0.5 on rank 1", 0),
    "function": ("optimizers[0].param_groups[0].lr: got 0.005 on rank 0 and 0.0025 on rank 1", 1),
}
SAID = "a loader (DataLoader) ended after 3 batches on 1 of 2 ranks, so it ends on all ranks"
ALIKE_BATCHES: list[tuple[str, dict[str, Any], Any]] = [  # what rank 0 sees; on rank 1 nothing is said
    *((engine, {}, [6, 4, SAID]) for engine in ENGINES),  # two epochs of three batches, of which a step takes two
    ("fsdp2", {"batches": [0, 3]}, [0, 0, SAID.replace("after 3", "after 0")]),
    ("fsdp1", {"batches": [4, 4]}, [8, 4]),
    ("fsdp2", {"kinds": ["generator", "generator"]}, [3, 2, SAID.replace("DataLoader", "generator")]),
    *(("fsdp1", {"verb": verb}, [3, 0, SAID]) for verb in ("validate", "test", "predict")),
    ("fsdp2", {"kinds": ["length", ""]}, "train_dataloader: got a length on rank 0 and no length on rank 1"),
    ("ddp", {"kinds": ["length", "length"]}, "trainer.num_training_batches: got 5 and 3"),
]
NOT_ALLOWED = "ContractError: precision contract broken: "
HOOK = "ConfigError: Hooked: got a hook on the parameter head.weight, which sharded parameters do not call"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Gan", {"engine": "fsdp1"}, "ConfigError: fsdp_strategy.engine: got fsdp1 with manual optimization (Gan"),
    # an optimizer of tensors from before the sharding; a parameter that a second backward pass would not find
    ("Detached", {}, "ContractError: optimizer 0 updates a tensor of shape (1, 12) that is not a parameter"),
    ("Own", {}, "ConfigError: Own.automatic_optimization: got False with the parameter scale"),
    *(("OwnReduction", {"engine": e, "contract": "error"}, f"{NOT_ALLOWED}reductions: all_reduce") for e in ENGINES),
    ("OwnState", {"contract": "error"}, f"{NOT_ALLOWED}optimizer state after the first step"),
    *(("Hooked", {"engine": e}, HOOK) for e in ENGINES[:2]),
    *(("Forces", {"engine": e}, "ContractError: a step calls torch.autograd.grad or ba") for e in ENGINES[:2]),
    ("ByShape", {"engine": "fsdp1"}, "ConfigError: fsdp_strategy.engine: got fsdp1 with group 0 of optimizer 0, which"),
    *(("Limited", {"engine": e}, "ConfigError: Limited: got max_norm of the embedding embedding") for e in ENGINES),
]


def assert_weights(found: dict[str, list[float]], wanted: dict[str, list[float]], tolerance: float = 1e-6) -> None:
    assert found.keys() <= wanted.keys()  # what is shared is saved once
    for name, values in found.items():
        assert values == pytest.approx(wanted[name], rel=0, abs=tolerance), name


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    found = on_ranks_each("live", 1, list(LIVES.values()), strategy=None)
    return {life: wanted for life, (wanted,) in zip(LIVES, found, strict=True)}


@pytest.mark.parametrize("life", LIVES)
def test_weights_and_outputs_are_those_of_plain_lightning(plain: dict[str, Any], life: str) -> None:
    """Outputs are of ``self(x)`` in ``on_train_epoch_end`` and after everything, outside of any step."""
    wanted, engines = plain[life], UNDER.get(LIVES[life]["module"], ENGINES[:2])
    cases = [{"strategy": {"engine": engine, "precision": "fp32"}} for engine in engines]
    for engine, ranks in zip(engines, on_ranks_each("live", 2, cases, **LIVES[life]), strict=True):
        for found in ranks:
            assert_weights(found["weights"], wanted["weights"])
            for mine, theirs in zip(found["outputs"], wanted["outputs"], strict=True):
                assert mine == pytest.approx(theirs, abs=1e-5), engine


def test_layers_and_matrices_in_the_root_take_rows_as_they_come() -> None:
    for module, precision in (("Looks", "mixed"), ("Conv", "low_precision")):
        wanted = on_ranks("live", 1, module=module, strategy=None)[0]["weights"]
        cases = [{"strategy": {"engine": engine, "precision": precision}} for engine in ENGINES]
        for found in itertools.chain(*on_ranks_each("live", 2, cases, module=module)):
            assert_weights(found["weights"], wanted, 0.05)


def test_what_is_refused() -> None:
    cases = [{"module": module, "strategy": {"precision": "fp32", **strategy}} for module, strategy, _ in REFUSED]
    for (*_, words), said in zip(REFUSED, on_ranks_each("refused", 2, cases), strict=True):
        assert all(text.startswith(words) for text in said), said
    hooks = (("fsdp2", "register_hook", HOOK), ("fsdp1", "register_post_accumulate_grad_hook", HOOK))
    late = [
        {"arguments": {"hook": hook, "when": "fit"}, "strategy": {"engine": engine, "precision": "fp32"}}
        for engine, hook, _ in (*hooks, ("fsdp2", "register_post_accumulate_grad_hook", ""))
    ]
    *refused, called = on_ranks_each("refused", 2, late, module="Hooked")
    assert all(text.startswith(HOOK) for text in itertools.chain(*refused)), refused
    writes = [{"arguments": {"block": block}, "strategy": {"precision": "mixed"}} for block in (True, False)]
    names = ("layers.1.0.bias", "head.0.bias")
    for found, name in zip(on_ranks_each("refused", 2, writes, module="Writes"), names, strict=True):
        words = f"ContractError: the forward pass changes the parameter {name} in place, which fsdp2 would lose"
        assert all(text.startswith(words) for text in found), found
    allowed = [{"module": "Penalty", "engine": "fsdp2"}, {"module": "ByShape", "engine": "fsdp2"}]
    allowed.append({"module": "ByName", "engine": "fsdp1"})
    cases = [{"module": c["module"], "strategy": {"engine": c["engine"], "precision": "fp32"}} for c in allowed]
    penalty, by_shape, by_name = on_ranks_each("refused", 2, cases)
    assert all("a parameter is a shard (DTensor)" in text for text in penalty), penalty
    assert by_shape == by_name == ["nothing"] * 2
    assert called == ["nothing"] * 2  # torch calls these hooks with the shards
    again = {"precision": "mixed", "state_dict": "full"}
    for text in on_ranks("refused", 2, module="Conv", strategy={"precision": "fp32"}, again=again):
        assert text.startswith("ConfigError: fsdp_strategy: got {'precision': 'mixed'}")
        assert "load_weights" in text


@pytest.mark.parametrize("module", ["Sgd", "Unused", "LastUnused", "Chosen", "Averaged"])
def test_a_resume_has_the_learning_rates_and_weights_of_one_run(tmp_path: Path, module: str) -> None:
    """SGD without momentum has no tensors of state; parameters that were never used have none under AdamW."""
    wanted = on_ranks("resumed", 1, module=module, strategy=None, folder=tmp_path / "plain")[0]
    for engines, ranks in ((("ddp",), 2), (("single",), 1)) if module == "Averaged" else ((ENGINES, 2),):
        cases = [{"strategy": {"engine": e, "precision": "fp32"}, "folder": str(tmp_path / e)} for e in engines]
        for found in itertools.chain(*on_ranks_each("resumed", ranks, cases, module=module)):
            assert found["rates"] == wanted["rates"]
            assert_weights(found["weights"], wanted["weights"])


def test_what_a_resume_or_shards_change_is_said(tmp_path: Path) -> None:
    cases = [
        {"module": module, "strategy": {"engine": engine, "precision": "fp32"}, "folder": str(tmp_path / module)}
        for module, engine in (("Plateau", "fsdp2"), ("Clips", "fsdp1"), ("Unfreezes", "fsdp2"))
    ]
    (plateau, _), (clips, _) = on_ranks_each("resumed", 2, cases[:2])
    assert any(text.startswith("Lightning skips the step of ReduceLROnPlateau") for text in plateau["said"])
    assert any(text.startswith("Clips calls clip_grad_norm_, which on fsdp1") for text in clips["said"])
    with pytest.raises(RankError, match="BackboneFinetuning had added 1 group"):
        on_ranks_each("resumed", 2, cases[2:])


def test_a_resume_in_the_module_of_a_fit_that_failed(tmp_path: Path) -> None:
    """Its gradients, of a step that never came, are left behind."""
    for engine in ENGINES:
        job = {"module": "Unused", "strategy": {"engine": engine, "precision": "fp32"}, "folder": tmp_path / engine}
        wanted = on_ranks("resumed", 2, **job)[0]
        for found in on_ranks("resumed", 2, **job, fails=True):
            assert_weights(found["weights"], wanted["weights"])


def test_the_batch_arrives_as_the_loader_gives_it() -> None:
    """What is cast is what goes into layers; targets of 1000 and more keep their fractions on every engine."""
    engines = ({"engine": "ddp"}, {"engine": "fsdp2", "precision": "fp16_mixed"}, {"engine": "fsdp1"})
    wanted, *others = on_ranks_each("live", 2, [{"strategy": engine} for engine in engines], module="Exact")
    for found in others:
        assert [one["targets"] for one in found] == [one["targets"] for one in wanted]


def test_batch_norm_validates_as_its_checkpoint(tmp_path: Path) -> None:
    """Every rank has statistics of its own rows; from the validation on they are rank 0's."""
    modes = {"fsdp2": "mixed", "fsdp1": "mixed", "ddp": "fp32"}.items()
    cases = [{"strategy": {"engine": e, "precision": mode}, "folder": str(tmp_path / e)} for e, mode in modes]
    for live, saved in itertools.chain(*on_ranks_each("validated_again", 2, cases)):
        assert live == saved


def test_a_batch_more_on_one_rank_is_refused_instead_of_waited_for() -> None:
    """Of seven rows Lightning gives rank 0 four and rank 1 three: two batches and one."""
    for rows in (8, 7):
        *both, wanted = on_ranks_each("predicted", 2, IN_FP32, rows=rows)
        assert [len(one) for one in wanted] == [4, rows - 4]
        for found in both:
            if rows == 7:
                assert [one.splitlines()[0] for one in found] == ["trainer.num_predict_batches: got [2] and [1]"] * 2
            else:
                assert found == [pytest.approx(one, abs=1e-5) for one in wanted]


@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_that_are_not_alike_are_refused_before_a_step(engine: str) -> None:
    """An option that only a step shows, by hooks or the function of a schedule, is found before that step."""
    for found in on_ranks("unlike", 2, whats=[*UNLIKE, "nothing"], strategy={"engine": engine, "precision": "fp32"}):
        for (text, steps), (words, wanted) in zip(found, UNLIKE.values(), strict=True):
            assert text.startswith(words)
            assert steps == wanted


def test_loaders_without_a_length_end_together() -> None:
    """Where copies evaluate, which wait for nobody, each rank sees its own batches."""
    alone = ("ddp", {"verb": "validate"}, None)
    cases = [
        {"batches": [5, 3], "strategy": {"engine": engine, "precision": "fp32"}, **case}
        for engine, case, _ in (*ALIKE_BATCHES, alone)
    ]
    *together, last = on_ranks_each("ended", 2, cases)
    for (first, second), (*_, wanted) in zip(together, ALIKE_BATCHES, strict=True):
        assert (first, second) == (wanted, wanted if isinstance(wanted, str) else wanted[:2])
    assert last == [[5, 0], [3, 0]]


def test_an_error_before_a_model_is_filled_is_the_last_one_that_is_shown(tiny_model: Path) -> None:
    """Lightning's teardown moves models to the host, and its Ctrl-C ends the process."""
    one = ["ArithmeticError"]
    wanted = [one, ["KeyboardInterrupt", "SystemExit"], one, one, one, one]
    for strategy, finder in (
        ({"engine": "ddp"}, "ConfigError"),
        ({"engine": "fsdp2"}, "ConfigError"),
        ("auto", "MisconfigurationException"),
    ):
        found = on_ranks("ended_early", 1, folder=str(tiny_model), strategy=strategy)
        assert found == [[*wanted, [finder]]], strategy
    assert on_ranks("ended_early", 1, folder="", strategy={"engine": "ddp"}, ours=False) == [wanted[:2]]


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_a_module_that_is_on_meta_is_the_same_on_all_ranks(engine: str) -> None:
    for sharding, ranks, more in (("no_shard", 2, {}), ("hybrid_shard", 4, {"replicate_degree": 2})):
        strategy = {"engine": engine, "precision": "fp32", "sharding": sharding, **more}
        first, *others = on_ranks("live", ranks, module="PartlyMeta", strategy=strategy)
        assert all(abs(weight) < 2 for weights in first["weights"].values() for weight in weights)
        assert all(other["weights"] == first["weights"] for other in others)
