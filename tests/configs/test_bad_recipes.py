"""What is wrong with a recipe is said before anything heavy is imported: where, what is allowed, what to write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lit_fsdp.config.parser import load_recipe
from lit_fsdp.errors import ConfigError

GOOD = """
trainer: {devices: 4, max_steps: 20, strategy: {class_path: lit_fsdp.fsdp_strategy, init_args: {}}}
model: {name: some-model, optim: {lr: 1.0e-4, warmup_steps: 10}}
data: {train: rows.jsonl, global_batch_size: 16, micro_batch_size: 2}
"""
ARGS = "trainer.strategy.init_args"
# flags, of which `:` stands for the arguments of the strategy; the field that is named; the beginning of the fix
CASES = (
    # keys that do not exist
    ("--model.optim.learning_rate=1e-4", "model.optim.learning_rate", "write model.optim.lr"),
    ("--optim.lr=1e-4", "optim.lr", "write model.optim.lr"),
    ("--trainer.max_step=3", "trainer.max_step", "write trainer.max_steps"),
    ("--trainer.strategy.class=x", "trainer.strategy.class", "write trainer.strategy.class_path"),
    ("--:.shard=full_shard", ":.shard", "write :.sharding"),
    ("--:.precision={mode: mixed, reduce: bf16}", ":.precision.reduce", "write :.precision.reduce_dtype"),
    ("recipe.yaml", "recipe.yaml", "write --config recipe.yaml"),
    ("--model=lit_fsdp.PreferenceModule --model.preference.betta=1", "model.preference.betta", "write model.pref"),
    ("--model.preference.beta=1", "model.preference.beta", ""),
    # values
    ("--model=lit_fsdp.PreferenceModule --model.preference.loss=kto", "model.preference.loss", ""),
    ("--:.engine=fsdp3", ":.engine", "write :.engine: fsdp2"),
    ("--:.sharding=FULL_SHARD", ":.sharding", "write :.sharding: full_shard"),
    ("--:.precision={mode: mixed, reduce_dtype: fp64}", ":.precision.reduce_dtype", "write :.precision.reduce_dtype: "),
    ("--model.optim.lr=abc", "model.optim.lr", ""),
    ("--model.optim.schedule=cosin", "model.optim.schedule", "write model.optim.schedule: cosine"),
    (
        "--model.name=null",
        "model.name",
        "name a recipe with --config (lit-fsdp recipes ls lists them), or set model.name",
    ),
    ("--data.train=null", "data.train", "set data.train: rows.jsonl"),
    ("--data.columns={chat: messages}", "data.columns.chat", "write {messages: chat}"),
    ("--checkpoint.keep_every=15 --checkpoint.every_steps=10", "checkpoint.keep_every", "write keep_every: 100"),
    ("--trainer.gradient_clip_algorithm=norms", "trainer.gradient_clip_algorithm", "write trainer.gradient_clip_alg"),
    ("--trainer.default_root_dir=$NOT_SET/x", "trainer.default_root_dir", ""),
    # what does not go together
    ("--:.use_orig_params=false", ":.use_orig_params", ""),
    ("--:.replicate_degree=2", ":.replicate_degree", ""),
    ("--:.sharding=no_shard --:.replicate_degree=2", ":.replicate_degree", ""),
    ("--:.sharding=hybrid_shard --:.replicate_degree=3", ":.replicate_degree", "set replicate_degree: 2"),
    ("--:.sharding=hybrid_shard --:.shard_degree=4 --:.replicate_degree=4", ":.shard_degree", ""),
    ("--:.shard_degree=3", ":.shard_degree", ""),
    ("--:.engine=single", ":.engine", ""),
    ("--:.backward_prefetch=post", ":.backward_prefetch", ""),
    ("--:.engine=fsdp1 --:.forward_prefetch=2", ":.forward_prefetch", ""),
    ("--:.limit_all_gathers=false", ":.limit_all_gathers", ""),
    ("--:.engine=fsdp1 --:.sync_each_micro_batch=false", ":.sync_each_micro_batch", ""),
    ("--:.engine=fsdp1 --:.cpu_offload=true", ":.engine", "set engine: fsdp2, or data.micro_batch_size: 4"),
    (
        "--:.engine=fsdp1 --:.cpu_offload=true --data.global_batch_size=null --trainer.accumulate_grad_batches=2",
        ":.engine",
        "set engine: fsdp2, or data.micro_batch_size: 4 and trainer.accumulate_grad_batches: 1",
    ),
    (
        "--:.engine=fsdp1 --:.cpu_offload=true --trainer.devices=auto --allow-imports=tests --data=tests.Data "
        "--trainer.accumulate_grad_batches=2",
        ":.engine",
        "set engine: fsdp2, or drop trainer.accumulate_grad_batches",
    ),
    ("--:.activation_checkpointing=memory_budget", ":.activation_checkpointing", ""),
    ("--:.precision={mode: mixed, reduce_dtype: fp16}", ":.precision.reduce_dtype", "drop reduce_dtype"),
    ("--:.engine=single --trainer.devices=1 --:.precision={reduce_dtype: bf16}", ":.precision.reduce_dtype", ""),
    ("--trainer.strategy=FULL_SHARD", "trainer.strategy", "write --:.sharding full_shard"),
    ("--trainer.strategy=fsdp2", "trainer.strategy", "write --:.engine fsdp2"),
    ("--trainer.max_steps=0", "trainer.max_steps", "set trainer.max_steps: 1000"),
    ("--trainer.max_steps=5", "model.optim.warmup_steps", "set model.optim.warmup_steps: 0"),
    ("--trainer.limit_train_batches=5", "trainer.limit_train_batches", "set trainer.max_steps"),
    ("--trainer.limit_train_batches=1", "trainer.limit_train_batches", "set trainer.max_steps"),
    ("--trainer.overfit_batches=1", "trainer.overfit_batches", "name a small file as data.train"),
    ("--data.val={source: val.jsonl}", "data.val.source", "write val: [{source: FILE, ...}]"),
    ("--data.train={source: a.jsonl}", "data.train", "write train: [{source: FILE, ...}]"),
    ("--data.val={easy: []}", "data.val.easy", "drop the set"),
    ("--data.train=[{source: a.jsonl, name: easy}]", "data.train", ""),
    ("--data.val=[{source: a.jsonl, name: easy}, b.jsonl]", "data.val", ""),
    ("--data.global_batch_size=1", "data.global_batch_size", "set global_batch_size: 8"),
    ("--data.streaming=true --trainer.max_steps=-1", "trainer.max_steps", "set trainer.max_steps: 1000"),
    ("--data.streaming=true --data.val=val.jsonl", "trainer.val_check_interval", "set trainer.val_check_interval: 500"),
    ("--model.loss.backend=liger --trainer.accelerator=cpu", "model.loss.backend", ""),
    ("--model.loss.backend=liger --model.lora.target_modules=[lm_head]", "model.loss.backend", ""),
    ("--model.quantize=nf4", "model.quantize", "write model.lora.quantize"),
    ("--model.lora.quantize=int8", "model.lora.quantize", ""),
    ("--model.lora.double_quantization=true", "model.lora.double_quantization", "add quantize: nf4"),
    ("--model.lora.quantize=nf4 --model.lora.use_dora=true", "model.lora.use_dora", "drop use_dora or quantize"),
    ("--model.lora.quantize=nf4 --:.engine=fsdp1", ":.engine", ""),
    ("--model.lora.quantize=nf4 --:.precision=fp8", ":.precision", ""),
    ("--model.lora.quantize=nf4 --:.precision=fp16_mixed", ":.precision", ""),
    ("--model.attn_implementation=flex_attention --trainer.accelerator=cpu", "model.attn_implementation", "leave "),
    ("--model.attn_implementation=flash_attention_2 --:.precision=fp32", "model.attn_implementation", "set :.prec"),
    ("--model.optim.decay_ratio=0.2", "model.optim.decay_ratio", "set schedule: wsd"),
    ("--model.optim.schedule=wsd --model.optim.decay_ratio=2.5", "model.optim.decay_ratio", ""),
    ("--model.loss.backend=plain --model.loss.chunk_tokens=64", "model.loss.chunk_tokens", ""),
    ("--model.neftune_alpha=0", "model.neftune_alpha", "write neftune_alpha: 5"),
    ("--:.engine=fsdp1 --model.optim.class_path=torchao.optim.AdamW8bit", "model.optim.class_path", ""),
    ("--:.engine=fsdp1 --model.optim.class_path=lit_fsdp.MuonWithAdamW", "model.optim.class_path", ""),
    ("--:.engine=fsdp1 --model.optim.class_path=torch.optim.Adafactor", "model.optim.class_path", ""),
    ("--model.optim.class_path=torch.optim.Rprop", "model.optim.class_path", "write torch.optim.AdamW"),
    ("--:.engine=ddp --model.optim.class_path=torch.optim.LBFGS", "model.optim.class_path", "write torch.optim.AdamW"),
    (
        "--allow-imports=bitsandbytes --model.optim.class_path=bitsandbytes.optim.Lion",
        "model.optim.class_path",
        "write",
    ),
    ("--model.optim.class_path=torchao.optim.AdamW4bit", "model.optim.class_path", "write torchao.optim.AdamW8bit"),
    ("--samples.prompts=0", "samples.prompts", "write prompts: 8"),
    ("--samples.prompts=4", "samples.prompts", "set data.val or data.val_split"),
    ("--samples.prompts=asked.jsonl", "samples.prompts", "set data.val or data.val_split"),
    ("--samples.max_new_tokens=0", "samples.max_new_tokens", "write max_new_tokens: 64"),
    (
        "--trainer.precision=32-true --:.precision=mixed",
        "trainer.precision",
        "set only one: write --:.precision fp32",
    ),
    ("--trainer.accumulate_grad_batches=3", "trainer.accumulate_grad_batches", ""),
)


def test_a_bad_recipe_is_refused_with_the_field_and_what_to_write(tmp_path: Path):
    good = tmp_path / "good.yaml"
    good.write_text(GOOD, encoding="utf-8")
    assert load_recipe(["--config", str(good)], "fit").run.world_size == 4
    offloads = f"--{ARGS}.engine=fsdp1 --{ARGS}.cpu_offload=true --data.micro_batch_size=4"
    for flags in ("--trainer.max_steps=10", "--trainer.max_steps=-1 --trainer.max_time=00:01:00:00", offloads):
        load_recipe(["--config", str(good), *flags.split()], "fit")
    for flags, field, fix in CASES:
        words = re.split(r" (?=--)", flags.replace("--:", f"--{ARGS}"))
        with pytest.raises(ConfigError) as caught:
            load_recipe(["--config", str(good), *words], "fit")
        error = caught.value
        assert error.field == field.replace(":.", f"{ARGS}."), str(error)
        assert error.fix.startswith(fix.replace(":.", f"{ARGS}.")), str(error)
        assert error.allowed, str(error)
    single = tmp_path / "single.yaml"
    single.write_text("data: {train: {source: a.jsonl}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"fix:     write data.train: \[\{'source': 'a.jsonl'\}\]"):
        load_recipe(["--config", str(good), "--config", str(single)], "fit")
