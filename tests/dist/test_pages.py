"""Every command of README.md and of the manual that needs no hardware is run as it stands, on miniatures of models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.dist.forks import server
from tests.pages import PAGES, ROOT, cells, script

# In place of what a page downloads: the smoke fragment, in run folders as the page names them. Recipes of finished
# runs have it already, and the audit needs no weights.
LIT_FSDP = """#!/bin/bash
words=("${@//step-00000060/step-00000004}")
case "$*" in
  *runs/*/recipe.yaml*) ;;
  fit* | profile* | validate* | data* | slurm*) words+=(--config "$SMOKE") ;;
esac
exec python -m lit_fsdp "${words[@]}"
"""


def follow(commands: str, folder: Path) -> None:
    """Run commands in a folder; one that fails is a failure."""
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHON": server().python,
        "PYTHONPATH": str(ROOT),
        "SMOKE": str(folder / "smoke.yaml"),
    }
    words = ["bash", "-euxo", "pipefail", "-c", commands]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which somebody has done what README.md says."""
    folder = tmp_path_factory.mktemp("pages") / "here"
    (folder / "bin").mkdir(parents=True)
    programs = {"python": "", "torchrun": "-m torch.distributed.run "}
    for name, words in programs.items():
        (folder / "bin" / name).write_text(f'#!/bin/bash\nexec "$PYTHON" {words}"$@"\n')
    (folder / "bin" / "lit-fsdp").write_text(LIT_FSDP)
    for program in (folder / "bin").iterdir():
        program.chmod(0o755)
    for name in ("recipes", "configs"):
        (folder / name).symlink_to(ROOT / name)
    smoke = yaml.safe_load((ROOT / "configs/debug/smoke.yaml").read_text())
    del smoke["trainer"]["default_root_dir"]
    (folder / "smoke.yaml").write_text(yaml.safe_dump(smoke))
    turns = [[("user", f"say {n}"), ("assistant", f"it is {n}")] for n in range(60)]
    rows = [{"messages": [{"role": role, "content": said} for role, said in turn]} for turn in turns]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    follow(script(ROOT / "README.md"), folder)
    return folder


@pytest.fixture
def here(followed: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(followed, tmp_path / "here", symlinks=True))


def test_three_commands(followed: Path) -> None:
    assert (followed / "runs" / "my" / "checkpoints" / "step-00000004" / "manifest.json").is_file()
    assert "rows.jsonl" in (followed / "runs" / "my" / "recipe.yaml").read_text()


@pytest.mark.long("tests/spec tries the same promises")
def test_the_command_of_each_promise(here: Path) -> None:
    (here / "accelerate.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n")
    follow("\n".join(cells(ROOT / "docs/verification.md")), here)
    assert json.loads((here / "runs" / "packed" / "isolation.json").read_text())
    assert (here / "verified" / "config.json").is_file()


_LONG = pytest.mark.long("tests/dist has a test of each of its commands; those of the other pages run in `make test`")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[_LONG] * (page.stem in ("quickstart", "lora", "preference")))
        for page in PAGES[1:]
        if script(page)
    ],
)
def test_a_page_of_the_manual(page: Path, here: Path) -> None:
    before = set(here.iterdir())
    follow(script(page), here)
    assert before <= set(here.iterdir())
