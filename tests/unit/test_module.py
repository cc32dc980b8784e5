"""The module in a Trainer of one process: gradients of sums, scaled once; schedules, groups, metrics, scores."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fsdp.datamodule import CausalLMDataModule
from lit_fsdp.errors import ConfigError
from lit_fsdp.module import CausalLMModule
from lit_fsdp.preference import PreferenceModule
from lit_fsdp.strategy import fsdp_strategy

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated:FutureWarning",  # Lightning's own use of torch's pytree
    "ignore:.*GPU available but not used",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
)
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "max_position_embeddings": 16}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 20, "initializer_range": 0.3}
TINY = {"model_type": "llama", **HEADS, **SIZES, "tie_word_embeddings": True}
Batch = dict[str, torch.Tensor]


def rows(*first_supervised: int, length: int = 8) -> Batch:
    """One row per number, which supervises the tokens from there on; the last row is padded by two."""
    generator = torch.Generator().manual_seed(sum(first_supervised))
    ids = torch.randint(0, 20, (len(first_supervised), length), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    for row, start in enumerate(first_supervised):
        labels[row, :start] = -100
    mask[-1, -2:] = 0
    labels[-1, -2:] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "row": torch.arange(len(first_supervised))}


class Recorder(Callback):
    """Gradients, learning rate and loss of each optimizer step, as the optimizer saw them."""

    def __init__(self) -> None:
        self.grads: list[dict[str, torch.Tensor]] = []
        self.logged: list[dict[str, float]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hook the optimizer: Lightning computes gradients inside its step."""

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.grads.append({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})

        trainer.optimizers[0].register_step_post_hook(after)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step > len(self.logged):
            self.logged.append({n: float(trainer.callback_metrics.get(n, 0)) for n in ("train_loss", "lr")})


def quiet(**options: Any) -> Trainer:
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(accelerator="cpu", devices=1, **silent, **options)


def module(cls: type[CausalLMModule] = CausalLMModule, **optim: Any) -> CausalLMModule:
    torch.manual_seed(3)
    return cls(name=TINY, optim=optim)


def fit(batches: list[Batch], net: CausalLMModule | None = None, accumulate: int = 1, **options: Any) -> Any:
    """The module and what its optimizer saw."""
    net, recorder = net or module(schedule="constant", lr=0.0), Recorder()
    trainer = quiet(callbacks=[recorder], accumulate_grad_batches=accumulate, max_epochs=1, **options)
    trainer.fit(net, DataLoader(batches, batch_size=None))
    return net, recorder


def mean_loss(net: CausalLMModule, batches: list[Batch]) -> torch.Tensor:
    """Plainly: the mean over all supervised tokens of all batches."""
    sums, count = torch.zeros(()), 0
    for batch in batches:
        logits = net.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        sums = sums + F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        count += int((batch["labels"][:, 1:] != -100).sum())
    return sums / max(1, count)


def assert_gradients(net: CausalLMModule, found: dict[str, torch.Tensor], loss: torch.Tensor) -> None:
    """‖Δ‖/‖g‖ ≤ 1e-6 against autograd."""
    named = dict(net.named_parameters())
    assert found.keys() == named.keys()
    for name, grad in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
        assert (found[name] - grad).norm() <= 1e-6 * grad.norm(), name


def test_gradients_are_those_of_the_mean_over_supervised_tokens():
    """Of a global batch, not a mean of means; a short last accumulation is scaled alike."""
    batches = [rows(1, 6), rows(7, 3), rows(4, 4)]
    for accumulate, windows in (
        (1, [batches[:1], batches[1:2], batches[2:]]),
        (3, [batches]),
        (2, [batches[:2], batches[2:]]),
    ):
        net, recorder = fit(batches, accumulate=accumulate)
        for grads, logged, window in zip(recorder.grads, recorder.logged, windows, strict=True):
            assert_gradients(net, grads, mean_loss(net, window))
            assert logged["train_loss"] == pytest.approx(mean_loss(net, window).item(), rel=1e-6)


def test_one_line_makes_kernels_deterministic(monkeypatch):
    """The environment is what cuBLAS and FlashAttention ask."""
    names = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")
    for name in names:
        monkeypatch.setenv(name, "")
    try:
        fit([rows(1)], deterministic=True)
        assert [os.environ[name] for name in names] == [":4096:8", "1"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_training_step_of_ones_own_has_lightnings_mean():
    """Of micro-batches and ranks, as in any LightningModule."""

    class Own(CausalLMModule):
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            return mean_loss(self, [batch])

    batches = [rows(1, 6), rows(7, 3)]
    net, recorder = fit(batches, module(Own, schedule="constant", lr=0.0), accumulate=2)
    assert_gradients(net, recorder.grads[0], (mean_loss(net, batches[:1]) + mean_loss(net, batches[1:])) / 2)


def test_a_global_batch_without_supervised_tokens_gives_zero():
    net, recorder = fit([rows(8, 8), rows(1, 1)], module(schedule="constant", lr=0.1))
    assert all(not grad.any() for grad in recorder.grads[0].values())
    assert recorder.logged[0]["train_loss"] == 0.0
    assert all(param.isfinite().all() for param in net.parameters())
    assert recorder.logged[1]["train_loss"] > 0


def test_the_learning_rate_follows_the_schedule_to_the_earlier_end():
    options = {"lr": 1.0, "warmup_steps": 2, "schedule": "cosine", "min_lr_ratio": 0.1}
    _, recorder = fit([rows(1)] * 8, module(**options), max_steps=6)
    wanted = [0.5, 1.0, *(0.1 + 0.9 * (1 + math.cos(math.pi * part / 4)) / 2 for part in range(4))]
    assert [logged["lr"] for logged in recorder.logged] == pytest.approx(wanted, rel=1e-6)
    _, recorder = fit([rows(1)] * 4, module(lr=1.0, schedule="linear"), max_steps=100)
    assert [logged["lr"] for logged in recorder.logged] == pytest.approx([1.0, 0.75, 0.5, 0.25])
    for batches, steps in ((6, 100), (9, 6)):  # of a constant rate too the share is of the whole run
        _, recorder = fit([rows(1)] * batches, module(lr=1.0, schedule="constant", warmup_ratio=0.5), max_steps=steps)
        assert [logged["lr"] for logged in recorder.logged] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0])


def test_a_warmup_that_epochs_end_is_warned_of(caplog):
    for steps, is_too_long in ((5, True), (4, False)):
        caplog.clear()
        fit([rows(1)] * 4, module(lr=1.0, schedule="cosine", warmup_steps=steps))
        assert ("warmup_steps is 5, the run has 4 steps" in caplog.text) is is_too_long


def test_a_schedule_needs_an_end():
    """Epochs of a stream are none."""
    stream = (rows(1) for _ in range(3))
    for epochs, batches in ((-1, DataLoader([rows(1)], batch_size=None)), (2, stream)):
        with pytest.raises(ConfigError, match="max_steps or max_epochs, which schedule cosine needs to decay"):
            quiet(max_epochs=epochs, max_time={"seconds": 1}).fit(module(), batches)
        own = module(schedule="constant", warmup_ratio=0.1)
        with pytest.raises(ConfigError, match="max_steps or max_epochs, which warmup_ratio needs"):
            quiet(max_epochs=epochs, max_time={"seconds": 1}).fit(own, batches)


def test_validation_weighs_by_token_over_batches_and_loaders():
    net, batches = module(), [[rows(1, 6), rows(7, 3), rows(8, 8)], [rows(2)]]
    loaders = [DataLoader(part, batch_size=None) for part in batches]
    (found,) = quiet().validate(net, loaders[0], verbose=False)
    with torch.no_grad():
        wanted = [mean_loss(net, part).item() for part in (batches[0] + batches[1], batches[0])]
    assert found["val_loss"] == pytest.approx(wanted[1], rel=1e-6)
    assert found["val_perplexity"] == pytest.approx(math.exp(wanted[1]), rel=1e-5)
    predicted = [net.model(input_ids=b["input_ids"]).logits[:, :-1].argmax(-1) for b in batches[0]]
    hits = sum((p == b["labels"][:, 1:]).sum() for p, b in zip(predicted, batches[0], strict=True))
    assert found["val_token_accuracy"] == pytest.approx(float(hits) / 11, rel=1e-6)
    trainer = quiet()
    trainer.validate(net, loaders, verbose=False)
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(wanted[0], rel=1e-6)


def test_scores_per_row_leave_fillers_out():
    net, batch = module(), rows(1, 5, 3)
    batch["row"] = torch.tensor([4, -1, 6])
    (scored,) = quiet().predict(net, DataLoader([batch], batch_size=None))
    assert [(row["row"], row["supervised_tokens"]) for row in scored] == [(4, 7), (6, 3)]
    with torch.no_grad():
        logits = net.model(input_ids=batch["input_ids"][:1]).logits
        loss = F.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="sum").item()
    assert scored[0]["loss_sum"] == pytest.approx(loss, rel=1e-5)
    assert scored[0]["perplexity"] == pytest.approx(math.exp(loss / 7), rel=1e-5)


def test_a_value_that_the_optimizer_does_not_take():
    with pytest.raises(ConfigError, match=r"model\.optim: got torch\.optim\.SGD: Invalid momentum value"):
        fit([rows(1)], module(optimizer="torch.optim.SGD", optimizer_args={"momentum": -1.0}))


def test_hooks_that_move_batches_are_left_to_data_modules():
    """Lightning warns in every run of a module that has one beside a data module, and passes over the latter's."""
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    assert not [hook for hook in hooks if hook in vars(CausalLMModule)]


def test_arguments_have_names():
    for make, given, fix in (
        (PreferenceModule, "gpt2", r"PreferenceModule\(name='gpt2'\)"),
        (CausalLMDataModule, "rows.jsonl", r"CausalLMDataModule\(train='rows.jsonl'\)"),
        (fsdp_strategy, "fsdp2", r"fsdp_strategy\(engine='fsdp2'\)"),
    ):
        with pytest.raises(ConfigError, match=f"write {fix}"):
            make(given)
    with pytest.raises(ConfigError, match=r"CausalLMModule: got 'gpt2'(?s:.*)write CausalLMModule\(name='gpt2'\)"):
        CausalLMModule("gpt2")


@pytest.mark.parametrize("ours", [CausalLMModule, PreferenceModule, CausalLMDataModule])
def test_a_base_class_behind_ours_saves_its_hyperparameters(ours):
    """Lightning looks up the arguments of every class in front of it in the frames of their ``__init__``."""
    kind = LightningDataModule if ours is CausalLMDataModule else LightningModule

    class Named(kind):
        def __init__(self, label: str = "b") -> None:
            super().__init__()
            self.save_hyperparameters()

    class Mine(ours, Named):
        pass

    arguments = {"train": "rows.jsonl"} if ours is CausalLMDataModule else {"name": "gpt2"}
    assert dict(Mine(**arguments).hparams) == {"label": "b"}
