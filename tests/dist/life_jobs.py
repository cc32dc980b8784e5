"""Modules as people write them, through more of a Trainer's life than one ``fit``; each has a plain reference."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EMAWeightAveraging,
    LambdaCallback,
    LearningRateFinder,
)
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lit_fsdp import CausalLMModule
from lit_fsdp.errors import ConfigError
from tests.dist.foreign_jobs import ForeignNetWithValidation, foreign_rows, loader, own_part
from tests.dist.jobs import trainer_for, whole
from tests.dist.saving_jobs import warnings_said


class Sgd(ForeignNetWithValidation):
    """An optimizer without any state, and a schedule that counts epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Unused(ForeignNetWithValidation):
    """A layer that no loss depends on, under weight decay, one for some batches, and a layer per half of the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.never, self.sometimes = nn.Linear(12, 12), nn.Linear(12, 12)
        self.upper, self.lower = nn.Linear(12, 1), nn.Linear(12, 1)  # alike, so that mixing them up is no error

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        half = len(x) if batch_idx == 0 else 0
        if batch_idx == 2 and int(os.environ["RANK"]) * len(x) < 4:
            half = 4
        first = max(0, 4 - int(os.environ["RANK"]) * len(x))
        parts = (self.upper, x[:first]), (self.lower, x[first:])
        out = self(x) + torch.cat([layer(part) for layer, part in parts if len(part)])
        if half:
            out = out + torch.cat([self.sometimes(x[:half]).sum(dim=1, keepdim=True), out[half:] * 0])
        return mse_loss(out, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


class Own(ForeignNetWithValidation):
    """Manual optimization of a parameter that is in no child."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Gan(LightningModule):
    """Two optimizers, toggled, two backward passes per step; nothing in it repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12))
        self.discriminator = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.generator(x)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        first, second = self.optimizers()
        one, zero = torch.ones(len(x), 1), torch.zeros(len(x), 1)
        self.toggle_optimizer(first)
        self.manual_backward(binary_cross_entropy_with_logits(self.discriminator(self.generator(x)), one))
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        real = binary_cross_entropy_with_logits(self.discriminator(x), one)
        fake = binary_cross_entropy_with_logits(self.discriminator(self.generator(x).detach()), zero)
        loss = (real + fake) / 2
        if isinstance(next(self.parameters()), DTensor):
            loss.backward()  # as some write it, where DDP needs Lightning's
        else:
            self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.discriminator)
        return [torch.optim.Adam(part.parameters(), lr=1e-2, betas=(0.5, 0.9)) for part in parts]


class Conv(ForeignNetWithValidation):
    """A few different layers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers, self.scale
        self.body = nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(40, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.unsqueeze(1))).float()  # a loss of two dtypes has no backward in torch 2.11


class Lstm(Conv):
    """A recurrent net, which keeps a second list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(1, 12, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.unsqueeze(2))[0][:, -1])


class Bare(Conv):
    """One linear layer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        del self.body
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * self.temperature

    def on_after_backward(self) -> None:
        self.temperature.grad.pow_(3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class LastUnused(Bare):
    """A layer without gradients so large that FSDP1's second rank has parts of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(64, 64)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Looks(ForeignNetWithValidation):
    """Calls itself between the backward pass and the step, and multiplies by a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.matrix)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self(foreign_rows(0)[0])


class Thawed(Conv):
    """A layer that is frozen at first, as fine-tuning callbacks do it, and one that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(12, 12), nn.Linear(12, 12).requires_grad_(False)
        self.body = nn.ModuleList([first, second, first])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = layer(x).tanh()
        return self.head(x)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.requires_grad_(batch_idx >= 2)
        self.body[0].requires_grad_(True)


class Norm(ForeignNetWithValidation):
    """Running statistics, which every rank computes from its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x + self.global_rank))


class Exact(ForeignNetWithValidation):
    """Looks at what arrives: targets that bf16 cannot hold."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        self.targets = (y + 1000).tolist()
        return mse_loss(self.head(x).float() + self(x), y)


class Shrinks(ForeignNetWithValidation):
    """Changes its weights after calls in a validation and outside of any step, as callbacks that average them do."""

    @torch.no_grad()
    def on_validation_end(self) -> None:
        for param in self.parameters():
            param.mul_(0.9)

    @torch.no_grad()
    def on_train_epoch_start(self) -> None:
        self(foreign_rows(0)[0])
        self.on_validation_end()


class Chosen(ForeignNetWithValidation):
    """An optimizer of a part of what is trained, which attributes of the parameters mark."""

    def __init__(self) -> None:
        super().__init__()
        for param in (self.scale, *self.head.parameters(), self.layers[1][0].weight):
            param.is_chosen = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if hasattr(p, "is_chosen")], lr=1e-2)


class Averaged(ForeignNetWithValidation):
    """Brings Lightning's average of its weights along, which a checkpoint has in place of them."""

    def configure_callbacks(self) -> list[Callback]:
        return [EMAWeightAveraging(decay=0.5)]


class Uneven(ForeignNetWithValidation):
    """An optimizer without empty shards, as ``BaseFinetuning`` of Lightning fills it: with others on each rank."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.numel()], lr=1e-2)


class OwnState(ForeignNetWithValidation):
    """Keeps an optimizer state of another dtype."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(self._keep)
        return optimizer

    def _keep(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            state["exact"] = torch.zeros(2, dtype=torch.float64)


class OwnReduction(OwnState):
    """Averages something of its own between ranks in bf16 too."""

    def on_after_backward(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(torch.ones(1, dtype=torch.bfloat16))


class PartlyMeta(ForeignNetWithValidation):
    """Blocks and a parameter on meta; the rest is there, on each rank another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3 + int(os.environ["RANK"]))
        self.head.reset_parameters()
        self.layers.to("meta")
        self.scale = nn.Parameter(self.scale.to("meta"))


class Tuned(ForeignNetWithValidation):
    """Lets Lightning look for a learning rate first, in steps that must leave nothing behind."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def configure_callbacks(self) -> list[Callback]:
        return [LearningRateFinder(num_training_steps=4, early_stop_threshold=None)]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Unlike(ForeignNetWithValidation):
    """In one respect not the same on rank 1."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what if int(os.environ["RANK"]) else ""
        for name in {"parameter": ["more"], "shape": ["scale"]}.get(self.what, []):
            self.register_parameter(name, nn.Parameter(torch.ones(6)))
        if self.what == "order":
            self.layers = self._modules.pop("layers")
        if self.what == "buffer":
            self.register_buffer("more", torch.ones(6))
        self.head.to(torch.float64 if self.what == "dtype" else None).requires_grad_(self.what != "frozen")

    def on_fit_start(self) -> None:
        self.scale.requires_grad_(self.what != "frozen later")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.what == "at once":
            optimizer.param_groups[0]["lr"] = 0.5

    def configure_optimizers(self) -> Any:
        groups: list[Any] = [{"params": [*self.layers.parameters(), self.scale]}, {"params": self.head.parameters()}]
        groups[1]["weight_decay"] = 0.3 if self.what == "decay" else 0.1
        cls: Any = torch.optim.Adam if self.what == "class" else torch.optim.AdamW
        optimizer = cls([{"params": self.parameters()}] if self.what == "group" else groups, lr=1e-2)
        factor = 0.25 if self.what == "function" else 0.5
        one = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor**step)
        other = torch.optim.lr_scheduler.StepLR(optimizer, 2 if self.what == "schedule" else 1)
        moved = {"scheduler": one, "interval": "epoch" if self.what == "interval" else "step"}
        return [optimizer], [moved, other][: 1 if self.what == "scheduler" else 2]


class Detached(ForeignNetWithValidation):
    """Makes its optimizer before anything is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.early = [torch.optim.AdamW(self.head.parameters())]

    def configure_optimizers(self) -> Any:
        return self.early


class Hooked(ForeignNetWithValidation):
    """Changes gradients by hooks of a parameter, from the beginning or once it is sharded."""

    def __init__(self, hook: str = "register_hook", when: str = "init") -> None:
        super().__init__()
        self.hook, self.when = hook, when
        self._add("init")

    def _add(self, when: str) -> None:
        if when == self.when:
            getattr(self.head.weight, self.hook)(lambda _: None)

    def on_fit_start(self) -> None:
        self._add("fit")


class Limited(ForeignNetWithValidation):
    """An embedding that changes its weights when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(4, 12, max_norm=1.0)


class Forces(ForeignNetWithValidation):
    """Differentiates its output in the step, as models of molecules do."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0].requires_grad_()
        (forces,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return forces.square().mean()


class ByShape(ForeignNetWithValidation):
    """Decays matrices alone, as many do."""

    def configure_optimizers(self) -> Any:
        parts = [p for p in self.parameters() if p.ndim > 1], [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": part, "weight_decay": 0.5 * (not i)} for i, part in enumerate(parts)])


class ByName(ForeignNetWithValidation):
    """Decays all but norms, of which it has none."""

    def configure_optimizers(self) -> Any:
        parts = [[p for n, p in self.named_parameters() if ("norm" in n) == is_norm] for is_norm in (False, True)]
        return torch.optim.AdamW([{"params": part, "weight_decay": 0.5 * (not i)} for i, part in enumerate(parts)])


class Penalty(ForeignNetWithValidation):
    """Adds a penalty on all weights to its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        penalty = sum(param.square().sum() for param in self.parameters())
        return super().training_step(batch, batch_idx) + penalty


class Clips(ForeignNetWithValidation):
    """Clips by itself."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Plateau(ForeignNetWithValidation):
    """Lowers its learning rate when the loss does not fall."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


class Unfreezes(ForeignNetWithValidation):
    """Trains the head first."""

    @property
    def backbone(self) -> nn.Module:
        """As the callback looks it up."""
        return self.layers

    def configure_callbacks(self) -> list[Callback]:
        return [BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda param: param.requires_grad, self.parameters()))


class Clamped(nn.Sequential):
    """Changes a weight when it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self[0].bias.clamp_(-0.1, 0.1)
        return super().forward(x)


class Writes(ForeignNetWithValidation):
    """Changes a weight in the forward of a block, or of the whole module."""

    def __init__(self, block: bool) -> None:
        super().__init__()
        if block:
            self.layers[1] = Clamped(*self.layers[1])
        else:
            self.head = Clamped(self.head)


def _trainer(strategy: dict[str, Any] | None, *callbacks: Callback, **options: Any) -> Trainer:
    """Without a strategy plain Lightning in one process."""
    return trainer_for("auto" if strategy is None else strategy, callbacks, enable_checkpointing=False, **options)


def live(
    module: str,
    strategy: dict[str, Any] | None,
    calls: tuple[str, ...] = ("fit",),
    validates: bool = False,
    second: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Make these calls of a Trainer (``second``: of one each), one epoch of four batches per ``fit``; all weights."""
    outputs: list[Any] = []

    @torch.no_grad()
    def call(trainer: Trainer, net: LightningModule) -> None:  # where no step is under way
        outputs.append(net(foreign_rows(0)[0]).flatten().tolist())

    torch.manual_seed(3)
    net, rows, more = globals()[module](), loader(range(4)), loader((100, 101))
    for number, name in enumerate(calls):
        if second or not number:
            one = _trainer(strategy, LambdaCallback(on_train_epoch_end=call), max_epochs=0, **options)
        if name == "fit":
            one.fit_loop.max_epochs = one.current_epoch + 1
            one.fit(net, rows, more if validates else None)
        else:
            getattr(one, name)(net, more, **({} if name == "predict" else {"verbose": False}))
    call(one, net)
    return {"weights": _weights(one, net), "outputs": outputs, "targets": getattr(net, "targets", None)}


def _weights(trainer: Trainer, net: LightningModule) -> dict[str, list[float]]:
    state = getattr(trainer.strategy, "lightning_module_state_dict", net.state_dict)()
    return {name: whole(tensor).float().flatten().tolist() for name, tensor in state.items()}


def resumed(module: str, strategy: dict[str, Any] | None, folder: str, fails: bool = False) -> dict[str, Any]:
    """Two epochs, and two in a new Trainer, of the same module if ``fails``: before a step of a third in the first."""
    rates: list[float] = []

    class Rates(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(path)

        def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.max_epochs == 3 and trainer.current_epoch == 2:
                raise ArithmeticError

    path, said = str(Path(folder) / "saved.ckpt"), warnings_said()
    net = None
    for epochs, start in ((3 if fails else 2, None), (4, path)):
        torch.manual_seed(3)
        trainer, net = _trainer(strategy, Rates(), max_epochs=epochs), (fails and net) or globals()[module]()
        with contextlib.suppress(ArithmeticError):
            trainer.fit(net, loader(range(4)), ckpt_path=start)
    return {"rates": rates, "weights": _weights(trainer, net), "said": said}


def validated_again(strategy: dict[str, Any], folder: str) -> list[float]:
    """The loss of a validation after an epoch with batch norm, and of its checkpoint in a new module."""
    path, trainers = str(Path(folder) / "saved.ckpt"), [_trainer(strategy, max_epochs=1) for _ in range(2)]
    torch.manual_seed(3)
    trainers[0].fit(Norm(), loader(range(4)), loader(range(4)))
    trainers[0].save_checkpoint(path)
    trainers[1].validate(Norm(), loader(range(4)), ckpt_path=path, verbose=False)
    return [float(trainer.callback_metrics["val_loss"]) for trainer in trainers]


def predicted(strategy: dict[str, Any], rows: int) -> list[float] | str:
    """What a rank gives for its rows, in batches of three, as Lightning deals them out; or why not."""
    rows_of_mine = DataLoader(TensorDataset(*(part[:rows] for part in foreign_rows(0))), batch_size=3)
    torch.manual_seed(3)
    try:
        found: Any = _trainer(strategy, use_distributed_sampler=True).predict(ForeignNetWithValidation(), rows_of_mine)
    except ConfigError as error:
        return str(error)
    return torch.cat(found).flatten().tolist()


def refused(
    module: str,
    strategy: dict[str, Any],
    again: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> str:
    """What a ``fit`` is refused with; with ``again`` that of a second Trainer, whose strategy is the other one."""
    net = globals()[module](**(arguments or {}))
    try:
        for chosen in filter(None, (strategy, again)):
            _trainer(chosen, fast_dev_run=True, **options).fit(net, loader([0]))
    except Exception as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "nothing"


def unlike(whats: list[str], strategy: dict[str, Any]) -> list[list[Any]]:
    """The error of fits in which rank 1 is not as the others, and the optimizer steps before it."""
    found: list[list[Any]] = []
    for what in whats:
        trainer = _trainer(strategy, max_epochs=1)
        try:
            trainer.fit(Unlike(what), loader(range(4)))
        except ConfigError as error:
            found.append([str(error).splitlines()[0], trainer.global_step])
    return found


class Endless(IterableDataset[Any]):
    """Batches of a number that nobody knows."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from map(own_part, range(self.batches))


def ended(
    strategy: dict[str, Any], batches: list[int], verb: str = "fit", kinds: tuple[str, ...] = ("", "")
) -> list[Any] | str:
    """Batches seen of so many per rank, twice in ``fit``, optimizer steps of two each, and what is said of them."""
    said: list[str] = []
    logging.getLogger("lit_fsdp.parallel.alike").filters[:] = [lambda record: bool(said.append(record.getMessage()))]
    rank, seen = int(os.environ["RANK"]), [0]

    def count(*_: Any) -> None:
        seen[0] += 1

    hooks: dict[str, Any] = {f"on_{name}_batch_end": count for name in ("train", "validation", "test", "predict")}
    trainer = _trainer(strategy, LambdaCallback(**hooks), max_epochs=2, accumulate_grad_batches=2)
    endless: Any = DataLoader(Endless(batches[rank]), batch_size=None)
    given = {"": endless, "length": loader(range(batches[rank])), "generator": (batch for batch in endless)}[
        kinds[rank]
    ]
    try:
        getattr(trainer, verb)(ForeignNetWithValidation(), given)
    except ConfigError as error:
        return str(error).splitlines()[0]
    if verb == "fit" and not kinds[rank]:
        assert isinstance(trainer.train_dataloader, DataLoader)
        assert trainer.train_dataloader.__dict__ is given.__dict__
        assert type(given) is DataLoader
    return [seen[0], trainer.global_step, *said]


def ended_early(folder: str, strategy: dict[str, Any] | str, ours: bool = True) -> list[list[str]]:
    """Per stage at which a fit fails, with a model on meta, the errors that are shown, the last one last."""
    found = []
    for where in EARLY if ours else EARLY[:2]:

        def fail(*_: Any, where: str = where, **__: Any) -> Any:
            raise KeyboardInterrupt if where == "Ctrl-C" else ArithmeticError

        module: Any = CausalLMModule(name=folder).build() if ours else PartlyMeta()
        hooks: dict[str, Any] = {"setup": fail} if where in ("callback", "Ctrl-C") else {}
        trainer = _trainer(strategy, LambdaCallback(**hooks), max_steps=1)
        if where == "logger":
            trainer.logger = type("Failing", (DummyLogger,), {"experiment": property(fail)})()
        elif where == "batch sizes":
            trainer.callbacks.append(BatchSizeFinder())
        elif not hooks:
            setattr(module, where, fail)
        found.append([])
        try:
            trainer.fit(module, loader([0]), [loader([0]), loader([0])])
        except BaseException as error:
            shown: BaseException | None = error
            while shown is not None:
                found[-1].insert(0, type(shown).__name__)
                shown = shown.__context__
    return found


EARLY = ["callback", "Ctrl-C", "logger", "setup", "configure_model", "read_tensor", "batch sizes"]
