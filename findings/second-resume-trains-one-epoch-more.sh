#!/usr/bin/env bash
# lightning 2.6.6 (torch 2.15.0, CPU); run on 2026-11-29.
#
# ModelCheckpoint(every_n_train_steps=...) may save after the last batch of an epoch. A run that is resumed from such a
# checkpoint has the right length, but its fit loop never begins the next epoch: hooks on_train_epoch_start are not
# called for it, and `epoch_progress.ready` and `started` stay one behind `processed`. The next checkpoint at the end of
# an epoch holds these counts, so that a second resume does not know that this epoch has ended, and trains one epoch
# more than max_epochs. No message says so. A job that is preempted twice on a cluster does just this: each chain of
# resumes at ends of epochs trains longer than the run that was never stopped, at the end of its schedule or beyond.
#
# Seen (5 batches per epoch, max_epochs=4: 20 steps; epochs that began, by on_train_epoch_start):
#   not resumed: 20 steps, epochs that began: 0 1 2 3
#   resumed at step 5: 20 steps, epochs that began: 2 3
#   resumed at step 5, then at step 10: 25 steps, epochs that began: 1 2 3
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q lightning==2.6.6 torch==2.15.0 numpy
cd "$folder"
cat > resume.py <<'PYTHON'
import logging
import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.began = torch.nn.Linear(2, 1), []

    def on_train_epoch_start(self):
        self.began.append(self.current_epoch)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def run(folder, checkpoint=None, stop_at=-1):
    """Train four epochs of five batches; ``stop_at`` ends the process early, as a time limit would."""
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
    trainer, net = Trainer(max_epochs=4, max_steps=stop_at, callbacks=[saver], **options), Net()
    trainer.fit(net, torch.utils.data.DataLoader(torch.ones(5, 2)), ckpt_path=checkpoint)
    return trainer.global_step, " ".join(map(str, net.began))


def show(how, found):
    print(f"{how}: {found[0]} steps, epochs that began: {found[1]}")
    return found[0]


whole = show("not resumed", run("whole"))
run("first", stop_at=5)
once = show("resumed at step 5", run("once", "first/step=5.ckpt"))
run("second", "first/step=5.ckpt", stop_at=10)
twice = show("resumed at step 5, then at step 10", run("twice", "second/step=10.ckpt"))
assert (whole, once, twice) == (20, 20, 25), "this has changed"
print("unchanged")
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" resume.py 2> errors || { cat errors; exit 1; }
