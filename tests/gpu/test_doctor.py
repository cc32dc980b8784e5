"""``doctor`` on GPUs: what torch says of them, NCCL measured where there are two, a save from device memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def test_gpus_are_examined(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lit_fsdp", "doctor", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    assert done.stdout.startswith("{"), done.stderr
    report = json.loads(done.stdout)
    rows = {row["name"]: row for row in report["rows"]}
    count = torch.cuda.device_count()
    assert rows["GPUs"]["found"].startswith(f"{count} × {torch.cuda.get_device_name()}")
    for name in ("GPUs", "NCCL", "trial save"):
        assert rows[name]["grade"] == "ok", rows[name]
    assert f"by {count} rank(s)" in rows["trial save"]["found"]
    sizes = [2**20, 2**24, 2**27, 2**29] if count > 1 else []
    assert [rate["bytes"] for rate in report["rates"]] == sizes
    assert os.listdir(tmp_path) == []
