"""What parameters of foreign modules keep."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import callbacks as lightnings
from torch import nn

from lit_fsdp.config.strategy import StrategyConfig
from lit_fsdp.errors import ConfigError
from lit_fsdp.parallel import foreign


class Prior(nn.Parameter):
    """A class by which somebody finds parameters."""


def test_parameters_keep_attributes_and_a_lost_class_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(foreign.dist, "get_rank", lambda: 0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[0].weight.lr_mult, net[1].bias = 0.5, Prior(torch.zeros(2))
    before = foreign.attributes_of(net)
    foreign.restore_attributes(net, before)
    assert not caplog.records
    for layer in net:
        layer.weight, layer.bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    net[0].weight.other = 1
    foreign.restore_attributes(net, before)
    assert vars(net[0].weight) == {"lr_mult": 0.5, "other": 1}
    assert vars(net[0].bias) == vars(net[1].weight) == {}
    assert [text.partition(";")[0] for text in caplog.messages] == [
        "sharding makes new parameters: 1.bias is no longer a Prior"
    ]


def test_packed_weights_keep_what_their_layer_gave_them() -> None:
    """Their class and attributes are a part of the data, and no mark of somebody's."""
    layer = nn.Linear(2, 2)
    layer.weight, layer.quant_state = Prior(torch.zeros(2, 2)), None
    assert list(foreign.attributes_of(nn.Sequential(layer))) == ["0.bias"]


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused_until_they_are_removed(name: str) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    hook = getattr(net[1].bias, name)(lambda _: None)
    with pytest.raises(ConfigError, match=r"Sequential: got a hook on the parameter 1\.bias"):
        foreign.check_hooks(net)
    hook.remove()
    foreign.check_hooks(net)
    assert not net[1].bias._backward_hooks


def test_embeddings_that_change_their_weights_are_refused() -> None:
    foreign.check_embeddings(nn.Sequential(nn.Embedding(2, 2), nn.EmbeddingBag(2, 2)))
    for cls in (nn.Embedding, nn.EmbeddingBag):
        with pytest.raises(ConfigError, match="max_norm of the embedding 0, whose forward"):
            foreign.check_embeddings(nn.Sequential(cls(2, 2, max_norm=1.0)))


@pytest.mark.parametrize("engine", ["ddp", "single"])
def test_callbacks_that_copy_a_module_of_ours_before_it_has_weights_are_refused(engine: str) -> None:
    config = StrategyConfig(engine=engine)
    pruning = lightnings.ModelPruning("l1_unstructured")
    for callback in (lightnings.EMAWeightAveraging(), lightnings.StochasticWeightAveraging(swa_lrs=0.1), pruning):
        trainer = SimpleNamespace(callbacks=[callback], max_steps=-1, world_size=2)
        foreign.check_callbacks(config, trainer, "fit", is_ours=False)
        with pytest.raises(ConfigError, match=f"{type(callback).__name__}, which copies or changes") as error:
            foreign.check_callbacks(config, trainer, "fit", is_ours=True)
        assert ("lit_fsdp.EMAWeights" in str(error.value)) == (callback is not pruning)


def test_a_save_of_the_rank_that_fails_is_refused_on_several_ranks() -> None:
    """It waits for ranks that do not save, so that the run hangs instead of ending."""
    for callback in (lightnings.OnExceptionCheckpoint("."), lightnings.ModelCheckpoint(save_on_exception=True)):
        trainer = SimpleNamespace(callbacks=[callback], max_steps=-1, world_size=1)
        foreign.check_callbacks(StrategyConfig(), trainer, "fit", is_ours=False)
        trainer.world_size = 2
        foreign.check_callbacks(StrategyConfig(), trainer, "validate", is_ours=False)
        with pytest.raises(ConfigError, match=f"{type(callback).__name__}.* on 2 ranks: the save of a rank that fails"):
            foreign.check_callbacks(StrategyConfig(), trainer, "fit", is_ours=False)


def test_a_callback_for_a_backbone_is_refused_for_a_module_of_ours_without_one() -> None:
    callbacks = [lightnings.BackboneFinetuning()]
    foreign.check_finders(callbacks, SimpleNamespace())  # of others, Lightning says it
    foreign.check_finders(callbacks, SimpleNamespace(read_tensor=None, backbone=None))  # a subclass of ours
    with pytest.raises(ConfigError, match=r"BackboneFinetuning\n.* no attribute backbone\n.* model\.freeze"):
        foreign.check_finders(callbacks, SimpleNamespace(read_tensor=None))
