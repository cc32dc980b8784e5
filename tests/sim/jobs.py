"""Runs on the simulated device, in a process of their own: rank 0 of as many as it says, the others like it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import Accelerator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchmetrics import SumMetric

from lit_fsdp import (
    CausalLMDataModule,
    CausalLMModule,
    Checkpoint,
    EMAWeights,
    IsolationProof,
    PreferenceModule,
    Samples,
    fsdp_strategy,
)
from lit_fsdp.callbacks import progress, records, stop, throughput
from lit_fsdp.checkpoint import store
from lit_fsdp.checkpoint.storage import gather_whole
from lit_fsdp.parallel import fsdp2
from lit_fsdp.signals import SignalFlags
from tests.sim import device

MEASURED = ("_per_second", "_per_rank", "_seconds", "_share", "_gib", "mfu")
"""Ends of the names of metrics that differ from run to run."""


class SimAccelerator(Accelerator):
    setup_device = teardown = get_device_stats = lambda *_: {}
    parse_devices = staticmethod(range)
    get_parallel_devices = staticmethod(lambda devices: [torch.device("sim", 0) for _ in devices])
    auto_device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    name = staticmethod(lambda: "sim")


class Module(CausalLMModule):
    """Ours, with a metric of somebody's own and a tensor that is made where the module says that it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(optim={"lr": 3e-3, "schedule": "constant"}, **options)
        self.rows = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.rows.update(torch.ones((), device=self.device) * len(batch["input_ids"]))
        self.log("val_rows", self.rows)


class Watch(Callback):
    """Notes the waits from the end of one micro-batch to that of the next, when all other callbacks are done."""

    def __init__(self) -> None:
        self.waits: list[dict[str, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.waits.append(dict(device.WAITS))
        device.WAITS.clear()


def start(ranks: int) -> None:
    os.environ.update(RANK="0", LOCAL_RANK="0", NODE_RANK="0", WORLD_SIZE=str(ranks))
    device.register()
    dist.init_process_group("simccl", store=FakeStore(), rank=0, world_size=ranks)


def trainer_for(
    run: str, ranks: int, strategy: dict[str, Any], callbacks: Sequence[Callback], **options: Any
) -> Trainer:
    """A Trainer with what a recipe's run has."""
    own = [stop.StopOnSignal(SignalFlags()), records.RunRecord(), throughput.Throughput(), progress.RunProgress()]
    defaults = {"accelerator": SimAccelerator(), "max_epochs": -1, "gradient_clip_val": 1.0, "num_sanity_val_steps": 0}
    quiet = {"inference_mode": False, "logger": False, "enable_model_summary": False, "use_distributed_sampler": False}
    options = {**defaults, **quiet, **options, "devices": ranks, "default_root_dir": run}
    return Trainer(strategy=fsdp_strategy(**strategy), callbacks=[*own, *callbacks], **options)


def data_for(run: str, ranks: int, rows: int = 1, **options: Any) -> CausalLMDataModule:
    """Two rows per rank and step, ``rows`` of them at once."""
    sets = {"train": f"generated:{4 * ranks}", "val": f"generated:{ranks}", "test": f"generated:{ranks}"}
    sizes = {"global_batch_size": 2 * ranks, "micro_batch_size": rows, "max_seq_length": 64, "num_workers": 0}
    return CausalLMDataModule(**{**sets, **sizes, "seed": 3, "cache_dir": f"{run}/../cache", **options})


def whole_run(
    folder: str, run: str, strategy: dict[str, Any], world: int = 1, rows: int = 1, on: str = "sim", **options: Any
) -> dict[str, Any]:
    """Two steps with validation, samples, averages and saves; on one rank resume from the first and test; see what."""
    written: list[int] = []

    def write(snapshot: Any, _: Any) -> None:  # what the other ranks would write is not there
        def take(found: Any) -> None:
            written.append(len([*found]))

        is_split = snapshot.layout == "full" and not snapshot.in_background
        gather_whole(snapshot.tensors, snapshot.specs, take) if is_split else take(snapshot.tensors)

    if on == "sim":
        start(world)
    store._write = write if world > 1 else store._write

    def fit(**resume: Any) -> tuple[Trainer, Module, dict[str, float]]:
        module = Module(name=folder, **options.get("model", {}))
        asked = [Samples(prompts=1, max_new_tokens=2), EMAWeights(decay=0.5)]
        asked.append(Checkpoint(every_steps=1, keep_last=-1, **options.get("saves", {})))
        often = {"max_steps": 2, "val_check_interval": 4 // rows, "check_val_every_n_epoch": None}
        trainer = trainer_for(run, world, strategy, asked, **often, **({} if on == "sim" else {"accelerator": on}))
        trainer.fit(module, datamodule=data_for(run, world, rows), **resume)
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return trainer, module, {name: value for name, value in found.items() if not name.endswith(MEASURED)}

    with device.Device() if on == "sim" else contextlib.nullcontext():
        found: dict[str, Any] = {"metrics": fit()[2]}
        if world == 1:
            trainer, module, resumed = fit(ckpt_path=f"{run}/checkpoints/step-00000001")
            tested = trainer.test(module, datamodule=data_for(run, world, rows), verbose=False)[0]
            found |= {"resumed": resumed, "tested": tested}
    return found | {"races": device.RACES, "written": written}


def waits(
    folder: str, run: str, strategy: dict[str, Any], world: int = 1, shares_buffer: bool = False, **model: Any
) -> dict[str, Any]:
    """What the host waits for in each of the two micro-batches of the third of four steps."""
    start(world)
    kind = PreferenceModule if "preference" in model else Module
    optim = {"optim": {"lr": 3e-3}} if kind is PreferenceModule else {}
    if shares_buffer:  # as on a CPU
        fsdp2.is_accelerator = lambda device: False
    watch = Watch()
    options = {"max_steps": 4, "limit_val_batches": 0, "enable_checkpointing": False}
    with device.Device():
        data = data_for(run, world, train=f"generated:{12 * world}")
        module: Any = kind(name=folder, **optim, **model)
        trainer_for(run, world, strategy, [IsolationProof(), watch], **options).fit(module, datamodule=data)
    rows = getattr(module, "pair_rows", None)
    return {"waits": watch.waits[4:6], "races": device.RACES, "rows": rows}
