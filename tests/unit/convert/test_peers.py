"""Configurations of Axolotl and torchtune: usual files, what is learned in them, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fsdp.config.parser import load_recipe
from lit_fsdp.convert import convert_file
from lit_fsdp.convert.conversion import Conversion
from lit_fsdp.errors import ConfigError
from tests.unit.convert.inputs import convert, strategy

CHAT = {"path": "org/chats", "type": "chat_template"}
LOOP = "{micro_batch_size: 2, gradient_accumulation_steps: 4, learning_rate: 2e-5, max_steps: 400}"
AXOLOTL = {
    "full": """{base_model: meta-llama/Llama-3.1-8B, output_dir: ./out, sequence_len: 8192, sample_packing: true,
        datasets: [{path: data/rows.jsonl, ds_type: json, type: chat_template, field_messages: dialog,
            message_property_mappings: {role: from, content: value}, roles: {user: [human], assistant: [gpt]},
            roles_to_train: [assistant], train_on_eos: turn},
            {path: org/more, name: small, split: test, type: completion}],
        test_datasets: [{path: org/chats, split: validation, type: chat_template}], pad_to_sequence_len: true,
        num_epochs: 1, optimizer: adamw_torch, lr_scheduler: cosine, bf16: auto, tf32: false, fsdp_version: 2,
        gradient_checkpointing: offload, flash_attention: true, warmup_ratio: 0.1, eval_steps: 50, save_steps: 100,
        save_total_limit: 2, weight_decay: 0.0, wandb_project: null, context_parallel_size: 2,
        fsdp_config: {offload_params: false, state_dict_type: SHARDED_STATE_DICT, reshard_after_forward: true,
            auto_wrap_policy: TRANSFORMER_BASED_WRAP, transformer_layer_cls_to_wrap: LlamaDecoderLayer},
        special_tokens: {pad_token: <|end_of_text|>}}""",
    "qlora": """{base_model: Qwen/Qwen3-8B, load_in_4bit: true, load_in_8bit: false, adapter: qlora, val_set_size: 0.05,
        datasets: [{path: org/chats, type: chat_template}], lora_r: 32, lora_alpha: 64, lora_dropout: 0.05,
        lora_target_linear: true, evals_per_epoch: 4, saves_per_epoch: 1, fsdp: [full_shard, auto_wrap],
        fsdp_config: {fsdp_limit_all_gathers: true, fsdp_sync_module_states: true, fsdp_offload_params: true,
            fsdp_use_orig_params: false, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP,
            fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer, fsdp_sharding_strategy: FULL_SHARD}}""",
    "dpo": """{base_model: meta-llama/Meta-Llama-3-8B-Instruct, chat_template: llama3, rl: dpo, rl_beta: 0.2,
        datasets: [{path: org/pairs, type: chat_template.default, field_messages: conversation, field_chosen: chosen,
            field_rejected: rejected}],
        adapter: lora, lora_r: 8, lora_alpha: 16, lora_target_modules: [q_proj, v_proj]}""",
}
TORCHTUNE = {
    "full": """{output_dir: out/full, seed: null, shuffle: True, batch_size: 2, epochs: 3, max_steps_per_epoch: null,
        tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: models/M/t.model, max_seq_len: 4096},
        dataset: {_component_: torchtune.datasets.chat_dataset, source: json, data_files: data/chats.json, packed: true,
            conversation_column: dialog, conversation_style: sharegpt, split: train},
        model: {_component_: torchtune.models.llama3_1.llama3_1_8b}, resume_from_checkpoint: False,
        checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: models/M/,
            checkpoint_files: [a.safetensors], recipe_checkpoint: null, output_dir: "${output_dir}"},
        gradient_accumulation_steps: 8, optimizer: {_component_: torch.optim.AdamW, fused: True, lr: 2e-5},
        loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}, clip_grad_norm: null, compile: False,
        device: cuda, dtype: bf16, enable_activation_checkpointing: True, enable_activation_offloading: False,
        custom_sharded_layers: [tok_embeddings, output], fsdp_cpu_offload: True, log_every_n_steps: 1,
        metric_logger: {_component_: torchtune.training.metric_logging.DiskLogger,
            log_dir: "${checkpointer.output_dir}/logs"},
        profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: False}}""",
    "qlora": """{tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 1024}, batch_size: 1,
        dataset: {_component_: torchtune.datasets.instruct_dataset, source: org/rows, column_map: {input: question}},
        model: {_component_: torchtune.models.llama3_1.qlora_llama3_1_8b, lora_attn_modules: [q_proj, output_proj],
            apply_lora_to_mlp: True, apply_lora_to_output: False, lora_rank: 4, lora_alpha: 8, lora_dropout: 0.0},
        checkpointer: {checkpoint_dir: models/M}, epochs: 2, max_steps_per_epoch: 50,
        optimizer: {_component_: torch.optim.AdamW, lr: 3e-4, weight_decay: 0.05}, lr_scheduler: {num_warmup_steps: 10,
            _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup}}""",
    "dpo": """{tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 1024}, batch_size: 4,
        dataset: {_component_: torchtune.datasets.preference_dataset, source: data/pairs.jsonl,
            column_map: {chosen: good, rejected: bad}},
        model: {_component_: torchtune.models.llama3_1.lora_llama3_1_8b, lora_attn_modules: [q_proj]},
        checkpointer: {checkpoint_dir: models/M}, gradient_accumulation_steps: 2, epochs: 1,
        loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.05, label_smoothing: 0}}""",
}
ACCELERATE = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}, "num_processes": 4,
              "parallelism_config": {"dp_shard_size": 2, "tp_size": 2}}  # fmt: skip
ALPACA = {"_component_": "torchtune.datasets.alpaca_dataset"}


def _usual(kind: str, name: str, ranks: int | None = 4) -> Conversion:
    text = {"axolotl": AXOLOTL, "torchtune": TORCHTUNE}[kind][name]
    return convert(kind, {**(yaml.safe_load(LOOP) if kind == "axolotl" else {}), **yaml.safe_load(text)}, ranks)


def test_usual_files_become_recipes_that_load(tmp_path: Path) -> None:
    for kind, files in (("axolotl", AXOLOTL), ("torchtune", TORCHTUNE)):
        for name in files:
            found = _usual(kind, name)
            differs = [str(fate) for fate in found.fates if fate.differs]
            assert differs == [], name
            (tmp_path / "out.yaml").write_text(found.as_yaml(name))
            load_recipe(["--config", str(tmp_path / "out.yaml")], "fit")


def test_axolotl() -> None:
    found = _usual("axolotl", "full")
    ours, recipe = strategy(found), found.recipe
    assert (ours["engine"], ours["sharding"], ours["context_parallel"]) == ("fsdp2", "full_shard", 2)
    assert ours["activation_checkpointing"] == {"mode": "full", "offload_activations": True}
    assert ours["precision"] == {"mode": "mixed", "reduce_dtype": "bf16"}
    turns = {"role": "from", "content": "value", "roles": {"human": "user", "gpt": "assistant"}}
    assert recipe["data"]["train"] == [
        {"source": "data/rows.jsonl", "format": "messages", "columns": {"messages": "dialog"}, "turns": turns},
        {"source": "org/more:small:test", "format": "text"},
    ]
    assert recipe["data"]["val"] == [{"source": "org/chats:validation", "format": "messages"}]
    # rows that are too long are left out there
    assert (recipe["data"]["truncation"], recipe["data"]["packing"]) == ("drop", True)
    assert recipe["model"]["optim"]["warmup_ratio"] == 0.1
    assert (recipe["trainer"]["max_steps"], recipe["trainer"]["val_check_interval"]) == (400, 200)
    assert recipe["trainer"]["max_epochs"] == 1  # whichever ends first
    assert recipe["checkpoint"] == {"every_steps": 100, "keep_last": 2}
    found = _usual("axolotl", "qlora")
    assert strategy(found)["engine"] == "fsdp2"
    assert found.recipe["model"]["lora"] == {"r": 32, "alpha": 64, "dropout": 0.05, "target_modules": "all-linear",
                                             "quantize": "nf4", "double_quantization": True}  # fmt: skip
    assert found.recipe["trainer"]["val_check_interval"] == 0.25
    assert found.recipe["model"]["optim"]["warmup_ratio"] == 0.03
    model = _usual("axolotl", "dpo").recipe["model"]
    assert (model["class_path"], model["preference"]) == ("lit_fsdp.PreferenceModule", {"loss": "dpo", "beta": 0.2})


def test_torchtune() -> None:
    found = _usual("torchtune", "full")
    ours, recipe = strategy(found), found.recipe
    assert (ours["engine"], ours["precision"], ours["cpu_offload"]) == ("fsdp2", "low_precision", True)
    columns = {"messages": "dialog"}
    assert recipe["data"]["train"] == [{"source": "data/chats.json", "format": "messages", "columns": columns}]
    assert (recipe["data"]["train_on_prompt"], recipe["data"]["chat_template"]) == (False, "llama3")
    # no schedule there is a constant rate, and decay is that of torch.optim.AdamW
    optim = {"lr": 2e-5, "schedule": "constant", "weight_decay": 0.01, "beta2": 0.999}
    assert recipe["model"] == {"name": "models/M/", "optim": optim}
    assert recipe["trainer"]["default_root_dir"] == "out/full"
    found = _usual("torchtune", "qlora", 1)
    assert strategy(found)["engine"] == "single"
    ends = found.recipe["trainer"]["max_steps"], found.recipe["trainer"]["max_epochs"]  # whichever is first
    assert ends == (100, 2)
    assert found.recipe["data"]["train"][0]["columns"] == {"instruction": "question"}
    assert found.recipe["model"]["lora"]["target_modules"] == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    preference = {"loss": "dpo", "beta": 0.05, "label_smoothing": 0}
    assert _usual("torchtune", "dpo").recipe["model"]["preference"] == preference


def test_what_does_not_names_the_key() -> None:
    axolotl: dict[str, Any] = {"base_model": "m", "warmup_steps": 1, **yaml.safe_load(LOOP), "datasets": [CHAT]}
    tune = yaml.safe_load(TORCHTUNE["dpo"]) | {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}}
    for kind, given, line in (
        ("axolotl", {"datasets": [{**CHAT, "type": "alpaca"}]}, "datasets.0.type: kept as data.train.0.format: instr"),
        ("axolotl", {"datasets": [CHAT, {**CHAT, "train_on_eos": "all"}]},
         "datasets.1.train_on_eos: dropped because only the end of supervised turns is supervised"),
        ("axolotl", {"warmup_steps": None, "max_steps": None}, "warmup_steps (by default 3 % of the steps, 100"),
        ("axolotl", {"optimizer": "adamw_bnb_8bit"}, "optimizer: dropped because the recipe uses AdamW"),
        ("axolotl", {"tensor_parallel_size": 2}, "tensor_parallel_size: dropped because tensor parallelism"),
        ("axolotl", {"sample_paking": True}, "sample_paking: dropped because the key is unknown; the closest is s"),
        ("axolotl", {"use_dynamic_finetuning": True}, "use_dynamic_finetuning: dropped because the key is unknown"),
        ("axolotl", {"model_type": "AutoModelForSequenceClassification"}, "model_type: dropped because the model is c"),
        ("axolotl", {"datasets": [{**CHAT, "data_files": ["part/a.jsonl"]}]},
         "datasets.0.data_files: kept as data.train.0.source: org/chats/part/a.jsonl (files of a Hub repository: down"),
        ("axolotl", {"datasets": [{**CHAT, "path": "json", "data_files": "a.jsonl", "split": "train[:10%]"}]},
         "datasets.0.data_files: kept as data.train.0.source: a.jsonl (all rows of these files, not split train[:10%]"),
        ("torchtune", {"ref_checkpointer": {"checkpoint_dir": "other/M"}},
         "ref_checkpointer.checkpoint_dir: dropped because the reference is the model that training starts from"),
        ("torchtune", {"dataset": ALPACA}, "dataset._component_: kept as data.train.0.format: instruction (turns"),
        ("torchtune", {"teacher": 1}, "teacher: dropped because the key is unknown"),
    ):  # fmt: skip
        found = convert(kind, {**(axolotl if kind == "axolotl" else tune), **given})
        differs = [str(fate) for fate in found.fates if fate.differs]
        assert [one[: len(line)] for one in differs] == [line]
    fine = {"use_wandb": True, "model_type": "LlamaForCausalLM", "activation_offloading": True,
            "datasets": [{**CHAT, "path": "./data", "data_files": "a.jsonl", "message_field_role": "of"}]}  # fmt: skip
    found = convert("axolotl", {**axolotl, **fine})
    assert not found.differs
    turns = {"turns": {"role": "of"}}
    assert found.recipe["data"]["train"] == [{"source": "data/a.jsonl", "format": "messages", **turns}]
    shards = {
        "fsdp_version": 2,
        "dp_shard_size": 4,
        "context_parallel_size": 2,
        "fsdp_config": {"offload_params": False},
    }
    assert strategy(convert("axolotl", {**axolotl, **shards}, 8))["shard_degree"] == 8
    # whether prompts are supervised by default
    assert convert("torchtune", {**tune, "dataset": ALPACA}).recipe["data"]["train_on_prompt"] is True
    full = convert("axolotl", axolotl)
    assert strategy(full)["precision"] == "low_precision"
    assert "train_on_prompt" not in full.recipe["data"]


def test_a_file_of_another_format_is_refused_by_name() -> None:
    axolotl = {"base_model": "m", "warmup_steps": 1, **yaml.safe_load(LOOP), "datasets": [CHAT]}
    files: dict[str, dict[str, Any]] = {
        "axolotl": axolotl,
        "torchtune": yaml.safe_load(TORCHTUNE["dpo"]),
        "deepspeed": {"zero_optimization": {"stage": 3}},
        "hf-trainer": {"per_device_train_batch_size": 2},
        "accelerate": {"distributed_type": "FSDP"},
    }
    for kind, given in files.items():
        for other in files.keys() - {kind}:
            with pytest.raises(ConfigError) as error:
                convert(other, given)
            assert error.value.fix.startswith(f"write lit-fsdp convert {kind} ")


def test_values_of_theirs_that_are_easily_lost() -> None:
    axolotl: dict[str, Any] = {"base_model": "m", "warmup_steps": 1, **yaml.safe_load(LOOP), "datasets": [CHAT]}
    pairs = [{**CHAT, "type": "chat_template.default"}]
    (data,) = convert("axolotl", {**axolotl, "rl": "dpo", "datasets": pairs}).recipe["data"]["train"]
    assert data["columns"] == {"prompt": "messages"}
    style = {"field_instruction": "q", "field_output": "a", "system_prompt": "", "format": "[INST] {instruction}"}
    found = convert("axolotl", {**axolotl, "datasets": [{"path": "org/rows", "type": style}]})
    assert found.recipe["data"]["train"][0] == {
        "source": "org/rows", "format": "instruction", "columns": {"instruction": "q", "output": "a"},
    }  # fmt: skip
    assert [fate.key for fate in found.fates if fate.differs] == ["datasets.0.type.format"]
    lora = {"adapter": "lora", "lora_target_linear": True, "lora_target_modules": ["q_proj", "lm_head"]}
    lost = [fate.text for fate in convert("axolotl", {**axolotl, **lora}).fates if fate.differs]
    assert lost == ["dropped because lora_target_linear does not include lm_head"]
    offload = {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {"fsdp_offload_params": True}}
    found = convert("axolotl", {**axolotl, **offload})
    assert (strategy(found)["engine"], strategy(found)["cpu_offload"]) == ("fsdp2", True)
    assert not any("engine: fsdp1" in fate.text for fate in found.fates)
    assert strategy(convert("axolotl", {**axolotl, "fp8": True}))["precision"] == "fp8"
    shares = {fate.key: fate.text for fate in convert("axolotl", {**axolotl, "eval_steps": 0.1}).fates}
    assert shares["eval_steps"] == "dropped because it is a share of the run: set trainer.val_check_interval"
    split = convert("axolotl", {**axolotl, "tensor_parallel_size": 2, "dp_shard_size": 2, "fsdp_version": 2}, 2)
    assert strategy(split)["shard_degree"] is None
    split = convert("accelerate", ACCELERATE)
    assert [fate.key for fate in split.fates if fate.differs] == ["parallelism_config.tp_size"]
    style = {"field_prompt": "q", "field_chosen": "a", "field_rejected": "b"}
    found = convert("axolotl", {**axolotl, "rl": "dpo", "datasets": [{"path": "org/pairs", "type": style}]})
    columns = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert found.recipe["data"]["train"] == [{"source": "org/pairs", "format": "preference", "columns": columns}]

    tune: dict[str, Any] = yaml.safe_load(TORCHTUNE["full"])
    whole = convert("torchtune", {**tune, "tokenizer": {**tune["tokenizer"], "max_seq_len": None}})
    assert [fate.key for fate in whole.fates if fate.differs] == ["tokenizer.max_seq_len"]
    del tune["tokenizer"]["max_seq_len"]
    (lost,) = [str(fate) for fate in convert("torchtune", tune).fates if fate.differs]
    assert lost.startswith("tokenizer.max_seq_len (null by default): dropped because torchtune does not truncate")
    phi = {"_component_": "torchtune.models.phi3.lora_phi3_mini", "lora_attn_modules": ["q_proj", "output_proj"]}
    found = convert("torchtune", {**tune, "model": {**phi, "apply_lora_to_mlp": True}})
    assert found.recipe["model"]["lora"]["target_modules"] == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    every = {"dataset_val": tune["dataset"], "run_val_every_n_steps": 50}
    assert convert("torchtune", {**tune, **every}).recipe["trainer"]["val_check_interval"] == 400  # micro-batches


def test_trls_mixture_of_data_sets() -> None:
    mixture = [{"path": "json", "data_files": "rows.jsonl"}, {"path": "org/more", "name": "small", "columns": ["text"]}]
    given = {"datasets": mixture, "assistant_only_loss": True, "neftune_noise_alpha": 5, "max_steps": 4}
    found = convert("hf-trainer", given)
    assert found.recipe["data"]["train"] == [{"source": "rows.jsonl"}, {"source": "org/more:small:train"}]
    assert found.recipe["model"]["neftune_alpha"] == 5
    assert found.recipe["model"]["optim"]["lr"] == 2e-5  # as in TRL
    assert not found.differs


@pytest.mark.parametrize("kind", ["axolotl", "hf-trainer"])
def test_the_deepspeed_file_of_a_trainer(kind: str, tmp_path: Path) -> None:
    """Its stage applies, and "auto" is what the trainer's file says."""
    zero = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
            **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping", "train_batch_size"), "auto"),
            "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}  # fmt: skip
    (tmp_path / "zero3.json").write_text(json.dumps(zero))
    loop = {"gradient_accumulation_steps": 4, "learning_rate": 2e-5, "max_steps": 40, "warmup_steps": 1, "bf16": True}
    given: dict[str, Any] = {"base_model": "m", "micro_batch_size": 2, "datasets": [CHAT], **loop}
    if kind == "hf-trainer":
        given = {"per_device_train_batch_size": 2, **loop}
    for deepspeed in ("zero3.json", zero, json.dumps(zero)):
        (tmp_path / "run.json").write_text(json.dumps({**given, "deepspeed": deepspeed}))
        found = convert_file(kind, tmp_path / "run.json", 4)
        assert [str(fate) for fate in found.fates if fate.differs] == []
        ours = strategy(found)
        assert (ours["engine"], ours["sharding"], ours["cpu_offload"]) == ("fsdp2", "full_shard", True)
        assert ours["precision"] == {"mode": "mixed", "reduce_dtype": "bf16"}
        assert found.recipe["data"]["micro_batch_size"] == 2
        assert found.recipe["trainer"]["accumulate_grad_batches"] == 4
        assert "deepspeed.zero_optimization.overlap_comm" in {fate.key for fate in found.fates}


def test_deepspeeds_precision_and_that_of_the_trainer() -> None:
    given: dict[str, Any] = {"base_model": "m", "warmup_steps": 1, **yaml.safe_load(LOOP), "datasets": [CHAT]}
    for precision, stage, half, wanted in (
        ({}, 3, "fp16", "fp16_mixed"),
        ({"bf16": True}, 0, "bf16", "low_precision"),
        ({"bf16": True}, 2, "bf16", "mixed"),
    ):
        zero = {"zero_optimization": {"stage": stage}, half: {"enabled": True}}
        found = strategy(convert("axolotl", {**given, **precision, "deepspeed": zero}))["precision"]
        assert (found if isinstance(found, str) else found["mode"]) == wanted
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}
    zero = {"zero_optimization": {"stage": 3}, "scheduler": scheduler}
    found = convert("axolotl", {**given, "warmup_steps": None, "warmup_ratio": 0.1, "deepspeed": zero})
    lost = [fate.key for fate in found.fates if fate.differs]
    assert lost == ["deepspeed.scheduler.params.warmup_type (log by default)"]


@pytest.mark.parametrize("kind", ["axolotl", "hf-trainer"])
def test_optimizer_and_scheduler_of_deepspeed_outrank_the_trainers(kind: str) -> None:
    """Transformers fills in values of auto only, so that DeepSpeed's defaults apply to keys that are not set."""
    loop = {"learning_rate": 2e-5, "weight_decay": 0.1, "adam_beta2": 0.95, "max_grad_norm": 0.5, "max_steps": 2000}
    given: dict[str, Any] = {**loop, "warmup_ratio": 0.1, "bf16": True}
    given |= {"base_model": "m", "datasets": [CHAT]} if kind == "axolotl" else {}
    schedule, optimizer = ("lr_scheduler", "optimizer") if kind == "axolotl" else ("lr_scheduler_type", "optim")
    given |= {schedule: "cosine", optimizer: "adafactor"}
    zero: dict[str, Any] = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {}}}
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}}
    found = convert(kind, {**given, "deepspeed": {**zero, **scheduler}}, 2)
    told = {fate.key: fate.text for fate in found.fates}
    assert not found.differs
    optim = {"lr": 1e-3, "weight_decay": 0.0, "beta2": 0.999, "schedule": "constant", "warmup_steps": 1000}
    assert found.get("model.optim").items() >= optim.items()
    assert "warmup_ratio" not in found.get("model.optim")
    assert found.get("trainer.gradient_clip_val") == 1.0
    assert told[schedule] == "dropped because the scheduler of the DeepSpeed file applies"
    assert told["learning_rate"] == "dropped because deepspeed.optimizer.params.lr (0.001 by default) applies"
    # with values of auto, and without an optimizer, the trainer's apply, also its warm-up beside a constant rate
    params = {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    scheduler["scheduler"]["params"] = params
    given |= {schedule: "constant", optimizer: "adamw_torch"}
    found = convert(kind, {**given, "deepspeed": {"gradient_clipping": "auto", **scheduler}}, 2)
    optim = {"lr": 2e-5, "weight_decay": 0.1, "beta2": 0.95, "schedule": "constant", "warmup_ratio": 0.1}
    assert found.get("model.optim").items() >= optim.items()
    assert found.get("trainer.gradient_clip_val") == 0.5


def test_a_conflict_with_a_default_says_what_to_write() -> None:
    tune = yaml.safe_load(TORCHTUNE["full"])
    chat = tune["dataset"]
    for first, second, fix in (
        ({"train_on_input": True}, {}, "write dataset.1.train_on_input: true"),
        ({}, {"train_on_input": True}, "write dataset.0.train_on_input: true"),
    ):
        with pytest.raises(ConfigError) as error:
            convert("torchtune", {**tune, "dataset": [{**chat, **first}, {**chat, **second}]})
        assert error.value.fix == fix


def test_a_file_of_llama_factory_is_named() -> None:
    given = {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "lora", "template": "llama3"}
    for kind in ("hf-trainer", "axolotl"):
        with pytest.raises(ConfigError, match="which looks like LLaMA-Factory's configuration"):
            convert(kind, given)


def test_refusals_name_the_key() -> None:
    base, tune = {"base_model": "m"}, yaml.safe_load(TORCHTUNE["dpo"])
    for kind, given, field in (
        ("axolotl", {"datasets": [CHAT]}, "base_model"),
        ("axolotl", {**base, "datasets": [{"type": "alpaca"}]}, "datasets.0.path"),
        ("axolotl", {**base, "datasets": ["org/chats"]}, "datasets.0"),
        ("axolotl", {**base, "rl": "grpo"}, "rl"),
        ("axolotl", {**base, "rl": "kto"}, "rl"),
        ("axolotl", {**base, "deepspeed": ["a"]}, "deepspeed"),
        ("torchtune", {"policy_model": {}, "batch_size": 2}, "policy_model"),
        ("axolotl", {**base, "adapter": "llama-adapter"}, "adapter"),
        ("torchtune", {"batch_size": 2}, "model._component_"),
        ("torchtune", {**tune, "output_dir": "${there}"}, "there"),
        ("torchtune", {**tune, "output_dir": "${output_dir}"}, "output_dir"),
        ("torchtune", {**tune, "dtype": "fp16"}, "dtype"),
        ("torchtune", {**tune, "dataset": {"_component_": "torchtune.datasets.samsum_dataset"}}, "dataset._component_"),
        ("torchtune", {**tune, "dataset": [ALPACA, {**ALPACA, "train_on_input": False}]}, "dataset.1.train_on_input"),
    ):
        with pytest.raises(ConfigError) as error:
            convert(kind, given)
        assert error.value.field == field
