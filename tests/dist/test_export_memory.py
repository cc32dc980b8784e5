"""Export holds one piece of a tensor, whatever the size of the model: measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fsdp.checkpoint.run_folder import step_folder
from lit_fsdp.checkpoint.store import save_checkpoint

_MIB = 2**20
_LAYERS, _ROWS, _COLUMNS = 20, 2048, 2048  # 16 MiB each in fp32, 320 MiB together

# VmHWM after an export of a tiny checkpoint is what the imports and the machinery need anyway
_MEASURE = """
import json, sys
from pathlib import Path
from lit_fsdp.checkpoint.export import export
def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:"))) * 1024
tiny, ckpt, out, dtype, shard = sys.argv[1:]
options = dict(dtype=dtype if dtype != "none" else None, max_shard_gib=float(shard))
export(Path(tiny), Path(out) / "tiny", **options)
before = peak()
report = export(Path(ckpt), Path(out) / "big", **options)
sizes = [(Path(out) / "big" / name).stat().st_size for name in report.files]
print(json.dumps([peak() - before, max(sizes), report.plan.num_bytes]))
"""


def _save(folder: Path, layout: Any, layers: int, rows: int, columns: int) -> Path:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    manifest = {"global_step": 1, "model": {"prefix": "model.", "tied": {}}}
    one = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    tensors = {f"model/model.layers.{i:02d}.weight": one + i for i in range(layers)}
    files = {"hf/config.json": json.dumps(config).encode()}
    save_checkpoint(folder, tensors=tensors, state={}, manifest=manifest, layout=layout, files=files)
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="VmHWM is Linux's")
@pytest.mark.parametrize(("layout", "dtype"), [("sharded", "none"), ("full", "bf16")])
def test_peak_memory_is_far_below_the_models_size(tmp_path: Path, layout: str, dtype: str) -> None:
    tiny = _save(step_folder(tmp_path / "tiny", 1), layout, 2, 4, 4)
    big = _save(step_folder(tmp_path / "big", 1), layout, _LAYERS, _ROWS, _COLUMNS)
    (tmp_path / "out").mkdir()
    words = [sys.executable, "-c", _MEASURE, *map(str, (tiny, big, tmp_path / "out", dtype, 0.05))]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    grown, largest_file, written = json.loads(done.stdout.splitlines()[-1])
    assert written == _LAYERS * _ROWS * _COLUMNS * (2 if dtype == "bf16" else 4)
    assert grown < largest_file + 500 * _MIB  # what is promised
    assert grown < 250 * _MIB, f"grew by {grown / _MIB:.0f} MiB"  # what it takes; the model is 320 MiB
