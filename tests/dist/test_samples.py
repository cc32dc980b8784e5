"""Answers of the live, sharded model are those of the exported one, and asking for them changes no training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_fsdp.checkpoint.export import export
from tests.dist.forks import on_ranks
from tests.runs import MORE, records

NEW = 6
ASKED = {"prompts": 5, "max_new_tokens": NEW}


@pytest.mark.parametrize(
    "strategy",
    [{"engine": "fsdp2"}, pytest.param({"engine": "fsdp1", "activation_checkpointing": "full"}, marks=MORE)],
)
def test_they_are_the_exported_models_and_change_nothing_also_after_a_resume(
    dropout_model: Path, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    job: dict[str, Any] = {"folder": str(dropout_model), "strategy": strategy}
    plain = on_ranks("sampled_run", 2, run=str(tmp_path / "plain"), **job)
    job |= {"run": str(tmp_path / "asked"), "samples": ASKED, "num_sanity_val_steps": 1}
    asked = on_ranks("sampled_run", 2, **job)
    for without, found in zip(plain, asked, strict=True):
        assert (found["losses"], found["digest"]) == (without["losses"], without["digest"])
        assert {"val_exact_match", "val_answer_token_accuracy"} == found["metrics"].keys() - without["metrics"].keys()

    rows = records(tmp_path / "asked" / "samples.csv")
    assert [row["step"] for row in rows] == ["2"] * 5 + ["4"] * 5
    export(tmp_path / "asked" / "checkpoints" / "step-00000004", tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    correct = total = exact = 0
    for row in rows[5:]:
        # the table leaves the marks out; the conversation is what stood between them
        lines = row["prompt"].split("\n")
        turns = [(role, text) for role, text in zip(lines[::2], lines[1::2], strict=False)]
        messages = [{"role": role, "content": text} for role, text in turns]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        answer = model.generate(ids, do_sample=False, max_new_tokens=NEW)[0, ids.shape[1] :]
        assert row["generated"] == tokenizer.decode(answer, skip_special_tokens=True).strip()
        wanted = tokenizer(f"{row['expected']}<|im_end|>", add_special_tokens=False)["input_ids"]
        correct += sum(a == b for a, b in zip(wanted, answer.tolist(), strict=False))
        total, exact = total + len(wanted), exact + (row["generated"] == row["expected"])
    metrics = asked[0]["metrics"]
    assert metrics["val_answer_token_accuracy"] == pytest.approx(correct / total)
    assert metrics["val_exact_match"] == pytest.approx(exact / 5)

    shutil.rmtree(tmp_path / "asked/checkpoints/step-00000004")
    again = on_ranks("sampled_run", 2, ckpt_path=str(tmp_path / "asked/checkpoints/step-00000002"), **job)
    assert again[0]["losses"] == asked[0]["losses"][2:]
    assert records(tmp_path / "asked" / "samples.csv") == rows  # each step once


def test_prompts_of_a_file_at_the_end_of_training(dropout_model: Path, tmp_path: Path) -> None:
    """Fewer prompts than ranks, without a wanted answer: no metric, and nothing before the end."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tmp_path / "asked.jsonl").write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    samples = {"prompts": str(tmp_path / "asked.jsonl"), "every_validation": False, "max_new_tokens": NEW}
    job = {"folder": str(dropout_model), "strategy": {"engine": "fsdp2", "precision": "mixed"}, "samples": samples}
    found = on_ranks("sampled_run", 2, run=str(tmp_path / "run"), steps=3, has_loggers=True, **job)
    assert not any("match" in name for name in found[0]["metrics"])
    (row,) = records(tmp_path / "run" / "samples.csv")
    assert (row["step"], row["expected"], row["prompt"]) == ("3", "", "user\nHello\nassistant")
    table = [3, "user\nHello\nassistant", "", row["generated"]]
    assert found[0]["tables"] == [["samples", 3, ["step", "prompt", "expected", "generated"], [table]]]
    assert found[1]["tables"] == []
    events = reader.EventAccumulator(str(tmp_path / "run/tb/0"))
    events.Reload()
    (event,) = events.Tensors("samples/text_summary")
    assert event.step == 3
    assert b"| 3 | user<br>Hello<br>assistant |  | " in event.tensor_proto.string_val[0]
