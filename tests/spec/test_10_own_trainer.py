"""The factory shards somebody's own LightningModule in somebody's own Trainer, which trains as without it."""

from __future__ import annotations

from pathlib import Path

import torch

from lit_fsdp.checkpoint import store
from tests.spec.running import run

SCRIPT = """
import sys
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from lit_fsdp import fsdp_strategy

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.unused = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        x, y = batch
        for layer in self.body:
            x = layer(x).tanh()
        return torch.nn.functional.mse_loss(self.head(x), y)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)
    def train_dataloader(self):
        return DataLoader(rows, batch_size=8 // ranks, sampler=Share(ranks, self.trainer.global_rank))

class Share:
    \"\"\"Every second row of each global batch.\"\"\"
    def __init__(self, ranks, rank):
        self.rows = [row for row in range(48) if row % ranks == rank]
    def __iter__(self):
        return iter(self.rows)
    def __len__(self):
        return len(self.rows)

seed_everything(0)
ranks = int(sys.argv[1])
net = Net()
rows = TensorDataset(torch.rand(48, 8), torch.rand(48, 1))
strategy = fsdp_strategy(precision="fp32", wrap={"max_root_share": 1.0}) if ranks > 1 else "auto"
options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = Trainer(accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=2, use_distributed_sampler=False,
                  gradient_clip_val=0.5, accumulate_grad_batches=2, **options)
trainer.fit(net)
trainer.save_checkpoint("last") if ranks > 1 else torch.save(net.state_dict(), "plain.pt")
"""


def test_weights_are_those_of_plain_lightning() -> None:
    Path("train.py").write_text(SCRIPT)
    run("train.py", "1", ranks=1, job="script")
    run("train.py", "2", ranks=2, job="script")
    whole, plain = store.whole_model(Path("last")), torch.load("plain.pt", weights_only=True)
    assert whole.keys() == plain.keys()
    assert max(float((whole[name] - plain[name]).abs().max()) for name in plain) < 1e-6
