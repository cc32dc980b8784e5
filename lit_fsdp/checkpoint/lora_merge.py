"""Adapters added to the weights they stand beside, one weight at a time, in fp32.

The same operations in the same order as peft's own merge, so that the result is equal bit for bit.
"""

from __future__ import annotations

import torch

from lit_fsdp.checkpoint.export_plan import Delta
from lit_fsdp.checkpoint.pieces import Pieces


def merged(pieces: Pieces, source: str, delta: Delta) -> torch.Tensor:
    """The weight ``source`` of the checkpoint with its adapter, in fp32.

    LoRA: ``W + B A scaling``. DoRA: each output's weights are scaled to the length learnt for it.

    Source: LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353, equation 5.
    """
    weight, a, b = (torch.cat(list(pieces(name))).float() for name in (source, delta.a, delta.b))
    change = b @ a
    change = (change.T if delta.is_transposed else change) * delta.scaling
    if delta.magnitude is None:
        return weight.add_(change)
    summed = weight + change
    lengths = torch.linalg.norm(summed.T if delta.is_transposed else summed, dim=1)
    factor = torch.cat(list(pieces(delta.magnitude))).float() / lengths
    return (factor.view(1, -1) if delta.is_transposed else factor.view(-1, 1)) * summed
