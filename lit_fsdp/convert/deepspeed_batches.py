"""The three batch sizes of DeepSpeed, of which any two give the third with the number of ranks."""

from __future__ import annotations

from lit_fsdp.convert.deepspeed_auto import Auto
from lit_fsdp.convert.read import as_count
from lit_fsdp.convert.result import Conversion, Section
from lit_fsdp.errors import ConfigError

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def convert_batches(conversion: Conversion, section: Section, auto: Auto, ranks: int | None) -> None:
    """Convert the batch sizes; sizes that no number of ranks can have are refused as DeepSpeed does."""
    given = {name: taken for name in BATCH_KEYS if (taken := section.take(name))}
    if not given:
        if auto.exact:
            return
        conversion.to_give.append("Set data.global_batch_size and data.micro_batch_size as your script does.")
        return
    opens = {name for name, (_, value) in given.items() if value == "auto"}
    total, micro, steps = (
        as_count(*given[name]) if name in given and name not in opens else None for name in BATCH_KEYS
    )
    if BATCH_KEYS[0] in opens and BATCH_KEYS[1] not in given:
        opens.add(BATCH_KEYS[1])
    if total is None or auto.exact:
        micro = auto.values[BATCH_KEYS[1]] if micro is None and BATCH_KEYS[1] in opens else micro
        steps = auto.values[BATCH_KEYS[2]] if steps is None and BATCH_KEYS[2] in opens else steps
    _refuse_impossible(given, opens, (total, micro, steps), ranks)
    if total and ranks:
        micro = micro or total // (ranks * (steps or 1))
    elif total and micro and steps:
        conversion.put("trainer.devices", total // (micro * steps))
        conversion.to_give.append(f"The batch sizes are those of {total // (micro * steps)} ranks on one node.")
    elif micro and total is None and (ranks or (BATCH_KEYS[1] in opens and not auto.exact)):
        total = micro * (steps or 1) * (ranks or 1)
        if not ranks:
            conversion.to_give.append("The batch sizes are those of one rank: add --ranks N, or set them.")
    _say(conversion, given, opens, (total, micro, steps), auto)


def _refuse_impossible(
    given: dict[str, tuple[str, object]], opens: set[str], sizes: tuple[int | None, int | None, int | None],
    ranks: int | None,
) -> None:  # fmt: skip
    total, micro, steps = sizes
    if total is None:
        return
    unit = (micro or 1) * (steps or 1) * (ranks or 1)
    exact = bool(ranks and micro and steps)
    if total % unit == 0 and not (exact and total != unit):
        return
    words = [f"micro batch {micro}"] if micro else []
    words += [f"{steps} accumulation steps"] if steps else []
    words += [f"{ranks} ranks"] if ranks else []
    nearest = unit if exact else max(1, round(total / unit)) * unit
    allowed = f"train_batch_size == micro batch * accumulation steps * ranks: {unit}" + ("" if exact else " times n")
    key = given[BATCH_KEYS[0]][0] if BATCH_KEYS[0] not in opens else given[BATCH_KEYS[1]][0]
    raise ConfigError(key, f"{total} with {', '.join(words)}", allowed, f"write {key}: {nearest}, or mend the others")


def _say(
    conversion: Conversion, given: dict[str, tuple[str, object]], opens: set[str],
    sizes: tuple[int | None, int | None, int | None], auto: Auto,
) -> None:  # fmt: skip
    total, micro, steps = sizes
    whole, each, several = BATCH_KEYS
    for key, path, value in ((whole, "data.global_batch_size", total), (each, "data.micro_batch_size", micro)):
        if value:
            conversion.put(path, value)
        if key in given and key not in opens:
            conversion.keep(given[key][0], path, value)
        elif key in given and value:
            derived = not auto.exact and (key == whole or (whole in given and whole not in opens))
            why = "from the other two and the ranks" if derived else auto.who_of(key)
            conversion.replace(given[key][0], f"{path}: {value}", f"auto: {why}")
        elif key in given and key == each:
            conversion.replace(given[key][0], f"{path}: 1", "auto: it follows from the ranks, which are not given")
            conversion.put(path, 1)
    if several in given and total:
        who = f"auto: {auto.who_of(several)}; " if several in opens else ""
        by = f"data.global_batch_size: {total}"
        conversion.replace(given[several][0], by, f"{who}steps follow from it, the micro batch and the ranks")
    if total is None:
        conversion.to_give.append(f"Set data.global_batch_size: micro_batch_size * {steps or 1} * ranks.")
        decides = [name for name in (several, each, whole) if name in given]
        key = next((name for name in decides if name not in opens), decides[-1])
        why = "the ranks are not in this file: add --ranks N"
        conversion.replace(
            given[key][0], "data.global_batch_size, which you give", why, differs=auto.exact or opens < set(given)
        )
        for name in (several, whole):
            if name in given and name != key:
                conversion.replace(given[name][0], "data.global_batch_size, which you give", f"see {key}")
