#!/usr/bin/env bash
# lightning 2.6.6 (torch 2.15.0, CPU); run on 2026-12-01.
#
# `ModelCheckpoint` saves at the end of an epoch, before Lightning steps the schedulers of that epoch. A run that is
# resumed from there steps `StepLR` for this epoch and has the learning rates of an uninterrupted run. It never steps
# `ReduceLROnPlateau` for this epoch: the epoch does not count, and the learning rate falls later, or not at all. There
# is no warning. A scheduler that is saved in the checkpoint looks as if it were resumed exactly.
#
# Seen (the learning rate after each of 8 epochs with a constant metric, uninterrupted and resumed after the third):
#   StepLR:            0.5 0.25 0.125 0.0625 0.03125 0.015625 0.0078125 0.00390625
#                      0.5 0.25 0.125 0.0625 0.03125 0.015625 0.0078125 0.00390625
#   ReduceLROnPlateau: 1.0 0.5 0.25 0.125 0.0625 0.03125 0.015625 0.0078125
#                      1.0 0.5 0.5 0.25 0.125 0.0625 0.03125 0.015625
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 lightning==2.6.6
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import logging
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
KINDS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}


class Constant(LightningModule):
    """One weight; a metric that never improves."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.weight, self.rates = kind, torch.nn.Parameter(torch.zeros(1)), {}

    def training_step(self, batch, index):
        self.rates[self.current_epoch] = self.optimizers().param_groups[0]["lr"]
        self.log("metric", 1.0, on_step=False, on_epoch=True)
        return self.weight.sum()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = {"scheduler": KINDS[self.kind](optimizer), "monitor": "metric", "interval": "epoch"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def rates(kind, folder, epochs, ckpt_path=None):
    """The learning rate in each epoch that was trained."""
    saved = ModelCheckpoint(folder, "after", save_on_train_epoch_end=True)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    model = Constant(kind)
    trainer = Trainer(max_epochs=epochs, callbacks=[saved], **options)
    trainer.fit(model, DataLoader(torch.zeros(4, 1)), ckpt_path=ckpt_path)
    return model.rates, saved.best_model_path


def shown(found):
    return " ".join(str(found[epoch]) for epoch in range(1, 9))


found = {}
for kind in KINDS:
    whole, _ = rates(kind, f"{kind}-whole", 9)
    first, path = rates(kind, f"{kind}-first", 3)
    rest, _ = rates(kind, f"{kind}-rest", 9, path)
    found[kind] = shown(whole), shown({**first, **rest})
    print(f"{kind + ':':18} {found[kind][0]}\n{'':18} {found[kind][1]}")
is_same = found["StepLR"][0] == found["StepLR"][1] and found["ReduceLROnPlateau"][0] != found["ReduceLROnPlateau"][1]
print("unchanged" if is_same else "it behaves otherwise now")
sys.exit(not is_same)
PYTHON
