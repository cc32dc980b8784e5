"""The model section: the model, its adapters, the loss, and the optimizer."""

import difflib
import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from lit_fsdp.errors import ConfigError, require

FLASH_ATTENTION = ("flash_attention_2", "flash_attention_3")  # bf16 or fp16 compute only
WITHOUT_SDPA = ("gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "vaultgemma")
"""Transformers (5.24) families without SDPA support, only because of soft caps or attention sinks."""
GPU_ATTENTION = ("flex_attention", *FLASH_ATTENTION)  # backward pass on GPUs only
ADAMW = "torch.optim.AdamW"


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer with decoupled weight decay, a linear warm-up and one of four schedules."""

    lr: float = 1e-5
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decay per step relative to the learning rate, for parameters of two or more dimensions only."""
    beta1: float = 0.9
    """Decay rate of the first moment, for AdamW and other optimizers with betas."""
    beta2: float = 0.95
    """Decay rate of the second moment, for AdamW and other optimizers with betas."""
    eps: float = 1e-8
    """Term added to the root of the second moment, for AdamW and other optimizers with eps."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Decay of the learning rate from its peak to min_lr_ratio of it over the run; wsd: linear, only at the end."""
    decay_ratio: float = 0.1
    """With wsd (warm-up, stable, decay): share of the run's optimizer steps over which the learning rate decays."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly to its peak."""
    warmup_ratio: float = 0.0
    """Warm-up as a share of the run's optimizer steps, rounded up as in transformers; instead of warmup_steps."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of the run as a share of the peak, 0 to 1."""
    optimizer: str = ADAMW
    """Class of the optimizer (default: fused AdamW) from torch.optim, lit_fsdp or a package named by --allow-imports;
    recipes may also use class_path."""
    optimizer_args: dict[str, Any] | None = None
    """Further arguments of the optimizer, e.g. {momentum: 0.9}; recipes may also use init_args."""

    def __post_init__(self) -> None:
        args = dict(self.optimizer_args or {})
        for field in ("lr", "weight_decay"):  # Lightning expects them among the arguments of a class
            if field in args:
                object.__setattr__(self, field, float(args.pop(field)))
        object.__setattr__(self, "optimizer_args", args or None)
        shares = ("beta1", "beta2", "min_lr_ratio", "decay_ratio", "warmup_ratio")
        for field in ("lr", "weight_decay", "eps", "warmup_steps", *shares):
            value, is_share = getattr(self, field), field in shares
            allowed = "0 to 1" if is_share else "a finite number >= 0"
            require(0 <= value <= 1 if is_share else 0 <= value < float("inf"), field, value, allowed)
        given, is_used = f"{self.decay_ratio} with schedule: {self.schedule}", self.schedule == "wsd"
        require(is_used or self.decay_ratio == 0.1, "decay_ratio", given, "schedule: wsd", "set schedule: wsd")
        given, fits = f"{self.warmup_ratio} with warmup_steps: {self.warmup_steps}", not self.warmup_steps
        require(fits or not self.warmup_ratio, "warmup_ratio", given, "one of them", "set the other to 0")

    def warmup(self, total_steps: int) -> int:
        """Number of warm-up steps of a run of ``total_steps``."""
        return self.warmup_steps or math.ceil(self.warmup_ratio * total_steps)


def schedule_factor(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The learning rate of optimizer step ``step`` (from 0) as a share of its peak.

    The warm-up rises linearly and reaches the peak with its last step. The schedule then decays (``wsd`` only
    at the end) and would reach ``min_lr_ratio`` at step ``total_steps``, after the last step.
    """
    start = optim.warmup(total_steps)
    if step < start:
        return (step + 1) / start
    if optim.schedule == "constant":
        return 1.0
    if optim.schedule == "wsd":  # MiniCPM, arXiv:2404.06395; linear decay: arXiv:2405.18392
        start = max(start, total_steps - max(1, round(optim.decay_ratio * total_steps)))
    done = min(1.0, max(0, step - start) / max(1, total_steps - start))
    fall = 0.5 * (1 + math.cos(math.pi * done)) if optim.schedule == "cosine" else 1.0 - done
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * fall


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The ``model.loss`` section: backends that compute the same loss and gradients."""

    backend: Literal["chunked", "plain", "liger"] = "chunked"
    """chunked: head and cross-entropy for a few rows at a time; plain: all logits at once; liger: the Liger kernel."""
    chunk_tokens: int | None = None
    """Supervised tokens per chunk; default: the fp32 logits of a chunk take about 96 MiB, or a quarter of the head's
    fp32 gradient if that is larger."""

    def __post_init__(self) -> None:
        chunk, backend = self.chunk_tokens, self.backend
        fits = chunk is None or (chunk >= 1 and backend == "chunked")
        require(fits, "chunk_tokens", f"{chunk} with backend {backend}", ">= 1, with backend: chunked")


_ALL_OF_A_KIND = ("all-linear", "attention-only")
_OF_PEFT = ("r", "target_modules", "use_dora", "use_rslora", "modules_to_save")  # same names in peft


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The ``model.lora`` section: the base model is frozen, and adapters ``B @ A * alpha / r`` are trained."""

    r: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / r (by alpha / sqrt(r) with use_rslora)."""
    dropout: float = 0.0
    """Dropout probability of the inputs of an adapter, 0 to 1."""
    target_modules: list[str] | str | None = None
    """Layer name suffixes (q_proj) or fused experts (mlp.experts.down_proj), all-linear (includes experts, excludes the
    head and routers), attention-only, a regular expression that matches full names, or null (peft's default)."""
    use_dora: bool = False
    """Train the magnitude of each weight vector separately from its direction (DoRA)."""
    use_rslora: bool = False
    """Scale adapters by alpha / sqrt(r), which is more stable for large ranks."""
    modules_to_save: list[str] | None = None
    """Names of modules that are fully trained and saved with the adapters, e.g. [lm_head]."""
    peft_args: dict[str, Any] | None = None
    """Further arguments of peft.LoraConfig: layers_to_transform, layers_pattern, exclude_modules, rank_pattern,
    alpha_pattern, init_lora_weights: gaussian."""
    quantize: Literal["nf4"] | None = None
    """nf4: store the linear layers of the base model, except the head, in 4 bits (QLoRA)."""
    double_quantization: bool = False
    """With quantize: store the scales of the 4-bit weights in 8 bits, which saves about 0.4 bits per weight."""

    def __post_init__(self) -> None:
        require(self.r >= 1, "r", self.r, ">= 1")
        require(0 < self.alpha < float("inf"), "alpha", self.alpha, "a finite number > 0")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "0 <= dropout < 1")
        for field in ("target_modules", "modules_to_save"):
            require(getattr(self, field) != [], field, "[]", "at least one name, or null", f"drop {field}")
        if isinstance(self.target_modules, str):
            given, is_list = self.target_modules, re.fullmatch(r"[\w.\s]*,[\w.,\s]*", self.target_modules)
            require(not is_list, "target_modules", given, "a list or a regular expression", f"write [{given}]")
            near = [] if given in _ALL_OF_A_KIND else difflib.get_close_matches(given, _ALL_OF_A_KIND, 1, 0.8)
            allowed = f"{', '.join(_ALL_OF_A_KIND)}, names, or a regular expression"
            is_typo = bool(near) and re.fullmatch(r"[\w-]+", given) is not None
            require(not is_typo, "target_modules", given, allowed, f"write {''.join(near)}")
            try:
                re.compile(self.target_modules)
            except re.error as error:
                given, allowed = f"{self.target_modules!r} ({error})", "names, all-linear, or a regular expression"
                raise ConfigError("target_modules", given, allowed) from error
        for ours, theirs in (("alpha", "lora_alpha"), ("dropout", "lora_dropout"), *((f, f) for f in _OF_PEFT)):
            fix = f"write model.lora.{ours}"
            require(theirs not in (self.peft_args or {}), f"peft_args.{theirs}", "a field of model.lora", ours, fix)
        is_used = self.quantize or not self.double_quantization
        require(is_used, "double_quantization", "true without quantize", "quantize: nf4", "add quantize: nf4")
        given = "true with quantize: DoRA needs unquantized weights in every forward"
        fits = not (self.quantize and self.use_dora)
        require(fits, "use_dora", given, "false with quantize", "drop use_dora or quantize")

    def check_checkpoint(self, manifest: Any) -> None:
        """Raise ConfigError if the adapters of a checkpoint have a different rank, scale or base model."""
        model = manifest.extra.get("model", {})
        saved = {**(model.get("adapter") or {}), **(model.get("base") or {})}
        own = {name: getattr(self, name) for name in ("r", "alpha", "use_rslora", "quantize", "double_quantization")}
        own |= {
            f"peft_args.{name}": (self.peft_args or {}).get(name) or {} for name in ("rank_pattern", "alpha_pattern")
        }
        for name, now in own.items():
            before = saved.get("lora_alpha" if name == "alpha" else name.removeprefix("peft_args."), now)
            allowed = f"{before}, as in {manifest.folder}: it is a part of the model"
            require(now == before, f"model.lora.{name}", now, allowed, f"set {name}: {before}, or start a new run")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The ``model`` section: arguments of :class:`lit_fsdp.CausalLMModule`."""

    name: str | dict | None = None
    """Hub name, model folder or GGUF file to start from; a config .json file or mapping for random init."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; default: the model's."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and learning-rate schedule."""
    loss: LossConfig = LossConfig()
    """Backend of the cross-entropy."""
    lora: LoraConfig | None = None
    """Train adapters on a frozen base model; {} for all defaults."""
    freeze: list[str] | None = None
    """Patterns of parameters that are not trained, e.g. [model.embed_tokens.*]; * matches anything."""
    config_overrides: dict[str, Any] | None = None
    """Values that replace those of the model's config, also on export, e.g. {max_position_embeddings: 131072,
    rope_parameters: {rope_type: yarn, factor: 4.0}}; they must not change names or shapes of loaded weights."""
    add_tokens: list[str] | None = None
    """Special tokens added to the tokenizer; embedding and head grow by the rows they lack."""
    neftune_alpha: float | None = None
    """Maximum norm of the noise on the embeddings of each training sample (NEFTune: 5 to 15); null: none."""
    attn_implementation: Literal["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"] | None = (
        None
    )
    """Attention backend of transformers; default: sdpa (for packs, over each sample separately), or eager for models
    without SDPA support."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model."""
    miniature: bool = False
    """Random init of the same architecture shrunk to about a million parameters, to try out a recipe."""

    def __post_init__(self) -> None:
        alpha, tokens = self.neftune_alpha, self.add_tokens or ["-"]
        is_bound = alpha is None or 0 < alpha < float("inf")
        require(is_bound, "neftune_alpha", alpha, "a finite number > 0, or null", "write neftune_alpha: 5")
        require(all(tokens) and len(set(tokens)) == len(tokens), "add_tokens", tokens, "distinct, nonempty tokens")


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """The ``model.preference`` section: the loss over chosen and rejected completions."""

    loss: Literal["dpo", "ipo", "orpo", "simpo"] = "dpo"
    """dpo and ipo use the model before training as reference; orpo and simpo need no reference."""
    beta: float = 0.1
    """Weight of the preference: larger stays nearer to the reference (dpo, ipo), or weights the odds ratio (orpo)
    or the mean log-probabilities per token (simpo, typically 2.0)."""
    gamma: float = 0.5
    """Target margin between the chosen and the rejected reward; simpo only."""
    label_smoothing: float = 0.0
    """Assumed share of pairs with swapped labels, 0 to 0.5; dpo and simpo only."""

    def __post_init__(self) -> None:
        require(0 < self.beta < float("inf"), "beta", self.beta, "a finite number > 0")
        require(0 <= self.gamma < float("inf"), "gamma", self.gamma, "a finite number >= 0")
        smooth, is_taken = self.label_smoothing, self.loss in ("dpo", "simpo")
        allowed = "0 <= label_smoothing < 0.5, with loss: dpo | simpo"
        require(0 <= smooth < 0.5 and (is_taken or not smooth), "label_smoothing", smooth, allowed)

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the model before training."""
        return self.loss in ("dpo", "ipo")


@dataclass(frozen=True, kw_only=True)
class PreferenceModelConfig(ModelConfig):
    """The ``model`` section of ``class_path: lit_fsdp.PreferenceModule``: its arguments."""

    preference: PreferenceConfig = PreferenceConfig()
    """Loss over pairs of a chosen and a rejected completion."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_told = self.loss.backend != "liger"
        require(is_told, "loss.backend", "liger", "chunked | plain: it does not return the loss per token")


def gpu_attention_on_cpu(name: str) -> ConfigError:
    """Error for an attention backend that trains only on GPUs, on a CPU."""
    fix = "leave attn_implementation out"
    return ConfigError("model.attn_implementation", f"{name} on a CPU", "sdpa | eager without a GPU", fix)
