#!/usr/bin/env bash
# lightning 2.6.6, torch 2.13.0 (CPU); run on 2026-11-27.
#
# EMAWeightAveraging(update_starting_at_step=N) is meant to begin the average at step N. Until then its average model is a
# copy of the weights that training began with, and that copy is what it hands out: validations see the initial weights,
# the `state_dict` of every checkpoint is the initial weights, and `on_train_end` copies them over the trained ones. A
# training that ends before N gives back an untrained model, without a word. The trained weights are only in the
# checkpoint's `current_model_state`.
#
# Seen:
#   weight before fit 0.0, live in step 3 3.0, in validation 0.0, in the file 0.0, after fit 0.0
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 lightning==2.6.6
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader


class Net(LightningModule):
    """Its weight grows by 1 in each step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.live, self.validated = [], []

    def training_step(self, batch, index):
        return -self.weight

    def on_train_batch_end(self, *args):
        self.live.append(float(self.weight.detach()))

    def validation_step(self, batch, index):
        self.validated.append(float(self.weight.detach()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


seed_everything(0, verbose=False)
net, rows = Net(), DataLoader(torch.zeros(3, 1), batch_size=1)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
average = EMAWeightAveraging(decay=0.9, update_starting_at_step=5)
trainer = Trainer(accelerator="cpu", max_steps=3, num_sanity_val_steps=0, callbacks=[average], **quiet)
trainer.fit(net, rows, rows)
trainer.save_checkpoint("end.ckpt")
saved = float(torch.load("end.ckpt", weights_only=True)["state_dict"]["weight"])
found = {"live": net.live[-1], "validated": net.validated[-1], "saved": saved, "after": float(net.weight.detach())}
print(
    f"weight before fit 0.0, live in step 3 {found['live']}, in validation {found['validated']}, "
    f"in the file {found['saved']}, after fit {found['after']}"
)
is_same = found == {"live": 3.0, "validated": 0.0, "saved": 0.0, "after": 0.0}
print("unchanged" if is_same else "lightning behaves otherwise now")
sys.exit(not is_same)
PYTHON
