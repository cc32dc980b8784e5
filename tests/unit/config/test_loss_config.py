"""What the ``model.loss`` section refuses, alone and beside the rest of the recipe."""

from __future__ import annotations

import pytest

from lit_fsdp.config.model import LossConfig
from lit_fsdp.config.parser import check_recipe
from lit_fsdp.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"z_loss": -1e-4}, "z_loss"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"backend": "liger", "label_smoothing": 0.1}, "label_smoothing"),
        ({"backend": "cce", "label_smoothing": 0.1}, "label_smoothing"),
        ({"backend": "cce", "z_loss": 1e-4}, "z_loss"),
        ({"backend": "plain", "chunk_tokens": 64}, "chunk_tokens"),
    ],
)
def test_what_a_backend_cannot_do(options, field):
    with pytest.raises(ConfigError) as caught:
        LossConfig(**options)
    assert caught.value.field == field


def _recipe(backend, accelerator="gpu", precision="mixed", **model):
    return {
        "trainer": {
            "accelerator": accelerator,
            "devices": 1,
            "max_steps": 1,
            "strategy": {"class_path": "lit_fsdp.fsdp_strategy", "init_args": {"precision": precision}},
        },
        "model": {"name": "x", "loss": {"backend": backend}, **model},
        "data": {"train": "rows.jsonl", "global_batch_size": 4, "micro_batch_size": 4},
    }


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (_recipe("liger", "cpu"), "trainer.accelerator cpu"),
        (_recipe("cce", precision="fp32"), "precision fp32"),
        (_recipe("liger", lora={"target_modules": ["lm_head"]}), "adapters on the head"),
        (_recipe("cce", lora={"modules_to_save": ["lm_head"]}), "adapters on the head"),
    ],
)
def test_kernels_are_refused_where_they_break(recipe, words):
    with pytest.raises(ConfigError, match=words) as caught:
        check_recipe(recipe, "fit")
    assert caught.value.field == "model.loss.backend"


def test_kernels_pass_where_they_run():
    assert check_recipe(_recipe("liger", precision="fp32"), "fit").model.loss.backend == "liger"
    assert check_recipe(_recipe("cce", lora={"target_modules": ["q_proj"]}), "fit").model.loss.backend == "cce"
