"""The real command, as a user calls it: a recipe in miniature, what is refused, a profile, and out of memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_fsdp.checkpoint.run_folder import checkpoints
from tests.dist.forks import ROOT, SMOKE, command, server
from tests.pages import Page
from tests.runs import content, records


def lit_fsdp(*words: str, cwd: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run ``lit-fsdp`` in a folder."""
    return subprocess.run(
        [python, "-m", "lit_fsdp", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(cwd)])},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished miniature run; its folder is ``run`` inside."""
    cwd = tmp_path_factory.mktemp("smoke")
    words = ("--verbose", "--trainer.default_root_dir", "run", "--checkpoint.export", "last")
    done = lit_fsdp("fit", *SMOKE, *words, cwd=cwd, python=server().python)
    assert done.returncode == 0, done.stderr
    assert "miniature: model.name: llama of 2 layers, hidden size 64, random init" in done.stderr
    assert "FSDP units by the model's no-split classes (LlamaDecoderLayer)" in done.stderr
    return cwd


def test_resumes_at_the_ends_of_epochs_do_not_add_one(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is 1 + {n}?", "completion": str(n + 1)} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--data.train", "rows.jsonl", "--trainer.devices", "1", "--trainer.val_check_interval", "1.0"]
    words += [
        "--trainer.check_val_every_n_epoch",
        "1",
        "--trainer.max_epochs",
        "3",
        "--trainer.default_root_dir",
        "run",
    ]
    for steps, more in (("2", []), ("4", ["--ckpt_path", "last"]), ("-1", ["--ckpt_path", "last"])):
        one = ["--trainer.max_steps", steps, *more]
        done = lit_fsdp("fit", *SMOKE, *words, *one, cwd=tmp_path, python=server().python)
        assert done.returncode == 0, done.stderr
    assert [row["step"] for row in records(tmp_path / "run/metrics.csv")] == ["1", "2", "3", "4", "5", "6"]
    assert "step 6: val_loss" in done.stderr
    before = json.loads((tmp_path / "run/audit.json").read_text())
    again = lit_fsdp("fit", *SMOKE, *words, *one, cwd=tmp_path, python=server().python)
    assert json.loads((tmp_path / "run/audit.json").read_text()) == before
    assert before["status"] == "finished"
    assert "already at trainer.max_epochs 3, step 6: nothing was trained" in again.stderr


def test_a_monitor_that_the_first_validation_does_not_log(tmp_path: Path) -> None:
    words = ["--trainer.devices", "1", "--trainer.default_root_dir", "run", "--checkpoint.monitor", "accuracy"]
    done = lit_fsdp("fit", *SMOKE, *words, cwd=tmp_path, python=server().python)
    assert done.returncode == 0
    assert done.stderr.count("checkpoint.monitor: accuracy is not logged (logged: train_loss, ") == 1
    assert "best checkpoint: " not in done.stderr
    words[1:2], words[-2:] = ["2"], ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor", "accuracy"]
    words += ["--trainer.max_steps", "8"]
    done = lit_fsdp("fit", *SMOKE, *words, "--ckpt_path", "last", cwd=tmp_path, python=server().python)
    assert done.returncode == 2
    assert "fix:     set its monitor to a metric that validation logs, such as val_loss" in done.stderr
    text = "micro-batches per step: 2 instead of 4, so trainer.val_check_interval: 4 validates every 2 steps, not every"
    assert done.stderr.count(f"{text} 1") == 1
    for verb in ("validate", "predict"):
        here = ["--trainer.default_root_dir", "run", "--trainer.devices", "1"]
        asked = lit_fsdp(verb, *SMOKE, *here, "--ckpt_path", "last", cwd=tmp_path, python=server().python)
        assert asked.returncode == 0, asked.stderr
        assert text[:24] not in asked.stderr
    assert "Traceback" not in done.stderr


def test_resume_on_the_other_engine_continues_run_and_metrics(smoke: Path, tmp_path: Path) -> None:
    """On two ranks that somebody else started."""
    smoke = shutil.copytree(smoke, tmp_path / "smoke")
    before = records(smoke / "run/metrics.csv")
    words = ["--verbose", "--trainer.default_root_dir", "run", "--ckpt_path", "last", "--trainer.max_steps", "6"]
    few = lit_fsdp("fit", *SMOKE, *words[:-1], "3", cwd=smoke, python=server().python)
    assert few.returncode == 2
    assert "trainer.max_steps: got 3 with run/checkpoints/step-00000004" in few.stderr
    lost = lit_fsdp("fit", *SMOKE, *words, "--trainer.callbacks+=torch.Nope", cwd=smoke, python=server().python)
    assert "trainer.callbacks: got torch.Nope (module 'torch' has no attribute 'Nope')" in lost.stderr
    choices = [f"--trainer.strategy.init_args.{choice}" for choice in ("engine=fsdp1", "sharding=hybrid_shard")]
    choices += ["--trainer.logger", "CSVLogger"]
    done = command(2, ["fit", *SMOKE, *words, "--model.optim.lr=0.001", *choices], smoke)
    assert [rank.code for rank in done] == [0, 0], done[0].err
    assert "trainer.strategy.init_args.replicate_degree: None → 2 (2 ranks on one node)" in done[0].err
    said = done[0].err.split("resumed from step 4: run/checkpoints/step-00000004\n")[1].splitlines()
    changed = [line for line in said if line.startswith("  ") and " → " in line and "trainer.logger" not in line]
    assert sorted(changed) == [
        "  checkpoint.export: 'last' → None",
        "  model.optim.lr: 2e-05 → 0.001",
        "  trainer.max_steps: 4 → 6",
        "  trainer.strategy.init_args.engine: 'fsdp2' → 'fsdp1'",
        "  trainer.strategy.init_args.replicate_degree: None → 2",
        "  trainer.strategy.init_args.sharding: 'full_shard' → 'hybrid_shard'",
    ]
    assert "learning rate changes from 2e-06 to 0.0004109 because model.optim or the training length" in done[0].err
    assert "learning rate" not in done[1].err
    after = records(smoke / "run/metrics.csv")
    assert after[:4] == before
    assert json.loads((smoke / "run/audit.json").read_text())["shard_degree"] == 1
    assert "parameters after resume" in json.loads((smoke / "run/dtypes.json").read_text())["realized"]
    page = Page((smoke / "run/report.html").read_text())
    assert (page.curves["train_loss"], dict(page.tables["At a glance"])["status"]) == (6, "finished")
    starts = dict(page.tables["At a glance"])["starts"]
    assert starts.startswith("from step 0 on 2 ranks; from step 4 on 2 ranks, ")
    assert "model.optim.lr: 2e-05 → 0.001" in starts
    assert len(records(smoke / "run/lightning_logs/version_0/metrics.csv")) > 0  # of a logger without a save_dir


def test_help_of_a_section_is_that_of_its_class(tmp_path: Path) -> None:
    for words, named in (
        (["--model.help"], ["CausalLMModule", ".optim.lr LR"]),
        (["--data.help"], ["CausalLMDataModule", ".packing"]),
        (["--model.help", "lightning.pytorch.demos.boring_classes.BoringModel"], ["BoringModel"]),
    ):
        done = lit_fsdp("fit", *words, cwd=tmp_path, python=server().python)
        assert done.returncode == 0, done.stderr
        assert [name for name in named if name not in done.stdout] == []


def test_validate_test_and_predict(smoke: Path) -> None:
    """On two ranks that somebody else started."""

    def run(verb: str, ckpt_path: str, *words: str) -> str:
        words = (verb, *SMOKE, "--trainer.default_root_dir", "run", "--ckpt_path", ckpt_path, *words)
        done = command(2, words, smoke)
        assert [rank.code for rank in done] == [0, 0], done[0].err
        return done[0].out + done[0].err

    before = content(smoke / "run")
    written = {"audit.json", "data.json", "dtypes.json", "metrics.csv", "recipe.yaml", "report.html", "run.lock"}
    assert {path for path in before if "/" not in path} == written
    losses = {
        entry.step: entry.metrics["val_loss"] for entry in checkpoints(smoke / "run") if "val_loss" in entry.metrics
    }
    best = min(losses, key=lambda step: losses[step])
    out = run("validate", "best", "--trainer.limit_val_batches", "2")
    assert "val_perplexity" in out
    assert float(re.findall(r"val_loss\D+([\d.]+)", out)[0]) == pytest.approx(losses[best], rel=1e-5)
    path = f"run/checkpoints/step-{best:08d}"  # the same rows as test rows
    out = run("test", path, "--trainer.limit_test_batches", "2")
    assert float(re.findall(r"test_loss\D+([\d.]+)", out)[0]) == pytest.approx(losses[best], rel=1e-5)
    out = run("predict", "last", "--data.predict", "generated:7", "--trainer.profiler", "simple")
    assert "Profiler Report" in out
    rows = [json.loads(line) for line in (smoke / "run/predictions.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(7))
    assert all(row["supervised_tokens"] > 0 and row["loss_sum"] > 0 for row in rows)
    run("validate", "last", "--trainer.limit_val_batches", "2")
    after = content(smoke / "run")
    assert {path: after[path] for path in before} == before  # the records of the training run
    added = sorted(after.keys() - before)
    assert added == ["predictions.jsonl", "test-metrics.csv", "validate-metrics.csv"]
    rows = records(smoke / "run/validate-metrics.csv")
    assert [(int(row["step"]), float(row["val_loss"])) for row in rows] == [
        (step, pytest.approx(losses[step], rel=1e-6)) for step in (best, 4)
    ]


def test_a_run_is_exported_by_its_name_and_chats(smoke: Path, tmp_path: Path) -> None:
    for name in ("", "/last", "/best", "/4"):  # of random weights the last validation is the best
        out = tmp_path / f"out{name.replace('/', '-')}"
        done = lit_fsdp("export", "--ckpt", f"run{name}", "--out", str(out), cwd=smoke, python=server().python)
        assert done.returncode == 0, done.stderr
    missing = lit_fsdp("export", "--ckpt", "run/3", "--out", str(tmp_path / "no"), cwd=smoke, python=server().python)
    assert "run has no complete checkpoint of step 3, only of [2, 4]" in missing.stderr
    at_the_end = smoke / "run/export/step-00000004"
    files = [content(path) for path in (at_the_end, *sorted(tmp_path.glob("out*")))]
    weights = [{name: value for name, value in one.items() if name.endswith(".safetensors")} for one in files]
    assert len(weights) == 5
    assert all(one == weights[0] for one in weights)
    words = [server().python, "-m", "lit_fsdp", "generate", "--model", str(tmp_path / "out"), "--max_new_tokens", "3"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    chat = subprocess.run(words, input="Hello\nMore\n\nnever\n", env=env, capture_output=True, text=True, check=False)
    assert chat.returncode == 0, chat.stderr
    once = subprocess.run([*words, "--prompt", "Hello"], env=env, capture_output=True, text=True, check=True)
    assert chat.stdout.startswith(once.stdout.rstrip("\n"))
    assert len(chat.stdout) > len(once.stdout)


def test_refused_at_once_without_torch(tmp_path: Path) -> None:
    """One of each kind of refusal; tests/configs has all of them."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    for words, code, needles in (
        (["--model.optim.warmup", "1"], 2, ["model.optim.warmup: got a key", "write --model.optim.warmup_steps 1"]),
        (["--data.micro_batch_size", "3"], 2, ["got 4 with micro_batch_size 3 on 2 ranks", "set global_batch_size: 6"]),
        (
            ["--ckpt_path", "last"],
            1,
            ["no complete checkpoint in other/checkpoints; other is empty, or does not exist"],
        ),
    ):
        done = lit_fsdp("fit", *SMOKE, "--trainer.default_root_dir", "other", *words, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, "")
        error = [line for line in done.stderr.splitlines() if not line.startswith("miniature: ")]
        assert error[0].startswith("error: ")
        assert [line.split()[0] for line in error[1:]] == (["allowed:", "fix:"] if code == 2 else []), done.stderr
        for needle in needles:
            assert needle in done.stderr
        assert not (tmp_path / "other").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has what is refused elsewhere")
def test_a_gpu_that_is_not_there_names_what_is(tmp_path: Path) -> None:
    done = lit_fsdp("fit", *SMOKE, "--trainer.accelerator", "gpu", cwd=tmp_path, python=server().python)
    assert done.returncode == 2
    assert "trainer.accelerator: got gpu, which this machine does not have" in done.stderr
    assert "fix:     add --trainer.accelerator cpu" in done.stderr


def test_a_profile_has_traces_and_tables_of_two_ranks(tmp_path: Path) -> None:
    done = command(2, ["profile", *SMOKE, "--json"], tmp_path)
    assert [rank.code for rank in done] == [0, 0], done[0].err
    folder = tmp_path / "runs/smoke/profile"
    assert not (folder / "checkpoints").exists()
    assert [path.name for path in sorted(folder.glob("rank-*"))] == ["rank-0.json", "rank-1.json"]
    found = json.loads(done[0].out)
    assert found["advice"]
    assert all(ms > 0 and calls > 0 for _, ms, calls in found["ranks"][0]["operators"])
    for rank, record in enumerate(found["ranks"]):
        events = json.loads((folder / f"rank-{rank}.json").read_text())["traceEvents"]
        marks = [event for event in events if event["name"].startswith("lit_fsdp: ")]
        assert len(marks) == 3 * 2 * 4  # three steps of two micro-batches, four phases each
        end = max(mark["ts"] + mark["dur"] for mark in marks)
        step = sum(phase["all"] for phase in record["phases"].values())
        assert step * 3 == pytest.approx((end - min(mark["ts"] for mark in marks)) / 1000, rel=1e-6)
        for phase in record["phases"].values():
            parts = phase["compute"] + phase["exposed communication"] + phase["idle"]
            assert parts == pytest.approx(phase["all"])
            assert phase["communication"] >= phase["exposed communication"] >= 0
        for name in ("forward", "backward"):
            assert record["phases"][name]["compute"] > 0
            assert record["phases"][name]["communication"] > 0


def test_a_profile_that_is_refused(tmp_path: Path) -> None:
    short = ["--trainer.max_steps", "-1", "--trainer.max_epochs", "1", "--data.train", "generated:8"]
    for words, said in ((["--steps", "0"], "got 0"), ([*short, "--steps", "9"], "got 9, but training ended before")):
        (done,) = command(1, ["profile", *SMOKE, "--trainer.devices=1", *words], tmp_path)
        assert (done.code, f"--steps: {said}" in done.err) == (2, True), done.err


_KILLED = """
import os
import signal
from lightning.pytorch import Callback

class Killed(Callback):
    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_rank_that_was_killed_is_named_and_how_to_resume(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(_KILLED)
    words = ["fit", *SMOKE, "--allow-imports", "killed", "--trainer.callbacks+=killed.Killed"]
    done = lit_fsdp(*words, cwd=tmp_path, python=server().python)  # which starts rank 1
    assert done.returncode == 76, done.stderr
    assert "Traceback" not in done.stderr
    lost = done.stderr.partition("error: ")[2]
    assert re.match(r"(Connection|Broken)[a-z ]+: rank 0 \(", lost)
    assert "rank 1 was ended by SIGKILL: the host may have run out of memory (see dmesg)" in lost
    assert "resume with --ckpt_path last" in lost
    first, killed = command(2, [*words, "--trainer.default_root_dir=again"], tmp_path)  # started by others
    assert (first.code, killed.code) == (76, -9)
    assert first.err.rstrip().endswith("\nresume with --ckpt_path last")


_CALLBACK = """
import resource
import torch
from lightning.pytorch import Callback

class Short(Callback):
    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_step < 1 or trainer.global_rank != 1:
            return
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, resource.RLIM_INFINITY))
        torch.ones(2**33)
"""


def test_one_of_two_ranks_out_of_memory_says_what_takes_less(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(_CALLBACK)
    words = ["fit", *SMOKE, "--allow-imports", "short", "--trainer.callbacks+=short.Short"]
    other, failed = command(2, [*words, "--data.micro_batch_size=2"], tmp_path)
    assert failed.code == 1, failed.output
    before, headline, after = failed.err.partition("Each of these options alone saves memory")
    assert "short.py, line 13: torch.ones(2**33)\n" in before
    assert "can't allocate memory" in before
    assert "Traceback" not in failed.err
    assert headline not in after
    assert "accumulates over 2 micro-batches; same global batch  --data.micro_batch_size 1" in after
    assert "--model.lora.target_modules all-linear" in after
    assert other.code not in (0, None)
    assert headline not in other.output
