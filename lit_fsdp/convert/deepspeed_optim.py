"""DeepSpeed's ``optimizer`` and ``scheduler`` sections."""

from __future__ import annotations

from lit_fsdp.convert.read import as_bool, as_count, as_number, drop_listed, drop_unknown
from lit_fsdp.convert.result import Conversion, Section
from lit_fsdp.errors import ConfigError


def convert_optimizer(conversion: Conversion, section: Section, alone: bool) -> None:
    """Convert ``optimizer``; Adam in DeepSpeed decouples weight decay unless told otherwise.

    Args:
        conversion: Takes the recipe and the lines.
        section: The DeepSpeed configuration.
        alone: Whether nothing else in the input names the optimizer.
    """
    if not section.peek("optimizer") or not (taken := section.take("optimizer")):
        if alone:
            conversion.to_give.append("Set model.optim as your script's optimizer.")
        return
    part = Section(taken[1], taken[0])
    kind, params = part.take("type"), Section(part.peek("params"), f"{taken[0]}.params")
    part.take("params")
    if kind:
        same = str(kind[1]).lower() in ("adam", "adamw", "fusedadam")
        conversion.replace(kind[0], "torch's fused AdamW", f"{kind[1]} in DeepSpeed"
                           + ("" if same else " is another optimizer"), differs=not same)  # fmt: skip
    for key, field in (("lr", "lr"), ("eps", "eps"), ("weight_decay", "weight_decay")):
        if found := params.take(key):
            note = "decays matrices only" if key == "weight_decay" else ""
            conversion.keep(found[0], f"model.optim.{field}", as_number(*found), note)
    betas = params.take("betas")
    pair = betas[1] if betas else [0.9, 0.999]
    if betas and (not isinstance(pair, (list, tuple)) or len(pair) != 2):
        raise ConfigError(betas[0], repr(pair), "two numbers", f"write {betas[0]}: [0.9, 0.999]")
    for index, field in enumerate(("beta1", "beta2")):
        value = as_number(betas[0] if betas else field, pair[index])
        if betas and value >= 1:
            raise ConfigError(betas[0], repr(pair), "two numbers >= 0 and < 1", f"write {betas[0]}: [0.9, 0.999]")
        if betas:
            conversion.keep(f"{betas[0]}[{index}]", f"model.optim.{field}", value)
        else:
            conversion.put(f"model.optim.{field}", conversion.get(f"model.optim.{field}", value))
    if (found := params.take("adam_w_mode")) and not as_bool(*found):
        conversion.drop(found[0], "weight decay is always decoupled here", differs=True)
    elif found:
        conversion.drop(found[0], "weight decay is decoupled here too")
    drop_listed(conversion, params, dict.fromkeys(("torch_adam", "bias_correction"), "AdamW corrects its bias here"))
    drop_unknown(conversion, params, ("lr", "betas", "eps", "weight_decay", "adam_w_mode"), "AdamW")
    drop_listed(conversion, part, {"legacy_fusion": "the optimizer is torch's"})
    drop_unknown(conversion, part, ("type", "params"), "optimizer")
    if not section.has("scheduler") and conversion.get("model.optim.schedule") is None:
        conversion.put("model.optim.schedule", "constant")


def convert_scheduler(conversion: Conversion, section: Section) -> None:
    """Convert ``scheduler``; its warm-up is logarithmic unless told otherwise."""
    if not section.peek("scheduler") or not (taken := section.take("scheduler")):
        return
    part = Section(taken[1], taken[0])
    kind, params = part.take("type"), Section(part.peek("params"), f"{taken[0]}.params")
    part.take("params")
    schedules = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
    schedule = schedules.get(str(kind[1]).lower()) if kind else None
    if not kind or schedule is None:
        conversion.drop(kind[0] if kind else taken[0], "there is no such schedule here", differs=True)
        return
    conversion.keep(kind[0], "model.optim.schedule", schedule)
    if found := params.take("warmup_max_lr"):
        conversion.keep(found[0], "model.optim.lr", as_number(*found))
    steps = 0
    if found := params.take("warmup_num_steps"):
        steps = as_count(*found, least=0)
        steps = 0 if steps <= 1 else steps
        conversion.keep(found[0], "model.optim.warmup_steps", steps)
    cosine = schedule == "cosine"
    shape = params.take("warmup_type")
    logarithmic = str(shape[1]).lower() == "log" if shape else True
    differs = logarithmic and steps > 1
    if shape or differs:
        conversion.replace(shape[0] if shape else f"{taken[0]}.params.warmup_type (log by default)", "a linear warm-up",
                           "it is linear here", differs=differs)  # fmt: skip
    for key in ("warmup_min_lr", "warmup_min_ratio"):
        if found := params.take(key):
            start = as_number(*found)
            conversion.drop(found[0], "the warm-up starts near 0 here", differs=start > 0 and steps > 1)
    if found := params.take("cos_min_ratio"):
        conversion.keep(found[0], "model.optim.min_lr_ratio", as_number(*found))
    elif cosine:
        conversion.put("model.optim.min_lr_ratio", 0.0001)
    if found := params.take("total_num_steps"):
        conversion.keep(found[0], "trainer.max_steps", as_count(*found), "the schedule ends with the run here")
    drop_unknown(conversion, params, ("warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"), kind[1])
    drop_unknown(conversion, part, ("type", "params"), "scheduler")
