from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.commands.parsing import parse, verb_parser
from lit_fsdp.config.miniature import adapt_to_miniature
from lit_fsdp.config.recipe import Recipe, merge, read_recipe, read_yaml
from lit_fsdp.config.run import FACTORY, check_recipe
from lit_fsdp.errors import ConfigError


@pytest.fixture
def write(tmp_path: Path):
    def write_file(name: str, text: str) -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write_file


def refused(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_recipe(words)
    return caught.value


# -- files and flags


def test_later_files_win_and_flags_are_last_wherever_they_stand(write):
    first = write("a.yaml", "model: {name: one, optim: {lr: 1.0e-4}}\ndata: {train: x}\n")
    second = write("b.yaml", "model: {name: two}\n")
    words = ["--model.optim.lr", "3e-4", "--config", first, "--config", second, "--data.train=y"]
    recipe = read_recipe(words)
    assert recipe.values == {"model": {"name": "two", "optim": {"lr": "3e-4"}}, "data": {"train": "y"}}
    assert recipe.files == [Path(first), Path(second)]
    assert recipe.replaced == [f"model.name: 'one' → 'two' ({second})"]
    assert recipe.flags == []


def test_a_flag_may_add_to_a_list(write):
    words = ["--config", write("r.yaml", "model: {freeze: [a]}\ndata: {train: x}\n"), "--model.freeze+=b"]
    words += ["--model.freeze+", "[c, d]", "--data.train+=y", "--model.add_tokens+=t"]
    assert read_recipe(words).values == {
        "model": {"freeze": ["a", "b", "c", "d"], "add_tokens": ["t"]},
        "data": {"train": ["x", "y"]},
    }


def test_trainer_flags_are_seen_here_and_kept_for_lightning():
    recipe = read_recipe(["--trainer.max_steps", "5", "--trainer.callbacks+=x", "--trainer.logger.name", "n"])
    assert recipe.values == {"trainer": {"max_steps": 5}}
    assert recipe.flags == ["--trainer.callbacks+=x", "--trainer.logger.name=n"]


def test_strategy_flags_belong_to_the_recipe_alone():
    recipe = read_recipe(["--trainer.strategy.init_args.wrap", "{min_num_params: 10}"])
    assert recipe.values == {"trainer": {"strategy": {"init_args": {"wrap": {"min_num_params": 10}}}}}
    assert recipe.flags == []


@pytest.mark.parametrize(
    ("word", "value"),
    [("-1", -1), ("-0.5", -0.5), ("null", None), ("[a, b]", ["a", "b"]), ("true", True), ("a=b", "a=b"), ("", None)],
)
def test_a_flag_has_a_yaml_value(word: str, value: Any):
    assert read_recipe(["--data.train", word]).values == {"data": {"train": value}}
    assert read_recipe([f"--data.train={word}"]).values == {"data": {"train": value}}


@pytest.mark.parametrize("switch", ["--help", "-h", "--print_config", "--print_config=skip_null"])
def test_switches_take_no_value_and_only_show(switch: str):
    recipe = read_recipe([switch, "--model.name", "x"])
    assert recipe.flags == [switch]
    assert recipe.values == {"model": {"name": "x"}}
    assert recipe.only_shows
    assert not Recipe({}, []).only_shows


def test_paths_are_expanded_once_for_every_verb(write, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("ROWS", "/rows")
    text = """
trainer: {default_root_dir: ~/run, logger: [{class_path: CSVLogger, init_args: {save_dir: "${ROWS}/log"}}]}
model: {name: ~/models/x, tokenizer: "${ROWS}/tok", add_tokens: ["~", "${x}"]}
data: {train: ["${ROWS}/a.jsonl", {source: ~/b.jsonl, weight: 1}], cache_dir: "${ROWS}"}
slurm: {env_file: ~/env, setup: ["cd ${SLURM_TMPDIR}"]}
"""
    words = ["--config", write("r.yaml", text), "--data.val=~/v.jsonl", "--ckpt_path=~/run/checkpoints/step-00000002"]
    recipe = read_recipe([*words, "--trainer.callbacks+={class_path: X, init_args: {dirpath: ~/best}}"])
    assert recipe.values == {
        "trainer": {
            "default_root_dir": "/home/somebody/run",
            "logger": [{"class_path": "CSVLogger", "init_args": {"save_dir": "/rows/log"}}],
        },
        "model": {"name": "/home/somebody/models/x", "tokenizer": "/rows/tok", "add_tokens": ["~", "${x}"]},
        "data": {
            "train": ["/rows/a.jsonl", {"source": "/home/somebody/b.jsonl", "weight": 1}],
            "val": "/home/somebody/v.jsonl",
            "cache_dir": "/rows",
        },
        "slurm": {"env_file": "/home/somebody/env", "setup": ["cd ${SLURM_TMPDIR}"]},
        "ckpt_path": "/home/somebody/run/checkpoints/step-00000002",
    }
    assert recipe.flags == ['--trainer.callbacks+={"class_path": "X", "init_args": {"dirpath": "/home/somebody/best"}}']
    monkeypatch.delenv("ROWS")
    error = refused(*words)
    assert (error.field, error.fix) == ("trainer.logger[0].init_args.save_dir", "export ROWS=...")
    parser = verb_parser("export", "")
    parser.add_argument("--ckpt", type=Path)
    parser.add_argument("--prompt")
    options = parse(parser, ["--ckpt=~/run", "--prompt=~ ${ROWS}"])
    assert (options.ckpt, options.prompt) == (Path("/home/somebody/run"), "~ ${ROWS}")


def test_words_that_cannot_be_meant_are_refused(write):
    assert refused("recipe.yaml").fix == "write --recipe.yaml VALUE, or --config recipe.yaml"
    assert refused("--model.name").given == "a flag without a value"
    assert refused("--model.name", "--data.train", "x").field == "model.name"
    assert refused("--model.name", "[a").fix == "quote it"
    assert refused("--modle.name", "x").fix == "write model"
    assert refused("--ckpt", "last").fix == "write ckpt_path"
    assert refused("-x", "1").fix == "remove this key"


def test_files_that_cannot_be_read_are_refused(write, tmp_path: Path):
    write("fine.yaml", "model: {}\n")
    missing = refused("--config", str(tmp_path / "fin.yaml"))
    assert missing.field == "--config"
    assert missing.allowed == f"an existing YAML file: {tmp_path / 'fine.yaml'}"
    assert "no such YAML file in" in refused("--config", str(tmp_path / "absent" / "zzz.yaml")).allowed
    broken = refused("--config", write("broken.yaml", "model: {name: a\ndata: b\n"))
    assert "which is no YAML" in broken.given
    assert "line 2" in broken.given
    assert refused("--config", write("list.yaml", "- a\n")).given.endswith("list.yaml with list")
    assert refused("--config", write("empty.yaml", "")).given.endswith("empty.yaml with NoneType")


def test_a_yaml_file_cannot_run_code(write, tmp_path: Path):
    file = write("evil.yaml", f"model: !!python/object/apply:os.mkdir [{tmp_path / 'made'}]\n")
    with pytest.raises(ConfigError, match="which is no YAML"):
        read_yaml(Path(file))
    assert not (tmp_path / "made").exists()


# -- merging


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
        ({"p": "mixed"}, {"p": {"mode": "fp32"}}, {"p": {"mode": "fp32"}}),
        ({"p": {"mode": "fp32"}}, {"p": "mixed"}, {"p": "mixed"}),
        ({"l": [1, 2]}, {"l": [3]}, {"l": [3]}),
        ({"a": 1}, {"a": None}, {"a": None}),
        ({"s": {"class_path": "A", "init_args": {"x": 1}}}, {"s": {"init_args": {"y": 2}}}, None),
        ({"s": {"class_path": "A", "init_args": {"x": 1}}}, {"s": {"class_path": "A", "init_args": {"y": 2}}}, None),
    ],
)
def test_mappings_merge_and_everything_else_is_replaced(old, new, merged):
    merge(old, new)
    assert old == (merged or {"s": {"class_path": "A", "init_args": {"x": 1, "y": 2}}})


def test_another_class_drops_the_arguments_of_the_one_before():
    values = {"s": {"class_path": "A", "init_args": {"x": 1}}}
    merge(values, {"s": {"class_path": "B", "init_args": {"z": 1}}})
    assert values == {"s": {"class_path": "B", "init_args": {"z": 1}}}


def test_merged_values_are_copies():
    new = {"a": {"b": [1]}}
    into: dict[str, Any] = {}
    merge(into, new)
    into["a"]["b"].append(2)
    assert new == {"a": {"b": [1]}}


# -- the whole recipe


def recipe(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "trainer": {"devices": 2, "max_steps": 10},
        "model": {"name": "m"},
        "data": dict.fromkeys(("train", "val", "test", "predict"), "x.jsonl"),
    }
    merge(values, changes)
    return values


@pytest.mark.parametrize("given", [None, FACTORY, {"init_args": {"engine": "fsdp1"}}, {"class_path": FACTORY}])
def test_the_strategy_is_completed(given: Any):
    values = recipe(trainer={"strategy": given})
    run = check_recipe(values, "fit")
    assert values["trainer"]["strategy"]["class_path"] == FACTORY
    assert run.strategy.engine == ("fsdp1" if isinstance(given, dict) and "init_args" in given else "fsdp2")


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ({"devices": 4, "num_nodes": 2}, 8),
        ({"devices": [0, 3]}, 2),
        ({"devices": "auto"}, None),
        ({"devices": -1}, None),
    ],
)
def test_ranks_are_counted_where_they_are_known(trainer: dict[str, Any], ranks: int | None):
    assert check_recipe(recipe(trainer=trainer), "fit").world_size == ranks


@pytest.mark.parametrize(("verb", "split"), [("fit", "train"), ("validate", "val"), ("test", "test")])
def test_a_verb_needs_its_own_rows_only(verb: str, split: str):
    rows = dict.fromkeys(("train", "val", "test", "predict"))
    assert check_recipe(recipe(data={**rows, split: "x"}), verb).verb == verb
    with pytest.raises(ConfigError) as caught:
        check_recipe(recipe(data={split: None}), verb)
    assert caught.value.field == f"data.{split}"


def test_rules_of_training_do_not_bind_other_verbs():
    values = recipe(trainer={"devices": 3, "max_steps": 1}, model={"optim": {"warmup_steps": 100}})
    assert check_recipe(values, "validate").world_size == 3
    with pytest.raises(ConfigError, match=r"model\.optim\.warmup_steps: got 100 with trainer\.max_steps 1"):
        check_recipe(values, "fit")


@pytest.mark.parametrize("end", [{"max_epochs": 1}, {"max_time": "00:01:00:00"}, {"fast_dev_run": True}])
def test_training_may_end_in_other_ways(end: dict[str, Any]):
    assert check_recipe(recipe(trainer={"max_steps": -1, **end}), "fit").trainer["max_steps"] == -1


@pytest.mark.parametrize("limit", [None, 1.0])
def test_all_batches_may_be_asked_for(limit: Any):
    assert check_recipe(recipe(trainer={"limit_train_batches": limit}), "fit").world_size == 2


@pytest.mark.parametrize("seed", [None, True, False, 0, "7", 2**32 - 1])
def test_seeds_that_lightning_takes(seed: Any):
    assert check_recipe(recipe(seed_everything=seed), "fit").verb == "fit"


# -- in miniature


def test_a_recipe_of_full_size_is_left_alone():
    values = recipe(trainer={"accumulate_grad_batches": 3})
    before = str(values)
    assert adapt_to_miniature(values, ["said before"]) == []
    assert str(values) == before


def test_what_a_miniature_cannot_keep_is_replaced_and_said():
    arguments = {"sharding": "hybrid_shard", "wrap": {"min_num_params": 1.0e8}}
    values = recipe(
        model={"miniature": True, "optim": {"warmup_steps": 100}},
        trainer={"accumulate_grad_batches": 8, "strategy": {"class_path": FACTORY, "init_args": arguments}},
    )
    assert adapt_to_miniature(values, ["said before"]) == [
        "said before",
        "trainer.accumulate_grad_batches: 8 → None (follows from the batch sizes and ranks)",
        "trainer.strategy.init_args.replicate_degree: None → 2 (2 ranks on one node)",
        "trainer.strategy.init_args.wrap.min_num_params: 100000000.0 → 10000.0 (the miniature is small)",
        "model.optim.warmup_steps: 100 → 1 (10 steps)",
    ]
    run = check_recipe(values, "fit")
    assert run.strategy.replicate_degree == 2
    assert run.strategy.wrap_config.min_num_params == 1.0e4
    assert run.model.optim.warmup_steps == 1
