"""What takes less memory: every line, pasted behind the command, saves what it says; nothing is said twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from lit_fsdp.plan.memory import rank_memory
from lit_fsdp.plan.savings import advice, is_out_of_memory, savings
from tests.unit.plan.test_memory import RECIPE, loaded

SHORT = ("--data.max_seq_length=128", "--trainer.strategy.init_args.activation_checkpointing=none")
HYBRID = "--trainer.strategy.init_args.sharding=shard_grad_op"


def test_each_line_saves_what_it_says():
    words = (*SHORT, HYBRID, "--data.micro_batch_size=4", "--data.global_batch_size=64")
    run = loaded(*words, recipe="qwen3-0.6b_full_fsdp2_8x24gb.yaml")
    found = list(savings(run))
    kinds = ["micro_batch", "activation_checkpointing", "sharding", "cpu_offload", "target_modules", "nf4"]
    assert len(found) == len(kinds)
    for kind, one in zip(kinds, found, strict=True):
        assert kind in one.flags
        assert one.num_bytes > 0
    for one in found[::2]:
        pasted = loaded(*words, *one.flags.split(), recipe="qwen3-0.6b_full_fsdp2_8x24gb.yaml")
        assert rank_memory(run).peak - rank_memory(pasted).peak == one.num_bytes, one.flags
        assert pasted.data.global_batch_size == 64
    assert (found[0].flags, found[0].remark) == (
        "--data.micro_batch_size 2",
        "accumulates over 4: the same global batch",
    )


def test_accumulation_that_the_recipe_names_follows():
    words = ("--data.micro_batch_size=2", "--data.global_batch_size=64", "--trainer.accumulate_grad_batches=4")
    run = loaded(*SHORT, *words)
    first = next(savings(run, names_accumulation=True))
    assert first.flags == "--data.micro_batch_size 1 --trainer.accumulate_grad_batches 8"
    loaded(*SHORT, *words, *first.flags.split())  # the two agree


def test_what_is_on_is_not_said_again():
    words = ("--data.max_seq_length=128", "--data.micro_batch_size=1")
    run = loaded(*words, recipe="llama3.1-8b_qlora_fsdp2_1x24gb.yaml")
    assert [one.flags.split()[-2] for one in savings(run)] == ["--trainer.strategy.init_args.cpu_offload"]
    on_a_cpu = dataclasses.replace(run, trainer={**run.trainer, "accelerator": "cpu"})
    assert not list(savings(on_a_cpu))


def test_no_advice_is_one_line():
    run = loaded()
    lines = [
        advice(dataclasses.replace(run, foreign=frozenset({"model"})), RECIPE, "gpu"),
        advice(run, Path("not/there.yaml"), "gpu"),
    ]
    assert lines[0] == "what would save memory is not computed for somebody else's model"
    assert lines[1].startswith("what would save memory was not computed: ")
    assert "\n" not in lines[1]


def test_what_counts_as_out_of_memory():
    yes = (torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("CUDA error: out of memory"))
    assert all(map(is_out_of_memory, yes))
    assert not any(map(is_out_of_memory, (RuntimeError("made to fail"), KeyboardInterrupt(), OSError("disk"))))
