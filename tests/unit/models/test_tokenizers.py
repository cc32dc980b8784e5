"""The generated tokenizer, the model's own, tokens that a recipe adds, and what a checkpoint keeps of them."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from lit_fsdp import CausalLMDataModule, CausalLMModule
from lit_fsdp.config.model import ModelConfig
from lit_fsdp.errors import ConfigError, DataError
from lit_fsdp.models.export_files import model_files
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.tokenizers import load_tokenizer, miniature_tokenizer, pad_id
from lit_fsdp.models.weights import ModelSource
from tests.unit.models.conftest import fill, opened


def _source(tiny, folder, **changes):
    return ModelSource(tiny("llama", **{"vocab_size": 512, **changes}), None, str(folder) if folder else None)


def test_every_text_comes_back_before_and_after_saving(tmp_path, tiny):
    tokenizer = miniature_tokenizer()
    text = "".join(map(chr, range(256))) + " the king's é 漢字 🙂\n\n  end"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) <= 512
    for family in ("llama", "mistral"):  # mistral-common may be there without its dependencies
        tokenizer.save_pretrained(tmp_path)
        tiny(family).save_pretrained(tmp_path)
        loaded = load_tokenizer(_source(tiny, tmp_path), ModelConfig(name="x"))
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert (loaded.chat_template, loaded.pad_token) == (tokenizer.chat_template, "<|pad|>")


def test_tokenizers_that_cannot_be_used(tmp_path, tiny):
    miniature_tokenizer().save_pretrained(tmp_path / "whole")
    without = miniature_tokenizer()
    without.pad_token = without.eos_token = None
    without.save_pretrained(tmp_path / "endless")
    tiny("llama").save_pretrained(tmp_path / "none")
    for folder, rows, said in (
        ("whole", 100, "at most the 100 embeddings of the model"),
        ("endless", 512, "a tokenizer with an eos or pad token"),
        ("none", 512, r"model\.tokenizer"),
        (None, 512, r"model\.tokenizer: got None"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_tokenizer(_source(tiny, folder and tmp_path / folder, vocab_size=rows), ModelConfig(name="x"))


def _described(data):
    data.prepare(["train"])
    return data.describe()


def test_a_token_without_an_embedding_refuses_the_rows_that_hold_it(saved, tmp_path, caplog):
    """As Gemma 3's and CodeLlama's: not the model, whatever the row format; no batch is padded with it."""
    folder = saved("llama", config={"vocab_size": TIGHT - 1})
    miniature_tokenizer().save_pretrained(folder)
    module = CausalLMModule(name=str(folder))
    pad, good = miniature_tokenizer().pad_token_id, {"prompt": "a", "completion": "b"}
    assert (pad, module.tokenizer.pad_token_id, pad_id(module.tokenizer, module.num_embeddings)) == (pad, pad, pad - 1)
    assert caplog.text.count("without an embedding in the model; rows that contain them are rejected: <|pad|>\n") == 1
    owner = SimpleNamespace(tokenizer=module.tokenizer, num_embeddings=module.num_embeddings)
    trainer = SimpleNamespace(world_size=1, global_rank=0, global_step=0, lightning_module=owner)
    trainer.strategy = SimpleNamespace(root_device=torch.device("cpu"))
    options = {"cache_dir": str(tmp_path / "cache"), "micro_batch_size": 2, "global_batch_size": 2}
    for number, bad in enumerate(
        [
            {"text": "a<|pad|>"},
            {"input_ids": [1, pad]},
            {"prompt": "<|pad|>", "chosen": "a", "rejected": "b"},
            {"messages": [{"role": "user", "content": "<|pad|>"}, {"role": "assistant", "content": "b"}]},
            {"prompt": "a", "completion": "<|pad|>"},
        ]
    ):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps(bad))
        for more in ({}, {"streaming": True}):
            data = CausalLMDataModule(train=str(file), **options, **more)
            data.trainer = trainer
            said = rf"^\S+{number}\.jsonl:1: token .*{pad}"
            with pytest.raises(DataError, match=said):
                _described(data)
            with pytest.raises(DataError, match=said):
                data.prompts(str(file))
    file.write_text("\n".join(map(json.dumps, (good, bad, {**good, "prompt": "longer"}))))
    data = CausalLMDataModule(train=str(file), **options, on_bad_row="drop", shuffle=False)
    data.trainer = trainer
    assert data.prepare(["train"])["train"].rows.meta["dropped"] == {"refused": 1}
    assert next(iter(data.train_dataloader()))["input_ids"][0, -1] == pad - 1


def test_generation_stops_where_the_template_ends_a_turn(tiny):
    source, model = ModelSource(tiny("llama", vocab_size=400), None, None), torch.nn.Module()
    tokenizer = miniature_tokenizer()
    for given, kept in ((314, [314, 316]), ([314, 316], [314, 316]), (None, 316), (316, 316), (314, 314)):
        if kept == 314:
            tokenizer.chat_template = "{{ raise_exception('no') }}"
        model.generation_config = GenerationConfig(eos_token_id=given)
        files = model_files(source, tokenizer, model)
        assert json.loads(files["hf/config.json"])["pad_token_id"] == 5  # the model's own: another would freeze a row
        assert json.loads(files["hf/generation_config.json"])["eos_token_id"] == kept


BARE = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}
# generation_config.json, what else config.json holds, and what training makes of both
AS_PUBLISHED = (
    (BARE, {}, {**BARE, "pad_token_id": 317, "eos_token_id": 316}),
    (
        {"num_beams": 1, "length_penalty": 2.0, "max_new_tokens": -1, "own": {"a": [1]}, "eos_token_id": [0]},
        {"temperature": 0.1},
        {"num_beams": 1, "length_penalty": 2.0, "max_new_tokens": -1, "own": {"a": [1]}, "eos_token_id": [0, 316]},
    ),
    (None, {"temperature": 0.7, "num_return_sequences": 3, "own": 1}, {"temperature": 0.7, "num_return_sequences": 3}),
    ([1], {}, "generation_config.json with list"),
    (b"{", {}, "generation_config.json (JSONDecodeError"),
)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_generation_configs_stay_as_published(saved, form):
    """Whatever transformers thinks of them; in a folder that is converted first, too."""
    for given, of_model, wanted in AS_PUBLISHED:
        folder = saved("llama")
        file, config = folder / "generation_config.json", json.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps(config | of_model))
        file.write_bytes(given if isinstance(given, bytes) else json.dumps(given).encode())
        if given is None:
            file.unlink()
        if form == "bin":
            weights = folder / "model.safetensors"
            torch.save(load_file(weights), folder / "pytorch_model.bin")
            weights.unlink()
        miniature_tokenizer().save_pretrained(folder)
        module = CausalLMModule(name=str(folder))
        if isinstance(wanted, str):
            with pytest.raises(ConfigError, match=re.escape(wanted)):
                module.build().checkpoint_files()
            continue
        found = json.loads(module.build().checkpoint_files()["hf/generation_config.json"])
        assert wanted.items() <= found.items()
        assert given is None or found.keys() <= {*wanted, "pad_token_id", "eos_token_id"}


def test_what_cannot_be_saved_is_refused_by_name(tiny):
    source, tokenizer = _source(tiny, None), miniature_tokenizer()
    tokenizer.init_kwargs["made_by"] = object()
    with pytest.raises(
        ConfigError, match=r"model\.tokenizer: got tokenizer None \(TypeError: Object of.*\n.*\n.*leave out"
    ):
        model_files(source, tokenizer)
    source.hf_config.made_by = object()
    with pytest.raises(ConfigError, match=r"model\.name: got LlamaConfig \(TypeError"):
        model_files(source, miniature_tokenizer())


TOKENS = ["<|tool|>", "<|im_end|>", "<|think|>"]
TIGHT = len(miniature_tokenizer())


@pytest.fixture
def base(saved):
    """Writes a tiny model with a tokenizer of 318 tokens."""

    def save(model_type: str = "llama", rows: int = TIGHT) -> Path:
        folder = saved(model_type, config={"vocab_size": rows})
        miniature_tokenizer().save_pretrained(folder)
        return folder

    return save


def _grown(folder: Path):
    source, *both = opened(folder, add_tokens=TOKENS)
    return source, fill(*both)


def test_equal_to_the_plain_model_with_the_mean_in_its_new_rows(base):
    for family in ("llama", "qwen2", "opt", "gpt2"):  # tied, apart, tied with a projection, Conv1D
        folder = base(family)
        source, ours = _grown(folder)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        ends = plain.get_input_embeddings(), plain.get_output_embeddings()
        means = [module.weight.detach().double().mean(0) for module in ends]
        plain.resize_token_embeddings(TIGHT + 2, mean_resizing=False)
        for module, mean in zip((plain.get_input_embeddings(), plain.get_output_embeddings()), means, strict=True):
            module.weight.data[TIGHT:] = mean.float()
        ids = torch.tensor([[3, TIGHT, 7, TIGHT + 1]])
        with torch.no_grad():
            assert torch.equal(ours(input_ids=ids).logits, plain.eval()(input_ids=ids).logits), family
        assert source.hf_config.vocab_size == TIGHT + 2
    tokenizer = load_tokenizer(source, ModelConfig(name=str(folder), add_tokens=TOKENS))
    assert tokenizer.convert_tokens_to_ids(["<|tool|>", "<|think|>"]) == [TIGHT, TIGHT + 1]
    assert tokenizer.decode(tokenizer("a<|think|>b")["input_ids"], skip_special_tokens=True) == "ab"


def test_free_rows_are_used_first(base):
    folder = base(rows=TIGHT + 1)
    source, ours = _grown(folder)
    stored = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    assert source.hf_config.vocab_size == TIGHT + 2
    assert torch.allclose(ours.get_input_embeddings().weight[TIGHT:], stored[:TIGHT].mean(0), atol=1e-7)
    roomy = resolve_model(ModelConfig(name=str(base("qwen2", rows=400)), add_tokens=TOKENS))
    assert roomy.hf_config.vocab_size == 400
    short = resolve_model(ModelConfig(name=str(base("qwen2", rows=TIGHT - 1)), add_tokens=TOKENS))  # without <|pad|>
    assert short.hf_config.vocab_size == TIGHT + 2


def test_known_tokens_change_nothing_and_a_foreign_tokenizer_is_refused(base, caplog):
    config = ModelConfig(name=str(base()), add_tokens=["<|im_end|>"])
    source = resolve_model(config)
    assert (source.overlay, source.hf_config.vocab_size) == (None, TIGHT)
    with caplog.at_level(logging.INFO, logger="lit_fsdp"):
        assert len(load_tokenizer(source, config)) == TIGHT
    assert "none, all tokens exist" in caplog.text
    folder = base("qwen2", rows=300)
    with pytest.raises(ConfigError, match=r"17 tokens beyond the 300 embeddings, which add_tokens does not name"):
        resolve_model(ModelConfig(name=str(folder), add_tokens=TOKENS))
