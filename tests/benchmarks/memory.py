"""Predicted beside measured memory: three architectures, three shardings, with and without recomputation.

    python tests/benchmarks/memory.py [WORD ...]

runs ``lit-fsdp fit`` for each cell of the table in ``docs/plan.md`` on two CPU ranks in fp32, or for those whose name
has every WORD, and prints a row: whether live parameters, gradients and optimizer state are as the audit declares, and
the growth of the resident set, predicted and measured. A minute or two a cell. With ``context`` it is one row of 4,096
tokens (or of the number that is one of the WORDs) that two or four ranks share, compared with that of as many ranks
which have their own, both without state, gathered weights and their gradients: the growth of the resident set, then the
tensors of a step as the allocator counts them. Its models have a vocabulary of 8,192.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from record import python
from work import random_rows, save_rows

from lit_fsdp.audit import audit_recipe
from lit_fsdp.config.parser import load_recipe
from lit_fsdp.models.tokenizers import miniature_tokenizer
from lit_fsdp.plan.memory import rank_memory

WORDS = [word for word in sys.argv[1:] if not word.isdecimal()]
ROWS, LONG = 4, next((int(word) for word in sys.argv[1:] if word.isdecimal()), 4096)
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "vocab_size": 32768, "max_position_embeddings": LONG, "tie_word_embeddings": False}
MODELS = {
    "Llama": {"model_type": "llama", **SIZES},
    "Gemma 3": {"model_type": "gemma3_text", **SIZES, "head_dim": 64, "tie_word_embeddings": True},
    "Mixtral": {"model_type": "mixtral", **SIZES, "intermediate_size": 768, "num_local_experts": 4},
}
SHARDINGS = {
    "fsdp2 full_shard": {"engine": "fsdp2", "sharding": "full_shard"},
    "fsdp2 shard_grad_op": {"engine": "fsdp2", "sharding": "shard_grad_op"},
    "ddp": {"engine": "ddp"},
}
DATA = {"train": "generated:512", "packing": True, "train_on_prompt": True, "chat_template": "chatml", "num_workers": 0}
DATA |= {"max_seq_length": 512, "micro_batch_size": ROWS, "global_batch_size": 2 * ROWS}
# how many ranks share a row, and how many there are
CONTEXT = {f"context {degree} of {ranks}": (degree, ranks) for degree, ranks in ((1, 2), (2, 2), (1, 4), (4, 4))}
# freed blocks go back to the system at once, so that the resident set is what is in use
MALLOC = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


def measured(model: str, sharding: str, mode: str, callback: str = "States") -> tuple[str, int]:
    """Run one cell; its row of the table, and the bytes of activations: of the resident set, or with Tensors of those.

    These are two runs, because counting tensors takes memory itself.
    """
    strategy, ranks, data, sizes = SHARDINGS.get(sharding), 2, DATA, MODELS[model]
    if strategy is None:
        degree, ranks = CONTEXT[sharding]
        strategy, sizes = {"engine": "fsdp2", "context_parallel": degree}, {**sizes, "vocab_size": 8192}
        data = {**DATA, "packing": False, "max_seq_length": LONG, "train": save_long_rows()}
        data |= {"micro_batch_size": 1, "global_batch_size": ranks // degree}
    with tempfile.TemporaryDirectory() as folder:
        config, recipe, run = (Path(folder, name) for name in ("config.json", "recipe.yaml", "run"))
        config.write_text(json.dumps(sizes))
        miniature_tokenizer().save_pretrained(folder)
        trainer = {"accelerator": "cpu", "devices": ranks, "max_steps": 2, "default_root_dir": str(run)}
        trainer |= {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
        arguments = {**strategy, "precision": "fp32", "activation_checkpointing": mode}
        trainer["strategy"] = {"class_path": "lit_fsdp.fsdp_strategy", "init_args": arguments}
        trainer["callbacks"] = [{"class_path": f"tests.benchmarks.steps.{callback}"}]
        values = {"trainer": trainer, "model": {"name": str(config), "tokenizer": folder}, "data": data}
        recipe.write_text(json.dumps(values))
        words = ["--config", str(recipe), "--allow-imports", "tests"]
        python(["-m", "lit_fsdp", "fit", *words], ranks, **MALLOC)
        live = [json.loads((run / f"{callback.lower()}-{rank}.json").read_text()) for rank in range(ranks)]
        audit = json.loads((run / "audit.json").read_text())
        declared = audit_recipe(load_recipe(words, "audit").run)["state_per_rank"]
        step = rank_memory(load_recipe(words, "plan").run).step
    if callback == "Tensors":
        head = 4 * sizes["vocab_size"] * sizes["hidden_size"]  # its gradient is whole while the loss is computed
        return "", max(live) - step.gathered - step.reduced - head
    promised = [[rank[f"{kind}_bytes"] for kind in ("parameter", "gradient", "optimizer")] for rank in declared]
    states = "exact" if promised * (ranks // len(promised)) == live else f"{promised} declared, {live} live"
    predicted, found = audit["predicted_peak_bytes"], max(audit["measured_peak_bytes_per_rank"])
    cells = [model, f"`{sharding}`", mode, states, f"{predicted / 2**30:.3f}", f"{found / 2**30:.3f}"]
    others = max(map(sum, live)) + step.gathered + step.reduced
    return f"| {' | '.join(cells)} | {predicted / found - 1:+.1%} |", found - others


def save_long_rows() -> str:
    """A file of rows that are cut at ``LONG`` tokens."""
    file = Path(tempfile.gettempdir(), "lit_fsdp-long-rows.jsonl")
    return str(save_rows(file, random_rows(8, LONG, LONG)))


if __name__ == "__main__":
    print("| model | sharding | recomputation | states | predicted GiB | measured GiB | difference |")
    print("|---|---|---|---|---|---|---|", flush=True)
    whole = [1, 1]
    choices = CONTEXT if "context" in WORDS else SHARDINGS
    for cell in ((model, sharding, mode) for model in MODELS for mode in ("none", "full") for sharding in choices):
        if all(word in " ".join(cell) for word in WORDS):
            row, resident = measured(*cell)
            if cell[1] in CONTEXT:
                added = [resident, measured(*cell, "Tensors")[1]]
                whole = added if CONTEXT[cell[1]][0] == 1 else whole
                row += "".join(
                    f" {one / 2**20:.0f} MiB, {one / of:.3f} |" for one, of in zip(added, whole, strict=True)
                )
            print(row, flush=True)
