"""Where a run breaks down in test_secrets.py; apart, as the tests themselves need not import Lightning."""

from __future__ import annotations

CRASHES = {
    "nowhere": "",
    "data": "lit_fsdp.datamodule.CausalLMDataModule.setup",
    "loader": "lit_fsdp.datamodule.CausalLMDataModule.train_dataloader",
    "model": "lit_fsdp.module.CausalLMModule.configure_model",
    "optimizer": "lit_fsdp.module.CausalLMModule.configure_optimizers",
    "step": "lit_fsdp.module.CausalLMModule.training_step",
    "after the step": "lit_fsdp.module.CausalLMModule.on_before_optimizer_step",
    "save": "lit_fsdp.callbacks.checkpoint.Checkpoint.save",
    "disk": "lit_fsdp.checkpoint.files.write_bytes",
    "collective": "lit_fsdp.checkpoint.ranks.Ranks.run",
}
"""Where a run can be made to break down, and what raises there."""
