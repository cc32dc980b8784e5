"""What is said of a run's memory before it, against figures that follow from shapes, and what would take less."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.audit import audit_recipe
from lit_fsdp.commands.planning import _recommended, run_plan
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.config.sections import leaves
from lit_fsdp.errors import ConfigError
from lit_fsdp.metrics.hardware import gpus
from lit_fsdp.plan.memory import expert_bytes, host_memory, rank_memory, sent_bytes, step_time, zero_table
from lit_fsdp.plan.search import choices, savings

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "llama3.1-8b_full_fsdp2_8x80gb.yaml"
OFFLOAD = "llama3.1-8b_full_fsdp2_1x80gb.yaml"
GIB = 2**30


def loaded(*words: str, recipe: str = RECIPE.name) -> Any:
    words = ("--config", str(RECIPE.with_name(recipe)), "--trainer.accelerator=gpu", *words)
    return load_recipe(words, "audit").run


def test_states_are_the_audits_and_block_inputs_follow_from_shapes():
    qlora, run = loaded(recipe="llama3.1-8b_qlora_fsdp2_1x24gb.yaml"), loaded()
    for one in (qlora, run):
        memory, state = rank_memory(one), audit_recipe(one)["state_per_rank"][0]
        assert memory.parameters == state["parameter_bytes"] + state.get("quantization_bytes", 0)
        assert (memory.gradients, memory.optimizer) == (state["gradient_bytes"], state["optimizer_bytes"])
        tokens = one.data.micro_batch_size * one.data.max_seq_length
        assert memory.step.kept == 32 * tokens * 4096 * 2  # bf16 inputs of 32 blocks that are recomputed
    alone = rank_memory(loaded(f"--data.global_batch_size={8 * run.data.micro_batch_size}"))  # nothing accumulates
    assert (alone.step.moment, alone.step.gradients) == ("forward", memory.gradients)  # of the step before
    assert memory.room(80) == pytest.approx(0.97 * 80 * GIB - 1.5 * GIB - memory.peak)
    offloaded = rank_memory(loaded("--trainer.strategy.init_args.cpu_offload=true"))
    arrives = 128256 * 4096 * 4 // 8  # the largest shard, before it is cast
    assert offloaded.peak == memory.peak - memory.parameters - memory.gradients - memory.optimizer + arrives
    # the loss needs the head in bf16, and what it was gathered in is still there; and the last norm, of the root
    assert memory.step.gathered == 2 * 128256 * 4096 * 2 + 4096 * 2
    tied = rank_memory(loaded(recipe="gemma3-4b_full_fsdp2_8x80gb.yaml"))  # whose last unit is a block, which stays
    assert tied.step.gathered < 2 * GIB


def time_of(run: Any) -> dict[str, float]:
    taken = step_time(run, next(gpu for gpu in gpus() if gpu.name == "h100-80gb"))
    assert taken is not None
    return taken


def test_recomputing_takes_time():
    mode = "--trainer.strategy.init_args.activation_checkpointing"
    full, none = (time_of(loaded(f"{mode}={word}"))["compute"] for word in ("full", "none"))
    assert 1.2 < full / none < 4 / 3  # not of the head


def test_ranks_that_share_rows_keep_a_part_of_their_positions():
    words = ("--data.micro_batch_size=1", "--data.max_seq_length=8192", "--data.global_batch_size=8")
    flag = "--trainer.strategy.init_args.context_parallel"
    runs = {degree: loaded(*words, f"{flag}={degree}") for degree in (1, 2, 4)}
    whole = rank_memory(runs[1])
    for degree, most in ((2, 0.55), (4, 0.3)):
        step = rank_memory(runs[degree]).step
        assert step.kept == whole.step.kept / degree
        assert step.kept + step.block <= most * (whole.step.kept + whole.step.block)  # which also exchanges
        logits = 4 * 1024 * 128_256  # of the head's chunk in fp32, which the ranks divide, too
        assert whole.step.loss - step.loss > logits * (degree - 1) / degree
        taken = time_of(runs[degree])
        # queries and what comes out of 32 heads, keys and values of 8; forward, backward and recomputed; 32 blocks
        sent = 3 * 32 * 8 * 8192 / 8 * 2 * (32 + 8) * 128 * 2 * (degree - 1) / degree
        assert taken["exchanges"] == pytest.approx(sent / 450e9)
    assert time_of(runs[1])["exchanges"] == 0
    gathers = time_of(loaded(*words, f"{flag}={{degree: 4, method: all_gather}}"))["exchanges"]
    assert gathers == pytest.approx(3 * 32 * 8 * 8192 / 8 * 2 * 8 * 128 * 2 * 3 / 450e9)


def test_tiles_leave_a_part_of_a_feed_forward_layer_at_work():
    words = ("--data.micro_batch_size=1", "--data.max_seq_length=8192")
    whole, tiled = (
        rank_memory(loaded(*words, f"--trainer.strategy.init_args.activation_checkpointing={given}")).step
        for given in ('{"mode": "full"}', '{"mode": "full", "tiles": 8}')
    )
    assert tiled.kept == whole.kept
    width = 8192 * 14336 * 2  # of one bf16 tensor inside of it
    assert width < whole.block - tiled.block < 4 * width


def test_gradients_that_are_held_back_are_whole_and_sent_once():
    words = ("--data.micro_batch_size=1", "--data.max_seq_length=64", "--data.global_batch_size=32")
    each, last = (loaded(*words, f"--trainer.strategy.init_args.sync_each_micro_batch={on}") for on in (True, False))
    held = 4 * 8_030_261_248  # in the dtype of the reductions
    assert rank_memory(last).peak - rank_memory(each).peak >= held - rank_memory(each).gradients
    # four forwards: of 4 x 2 gathers in bf16 and 4 reductions in fp32 three of these are left out
    left = (4 * 2 * 2 + 4) / (4 * (2 * 2 + 4))
    assert time_of(last)["communication"] == pytest.approx(time_of(each)["communication"] * left)


def test_the_host_holds_what_is_offloaded_in_blocks_of_powers_of_two_and_copies_of_saves():
    params, node = 8_030_261_248, 192e9
    # fp32 shards of 224 MiB take 256, of 2,004 MiB 2,048, and their gradients as much
    ours = {"state": 16 * params, "rounding": 2 * (96 * 32 + 2 * 44) * 2**20, "staged": 0, "processes": 4 * GIB}
    assert host_memory(loaded(recipe=OFFLOAD)) == {**ours, "total": sum(ours.values())}
    asked = host_memory(loaded("--checkpoint.async_save=true", recipe=OFFLOAD))
    assert sum(ours.values()) < 0.9 * node < node < asked["total"] == sum(ours.values()) + 12 * params
    of_two_nodes = ("--trainer.num_nodes=2", "--data.global_batch_size=64")
    strategy = "--trainer.strategy.init_args"
    for words, copies in (
        ((), 1.0),  # one node has all parts
        (of_two_nodes, 0.5),
        ((f"{strategy}.sharding=hybrid_shard", f"{strategy}.replicate_degree=4"), 1.0),
        ((f"{strategy}.state_dict=full", *of_two_nodes), 1.0),
        (("--checkpoint.async_save=false",), 0.0),
    ):
        found = host_memory(loaded(*words))
        assert (found["state"], found["rounding"], found["staged"]) == (0, 0, copies * 12 * params), words
    adapter = host_memory(loaded(recipe="llama3.1-8b_lora_fsdp2_1x80gb.yaml"))
    assert 0 < adapter["staged"] < 12 * params / 100  # of the frozen base nothing is saved


def test_ranks_on_cpus_need_their_peaks_in_host_memory(capsys: Any, monkeypatch: Any) -> None:
    words = ("--trainer.accelerator=cpu", "--trainer.devices=4", "--data.global_batch_size=32")
    run = loaded(*words)
    found = host_memory(run)
    assert found == {
        **{"state": 0, "rounding": 0, "staged": 0, "peaks": 4 * rank_memory(run).peak, "processes": 4 * GIB},
        "total": 4 * rank_memory(run).peak + 4 * GIB,
    }
    assert found["peaks"] > 16 * 8_030_261_248  # all shards together are a whole fp32 state
    enough = found["total"] / 0.9
    for size, code in ((enough * 0.999, 1), (enough * 1.001, 0)):
        monkeypatch.setattr("lit_fsdp.metrics.hardware.host_bytes", lambda size=size: size)
        assert run_plan(["--config", str(RECIPE), *words]) == code
        given = run_plan(["--config", str(RECIPE), *words, "--host-memory", str(enough * (0.99 + code / 50) / GIB)])
        assert given == 1 - code
    assert "does not fit" in capsys.readouterr().out
    capsys.readouterr()
    for gib, answers in ((found["total"] / GIB, {"yes", "no"}), (1.0, {"no"})):
        assert run_plan(["--config", str(RECIPE), *words, "--savings", "--host-memory", str(gib)]) == 0
        out = capsys.readouterr().out
        assert "does not fit: exceeds it by" in out
        assert {answer for answer in ("yes", "no") if re.search(rf"GiB +{answer} ", out)} == answers
    # a GPU's recipe that is planned without a GPU is not compared with this host
    monkeypatch.setattr("lit_fsdp.metrics.hardware.host_bytes", lambda: 1)
    assert run_plan(["--config", str(RECIPE), "--trainer.accelerator=auto", "--trainer.devices=8"]) == 0


def test_offloaded_activations_are_in_host_memory_and_priced_by_their_copies():
    mode = "--trainer.strategy.init_args.activation_checkpointing"
    full, offloaded, all_of_them, on_cpu = (
        loaded(f"{mode}={given}", *more)
        for given, more in (
            ('{"mode": "full"}', ()),
            ('{"mode": "full", "offload_activations": true}', ()),
            ('{"mode": "none", "offload_activations": true}', ()),
            ('{"mode": "full", "offload_activations": true}', ("--trainer.accelerator=cpu",)),
        )
    )
    kept = rank_memory(full).step.kept
    selective = rank_memory(loaded(f'{mode}={{"mode": "selective", "offload_activations": true}}')).step
    assert kept < selective.host < rank_memory(all_of_them).step.host
    assert rank_memory(offloaded).step.kept == rank_memory(all_of_them).step.kept == 0
    assert rank_memory(offloaded).step.host == kept  # inputs of blocks, of powers of two
    assert rank_memory(full).peak - kept * 1.1 < rank_memory(offloaded).peak < rank_memory(full).peak - kept * 0.9
    assert rank_memory(all_of_them).step.host > 5 * kept
    ranks = 8
    assert host_memory(offloaded)["activations"] == kept * ranks
    assert "activations" not in {**host_memory(full), **host_memory(on_cpu)}
    assert rank_memory(on_cpu).step.host == 0
    forwards = (offloaded.data.global_batch_size or 0) // (offloaded.data.micro_batch_size * ranks)
    before, after = time_of(full), time_of(offloaded)
    assert after["activations"] == pytest.approx(2 * forwards * kept / 64e9)  # at PCIe 5.0
    assert after["exposed"] == pytest.approx(before["exposed"] + after["activations"])


def test_offload_is_priced_by_what_it_copies():
    """Weights go down twice per micro-batch, gradients up once; the host adds and steps."""
    of_rows = {rows: time_of(loaded(f"--data.micro_batch_size={rows}", recipe=OFFLOAD)) for rows in (2, 32, 64)}
    weights = 4 * 8_030_261_248 / 64e9  # seconds of one copy at PCIe 5.0
    for rows, taken in of_rows.items():
        forwards = 64 // rows
        assert taken["copies"] == pytest.approx(weights * (2 * forwards + 1))
        waited = (forwards - 1) / 6e9 + (12 + 4 * (forwards - 1)) / 200e9
        assert taken["host"] == pytest.approx(4 * 8_030_261_248 * waited)
    assert of_rows[64]["exposed"] < 1 < 100 < of_rows[2]["host"]
    assert of_rows[64]["tokens_per_second"] > 1.1 * of_rows[32]["tokens_per_second"] > of_rows[2]["tokens_per_second"]


def test_adapters_are_choices_where_there_are_none():
    words = [choice.words for choice in choices(loaded(), ("none", "full"))]
    assert words.index("ddp") < words.index("ddp, LoRA") < words.index("ddp, QLoRA (nf4)")
    assert not any("LoRA" in text for text in (c.words for c in choices(loaded(), ("none",))) if "offload" in text)
    adapted = loaded(recipe="llama3.1-8b_lora_fsdp2_8x80gb.yaml")
    found = [choice.run.model.lora for choice in choices(adapted, ("none",))]
    assert adapted.model.lora is not None
    others = [lora for lora in found if lora != adapted.model.lora]
    assert others == [dataclasses.replace(adapted.model.lora, quantize="nf4")] * len(others)
    assert found[-1] != found[0] == adapted.model.lora  # the 4-bit base comes last
    quantized = loaded(recipe="llama3.1-8b_qlora_fsdp2_1x24gb.yaml")
    dora = loaded("--model.lora.use_dora=true", recipe="llama3.1-8b_lora_fsdp2_8x80gb.yaml")  # not on a 4-bit base
    for one in (quantized, dora):
        assert all(choice.run.model.lora == one.model.lora for choice in choices(one, ("none",)))


def test_ranks_that_divide_experts_gather_a_part_of_them_and_send_tokens():
    recipe, key = "qwen3-30b-a3b_lora_fsdp2_4x80gb.yaml", "--trainer.strategy.init_args.expert_parallel"
    runs = [loaded(f"{key}={degree}", recipe=recipe) for degree in (1, 2, 4)]
    layers, of_layer = 48, 128 * 3 * 2048 * 768 * 2  # bf16 weights of a layer's experts
    gathered = [rank_memory(run).step.gathered for run in runs]
    assert gathered[0] - gathered[1] >= of_layer / 2
    assert gathered[1] - gathered[2] >= of_layer / 4
    found, run = expert_bytes(runs[0]), runs[0]
    assert found is not None
    batches = run.data.global_batch_size // (run.data.micro_batch_size * run.data_ranks)
    assert found["degree"] == 4
    assert found["weights"] == batches * 2 * layers * of_layer * 3 / 4  # frozen: gathered twice, never reduced
    tokens, passes = run.data.global_batch_size / 4 * run.data.max_seq_length, 3  # blocks are recomputed
    of_state = passes * 2 * layers * tokens * 2048 * 2  # there and back, to each other rank with some of 8 experts
    without = {n: math.comb(128 - 128 // n, 8) / math.comb(128, 8) for n in (2, 4)}  # none of 8 on one of n ranks
    assert found["tokens"] == pytest.approx(of_state * 3 * (1 - without[4]))
    assert expert_bytes(runs[2]) == found
    over_two = expert_bytes(runs[1])  # nearly all tokens, and half of the experts, from one other rank
    expected = of_state * (1 - without[2]) + found["weights"] / 3
    assert over_two == {**found, "degree": 2, "tokens": pytest.approx(expected)}
    assert expert_bytes(loaded()) is None
    for engine in ("fsdp1", "ddp"):  # which have no such key
        assert expert_bytes(loaded(f"--trainer.strategy.init_args.engine={engine}", recipe=recipe)) is None
    divided, whole = (step_time(one, next(gpu for gpu in gpus() if gpu.name == "h100-80gb")) for one in runs[::-2])
    assert divided is not None
    assert whole is not None
    assert divided["communication"] < 0.1 * whole["communication"]
    assert divided["exchanges"] > 0
    assert any(
        choice.changes == {"trainer.strategy.init_args.expert_parallel": 4} for choice in choices(run, ("full",))
    )


def test_units_that_leave_the_embedding_in_the_root_are_predicted():
    """Its share of the two and three blocks that are simulated is larger than of the model, which is checked."""
    words = ["--trainer.strategy.init_args.wrap={classes: [LlamaDecoderLayer], embedding_and_head: false}"]
    found, usual = (rank_memory(loaded(*more, recipe="smollm2-135m_full_fsdp2_2xcpu.yaml")) for more in (words, ()))
    assert found.peak == pytest.approx(usual.peak, rel=0.05)


def test_the_table_of_zero():
    params = 8_030_261_248
    assert zero_table(loaded()) == {
        "DDP": 16 * params,
        "ZeRO-1": 8 * params + params,
        "ZeRO-2": 4 * params + params + params // 2,
        "ZeRO-3": 2 * params,
    }


def test_what_fits_is_recommended_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "best.yaml"
    assert run_plan(["--config", str(RECIPE), "--json", "--gpu", "h100-80gb", "--write", str(out)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fits"] is True
    assert record["memory"]["peak"] < 30 * GIB
    best = record["recommended"]
    assert best["peak"] + record["memory"]["overhead"] <= 80 * 0.97 * GIB
    wider = ["--config", str(out), "--data.micro_batch_size", str(2 * best["micro_batch_size"])]
    assert rank_memory(load_recipe([*wider, "--data.global_batch_size", "1024"], "audit").run).room(80) < 0
    written = load_recipe(["--config", str(out)], "fit")
    assert written.run.data.micro_batch_size == best["micro_batch_size"]
    found = dict(leaves(written.values))
    assert {key: found[key] for key in best["changes"]} == best["changes"]


def test_a_choice_that_is_not_faster_is_no_reason_to_change_a_recipe_that_fits():
    best: dict[str, Any] = {"choice": "single, LoRA", "changes": {"a": 1}, "micro_batch_size": 4, "host": 0}
    best["tokens_per_second"] = 101.0
    taken = {"tokens_per_second": 100.0}
    text = "recommended: the recipe; single, LoRA, micro-batch 4 has 1.01 × the recipe's tokens/s"
    assert _recommended(best, taken, True) == text
    for rate, may_stay in ((103.0, True), (101.0, False)):
        found = _recommended({**best, "tokens_per_second": rate}, taken, may_stay)
        assert found.startswith(f"recommended: single, LoRA, micro-batch 4, {rate:.0f} tokens/s")


def test_the_recipe_or_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = ROOT / "recipes" / "smollm2-135m_full_fsdp2_1x24gb.yaml"
    small = ["--config", str(recipe), "--data.global_batch_size", "8"]
    assert run_plan([*small, "--memory", "1"]) == 1
    out = capsys.readouterr().out
    assert "nothing fits into 1 GiB" in out
    assert "add --savings for options" in out
    assert re.search(
        r"micro-batch \d+ does not fit into 1 GiB \(97% of it usable\): exceeds it by \d.* GiB; .* fits: none", out
    )
    assert run_plan([*small, "--memory", "24"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"micro-batch 8 fits into 24 GiB .*; largest micro-batch that fits: \d+\n", out), out
    assert "add --search for all choices" in out
    assert "--savings" not in out
    assert run_plan([*small, "--memory", "3"]) == 1  # the recommended one would, with offload
    out = capsys.readouterr().out
    assert re.search(r"recommended: .*cpu_offload, micro-batch 4, \d+ GiB of host memory per node\n", out)
    assert re.search(r"\nsingle.* does not fit: it needs at least \d+\.\d GiB per GPU\n", out)
    written = tmp_path / "lighter.yaml"
    assert run_plan([*small, "--memory", "3", "--write", str(written)]) == 0
    capsys.readouterr()
    assert run_plan(["--config", str(written), "--memory", "3"]) == 0
    assert re.search(r"micro-batch 4 fits into 3 GiB", capsys.readouterr().out)
    assert run_plan([*small, "--memory", "3", "--host-memory", "2", "--write", str(tmp_path / "none.yaml")]) == 1
    assert not (tmp_path / "none.yaml").exists()
    out = capsys.readouterr().out
    assert re.search(r"\nfsdp2.*cpu_offload.* does not fit: it needs \d+ GiB of host memory per node\n", out)
    assert run_plan([*small, "--memory", "1", "--savings"]) == 0
    out = capsys.readouterr().out
    assert "; it does not fit into 1 GiB" in out
    assert re.search(r"less +then fits +what changes", out)
    with pytest.raises(ConfigError, match=r"fix:     write --memory GIB$"):
        run_plan([*small, "--gpu", "rtx3060"])  # the nearest name is a GPU of twice the size
    with pytest.raises(ConfigError, match="fix:     write --memory 24"):
        run_plan([*small, "--gpu", "24GB"])
    assert run_plan(["--config", str(RECIPE.with_name(OFFLOAD)), "--host-memory", "96"]) == 1  # the GPU is not known
    out = capsys.readouterr().out
    assert "this recipe on a host of 96 GiB (90% of it usable): does not fit: exceeds it by 43.4 GiB" in out
    assert "between steps (in host memory)" in out


def test_a_search_recommends_the_fastest_without_adapters(capsys: pytest.CaptureFixture[str]):
    small = ROOT / "recipes" / "smollm2-135m_full_fsdp2_1x24gb.yaml"
    words = ["--data.max_seq_length", "64", "--data.micro_batch_size", "1", "--data.global_batch_size", "1"]
    assert run_plan(["--config", str(small), *words, "--gpu", "rtx4090", "--search", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    rates = [one["tokens_per_second"] for one in record["tried"]]
    assert rates == sorted(rates, reverse=True)
    whole = [one for one in record["tried"] if "LoRA" not in one["choice"]]
    assert record["recommended"] == whole[0] != record["tried"][0]


SHORT = ("--data.max_seq_length=128", "--trainer.strategy.init_args.activation_checkpointing=none")
HYBRID = "--trainer.strategy.init_args.sharding=shard_grad_op"


def test_each_line_saves_what_it_says():
    words = (*SHORT, HYBRID, "--data.micro_batch_size=4", "--data.global_batch_size=64")
    run = loaded(*words, recipe="qwen3-0.6b_full_fsdp2_8x24gb.yaml")
    found = list(savings(run))
    strategy = ["activation_checkpointing full", "offload_activations", "sharding", "context_parallel", "cpu_offload"]
    kinds = ["micro_batch", "micro_batch", *strategy, "target_modules", "nf4"]
    assert len(found) == len(kinds)
    for kind, one in zip(kinds, found, strict=True):
        assert kind in one["flags"]
        assert one["num_bytes"] > 0
    for one in [found[0], found[3], found[6], found[-1]]:  # of different kinds; each takes seconds
        pasted = loaded(*words, *shlex.split(one["flags"]), recipe="qwen3-0.6b_full_fsdp2_8x24gb.yaml")
        assert rank_memory(run).peak - rank_memory(pasted).peak == one["num_bytes"], one["flags"]
        assert pasted.data.global_batch_size == 64
    assert found[0]["flags"] == "--data.micro_batch_size 2 --trainer.accumulate_grad_batches 4"
    assert found[0]["remark"] == "accumulates over 4 micro-batches; same global batch"
    assert found[1]["flags"] == "--data.micro_batch_size 1 --trainer.accumulate_grad_batches 8"


def test_savings_follow_the_recipe():
    """An accumulation that it names follows; what is on is not said again, and there is no offload on a CPU."""
    words = ("--data.micro_batch_size=2", "--data.global_batch_size=64", "--trainer.accumulate_grad_batches=4")
    flags = next(savings(loaded(*SHORT, *words)))["flags"]
    assert flags == "--data.micro_batch_size 1 --trainer.accumulate_grad_batches 8"
    loaded(*SHORT, *words, *flags.split())  # the two agree
    words = ("--data.max_seq_length=128", "--data.micro_batch_size=1")
    run = loaded(*words, recipe="llama3.1-8b_qlora_fsdp2_1x24gb.yaml")
    expected = [f"--trainer.strategy.init_args.{change}" for change in ("engine single", "cpu_offload true")]
    flags = [one["flags"] for one in savings(run)]
    assert "offload_activations" in flags[0]  # the recipe recomputes already
    assert flags[1] == expected[0]
    assert expected[1] in flags[2]
    on_cpu = dataclasses.replace(run, trainer={**run.trainer, "accelerator": "cpu"})
    assert [one["flags"] for one in savings(on_cpu)] == expected[:1]
    offloads = (f"--trainer.strategy.init_args.{word}" for word in ("engine=fsdp1", "cpu_offload=true"))
    flags = next(savings(loaded(*SHORT, *offloads, "--data.micro_batch_size=8")))["flags"]
    assert "micro_batch" not in flags  # that engine accumulates nothing there


def test_savings_that_need_a_package_name_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Instead of leaving the option out."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    small = ROOT / "recipes" / "smollm2-135m_full_fsdp2_1x24gb.yaml"
    words = ["--data.max_seq_length", "64", "--data.micro_batch_size", "1", "--data.global_batch_size", "1"]
    assert run_plan(["--config", str(small), *words, "--savings"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "--model.lora.quantize nf4" in line]
    assert line.split()[0] == "?"
    assert "pip install 'lit-fsdp[qlora]'" in line


def test_what_is_sent():
    """1,600 B in each gather, 3,200 B reduced; in nodes of 8 ranks."""
    for gathers, mesh, rank_bytes, node_bytes in (
        (2, (1, 16), 6400 * 15 / 16, 6400 * 15 / 16),
        (1, (1, 16), 4800 * 15 / 16, 4800 * 15 / 16),
        # one ring over everybody, which leaves each node once
        (0, (16, 1), 2 * 3200 * 15 / 16, 2 * 3200 * 15 / 16),
        # a copy per node: eight rings of two ranks, each with 400 B
        (2, (2, 8), 6400 * 7 / 8 + 2 * 400 / 2, 8 * 2 * 400 / 2),
        (1, (2, 8), 4800 * 7 / 8 + 2 * 400 / 2, 8 * 2 * 400 / 2),
        # two copies in each node: four rings of four ranks, each with 800 B
        (2, (4, 4), 6400 * 3 / 4 + 2 * 800 * 3 / 4, 4 * 2 * 800 * 3 / 4),
        (2, (1, 8), 6400 * 7 / 8, 0),
        (0, (1, 1), 0, 0),
    ):
        assert sent_bytes(gathers * 1600, 3200, mesh) == pytest.approx((rank_bytes, node_bytes))


def test_what_cannot_be_answered_is_refused_before_anything_is_simulated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lit_fsdp.plan.memory.rank_memory", None)
    for words, match in (
        ("--search", "--search, --write: got no GPU memory size"),
        ("--write best.yaml", "--search, --write: got no GPU memory size"),
        ("--gpu h100-80", "write h100-80gb"),
        ("--gpu h100", "h100-80gb(.|\\n)*write h100-80gb"),
        ("--gpu xyz", "h100-80gb(.|\\n)*write --memory GIB"),
        ("--savings --json", "--json: got with --savings"),
        ("--nodes 2", "add --gpus N"),
        ("--gpus 0", "--gpus: got 0\n  allowed: a number greater than 0"),
        ("--memory -5", "--memory: got -5"),
        ("--gpu h100-80gb --host-memory 0", "--host-memory: got 0"),
        ("--gpus 6 --data.micro_batch_size 8", "on 6 ranks(.|\n)*set global_batch_size: "),
        ("--gpus 16 --nodes 2 --gpus-per-node 4", "--gpus-per-node: got 4 on 2 node"),
        ("--gpus 12 --gpus-per-node 8", "--gpus-per-node: got 8 on 1 node"),
        ('--gpus 8 --trainer={"devices":4}', "--gpus: got 8 with --trainer.devices 4"),
        ("--gpus-per-node 8 --nodes 2 --trainer.num_nodes 4", "--nodes: got 2 with --trainer.num_nodes 4"),
    ):
        with pytest.raises(ConfigError, match=match):
            run_plan(["--config", str(RECIPE), *words.split()])
