"""Train one bf16 checkpoint in three precision modes at the same learning rates, and count the updates that vanish.

Called by ``make precision-study``. The rows are those of the quickstart. All modes start from the same file, see the
same batches in the same order and keep a constant learning rate; they differ in ``precision`` alone. Beside the losses
it is counted which parameters an optimizer step leaves as they were, bit for bit.

The held-out loss is taken twice: as the mode computes it, and from the stored weights in fp32. The two differ where
updates are in the fp32 weights but not yet in the bf16 copies that ``mixed`` computes with.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import quickstart
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lit_fsdp import CausalLMDataModule, CausalLMModule, fsdp_strategy

ROOT = Path(__file__).resolve().parents[1]
MODES = ("fp32", "mixed", "low_precision")
SEED = 1234
LAST = 5  # steps whose mean is the final training loss; a single batch of 8 rows is noisy
_SAME = {"engine": "fsdp2", "sharding": "full_shard", "wrap": "auto", "activation_checkpointing": "none"}


def main() -> int:
    """Train every mode at every learning rate; write study.json, table.md and loss.png."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--learning_rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps of each run (default 30)")
    parser.add_argument("--out", type=Path, default=Path("runs/precision_study"))
    options = parser.parse_args()
    if options.steps < 1 or min(options.learning_rates) <= 0:
        parser.error("--steps must be at least 1, learning rates more than 0")
    os.chdir(ROOT)
    _be_quiet()
    quickstart.prepare_model()
    quickstart.prepare_rows()
    options.out.mkdir(parents=True, exist_ok=True)
    model = write_bf16_checkpoint(quickstart.DATA / quickstart.GGUF, options.out / "bf16-checkpoint")
    started, runs = time.perf_counter(), []
    for rate in options.learning_rates:
        for mode in MODES:
            runs.append(train_once(str(model), mode, rate, options.steps))
            last, changed = runs[-1]["train_losses"][-1], runs[-1]["unchanged"][-1]["share"]
            print(
                f"{mode:<14} lr {rate:.0e}  last loss {last:.4f}  held-out {runs[-1]['held_out_loss']:.4f}  "
                f"unchanged in the last step {changed:.1%}  {runs[-1]['seconds']:.0f} s",
                flush=True,
            )
            (options.out / "study.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    table = as_table(runs)
    (options.out / "table.md").write_text(table, encoding="utf-8")
    draw(runs, options.out / "loss.png")
    print(f"\n{table}\ncurves: {options.out / 'loss.png'}; all figures: {options.out / 'study.json'}")
    print(f"{len(runs)} runs of {options.steps} steps took {time.perf_counter() - started:.0f} s")
    return 0


def write_bf16_checkpoint(source: Path, folder: Path) -> Path:
    """Round the model's weights to bf16 once and save them; every mode reads this file, so all start equal."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as hf_logging

    from lit_fsdp.config.model import ModelConfig
    from lit_fsdp.models.resolve import resolve_model

    hf_logging.disable_progress_bar()
    found = resolve_model(ModelConfig(name=str(source))).weights_folder
    model = AutoModelForCausalLM.from_pretrained(found, dtype=torch.bfloat16)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(found).save_pretrained(folder)
    return folder


def train_once(model: str, mode: str, rate: float, steps: int) -> dict[str, Any]:
    """One run on one device: its losses, and the parameters that its first, middle and last step left unchanged."""
    started = time.perf_counter()
    seed_everything(SEED, verbose=False)
    watch = Watch({1, (steps + 1) // 2, steps})
    strategy: Any = {**_SAME, "precision": mode}
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        strategy=fsdp_strategy(**strategy),
        callbacks=[watch],
        max_steps=steps,
        max_epochs=-1,
        gradient_clip_val=1.0,
        val_check_interval=steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    module = CausalLMModule(name=model, optim={"lr": rate, "schedule": "constant", "weight_decay": 0.0})
    rows = {name: str(quickstart.DATA / f"{name}.jsonl") for name in ("train", "val")}
    data = CausalLMDataModule(
        **rows, max_seq_length=256, global_batch_size=8, micro_batch_size=8, num_workers=0, seed=SEED
    )
    try:
        trainer.fit(module, datamodule=data)
        held_out = float(trainer.callback_metrics["val_loss"])
        in_fp32 = loss_in_fp32(model, module, data.val_dataloader())
        dtypes = trainer.strategy.contract.report()["realized"]  # type: ignore[attr-defined]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return {
        "mode": mode,
        "learning_rate": rate,
        "train_losses": watch.losses,
        "held_out_loss": held_out,
        "held_out_loss_in_fp32": in_fp32,
        "unchanged": watch.counts,
        "dtypes": dtypes,
        "seconds": time.perf_counter() - started,
    }


@torch.no_grad()
def loss_in_fp32(folder: str, module: LightningModule, batches: Any) -> float:
    """Loss per supervised token of the module's stored weights, computed in fp32 by a plain model."""
    from transformers import AutoModelForCausalLM

    from lit_fsdp.models.loss import causal_lm_forward

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for name, param in module.named_parameters():
        full = param.full_tensor() if hasattr(param, "full_tensor") else param
        plain.get_parameter(name.removeprefix("model.")).copy_(full)
    losses = [
        causal_lm_forward(plain, {key: batch[key] for key in ("input_ids", "attention_mask", "labels")})
        for batch in batches
    ]
    return float(sum(loss.loss_sum for loss in losses) / sum(loss.num_tokens for loss in losses))


class Watch(Callback):
    """Keeps the loss of every step, and for some steps how many parameters the optimizer left unchanged.

    Args:
        steps: Optimizer steps, from 1, around which parameters are compared.
    """

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps
        self.losses: list[float] = []
        self.counts: list[dict[str, float]] = []
        self._before: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        """Copy the parameters."""
        if trainer.global_step + 1 in self.steps:
            self._before = [tensor.clone() for tensor in local_parameters(module)]

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        """Compare with the copy; there is one micro-batch in a step."""
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        if self._before:
            unchanged, total = count_unchanged(self._before, local_parameters(module))
            self.counts.append({"step": trainer.global_step, "num_unchanged": unchanged, "share": unchanged / total})
            self._before = []


def local_parameters(module: torch.nn.Module) -> list[torch.Tensor]:
    """This rank's part of every trained parameter; a tied one once."""
    params = (param.detach() for param in module.parameters() if param.requires_grad)
    return [param.to_local() if hasattr(param, "to_local") else param for param in params]


def count_unchanged(before: list[torch.Tensor], after: list[torch.Tensor]) -> tuple[int, int]:
    """How many elements are equal before and after, and how many there are."""
    same = sum(int((old == new).sum()) for old, new in zip(before, after, strict=True))
    return same, sum(tensor.numel() for tensor in after)


def final_loss(run: dict[str, Any]) -> float:
    """Mean training loss of the last steps."""
    last = run["train_losses"][-LAST:]
    return sum(last) / len(last)


def as_table(runs: list[dict[str, Any]]) -> str:
    """A Markdown table, one line per run; "behind fp32" compares held-out losses in the mode's own dtypes."""
    steps = [count["step"] for count in runs[0]["unchanged"]]
    names = ["learning rate", "precision", f"training loss, last {min(LAST, len(runs[0]['train_losses']))} steps"]
    names += ["held-out loss", "held-out loss, computed in fp32", "behind fp32"]
    names += [f"unchanged, step {step}" for step in steps]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    fp32 = {run["learning_rate"]: run["held_out_loss"] for run in runs if run["mode"] == "fp32"}
    for run in runs:
        behind = run["held_out_loss"] - fp32[run["learning_rate"]]
        cells = [f"{run['learning_rate']:.0e}", f"`{run['mode']}`", f"{final_loss(run):.4f}"]
        cells += [f"{run['held_out_loss']:.4f}", f"{run['held_out_loss_in_fp32']:.4f}", f"{behind:+.4f}"]
        cells += [f"{count['share']:.2%}" for count in run["unchanged"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Loss curves as a PNG: one panel per learning rate, one line per mode."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("the curves need matplotlib; run: make precision-study, or pip install 'lit-fsdp[plot]'")
    matplotlib.use("Agg")  # there may be no display
    from matplotlib import pyplot

    rates = list(dict.fromkeys(run["learning_rate"] for run in runs))
    figure, axes = pyplot.subplots(1, len(rates), figsize=(4.2 * len(rates), 3.6), sharey=True, squeeze=False)
    for panel, rate in zip(axes[0], rates, strict=True):
        for run in (run for run in runs if run["learning_rate"] == rate):
            line = {"fp32": "-", "mixed": "--", "low_precision": "-."}[run["mode"]]
            losses = run["train_losses"]
            share = run["unchanged"][-1]["share"]
            panel.plot(range(1, len(losses) + 1), losses, line, label=f"{run['mode']} ({share:.0%} unchanged)")
        panel.set_title(f"learning rate {rate:.0e}")
        panel.set_xlabel("optimizer step")
        panel.legend(fontsize=8, title="in the last step", title_fontsize=8)
    axes[0][0].set_ylabel("training loss")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _be_quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")


if __name__ == "__main__":
    sys.exit(main())
