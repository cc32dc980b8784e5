"""Answers from a model, in plain transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_fsdp.errors import ConfigError
from lit_fsdp.host import cpu_has_bf16
from lit_fsdp.models.quiet import no_progress_bars
from lit_fsdp.models.tokenizers import pad_id, read_tokenizer


def chat(
    folder: str,
    prompt: str | None,
    system: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """The answer of the model in ``folder`` to one prompt, through its chat template.

    Args:
        folder: A Hugging Face model folder, such as one that was exported.
        prompt: What the user says; None reads standard input to its end.
        system: System message, if any.
        max_new_tokens: Longest answer in tokens.
        temperature: 0 takes the most likely token each time; higher is more varied.
        seed: Of sampling, with a temperature above 0.

    Raises:
        ConfigError: The folder is no model folder, or there is no prompt.
    """
    if not (Path(folder).expanduser() / "config.json").is_file():
        raise ConfigError("--model", folder, "a model folder with config.json", "name a folder that export has written")
    if prompt is None:
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise ConfigError("--prompt", repr(prompt), "some text", "give --prompt TEXT, or text on standard input")
    tokenizer = read_tokenizer(folder, trust_remote_code=False)
    device, dtype = inference_device_and_dtype()
    with no_progress_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    conversation = [{"role": "system", "content": system}] if system else []
    conversation.append({"role": "user", "content": prompt})
    torch.manual_seed(seed)
    return answer_batch(model.to(device), tokenizer, [conversation], max_new_tokens, temperature)[0]


@torch.no_grad()
def answer_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: list[list[dict[str, str]]],
    max_new_tokens: int,
    temperature: float = 0.0,
) -> list[str]:
    """The assistant's next turn for each conversation, stripped, generated in one batch padded on the left.

    Of the model's own generation config only the end marks are used; it and the model's mode are put back.

    Args:
        model: Unsharded, on any device.
        tokenizer: Its side of padding is not changed for good.
        conversations: Lists of ``role`` and ``content``; the last is normally the user's.
        max_new_tokens: Longest answer in tokens.
        temperature: 0 takes the most likely token each time.
    """
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in conversations]
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    longest = max(map(len, encoded))
    pad = pad_id(tokenizer)
    ids = torch.tensor([[pad] * (longest - len(e)) + e for e in encoded], device=model.device)
    mask = torch.tensor([[0] * (longest - len(e)) + [1] * len(e) for e in encoded], device=model.device)
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature if temperature > 0 else None,
        eos_token_id=_stops(model, tokenizer),
        pad_token_id=pad,
        use_cache=True,
    )
    generating: Any = model  # the mixin with generate() is added to each model class, unseen by type checkers
    training, own = model.training, model.generation_config
    model.eval()
    generating.generation_config = GenerationConfig()  # which fills whatever is None in the settings
    try:
        out = generating.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    finally:
        generating.generation_config = own
        model.train(training)
    return [str(tokenizer.decode(row, skip_special_tokens=True)).strip() for row in out[:, longest:]]


def _stops(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """End marks of the tokenizer and of the model (Llama 3 ends a turn with one, a text with another)."""
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    stops = [tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])]
    return sorted({stop for stop in stops if stop is not None})


def inference_device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """Where and how answers come fastest: bf16 on CUDA and on CPUs with bf16 instructions, else fp32.

    On a CPU without them bf16 is emulated; with AVX512-BF16 a 135M model answered about twice as fast as in fp32.
    """
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    return torch.device("cpu"), torch.bfloat16 if cpu_has_bf16() else torch.float32
