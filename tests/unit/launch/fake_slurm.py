"""Stand-ins for SLURM's commands, which answer what a test has laid down and write down how they were called."""

from __future__ import annotations

from pathlib import Path

import pytest

_SBATCH = """
cp "${@: -1}" "$FAKE/submitted"
cat "$FAKE/sbatch.err" >&2 2>/dev/null
[ -e "$FAKE/sbatch.wait" ] && { touch "$FAKE/sbatch.begun"; while [ -e "$FAKE/sbatch.wait" ]; do sleep 0.05; done; }
[ -e "$FAKE/sbatch.out" ] && { cat "$FAKE/sbatch.out"; exit 0; }
exit 1
"""
# answers 1, 2, ... in turn and then the last of them again; an empty one: forgotten; "down": no controller
_SCONTROL = """
n=$(($(cat "$FAKE/asked" 2>/dev/null || echo 0) + 1))
[ -e "$FAKE/state.$n" ] && echo "$n" >"$FAKE/asked" || n=$((n - 1))
answer=$(cat "$FAKE/state.$n" 2>/dev/null)
case "$answer" in
  "") echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;;
  down) echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1 ;;
  *) echo "$answer" ;;
esac
"""
_PROGRAMS = {
    "sbatch": _SBATCH,
    "scontrol": _SCONTROL,
    "scancel": "true",
    "sacct": 'if [ -e "$FAKE/sacct" ]; then cat "$FAKE/sacct"; else echo "accounting is disabled" >&2; exit 1; fi',
    "sinfo": 'cat "$FAKE/sinfo" 2>/dev/null || echo "gpu*|infinite|1-infinite|99|256|gpu:8"',
    "srun": '[ -e "$FAKE/srun.err" ] && { cat "$FAKE/srun.err" >&2; exit 1; }; cat "$FAKE/srun"',
}


class FakeSlurm:
    """What the stand-ins answer."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(parents=True)
        for name, body in _PROGRAMS.items():
            record = f'echo "$(printf "%s " "$@")" >>"$FAKE/{name}.calls"'
            (programs / name).write_text(f"#!/bin/bash\n{record}\n{body}\n")
            (programs / name).chmod(0o755)
        monkeypatch.setenv("FAKE", str(folder))
        monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
        self.answer("sbatch.out", "4711")

    def answer(self, name: str, text: str) -> None:
        """What a command says from now on."""
        (self.folder / name).write_text(text + "\n" if text else "")

    def states(self, *answers: str) -> None:
        """What scontrol says, one after the other; the last one for ever."""
        for old in self.folder.glob("state.*"):
            old.unlink()
        (self.folder / "asked").unlink(missing_ok=True)
        for i, text in enumerate(answers, 1):
            self.answer(f"state.{i}", text)

    def calls(self, name: str) -> list[str]:
        """How a command was called."""
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.is_file() else []


def job_line(state: str, code: str = "0:0", number: str = "4711", more: str = "") -> str:
    """One job as scontrol shows it in one line."""
    rest = "Reason=None Restarts=1 NodeList=n[1-2] RunTime=00:01:00"
    return f"JobId={number} {more} JobName=x JobState={state} ExitCode={code} {rest}"
