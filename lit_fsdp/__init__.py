"""Fine-tuning of causal language models with fully sharded data parallelism, on Lightning.

Public names are imported on first use, so that the command line responds before torch is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lit_fsdp.logs import quiet_imports

if TYPE_CHECKING:
    from lit_fsdp.callbacks.averages import EMAWeights
    from lit_fsdp.callbacks.checkpoint import Checkpoint
    from lit_fsdp.callbacks.isolation import IsolationProof
    from lit_fsdp.callbacks.samples import Samples
    from lit_fsdp.checkpoint.store import load_weights
    from lit_fsdp.cli import RecipeCLI
    from lit_fsdp.datamodule import CausalLMDataModule
    from lit_fsdp.errors import CheckpointError, ConfigError, ContractError, DataError
    from lit_fsdp.models.optimizers import MuonWithAdamW
    from lit_fsdp.module import CausalLMModule
    from lit_fsdp.parallel.norms import grad_norms
    from lit_fsdp.preference import PreferenceModule
    from lit_fsdp.strategy import fsdp_strategy

__version__ = "0.1.0"

quiet_imports()  # before transformers is imported, for commands and user scripts

_HOMES = {
    "CausalLMDataModule": "datamodule",
    "CausalLMModule": "module",
    "Checkpoint": "callbacks.checkpoint",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "ContractError": "errors",
    "DataError": "errors",
    "EMAWeights": "callbacks.averages",
    "IsolationProof": "callbacks.isolation",
    "MuonWithAdamW": "models.optimizers",
    "PreferenceModule": "preference",
    "RecipeCLI": "cli",
    "Samples": "callbacks.samples",
    "fsdp_strategy": "strategy",
    "grad_norms": "parallel.norms",
    "load_weights": "checkpoint.store",
}

__all__ = [
    "CausalLMDataModule",
    "CausalLMModule",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "DataError",
    "EMAWeights",
    "IsolationProof",
    "MuonWithAdamW",
    "PreferenceModule",
    "RecipeCLI",
    "Samples",
    "fsdp_strategy",
    "grad_norms",
    "load_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lit_fsdp' has no attribute {name!r}")
    return getattr(importlib.import_module(f"lit_fsdp.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names, for completion in notebooks."""
    return sorted({*globals(), *__all__})
