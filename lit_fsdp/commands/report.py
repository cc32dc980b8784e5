"""``report``: write the report of a run folder, or a comparison of several."""

from collections.abc import Sequence
from pathlib import Path

from lit_fsdp.commands.parsing import parse, verb_parser
from lit_fsdp.errors import require


def run_report(argv: Sequence[str]) -> int:
    """Run ``lit-fsdp report`` and return the exit code."""
    text = "Rewrite the report of a run, also of a killed one, or write a page that compares several runs."
    parser = verb_parser("report", text, "lit-fsdp report runs/smoke")
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="run folders")
    parser.add_argument("-o", "--out", type=Path, help="file; default: report.html in RUN, or next to the first RUN")
    options = parse(parser, argv)
    from lit_fsdp.report.page import NAME, read_run, write_page

    runs = [read_run(folder) for folder in options.runs]
    for run in runs:
        lacks = "has no step in metrics.csv" if run.folder.is_dir() else "does not exist"
        given = f"{run.folder}, which {lacks}"
        fix = "name the trainer.default_root_dir of a fit; set trainer.log_every_n_steps: 1 to log every step"
        require(run.metrics, "RUN", given, "a run folder with logged steps", fix)
    names = [run.folder.resolve().name for run in runs]
    others = names[1] if len(runs) == 2 else f"{len(runs) - 1}-more"
    beside = runs[0].folder / NAME if len(runs) == 1 else runs[0].folder.parent / f"report-{names[0]}-{others}.html"
    out: Path = options.out or beside
    write_page(runs, out)
    print(out)
    return 0
