"""What ``TrainingArguments`` say around the loop: checkpoints, logging, validation and data."""

from __future__ import annotations

from typing import Any

from lit_fsdp.convert.read import as_bool, as_choice, as_count, as_number
from lit_fsdp.convert.result import Conversion, Section


def convert_checkpoints(conversion: Conversion, section: Section) -> None:
    """Convert what is saved, logged and watched, and where."""
    strategy, steps = section.take("save_strategy"), section.take("save_steps")
    word = str(strategy[1]).lower() if strategy and strategy[1] is not False else "no" if strategy else "steps"
    number = as_number(*steps) if steps else 500
    if word == "steps" and number >= 1:
        conversion.put("checkpoint.every_steps", int(number))
    for taken in (strategy, steps):
        if taken and word == "steps" and number >= 1:
            conversion.keep(taken[0], "checkpoint.every_steps", int(number))
        elif taken:
            conversion.drop(taken[0], "a checkpoint is saved at the end and at the best validation; see checkpoint")
    limit = section.take("save_total_limit")
    keep = as_count(*limit) if limit else -1
    conversion.put("checkpoint.keep_last", keep)
    if limit:
        conversion.keep(limit[0], "checkpoint.keep_last", keep, "and the best one")
    if taken := section.take("metric_for_best_model"):
        loss = str(taken[1]) in ("loss", "eval_loss")
        if loss:
            conversion.keep(taken[0], "checkpoint.monitor", "val_loss")
        else:
            conversion.drop(taken[0], "set checkpoint.monitor to a metric that is logged here")
    if taken := section.take("greater_is_better"):
        conversion.drop(taken[0], "set checkpoint.mode with checkpoint.monitor")
    if taken := section.take("output_dir"):
        conversion.keep(taken[0], "trainer.default_root_dir", str(taken[1]))
    if taken := section.take("logging_steps"):
        every = as_number(*taken)
        if every >= 1:
            conversion.keep(taken[0], "trainer.log_every_n_steps", int(every))
        else:
            conversion.drop(taken[0], "trainer.log_every_n_steps is a number of steps")


def convert_validation(conversion: Conversion, section: Section, values: dict[str, Any]) -> None:
    """Convert when the validation rows are scored; ``values`` are the numbers of the loop."""
    strategy = section.take("eval_strategy") or section.take("evaluation_strategy")
    every = section.take("eval_steps")
    word = str(strategy[1]).lower() if strategy and strategy[1] is not False else "no"
    number = as_number(*every) if every else 0
    batches = int(number) * values["gradient_accumulation_steps"]
    by_steps = word == "steps" and number >= 1
    if by_steps:
        conversion.put("trainer.check_val_every_n_epoch", None)
    for taken in (strategy, every):
        if taken and by_steps:
            conversion.keep(taken[0], "trainer.val_check_interval", batches, "in micro-batches; needs data.val")
        elif taken:
            conversion.drop(taken[0], "data.val is scored once per epoch; set trainer.val_check_interval otherwise")
    if taken := section.take("per_device_eval_batch_size"):
        conversion.keep(taken[0], "data.val_micro_batch_size", as_count(*taken))


def convert_data(conversion: Conversion, section: Section, ranks: int | None) -> None:
    """Convert the model, the rows and how they are read."""
    for key, path in (("data_seed", "data.seed"), ("dataloader_num_workers", "data.num_workers"),
                      ("max_seq_length", "data.max_seq_length"), ("max_length", "data.max_seq_length")):  # fmt: skip
        if taken := section.take(key):
            conversion.keep(taken[0], path, as_count(*taken, least=0))
    if taken := section.take("model_name_or_path"):
        conversion.keep(taken[0], "model.name", str(taken[1]))
    for key, path in (("train_file", "data.train"), ("validation_file", "data.val")):
        if (taken := section.take(key)) and taken[1] == []:
            conversion.drop(taken[0], "it is empty")
        elif taken:
            several = isinstance(taken[1], list)
            conversion.keep(taken[0], path, [str(one) for one in taken[1]] if several else str(taken[1]))
    if taken := section.take("average_tokens_across_devices"):
        lone = not as_bool(*taken) and ranks != 1
        why = "each rank's mean would count alike; here every token does" if lone else "so it is here"
        conversion.drop(taken[0], why, differs=lone)
    if taken := section.take("train_sampling_strategy"):
        words = {"random": True, "sequential": False}
        if (word := str(taken[1]).lower()) in words:
            conversion.keep(taken[0], "data.shuffle", words[word])
        else:
            as_choice(taken[0], word, ("random", "sequential", "group_by_length"))
            conversion.drop(taken[0], "samples are shuffled, not grouped by length", differs=True)
