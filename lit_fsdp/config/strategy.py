"""Arguments of the strategy factory: units, mesh, precision, activation checkpointing, engine.

A plain word is short for the mapping with its defaults.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lit_fsdp.errors import require

Engine = Literal["fsdp2", "fsdp1", "ddp", "single"]
Sharding = Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"]
NonFinite = Literal["error", "skip"]
PrecisionMode = Literal["mixed", "auto", "low_precision", "fp32", "fp16_mixed", "fp8"]
PrecisionWord = Literal[PrecisionMode, "bf16-mixed", "bf16-true", "16-mixed", "32-true"]
DtypeName = Literal["fp32", "bf16", "fp16"]
ActivationMode = Literal["none", "full", "every_n", "selective", "memory_budget"]
LIGHTNING_PRECISION: dict[str, PrecisionMode] = {
    "bf16-mixed": "mixed", "bf16-true": "low_precision", "16-mixed": "fp16_mixed", "32-true": "fp32",
}  # fmt: skip
"""Maps Lightning's precision names to modes."""
_DEGREES = ("replicate_degree", "shard_degree")
_WITHOUT_SHARDS = {
    "sharding": "no_shard", "shard_degree": None, "replicate_degree": None, "cpu_offload": False,
    "backward_prefetch": "pre", "forward_prefetch": False, "limit_all_gathers": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WrapConfig:
    """Which modules become FSDP units: detected from the model, named, by size, or already wrapped."""

    classes: list[str] | None = None
    """Module class names; each instance becomes one FSDP unit."""
    patterns: list[str] | None = None
    """Module paths or path suffixes, as model.layers.*.mlp; each match becomes one FSDP unit; * matches one component.
    If experts are units, every rank must call all of them in every step."""
    min_num_params: float | None = None
    """Minimum number of parameters per unit: modules are grouped bottom-up until they reach it."""
    embedding_and_head: bool | None = None
    """Also make the input embedding and the output head separate units unless they are tied; default: true, but false
    with min_num_params."""
    manual: bool = False
    """The LightningModule wraps its modules itself in configure_model; only the root unit is added."""
    max_root_share: float | None = None
    """Maximum share of all parameters, including frozen ones, in the root unit, 0 to 1; tied weights, which must stay
    there, do not count. Default: 0.5; for auto and min_num_params only from 10 million parameters on."""

    def __post_init__(self) -> None:
        size, share = self.min_num_params, self.max_root_share
        require(size is None or size >= 1, "min_num_params", size, "at least 1")
        others = self.classes or self.patterns or size is not None or self.embedding_and_head is not None
        require(not (self.manual and others), "manual", "true with another option", "manual only")
        require(share is None or 0 <= share <= 1, "max_root_share", share, "0 to 1")


def wrap_from_words(words: list[str]) -> WrapConfig:
    """Convert a list of class names and path patterns (those with a dot or a star) into its mapping."""
    require(words, "wrap", words, "auto, or at least one class name or path")
    patterns = [word for word in words if "." in word or "*" in word]
    return WrapConfig(classes=[word for word in words if word not in patterns] or None, patterns=patterns or None)


class DtypeRow(NamedTuple):
    """The dtypes of a mode: storage (also of moments), forward and backward, and gradient reduction."""

    param: DtypeName
    compute: DtypeName
    reduce: DtypeName


_ROWS: dict[PrecisionMode, DtypeRow] = {
    "auto": DtypeRow("fp32", "bf16", "fp32"),  # an upper bound until the devices are known
    "mixed": DtypeRow("fp32", "bf16", "fp32"),
    "low_precision": DtypeRow("bf16", "bf16", "bf16"),
    "fp32": DtypeRow("fp32", "fp32", "fp32"),
    "fp16_mixed": DtypeRow("fp32", "fp16", "fp32"),
    "fp8": DtypeRow("fp32", "bf16", "fp32"),  # linear layers multiply in fp8, everything else as in mixed
}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """A precision mode and optional overrides."""

    mode: PrecisionMode = "mixed"
    """mixed: fp32 weights (frozen base of adapters: bf16, not with fsdp1), bf16 compute; auto: mixed if all devices
    have bf16 instructions, else fp32; low_precision: all bf16; fp16_mixed: with loss scaling; fp8: Hopper GPUs."""
    reduce_dtype: DtypeName | None = None
    """Dtype of the gradient reduction over ranks; default: the mode's (mixed reduces in fp32)."""
    buffer_dtype: DtypeName | None = None
    """Dtype to which floating-point buffers are cast once; default: unchanged."""
    fp8_skip: list[str] | None = None
    """With fp8: linear layers that stay in bf16, by part of their path; default: lm_head."""

    def __post_init__(self) -> None:
        mode = self.mode
        require(self.fp8_skip is None or mode == "fp8", "fp8_skip", f"{self.fp8_skip} with mode {mode}", "mode: fp8")
        allowed = {"fp32", "bf16", "fp16"} if mode == "fp32" else {"fp32", _ROWS[mode].compute}
        given, words = f"{self.reduce_dtype} with mode {mode}", " | ".join(sorted(allowed))
        require(self.reduce_dtype in (None, *allowed), "reduce_dtype", given, words, "drop reduce_dtype")

    @property
    def row(self) -> DtypeRow:
        """The declared dtypes."""
        row = _ROWS[self.mode]
        return row._replace(reduce=self.reduce_dtype or row.reduce)


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """An activation checkpointing mode and its details."""

    mode: ActivationMode = "none"
    """none keeps all activations; full keeps block inputs, and attention outputs of long rows (twice the total width of
    the heads); every_n does so in every n-th block; selective keeps matrix products and attention."""
    n: int | None = None
    """With every_n: one block in n is recomputed; default 2."""
    tiles: int | None = None
    """With full and every_n: number of tiles of positions. Recomputed blocks process a feed-forward layer one tile at a
    time, which costs one more recomputation; not for mixtures of experts; null: no tiles."""
    memory_budget: float | None = None
    """With memory_budget: share of activation memory the compiler may keep, 0 (as full) to 1 (as none); default 0.5."""
    offload_activations: bool = False
    """Offload saved activations of blocks to host memory until the backward pass; selective needs torch 2.15."""

    def __post_init__(self) -> None:
        for field, mode in (("n", "every_n"), ("memory_budget", "memory_budget")):
            value = getattr(self, field)
            require(value is None or self.mode == mode, field, f"{value} with mode {self.mode}", f"mode: {mode}")
        require(self.n is None or self.n >= 1, "n", self.n, "a whole number >= 1")
        fits = self.tiles is None or (self.tiles >= 2 and self.mode in ("full", "every_n"))
        require(fits, "tiles", f"{self.tiles} with mode {self.mode}", "a whole number >= 2, with mode: full | every_n")
        budget = self.memory_budget
        require(budget is None or 0 <= budget <= 1, "memory_budget", budget, "0 to 1")


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """Context parallelism: ranks that split the positions of the same rows, and the method of attention across them."""

    degree: int = 1
    """Number of neighboring ranks that share rows; a divisor of the ranks that split one copy of the model."""
    method: Literal["auto", "ulysses", "all_gather"] = "auto"
    """ulysses exchanges heads for positions, all_gather gathers all keys and values on each rank; auto: ulysses if the
    degree divides the number of heads."""

    def __post_init__(self) -> None:
        require(self.degree >= 1, "degree", self.degree, "a whole number >= 1")


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """All arguments of :func:`lit_fsdp.fsdp_strategy`; a plain word is short for the mapping with its defaults."""

    engine: Engine = "fsdp2"
    """fsdp2 is torch's fully_shard, fsdp1 its FullyShardedDataParallel; ddp and single do not shard the model."""
    sharding: Sharding = "full_shard"
    """full_shard: parameters, gradients and optimizer state; shard_grad_op: gradients and optimizer state; no_shard:
    nothing; hybrid_shard and hybrid_shard_zero2: like the first two, within each copy of the model."""
    shard_degree: int | None = None
    """Number of ranks that shard one copy of the model; -1: all ranks left by replicate_degree."""
    replicate_degree: int | None = None
    """Number of model copies for hybrid sharding; -1: all ranks left by shard_degree; default: the number of nodes."""
    context_parallel: int | ContextConfig = 1
    """fsdp2: number of neighboring ranks that get the same rows and split the positions of the activations."""
    expert_parallel: int = 1
    """fsdp2: number of neighboring ranks that split the experts of each layer and exchange tokens."""
    wrap: Literal["auto", "manual"] | list[str] | WrapConfig = "auto"
    """FSDP units: auto (from the model), a list of block classes and path patterns, manual, or a mapping."""
    precision: PrecisionWord | PrecisionConfig | None = None
    """Storage, compute, reduction and optimizer dtypes: a mode, one of Lightning's names (bf16-mixed, bf16-true,
    16-mixed, 32-true), or a mapping; default: trainer.precision, else mixed."""
    activation_checkpointing: ActivationMode | ActivationConfig = "none"
    """Which activations are recomputed in the backward pass."""
    compile: bool = False
    """Compile each block separately with torch.compile."""
    cpu_offload: bool = False
    """Keep shards of parameters, gradients and optimizer state in host memory; the optimizer runs there."""
    backward_prefetch: Literal["pre", "post", "none"] | int = "pre"
    """Gather the next unit before (pre) or after (post) this unit's gradients; fsdp2: pre, none or units ahead."""
    forward_prefetch: bool | int = False
    """Start the next all-gather before the current unit's forward; fsdp2: or a number of units ahead."""
    limit_all_gathers: bool = True
    """fsdp1: block the CPU so that at most two units are gathered at once; fsdp2 always limits them."""
    sync_each_micro_batch: bool = True
    """Reduce gradients after every micro-batch; false: only after the last, which keeps full gradients in memory."""
    nonfinite_gradients: NonFinite = "error"
    """What to do with an optimizer step whose gradients contain inf or nan; ten skipped steps in a row end the run."""
    use_orig_params: bool = True
    """Option of FSDP1; must be true: names, frozen parameters and checkpoints rely on it."""
    sync_module_states: bool = True
    """Broadcast weights that are already loaded from rank 0 before sharding; false: assume that they are equal."""
    cpu_ram_efficient_loading: bool = True
    """Each rank reads only its shards; false: each rank reads the full model first."""
    process_group_backend: str | None = None
    """gloo, nccl, or cpu:gloo,cuda:nccl; default: by device."""
    timeout_seconds: float = 1800.0
    """Timeout of collectives."""
    find_unused_parameters: bool = True
    """ddp: search for unused parameters in every step; use false if there are none, but then torch rebuilds
    its buckets after the first step, so a resume on more than two ranks may differ in the last bits."""
    contract: Literal["error", "warn"] | None = None
    """Reaction to a dtype that differs from the precision mode; default: error, but warn for third-party modules."""
    state_dict: Literal["sharded", "full"] = "sharded"
    """Save checkpoints as one file per rank (sharded) or as a single file (full)."""
    verbose: bool = False
    """Write the state of each rank to debug/rank-N.json."""

    def __post_init__(self) -> None:
        if self.precision is None or isinstance(self.precision, str):
            word = self.precision or "mixed"
            object.__setattr__(self, "precision", LIGHTNING_PRECISION.get(word, word))
        for field, is_wrong, given, allowed in self._rules():
            require(not is_wrong, field, given, allowed)

    def _rules(self) -> list[tuple[str, Any, Any, str]]:
        """``(field, whether it is wrong, given, allowed)`` for conflicts with the engine or another argument."""
        precision, wrap, seconds = self.precision_config, self.wrap_config, self.timeout_seconds
        fsdp1, fsdp2, single = (self.engine == name for name in ("fsdp1", "fsdp2", "single"))
        unused, held = self.find_unused_parameters, not self.sync_each_micro_batch
        mixes = precision.row.compute != precision.row.param
        by_compiler = self.activation_config.mode == "memory_budget"
        cuts, split = self.context_config.degree != 1, self.sharding != "no_shard"
        divides, experts = self.expert_parallel > 1, f"{self.expert_parallel} with"
        unsynced = self.cpu_ram_efficient_loading and not self.sync_module_states
        rules: list[tuple[str, Any, Any, str]] = [
            ("timeout_seconds", not 0 < seconds <= 7 * 86400, seconds, "above 0, at most a week"),
            ("find_unused_parameters", not unused and self.engine != "ddp", "false", "false with ddp only"),
            ("precision.reduce_dtype", single and precision.reduce_dtype, "set with single", "no reduce_dtype"),
            ("wrap", wrap.manual and not self.is_sharded, f"manual with {self.engine}", "manual with fsdp1 or fsdp2"),
            ("wrap", wrap.manual and precision.mode == "fp8", "manual with fp8", "auto, names or a size"),
            ("backward_prefetch", fsdp2 and self.backward_prefetch == "post", "post", "post with fsdp1 only"),
            ("limit_all_gathers", fsdp2 and not self.limit_all_gathers, "false with fsdp2", "false with fsdp1 only"),
            ("sync_each_micro_batch", fsdp1 and held and mixes, f"false with fsdp1 and {precision.mode}",
             "true, precision fp32 or low_precision, or fsdp2: fsdp1 accumulates in the compute dtype"),
            ("sync_each_micro_batch", fsdp1 and held and self.cpu_offload, "false with fsdp1 and cpu_offload", "true"),
            ("context_parallel", cuts and not fsdp2, f"above 1 with {self.engine}", "1, or engine: fsdp2"),
            ("context_parallel", cuts and not split, "above 1 with no_shard", "a sharding that splits parameters"),
            ("context_parallel", cuts and self.compile, "above 1 with compile: true", "1, or compile: false"),
            ("expert_parallel", self.expert_parallel < 1, self.expert_parallel, "a whole number >= 1"),
            ("expert_parallel", divides and not fsdp2, f"{experts} {self.engine}", "1, or engine: fsdp2"),
            ("expert_parallel", divides and not split, f"{experts} no_shard", "a sharding that splits parameters"),
            ("expert_parallel", divides and self.compile, f"{experts} compile: true", "1, or compile: false"),
            ("expert_parallel", divides and wrap.manual, f"{experts} wrap: manual", "1, or units by the strategy"),
            ("use_orig_params", not self.use_orig_params, "false", "true: checkpoints rely on it"),
            ("cpu_ram_efficient_loading", unsynced, "true with sync_module_states false", "both true, or both false"),
            ("activation_checkpointing.tiles", self.compile and self.activation_config.tiles is not None,
             f"{self.activation_config.tiles} with compile: true", "no tiles: they are not compiled"),
            ("activation_checkpointing", by_compiler and not self.compile, "memory_budget", "with compile: true"),
        ]  # fmt: skip
        for name in ("backward_prefetch", "forward_prefetch"):
            ahead = getattr(self, name)
            is_wrong = type(ahead) is int and (fsdp1 or ahead < 1)
            rules.append((name, is_wrong, ahead, "a number of units >= 1, with fsdp2 only"))
        for name in _DEGREES:
            degree = getattr(self, name)
            rules.append((name, degree not in (None, -1) and degree < 1, degree, ">= 1, or -1 for the remaining ranks"))
        return rules

    @property
    def is_sharded(self) -> bool:
        """Whether the engine shards."""
        return self.engine in ("fsdp1", "fsdp2")

    @property
    def is_hybrid(self) -> bool:
        """Whether the model has several copies, each of them sharded."""
        return self.is_sharded and self.sharding in ("hybrid_shard", "hybrid_shard_zero2")

    @property
    def keeps_gathered(self) -> bool:
        """Whether weights stay gathered from the forward to the backward pass."""
        return self.is_sharded and self.sharding in ("shard_grad_op", "hybrid_shard_zero2")

    @property
    def offloads(self) -> bool:
        """Whether shards live in host memory."""
        return self.is_sharded and self.cpu_offload

    @property
    def wrap_config(self) -> WrapConfig:
        """``wrap`` as its mapping."""
        if isinstance(self.wrap, WrapConfig):
            return self.wrap
        if isinstance(self.wrap, str):
            return WrapConfig(manual=self.wrap == "manual")
        return wrap_from_words(list(self.wrap))

    @property
    def context_config(self) -> ContextConfig:
        """``context_parallel`` as its mapping."""
        given = self.context_parallel
        if isinstance(given, ContextConfig):
            return given
        require(given >= 1, "context_parallel", given, "a whole number >= 1")
        return ContextConfig(degree=given)

    @property
    def precision_config(self) -> PrecisionConfig:
        """``precision`` as its mapping."""
        given: Any = self.precision
        return given if isinstance(given, PrecisionConfig) else PrecisionConfig(mode=given)

    @property
    def frozen_dtype(self) -> DtypeName:
        """Storage dtype of the frozen base of adapters; fsdp1 flattens all parameters of a unit into one tensor."""
        row = self.precision_config.row
        return "bf16" if row.compute == "bf16" and self.engine != "fsdp1" else row.param

    def on(self, has_bf16: bool) -> StrategyConfig:
        """Return this config with ``precision: auto`` resolved for devices with or without bf16 instructions."""
        given = self.precision_config
        if given.mode != "auto":
            return self
        settled = dataclasses.replace(given, mode="mixed" if has_bf16 else "fp32")
        return dataclasses.replace(self, precision=settled)

    @property
    def activation_config(self) -> ActivationConfig:
        """``activation_checkpointing`` as its mapping."""
        given = self.activation_checkpointing
        return given if isinstance(given, ActivationConfig) else ActivationConfig(mode=given)

    @property
    def replaced(self) -> dict[str, str]:
        """Sharding options that ``ddp`` and ``single`` replace; the results do not change."""
        if self.is_sharded:
            return {}
        return {
            name: f"{getattr(self, name)} → {neutral} (engine {self.engine}: every rank has the whole model)"
            for name, neutral in _WITHOUT_SHARDS.items()
            if getattr(self, name) != neutral
        }


def check_quantized(config: StrategyConfig, path: str) -> None:
    """Refuse options that cannot keep a 4-bit base model, whose packed bf16 numbers must not be cast or split."""
    quantized, mode = "with model.lora.quantize", config.precision_config.mode
    fits, allowed = config.engine != "fsdp1", "fsdp2 | ddp | single: fsdp1 casts all weights of a unit"
    require(fits, f"{path}.engine", f"fsdp1 {quantized}", allowed)
    fits, allowed = mode not in ("fp16_mixed", "fp8"), "mixed | auto | low_precision | fp32"
    require(fits, f"{path}.precision", f"{mode} {quantized}", allowed)
    require(config.expert_parallel == 1, f"{path}.expert_parallel", f"{config.expert_parallel} {quantized}", "1")


def check_accumulation(config: StrategyConfig, steps: int, path: str, fix: str) -> None:
    """Refuse several micro-batches per optimizer step where torch keeps only the gradient of the last one.

    Source: the limitations in the docstring of torch's ``FullyShardedDataParallel``.
    """
    given = f"fsdp1 with cpu_offload and {steps} micro-batches per optimizer step"
    allowed = "one micro-batch, because torch keeps only the gradient of the last one; or fsdp2"
    fits = steps == 1 or config.engine != "fsdp1" or not config.cpu_offload
    require(fits, f"{path}.engine", given, allowed, f"set engine: fsdp2, or {fix}")


_NEEDS = {
    "Adafactor": ("ddp | single", "it needs means over rows and columns of unsharded matrices"),
    "torchao.": ("fsdp2 | ddp | single", "fsdp1 cannot gather its 8-bit blocks for a checkpoint"),
    "Muon": ("fsdp2 | ddp | single", "it needs unsharded matrices, but fsdp1 provides flat shards"),
    "bitsandbytes.": (
        "none",
        "checkpoints cannot store its state; torchao.optim.AdamW8bit works with fsdp2, ddp and single",
    ),
    "Rprop": ("fsdp1 | ddp | single", "it writes gradients through a mask, which torch does not support on shards"),
    "LBFGS": ("none", "it computes the loss several times per step"),
    "SparseAdam": ("none", "it accepts only sparse gradients"),
}
"""Maps a word in the path of an optimizer to the engines that it needs, and why."""
_KNOWN = ("torch", "torchao", "transformers", "bitsandbytes", "lit_fsdp")
OTHER_OPTIMIZER = "write torch.optim.AdamW, which works with every engine"


def check_optimizer(path: str, engine: str, field: str) -> None:
    """Refuse an optimizer, by its class path, that fails on an engine or computes different results on its shards.

    Optimizers of other packages are unknown here: :mod:`lit_fsdp.parallel.trial` tries them.
    """
    if path.startswith("torchao.optim."):
        allowed = "AdamW8bit | Adam8bit of torchao.optim, whose state can be saved in checkpoints"
        fits = path.rpartition(".")[2] in ("AdamW8bit", "Adam8bit")
        require(fits, "model.optim.class_path", path, allowed, "write torchao.optim.AdamW8bit")
    for word, (engines, why) in _NEEDS.items() if path.partition(".")[0] in _KNOWN else ():
        if word in path:
            fits = engine in engines.split(" | ")
            given, allowed = f"{path} with {field}: {engine}", f"{engines}: {why}"
            require(fits, "model.optim.class_path", given, allowed, OTHER_OPTIMIZER)
            return


def mesh_shape(config: StrategyConfig, num_nodes: int, world_size: int, path: str = "") -> tuple[int, int]:
    """``(replicate_degree, shard_degree)``: copies of the model and ranks that shard each copy.

    Hybrid sharding defaults to one copy per node. Errors name ``path``, the path of the strategy's arguments.
    """

    def check(fits: bool, field: str, given: str, allowed: str, fix: str = "") -> None:
        require(fits, f"{path}.{field}" if path else field, f"{given} on {world_size} ranks", allowed, fix)

    def checked(copies: int, shards: int) -> tuple[int, int]:
        degree, allowed = (
            config.context_config.degree,
            f"a divisor of {shards}, over which a copy of the model is split",
        )
        check(shards % degree == 0, "context_parallel", str(degree), allowed)
        check(shards % config.expert_parallel == 0, "expert_parallel", str(config.expert_parallel), allowed)
        return copies, shards

    check(config.engine != "single" or world_size == 1, "engine", "single", "one rank, or engine ddp")
    if not config.is_sharded:
        return world_size, 1
    copies, shards = (None if degree == -1 else degree for degree in (config.replicate_degree, config.shard_degree))
    if not config.is_hybrid:
        shape = (1, world_size) if config.sharding != "no_shard" else (world_size, 1)
        for name, degree, value in zip(_DEGREES, (copies, shards), shape, strict=True):
            given = f"{degree} with sharding {config.sharding}"
            check(degree in (None, value), name, given, f"{value}, or -1; or sharding: hybrid_shard")
        return checked(*shape)
    divisors = [degree for degree in range(1, world_size + 1) if world_size % degree == 0]
    alone = [(name, degree) for name, degree in zip(_DEGREES, (copies, shards), strict=True) if degree]
    for name, degree in alone if len(alone) == 1 else ():
        allowed = f"a divisor of the ranks: {', '.join(map(str, divisors))}"
        parts = math.lcm(config.context_config.degree, config.expert_parallel)  # which divide the shards of a copy
        usable = [d for d in divisors if d > 1 and (d if name == "shard_degree" else world_size // d) % parts == 0]
        nearest = max((d for d in usable if d <= degree), default=next(iter(usable), None))
        check(degree in divisors, name, str(degree), allowed, f"set {name}: {nearest}" if nearest else "")
    copies = copies or (max(1, world_size // shards) if shards else num_nodes)
    shards = shards or max(1, world_size // copies)
    nearest = max(degree for degree in divisors if degree <= copies)
    allowed = f"shard_degree * replicate_degree == {world_size}, such as {world_size // nearest} and {nearest}"
    check(copies * shards == world_size, "shard_degree", f"{shards} with replicate_degree {copies}", allowed)
    return checked(copies, shards)
