"""Old checkpoints, full disks and second jobs, where all ranks have to come to the same end."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.checkpoint.run_folder import checkpoints, damaged
from tests.dist.workers import ROOT, Workers

ENGINES = [{"engine": "fsdp2", "precision": "fp32"}, {"engine": "fsdp1", "precision": "fp32"}]
PLENTY = 2**40
RECIPE = ["--config", str(ROOT / "recipes/qwen3-0.6b_full_fsdp2_8x24gb.yaml")]
SMOKE = [*RECIPE, "--config", str(ROOT / "configs/debug/smoke.yaml"), "--trainer.default_root_dir", "run"]


def fit(workers: Workers, run: Path, strategy: dict[str, Any], steps: int, **options: Any) -> dict[str, Any]:
    """What both ranks say, which has to be the same."""
    wide = {"wrap": ["Linear"], **strategy}
    ranks = workers.run("fit_with_room", 2, strategy=wide, run=str(run), steps=steps, **options)
    assert ranks[0] == ranks[1]
    return ranks[0]


def digests(run: Path) -> dict[str, str]:
    """Every file of the checkpoints."""
    files = [path for path in (run / "checkpoints").rglob("*") if path.is_file()]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("strategy", ENGINES, ids=lambda strategy: strategy["engine"])
@pytest.mark.parametrize("layout", ["sharded", "full"])
def test_the_bytes_foretold_are_the_bytes_written(
    workers: Workers, tmp_path: Path, strategy: dict, layout: str
) -> None:
    """Before step 1 there is no optimizer state; within two percent all the same."""
    found = fit(workers, tmp_path, {**strategy, "state_dict": layout}, 1, free=[PLENTY])
    assert (found["error"], found["there"]) == (None, [1])
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoints").rglob("*") if path.is_file())
    assert abs(found["estimate"] - written) <= 0.02 * written, (found["estimate"], written)


@pytest.mark.parametrize("strategy", ENGINES, ids=lambda strategy: strategy["engine"])
def test_no_room_before_the_first_step(workers: Workers, tmp_path: Path, strategy: dict) -> None:
    """Refused on both ranks; nothing is written, and what is there stays as it is."""
    first = fit(workers, tmp_path, strategy, 2, every_steps=1, keep_last=2)
    assert first["there"] == [1, 2]
    before = digests(tmp_path)
    resume = {"ckpt_path": str(tmp_path / "checkpoints/step-00000002"), "every_steps": 1, "keep_last": 2}
    size = first["estimate"]
    refused = fit(workers, tmp_path, strategy, 4, free=[size // 2], **resume)
    assert "not enough disk space for checkpoints" in refused["error"]
    assert "at most 3 at a time" in refused["error"]
    assert "name another trainer.default_root_dir" in refused["error"]
    assert (refused["taken"], refused["there"]) == (2, [1, 2])
    limited = fit(workers, tmp_path, strategy, 4, max_total_gib=2.5 * size / 2**30, **resume)
    assert limited["error"].startswith("checkpoint.max_total_gib: got ")
    assert digests(tmp_path) == before
    done = fit(workers, tmp_path, strategy, 4, max_total_gib=3.1 * size / 2**30, **resume)
    assert (done["error"], done["there"]) == (None, [3, 4])


def test_a_disk_that_fills_up_on_the_way(workers: Workers, tmp_path: Path) -> None:
    """Room at the start, none at the third save: an error on both ranks, and the second one stands."""
    found = fit(workers, tmp_path, ENGINES[0], 5, free=[PLENTY, PLENTY, PLENTY, 1000], every_steps=1, keep_last=1)
    assert "not enough disk space" in found["error"]
    assert "at most 1 at a time" in found["error"]
    assert (found["taken"], found["there"]) == (3, [2])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_what_one_rank_does_not_see_yet(workers: Workers, tmp_path: Path) -> None:
    """On a network file system rank 1 may look at an older state of the folder: what rank 0 sees counts for both."""
    first = fit(workers, tmp_path, ENGINES[0], 2, every_steps=1, keep_last=2)
    assert first["there"] == [1, 2]
    used = fit(workers, tmp_path, ENGINES[0], 4, unseen=2)
    assert "already holds 2 checkpoint(s), the newest of step 2" in used["error"]
    nothing = fit(workers, tmp_path, ENGINES[0], 4, unseen=2, ckpt_path="last")
    assert "some ranks see a checkpoint there and some do not yet" in nothing["error"]
    older = fit(workers, tmp_path, ENGINES[0], 4, unseen=1, ckpt_path="last", every_steps=1, keep_last=2)
    assert (older["error"], older["taken"]) == (None, 4)
    assert older["loaded"].endswith("step-00000002")


def test_every_nth_and_the_newest(workers: Workers, tmp_path: Path) -> None:
    found = fit(workers, tmp_path, ENGINES[0], 7, every_steps=1, keep_every=3, keep_last=1)
    assert (found["error"], found["there"]) == (None, [3, 6, 7])


def test_where_all_are_kept_every_best_one_stays(workers: Workers, tmp_path: Path) -> None:
    job: dict[str, Any] = {"every_steps": 3, "keep_last": -1, "validate": True}
    done = fit(workers, tmp_path, ENGINES[0], 4, **job)
    assert (done["error"], done["there"]) == (None, [1, 2, 3, 4])


def test_a_removal_that_fails_is_tried_again(workers: Workers, tmp_path: Path) -> None:
    """The run goes on; what was killed in a removal is swept by the next job."""
    found = fit(workers, tmp_path, ENGINES[0], 3, every_steps=1, keep_last=1, broken="step-00000001")
    assert (found["error"], found["taken"], found["there"]) == (None, 3, [1, 3])
    left = tmp_path / "checkpoints" / ".step-00000001.removed-0123456789abcdef"
    os.rename(tmp_path / "checkpoints" / "step-00000001", left)
    again = fit(
        workers, tmp_path, ENGINES[0], 4, every_steps=1, keep_last=1,
        ckpt_path=str(tmp_path / "checkpoints/step-00000003"),
    )  # fmt: skip
    assert (again["error"], again["there"]) == (None, [4])
    assert not left.exists()


@pytest.fixture
def held(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another job that holds ``run``."""
    code = "import sys, time; from lit_fsdp.checkpoint.run_lock import RunLock; RunLock('run'); print(1, flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(300)"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_job_is_refused_until_the_first_is_dead(
    workers: Workers, tmp_path: Path, held: subprocess.Popen[str]
) -> None:
    """In somebody's own Trainer, on both ranks, before anything is written."""
    refused = fit(workers, tmp_path / "run", ENGINES[0], 2)
    assert f"another job is at work in this run folder: process {held.pid} on host" in refused["error"]
    assert "name another trainer.default_root_dir" in refused["error"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
    os.kill(held.pid, signal.SIGKILL)
    held.wait()
    allowed = fit(workers, tmp_path / "run", ENGINES[0], 2)
    assert (allowed["error"], allowed["there"]) == (None, [2])


def lit_fsdp(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lit_fsdp", *words],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def test_the_command_refuses_a_held_folder_before_it_writes(tmp_path: Path, held: subprocess.Popen[str]) -> None:
    done = lit_fsdp("fit", *SMOKE, cwd=tmp_path)
    assert done.returncode == 1
    assert f"another job is at work in this run folder: process {held.pid} on host" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]


def test_a_crash_shows_no_secret_anywhere(tmp_path: Path) -> None:
    """A real run of two ranks that dies in its third step with the token in the exception."""
    canaries = {"HF_TOKEN": "canary-of-the-hub", "WANDB_API_KEY": "canary\"of'the log", "DB_PASSWORD": "canary@:/pass"}
    script = tmp_path / "crash.py"
    script.write_text(
        "import logging, os, sys\n"
        "from lit_fsdp.__main__ import main\n"
        "from lit_fsdp.module import CausalLMModule\n"
        "step = CausalLMModule.training_step\n"
        "def dies(self, batch, batch_idx):\n"
        "    if self.trainer.global_step == 2:\n"
        "        print('token ' + os.environ['HF_TOKEN'])\n"
        "        logging.getLogger('lit_fsdp').warning('key %s', os.environ['WANDB_API_KEY'])\n"
        "        raise RuntimeError(f\"refused: {os.environ['HF_TOKEN']} {os.environ['DB_PASSWORD']!r}\")\n"
        "    return step(self, batch, batch_idx)\n"
        "CausalLMModule.training_step = dies\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), "fit", *SMOKE],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), **canaries},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "RuntimeError: refused: *** '***'" in done.stderr
    assert "token ***" in done.stdout
    assert "key ***" in done.stderr
    assert "canary" not in done.stdout + done.stderr
    assert [entry.step for entry in checkpoints(tmp_path / "run")] == [2]
    assert damaged(tmp_path / "run") == []
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"recipe.yaml", "audit.json", "dtypes.json", "metrics.csv", "run.lock", "manifest.json"} <= {
        path.name for path in files
    }
    assert [str(path) for path in files if b"canary" in path.read_bytes()] == []
