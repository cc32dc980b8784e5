"""Runs whose recipe adds tokens: losses of the plain resized model; resumed, exported, with and without adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, PreTrainedTokenizerFast

from lit_fsdp.models.generate import Chat
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.dist.forks import command, on_ranks
from tests.dist.lora_jobs import FIRST, TOKENS, grown_losses
from tests.dist.matrix import worst_difference
from tests.dist.reference import TINY, save_tiny

LORA = {"r": 4, "alpha": 8, "target_modules": "all-linear"}
IDS = torch.tensor([[3, FIRST, 7, FIRST + 1, 2, 30]])


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny Llama with as many embeddings as its tokenizer has tokens, tied to its head and apart."""
    config = {**TINY.to_dict(), "vocab_size": FIRST}
    return {
        name: save_tiny(
            tmp_path_factory.mktemp(name) / "base", LlamaConfig(**{**config, "tie_word_embeddings": name == "tied"})
        )
        for name in ("tied", "apart")
    }


def _export(run: Path, out: str, *flags: str) -> Path:
    words = ["export", "--ckpt", "checkpoints/step-00000006", "--verify", "--out", out, *flags]
    (done,) = command(1, words, run)
    assert (done.code, done.err) == (0, "")
    return run / out


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize(("engine", "head"), [("fsdp2", "tied"), ("fsdp1", "apart")])
def test_losses_are_those_of_the_resized_model(bases: dict[str, Path], tmp_path: Path, engine: str, head: str) -> None:
    base = bases[head]
    job: dict[str, Any] = {"folder": base, "strategy": {"engine": engine, "precision": "fp32"}}
    (losses, *_) = on_ranks("train_grown", 2, run=tmp_path / "a", **job)
    assert worst_difference(losses, grown_losses(str(base), None)) < 1e-5
    last = str(tmp_path / "a" / "checkpoints" / "step-00000003")
    (rest, *_) = on_ranks("train_grown", 2, run=tmp_path / "b", ckpt_path=last, **job)
    assert rest == losses[3:]
    folder = _export(tmp_path / "a", "out")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer) == FIRST + 2
    assert tokenizer.convert_tokens_to_ids(TOKENS) == [FIRST, FIRST + 1]
    rows = model.get_output_embeddings().weight[FIRST:]
    assert not torch.equal(rows[0], rows[1])  # trained: both began as the mean
    assert torch.isfinite(_logits(model)).all()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft 0.21 on transformers 5.23
@pytest.mark.parametrize(("engine", "head"), [("fsdp2", "apart"), ("fsdp1", "tied")])
def test_adapters_with_new_tokens(
    bases: dict[str, Path], tmp_path: Path, engine: str, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = bases[head]
    job: dict[str, Any] = {"folder": base, "strategy": {"engine": engine, "precision": "fp32"}, "lora": LORA}
    (losses, *_) = on_ranks("train_grown", 2, run=tmp_path, **job)
    assert worst_difference(losses, grown_losses(str(base), LORA)) < 1e-5
    adapter, merged = _export(tmp_path, "adapter"), _export(tmp_path, "merged", "--merge")
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    plain = AutoModelForCausalLM.from_pretrained(base)  # as anybody has it, without a new row
    plain.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    of_adapter = _logits(peft.PeftModel.from_pretrained(plain, adapter))
    of_merged = _logits(AutoModelForCausalLM.from_pretrained(merged))
    torch.testing.assert_close(of_merged, of_adapter, rtol=1e-4, atol=1e-5)
    assert len(AutoTokenizer.from_pretrained(merged)) == len(tokenizer) == FIRST + 2
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # fp32 on every CPU
    assert Chat(str(adapter), None, 9).answer(TOKENS[0]) == Chat(str(merged), None, 9).answer(TOKENS[0])


def test_a_base_model_learns_to_chat(tmp_path: Path) -> None:
    """One that was never taught to: no template, no pad token, none of ChatML's marks."""
    parts = json.loads(miniature_tokenizer().backend_tokenizer.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] == "<|endoftext|>"]
    tokenizer: Any = Tokenizer.from_str(json.dumps(parts))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    save_tiny(tmp_path / "base", LlamaConfig(**{**TINY.to_dict(), "vocab_size": len(tokenizer)}))
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(tmp_path / "base")
    talk = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "you"}]}
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(talk)] * 8))
    words = [
        *("fit", "--model.name", "base", "--model.add_tokens", "['<|im_start|>','<|im_end|>']"),
        *("--data.train", "rows.jsonl", "--data.chat_template", "chatml", "--data.max_seq_length", "64"),
        *("--data.global_batch_size", "8", "--data.micro_batch_size", "8", "--model.optim.lr", "0.02"),
        *("--model.optim.schedule", "constant", "--trainer.max_steps", "20", "--checkpoint.every_steps", "20"),
        *("--trainer.devices", "1", "--trainer.accelerator", "cpu", "--trainer.default_root_dir", "run"),
        *("--trainer.strategy.init_args.engine", "single"),
    ]
    (done,) = command(1, words, tmp_path)
    assert done.code == 0, done.err
    for said in (
        "has no pad token: padding with <|endoftext|>",
        "model.add_tokens: new in base: <|im_start|> <|im_end|>",
    ):
        assert said in done.err
    words = ["export", "--ckpt", "run/checkpoints/step-00000020", "--verify", "--out", "chat"]
    (done,) = command(1, words, tmp_path)
    assert done.code == 0, done.err
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "chat")
    assert "<|im_start|>" in tokenizer.chat_template
    generation = GenerationConfig.from_pretrained(tmp_path / "chat")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in generation.eos_token_id
    assert generation.pad_token_id == tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids("<|endoftext|>")
    words = ["generate", "--model", "chat", "--prompt", "Hi", "--max_new_tokens", "12"]
    (done,) = command(1, words, tmp_path)
    assert (done.code, done.out) == (0, "you\n"), done.err
