"""Peak host memory per rank while a model is loaded: ours on both engines beside Transformers and Accelerate.

    python tests/benchmarks/loading.py [--ranks 1 2 4] [--sides fsdp2 fsdp1 transformers accelerate] [--model FOLDER]

Every figure is taken in fresh processes (see load_once.py). Models: SmolLM2-135M as the quickstart's conversion left
it in the cache (fp32 on disk), and a Llama shape of 0.5B parameters with random weights (bf16 on disk), or the folder
given. The aim for ours is (the rank's shard + the largest unit + 300 MB) above the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lit_fsdp.host import free_port

ROOT = Path(__file__).resolve().parents[2]
SIDES = ("fsdp2", "fsdp1", "transformers", "accelerate")
ALLOWANCE = 300_000_000
MB = 1_000_000
HALF_BILLION = {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
_LIMIT_SECONDS = 300


def main() -> int:
    """Measure every side at every number of ranks, print the table, write everything as JSON."""
    from record import command_line, describe, table_row

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--model", type=Path, help="a safetensors folder of a Llama instead of the two models")
    options = parser.parse_args()
    place = ROOT / "runs" / "bench"
    place.mkdir(parents=True, exist_ok=True)
    record, rows = describe(command_line()), []
    with tempfile.TemporaryDirectory(dir=place) as folder:
        for name, model in models(options.model, Path(folder)).items():
            for ranks in options.ranks:
                for side in options.sides:
                    rows.append({"model": name, "ranks": ranks, "side": side, **measure(side, model, ranks)})
                    print(_line(rows[-1]), flush=True)
    record["results"] = rows
    (place / "loading.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\nrows for recipes/README.md; everything is in runs/bench/loading.json\n")
    for name in dict.fromkeys(row["model"] for row in rows):
        what = f"peak MB per rank above imports while loading {name}, {'/'.join(map(str, options.ranks))} ranks"
        sides = {side: [row for row in rows if (row["model"], row["side"]) == (name, side)] for side in options.sides}
        result = "; ".join(f"{side} {'/'.join(_figure(row) for row in found)}" for side, found in sides.items())
        print(table_row(what, result, record))
    return 0


def models(given: Path | None, folder: Path) -> dict[str, Path]:
    """Model folders by name."""
    if given is not None:
        return {given.name: given}
    from lit_fsdp.config.model import ModelConfig
    from lit_fsdp.models.resolve import resolve_model

    gguf = ROOT / "runs/quickstart-data/SmolLM2-135M-Instruct.Q4_1.gguf"
    if not gguf.exists():
        sys.exit("runs/quickstart-data is missing; run: make quickstart")
    real = resolve_model(ModelConfig(name=str(gguf)), seed=0).weights_folder
    assert real is not None
    return {"SmolLM2-135M (fp32 file)": real, "0.5B Llama (bf16 file)": write_random_llama(folder, HALF_BILLION)}


def write_random_llama(folder: Path, shape: dict[str, Any]) -> Path:
    """A Llama folder with small random bf16 weights, one file per block, so that no whole model is ever in memory."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from lit_fsdp.models.build import build_on_meta
    from lit_fsdp.models.tokenizers import miniature_tokenizer
    from lit_fsdp.models.weights import tied_groups

    config = LlamaConfig(**shape)
    model = build_on_meta(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    files: dict[str, list[str]] = {}
    for name in (names[0] for names in tied_groups(model)):
        files.setdefault(name.rpartition("layers.")[2].split(".")[0], []).append(name)
    weight_map = {}
    for number, names in enumerate(files.values(), 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weights = {name: (torch.randn(shapes[name]) * 0.02).to(torch.bfloat16) for name in names}
        save_file(weights, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    miniature_tokenizer().save_pretrained(folder)
    return folder


def measure(side: str, model: Path, ranks: int) -> dict[str, Any]:
    """The records of all ranks of one fresh run, or the last line of its error.

    Returns:
        ``ranks_measured``: per rank ``imported_bytes``, ``peak_bytes``, ``held_bytes`` and, for ours, counts of
        parameters; or ``error``.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        env |= {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
        env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        command = [sys.executable, str(Path(__file__).with_name("load_once.py")), side, str(model), str(out)]
        processes = [
            subprocess.Popen(
                command,
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=_LIMIT_SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if any(process.returncode for process in processes):
            return {"error": next(s for p, s in zip(processes, said, strict=True) if p.returncode).strip()[-2000:]}
        return {"ranks_measured": [json.loads(out.with_suffix(f".{r}.json").read_text()) for r in range(ranks)]}


def above_imports(record: dict[str, Any]) -> int:
    """Bytes that loading took at most, above what was resident after the imports."""
    return record["peak_bytes"] - record["imported_bytes"]


def bound(record: dict[str, Any], allowance: int = ALLOWANCE) -> int:
    """The aim in bytes: the rank's shard, the largest unit in fp32, and an allowance."""
    return record["held_bytes"] + 4 * record["largest_unit"] + allowance


def _figure(row: dict[str, Any]) -> str:
    if "error" in row:
        return "failed"
    return f"{max(above_imports(record) for record in row['ranks_measured']) / MB:.0f}"


def _line(row: dict[str, Any]) -> str:
    start = f"{row['model']}  {row['ranks']} ranks  {row['side']:<12}"
    if "error" in row:
        return f"{start} failed: {row['error'].splitlines()[-1]}"
    text = f"{start} {' '.join(f'{above_imports(r) / MB:.0f}' for r in row['ranks_measured'])} MB"
    if row["side"] in ("fsdp1", "fsdp2"):
        aims = [bound(record) / MB for record in row["ranks_measured"]]
        kept = all(above_imports(r) <= bound(r) for r in row["ranks_measured"])
        text += f"   aim {max(aims):.0f} MB, {'kept' if kept else 'MISSED'}"
    return f"{text}   weights held {max(r['held_bytes'] for r in row['ranks_measured']) / MB:.0f} MB"


if __name__ == "__main__":
    sys.exit(main())
