"""Lines of shell that users add to a job: several at once, and what ends the job before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.errors import ConfigError
from lit_fsdp.launch.slurm_lint import lint
from tests.unit.launch.jobs import planned
from tests.unit.launch.test_lint import COMMAND, FINE, _a_shared_place_with_room, found  # noqa: F401 (a fixture)


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        (["if true; then"], "unexpected end of file"),
        (["echo 'open"], "unexpected EOF while looking for matching"),
        (["if true", "then true", "fi fi"], "syntax error"),
        (["cat > f <<EOF", "hello"], "delimited by end-of-file"),  # the rest of the script would be that text
    ],
)
def test_lines_that_bash_cannot_read(setup: list[str], says: str, tmp_path: Path):
    assert says in found({"setup": setup})["slurm.setup"].given
    file = tmp_path / "env.sh"
    file.write_text("\n".join(setup))
    assert says in found({"env_file": str(file)}, trainer={"num_nodes": 1})["slurm.env_file"].given


@pytest.mark.parametrize(
    ("setup", "is_fine"),
    [
        (["exit 0"], False),
        (["true; exit"], False),
        (["module load cuda", "exec env A=1 true"], False),
        (["module load cuda || exit 1"], True),
        (["module load cuda ||", "  exit 1"], True),
        (["if ! nvidia-smi; then", "  exit 1", "fi"], True),
        (["for i in 1 2; do if true; then", "exit 1", "fi; done", "check() {", "exit 2", "}"], True),
        (["case $x in", "  a) exit 1 ;;", "esac"], True),
        (["if true; then true", "fi", "exit 0"], False),
        (["exec 2>&1", "exec >log"], True),
        (["shopt -s extglob", "ls !(x)"], True),
        (["exec > >(tee -a log) 2>&1", "exec &> >(tee log)", "exec {fd}>lock"], True),
        (["function die {", "exit 1", "}"], True),
        (["( cd x; exit 0 )", "x=$(foo; exit 1)", "(", "  exit 1", ")"], True),
        (["if { true; }; then", "  exit 1", "fi"], True),
        (["python - <<'EOF'", "exit(0)", "EOF", "cat > job.sh <<-EOF", "exit 1", "\tEOF"], True),
        (["python - <<'EOF'", "exit(0)", "EOF", "exit 0"], False),
        (["echo 'two", "exit 0", "lines'"], True),
        (["if true; then true; fi", "exit 1"], False),
    ],
)
def test_lines_that_end_the_job_before_it_begins(setup: list[str], is_fine: bool):
    assert [key.partition("[")[0] for key in found({"setup": setup})] == ([] if is_fine else ["slurm.setup"])


def test_a_change_of_folder_is_noted():
    for line, is_said in (("cd /somewhere", True), ("(cd x && make)", False), ("make -C x", False)):
        job, run = planned({**COMMAND, "setup": [line]})
        assert ("slurm.setup[0] changes the folder" in " ".join(lint(job, run, FINE)[1])) is is_said


@pytest.mark.parametrize(
    "setup",
    [
        ["while IFS= read -r line; do", '  export "$line"', "done < secrets.env"],
        ["env |", "while read -r line; do true; done"],
        ["ask() {", "  read -r answer", "}", "ask < file"],
        ["cat > job.sh <<EOF", "srun hostname", "screen", "EOF"],
        ["words=(", "read", "srun", ")"],
        ["python -Wignore x.py", "python -Ximporttime x.py", "curl -s x | sh -s -- -i", "srun --version"],
    ],
)
def test_what_only_looks_like_a_launcher_or_a_terminal_in_several_lines(setup: list[str]):
    assert found({"setup": setup}) == {}


@pytest.mark.parametrize(
    "setup", [["words=(a)", "srun x"], ["cat <<EOF", "a", "EOF", "read x"], ["python -Wi -i x.py"]]
)
def test_what_follows_such_lines_counts(setup: list[str]):
    assert [key.partition("[")[0] for key in found({"setup": setup})] == ["slurm.setup"]


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "env.sh"
    file.write_text("true")

    def refused(*args: Any, **options: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(ConfigError, match=r"slurm\.env_file: got .*Permission denied"):
        found({"env_file": str(file)}, trainer={"num_nodes": 1})
