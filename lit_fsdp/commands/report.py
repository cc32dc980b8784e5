"""``report``: the page of a run folder, or of several beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lit_fsdp.commands.parsing import parse, verb_parser
from lit_fsdp.errors import require


def run_report(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp report`` and return the exit code."""
    text = "Write the page that ends each fit anew, of a killed run too, or one page that compares runs."
    parser = verb_parser("report", text, "lit-fsdp report runs/smoke")
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run folders")
    parser.add_argument(
        "-o", "--out", type=Path, help="file; default: report.html in the run folder, of several runs here"
    )
    options = parse(parser, argv)
    from lit_fsdp.report.page import MAX_RUNS, NAME, read_run, write_page

    folders: list[Path] = options.runs
    require(len(folders) <= MAX_RUNS, "RUN", f"{len(folders)} run folders", f"at most {MAX_RUNS} on one page")
    runs = [read_run(folder) for folder in folders]
    for folder, run in zip(folders, runs, strict=True):
        near = sorted(
            {file.parent for place in (folder, folder.parent) for file in place.glob("*/metrics.csv")} - {folder}
        )
        given = f"{folder}, which {'has no step in a metrics.csv' if folder.is_dir() else 'is no folder'}"
        allowed = f"a run folder with logged steps{': ' * bool(near)}{', '.join(map(str, near[:5]))}"
        fix = "name the trainer.default_root_dir of a fit; trainer.log_every_n_steps: 1 lets it log every step"
        require(run.metrics or run.not_finite, "RUN", given, allowed, fix)
    out: Path = options.out or (folders[0] / NAME if len(folders) == 1 else Path(NAME))
    fix = f"mkdir -p {out.parent}, or name another"
    require(out.parent.is_dir() and not out.is_dir(), "--out", out, "a file in a folder that exists", fix)
    write_page(runs, out)
    print(out)
    return 0
