"""Load balance of a mixture of experts, from counts that stay on the device."""

import functools
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lit_fsdp.models.expert_parallel import ExpertGroup
from lit_fsdp.models.packing import real_tokens
from lit_fsdp.parallel.units import clean_name

_CHOICES = ("top_k_index", "router_indices")  # arguments of the experts' forward in transformers


class ExpertLoad(Callback):
    """Logs the load of experts every ``log_every_n_steps``, over all ranks and all steps since the last log.

    Padding is not counted, except what fills a row for ``context_parallel``. The metric ``expert_largest_share`` is the
    share of a layer's tokens that its busiest expert received, the maximum over layers; ``expert_entropy`` the entropy
    of the shares divided by the logarithm of the number of experts (1 if the load is even), the mean over layers;
    ``experts_unused`` the number of experts in all layers that received no token. With ``expert_parallel``,
    ``expert_rank_load`` is the number of tokens that the busiest rank of a layer received, divided by the mean over
    ranks, the maximum over layers. Nothing is logged for models whose experts do not receive the router's choices.
    """

    def __init__(self) -> None:
        self._counts: list[torch.Tensor] = []
        self._by_rank: list[tuple[torch.Tensor, list[int]] | None] = []
        self._handles: list[Any] = []
        self._seen_step = 0
        self._is_real_N: torch.Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Hook the experts of the live model, or peft's wrapper, which is called instead of them.

        Of ``modules_to_save`` only the trained copy is called, not the original.
        """
        modules = {clean_name(name): module for name, module in pl_module.named_modules()}
        self._seen_step = trainer.global_step
        for name, module in modules.items():
            is_known = isinstance(getattr(module, "num_experts", None), int) and "original_module" not in name
            parameters = list(inspect.signature(type(module).forward).parameters) if is_known else []
            if name_of_choices := next((name for name in _CHOICES if name in parameters), None):
                counts = torch.zeros(module.num_experts, dtype=torch.float32, device=trainer.strategy.root_device)
                count = functools.partial(self._count, counts, name_of_choices, parameters.index(name_of_choices) - 1)
                outermost = modules[name.split(".base_layer", 1)[0]]
                self._handles.append(outermost.register_forward_pre_hook(count, with_kwargs=True))
                self._counts.append(counts)
                group: ExpertGroup | None = getattr(module, "expert_group", None)
                held = [] if group is None else group.held
                order = torch.tensor([expert for experts in held for expert in experts], device=counts.device)
                self._by_rank.append((order, [len(experts) for experts in held]) if held else None)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Find the padding of the batch."""
        self._is_real_N = real_tokens(batch) if self._counts and isinstance(batch, Mapping) else None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """Log after an optimizer step, every ``log_every_n_steps``; the host does not wait for the device."""
        is_step, self._seen_step = trainer.global_step != self._seen_step, trainer.global_step
        every = max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if not self._counts or not is_step or trainer.global_step % every:
            return
        counts: Any = trainer.strategy.reduce(torch.cat(self._counts), reduce_op="sum")
        shares = [layer / layer.sum().clamp(min=1) for layer in counts.split([len(layer) for layer in self._counts])]
        entropies = [torch.special.entr(share).sum() / math.log(max(2, len(share))) for share in shares]
        found = {
            "expert_largest_share": torch.stack([share.max() for share in shares]).max(),
            "expert_entropy": torch.stack(entropies).mean(),
            "experts_unused": torch.stack([(share == 0).sum() for share in shares]).sum().float(),
        }
        loads = [
            torch.stack([part.sum() for part in share[order].split(sizes)]).max() * len(sizes)
            for share, (order, sizes) in ((s, one) for s, one in zip(shares, self._by_rank, strict=True) if one)
        ]
        pl_module.log_dict(found | ({"expert_rank_load": torch.stack(loads).max()} if loads else {}))
        for layer in self._counts:
            layer.zero_()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._counts, self._by_rank = [], [], []

    def _count(
        self, counts_E: torch.Tensor, name: str, place: int, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        if not module.training:
            return
        chosen_NK = (kwargs[name] if name in kwargs else args[place]).flatten(0, -2)
        ones = torch.ones_like(chosen_NK, dtype=counts_E.dtype)
        if self._is_real_N is not None and len(self._is_real_N) == len(chosen_NK):
            ones *= self._is_real_N.unsqueeze(-1)
        counts_E.scatter_add_(0, chosen_NK.flatten(), ones.flatten())
