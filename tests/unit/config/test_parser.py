"""Files and flags become a checked recipe: what is merged, kept as written, refused, and with which words."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import yaml
from datasets import Dataset
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from transformers import GPT2Config

import lit_fsdp
from lit_fsdp import CausalLMDataModule, CausalLMModule, fsdp_strategy
from lit_fsdp.cli import _Reader, resolved_recipe
from lit_fsdp.config.command_line import RUN_FOLDER, read_command_line
from lit_fsdp.config.data import DataConfig, accumulation_steps
from lit_fsdp.config.model import ModelConfig, OptimConfig, PreferenceConfig, PreferenceModelConfig, schedule_factor
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.config.run import FACTORY
from lit_fsdp.config.sections import build
from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.config.yaml_files import load_yaml
from lit_fsdp.errors import ConfigError
from lit_fsdp.host import say_once
from tests.runs import check_recipe

ARGS = "trainer.strategy.init_args"
BASE = """
trainer: {devices: 2, max_steps: 20, strategy: {class_path: lit_fsdp.fsdp_strategy, init_args: {wrap: [Block]}}}
model: {name: some-model, optim: {lr: 1e-4, warmup_steps: 2}}
data: {train: rows.jsonl, global_batch_size: 16, micro_batch_size: 2}
"""


@pytest.fixture
def load(tmp_path: Path):
    """Load texts as files, in their order, and flags."""

    def load(*words: str, verb: str = "fit", base: str = BASE, **files: str) -> Any:
        texts = {"base": base, **files}
        for name, text in texts.items():
            (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        configs = [f"--config={tmp_path / name}.yaml" for name in texts]
        return load_recipe([*words, *configs], verb)

    return load


def refused(act: Any, *args: Any, **kwargs: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        act(*args, **kwargs)
    return caught.value


def test_later_files_win_flags_are_last_and_mappings_merge(load: Any) -> None:
    found = load(
        *("--model.optim.lr", "3e-4", "--model.freeze+=a.*", "--model.freeze+", "b"),
        second="trainer: {strategy: {init_args: {wrap: {min_num_params: 1e6}}}}\nmodel: {optim: {lr: 1, eps: 1e-6}}",
        third="trainer: {strategy: {init_args: {wrap: {max_root_share: 1.0}}}}",
    )
    run = found.run
    assert run.model.optim == OptimConfig(lr=3e-4, warmup_steps=2, eps=1e-6)
    assert (run.strategy.wrap_config.min_num_params, run.strategy.wrap_config.max_root_share) == (1e6, 1.0)
    assert run.model.freeze == ["a.*", "b"]
    assert run.trainer["default_root_dir"] == "runs/base"
    assert found.values["trainer"]["strategy"]["class_path"] == FACTORY
    assert [path.stem for path in found.files] == ["base", "second", "third"]


def test_values_arrive_as_written(load: Any) -> None:
    text = "trainer: {max_time: 10:00:00:00}\ndata: {cache_dir: 007, val: 2024-01-01}\nslurm: {time: 12:00:00}"
    for found in (load(more=text), load("--trainer.max_time", "10:00:00:00", "--data.cache_dir", "007", more="{}")):
        assert (found.run.trainer["max_time"], found.run.data.cache_dir) == ("10:00:00:00", "007")
    assert (load(more=text).run.slurm.time, load(more=text).run.data.val) == ("12:00:00", "2024-01-01")


def test_loggers_write_to_the_run_folder_unless_told_otherwise(load: Any) -> None:
    name = "lightning.pytorch.loggers.CSVLogger"
    own, other = {"class_path": name, "init_args": {"save_dir": "logs"}}, {"class_path": "WandbLogger"}
    for given, folders in (
        (name, [RUN_FOLDER]),
        ({"class_path": "TensorBoardLogger", "init_args": {"name": "x"}}, [RUN_FOLDER]),
        ({"class_path": "mine.CSVLogger"}, [None]),
        (own, ["logs"]),
        ([other, {"class_path": "TensorBoardLogger"}, own], [None, RUN_FOLDER, "logs"]),
        ("false", []),
    ):
        text = json.dumps(given)
        for found in (load(f"--trainer.logger={text}"), load(more=f"trainer: {{logger: {text}}}")):
            loggers = found.run.trainer["logger"]
            loggers = loggers if isinstance(loggers, list) else [loggers] if isinstance(loggers, dict) else []
            assert [logger.get("init_args", {}).get("save_dir") for logger in loggers] == folders
    again = load(f"--trainer.logger={name}", more=f"trainer: {{logger: {json.dumps(own)}}}").run.trainer["logger"]
    assert again == name  # which keeps the save_dir of the file where it is built
    files = ["--config", "recipes/quickstart.yaml"]
    words = read_command_line([*files, "--trainer.logger.class_path", name]).short_words()
    assert words[-3:] == ["--trainer.logger.class_path", name, f"--trainer.logger.init_args.save_dir={RUN_FOLDER}"]
    assert read_command_line([*files, "--trainer.logger", "CSVLogger"]).short_words()[-1] == (
        '--trainer.logger={"class_path": "CSVLogger", "init_args": {"save_dir": "{run folder}"}}'
    )


def test_python_callers_see_every_key_and_its_text() -> None:
    for made, section in (
        (lit_fsdp.CausalLMModule, ModelConfig),
        (lit_fsdp.PreferenceModule, PreferenceModelConfig),
        (lit_fsdp.CausalLMDataModule, DataConfig),
        (lit_fsdp.fsdp_strategy, StrategyConfig),
    ):
        names = [field.name for field in dataclasses.fields(section)]
        # Lightning's load_from_checkpoint drops unknown arguments of a class without **kwargs
        assert list(inspect.signature(made).parameters) == [*names, *["kwargs"] * isinstance(made, type)]
        text = inspect.getdoc(made.__init__ if isinstance(made, type) else made) or ""
        assert [name for name in names if f"    {name}: " not in text] == []
    assert list(inspect.signature(OwnModule).parameters) == ["width"]


class OwnModule(lit_fsdp.CausalLMModule):
    """A subclass has arguments of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(name="x")


def test_words_of_lightning(load: Any) -> None:
    for flags, mode, batch in (
        (["--trainer.precision=bf16-mixed"], "mixed", 16),
        (["--trainer.precision=16-mixed"], "fp16_mixed", 16),
        (["--trainer.precision=32-true"], "fp32", 16),
        ([f"--{ARGS}.precision=bf16-true"], "low_precision", 16),
        (["--trainer.precision=32-true", f"--{ARGS}.precision=fp32"], "fp32", 16),
        (["--trainer.accumulate_grad_batches=3", "--data.global_batch_size=null"], "mixed", None),
        (["--trainer.accumulate_grad_batches=4"], "mixed", 16),
    ):
        run = load(*flags).run
        assert (run.strategy.precision_config.mode, run.trainer["precision"]) == (mode, None)
        assert run.data.global_batch_size == batch
        accumulate = run.trainer["accumulate_grad_batches"]
        assert accumulation_steps(run.data, 2, accumulate) == (3 if batch is None else 4)


def test_somebody_elses_classes_are_left_to_lightning(load: Any) -> None:
    text = "model: {class_path: my.Module, init_args: {optim: {class_path: my.Optim}}}\ntrainer: {strategy: ddp}"
    run = load("--data=my.Rows", base=text).run
    assert run.foreign == {"model", "data", "trainer.strategy"}
    folder = load("--model.name", "model", "--data.train", "data").run  # values, not keys
    assert (folder.foreign, folder.model.name, folder.data.train) == (frozenset(), "model", "data")
    ours = load(more="model: {class_path: lit_fsdp.CausalLMModule, init_args: {name: other}}").run.model
    assert (ours.name, ours.optim.lr) == ("other", 1e-4)
    unknown = "trainer: {strategy: {class_path: torch.Nope}}"
    assert "has no attribute 'Nope'" in refused(load, more=unknown).given


def test_any_optimizer(load: Any) -> None:
    text = "model: {optim: {class_path: torch.optim.SGD, init_args: {momentum: 0.9, lr: 0.1}}}"
    optim = load("--model.optim.init_args.nesterov=true", more=text).run.model.optim
    assert (optim.optimizer, optim.lr, optim.warmup_steps) == ("torch.optim.SGD", 0.1, 2)
    assert optim.optimizer_args == {"momentum": 0.9, "nesterov": True}
    error = refused(load, "--model.optim.class_path=timm.optim.Lion")
    assert error.fix == "add --allow-imports timm, or set LIT_FSDP_ALLOW_IMPORTS=timm"
    words = ("--model.optim.class_path=timm.optim.Lion", "--allow-imports", "timm")
    assert load(*words).run.model.optim.optimizer == "timm.optim.Lion"


def test_of_an_optimizers_argument_and_the_field_the_later_holds(load: Any) -> None:
    args = "model: {optim: {class_path: torch.optim.SGD, init_args: {lr: 0.1, weight_decay: 0.3}}}"
    for words, files, wanted in (
        (["--model.optim.lr", "0.02"], {"more": args}, 0.02),
        ([], {"more": args, "most": "model: {optim: {lr: 0.03}}"}, 0.03),
        ([], {"more": "model: {optim: {lr: 0.03}}", "most": args}, 0.1),
        (["--model.optim.lr=0.5", "--model.optim.init_args.lr=0.6"], {}, 0.6),
    ):
        optim = load(*words, **files).run.model.optim
        assert optim.lr == wanted
        assert not files or optim.weight_decay == 0.3
    both = "model: {optim: {lr: 0.2, optimizer_args: {lr: 0.1}}}"
    assert refused(load, more=both).given == "0.2 and, in the optimizer's arguments, 0.1"
    saved = "model: {optim: {lr: 1.0e-05, optimizer_args: {lr: 0.1}}}"  # the default, as older recipes have it
    assert load(more=saved).run.model.optim == load(more="model: {optim: {lr: 0.1}}").run.model.optim
    assert load('--model={"optim": {"lr": 5}}', more=args).run.model.optim.lr == 5
    assert load(more=args).values["model"]["optim"]["optimizer_args"] is None


def test_flags_with_mappings_and_keys_below_them(load: Any) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 2048}
    more = f"model: {{config_overrides: {{rope_parameters: {json.dumps(rope)}}}, lora: {{quantize: nf4}}}}"
    for words in (["--model.config_overrides.rope_parameters.factor", "8"],
                  ["--model.config_overrides.x=1", "--model.config_overrides.rope_parameters.factor=8"]):  # fmt: skip
        found = load(*words, more=more).run.model.config_overrides
        assert found == {"rope_parameters": rope | {"factor": 8}} | ({"x": 1} if words[1:2] != ["8"] else {})
    replaced = load('--model.config_overrides={"x": {"y": 1}}', "--model.config_overrides.x.z", "2", more=more)
    assert replaced.run.model.config_overrides == {"x": {"y": 1, "z": 2}}
    start = '--model={"config_overrides": {"rope_parameters": {"factor": 2, "beta": 3}, "z": 9}}'
    found = load(start, "--model.config_overrides.rope_parameters.factor=8", more=more).run.model
    assert (found.config_overrides, found.lora.quantize) == (
        {"rope_parameters": {"factor": 8, "beta": 3}, "z": 9}, "nf4",
    )  # fmt: skip
    for reset in ({"most": "model: {config_overrides: {}}"}, {"most": "model: {config_overrides: null}"}):
        assert load("--model.config_overrides.k.d=1", more=more, **reset).run.model.config_overrides == {"k": {"d": 1}}
    for text in ("{% if a %}", "a: b: c", "😀"):
        assert load(f"--model.config_overrides.x={text}").run.model.config_overrides == {"x": text}
    assert refused(load, "--model.config_overrides.x", "--trainer.max_steps=5").given == "no value"
    assert refused(load, "--data.train", "--trainer.max_steps=5").fix == "write --data.train VALUE"  # also appends
    assert load("--model.lora.quantize=null", more=more).run.model.lora.quantize is None
    optim = load('--model.optim={"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9}}').run.model.optim
    assert (optim.optimizer, optim.optimizer_args) == ("torch.optim.SGD", {"momentum": 0.9})
    assert load("--trainer", '{"strategy": "ddp", "max_steps": 7}').values["trainer"]["strategy"] == "ddp"
    ours = "trainer: {strategy: {class_path: lit_fsdp.fsdp_strategy, init_args: {engine: fsdp1}}}"
    assert load(one="trainer: {strategy: ddp}", two=ours).run.strategy.engine == "fsdp1"
    dotted = "model:\n  lora: {peft_args: {bias: none}, peft_args.rank_pattern.q_proj: 8}"
    assert load(more=dotted).run.model.lora.peft_args == {"bias": "none", "rank_pattern": {"q_proj": 8}}
    error = refused(load, more="slurm:\n  setup: |\n    module load cuda\n    source venv/bin/activate\n")
    assert error.fix == "write slurm.setup: [module load cuda, source venv/bin/activate]"
    error = refused(load, more="model: {freeze: lm_head}")
    assert (error.given, error.fix) == ("lm_head", "write model.freeze: [lm_head]")
    assert load(more='{\n\t"model": {"optim": {"lr": 1e-4}}\n}').run.model.optim.lr == 1e-4


def test_keys_over_a_word_are_refused_and_null_is_no_value(load: Any) -> None:
    word = "trainer: {strategy: {init_args: {activation_checkpointing: full, precision: fp32}}}"
    key = "trainer.strategy.init_args.activation_checkpointing"
    error = refused(load, f"--{key}.offload_activations=true", more=word)
    assert (error.field, error.given) == (key, "offload_activations over full, which would be lost")
    assert error.fix == f"write mode too: {key}.mode: full"
    found = load(f"--{key}.mode=full", f"--{key}.offload_activations=true", more=word).run.strategy.activation_config
    assert (found.mode, found.offload_activations) == ("full", True)
    other = "trainer: {strategy: {init_args: {precision: {reduce_dtype: bf16}}}}"
    assert refused(load, one=word, two=other).field == "trainer.strategy.init_args.precision"
    assert load(one=other).run.strategy.precision_config.reduce_dtype == "bf16"  # over the default
    for field in ("model.optim.schedule", "data.truncation", "data.supervise", "trainer.strategy.init_args.engine"):
        error = refused(load, more=f"{field}:\n")
        assert (error.field, error.given) == (field, "null"), field


def test_of_validation_rows_and_a_split_the_one_given_later_holds(load: Any) -> None:
    def held(*words: str, **files: str) -> tuple[Any, Any]:
        data = load(*words, **files).run.data
        return data.val, data.val_split

    val, split = "data: {val: v.jsonl}", "data: {val_split: 0.01}"
    assert held("--data.val_split", "0.01", more=val) == (None, 0.01)
    assert held("--data.val=v.jsonl", more=split) == ("v.jsonl", None)
    assert held(one=val, two=split) == (None, 0.01)
    for words in (["--data.val.easy", "v.jsonl"], ["--data.val+", "v.jsonl"], ["--data", '{"val": "v.jsonl"}']):
        assert held(*words, more=split)[1] is None, words
    assert held(one=split, two="data: {val+: [v.jsonl]}")[1] is None
    assert held(one=split, two=val) == ("v.jsonl", None)
    assert refused(load, more="data: {val: v.jsonl, val_split: 0.01}").field == "data.val_split"


def test_files_and_rows_that_are_none(load: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("- a\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "colon.yaml").write_text("trainer:\n  devices: 1\n  max_epochs 2\nmodel:\n  name: x\n")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    (tmp_path / "twice.yaml").write_text("trainer: {max_steps: 5}\nmodel: {}\ntrainer: {devices: 1}\n")
    for name, needle in (
        ("recip.yaml", "recipe.yaml"),
        ("recipe.yaml", "list"),
        ("broken.yaml", "not YAML"),
        ("colon.yaml", "could not find expected ':' in line 3"),
        ("empty.yaml", "which is empty"),
        ("twice.yaml", "(key trainer occurs twice in line 3)"),
    ):
        assert needle in str(refused(load_recipe, ["--config", str(tmp_path / name)], "fit"))
    # a dotted key belongs to its section, in any order
    for text in ("data.train: x\ndata: {val: y}\n", "data: {val: y}\ndata.train: x\n", "data: {train: x}\ndata.val: y"):
        assert load_yaml(text) == {"data": {"train": "x", "val": "y"}}
    dotted = "model.optim.lr: 5\nmodel: {optim: {eps: 1}, optim.beta1: 2}\ndata.val: {a.b: x}\nmodel.name: n"
    wanted = {"name": "n", "optim": {"lr": 5, "eps": 1, "beta1": 2}}
    assert load_yaml(dotted) == {"model": wanted, "data": {"val": {"a.b": "x"}}}
    for text in (
        "data: {train: x}\ndata.train: y",
        "model: {optim.lr: 1, optim: {lr: 2}}",
    ):
        with pytest.raises(ConfigError, match="two values"):
            load_yaml(text)
    assert load_yaml("trainer:\nmodel: {optim: , lora: }\n") == {"model": {"lora": None}}  # sections without keys
    (tmp_path / "config.yaml").write_text("config: other.yaml\n")
    assert refused(load_recipe, ["--config", str(tmp_path / "config.yaml")], "fit").field == "config"
    (tmp_path / "config.yaml").write_text("model: {freeze: [a], freeze+: [b]}\n")
    assert "freeze occurs twice" in str(refused(load_recipe, ["--config", str(tmp_path / "config.yaml")], "fit"))
    # what is merged may be overridden, also if it is merged again, and if it has one letter
    merged = "a: &a {r: 1, alpha: 2}\nb: &b {<<: *a, r: 3, alpha: 4}\nc: {<<: *b}\nd: {<<: [*b, *a], alpha: 5}\n"
    found = load_yaml(merged)
    assert found["b"] == found["c"] == {"r": 3, "alpha": 4}
    assert found["d"] == {"r": 3, "alpha": 5}
    for verb, split in (("fit", "train"), ("validate", "val"), ("test", "test")):
        assert refused(load, "--data.train=null", verb=verb).field == f"data.{split}"


def test_python_callers_are_told_the_same() -> None:
    made = build(ModelConfig, {"name": "x", "optim": {"lr": 1e-3}, "lora": {}}, "model")
    assert (made.optim.lr, made.lora.r) == (1e-3, 16)
    assert build(ModelConfig, {"optim": made.optim}, "model").optim == made.optim
    assert refused(build, ModelConfig, {"optim": {"lrr": 1}}, "model").fix == "write model.optim.lr"
    assert refused(build, ModelConfig, {"learning_rate": 1}, "model").fix == "write model.optim.lr"
    assert refused(build, ModelConfig, {"model": "gpt2"}, "model").fix == "write model.name"
    assert refused(fsdp_strategy, "full_shard").fix == "write fsdp_strategy(sharding='full_shard')"
    assert refused(fsdp_strategy, "fsdp1").fix == "write fsdp_strategy(engine='fsdp1')"
    recipe = {"trainer": {"max_steps": 1}, "model": {"name": "x"}, "data": {"train": "r"}}
    assert check_recipe(recipe, "fit").num_nodes == 1


def test_paths_are_expanded_once(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("ROWS", "/rows")
    text = (
        "trainer: {default_root_dir: ~/run, logger: {class_path: X, init_args: {save_dir: ~/logs}}}\n"
        "model: {name: ~/m, add_tokens: ['~']}\ndata: {train: ['${ROWS}/a', {source: $ROWS/b}]}\nslurm: {setup: [cd ~]}"
    )
    found = load("--ckpt_path=~/run/x", more=text)
    run = found.run
    assert (run.trainer["default_root_dir"], run.model.name) == ("/home/somebody/run", "/home/somebody/m")
    assert run.trainer["logger"]["init_args"]["save_dir"] == "/home/somebody/logs"
    assert (run.data.train[0], run.data.train[1].source) == ("/rows/a", "/rows/b")
    assert (run.model.add_tokens, run.slurm.setup) == (["~"], ["cd ~"])
    assert found.values["ckpt_path"] == "/home/somebody/run/x"


SMALL = "model: {miniature: true}\ntrainer: {accelerator: cpu}"


def test_a_miniature_replaces_what_a_cpu_lacks(load: Any, tmp_path: Path) -> None:
    for given, changed in (
        ({"precision": "fp8"}, {"precision": "auto"}),
        ({"engine": "fsdp1", "cpu_offload": "true"}, {"cpu_offload": False}),
        ({"process_group_backend": "cpu:gloo,cuda:nccl"}, {"process_group_backend": None}),
        ({"sharding": "hybrid_shard_zero2"}, {"replicate_degree": 2}),
        ({"sharding": "hybrid_shard", "shard_degree": "8"}, {"shard_degree": -1, "replicate_degree": 2}),
        ({"engine": "fsdp2", "cpu_offload": "true"}, {"cpu_offload": True}),
    ):
        args = vars(load(*(f"--{ARGS}.{key}={value}" for key, value in given.items()), small=SMALL).run.strategy)
        assert {key: args[key] for key in changed} == changed
    batches = ("--data.global_batch_size=8", "--trainer.accumulate_grad_batches=3")
    assert load(*batches, small=SMALL).run.trainer["accumulate_grad_batches"] is None
    wrap = load(f"--model.name={tmp_path}", small=SMALL).run.strategy.wrap_config
    assert (wrap.classes, wrap.max_root_share) == (["Block"], 1.0)  # a vocabulary on disk may stay in the root


def test_a_miniature_says_so_in_one_line(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    say_once.cache_clear()
    load("--model.optim.warmup_steps=300", small=SMALL)
    assert capsys.readouterr().err == "miniature: values replaced: 1 (--verbose lists them)\n"
    load("--verbose", "--model.optim.warmup_steps=300", small=SMALL)
    assert capsys.readouterr().err == "miniature: model.optim.warmup_steps: 300 → 1 (20 steps)\n"


def test_switches_are_no_part_of_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIT_FSDP_ALLOW_IMPORTS", "one,two")
    line = read_command_line(["--debug", "--allow-imports=three", "--model.name", "x", "--print_config"])
    assert (line.debug, line.verbose, line.print_config) == (True, False, True)
    assert (line.allow_imports, line.words) == (["one", "two", "three"], ["--model.name", "x"])


WORDS = ["--data.train", "generated:8", "--trainer.max_steps", "2"]


PAIRS, OURS, NET = "lit_fsdp.PreferenceModule", "lit_fsdp.CausalLMModule", "tests.unit.config.test_parser.Net"
BETA = "model: {preference: {beta: 0.7}}"


class Net(LightningModule):
    def __init__(self, hidden: int = 4, name: str = "") -> None:
        super().__init__()


class MyData(CausalLMDataModule):
    pass


def net(hidden: int = 3) -> BoringModel:
    return BoringModel()


class Longer(lit_fsdp.PreferenceModule):
    def __init__(self, hidden: int = 4, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def _words(*parts: str) -> list[str]:
    """Texts of files, and flags, as the words of a command line."""
    words = list(WORDS)
    for part in parts:
        if not part.startswith("-"):
            Path(f"{len(words)}.yaml").write_text(part)
        words += part.split(maxsplit=1) if part.startswith("-") else ["--config", f"{len(words)}.yaml"]
    return words


def _both(*parts: str) -> list[dict[str, Any]]:
    """What the check and the run read."""
    return [read(_words(*parts), "fit") for read in (lambda *given: load_recipe(*given).values, resolved_recipe)]


@pytest.mark.parametrize(
    "parts",
    [
        (f"model: {{class_path: {PAIRS}, init_args: {{name: x, preference: {{beta: 0.7}}}}}}",),
        ("model: {name: x}", BETA, f"model: {{class_path: {PAIRS}}}"),
        (f"model: {{class_path: {PAIRS}, init_args: null}}", "model: {init_args: {name: x}}", BETA),
        (f"model: {PAIRS}", BETA, "--model.name x"),
        (BETA, f"model: {{class_path: {PAIRS}, name: x}}", "--model.optim.lr 1e-5"),
        (BETA, "--model.init_args.name x", f"--model {PAIRS}"),
        (f"--model={PAIRS}", BETA, '--model.init_args {"name": "x"}'),
        ("--model.preference.beta 0.7", f"--model.class_path {PAIRS}", "--model.name=x"),
        (f"model: {{class_path: {OURS}, init_args: {{name: x}}}}", BETA, f'--model {{"class_path": "{PAIRS}"}}'),
    ],
)
def test_a_class_and_its_arguments_are_one_meaning_in_any_order(parts: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for values in _both(*parts):
        Path("saved.yaml").write_text(yaml.safe_dump({"model": values["model"]}))
        again = load_recipe([*WORDS, "--config=saved.yaml"], "fit").run
        assert again.model == PreferenceModelConfig(name="x", preference=PreferenceConfig(beta=0.7))
        assert (values["data"]["format"], values["model"]["class_path"]) == ("preference", PAIRS)


def test_what_another_class_took_is_left_out_and_said(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_FSDP_ALLOW_IMPORTS", "tests")
    recipe, data = "model: {name: x, optim: {lr: 1e-3}}", "data: {class_path: lit_fsdp.CausalLMDataModule, train: r}"
    for parts in (
        ["--model.hidden=9", recipe, f"model: {NET}"],
        [f"--model={NET}", recipe, "--model.init_args.hidden 9"],
    ):
        say_once.cache_clear()
        net = resolved_recipe(_words(*parts, data), "fit")
        assert net["model"] == {"class_path": NET, "init_args": {"hidden": 9, "name": "x"}}
        assert capsys.readouterr().err == f"model: {NET} does not accept optim; ignored\n"
    words = _words("--model.hidden=9", recipe, f"--model={NET.replace('Net', 'Longer')}", BETA)
    longer = resolved_recipe(words, "fit")["model"]["init_args"]
    assert (longer["hidden"], longer["name"], longer["optim"]["lr"]) == (9, "x", 1e-3)
    pairs = f"model: {{class_path: {PAIRS}, init_args: {{name: x, preference: {{beta: 0.7}}}}}}"
    for values in _both(pairs, f"model: {OURS}"):
        assert "class_path" not in values["model"]
    assert capsys.readouterr().err == f"model: {OURS} does not accept preference; ignored\n"
    for parts in ((recipe, BETA), (f"--model={NET}", "--model.optim.lr=1"), ("model: {hiden: 1}", f"--model={NET}")):
        assert "does not exist" in refused(resolved_recipe, _words(*parts), "fit").given


@pytest.mark.parametrize("model", ["", f"--model={PAIRS}", f"--model={NET.replace('Net', 'Longer')}"])
def test_a_value_that_is_the_name_of_a_file_stays_one(model: str, tmp_path: Path, monkeypatch: Any):
    """jsonargparse would read the files, as their arguments also accept dataclasses or lists of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_FSDP_ALLOW_IMPORTS", "tests")
    Path("plain.txt").write_text("A text about rivers.\nAnother one.\n")
    Path("list.json").write_text('["rows.jsonl"]')
    Path("empty.jsonl").write_text("")
    Path("full").write_text("mode: none")
    Path("recipe.yaml").write_text("data: {val: plain.txt, test: list.json, predict: empty.jsonl}")
    words = [
        *WORDS,
        "--model.name=x",
        "--data.train",
        "plain.txt",
        "--config",
        "recipe.yaml",
        *([model] if model else []),
    ]
    words.append("--trainer.strategy.init_args.activation_checkpointing=full")
    for values in (load_recipe(words, "fit").values, resolved_recipe(words, "fit")):
        data = values["data"].get("init_args", values["data"])
        assert [data[name] for name in ("train", "val", "test", "predict")] == [
            "plain.txt", "plain.txt", "list.json", "empty.jsonl"
        ]  # fmt: skip
        assert values["trainer"]["strategy"]["init_args"]["activation_checkpointing"] == "full"


def test_a_path_stays_one_in_scripts(tmp_path: Path, monkeypatch: Any):
    """Whether the classes are given in Python, may be subclasses, or are named in a mapping; also a function works."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    Path("plain.txt").write_text("A text about rivers.\nAnother one.\n")
    words = ["--model.name=x", "--data.train=plain.txt", "--trainer.max_steps=2"]

    def parsed(*classes: Any, args: Any, **modes: bool) -> Any:
        args = {"subcommand": "fit", "fit": args} if isinstance(args, dict) else ["fit", *args]
        return _Reader(*classes, args=args, auto_configure_optimizers=False, **modes).config.fit

    subclasses = {"subclass_mode_model": True, "subclass_mode_data": True}
    for data in (CausalLMDataModule, MyData):
        assert parsed(CausalLMModule, data, args=words).data.train == "plain.txt"
        assert parsed(CausalLMModule, data, args=words, **subclasses).data.init_args.train == "plain.txt"
    given = {"data": {"class_path": "lit_fsdp.CausalLMDataModule", "init_args": {"train": "plain.txt"}}}
    assert parsed(BoringModel, args=given).data.init_args.train == "plain.txt"
    assert parsed(net, CausalLMDataModule, args=["--model.hidden=5", *words[1:]]).model.hidden == 5


def test_pairs_are_streamed_where_there_is_a_base_or_none_is_needed():
    named = ["--model=lit_fsdp.PreferenceModule", "--model.name", "x", *WORDS, "--data.streaming", "true"]
    assert "train adapters" in refused(load_recipe, named, "fit").fix
    load_recipe([*named, "--model.lora.r", "4"], "fit")
    load_recipe([*named, "--model.preference.loss", "orpo"], "fit")


def test_wsd_warms_up_stays_and_falls_at_the_end():
    steps = (1, 4, 79, 80, 90, 100, 120)
    for decay, factors in (
        (0.2, [0.5, 1.0, 1.0, 1.0, 0.55, 0.1, 0.1]),
        (0.1, [0.5, 1.0, 1.0, 1.0, 1.0, 0.1, 0.1]),  # the last tenth: step 95 is half-way
        (0.96, [0.5, 1.0, 1 - 0.9 * 75 / 96, 1 - 0.9 * 76 / 96, 1 - 0.9 * 86 / 96, 0.1, 0.1]),
    ):
        optim = OptimConfig(schedule="wsd", warmup_steps=4, min_lr_ratio=0.1, decay_ratio=decay)
        assert [schedule_factor(optim, step, 100) for step in steps] == pytest.approx(factors)
    assert schedule_factor(OptimConfig(schedule="wsd"), 95, 100) == pytest.approx(0.5)


def test_a_share_of_the_steps_warms_up():
    share, steps = OptimConfig(warmup_ratio=0.05, min_lr_ratio=0.1), OptimConfig(warmup_steps=6, min_lr_ratio=0.1)
    assert [schedule_factor(share, n, 101) for n in range(101)] == [schedule_factor(steps, n, 101) for n in range(101)]
    with pytest.raises(ConfigError, match="set the other to 0"):
        OptimConfig(warmup_ratio=0.1, warmup_steps=5)
    with pytest.raises(ConfigError, match="0 to 1"):
        OptimConfig(warmup_ratio=3)


def test_objects_of_python_are_taken_or_refused_with_the_words_of_a_recipe(tmp_path: Path):
    rows = [{"messages": []}]
    for cls, values, field, fix in (
        (DataConfig, {"train": Dataset.from_list(rows)}, "data.train", "to_json('rows.jsonl')"),
        (DataConfig, {"val": rows}, "data.val", "to_json('rows.jsonl')"),
        (DataConfig, {"val": (*rows, {"source": "s", "text": "t"})}, "data.val", "to_json('rows.jsonl')"),
        (DataConfig, {"val": [{"sorce": "a.jsonl"}]}, "data.val.sorce", "write data.val.source"),
        (ModelConfig, {"name": "x", "lora": peft.LoraConfig()}, "model.lora", "lora={'r': 8, 'alpha': 16}"),
        (ModelConfig, {"name": GPT2Config()}, "model.name", "name the folder or the hub repository"),
    ):
        with pytest.raises(ConfigError) as caught:
            build(cls, values, field.split(".")[0])
        assert caught.value.field == field
        assert fix in caught.value.fix
    assert build(ModelConfig, {"name": tmp_path}, "model").name == str(tmp_path)
    sources = [{"source": Path("a.jsonl")}, {"source": "b.jsonl"}]
    assert [one.source for one in build(DataConfig, {"train": sources}, "data").train] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--lr_scheduler.class_path", "torch.optim.lr_scheduler.StepLR"], "override configure_optimizers"),
        (["--model.optim.schedule", "torch.optim.lr_scheduler.StepLR"], "override configure_optimizers"),
        (["--model.optim.schedule", "COSINE"], "write model.optim.schedule: cosine"),
        (["--model.lora.target_modules", "all-liner"], "all-linear"),
        (["--model.lora.target_modules", "attention_only"], "attention-only"),
    ],
)
def test_schedules_that_are_classes_and_misspelled_words(words: list[str], fix: str):
    with pytest.raises(ConfigError) as caught:
        load_recipe(["--model.name", "x", "--data.train", "x.jsonl", *words], "fit")
    assert fix in caught.value.fix
