"""What a rank gathers, computes and reduces in a step of FSDP2; python docs/pictures/all_gather.py.

By torch's profiler: four blocks and a head on two gloo processes on a CPU; the third step of rank 0.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from drawing import BLUE, GREEN, ORANGE, VIOLET, figure, save
from lightning.pytorch import Callback, LightningModule, Trainer

NAMES = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


class Net(LightningModule):
    """Blocks large enough that a gather takes as long as one can see."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(1500, 1500), torch.nn.GELU()) for _ in NAMES
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        for name, block in zip(NAMES, self.blocks, strict=True):
            with torch.profiler.record_function(f"compute {name}"):
                x = block(x)
        return x.pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Profile(Callback):
    """Writes the events of the third step."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.is_global_zero:
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profiler.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.is_global_zero:
            self.profiler.stop()
            found = sorted((e.time_range.start, e.time_range.end, e.name) for e in self.profiler.events())
            Path(self.file).write_text(json.dumps(found))


def main() -> None:
    """Train three steps and draw the last."""
    from lit_fsdp import fsdp_strategy

    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "events.json"))
        rows = torch.utils.data.TensorDataset(torch.randn(6 * 256, 1500))
        options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        strategy = fsdp_strategy(wrap=["Sequential"], precision="fp32")
        trainer = Trainer(
            accelerator="cpu", devices=2, max_steps=3, strategy=strategy, callbacks=[Profile(file)],
            enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(Net(), torch.utils.data.DataLoader(rows, batch_size=256))
        if not trainer.is_global_zero:
            return
        events = json.loads(Path(file).read_text())
    draw([(start / 1e6, end / 1e6, name) for start, end, name in events])


def draw(events: list[tuple[float, float, str]]) -> None:
    """Two rows of bars per block: what is sent, and below it what is computed."""

    def times(what: str, name: str) -> list[tuple[float, float]]:
        return [(start, end) for start, end, event in events if event == f"FSDP::{what} (module.{name})"]

    drawn, axes = figure(7.4, 3.0)
    begin = min(start for start, _, name in events if name.startswith("FSDP::"))
    for row, name in enumerate(NAMES):
        forward = (times("pre_forward", name)[0][1], times("post_forward", name)[0][0])
        backward = (times("pre_backward", name)[0][1], times("post_backward_accumulate", name)[0][0])
        bars = [(-0.2, one, BLUE) for one in times("all_gather", name)]
        bars += [(-0.2, one, ORANGE) for one in times("post_backward_reduce", name)]
        for offset, (start, end), color in [*bars, (0.2, forward, GREEN), (0.2, backward, VIOLET)]:
            axes.barh(row + offset, end - start, left=start - begin, height=0.36, color=color)
    for label, color in {"all-gather": BLUE, "reduce": ORANGE, "forward": GREEN, "backward": VIOLET}.items():
        axes.barh(0, 0, color=color, label=label)
    axes.set_yticks(range(len(NAMES)), NAMES)
    axes.invert_yaxis()
    axes.set(xlabel="seconds of one step")
    axes.legend(loc="lower right", ncols=2)
    save(drawn, "all-gather")


if __name__ == "__main__":
    main()
