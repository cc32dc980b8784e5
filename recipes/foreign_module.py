"""Somebody's own LightningModule under the factory; torchrun --nproc_per_node 2 starts it as well as python does."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lit_fsdp import fsdp_strategy


class Regression(LightningModule):
    """Knows nothing of the factory."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

    def training_step(self, batch, batch_idx):
        x, y = batch
        for layer in self.layers:
            x = layer(x).relu()
        loss = torch.nn.functional.mse_loss(x, y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


seed_everything(0)
data = DataLoader(TensorDataset(*torch.rand(2, 512, 64)), batch_size=16)
options = {"max_epochs": 2, "logger": False, "default_root_dir": "runs/foreign_module"}
trainer = Trainer(accelerator="cpu", devices=2, strategy=fsdp_strategy(), **options)
trainer.fit(Regression(), data)
trainer.print(f"{trainer.global_step} steps, loss {trainer.callback_metrics['loss']:.4f}")
