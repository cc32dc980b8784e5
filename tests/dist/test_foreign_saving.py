"""Checkpoints of somebody else's module, with our callback and with Lightning's."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from lit_fsdp import load_weights
from lit_fsdp.checkpoint.store import load_state
from tests.dist.foreign_jobs import ForeignNet, ForeignNetWithValidation, foreign_rows
from tests.dist.forks import on_ranks, on_ranks_each
from tests.dist.saving_jobs import Changed
from tests.runs import MORE

ENGINES = ("fsdp2", "fsdp1")


@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
def test_rank_0_decides_what_is_best(tmp_path: Path, engine: str) -> None:
    """A metric without ``sync_dist``: it improves here and worsens there, or one rank alone has it."""
    better, worse, none = [3.0, 2.0, 1.0, 4.0], [1.0, 2.0, 3.0, 0.0], [None] * 4
    cases = [(better, worse, "step-00000003"), (better, none, "step-00000003"), (none, better, "")]
    cases = cases if engine == "fsdp2" else cases[:1]
    jobs: list[dict[str, Any]] = [
        {"run": str(tmp_path / str(index)), "told": [first, second]} for index, (first, second, _) in enumerate(cases)
    ]
    saving = {"filename": "{step}-{val_loss:.0f}", "save_on_train_epoch_end": False}
    jobs.append({"run": str(tmp_path / "lightning"), "told": [better, worse], "lightnings": saving})
    *ours, found = on_ranks_each("train_with_own_metrics", 2, jobs, strategy={"engine": engine})
    assert [one["there"] for one in found] == [["step=1-val_loss=3.ckpt"]] * 2  # what is better on every rank
    assert found[0]["best"] == "step=1-val_loss=3.ckpt"
    for (*_, best), found in zip(cases, ours, strict=True):
        there = [name for name in (best, "step-00000004") if name]
        assert found == [{"there": there, "best": best, "score": 1.0 if best else None}] * 2


@pytest.mark.parametrize(
    ("engine", "saving", "there"),
    [
        ("fsdp2", {"filename": "{step}", "save_last": True}, {"step=6.ckpt": 6, "last.ckpt": 6}),
        ("fsdp1", {"filename": "{step}", "save_last": "link"}, {"step=6.ckpt": 6, "last.ckpt": 6}),
        ("ddp", {"filename": "model"}, {"model.ckpt": 6}),
        ("fsdp2", {"filename": "best", "monitor": "step", "mode": "max"}, {"best.ckpt": 6}),
    ],
)
def test_a_name_is_used_again(tmp_path: Path, engine: str, saving: dict[str, Any], there: dict[str, int]) -> None:
    """``save_last``, as a copy or a link, a fixed file name, and the Trainer twice at one path."""
    job = {"strategy": {"engine": engine}, "run": tmp_path, "lightnings": saving}
    found = on_ranks("train_and_save_again", 2, **job)
    assert found[0]["there"] == {**there, "by-hand.ckpt": 6}
    assert found[0]["hidden"] == []
    if "save_last" in saving:
        again = on_ranks("train_and_save_again", 2, steps=8, ckpt_path=tmp_path / "last.ckpt", **job)
        assert [len(one["losses"]) for one in again] == [2, 2]
        assert again[0]["there"] == {"step=8.ckpt": 8, "last.ckpt": 8, "by-hand.ckpt": 8}


def test_an_accumulation_that_changes_with_the_epochs_goes_on_where_it_was(tmp_path: Path) -> None:
    """At the end of an epoch, in the middle, and after its last window, which is a short one."""
    job = {"strategy": {"engine": "fsdp2"}, "schedule": {"1": 2, "2": 3}}
    whole = on_ranks("train_with_schedule", 2, run=tmp_path / "whole", **job)[0]
    assert whole["steps"] == 5 + 3 + 2
    for step in (5, 6, 9):
        saved = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
        again = on_ranks("train_with_schedule", 2, run=tmp_path / str(step), ckpt_path=saved, **job)[0]
        assert again["seen"] == [one for one in whole["seen"] if one[0] >= step], step
        assert again["steps"] == whole["steps"]


def test_rows_of_lightnings_sampler_on_other_ranks(tmp_path: Path) -> None:
    """As many rows as are left, resumed in the middle of an epoch (step 4 of 6 on two ranks) and at its end."""
    saved, at = on_ranks("see_rows", 2, run=tmp_path / "two", epochs=1), tmp_path / "two" / "checkpoints"
    assert [one["steps"] for one in saved] == [6, 6]
    for ranks, step, steps in ((1, 4, 20), (1, 6, 18), (4, 4, 8), (4, 6, 9), (2, 4, 12)):
        run, start = tmp_path / f"{ranks}-{step}", at / f"step-{step:08d}"
        found = on_ranks("see_rows", ranks, run=run, epochs=2, ckpt_path=start)
        seen = [[row for one in found for epoch, _, row in one["seen"] if epoch == number] for number in (0, 1)]
        assert len(seen[0]) == (16 if step == 4 else 0), (ranks, step)  # Lightning begins the loader anew
        assert sorted(seen[1]) == list(range(48)), (ranks, step)
        assert (found[0]["steps"], found[0]["total"]) == (steps, steps), (ranks, step)


def test_hyperparameters_that_no_checkpoint_can_hold(tmp_path: Path) -> None:
    """Said before the first step, with every key; without a checkpoint callback nobody minds them."""
    job = {"strategy": {"engine": "fsdp2"}, "run": tmp_path}
    saved, unsaved = on_ranks_each("said_at_the_start", 2, [{"saves": True}, {"saves": False}], **job)
    for text, steps in saved:
        assert steps == 0
        assert "Described.hparams: got layer: cannot save a builtins.type; options.make: cannot save" in text
        assert "write save_hyperparameters(ignore=['layer', 'options'])" in text
    assert unsaved == [["", 1]] * 2


@pytest.mark.parametrize("engines", [(*ENGINES, "ddp"), ("single",)])
def test_what_every_save_writes_is_built_before_the_first_step(tmp_path: Path, engines: tuple[str, ...]) -> None:
    wanted = {"checkpoint_manifest": "object is not JSON", "checkpoint_files": "tokenizer cannot"}
    cases = [{"strategy": {"engine": e}, "unwritable": what} for e, what in itertools.product(engines, wanted)]
    found = on_ranks_each("said_at_the_start", min(len(engines), 2), cases, run=tmp_path, saves=True)
    for case, ranks in zip(cases, found, strict=True):
        for text, steps in ranks:
            assert steps == 0
            assert wanted[str(case["unwritable"])] in text


@pytest.mark.parametrize("lightnings", [False, True])
def test_a_removal_that_fails_is_a_warning(tmp_path: Path, lightnings: bool) -> None:
    job = {"strategy": {"engine": "fsdp2"}, "run": tmp_path, "lightnings": lightnings}
    found = on_ranks("train_where_nothing_can_be_removed", 2, **job)
    assert [Path(name).stem for name in found[0]["there"]] == ["step-00000003"]
    said = [text for text in found[0]["messages"] if "cannot be deleted: nfs0001: Device or resource busy" in text]
    assert len(said) == 2
    assert found[1]["messages"] == []


@pytest.mark.parametrize("engine", [*ENGINES, "ddp"])
def test_a_module_that_the_checkpoint_is_not_quite_of(tmp_path: Path, engine: str) -> None:
    """What it lacks keeps its values and has no optimizer state yet; also in this process, without a Trainer."""
    layouts = ("sharded", "full") if engine == "fsdp2" else ("sharded",)
    cases = [{"strategy": {"engine": engine, "state_dict": one}, "run": str(tmp_path / one)} for one in layouts]
    for layout, (first, _) in zip(layouts, on_ranks_each("train_changed", 2, cases), strict=True):
        end, path = first["end"], tmp_path / layout / "step=2.ckpt"
        net = load_weights(ForeignNet(), path)
        assert {name: float(tensor.sum()) for name, tensor in net.state_dict().items()} == end
        assert load_weights(ForeignNet().bfloat16(), str(path)).head.weight.dtype == torch.bfloat16
        assert load_weights(Changed(strict=False), path).gate.sum() == 2
        with pytest.raises(RuntimeError, match=r'Missing key.*"gate"(.|\n)*Unexpected key.*"scale"'):
            load_weights(Changed(strict=True), path)
    job = cases[-1] | {"run": tmp_path / "again", "ckpt_path": path}
    (refused, _), (found, _) = on_ranks_each("train_changed", 2, [{}, {"strict": False}], **job)
    assert "missing in the checkpoint: model/gate" in refused
    assert "only in the checkpoint: model/scale" in refused
    assert found["start"] == {**{name: value for name, value in end.items() if name != "scale"}, "gate": 2.0}
    assert found["steps"] == {name: 2.0 for name in found["start"] if name != "gate"}
    assert found["end"].keys() == found["start"].keys()
    assert found["end"]["gate"] != 2.0


def test_a_file_of_lightnings_own_goes_on(tmp_path: Path) -> None:
    """Weights, optimizer, step and counters; the steps after it are those of Lightning's own strategy."""
    job = {"strategy": None, "run": tmp_path / "run"}
    first = on_ranks("train_changed", 2, **job)[0]
    saved = tmp_path / "run" / "step=2.ckpt"
    assert saved.is_file()
    job = {"run": tmp_path / "again", "ckpt_path": saved, "changed": False}
    strategies = [None, *({"engine": engine} for engine in (*ENGINES, "ddp"))]
    (wanted, _), *others = on_ranks_each("train_changed", 2, [{"strategy": one} for one in strategies], **job)
    for found, _ in others:
        assert found["start"] == pytest.approx(first["end"], rel=1e-6)
        assert set(found["steps"].values()) == {2.0}
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert found["end"] == pytest.approx(wanted["end"], rel=1e-5)


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("fsdp1", marks=MORE), "ddp"])
def test_callbacks_and_modules_go_on_with_the_state_of_their_rank(tmp_path: Path, engine: str) -> None:
    """As it was on as many ranks; on others DTensors are sharded anew, and what fits no rank is refused or said."""
    job = {"strategy": {"engine": engine}}
    kinds = ("shards", "sharded", "numbers", "odd")
    cases = [{"run": str(tmp_path / kind), "kind": kind} for kind in (*kinds, "first")]
    *alike, (first, second) = on_ranks_each("keep", 2, cases, **job)
    for kind, found in zip(kinds, alike, strict=True):
        assert [(one["same"], one["said"]) for one in found] == [(True, [])] * 2, kind
    # what rank 0 alone gives is every rank's, as with Lightning
    assert first["same"]
    assert second["given"] == first["given"] == {"it": {"words": ["a", [1.0, 1.0]]}}
    wanted = alike[1][0]["given"]
    for other, ranks in (("fsdp1", 3), ("fsdp2", 1), ("ddp", 1)) if engine == "fsdp2" else (("fsdp2", 3),):
        more = {"strategy": {"engine": other, "sharding": "no_shard" if ranks == 1 else "full_shard"}}
        more |= {"run": tmp_path / f"{other}-{ranks}"}
        cases = [{"kind": kind, "ckpt_path": str(tmp_path / kind / "step=2.ckpt")} for kind in kinds[1:]]
        sharded, (found, *_), (odd, *_) = on_ranks_each("keep", ranks, cases, **more)
        assert [one["given"] for one in sharded] == [wanted] * ranks, other
        assert found["given"] == {"it": {"seen": {"0": 0.5, "step": 2}, "last": 0, "best": 0.5}}
        assert f"differed between the 2 ranks that saved it; all {ranks} ranks resume with that of" in found["said"][0]
        assert "callbacks.Keeper.it.last, callbacks.Keeper.it.seen.0, callbacks.Keeper.it.seen.1" in found["said"][0]
        assert "tensors that each of 2 ranks saved separately: callbacks.Keeper.it.a" in odd["error"]
        assert "resume with the saved layout, drop that callback, or let it keep DTensors" in odd["error"]


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    wanted = {
        "lambda": "callbacks.Keeper.it.x.0: cannot save a builtins.builtin_function_or_method",
        "one rank's": "differ between ranks: state/callbacks/Keeper/it/x, state/mine/of_module/it/x",
    }
    job = {"strategy": {"engine": "fsdp2"}, "run": tmp_path}
    for kind, ranks in zip(wanted, on_ranks_each("keep", 2, [{"kind": kind} for kind in wanted], **job), strict=True):
        for found in ranks:
            assert found["steps"] == 0
            assert wanted[kind] in found["error"]


def plain_averages(**options: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Those of a plain loop of eight steps in one process, and its validations by them."""
    torch.manual_seed(11)
    net = ForeignNetWithValidation()
    every, start = options.get("every_steps", 1), options.get("start_step", 0)
    average = AveragedModel(net, avg_fn=get_ema_avg_fn(0.5))
    losses: list[float] = []
    made: Any = net.configure_optimizers()
    for step in range(1, 9):
        x, y = foreign_rows((step - 1) % 4)
        mse_loss(net(x), y).backward()
        made["optimizer"].step()
        made["optimizer"].zero_grad()
        made["lr_scheduler"]["scheduler"].step()
        if step >= start and (step - start) % every == 0:
            average.update_parameters(net)
        if step % 2 == 0:
            shown = average if average.n_averaged else net
            rows = (foreign_rows(100), foreign_rows(101))
            losses.append(sum(mse_loss(shown(x), y).item() for x, y in rows) / 2)
    return average.module.state_dict(), losses


def on_a_stop(run: Path, ranks: int, whole: list[Any], keys: tuple[str, ...], **job: Any) -> Path:
    """The checkpoint of a run that a signal has stopped; gone on with, it is the run that was not, to the bit."""
    stopped = on_ranks("average", ranks, run=run, stops=True, **job)
    assert all("stopped by a signal after step 4; the checkpoint is complete" in one["error"] for one in stopped)
    saved = run / "checkpoints" / "step-00000004"
    for one, before in zip(on_ranks("average", ranks, run=run, ckpt_path=saved, **job), whole, strict=True):
        assert [one[key] for key in keys] == [before[key] for key in keys]
        assert one["val"][-2:] == before["val"][-2:]
    return saved


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("fsdp1", marks=MORE), "ddp", "single"])
def test_averages_are_those_of_a_plain_loop_also_after_a_stop(tmp_path: Path, engine: str) -> None:
    ranks = 1 if engine == "single" else 2
    cases: list[dict[str, int]] = [{}, {"every_steps": 2, "start_step": 3}]
    jobs = [{"run": str(tmp_path / f"whole{len(options)}"), **options} for options in cases]
    for options, whole in zip(cases, on_ranks_each("average", ranks, jobs, strategy={"engine": engine}), strict=True):
        job = {"strategy": {"engine": engine}, **options}
        wanted, losses = plain_averages(**options)
        for one in whole:
            assert one["val"] == pytest.approx(losses, rel=1e-5)
            assert one["averages"].keys() == wanted.keys()
            for name, average in wanted.items():
                assert torch.allclose(torch.tensor(one["averages"][name]), average, rtol=1e-5, atol=1e-7), name
            assert one["live"] != one["averages"]
    saved = on_a_stop(tmp_path / "stopped", ranks, whole, ("averages", "live", "own"), **job)
    others = {"fsdp2": (("fsdp1", 4), ("single", 1)), "fsdp1": (("fsdp2", 4),), "ddp": (("fsdp1", 2), ("fsdp2", 1))}
    for other, count in others.get(engine, (("fsdp2", 2),)):
        more = {**job, "strategy": {"engine": other}}
        for one in on_ranks("average", count, run=tmp_path / other, ckpt_path=saved, **more):
            for name, average in wanted.items():
                assert torch.allclose(torch.tensor(one["averages"][name]), average, rtol=1e-4, atol=1e-6), (other, name)


def test_lightnings_average_stops_and_goes_on_too_and_says_where_it_never_begins(tmp_path: Path) -> None:
    """Until its first update it hands out the weights that training began with; ours hands out those of training."""
    job = {"strategy": {"engine": "ddp"}, "lightnings": True}
    whole = on_ranks("average", 2, run=tmp_path / "whole", **job)
    assert whole[0]["val"] == pytest.approx(plain_averages()[1], rel=1e-5)
    saved = on_a_stop(tmp_path / "stopped", 2, whole, ("live",), **job)
    assert load_state(saved)["current_model_state"]["head.weight"].shape == (1, 12)
    begin = {"update_starting_at_step": 8}
    late = [
        {"run": str(tmp_path / "late"), **one}
        for one in (begin, {"update_starting_at_step": 9, "update_starting_at_epoch": 8})
    ]
    epochs = {"run": str(tmp_path / "epochs"), "steps": -1, **begin}
    *refused, (one, _) = on_ranks_each("average", 2, [*late, epochs], **job)
    for text in (first["error"] for first, _ in refused):
        assert "EMAWeightAveraging, whose first update comes after the last of 8 steps" in text
    assert any("EMAWeightAveraging has not averaged yet" in text for text in one["said"])
    ours = [{"run": str(tmp_path / "ours")}, {"run": str(tmp_path / "ours-epochs"), "steps": -1}]
    (late_one, _), (one, _) = on_ranks_each("average", 2, ours, strategy={"engine": "fsdp2"}, start_step=9)
    assert late_one["error"].startswith("EMAWeights.start_step: got first averages after step 9\n")
    assert one["averages"] == {}
    assert any("training ended before the first averages" in text for text in one["said"])
