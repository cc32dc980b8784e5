"""Generate answers with plain transformers."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)
from transformers.utils.quantization_config import Mxfp4Config

from lit_fsdp.errors import require
from lit_fsdp.host import cpu_has_bf16
from lit_fsdp.models.adapter_names import CONFIG_FILE, WEIGHTS_FILE, read_adapter_config
from lit_fsdp.models.base import base_of_folder, find_base
from lit_fsdp.models.build import build_on_meta, vocabulary_modules, vocabulary_tensors
from lit_fsdp.models.experts import choose_eager, fused_experts
from lit_fsdp.models.hub import reading
from lit_fsdp.models.lora import load_adapter_folder
from lit_fsdp.models.preference import evaluating
from lit_fsdp.models.quantize import as_loaded, linear_layers, rounded, whole_layers
from lit_fsdp.models.tokenizers import end_of_turn_id, pad_id, read_tokenizer
from lit_fsdp.models.weights import headers_of

_BY_ITSELF = ("cpmant", "deepseek_v4", "minimax", "recurrent_gemma", "roformer", "trocr", "xlm")
"""Model types that answer a prompt otherwise if it is padded on the left (transformers 5.24), in spite of its mask.

DeepSeek V4 compresses blocks that begin at the padding, MiniMax takes the length of its cache from a layer without one,
RecurrentGemma does not mask its convolution, CPM-Ant ignores the mask, and the others have absolute positions.
"""


class Chat:
    """A conversation with the model in ``folder``, through its chat template.

    Runs in bf16 on CUDA and on CPUs with bf16 instructions, else in fp32. A base that was quantized for training is
    quantized again. The default ``base`` of an adapter is the one that its folder names.

    Args:
        folder: A model folder, or the folder of an adapter.
        system: System message.
        max_new_tokens: Maximum length of an answer.
        base: Location of an adapter's base.
        sampling: ``temperature`` and ``top_p``; without them, the likeliest token is chosen each time.
        trust_remote_code: Run Python code of the model or base.
        raw: Continue each prompt as plain text, without chat template and earlier messages, as for a model trained on
            prompts and completions in plain text.

    Raises:
        ConfigError: The folder has no model or adapter, or the base cannot be found or is a different model.
    """

    def __init__(
        self,
        folder: str,
        system: str | None = None,
        max_new_tokens: int = 256,
        base: str | None = None,
        sampling: dict[str, float] | None = None,
        trust_remote_code: bool = False,
        raw: bool = False,
    ) -> None:
        self.model, self.tokenizer = _loaded(folder, base, trust_remote_code)
        self.max_new_tokens = max_new_tokens
        self.sampling, self.raw = sampling, raw
        self.conversation = [{"role": "system", "content": system}] if system else []

    def answer(self, prompt: str, streams: bool = False) -> str:
        """Return the answer to the next message; with ``streams`` it is also printed during generation.

        Raises:
            ConfigError: The tokenizer has no chat template, and the prompt is not ``raw``.
        """
        talk: list[Any] = [prompt] if self.raw else [[*self.conversation, {"role": "user", "content": prompt}]]
        options = {"skip_special_tokens": True}
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, **options) if streams else None
        (text,) = answer_batch(self.model, self.tokenizer, talk, self.max_new_tokens, streamer, self.sampling)
        self.conversation = [] if self.raw else [*talk[0], {"role": "assistant", "content": text}]
        return text


def _loaded(folder: str, base: str | None, trust_remote_code: bool) -> tuple[Any, PreTrainedTokenizerBase]:
    place = Path(folder).expanduser()
    is_adapter = (place / CONFIG_FILE).is_file()
    is_known = is_adapter or ((place / "config.json").is_file() and base is None)
    allowed = f"a model folder with config.json, or an adapter's with {CONFIG_FILE}"
    fix = "name a folder written by export; --base is for adapters"
    is_run = any((one / "checkpoints").is_dir() for one in (place, place.parent))
    if is_run or (place / "manifest.json").is_file():
        fix = f"run lit-fsdp export --ckpt {quote(folder)} --out NEW, then lit-fsdp generate --model NEW"
    require(is_known, "--model", folder, allowed, fix)
    tokenizer = read_tokenizer(folder, trust_remote_code)
    dtype = torch.bfloat16 if torch.cuda.is_available() or cpu_has_bf16() else torch.float32
    weights: Any = place
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "trust_remote_code": trust_remote_code}
    if is_adapter:
        saved = base_of_folder(place)
        source = find_base(saved, place, base, trust_remote_code)
        weights = source.weights_folder
        options |= {"config": source.hf_config} if saved.get("config_overrides") else {}
        given = f"{base or saved['name']}, whose weights were initialized randomly"
        fix = "write lit-fsdp export --merge, and name that folder"
        require(weights, "--base", given, "a model with weights in files", fix)
        packed = PretrainedConfig.get_config_dict(weights)[0].get("quantization_config") or {}
        is_mxfp4 = packed.get("quant_method") == "mxfp4"
        if is_mxfp4:  # transformers quantizes nothing else beside it
            source.hf_config.quantization_config = packed
            options |= {"config": source.hf_config, "quantization_config": Mxfp4Config(dequantize=True)}
        elif saved.get("quantize"):
            trained = read_adapter_config(place).get("modules_to_save") or []
            plain = build_on_meta(source.hf_config, trust_remote_code=trust_remote_code)
            keep = [*trained, *vocabulary_modules(plain), *whole_layers(plain)]
            options["quantization_config"] = as_loaded(dtype, saved["double_quantization"], keep)
    fix = "export the model again; if it has its own Python code, read it, and add --trust_remote_code to run it"
    with reading(place, "--model", fix):
        model: Any = AutoModelForCausalLM.from_pretrained(weights, **options)
    choose_eager(model)
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):  # a kernel that fails for widths that are no multiple of 32
            layer.support_avx512bf16_for_cpu = False
    if is_adapter:
        if saved.get("quantize"):
            _round(model, saved["double_quantization"], with_linears=is_mxfp4)
        brought, names = headers_of([place / WEIGHTS_FILE]), tuple(vocabulary_tensors(model))
        rows = max((one.shape[0] for one in brought.values() if one.name.endswith(names)), default=0)
        if rows > model.get_input_embeddings().num_embeddings:  # rows of added tokens
            model.resize_token_embeddings(rows, mean_resizing=False)
        model = load_adapter_folder(model, place)
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


@torch.no_grad()
def _round(model: Any, double_quantization: bool, with_linears: bool) -> None:
    """Round what training quantizes and transformers does not, in place: experts and, on request, linear layers."""
    linears = [layer.weight for layer in linear_layers(model).values()] if with_linears else []
    for weight in [*linears, *fused_experts(model).values()]:
        weight.copy_(rounded(weight, double_quantization))


def answer_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[dict[str, str]] | str],
    max_new_tokens: int,
    streamer: TextStreamer | None = None,
    sampling: dict[str, float] | None = None,
) -> list[str]:
    """The assistant's next turn for each conversation, or what follows a plain text, stripped."""
    encoded = [_prompt_ids(tokenizer, one) for one in conversations]
    found = generate_ids(model, tokenizer, encoded, max_new_tokens, model.device, streamer=streamer, sampling=sampling)
    return [str(tokenizer.decode(row, skip_special_tokens=True)).strip() for row in found]


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: list[dict[str, str]] | str) -> list[int]:
    """Token ids of a conversation with its generation prompt; of plain text after BOS if the tokenizer adds it."""
    if not isinstance(prompt, str):
        try:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        except ValueError:
            fix = "add --raw" if prompt[0]["role"] != "system" else "add --raw, and drop --system"
            given = "no chat template (typical of a base model)"
            allowed = "a tokenizer with one, or --raw for plain text"
            require(tokenizer.chat_template, "--model", given, allowed, fix)
            raise
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    bare, whole = tokenizer(prompt, add_special_tokens=False)["input_ids"], tokenizer(prompt)["input_ids"]
    first = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return [*whole[:first], *bare]  # without EOS


@torch.no_grad()
def generate_ids(
    model: Any,  # the mixin with generate() is added to each model class, unseen by type checkers
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    device: torch.device,
    in_step: bool = False,
    streamer: TextStreamer | None = None,
    sampling: dict[str, float] | None = None,
) -> list[list[int]]:
    """Generate an answer to each prompt (at least one) as token ids with the end token, in one batch if possible.

    Answers are greedy, or drawn with the ``temperature`` and ``top_p`` of ``sampling`` by torch's random generator.

    Generation stops at the end tokens of the model's generation config (Llama 3 has one for a turn, another for a
    text), the tokenizer's end of text and the template's end of a turn. The generation config and the model's mode are
    restored. ``in_step``: all ranks call it and continue until the last answer ends, because they gather shards.
    """
    if len(prompts) > 1 and model.config.get_text_config().model_type in _BY_ITSELF:
        answers = (
            generate_ids(model, tokenizer, [one], max_new_tokens, device, in_step, sampling=sampling) for one in prompts
        )
        return [answer for (answer,) in answers]
    num_ids = model.config.get_text_config().vocab_size
    highest, allowed = max(map(max, prompts)), f"token ids 0 to {num_ids - 1}, which have embeddings in the model"
    require(highest < num_ids, "prompt", f"{tokenizer.convert_ids_to_tokens(highest)!r} ({highest})", allowed)
    longest, pad = max(map(len, prompts)), pad_id(tokenizer, num_ids)
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    own = model.generation_config
    given = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    stops = {stop for stop in (tokenizer.eos_token_id, end_of_turn_id(tokenizer), *given) if stop is not None}
    marks: Any = {"eos_token_id": sorted(stops), "pad_token_id": pad}
    drawn: Any = {"do_sample": True, "top_k": 0, **sampling} if sampling else {"do_sample": False}
    settings = GenerationConfig(max_new_tokens=max_new_tokens, use_cache=True, **drawn, **marks)
    model.generation_config = GenerationConfig()  # its values replace any None in the settings
    try:
        with evaluating(model):
            options: dict[str, Any] = {"synced_gpus": in_step, "streamer": streamer}
            out = model.generate(ids, attention_mask=mask, generation_config=settings, **options)
    finally:
        model.generation_config = own
    rows = out[:, longest:].tolist()
    ends = [next((i + 1 for i, token in enumerate(row) if token in stops), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]
