"""Anybody's module, data, callbacks, optimizer and strategy fit in, in a recipe and in a script, on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.pages import Page
from tests.runs import records
from tests.spec.running import ROOT, run

MINE = '''
import json, pathlib
import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset
import lit_fsdp

pathlib.Path("imported").touch()

class Net(L.LightningModule):
    def __init__(self, hidden: int = 8, lr: float = 0.1):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))
        self.lr = lr
    def training_step(self, batch, index):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("train_loss", loss)
        return loss
    def validation_step(self, batch, index):
        self.log("val_loss", self.net(batch[0]).pow(2).mean(), sync_dist=True)
    def predict_step(self, batch, index):
        return self.net(batch[0])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

class Rows(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(48, 4)), batch_size=4)
    val_dataloader = predict_dataloader = train_dataloader

class Tell(L.Callback):
    """Writes down what the live run is."""
    def __init__(self, word: str = "-"):
        self.word = word
    def on_train_end(self, trainer, module):
        found = {
            "word": self.word, "step": trainer.global_step, "strategy": type(trainer.strategy).__name__,
            "logger": type(module.logger).__name__,
            "batches": len(trainer.train_dataloader), "accumulate": trainer.accumulate_grad_batches,
            "optimizer": type(trainer.optimizers[0]).__name__, "options": trainer.optimizers[0].defaults,
            "extra": getattr(module, "extra", None),
            "hidden": module.net[0].out_features if hasattr(module, "net") else None,
            "dtypes": sorted({str(p.dtype) for p in module.parameters()})
        }
        if trainer.is_global_zero:
            pathlib.Path("told.json").write_text(json.dumps(found, default=str))

class Text(L.Callback):
    def on_train_batch_end(self, trainer, module, *others):
        module.log("x", "text")

class Longer(lit_fsdp.CausalLMModule):
    def __init__(self, extra: int = 3, **kwargs):
        super().__init__(**kwargs)
        self.extra = extra
'''
OWN = """
trainer:
  {devices: 2, accelerator: cpu, max_steps: 4, default_root_dir: run,
   callbacks: [{class_path: mine.Tell, init_args: {word: hello}}]}
model: {class_path: mine.Net, init_args: {hidden: 6}}
data: {class_path: mine.Rows}
checkpoint: {every_steps: 2}
"""
OURS = """
trainer:
  {devices: 2, accelerator: cpu, max_steps: 2, default_root_dir: run, callbacks: [{class_path: mine.Tell}]}
model: {name: CONFIG, miniature: true, optim: {lr: 1e-3}}
data: {train: "generated:64", max_seq_length: 64, micro_batch_size: 2}
"""
SCRIPT = """
import pathlib
from lightning.pytorch.callbacks import EarlyStopping, TQDMProgressBar
from lit_fsdp import RecipeCLI
import mine

class CLI(RecipeCLI):
    def add_arguments_to_parser(self, parser):
        parser.add_argument("--size", type=int, default=5)
        parser.link_arguments("size", "model.hidden")
        parser.add_lightning_class_args(EarlyStopping, "early")
        parser.set_defaults({"early.monitor": "train_loss"})
    def before_fit(self):
        self.word = "before"
    def fit(self, model, **words):
        self.word += " fit"
        self.trainer.fit(model, **words)
    def after_fit(self):
        loss = self.trainer.validate(self.model, self.datamodule, verbose=False)[0]["val_loss"]
        if self.trainer.is_global_zero:
            pathlib.Path("after").write_text(f"{self.word} {self.trainer.early_stopping_callback.patience} {loss > 0}")

if __name__ == "__main__":
    CLI(mine.Net, mine.Rows, trainer_defaults={"callbacks": [TQDMProgressBar()]})
"""
CONFIG = ROOT / "configs" / "model" / "SmolLM2-135M-Instruct.json"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in (("mine.py", MINE), ("own.yaml", OWN), ("ours.yaml", OURS), ("train.py", SCRIPT)):
        (tmp_path / name).write_text(text.replace("CONFIG", str(CONFIG)))
    return tmp_path


def said_by(*words: str, code: int = 0, job: str = "program") -> str:
    """Standard error of two ranks of ``lit-fsdp``, or of a script."""
    return run(*words, code=code, ranks=2, job=job)[1]


def told() -> dict[str, object]:
    found: dict[str, object] = json.loads(Path("told.json").read_text())
    return found


def test_classes_of_ones_own_in_a_recipe(here: Path) -> None:
    said = said_by("fit", "--config", "own.yaml", code=2)
    assert "model: got mine.Net" in said
    assert "add --allow-imports mine, or set LIT_FSDP_ALLOW_IMPORTS=mine" in said
    assert not Path("imported").exists()

    said_by("fit", "--config", "own.yaml", "--allow-imports", "mine")
    assert (told()["word"], told()["step"], told()["strategy"]) == ("hello", 4, "FSDP2Strategy")
    assert told()["batches"] == 6  # 12 of rank 0 and of rank 1 each: Lightning's own sampler deals the rows
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == ["step-00000002", "step-00000004"]
    recipe = yaml.safe_load(Path("run/recipe.yaml").read_text())
    assert recipe["model"] == {"class_path": "mine.Net", "init_args": {"hidden": 6, "lr": 0.1}}

    assert "has 2 checkpoint(s)" in said_by("fit", "--config", "own.yaml", "--allow-imports", "mine", code=2)
    flags = ("--ckpt_path", "last", "--trainer.max_steps", "6", "--trainer.log_every_n_steps", "1")
    assert "resumed from step 4" in said_by("fit", "--config", "own.yaml", "--allow-imports", "mine", *flags)
    assert told()["step"] == 6
    assert yaml.safe_load(Path("run/recipe.yaml").read_text())["ckpt_path"] is None  # a recipe for new runs too
    assert {"5", "6"} <= {row["step"] for row in records(Path("run/metrics.csv"))}
    said = said_by("predict", "--config", "own.yaml", "--allow-imports", "mine", "--ckpt_path", "last")
    assert said.count("Net.predict_step returns no rows with numbers") == 1
    page = Page(Path("run/report.html").read_text())
    assert (page.curves["train_loss"], page.curves["grad_norm"]) == (4, 4)  # steps 1, 4, 5, 6
    assert dict(page.tables["At a glance"])["model"].startswith("mine.Net, ")


def test_a_script_of_ones_own(here: Path) -> None:
    words = ("--trainer.devices=2", "--trainer.accelerator=cpu", "--trainer.max_steps=2", "--size", "7")
    optimizer = ("--optimizer=torch.optim.RMSprop", "--optimizer.lr=0.2")
    more = ("--trainer.callbacks=mine.Tell", "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs")
    said_by("train.py", "fit", *words, *optimizer, *more, "--early.patience=9", job="script")
    assert told()["logger"] == "CSVLogger"  # ours writes metrics.csv beside it
    assert Path("after").read_text() == "before fit 9 True"
    assert (told()["strategy"], told()["hidden"]) == ("FSDP2Strategy", 7)
    assert (told()["optimizer"], dict(told()["options"])["lr"]) == ("RMSprop", 0.2)  # type: ignore[call-overload]
    assert yaml.safe_load(Path("runs/run/recipe.yaml").read_text())["size"] == 7
    assert "has 1 checkpoint(s)" in said_by("train.py", "fit", *words, job="script", code=2)
    said_by("train.py", "validate", *words, "--ckpt_path", "last", job="script")
    assert "write model.hidden" in said_by("train.py", "fit", "--model.hiden=3", job="script", code=2)


def test_words_of_lightning(here: Path) -> None:
    Path("more.yaml").write_text(
        "trainer: {precision: bf16-true, accumulate_grad_batches: 3, max_time: 00:01:00:00}\n"
        "data: {cache_dir: 007}\n"
        "model: {class_path: mine.Longer, init_args: {extra: 5,\n"
        "  optim: {class_path: torch.optim.SGD, init_args: {momentum: 0.5}}}}"
    )
    said_by("fit", "--config", "ours.yaml", "--config", "more.yaml", "--allow-imports", "mine")
    assert (told()["accumulate"], told()["dtypes"], told()["extra"]) == (3, ["torch.bfloat16"], 5)
    assert (told()["optimizer"], dict(told()["options"])["momentum"]) == ("SGD", 0.5)  # type: ignore[call-overload]
    assert json.loads(Path("run/dtypes.json").read_text())["mode"] == "low_precision"
    recipe = yaml.safe_load(Path("run/recipe.yaml").read_text())
    assert (recipe["trainer"]["max_time"], recipe["data"]["cache_dir"]) == ("00:01:00:00", "007")
    assert Path("007").is_dir()


def test_a_strategy_of_lightning(here: Path) -> None:
    words = ("fit", "--config", "ours.yaml", "--allow-imports", "mine", "--trainer.strategy", "ddp")
    said = said_by(*words, "--trainer.precision", "bf16-mixed", "--trainer.gradient_clip_val", "1.0")
    assert "DDPStrategy is Lightning's own: no dtype contract" in said
    assert (told()["strategy"], told()["step"], told()["dtypes"]) == ("DDPStrategy", 2, ["torch.float32"])
    assert Path("run/checkpoints/last.ckpt").is_file()
    assert "last.ckpt" in {row[0] for row in Page(Path("run/report.html").read_text()).tables["Checkpoints"]}
    said_by(*words, "--ckpt_path", "last", "--trainer.max_steps", "3")
    assert told()["step"] == 3


def test_arguments_of_callbacks_are_refused_in_one_sentence(here: Path) -> None:
    """Also those that only their constructors refuse."""
    words = ("fit", "--config", "ours.yaml", "--allow-imports", "mine", "--trainer.callbacks")
    stop = ("EarlyStopping", "--trainer.callbacks.monitor", "val_loss")
    for callback, sentence in (
        (("EarlyStopping",), "EarlyStopping without monitor"),
        ((*stop, "--trainer.callbacks.patience", "x"), "trainer.callbacks.patience: got x\n  allowed: a whole number"),
        ((*stop, "--trainer.callbacks.patients", "3"), "fix:     write --trainer.callbacks.patience 3"),
        ((*stop, "--trainer.callbacks.mode", "least"), "error: trainer: `mode` can be min, max, got least"),
        (("lit_fsdp.EMAWeights", "--trainer.callbacks.decay", "2"), "error: EMAWeights.decay: got 2.0"),
    ):
        found = said_by(*words, *callback, code=2)
        assert sentence in found, callback
        assert "Namespace" not in found
        assert "Traceback" not in found


def test_what_lightning_refuses_is_one_sentence(here: Path) -> None:
    words = ("fit", "--config", "ours.yaml", "--allow-imports", "mine", "--data.val", "generated:16")
    said = said_by(*words, "--trainer.val_check_interval", "1000", code=2)
    assert "Traceback" not in said
    assert said.count("`val_check_interval` (1000) must be less than or equal to the number of the training") == 1
    assert "fix:     set trainer.check_val_every_n_epoch: null" in said
    said = said_by(*words, "--trainer.val_check_interval", "0.5", "--trainer.check_val_every_n_epoch", "null", code=2)
    assert "fix:     set trainer.check_val_every_n_epoch: 1" in said
    assert "Traceback" in said_by(*words, "--trainer.val_check_interval", "1000", "--debug", code=2)
    said = said_by(*words, "--trainer.callbacks", "mine.Text", code=1)  # a wrong call of one's own class
    assert 'module.log("x", "text")' in said
    assert "values cannot be logged" in said
