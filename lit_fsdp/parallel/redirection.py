"""A LightningModule called where no step is under way: the engine gathers its weights all the same."""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch.strategies.strategy import _ForwardRedirection
from torch import nn


class Redirection(_ForwardRedirection):
    """Lightning's way from a strategy's root to ``training_step`` and its siblings, which knows when it is taken."""

    is_inside = False

    def __call__(self, wrapper_module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the step inside the root's forward."""
        before, self.is_inside = self.is_inside, True
        try:
            return super().__call__(wrapper_module, *args, **kwargs)
        finally:
            self.is_inside = before


def sharded_by(module: Any) -> Any:
    """The strategy that has sharded a LightningModule, of whichever Trainer; ``None`` for none."""
    return getattr(module.forward, "strategy", None)


def redirect_forward(strategy: Any, root: nn.Module, module: Any) -> None:
    """Let ``module(...)`` outside of every step, as in ``on_train_epoch_end`` or after ``fit``, run through ``root``.

    All ranks have to call it: they gather weights together.
    """
    forward, redirection = module.forward, strategy._forward_redirection

    @functools.wraps(forward)
    def through_the_root(*args: Any, **kwargs: Any) -> Any:
        if redirection.is_inside:
            return forward(*args, **kwargs)
        redirection.is_inside = True
        try:
            with strategy.precision_plugin.forward_context():
                return root(*args, **kwargs)
        finally:
            redirection.is_inside = False

    through_the_root.strategy = strategy  # type: ignore[attr-defined]
    module.forward = through_the_root
