"""Answers end where they must, and the model is left as it was."""

from __future__ import annotations

import io
import json
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, GenerationConfig

from lit_fsdp.__main__ import main
from lit_fsdp.config.model import LoraConfig, ModelConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.models.adapter_names import base_name
from lit_fsdp.models.base import BaseWeights, describe_base, find_base
from lit_fsdp.models.generate import Chat, answer_batch, generate_ids
from lit_fsdp.models.resolve import resolve_model
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.unit.models.conftest import to_mxfp4
from tests.unit.models.families import FAMILIES, random_model


@pytest.fixture
def ask(tiny):
    """A model, its tokenizer, and a way to ask it something."""
    tokenizer = miniature_tokenizer()
    torch.manual_seed(0)
    config = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config)
    talk = [[{"role": "user", "content": "a"}]]
    return model, tokenizer, lambda length: answer_batch(model, tokenizer, talk, length)[0]


def test_length_is_limited_and_an_end_mark_stops(ask):
    model, tokenizer, answer = ask
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert len(tokenizer(answer(5))["input_ids"]) == 5  # all logits equal: always the first token
    model.generation_config.eos_token_id = 0  # that first token: the model's own end mark counts too
    assert answer(5) == tokenizer.decode([0]).strip()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("deepseek_v4", {}),
        ("minimax", {"layer_types": ["linear_attention", "full_attention"]}),
        ("recurrent_gemma", {}),
    ],
)
def test_answers_do_not_depend_on_the_other_prompts(family: str, changes: dict[str, Any]):
    if family not in FAMILIES:
        pytest.skip("this release of transformers does not have the family")
    model, tokenizer = random_model(family, **changes), miniature_tokenizer()
    torch.manual_seed(1)
    prompts = [torch.randint(3, len(tokenizer), (length,)).tolist() for length in (3, 24, 24)]
    together = generate_ids(model, tokenizer, prompts, 6, model.device)
    assert together == [generate_ids(model, tokenizer, [one], 6, model.device)[0] for one in prompts]
    assert len({tuple(answer) for answer in together}) == 3


def test_a_raw_prompt_is_plain_text_after_bos_without_template(ask, monkeypatch, tmp_path):
    model, tokenizer, _ = ask
    tokenizer.add_tokens(["<|bos|>"], special_tokens=True)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    bos, eos = tokenizer.convert_tokens_to_ids("<|bos|>"), tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"<|bos|> $A {tokenizer.eos_token}", special_tokens=[("<|bos|>", bos), (tokenizer.eos_token, eos)]
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    given = []
    monkeypatch.setattr(
        "lit_fsdp.models.generate.generate_ids", lambda m, t, prompts, *a, **o: given.append(prompts) or prompts
    )
    chat = Chat(str(tmp_path), raw=True)
    for text in ("ab", "c"):
        chat.answer(text)
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "c")]
    assert given == [[[bos, *plain[0]]], [[bos, *plain[1]]]]  # and nothing of the message before
    assert main(["generate", "--model", str(tmp_path), "--raw", "--system", "x", "--prompt", "y"]) == 2
    tokenizer.chat_template = None
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(tmp_path)
    for system, fix in ((None, "add --raw"), ("Be brief.", "add --raw, and drop --system")):
        with pytest.raises(ConfigError, match="no chat template") as caught:
            Chat(str(tmp_path), system).answer("ab")
        assert caught.value.fix == fix
    assert Chat(str(tmp_path), raw=True).answer("ab")


def test_settings_of_the_model_itself_are_not_used(ask):
    model, _, answer = ask
    model.train()
    plain = answer(12)
    own = model.generation_config = GenerationConfig(repetition_penalty=9.0, no_repeat_ngram_size=1, min_new_tokens=12)
    assert answer(12) == plain
    assert model.generation_config is own
    assert model.training


def test_a_temperature_draws_answers_and_top_p_limits_the_draw(ask):
    model, tokenizer, answer = ask
    model.generation_config = GenerationConfig(top_k=1, temperature=9.0)  # not used either

    def drawn(seed: int, top_p: float = 1.0) -> str:
        torch.manual_seed(seed)
        talk = [[{"role": "user", "content": "a"}]]
        return answer_batch(model, tokenizer, talk, 12, None, {"temperature": 2.0, "top_p": top_p})[0]

    assert len({drawn(seed) for seed in range(4)}) == 4
    assert drawn(1) == drawn(1)
    assert drawn(1, 1e-6) == drawn(2, 1e-6) == answer(12)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")  # peft 0.21 on transformers 5.24
@pytest.mark.parametrize(("quantize", "keep"), [(None, None), ("nf4", None), ("nf4", ["o_proj"])])
@pytest.mark.parametrize("overrides", [None, {"output_router_logits": True}])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_adapters_answer_with_the_base_that_they_were_trained_on(
    saved, monkeypatch, tmp_path, family, overrides, quantize, keep
):
    """Also one in MXFP4, one of which transformers quantizes only linear layers, and one with a layer trained whole."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # computes in fp32 on every CPU
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)  # whose kernel wants widths of n * 32
    tokenizer = miniature_tokenizer()
    folder = saved(family, config={"vocab_size": len(tokenizer), "intermediate_size": 64})
    if family == "gpt_oss":
        to_mxfp4(folder)
    tokenizer.save_pretrained(folder)
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        peft.LoraConfig(target_modules=["q_proj"], modules_to_save=keep, task_type="CAUSAL_LM"),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    config = ModelConfig(name=str(folder), lora=LoraConfig(quantize=quantize), config_overrides=overrides)
    trained_on = describe_base(resolve_model(config), config, 0)
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file(load_file(file), file, {"format": "pt", "base": json.dumps(trained_on)})
    chat = Chat(str(tmp_path / "adapter"))
    base = BaseWeights(find_base(trained_on, tmp_path), trained_on, False)
    compared = {}
    for name, layer in chat.model.base_model.model.named_modules():
        for own, param in layer.named_parameters(name, recurse=False):
            if "lora_" in own or ".modules_to_save." in own:
                continue
            dense = layer.forward(torch.eye(layer.in_features)).T if param.shape[-1] == 1 else param
            bias = getattr(layer, "bias", None)
            dense = dense - bias[:, None] if param.shape[-1] == 1 and bias is not None else dense
            compared[base_name(own)] = (dense, base.read(base_name(own)).float())
    assert base.specs.keys() - compared.keys() <= {"lm_head.weight"}
    for name, (found, wanted) in compared.items():
        if not (keep and "o_proj" in name):
            assert float((found - wanted).norm() / wanted.norm().clamp(min=1e-6)) < 0.01, name
    if keep:
        assert {
            type(layer) for name, layer in chat.model.named_modules() if name.endswith("o_proj.original_module")
        } == {torch.nn.Linear}


def test_an_adapter_on_random_weights_says_how_to_ask_it(tmp_path):
    config = ModelConfig(name="meta-llama/Llama-3.2-1B", miniature=True, lora=LoraConfig())
    base = {"format": "pt", "base": json.dumps(describe_base(resolve_model(config), config, 0))}
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": config.name}))
    save_file({"lora_A.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors", base)
    miniature_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"initialized randomly(?s:.*)export --merge, and name that folder"):
        Chat(str(tmp_path))


def test_what_cannot_be_generated_and_an_answer_without_text(tmp_path, capsys, monkeypatch):
    assert main(["generate", "--model", "model", "--max_new_tokens", "0"]) == 2
    assert capsys.readouterr().err.endswith("allowed: >= 1\n  fix:     write --max_new_tokens 256\n")
    for words in (["--temperature", "-1"], ["--top_p", "0.9"], ["--seed", "1"], ["--temperature", "nan"]):
        assert main(["generate", "--model", "model", *words]) == 2
        assert f"error: {words[0]}: got {words[1]}" in (err := capsys.readouterr().err)
        assert "--temperature 0.7" in err
    assert main(["generate", "--model", "model", "--temperature", "1", "--seed", str(2**63)]) == 2
    assert "write --seed 1" in capsys.readouterr().err
    assert main(["generate", "--model", "model", "--temperature", "1", "--top_p", "0"]) == 2
    assert "write --top_p 0.9" in capsys.readouterr().err
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    for name in ("run", "run/best"):
        with pytest.raises(ConfigError, match=f"export --ckpt {tmp_path / name} --out NEW"):
            Chat(str(tmp_path / name))
    monkeypatch.setattr("lit_fsdp.models.generate._loaded", lambda *_: (None, None))
    monkeypatch.setattr("lit_fsdp.models.generate.answer_batch", lambda *_: [" \n"])
    for words, line in ((["--prompt", "Hello"], ""), ([], "Hello\n")):
        monkeypatch.setattr("sys.stdin", io.StringIO(line))
        assert main(["generate", "--model", "model", *words]) == 0
        assert "The answer is empty" in capsys.readouterr().err


def test_memory_that_runs_out_while_loading_is_no_matter_of_the_files(ask, monkeypatch, tmp_path, capsys):
    model, tokenizer, _ = ask
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def fail(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
        assert main(["generate", "--model", str(tmp_path), "--prompt", "x"]) == 1
    assert "Tried to allocate 2.00 GiB" in (err := capsys.readouterr().err)
    assert "files that transformers can read" not in err
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(["generate", "--model", str(tmp_path), "--prompt", "x"]) == 2
    assert "allowed: files that transformers can read" in capsys.readouterr().err
