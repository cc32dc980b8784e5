"""What is said of a run's memory and time before it, against figures that follow from shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fsdp.audit import audit_recipe
from lit_fsdp.commands.planning import run_plan
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.errors import ConfigError
from lit_fsdp.metrics.hardware import gpus
from lit_fsdp.plan.memory import rank_memory, step_time, zero_table
from lit_fsdp.plan.search import choices

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "llama3.1-8b_full_fsdp2_8x80gb.yaml"
GIB = 2**30


def loaded(*words: str, recipe: str = RECIPE.name) -> Any:
    words = ("--config", str(RECIPE.with_name(recipe)), "--trainer.accelerator=gpu", *words)
    return load_recipe(words, "audit").run


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = run_plan(["--config", str(RECIPE), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_states_are_the_audits_and_block_inputs_follow_from_shapes():
    run = loaded()
    memory, state = rank_memory(run), audit_recipe(run)["state_per_rank"][0]
    assert memory.parameters == state["parameter_bytes"]
    assert memory.optimizer == state["optimizer_bytes"] == 2 * memory.parameters
    tokens = run.data.micro_batch_size * run.data.max_seq_length
    assert memory.step.kept == 32 * tokens * 4096 * 2  # bf16 inputs of 32 blocks that are recomputed
    # the loss needs the head in bf16, and what it was gathered in is still there; and the last norm, of the root
    assert memory.step.gathered == 2 * 128256 * 4096 * 2 + 4096 * 2


def test_a_base_in_four_bits():
    run = loaded(recipe="llama3.1-8b_qlora_fsdp2_1x24gb.yaml")
    memory, state = rank_memory(run), audit_recipe(run)["state_per_rank"][0]
    assert memory.parameters == state["parameter_bytes"] + state["quantization_bytes"]
    assert (memory.gradients, memory.optimizer) == (state["gradient_bytes"], state["optimizer_bytes"])
    tokens = run.data.micro_batch_size * run.data.max_seq_length
    assert memory.step.kept == 32 * tokens * 4096 * 2
    assert memory.step.gathered == 128256 * 4096 * 2 + 4096 * 2


def test_a_pair_is_two_rows():
    pairs = loaded(recipe="smollm2-135m_dpo_fsdp2_2xcpu.yaml")
    rows = 2 * pairs.data.micro_batch_size
    words = (f"--data.micro_batch_size={rows}", f"--data.max_seq_length={pairs.data.max_seq_length}")
    single = loaded(*words, recipe="smollm2-135m_full_fsdp2_2xcpu.yaml")
    assert rank_memory(pairs) == rank_memory(single)


def test_experts_in_fp32_and_what_gloo_copies():
    words = ("--trainer.strategy.init_args.precision=fp32", "--data.max_seq_length=64", "--data.micro_batch_size=1")
    full = ("--trainer.strategy.init_args.activation_checkpointing=full", "--data.global_batch_size=16")
    memory = rank_memory(loaded(*words, *full, recipe="mixtral-8x7b_full_fsdp2_16x80gb.yaml"))
    assert (memory.step.moment, memory.step.kept) == ("blocks", 64 * 4096 * 4)  # the fp32 input of the last one to go
    small = "smollm2-135m_full_fsdp2_2xcpu.yaml"
    on_gpu, on_cpu = (
        rank_memory(loaded(*words, f"--trainer.accelerator={kind}", recipe=small)) for kind in ("gpu", "cpu")
    )
    assert on_cpu.peak > on_gpu.peak
    assert on_cpu.parameters == on_gpu.parameters


def test_adapters_are_choices_where_there_are_none():
    words = [choice.words for choice in choices(loaded())]
    assert words.index("ddp") < words.index("ddp, LoRA") < words.index("ddp, QLoRA (nf4)")
    assert not any("LoRA" in text for text in (c.words for c in choices(loaded(), ("none",))) if "offload" in text)
    adapted = loaded(recipe="llama3.1-8b_lora_fsdp2_8x80gb.yaml")
    assert all(choice.run.model.lora == adapted.model.lora for choice in choices(adapted))


def test_more_is_kept_without_recomputation_and_less_with_fewer_tokens():
    full, none = (
        rank_memory(loaded(f"--trainer.strategy.init_args.activation_checkpointing={m}")) for m in ("full", "none")
    )
    half = rank_memory(loaded("--data.max_seq_length=2048"))
    assert none.step.kept > 10 * full.step.kept
    assert half.step.kept * 2 == full.step.kept


def test_the_table_of_zero():
    run = loaded()
    found, params = zero_table(run), 8_030_261_248
    assert found == {
        "DDP": 16 * params,
        "ZeRO-1": 8 * params + params,
        "ZeRO-2": 4 * params + params + params // 2,
        "ZeRO-3": 2 * params,
    }


def test_time_is_operations_over_the_peak_and_bytes_over_the_link():
    run = loaded("--trainer.strategy.init_args.activation_checkpointing=none")
    (h100,) = (gpu for gpu in gpus() if gpu.name == "h100-80gb")
    slow, fast = step_time(run, h100, share=0.2), step_time(run, h100, share=0.4)
    assert slow.compute == pytest.approx(2 * fast.compute)
    tokens = run.data.global_batch_size * run.data.max_seq_length
    assert fast.tokens == tokens
    assert fast.compute > 6 * 7e9 * tokens / 8 / (989.4e12 * 0.4)  # and attention beside the weights


def test_what_fits_is_recommended_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "best.yaml"
    code, record = said(capsys, "--gpu", "h100-80gb", "--write", str(out))
    assert (code, record["fits"]) == (0, True)
    assert record["memory"]["peak"] < 30 * GIB
    best = record["recommended"]
    assert best["peak"] + record["memory"]["overhead"] <= 80 * 0.97 * GIB
    written = load_recipe(["--config", str(out)], "fit").run
    assert written.data.micro_batch_size == best["micro_batch_size"]
    for key, value in best["changes"].items():
        found: Any = yaml.safe_load(out.read_text())
        for part in key.split("."):
            found = found[part]
        assert found == value, key


def test_nothing_fits(capsys: pytest.CaptureFixture[str]):
    small = ROOT / "recipes" / "smollm2-135m_full_fsdp2_1x24gb.yaml"
    code = run_plan(["--config", str(small), "--memory", "1"])
    out = capsys.readouterr().out
    assert code == 1
    assert "nothing fits into 1 GiB" in out
    assert "GiB too much" in out


def test_a_gpu_that_does_not_exist():
    with pytest.raises(ConfigError, match="write h100-80gb"):
        run_plan(["--config", str(RECIPE), "--gpu", "h100-80"])
