"""``class_path: lit_fsdp.PreferenceModule``: its arguments are typed before torch is imported, as those of ours are."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_fsdp.config.model import ModelConfig, PreferenceModelConfig
from lit_fsdp.config.parser import check_recipe, load_recipe
from lit_fsdp.errors import ConfigError

WORDS = ["--data.train", "generated:8", "--trainer.max_steps", "2"]


def test_the_section_is_read_wherever_its_class_is_named(tmp_path: Path):
    recipe, more = tmp_path / "pairs.yaml", tmp_path / "more.yaml"
    recipe.write_text(
        "model: {class_path: lit_fsdp.PreferenceModule, init_args: {name: x, preference: {loss: ipo}, "
        "optim: {class_path: torch.optim.SGD}}}\n"
    )
    more.write_text("model: {preference: {beta: 0.7}}\n")
    for words in (
        ["--config", str(recipe), "--config", str(more)],
        ["--config", str(recipe), "--model.preference.beta", "0.7"],
        ["--model", "lit_fsdp.PreferenceModule", "--model.name", "x", "--config", str(recipe), "--config", str(more)],
    ):
        loaded = load_recipe([*words, *WORDS], "fit")
        model = loaded.run.model
        assert isinstance(model, PreferenceModelConfig)
        assert (model.preference.loss, model.preference.beta, model.optim.optimizer) == ("ipo", 0.7, "torch.optim.SGD")
        assert loaded.run.data.format == "preference"
        assert loaded.run.foreign == frozenset()
        assert check_recipe(loaded.values, "fit").model == model
    assert type(load_recipe(["--model.name", "x", *WORDS], "fit").run.model) is ModelConfig


def test_wrong_keys_and_streams_without_a_base_are_refused_with_what_to_write():
    named = ["--model=lit_fsdp.PreferenceModule", "--model.name", "x", *WORDS]
    for words, field, fix in [
        ([*named, "--model.preference.betta", "1"], "model.preference.betta", "write model.preference.beta"),
        ([*named, "--model.preference.loss", "kto"], "model.preference.loss", ""),
        ([*named, "--data.streaming", "true"], "data.streaming", "train adapters"),
        (["--model.name", "x", "--model.preference.beta", "1", *WORDS], "model.preference.beta", "PreferenceModule"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_recipe(words, "fit")
        assert (caught.value.field, fix in caught.value.fix) == (field, True)
    load_recipe([*named, "--data.streaming", "true", "--model.lora.r", "4"], "fit")
    load_recipe([*named, "--data.streaming", "true", "--model.preference.loss", "orpo"], "fit")
