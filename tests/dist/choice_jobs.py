"""What the live engine has loaded, is set to, keeps, gathers and recomputes, and runs broken on one rank."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import wrap

from lit_fsdp import Checkpoint
from lit_fsdp.errors import ConfigError
from lit_fsdp.parallel import activation, base, grads, materialize, precision
from lit_fsdp.parallel.activation import recomputes
from lit_fsdp.parallel.units import units_already_wrapped
from tests.dist.foreign_jobs import ForeignNet, StepLosses, loader
from tests.dist.jobs import Losses, TinyData, digest, fit, local, module_for, trainer_for, whole


class Manual(ForeignNet):
    """Wraps its layers itself, as its author learned to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        how, self.how = self.how, "nothing"  # it is called more than once
        strategy: Any = self.trainer.strategy
        for i, layer in enumerate(self.layers):
            if how == "fully_shard":
                fully_shard(layer, **strategy.unit_options())
            elif how == "device_mesh":  # as the documentation of Lightning's ModelParallelStrategy has it
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            elif how == "bare":
                fully_shard(layer)
            elif how == "wrap":
                self.layers[i] = wrap(layer)


def train_wrapped_by_hand(strategy: dict[str, Any], how: str) -> dict[str, Any]:
    """Losses and units of a module that wraps itself, all of it from one seed."""
    torch.manual_seed(3)
    losses = StepLosses()
    trainer = trainer_for(strategy, [losses], max_steps=4)
    trainer.fit(Manual(how), loader(range(4)))
    live: Any = trainer.strategy
    units = sorted(units_already_wrapped(live.lightning_module))
    return {"losses": losses.values, "units": units, "audit": live.audit}


def waits_alone() -> list[str]:
    """What the first of two ranks says while, for a second, it waits for the other, which does not come."""
    said: list[str] = []
    logging.getLogger("lit_fsdp.parallel.base").warning = lambda text: said.append(text)  # type: ignore[method-assign,assignment]
    base.QUIET_SECONDS, os.environ["WORLD_SIZE"] = 0.1, "2"
    try:
        trainer_for({"timeout_seconds": 1.0}, [], max_steps=1).fit(ForeignNet(), loader([0]))
    except Exception as error:
        said.append(type(error).__name__)
    return said


class Poison(Callback):
    """Writes a value into the gradient of one parameter, on rank 1, before some of the optimizer steps."""

    def __init__(self, steps: list[int], value: float) -> None:
        self.steps, self.value = steps, value
        self.digests: list[str] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        step = len(self.digests)
        self.digests.append(digest(pl_module, optimizer))
        if step in self.steps and dist.get_rank() == 1:
            found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            next(g for g in map(local, found) if g.numel()).view(-1)[0] = self.value


def poisoned(
    folder: str, strategy: dict[str, Any], steps: list[int], value: float, patience: int = 10, **options: Any
) -> dict[str, Any]:
    """A run of six steps in which one rank finds a bad value among its gradients."""
    torch.manual_seed(0)
    grads._SKIPPED_IN_A_ROW = patience
    poison, losses = Poison(steps, value), Losses()
    trainer = trainer_for(strategy, [poison, losses], max_steps=6, **options)
    module, error = module_for(folder), ""
    try:
        trainer.fit(module, datamodule=TinyData())
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    live: Any = trainer.strategy
    return {
        "error": error,
        "guard": live.precision_plugin.state_dict(),
        "digests": [*poison.digests, "" if error else digest(module, trainer.optimizers[0])],
        "losses": losses.values,
    }


class Calls:
    """Counts calls of collectives, which either engine looks up when it issues them, of tensors that count."""

    def __init__(self, *names: str, counts: Callable[[Any], bool] = lambda tensor: True) -> None:
        self.number, self.counts = 0, counts
        for name in names:
            if hasattr(dist, name):  # the engines' words, by release of torch
                setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.number += self.counts([*args, *kwargs.values()][0])
            return function(*args, **kwargs)

        return counted


class CountReductions(Callback):
    """How often the engine reduced gradients in each micro-batch."""

    def __init__(self) -> None:
        names = ("reduce_scatter_single", "reduce_scatter_tensor", "all_reduce")
        self.counts: list[int] = []
        # not the totals of the loss
        self.calls = Calls(*names, counts=lambda tensor: tensor.is_floating_point() and tensor.numel() > 16)

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls.number = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.counts.append(self.calls.number)


def look(folder: str, strategy: dict[str, Any], steps: int = 3, cores: int = 0, **options: Any) -> dict[str, Any]:
    """What the live engine is set to, beside what every run finds; with ``cores`` where nobody has set threads."""
    if cores:
        del os.environ["OMP_NUM_THREADS"]
        os.sched_getaffinity = lambda process: set(range(cores))
    counts, module = CountReductions(), module_for(folder)
    read, parts = module.read_tensor, list[bool]()
    module.read_tensor = lambda *words: (parts.append(words[3] is not None), read(*words))[1]
    trainer, found = fit(module, strategy, [counts], steps=steps, **options)
    live: Any = trainer.strategy
    units = list(live._root.modules())
    fsdp1 = [m for m in units if isinstance(m, FullyShardedDataParallel)]
    fsdp2: list[Any] = [m for m in units if isinstance(m, FSDPModule)]
    states = [m._get_fsdp_state() for m in fsdp2]
    # torch < 2.13 has one for each unit
    each = (getattr(s, "_fsdp_param_groups", None) or [getattr(s, "_fsdp_param_group", None)] for s in states)
    groups = [group for some in each for group in some if group is not None]
    return found | {
        "planned": sorted(live.plan.modules) if live.plan else None,
        "realized": sorted(units_already_wrapped(live.lightning_module)),
        "reductions": counts.counts,
        "finds_unused": getattr(live._root, "find_unused_parameters", None),
        "sharding": sorted({m.sharding_strategy.name for m in fsdp1}),
        "backward_prefetch": sorted({str(m.backward_prefetch) for m in fsdp1}),
        "forward_prefetch": sorted({m.forward_prefetch for m in fsdp1}),
        "limit_all_gathers": sorted({m.limit_all_gathers for m in fsdp1}),
        "forward": [list(map(states.index, s._states_to_forward_prefetch)) for s in states],
        "backward": [list(map(states.index, s._states_to_backward_prefetch)) for s in states],
        "offload": sorted({type(group.offload_policy).__name__ for group in groups}),
        "reshards": sorted({str(group.post_forward_mesh_info is not None) for group in groups}),
        "backend": str(dist.get_backend_config()),
        "reads_parts": any(parts),
        "threads": torch.get_num_threads(),
        "timeouts": [
            live.mesh.get_group(dim)._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for dim in range(live.mesh.ndim)
        ],
    }


def settled(
    folder: str, run: str, strategy: dict[str, Any], has_bf16: list[bool], ckpt_path: str | None = None, steps: int = 2
) -> dict[str, Any]:
    """Train where each rank's CPU has or lacks bf16 instructions; what a run finds, and is said about precision."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
    log = logging.getLogger("lit_fsdp.parallel.precision")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    precision.cpu_has_bf16 = lambda: has_bf16[int(os.environ["RANK"])]
    saving = Checkpoint(every_steps=2, keep_last=-1)
    _, found = fit(module_for(folder), strategy, [saving], None, ckpt_path, steps, default_root_dir=run)
    return {**found, "lines": lines}


def train_activations(folder: str, strategy: dict[str, Any], theirs: bool = False) -> dict[str, Any]:
    """Four steps; losses, a hash of the state, gathers, and what the blocks did; with transformers' switch on."""
    from torch._dynamo.utils import counters

    activation.BACKEND = "aot_eager"
    module = module_for(folder)
    gathers = Calls("all_gather", "all_gather_single", "all_gather_into_tensor")
    if theirs:
        configure = module.configure_model

        def switched_on() -> None:
            configure()
            module.model.gradient_checkpointing_enable()

        module.configure_model = switched_on
    _, found = fit(module, strategy, steps=4)
    blocks: list[Any] = [m for m in module.modules() if type(m).__name__.endswith("LlamaDecoderLayer")]
    return found | {
        "recomputes": [recomputes(block) for block in blocks],
        "gathers": gathers.number,
        "graphs": {"unique_graphs": counters["stats"]["unique_graphs"], "breaks": len(counters["graph_break"])},
    }


def kept_by_a_rank(folder: str, strategy: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The audit of two steps, and what this rank holds after them: bytes of storages, each storage once."""
    gradient_bytes: list[int] = []

    def note(trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        gradient_bytes.append(_storage_bytes(p.grad for p in module.parameters() if p.grad is not None))

    module = module_for(folder, model)
    trainer, found = fit(module, strategy, [LambdaCallback(on_before_optimizer_step=note)], steps=2)
    optimizer: Any = trainer.optimizers[0]
    moments = [values[name] for values in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    packed: list[Any] = [layer for layer in module.modules() if hasattr(layer, "quant_state")]
    states = [layer.quant_state for layer in packed]  # the code book of doubly quantized scales is one for all layers
    scales = [t for s in states for t in (s.absmax, s.code, *([s.offset, s.state2.absmax] if s.nested else []))]
    return {
        "audit": found["audit"],
        "kept": {
            "num_params": found["local_numel"] + 3 * sum(local(layer.weight).numel() for layer in packed),  # 4 in one
            "parameter_bytes": _storage_bytes(module.parameters()),
            "gradient_bytes": gradient_bytes[-1],
            "optimizer_bytes": sum(local(m).numel() * m.element_size() for m in moments),
            **({"quantization_bytes": sum(tensor.nbytes for tensor in scales)} if packed else {}),
        },
    }


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages = {s.data_ptr(): s.nbytes() for s in (local(t).untyped_storage() for t in tensors)}
    return sum(storages.values())


def fingerprint(tensor: torch.Tensor) -> str:
    """Dtype, shape and bytes of a tensor, as a short text."""
    found = tensor.detach().contiguous()
    data = found.view(torch.uint8).numpy().tobytes() if found.dim() else bytes(str(found.item()), "ascii")
    return f"{found.dtype} {list(found.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def load_on_a_small_host(model: str, engine: str, host_bytes: int) -> str:
    """Error of a step of torch's SGD, whose state is none, on a host with that memory; empty if it trains."""
    materialize.host_bytes, materialize.swap_bytes = (lambda: host_bytes - 8), (lambda: 8)
    try:
        module = module_for(model, optimizer="torch.optim.SGD")
        fit(module, {"engine": engine, "precision": "fp32"}, steps=1, seed=11)
    except ConfigError as error:
        return str(error)
    return ""


def load_and_fingerprint(model: str, engine: str) -> dict[str, str]:
    """Fingerprints of all tensors of a folder or a config before the first step; a tied one under its first name."""
    found: dict[str, str] = {}

    def note(trainer: Trainer, module: Any) -> None:
        left_out = ("_eval_metrics", "lm_head" if module.model.config.tie_word_embeddings else "_")
        state = trainer.strategy.lightning_module_state_dict()
        for name, tensor in [*state.items(), *module.named_buffers()]:
            clean = name.replace("_fsdp_wrapped_module.", "").removeprefix("model.")
            if not clean.startswith(left_out):
                found[clean] = fingerprint(whole(tensor))

    strategy = {"engine": engine, "precision": "fp32"}
    fit(module_for(model), strategy, [LambdaCallback(on_train_start=note)], steps=1, seed=11)
    return found
