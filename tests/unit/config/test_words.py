"""Words of other trainers, and values that are none, are refused with a fix that works."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from lit_fsdp.__main__ import main
from lit_fsdp.commands import _VERBS, run
from lit_fsdp.commands.parsing import parse, verb_parser
from lit_fsdp.config.parser import load_recipe, recipe_parser
from lit_fsdp.config.parser_errors import parser_error
from lit_fsdp.config.sections import leaves
from lit_fsdp.config.words import ELSEWHERE, HERE, VERBS, underscored
from lit_fsdp.convert.hf_trainer import ARGUMENTS
from lit_fsdp.convert.tables import Keep
from lit_fsdp.errors import ConfigError

BASE = ["--model.name=x", "--data.train=r", "--trainer.max_steps=200"]


def refused(act: Any, *args: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        act(*args)
    return caught.value


def test_every_word_of_another_trainer_is_answered_with_a_key_that_exists():
    known = [action.dest for action in recipe_parser()._actions]
    lora = [key for key, _ in leaves(load_recipe([*BASE, "--model.lora={}"], "fit").values) if "model.lora." in key]
    assert len(HERE) >= 120
    for theirs, ours in HERE.items():
        below = f"training_args.{theirs}"
        for written in (theirs, theirs.replace("_", "-"), below) if "." not in theirs else (theirs,):
            error = parser_error(f"unrecognized arguments: --{written} 1", known)
            assert error.fix == f"write {ours}", (written, error.fix)
        key, _, value = ours.partition(": ")
        assert key in (*known, *lora, "model.class_path"), theirs
        if value:
            values = load_recipe([*BASE, f"--{key}={value}"], "fit").values
            read, given = dict(leaves(values)), yaml.safe_load(value)
            if key in read and not key.endswith(("precision", "activation_checkpointing")):
                assert read[key] == given


def test_a_word_within_an_argument_of_the_trainer_of_transformers_is_no_section():
    known = [action.dest for action in recipe_parser()._actions]
    ends = {key.rpartition(".")[2] for key in known}
    names = [field.name for field in dataclasses.fields(TrainingArguments)]
    others = [name for name in names if name not in {*HERE, *ELSEWHERE, *ends}]
    assert {"dataloader_pin_memory", "save_only_model", "ignore_data_skip"} <= {*others}
    for name in others:
        fix = parser_error(f"unrecognized arguments: --{name} 1", known).fix
        assert fix not in ("write model.name", "write data.train", "write resume"), (name, fix)


def test_no_key_of_our_module_is_named_beside_another():
    known = ["config", "model.class_path", "model.init_args", "data", "trainer.max_steps", "seed_everything"]
    for name, fix in (("optimizer", "set it in configure_optimizers of the module"), ("learning_rat", "remove it")):
        assert parser_error(f"unrecognized arguments: --{name} 1", known).fix.startswith(fix)


def test_a_fix_is_a_flag_to_paste_with_the_users_value(capsys: pytest.CaptureFixture[str]):
    recipe = ["--config", "smollm2-135m_full_fsdp2_2xcpu"]
    rows = (
        ("--lr 1e-5", "--model.optim.lr 1e-5"),
        ("--learning-rate=1e-5", "--model.optim.lr 1e-5"),
        ("--bf16 true", "--trainer.strategy.init_args.precision bf16-mixed"),
        ("--bf16", "--trainer.strategy.init_args.precision bf16-mixed"),
        ("--use_peft", "--model.lora '{}'"),
        ("--load_best_model_at_end true", "--checkpoint.export best"),
        ("--greater_is_better=true", "--checkpoint.mode max"),
        ("--disable_tqdm true", "--trainer.enable_progress_bar false"),
        ("--adapter qlora", "--model.lora.quantize nf4"),
        ("--rl dpo", "--model lit_fsdp.PreferenceModule"),
        ("--report_to none", "--trainer.logger false"),
        ("--optim paged_adamw_8bit", "--model.optim.optimizer torchao.optim.AdamW8bit"),
        ("--lr_scheduler_type constant_with_warmup", "--model.optim.schedule constant"),
        ("--data.path rows.jsonl", "--data.train rows.jsonl"),
        ("--assistant_only_loss false", "--data.train_on_prompt true"),
        ("--setup 'module load cuda'", "--slurm.setup '[module load cuda]'"),
        ("--env HF_HOME=/x", "--slurm.env.HF_HOME /x"),
        ("--mail-type END", "--slurm.extra '[--mail-type=END]'"),
        ("--trainer.strategy.init_args.engine fsdp3", "--trainer.strategy.init_args.engine fsdp2"),
        ("--fsdp full_shard", "--trainer.strategy.init_args.sharding full_shard"),
        ("--fsdp_sharding_strategy HYBRID_SHARD", "--trainer.strategy.init_args.sharding hybrid_shard"),
        ("--data.columns prompt:question", "--data.columns '{prompt: question}'"),
        ("data.packing=true", "--data.packing true"),
        ("'--model.optim.lr 1e-5'", "--model.optim.lr 1e-5"),
        ("data.packing=true trainer.max_steps=5", "--data.packing true"),
        ("trainer.max_steps 50", "--trainer.max_steps 50"),
        ("'data.train=my file.jsonl'", "--data.train 'my file.jsonl'"),
        ("--data.validation a.jsonl", "--data.val a.jsonl"),
        ("--model.optim.optimizer paged_adamw_32bit", "--model.optim.optimizer torch.optim.AdamW"),
        ("--model.optim.wd 0.1", "--model.optim.weight_decay 0.1"),
        ("--bs 4", "--data.micro_batch_size 4"),
        ("--checkpoint.every 50", "--checkpoint.every_steps 50"),
        ("--checkpoint.dir x", "--trainer.default_root_dir x"),
        ("--model.path gpt2", "--model.name gpt2"),
        ("--model.lora.targets '[q_proj]'", "--model.lora.target_modules '[q_proj]'"),
        ("--model.lora.target_modules q_proj v_proj", "--model.lora.target_modules '[q_proj, v_proj]'"),
        ("--data.format alpaca", "--data.format instruction"),
        ("--data.val_split None", "--data.val_split null"),
        ("--trainer.max_epochs '\"3\"'", "--trainer.max_epochs 3"),
        ("--model.optim.optimizer sgd", "--model.optim.optimizer torch.optim.SGD"),
        ("--model.optim.optimizer adamw_8bit", "--model.optim.optimizer torchao.optim.AdamW8bit"),
        (
            "--trainer.strategy.init_args.activation_checkpointing true",
            "--trainer.strategy.init_args.activation_checkpointing full",
        ),
        ("--strategy fsdp", "--trainer.strategy.init_args.engine fsdp2"),
        ("--save_every_n_steps 10", "--checkpoint.every_steps 10"),
        ("--data_seed 1", "--data.seed 1"),
        ("--torch_dtype bfloat16", "--trainer.strategy.init_args.precision bf16-true"),
        ("--resume_from_checkpoint true", "--ckpt_path last"),
        ("--model.optim.name adamw", "--model.optim.optimizer torch.optim.AdamW"),
        ("--eval_batch_size 4", "--data.micro_batch_size 4"),
        ("--metric_for_best_model eval_loss", "--checkpoint.monitor val_loss"),
        (
            "--fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer",
            "--trainer.strategy.init_args.wrap '[LlamaDecoderLayer]'",
        ),
        ("--data.json_path a.jsonl", "--data.train a.jsonl"),
        ("--gradient_accumulation 4", "--trainer.accumulate_grad_batches 4"),
        ("--data.train '{source: rows.jsonl}'", "--data.train '[{source: FILE, ...}]'"),
    )
    for number, (words, fix) in enumerate(rows):
        typed = shlex.split(words)
        assert main(["fit", *recipe, *typed]) == 2
        assert capsys.readouterr().err.endswith(f"fix:     write {fix}\n"), words
        if number % 4 == 0:
            assert main(["fit", *recipe, *typed, "--print_config"]) == 2, words
        capsys.readouterr()
        if "FILE" not in fix:
            again = load_recipe([*recipe, *shlex.split(fix)], "fit")
            assert again.run.model.name
    for words, said in (
        ("--deepspeed ds.json", "run lit-fsdp convert deepspeed FILE"),
        ("--data.train=a.jsonl b.jsonl", "quote the pattern, or write --data.train '[a.jsonl, b.jsonl]'\n"),
        ("--model.optim.optimizer lion", "write its path, such as torch.optim.AdamW\n"),
        ("--do_train", "remove it: the verb"),
        ("--local_rank 0", "remove it: lit-fsdp starts the ranks"),
        ("--fsdp_config x.json", "run lit-fsdp convert hf-trainer FILE"),
        ("--dataset_config main", "save the configuration as files"),
        ("--ref_model x", "remove it: the reference is the model"),
        ("--tokenizer_type LlamaTokenizer", "remove it: the files of the model name it"),
        ("--model._component_ torchtune.models.llama3_1.llama3_1_8b", "write model.name\n"),
        ("--lr_schedular_type cosine", "if lr_scheduler_type is meant: write model.optim.schedule\n"),
        ("--mixed_precison fp16", "if mixed_precision is meant: write trainer.strategy.init_args.precision"),
        ("--use_rslora false", "remove it\n"),
        ("--load_in_8bit false", "remove it\n"),
        ("--load_in_8bit=false", "remove it\n"),
        ("--load_in_8bit true", "write model.lora.quantize: nf4; bases in 8 bits"),
        ("--model.optim.name sgd", "write --model.optim.optimizer torch.optim.SGD\n"),
        ("--checkpoint_path last", "write --ckpt_path last\n"),
        ("--template chatml", "write --data.chat_template chatml\n"),
        ("--data.template chatml", "write --data.chat_template chatml\n"),
        ("--trainer.root_dir x", "write --trainer.default_root_dir x\n"),
        ("--dtype fp32", "write --trainer.strategy.init_args.precision fp32\n"),
        ("--trainer.logger comet", "write --trainer.logger '{class_path: lightning.pytorch.loggers.CometLogger}'"),
        (
            "--trainer.logger MLflowLogger",
            "write --trainer.logger '{class_path: lightning.pytorch.loggers.MLFlowLogger}'",
        ),
        ("--zzz_every_n_steps 3", "remove it\n"),
        ("smollm2-135m_full_fsdp2_2xcpu", "write --config smollm2-135m_full_fsdp2_2xcpu"),
        ("smollm2-135m_dpo", "write --config smollm2-135m_dpo_fsdp2_2xcpu"),
        ("--data.columns={chat: messages}", "write {messages: chat}"),
        ("--data.columns={prompt:question}", "put a space after each colon: {KEY: COLUMN}"),
        ("--model.lora lora.yaml", "write its keys below model.lora in a file given with --config"),
        ("--eval_steps 10", "write --trainer.val_check_interval 10 (in micro-batches: multiply by"),
        # values with another meaning, and what is not wanted
        ("--min_lr 1e-6", "write model.optim.min_lr_ratio\n"),
        ("--bf16 false", "remove it\n"),
        ("--packing", "write --data.packing true\n"),
        ("--trainer.precision bf16", "set only one: write --trainer.strategy.init_args.precision mixed\n"),
        ("--mixed_precision fp16", "write --trainer.strategy.init_args.precision 16-mixed\n"),
        ("--lora_target_modules q_proj v_proj", "write --model.lora.target_modules '[q_proj,v_proj]'\n"),
        ("--model.optim.decay_ratio 0.5", "write --model.optim.schedule wsd\n"),
        ("--trainer.limit_train_batches 0.5", "set trainer.max_steps\n"),
        ("--model.optim.class_path torchao.optim.AdamW4bit", "write torchao.optim.AdamW8bit\n"),
        ("--trainer.strategy.init_args.precision bf16", "write --trainer.strategy.init_args.precision bf16-mixed\n"),
        ("--trainer.strategy.init_args.precision fp16", "write --trainer.strategy.init_args.precision 16-mixed\n"),
    ):
        assert main(["fit", *recipe, *([words] if "{" in words else words.split())]) == 2
        assert f"fix:     {said}" in capsys.readouterr().err, words
    assert main(["generate", "runs/my", "Hi there"]) == 2
    assert capsys.readouterr().err.endswith("write lit-fsdp generate --model runs/my --prompt 'Hi there'\n")
    assert main(["export", "runs/x", "y"]) == 2
    assert capsys.readouterr().err.endswith("fix:     write lit-fsdp export --ckpt runs/x --out y\n")
    for words, fix in (("generate runs/my run", "--model 'runs/my run'"), ("export runs/x", "--ckpt runs/x")):
        verb, _, path = words.partition(" ")
        assert main([verb, path]) == 2
        assert capsys.readouterr().err.endswith(f"fix:     write lit-fsdp {verb} {fix}\n")


def test_all_keys_that_do_not_exist_are_listed_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rate: 1e-5\ntrainer: {max_epoch: 3}\nmodel: {name: gpt2, lora_rank: 8}\n")
    ours = ["  also:    trainer.max_epoch: write trainer.max_epochs", "  also:    model.lora_rank: write model.lora.r"]
    for words, others in (
        ("fit --bf16 true --warmup_ratio 0.1", 1),
        ("plan --memory 80 --bf16 true", 0),  # --memory is a flag of the verb
        ("slurm render --nodes 2 --bf16 true", 0),
    ):
        assert main([*words.split(), "--config", str(recipe)]) == 2
        said = capsys.readouterr().err.splitlines()
        assert said[0] == "error: bf16: got a key that does not exist"
        assert said[2] == "  fix:     write --trainer.strategy.init_args.precision bf16-mixed"
        assert [line for line in said[3:] if "warmup_ratio" not in line] == [
            *ours,
            "  also:    learning_rate: write model.optim.lr",
        ]
        assert len(said) == 6 + others
    recipe.write_text("data.foo: 3\ntrainer: {max_epoch: 2}\ndata: {train: [{source: x, bar: 1}], zzz: 1}\n")
    assert main(["fit", "--config", str(recipe), "word"]) == 2
    said = capsys.readouterr().err
    assert all(f"{key}: " in said for key in ("word", "data.foo", "trainer.max_epoch", "data.train.bar", "data.zzz"))
    assert main(["fit", "--modle.name", "gpt2"]) == 2
    assert "also" not in capsys.readouterr().err


def test_what_is_converted_and_what_is_said_agree():
    """The table of ``lit-fsdp convert hf`` has the same keys of TrainingArguments."""
    both = {key: row.to for key, row in ARGUMENTS.items() if isinstance(row, Keep) and key in HERE}
    assert len(both) >= 15
    for key, to in both.items():
        ours = HERE[key].partition(":")[0].removeprefix("trainer.strategy.init_args.")
        assert ours in (to, to.removesuffix(".mode")), key


def test_yaml_of_another_trainer_is_answered_too(tmp_path: Path):
    for text, fix in (
        ("training_args: {learning_rate: 1e-4}", "write model.optim.lr"),
        ("train: {epochs: 3}", "write trainer.max_epochs"),
        ("num_epochs: 3", "write trainer.max_epochs"),
        ("dataset: {packed: true}", "write data.packing"),
        ("model: gpt2", "write --model.name gpt2"),
    ):
        (tmp_path / "theirs.yaml").write_text(text)
        assert refused(load_recipe, ["--config", str(tmp_path / "theirs.yaml"), *BASE[1:]], "fit").fix == fix


def test_wrong_flags_and_values():
    for name, near in (("LitLogger", ""), ("WandLogger", "WandbLogger")):  # the first is not a subclass
        text = f"Import path lightning.pytorch.loggers.{name} does not correspond to a subclass of Logger"
        found = parser_error(f'Parser key "trainer.logger": {text}', [])
        assert found.fix == (f"write lightning.pytorch.loggers.{near}" if near else "")
    wandb = "write trainer.logger: {class_path: lightning.pytorch.loggers.WandbLogger}"
    for words, field, fix in (
        ("--model gpt2", "model", "write --model.name gpt2"),
        ("--model.lr 1e-4", "model.lr", "write model.optim.lr"),
        ("--model PreferenceModule", "model", "write --model lit_fsdp.PreferenceModule"),
        ("--model my_package:Net", "model", "write --model my_package.Net"),
        ("--model Qwen/Qwen2.5-0.5B", "model", "write --model.name Qwen/Qwen2.5-0.5B"),
        ("--data rows.jsonl", "data", "write --data.train rows.jsonl"),
        ("rows.jsonl", "rows.jsonl", "write --data.train rows.jsonl"),
        ("--model.lora true", "model.lora", "write model.lora: {}"),
        ("--model.lora.r null", "model.lora.r", "remove r"),
        ("--model.lora.target_modules q_proj,v_proj", "model.lora.target_modules", "write [q_proj,v_proj]"),
        ("--model.freeze a,b", "model.freeze", "write model.freeze: [a,b]"),
        ("--model.optim adamw", "model.optim", "write --model.optim.class_path torch.optim.AdamW"),
        ("--resume true", "resume", "write --ckpt_path last"),
        ("--resume", "resume", "write --ckpt_path last"),
        ("--trainer.max_steps", "trainer.max_steps", "write --trainer.max_steps VALUE"),
        ("--nodes 2", "nodes", "write trainer.num_nodes"),
        ("--allow-imports=a b", "--allow-imports", "write --allow-imports a --allow-imports b"),
        ("--trainer.logger wandb", "trainer.logger", wandb),
        ("--trainer.logger [wandb]", "trainer.logger", wandb),
        ("--data.columns q,a", "data.columns", "write data.columns: {prompt: COLUMN, completion: COLUMN}"),
        ("--checkpoint.every_steps foo", "checkpoint.every_steps", None),
        ("--checkpoint 5", "checkpoint", "write --checkpoint.KEY VALUE"),
        ("--trainer {max_step: 3}", "trainer.max_step", "write trainer.max_steps"),
        ("--trainer 3", "trainer", "write --trainer.KEY VALUE"),
    ):
        error = refused(load_recipe, [*BASE, *words.split(maxsplit=1)], "fit")
        assert (error.field, fix or error.fix) == (field, error.fix), str(error)
        dumped = r"Namespace|NestedArg|collections|typing|<class|Parser key|Unable to|path but"
        assert not re.search(dumped, str(error)), str(error)


def test_what_lightning_takes_is_said_without_names_of_python():
    list_of = (
        "- Expected a path but foo either not accessible or invalid\n - Expected a <class 'collections.abc.Iterable'>"
    )
    message = f'Parser key "trainer.logger":\n{list_of}\n - Expected a dot import path string: foo\nGiven value: {{}}'
    for value, given in (
        ("foo", "foo"),
        ("Namespace(a='b', c=Namespace(d=1))", "{a: 'b', c: {d: 1}}"),
        ("NestedArg(key='x', val='3')", "3"),
    ):
        error = parser_error(message.format(value), ["trainer.logger"])
        assert (error.given, error.allowed) == (given, "a list | a class, as {class_path: NAME, init_args: {...}}")


def test_a_function_is_given_by_its_import_path():
    expected = 'Parser key "batch_size_fn":\n Expected a dot import path string: len\nGiven value: [{}]'
    error = parser_error(f'Parser key "trainer.callbacks":\n{expected}', ["trainer.callbacks"])
    assert (error.field, error.given) == ("trainer.callbacks.batch_size_fn", "len")
    assert error.allowed == "the import path of a function or class"


def test_verbs_and_their_flags_are_answered_with_those_that_exist():
    for theirs, ours in {**VERBS, "fine-tune": "fit"}.items():
        assert (theirs in _VERBS, ours.split()[0] in _VERBS) == (False, True)
        assert refused(run, [theirs]).fix == f"lit-fsdp {ours} ..."
    assert refused(run, ["export", "--config", "x"]).fix == "write --ckpt"
    lacking = refused(run, ["export", "--out", "x"])
    assert (lacking.given, lacking.fix[:30]) == ("no value for --ckpt", "for example: lit-fsdp export -")
    assert refused(run, ["export", "--out", "x", "--zzz"]).fix == "see lit-fsdp export --help"
    fixes = {"bfloat16": "write --dtype bf16", "float32": "write --dtype fp32", "no": "write one of these values"}
    for theirs, fix in fixes.items():
        error = refused(run, ["export", "--ckpt", "x", "--out", "x", "--dtype", theirs])
        assert (error.field, error.given, error.fix) == ("lit-fsdp export --dtype", theirs, fix)
        assert error.allowed == "bf16, fp16, fp32"


def test_dashes_and_underscores_are_the_same_in_names_and_stay_in_values():
    words = ["--ckpt-path=a-b", "--data.max-seq-length", "64", "--trainer.strategy.init-args.shard-degree=-1"]
    found = load_recipe([*BASE, *words, "--data.val.my-set", "v-1.jsonl"], "fit")
    assert (found.values["ckpt_path"], found.run.data.max_seq_length) == ("a-b", 64)
    assert found.run.data.val == {"my-set": "v-1.jsonl"}
    parser = verb_parser("x", "", "")
    parser.add_argument("--push-to-hub")
    parser.add_argument("--max_shard_gib")
    for flags in (["--push_to_hub=a-b", "--max-shard-gib", "c-d"], ["--push-to-hub", "a-b", "--max_shard_gib=c-d"]):
        assert vars(parse(parser, flags)) == {"push_to_hub": "a-b", "max_shard_gib": "c-d"}
    assert [underscored(word) for word in ("--", "-c", "a-b", "--data.val-split")] == [
        "--",
        "-c",
        "a-b",
        "--data.val_split",
    ]
