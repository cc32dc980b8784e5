"""What the strategy factory is told; a word is short for the mapping of its kind with the defaults."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from lit_fsdp.config.activation import ActivationConfig, ActivationMode
from lit_fsdp.config.precision import PrecisionConfig, PrecisionMode
from lit_fsdp.config.wrap import WrapConfig, wrap_from_words
from lit_fsdp.errors import ConfigError

Engine = Literal["fsdp2", "fsdp1", "ddp", "single"]
Sharding = Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"]
StateDict = Literal["sharded", "full"]
WrapWord = Literal["auto", "manual"]
BackwardPrefetch = Literal["pre", "post", "none"]
NonFinite = Literal["error", "skip"]
_WITHOUT_SHARDS = {
    "sharding": "no_shard", "shard_degree": None, "replicate_degree": None, "cpu_offload": False,
    "backward_prefetch": "pre", "forward_prefetch": False, "limit_all_gathers": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Every argument of :func:`lit_fsdp.fsdp_strategy`; a word is short for the mapping with its defaults."""

    engine: Engine = "fsdp2"
    """fsdp2 is torch's fully_shard, fsdp1 its FullyShardedDataParallel; ddp and single keep whole models."""
    sharding: Sharding = "full_shard"
    """What is split: all, gradients and optimizer state, nothing, or all (or these) inside a replica."""
    shard_degree: int | None = None
    """Ranks over which one copy of the model is split; -1: all that replicate_degree leaves."""
    replicate_degree: int | None = None
    """Copies of the model for hybrid sharding; -1: all that shard_degree leaves; default: the number of nodes."""
    wrap: WrapWord | list[str] | WrapConfig = "auto"
    """FSDP units: auto (from the model), a list of block classes and path patterns, manual, or a mapping."""
    precision: PrecisionMode | PrecisionConfig = "mixed"
    """Storage, compute, reduction and optimizer dtypes."""
    activation_checkpointing: ActivationMode | ActivationConfig = "none"
    """Which activations are recomputed in the backward pass."""
    compile: bool = False
    """Compile each block by itself with torch.compile."""
    cpu_offload: bool = False
    """Keep shards of parameters, gradients and optimizer state in host memory; the optimizer steps there."""
    backward_prefetch: BackwardPrefetch | int = "pre"
    """Gather the next unit before (pre) or after (post) this one's gradients; fsdp2: pre, none, or units ahead."""
    forward_prefetch: bool | int = False
    """Issue the next gather before this unit's forward; fsdp2: or a number of units ahead."""
    limit_all_gathers: bool = True
    """fsdp1: hold the CPU back so that at most two units are gathered at once; fsdp2 always bounds them."""
    sync_each_micro_batch: bool = True
    """Reduce gradients after every micro-batch; false: only after the last, at the cost of whole gradients."""
    nonfinite_gradients: NonFinite = "error"
    """What all ranks do with an optimizer step whose gradients hold inf or nan."""
    max_skipped_steps: int | None = None
    """With skip: so many steps skipped in a row end the run; default 10."""
    use_orig_params: bool = True
    """FSDP1's name; always true here: names, frozen parts and checkpoints rely on it."""
    sync_module_states: bool = True
    """Make weights that are there already rank 0's before sharding; false: trust that they are equal."""
    cpu_ram_efficient_loading: bool = True
    """Each rank reads its shards only; false: it reads the whole model first."""
    process_group_backend: str | None = None
    """gloo, nccl, or cpu:gloo,cuda:nccl; default: by device."""
    timeout_seconds: float = 1800.0
    """How long a collective may wait for a rank."""
    state_dict: StateDict = "sharded"
    """Checkpoints as one file per rank (sharded) or one file in all (full)."""
    verbose: bool = False
    """Write what each rank holds, and each of its steps, to debug/rank-N.jsonl, and show the ranks as a table."""

    @property
    def is_sharded(self) -> bool:
        """Whether the engine shards at all."""
        return self.engine in ("fsdp1", "fsdp2")

    @property
    def is_hybrid(self) -> bool:
        """Whether there are copies, each of them split."""
        return self.is_sharded and self.sharding in ("hybrid_shard", "hybrid_shard_zero2")

    @property
    def offloads(self) -> bool:
        """Whether shards live in host memory."""
        return self.is_sharded and self.cpu_offload

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole model."""
        return not self.is_sharded or self.sharding == "no_shard"

    @property
    def wrap_config(self) -> WrapConfig:
        """``wrap`` as its mapping."""
        if isinstance(self.wrap, WrapConfig):
            return self.wrap
        if isinstance(self.wrap, str):
            return WrapConfig(manual=self.wrap == "manual")
        return wrap_from_words(list(self.wrap))

    @property
    def precision_config(self) -> PrecisionConfig:
        """``precision`` as its mapping."""
        return self.precision if isinstance(self.precision, PrecisionConfig) else PrecisionConfig(mode=self.precision)

    def on(self, has_bf16: bool) -> StrategyConfig:
        """The same with the mode that ``precision: auto`` is on devices with or without bf16 instructions."""
        given = self.precision_config
        return self if given.mode != "auto" else dataclasses.replace(self, precision=given.on(has_bf16))

    @property
    def activation_config(self) -> ActivationConfig:
        """``activation_checkpointing`` as its mapping."""
        given = self.activation_checkpointing
        if isinstance(given, ActivationConfig):
            return given
        if given == "memory_budget":
            raise ConfigError(
                "activation_checkpointing",
                "memory_budget without a budget",
                "{mode: memory_budget, memory_budget: 0 to 1}",
                "write activation_checkpointing: {mode: memory_budget, memory_budget: 0.5}",
            )
        return ActivationConfig(mode=given)

    @property
    def replaced(self) -> dict[str, str]:
        """What ``ddp`` and ``single`` put in place of choices about shards, by field; to be shown, never silent.

        Only what leaves the arithmetic as it is: a comparison of engines then changes one line.
        """
        if self.is_sharded:
            return {}
        found: dict[str, tuple[Any, Any]] = {
            name: (getattr(self, name), neutral) for name, neutral in _WITHOUT_SHARDS.items()
        }
        if self.engine == "single":
            found["sync_each_micro_batch"] = (self.sync_each_micro_batch, True)
        wrap = self.wrap_config
        found["wrap.experts"], found["wrap.max_root_share"] = (wrap.experts, False), (wrap.max_root_share, None)
        return {
            name: f"{_word(given)} → {_word(neutral)} (engine {self.engine}: every rank holds the whole model)"
            for name, (given, neutral) in found.items()
            if given != neutral
        }


def _word(value: object) -> str:
    return "null" if value is None else str(value).lower()


def strategy_fields() -> list[str]:
    """Names of the factory's arguments."""
    return [field.name for field in dataclasses.fields(StrategyConfig)]
