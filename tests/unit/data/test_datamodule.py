"""The data module in a Trainer, and its loaders on ranks that are only claimed."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

import lit_fsdp
from lit_fsdp.callbacks.checkpoint import _count_in_micro_batches_of
from lit_fsdp.config.data import SourceConfig
from lit_fsdp.datamodule import CausalLMDataModule
from lit_fsdp.errors import ConfigError, DataError
from lit_fsdp.metrics.step_metrics import end_of
from tests.unit.data.conversations import LETTERS

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",  # Lightning's own use of torch's pytree
    "ignore:.*GPU available but not used",
)


@pytest.fixture
def tokenizer(small: Any) -> Any:
    small.chat_template = LETTERS
    yield small
    small.chat_template = None


def _alone(**options: Any) -> Any:
    """A Trainer of one rank, as far as ``setup`` looks at it."""
    strategy = SimpleNamespace(reduce_boolean_decision=lambda decision: decision, broadcast=lambda found: found)
    given = {
        "world_size": 1,
        "global_rank": 0,
        "accumulate_grad_batches": 1,
        "limit_val_batches": 1.0,
        "strategy": strategy,
        **options,
    }
    given |= {"fast_dev_run": False, "overfit_batches": 0.0, "limit_train_batches": 1.0}
    return SimpleNamespace(**given)


class _Recorder(LightningModule):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        self.seen.append((self.trainer.global_step, batch["row"].tolist()))
        return self.weight * 1.0

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.seen.append((-1, batch["row"].tolist()))

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _trainer(**options: Any) -> Trainer:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"max_epochs": -1, **dict.fromkeys(quiet, False), **options}
    return Trainer(accelerator="cpu", devices=1, **options)


class _SaveAt(Callback):
    """Saves after an optimizer step, as checkpoints of a run are saved."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path, weights_only=False)


def _fit(tokenizer: Any, max_steps: int, ckpt_path: Path | None = None, save: Any = None, **options: Any) -> Any:
    given = {"train": "generated:10", "global_batch_size": 4, "micro_batch_size": 2, "seed": 3, **options}
    module, trainer = _Recorder(tokenizer), _trainer(max_steps=max_steps, callbacks=[save] if save else [])
    trainer.fit(module, CausalLMDataModule(**given), ckpt_path=ckpt_path, weights_only=True)
    return module, trainer


def test_in_somebodys_own_trainer(tokenizer: Any):
    """Ten rows: two global batches of two micro-batches, then one of a single micro-batch, epoch after epoch."""
    before = torch.get_rng_state()
    module, trainer = _fit(tokenizer, 6)
    assert _fit(tokenizer, 6, num_workers=2)[0].seen == module.seen
    assert torch.equal(torch.get_rng_state(), before)
    assert [step for step, _ in module.seen] == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    epochs = [list(chain(*(rows for _, rows in part))) for part in (module.seen[:5], module.seen[5:])]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert (trainer.accumulate_grad_batches, trainer.current_epoch) == (2, 2)


class _Counts(Callback):
    """Saves and adapts counters as the callback of our strategy does."""

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["accumulate"] = trainer.accumulate_grad_batches

    def on_load_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        _count_in_micro_batches_of(trainer, checkpoint, checkpoint["accumulate"], 1)


@pytest.mark.parametrize(
    "parts",
    [
        [(16, 8, 3), (32, 8, None)],  # 48 of 100 rows are done; the first batch of 32 has the 16 that end the second
        [(16, 16, 5), (8, 8, None)],
        [(16, 4, 2), (24, 12, 5), (10, 2, 9), (16, 16, None)],  # again and again
        [(16, 16, 7), (8, 8, None)],  # at the end of the first epoch
        [(32, 8, 4), (16, 8, 5), (50, 25, None)],
        [(7, 7, 1), (100, 50, 2), (3, 3, None)],
    ],
)
def test_a_resume_with_another_global_batch_continues_after_the_same_rows(
    tokenizer: Any, tmp_path: Path, parts: list[Any], caplog: pytest.LogCaptureFixture
):
    """Each of 100 rows once in each of two epochs, however often the size changes; the last step is as predicted."""
    path, rows = None, []
    for number, (size, micro, last) in enumerate(parts):
        save = _SaveAt(last, tmp_path / f"{number}.ckpt")
        module, data = (
            _Recorder(tokenizer),
            CausalLMDataModule(train="generated:100", global_batch_size=size, micro_batch_size=micro, seed=3),
        )
        trainer = _trainer(max_steps=last or -1, max_epochs=2, callbacks=[save, _Counts()])
        trainer.fit(module, data, ckpt_path=path, weights_only=True)
        path = save.path
        rows += [row for _, part in module.seen for row in part if row >= 0]
        by_step = [sum(len(part) for step, part in module.seen if step == n) for n in {step for step, _ in module.seen}]
        assert max(by_step) <= size
    assert sorted(rows[:100]) == sorted(rows[100:]) == list(range(100))
    assert rows[:100] == data._order().permutation(0).tolist()
    assert trainer.global_step == end_of(trainer)
    assert f"global_batch_size {parts[-2][0]} → {parts[-1][0]}" in caplog.text


def test_a_limit_of_steps_stays_after_a_resume_with_another_global_batch(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Also if epochs would end the run earlier or later, and if the counters of the Trainer are not adapted."""
    for epochs, last, callbacks in ((2, 12, [_Counts()]), (1, 10, [_Counts()]), (-1, 12, [_Counts()]), (-1, 12, [])):
        save, path = _SaveAt(3, tmp_path / f"{epochs}{len(callbacks)}.ckpt"), None
        for size, limit in ((16, 3), (8, 12)):
            data = CausalLMDataModule(train="generated:100", global_batch_size=size, micro_batch_size=8, seed=3)
            trainer = _trainer(max_steps=limit, max_epochs=epochs, callbacks=[save, *callbacks])
            trainer.fit(_Recorder(tokenizer), data, ckpt_path=path, weights_only=True)
            path = save.path
        assert trainer.global_step == end_of(trainer) == last
        assert ("without the callback lit_fsdp.Checkpoint" in caplog.text) is (not callbacks)


def test_a_resume_with_other_rows_ends_its_epochs(tokenizer: Any, tmp_path: Path):
    """Of more rows, those after as many batches; of fewer than are done, those of the next epoch."""
    for num_rows, last in ((60, 24), (20, 9)):
        save = _SaveAt(5, tmp_path / f"{num_rows}.ckpt")
        given: Any = {"callbacks": [save, _Counts()], "max_steps": 5}
        for rows in (40, num_rows):
            module, trainer = _Recorder(tokenizer), _trainer(max_epochs=2, **given)
            data = CausalLMDataModule(train=f"generated:{rows}", global_batch_size=5, micro_batch_size=5, seed=3)
            trainer.fit(module, data, ckpt_path=save.path if rows == num_rows else None, weights_only=True)
            given = {"callbacks": [_Counts()]}
        assert trainer.global_step == end_of(trainer) == last


def test_resumed_on_other_data_is_told(tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    _fit(tokenizer, 2, save=_SaveAt(2, tmp_path / "cut.ckpt"))
    _fit(tokenizer, 3, tmp_path / "cut.ckpt")
    assert "global batches differ" not in caplog.text
    _fit(tokenizer, 3, tmp_path / "cut.ckpt", seed=4, train="generated:11")
    assert "global batches differ from those of the checkpoint: num_rows 10 → 11, fingerprint " in caplog.text
    assert "seed 3 → 4" in caplog.text


def test_validation_and_test_in_a_trainer(tokenizer: Any):
    module, _ = _fit(tokenizer, 3, val="generated:3")
    assert [rows for step, rows in module.seen if step == -1] == [[0, 1], [2]] * 2  # sanity check, and after the epoch
    module = _Recorder(tokenizer)
    _trainer().test(module, CausalLMDataModule(test="generated:3", micro_batch_size=2), verbose=False)
    assert module.seen == [(-1, [0, 1]), (-1, [2])]


def test_accumulation_that_disagrees_is_refused(tokenizer: Any):
    table: list[tuple[int, dict[str, Any], str]] = [
        (4, {"accumulate_grad_batches": 3}, r"trainer\.accumulate_grad_batches: got 3"),
        (4, {"callbacks": [GradientAccumulationScheduler({1: 2})]}, r"trainer\.callbacks: got GradientAccumulationSch"),
        (4, {"overfit_batches": 3}, r"trainer\.overfit_batches: got 3"),
        (4, {"limit_train_batches": 3}, r"trainer\.limit_train_batches: got 3"),
        (5, {}, r"data\.global_batch_size: got 5 with micro_batch_size 2 on 1 ranks"),
    ]
    for size, options, said in table:
        data = CausalLMDataModule(train="generated:10", global_batch_size=size, micro_batch_size=2)
        with pytest.raises(ConfigError, match=said):
            _trainer(max_steps=1, **options).fit(_Recorder(tokenizer), data)


def test_bad_input(tokenizer: Any):
    with pytest.raises(ConfigError, match=r"write data\.train"):
        CausalLMDataModule(trian="rows.jsonl")
    with pytest.raises(ConfigError, match=r"call datamodule\.attach"):
        CausalLMDataModule(train="generated:4").prepare(("train",))
    with pytest.raises(ConfigError, match=r"set data\.test: rows\.jsonl"):
        _trainer().test(_Recorder(tokenizer), CausalLMDataModule(train="generated:4"))


def test_packing_without_a_proof_is_said(tokenizer: Any, caplog: pytest.LogCaptureFixture):
    for callbacks, warned in (([lit_fsdp.IsolationProof()], False), ([], True)):
        data = CausalLMDataModule(train="generated:22", global_batch_size=8, micro_batch_size=2, packing=True)
        data.attach(tokenizer, seed=1)
        data.trainer = _alone(callbacks=callbacks)
        data.setup("fit")
        assert ("lit_fsdp.IsolationProof()" in caplog.text) is warned


def test_all_ranks_take_the_commit_that_the_first_one_found(tokenizer: Any, tmp_path: Path, hub: Any):
    """A push to the hub between two ranks, and a rank that has not asked."""
    first, late, new = (CausalLMDataModule(train="somebody/name", cache_dir=str(tmp_path)) for _ in range(3))
    for data in (first, late, new):
        data.attach(tokenizer, seed=1)
        data.trainer = _alone()
    first.prepare(["train"])
    hub.commits[None] = "b" * 40
    late.prepare(["train"])
    said: list[Any] = []
    first.trainer.strategy.broadcast = lambda found: said.append(found) or found  # type: ignore[method-assign,union-attr]
    for data in (late, new):
        data.trainer.strategy.broadcast = lambda _: said[0]  # type: ignore[method-assign,union-attr]
    for data in (first, late, new):
        data.setup("fit")
        assert data.config.train == [SourceConfig(source="somebody/name", revision="a" * 40)]
        assert data._samples["train"].rows.folder == first._samples["train"].rows.folder


def test_a_stream_resumes_from_the_commit_it_was_begun_with_or_not(tokenizer: Any, tmp_path: Path, hub: Any):
    """An upstream push between save and resume: the rows would be others under the same name."""
    options = {"train": "somebody/name", "streaming": True, "shuffle_window": 6}
    whole, _ = _fit(tokenizer, 6, save=_SaveAt(4, tmp_path / "cut.ckpt"), **options)
    after, _ = _fit(tokenizer, 6, tmp_path / "cut.ckpt", **options)
    assert after.seen == [seen for seen in whole.seen if seen[0] >= 4]
    hub.commits[None] = "b" * 40
    with pytest.raises(DataError, match=rf"the stream differs .*revisions .*{'a' * 40}.* → .*{'b' * 40}"):
        _fit(tokenizer, 6, tmp_path / "cut.ckpt", **options)
