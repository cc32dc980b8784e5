"""What the strategy factory is told: units, mesh, precision, activation checkpointing, engine.

A word is short for the mapping of its kind with the defaults.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from lit_fsdp.errors import require

Engine = Literal["fsdp2", "fsdp1", "ddp", "single"]
Sharding = Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"]
StateDict = Literal["sharded", "full"]
WrapWord = Literal["auto", "manual"]
BackwardPrefetch = Literal["pre", "post", "none"]
NonFinite = Literal["error", "skip"]
PrecisionMode = Literal["mixed", "auto", "low_precision", "fp32", "fp16_mixed", "fp8"]
PrecisionWord = Literal[PrecisionMode, "bf16-mixed", "bf16-true", "16-mixed", "32-true"]
DtypeName = Literal["fp32", "bf16", "fp16"]
ActivationMode = Literal["none", "full", "every_n", "selective", "memory_budget"]
LIGHTNING_PRECISION: dict[str, PrecisionMode] = {
    "bf16-mixed": "mixed", "bf16-true": "low_precision", "16-mixed": "fp16_mixed", "32-true": "fp32",
}  # fmt: skip
"""Lightning's words for precision, and the modes that they name."""
_WITHOUT_SHARDS = {
    "sharding": "no_shard", "shard_degree": None, "replicate_degree": None, "cpu_offload": False,
    "backward_prefetch": "pre", "forward_prefetch": False, "limit_all_gathers": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WrapConfig:
    """Which modules become FSDP units: found from the model, named, by size, or wrapped already."""

    classes: list[str] | None = None
    """Module class names, each instance of which is one FSDP unit."""
    patterns: list[str] | None = None
    """Module paths, each match of which is one FSDP unit; * stands for one part, as in model.layers.*.mlp; from the
    LightningModule, or else from a transformers model in it. Experts that are units must all be called by every rank
    in every step."""
    min_num_params: float | None = None
    """Smallest unit in parameters: modules are grouped bottom-up until they hold this many."""
    embedding_and_head: bool | None = None
    """Also make the input embedding and the output head units of their own unless they are tied; default: true, but
    false with min_num_params, where size decides."""
    manual: bool = False
    """The LightningModule wraps its parts itself in configure_model; only the root is added."""
    max_root_share: float | None = None
    """Largest share of all parameters, frozen ones too, that may stay in the root unit, 0 to 1; tied weights, which
    have to stay there, are not counted. Default: 0.5, of what auto and a size leave there only from 10 million on."""

    def __post_init__(self) -> None:
        named, size = self.classes or self.patterns, self.min_num_params
        require(size is None or not named, "min_num_params", size, "classes and patterns, or min_num_params, not both")
        require(size is None or size >= 1, "min_num_params", size, "at least 1", "write min_num_params: 1.0e6")
        others = named or size is not None or self.embedding_and_head is not None
        require(not (self.manual and others), "manual", "true beside another choice", "manual alone")
        _check_patterns(self.patterns or [], "patterns")
        share = self.max_root_share
        require(share is None or 0 <= share <= 1, "max_root_share", share, "0 to 1")


def _check_patterns(patterns: list[str], field: str) -> None:
    for pattern in patterns:
        well_formed = "**" not in pattern and all(part.strip() for part in pattern.split("."))
        require(well_formed, field, pattern, "a path such as model.layers.*.mlp, in which * is one part")


def wrap_from_words(words: list[str]) -> WrapConfig:
    """Turn a list of class names and path patterns (those with a dot or a star) into its mapping."""
    require(words and all(word.strip() for word in words), "wrap", words, "auto, or at least one class name or path")
    patterns = [word for word in words if "." in word or "*" in word]
    _check_patterns(patterns, "wrap")
    return WrapConfig(classes=[word for word in words if word not in patterns] or None, patterns=patterns or None)


@dataclass(frozen=True)
class DtypeRow:
    """The dtypes a mode promises, checked against the live run."""

    param: DtypeName
    """Parameters and optimizer moments at rest."""
    compute: DtypeName
    """All-gathered parameters and activations in forward and backward."""
    reduce: DtypeName
    """Gradients while they are summed over ranks."""


_ROWS: dict[PrecisionMode, DtypeRow] = {
    "auto": DtypeRow("fp32", "bf16", "fp32"),  # until the devices are known: what it may be at most
    "mixed": DtypeRow("fp32", "bf16", "fp32"),
    "low_precision": DtypeRow("bf16", "bf16", "bf16"),
    "fp32": DtypeRow("fp32", "fp32", "fp32"),
    "fp16_mixed": DtypeRow("fp32", "fp16", "fp32"),
    "fp8": DtypeRow("fp32", "bf16", "fp32"),  # linear layers multiply in fp8, all else is as in mixed
}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """A precision mode, parts of which may be overridden."""

    mode: PrecisionMode = "mixed"
    """mixed: fp32 weights (a frozen base beside adapters bf16, except with fsdp1), bf16 compute; auto: mixed where
    every device has bf16 instructions, else fp32;
    low_precision: bf16 throughout; fp16_mixed: scaled; fp8: Hopper GPUs."""
    reduce_dtype: DtypeName | None = None
    """Dtype of gradients while they are summed over ranks; default: the mode's (mixed reduces in fp32)."""
    buffer_dtype: DtypeName | None = None
    """Dtype that floating-point buffers are cast to once; default: as the model made them."""
    fp8_skip: list[str] | None = None
    """With fp8: linear layers, by part of their path, that stay in bf16; default: lm_head."""

    def __post_init__(self) -> None:
        mode = self.mode
        require(self.fp8_skip is None or mode == "fp8", "fp8_skip", f"{self.fp8_skip} with mode {mode}", "mode: fp8")
        allowed = {"fp32", "bf16", "fp16"} if mode == "fp32" else {"fp32", _ROWS[mode].compute}
        given, words = f"{self.reduce_dtype} with mode {mode}", " | ".join(sorted(allowed))
        require(self.reduce_dtype in (None, *allowed), "reduce_dtype", given, words, "drop reduce_dtype")

    @property
    def row(self) -> DtypeRow:
        """The dtypes this choice promises."""
        row = _ROWS[self.mode]
        return DtypeRow(row.param, row.compute, self.reduce_dtype or row.reduce)


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """An activation checkpointing mode and its details."""

    mode: ActivationMode = "none"
    """none keeps all; full only block inputs; every_n does so in every n-th block; selective keeps
    matrix products and attention."""
    n: int | None = None
    """With every_n: one block in n recomputes; default 2."""
    memory_budget: float | None = None
    """With memory_budget: share of activation memory the compiler may keep, 0 (as full) to 1 (as none)."""
    offload_activations: bool = False
    """Keep activations saved by the blocks, but not what selective keeps, in host memory until the backward pass."""

    def __post_init__(self) -> None:
        for field, mode in (("n", "every_n"), ("memory_budget", "memory_budget")):
            value = getattr(self, field)
            require(value is None or self.mode == mode, field, f"{value} with mode {self.mode}", f"mode: {mode}")
        require(self.n is None or self.n >= 1, "n", self.n, "a whole number >= 1 (1 is full)")
        budget = self.memory_budget
        fits = self.mode != "memory_budget" if budget is None else 0 <= budget <= 1
        require(fits, "memory_budget", budget, "0 to 1", "write {mode: memory_budget, memory_budget: 0.5}")


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
    precision: PrecisionWord | PrecisionConfig | None = None
    """Storage, compute, reduction and optimizer dtypes: a mode of ours, one of Lightning's words (bf16-mixed,
    bf16-true, 16-mixed, 32-true), or a mapping; default: what trainer.precision says, else mixed."""
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
    find_unused_parameters: bool = True
    """ddp: look in every step for parameters it did not use; false saves that where there are none, but torch lays out
    its buckets again after the first step, so that on more than two ranks a resume may differ in the last bits."""
    contract: Literal["error", "warn"] | None = None
    """What a dtype that differs from the precision mode's does; default: error, but warn for somebody's own module."""
    state_dict: StateDict = "sharded"
    """Checkpoints as one file per rank (sharded) or one file in all (full)."""
    verbose: bool = False
    """Write what each rank holds to debug/rank-N.json, and show the ranks as a table."""

    def __post_init__(self) -> None:
        if self.precision is None or isinstance(self.precision, str):
            word = self.precision or "mixed"
            object.__setattr__(self, "precision", LIGHTNING_PRECISION.get(word, word))
        _check_numbers(self)
        _check_degrees(self)
        _check_engine(self)
        _check_details(self)

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
        given: Any = self.precision
        return given if isinstance(given, PrecisionConfig) else PrecisionConfig(mode=given)

    @property
    def frozen_dtype(self) -> DtypeName:
        """Storage dtype of what is frozen beside adapters: bf16 in all modes that compute in it, but for fsdp1.

        It makes one tensor, of one dtype, of all parameters of a unit.
        """
        row = self.precision_config.row
        return "bf16" if row.compute == "bf16" and self.engine != "fsdp1" else row.param

    def on(self, has_bf16: bool) -> StrategyConfig:
        """The same with the mode that ``precision: auto`` is on devices with or without bf16 instructions."""
        given = self.precision_config
        if given.mode != "auto":
            return self
        settled = dataclasses.replace(given, mode="mixed" if has_bf16 else "fp32")
        return dataclasses.replace(self, precision=settled)

    @property
    def activation_config(self) -> ActivationConfig:
        """``activation_checkpointing`` as its mapping."""
        given = self.activation_checkpointing
        fix = "write activation_checkpointing: {mode: memory_budget, memory_budget: 0.5}"
        allowed = "{mode: memory_budget, memory_budget: 0 to 1}"
        require(given != "memory_budget", "activation_checkpointing", "memory_budget without a budget", allowed, fix)
        return given if isinstance(given, ActivationConfig) else ActivationConfig(mode=given)

    @property
    def replaced(self) -> dict[str, str]:
        """What ``ddp`` and ``single`` put in place of choices about shards, which do not change what is computed."""
        if self.is_sharded:
            return {}
        found = {name: (getattr(self, name), neutral) for name, neutral in _WITHOUT_SHARDS.items()}
        if self.engine == "single":
            found["sync_each_micro_batch"] = (self.sync_each_micro_batch, True)
        found["wrap.max_root_share"] = (self.wrap_config.max_root_share, None)
        return {
            name: f"{_word(given)} → {_word(neutral)} (engine {self.engine}: every rank holds the whole model)"
            for name, (given, neutral) in found.items()
            if given != neutral
        }


def _word(value: object) -> str:
    return "null" if value is None else str(value).lower()


def _check_numbers(config: StrategyConfig) -> None:
    for name in ("shard_degree", "replicate_degree"):
        given = getattr(config, name)
        require(given is None or given == -1 or given >= 1, name, given, ">= 1, or -1 for the rest")
    both = config.shard_degree == config.replicate_degree == -1
    require(not both, "shard_degree", "-1 with replicate_degree -1", "one -1 at most", "write shard_degree: 8")
    skipped = config.max_skipped_steps
    given = f"{skipped} with nonfinite_gradients {config.nonfinite_gradients}"
    fits = skipped is None or (skipped >= 1 and config.nonfinite_gradients == "skip")
    require(fits, "max_skipped_steps", given, ">= 1, with nonfinite_gradients: skip")
    seconds = config.timeout_seconds
    require(0 < seconds <= 7 * 86400, "timeout_seconds", seconds, "above 0, at most a week")


def _check_degrees(config: StrategyConfig) -> None:
    if config.is_hybrid or not config.is_sharded:
        return
    kind, copies, shards = f"sharding {config.sharding}", config.replicate_degree, config.shard_degree
    hybrid = "only with sharding: hybrid_shard or hybrid_shard_zero2"
    fits = copies in (None, 1, -1) or config.is_replicated
    require(fits, "replicate_degree", f"{copies} with {kind}", hybrid, "set sharding: hybrid_shard")
    fits = shards in (None, 1, -1) or not config.is_replicated
    require(fits, "shard_degree", f"{shards} with {kind}, which splits nothing", "1, or a sharding that splits")


def _check_engine(config: StrategyConfig) -> None:
    """Refuse what an engine cannot do; what would leave the arithmetic as it is, is replaced instead."""
    engine, precision = f"engine {config.engine}", config.precision_config
    given = f"false with {engine}, which always knows"
    fits = config.find_unused_parameters or config.engine == "ddp"
    require(fits, "find_unused_parameters", given, "true; false with ddp only", "drop find_unused_parameters")
    if not config.is_sharded:
        reduces = config.engine == "ddp" or precision.reduce_dtype is None
        given = f"{precision.reduce_dtype} with {engine}, which reduces nothing"
        require(reduces, "precision.reduce_dtype", given, "an engine with several ranks", "drop reduce_dtype")
        require(not config.wrap_config.manual, "wrap", f"manual with {engine}", "fsdp1 | fsdp2", "drop wrap")
        return
    for name in ("backward_prefetch", "forward_prefetch"):
        ahead = getattr(config, name)
        if isinstance(ahead, int) and not isinstance(ahead, bool):
            require(ahead >= 1, name, ahead, "a number of units >= 1")
            words = "pre | post | none, true | false"
            require(config.engine == "fsdp2", name, f"{ahead} with {engine}", words, "set engine: fsdp2")
    if config.engine == "fsdp2":
        given = "post with engine fsdp2, which can only gather before"
        allowed, fix = "pre | none | a number of units", "write backward_prefetch: pre, or engine: fsdp1"
        require(config.backward_prefetch != "post", "backward_prefetch", given, allowed, fix)
        given = "false with engine fsdp2, which bounds its gathers by streams and never blocks the CPU"
        require(config.limit_all_gathers, "limit_all_gathers", given, "true", "drop it, or set engine: fsdp1")
    elif not config.sync_each_micro_batch:
        fix = "set sync_each_micro_batch: true, or engine: fsdp2"
        given = f"false with engine fsdp1 and precision {precision.mode}, which adds up in {precision.row.compute}"
        same = precision.row.compute == precision.row.param
        require(same, "sync_each_micro_batch", given, "true, or precision fp32 or low_precision", fix)
        given = "false with engine fsdp1 and cpu_offload"
        require(not config.cpu_offload, "sync_each_micro_batch", given, "true", fix)


def _check_details(config: StrategyConfig) -> None:
    precision, wrap = config.precision_config, config.wrap_config
    given = "manual with precision fp8, which has to come before wrapping"
    require(not (wrap.manual and precision.mode == "fp8"), "wrap", given, "auto, names or a size")
    given = "false: parameter names, frozen parts and checkpoints of both engines rely on it"
    require(config.use_orig_params, "use_orig_params", given, "true", "drop use_orig_params")
    given = "true with sync_module_states false"
    fits = config.sync_module_states or not config.cpu_ram_efficient_loading
    require(fits, "cpu_ram_efficient_loading", given, "sync_module_states: true, or both false")
    fits = config.activation_config.mode != "memory_budget" or config.compile
    given = "memory_budget without compile: the budget is the compiler's"
    require(fits, "activation_checkpointing", given, "memory_budget with compile: true")


def check_quantized(config: StrategyConfig, path: str) -> None:
    """Refuse what cannot hold a base in 4 bits, packed into bf16 numbers that nothing may cast or take apart."""
    mode, quantized = config.precision_config.mode, "with model.lora.quantize"
    given = f"fsdp1 {quantized}: it makes one tensor of a unit, and casts packed weights with all others"
    require(config.engine != "fsdp1", f"{path}.engine", given, "fsdp2 | ddp | single", "set engine: fsdp2")
    fits = mode not in ("fp16_mixed", "fp8")
    allowed = "mixed | auto | low_precision | fp32: weights are packed into bf16 numbers"
    require(fits, f"{path}.precision", f"{mode} {quantized}", allowed, "set precision: mixed")


def check_optimizer(path: str, engine: str, field: str) -> None:
    """Refuse an optimizer, by the path of its class, that would compute something else of the shards of an engine."""
    engines = ("ddp", "single") if "Adafactor" in path else ("fsdp2", "ddp", "single")
    why = (
        "it takes means over rows and columns of whole matrices, of which ranks have parts" if "Adafactor" in path
        else "its state is of 8-bit blocks, which FSDP1 cannot gather for a checkpoint" if path.startswith("torchao.")
        else "it needs whole matrices, and FSDP1 gives optimizers flat parts of them" if "Muon" in path
        else ""
    )  # fmt: skip
    given, fix = f"{path} with engine {engine}: {why}", f"set {field}: {engines[0]}"
    require(not why or engine in engines, "model.optim.class_path", given, f"engine {' | '.join(engines)}", fix)


def mesh_shape(config: StrategyConfig, num_nodes: int, world_size: int, path: str = "") -> tuple[int, int]:
    """``(replicate_degree, shard_degree)``: copies of the model and ranks over which each copy is split.

    Hybrid sharding has by default a copy per node. ``path`` is that of the strategy's arguments, for errors.
    """
    at = f"{path}." if path else ""
    alone = config.engine != "single" or world_size == 1
    require(alone, f"{at}engine", f"single on {world_size} ranks", "one rank", "set trainer.devices: 1, or engine: ddp")
    asked = {"replicate_degree": config.replicate_degree, "shard_degree": config.shard_degree}
    copies, shards = (None if given == -1 else given for given in asked.values())
    if config.is_hybrid:
        return _hybrid_shape(config, copies, shards, num_nodes, world_size, at)
    found = (world_size, 1) if config.is_replicated else (1, world_size)
    if config.is_sharded:  # of the other engines, degrees are replaced
        for (name, given), value in zip(asked.items(), found, strict=True):
            text = f"{given} with sharding {config.sharding} on {world_size} ranks"
            allowed, fix = f"{value}, or -1; several copies need hybrid_shard", f"set {name}: {value}"
            require(given in (None, -1, value), f"{at}{name}", text, allowed, f"{fix}, or sharding: hybrid_shard")
    return found


def _hybrid_shape(
    config: StrategyConfig, copies: int | None, shards: int | None, num_nodes: int, world_size: int, at: str
) -> tuple[int, int]:
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    allowed = f"a divisor of the ranks: {', '.join(map(str, divisors))}"
    for name, given in (("replicate_degree", copies or num_nodes), ("shard_degree", shards or 1)):
        fix = f"set {name}: {max(d for d in divisors if d <= given)}"
        require(world_size % given == 0, f"{at}{name}", f"{given} on {world_size} ranks", allowed, fix)
    pair = f"{shards} with replicate_degree {copies} on {world_size} ranks"
    product = f"shard_degree * replicate_degree == {world_size}, or -1 for all ranks left"
    fix = f"set shard_degree: -1, or shard_degree: {world_size // (copies or 1)} with replicate_degree: {copies}"
    fits = not (copies and shards) or copies * shards == world_size
    require(fits, f"{at}shard_degree", pair, product, fix)
    decided = copies or shards or num_nodes > 1
    text = f"{_word(config.replicate_degree)} on one node, which leaves one copy: that is full_shard"
    require(decided, f"{at}replicate_degree", text, allowed, "set replicate_degree: 2, or sharding: full_shard")
    found = copies or (world_size // shards if shards else num_nodes)
    return found, world_size // found
