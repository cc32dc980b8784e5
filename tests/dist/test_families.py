"""Any causal language model: under both engines, recomputed, it trains as a plain loop on one process does."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from lit_fsdp.models.miniature import shrink
from lit_fsdp.models.tokenizers import miniature_tokenizer
from tests.dist.forks import RankError, on_ranks
from tests.dist.reference import global_batch, loop, save_tiny, step_loss
from tests.unit.models.families import FAMILIES

_FEW = ("gemma4_text", "deepseek_v3")
_CUT = ("qwen3", "gemma3_text", "mixtral", "gpt_oss")  # grouped queries, sliding windows, experts, sinks
_LEFT_OUT = {
    "prophetnet",  # has two streams of hidden states
    "roc_bert",  # keeps most of its parameters in embeddings of its own
    "xlm",  # makes its own masks, of another shape
}
_NOISE = re.compile("drop|jitter")
_ALL = pytest.param(FAMILIES, id="all", marks=pytest.mark.long("each of over 110 families is trained three times"))


@pytest.mark.parametrize("families", [pytest.param(_FEW, id="few"), _ALL])
def test_a_family_trains_as_a_plain_loop(families: tuple[str, ...], tmp_path: Path) -> None:
    """Tolerance: 1e-4 relative over three steps in fp32; only the order of summation differs."""
    wanted = _plain_losses(families, tmp_path)
    assert len(wanted) >= (len(families) if families is _FEW else 110)
    wrong: dict[tuple[str, str], object] = {}
    for folder, engine in itertools.product(wanted, ("fsdp2", "fsdp1")):
        strategy = {"engine": engine, "precision": "fp32", "activation_checkpointing": "full"}
        try:
            found = on_ranks("train", 2, folder=folder, strategy=strategy, steps=3)[0]["losses"]
        except RankError as error:
            found = str(error)
        if found != pytest.approx(wanted[folder], rel=1e-4):
            wrong[Path(folder).name, engine] = found, wanted[folder]
    assert not wrong, "\n".join(f"{family}: {both}" for family, both in wrong.items())


@pytest.mark.parametrize("families", [pytest.param(_CUT, id="few"), _ALL])
def test_a_family_trains_as_a_plain_loop_with_its_rows_cut(families: tuple[str, ...], tmp_path: Path) -> None:
    """The same with two ranks that share rows, by both methods; what cannot is refused by name."""
    wanted, wrong, num_cut = _plain_losses(families, tmp_path), {}, 0
    for folder in wanted:
        for method in ("ulysses", "all_gather"):
            strategy = {"precision": "fp32", "context_parallel": {"degree": 2, "method": method}}
            try:
                found = on_ranks("train", 2, folder=folder, strategy=strategy, steps=3)[0]["losses"]
                num_cut += 1
            except RankError as error:
                found = wanted[folder] if "context_parallel: got" in str(error) else str(error)
            if found != pytest.approx(wanted[folder], rel=1e-4):
                wrong[Path(folder).name, method] = found, wanted[folder]
    assert not wrong, "\n".join(f"{family}: {both}" for family, both in wrong.items())
    assert num_cut >= (2 * len(families) if families is _CUT else 80)


def _plain_losses(families: tuple[str, ...], place: Path) -> dict[str, list[float]]:
    """Three losses of each family's miniature, by the folder in which it is saved."""
    wanted = {}
    for family in (family for family in families if family not in _LEFT_OUT):
        folder = place / family
        try:
            config = shrink(AutoConfig.for_model(family), miniature_tokenizer())  # as `model.miniature: true` does it
            values = config.to_dict().items()
            noise = {name for name, value in values if isinstance(value, float) and _NOISE.search(name)}
            config.update(dict.fromkeys(noise, 0.0))
            save_tiny(folder, config)
            model = AutoModelForCausalLM.from_pretrained(folder).float().train()
            wanted[str(folder)] = loop(model, lambda step, model=model: step_loss(model, global_batch(step)), 3)
        except Exception:
            if len(families) <= len(_CUT):
                raise
    return wanted
