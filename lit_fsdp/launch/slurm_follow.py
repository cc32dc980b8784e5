"""Following a job to its end: the output of rank 0 as it comes, and what became of the job."""

from __future__ import annotations

import codecs
import sys
import time
from pathlib import Path
from typing import TextIO

from lit_fsdp.launch.slurm_client import JobState, SlurmSilent
from lit_fsdp.launch.slurm_job import FOLDER
from lit_fsdp.launch.slurm_submit import states_of

_POLL_SECONDS = 1.0
_ASK_SECONDS = 15.0
"""How long at most between two questions to the controller; at first they come with every poll."""
_SETTLE_SECONDS = 5.0
"""How long the last lines may take to be seen here, on a network file system."""


def follow(number: str, run_folder: Path, out: TextIO | None = None) -> JobState:
    """Copy the output of rank 0 to ``out`` until the job has ended, requeues included.

    A controller that does not answer is waited for; one that has forgotten the job is believed that it ended, and the
    accounting or the job's own log tells how.

    Returns:
        Its last state; of an array that of the task that fared worst.

    Raises:
        JobForgotten: Nobody knows how it ended.
    """
    output = _Output(run_folder, out or sys.stderr)
    begun, asked, was_ended = time.monotonic(), -_ASK_SECONDS, False
    while True:
        now = time.monotonic()
        if now - asked >= min(_ASK_SECONDS, (now - begun) / 20) or was_ended:
            states, asked = _ask(number, run_folder, output), now
            is_ended = bool(states) and all(state.is_ended for state in states)
            if is_ended and (was_ended or all(state.state == "COMPLETED" for state in states)):
                output.copy_rest()
                return max(states, key=lambda state: (state.state != "COMPLETED", state.exit_code))
            was_ended = is_ended  # a job that is put back into the queue may look ended for a moment
        output.copy()
        time.sleep(_POLL_SECONDS)


def _ask(number: str, run_folder: Path, output: _Output) -> list[JobState]:
    try:
        states = states_of(number, run_folder, list(output.raw_ids))
    except SlurmSilent as error:
        output.say(f"the controller does not answer ({error.given}); job {number} goes on without it, waiting")
        return []
    output.raw_ids.update(dict.fromkeys(state.raw_id for state in states))
    output.say("job " + ", ".join(f"{state.job_id} {state.state}" for state in states))
    return states


class _Output:
    """Everything that is shown: states when they change, and what has been added to the logs."""

    def __init__(self, run_folder: Path, out: TextIO) -> None:
        self.raw_ids: dict[str, None] = {}
        self._folder, self._out, self._said = run_folder / FOLDER, out, ""
        self._tails: dict[str, _Tail] = {}

    def say(self, text: str) -> None:
        """A line, unless it was the last one."""
        if text != self._said:
            print(text, file=self._out, flush=True)
            self._said = text

    def copy(self) -> bool:
        """Copy what is new; whether there was anything."""
        grown = False
        for raw in self.raw_ids:
            for name in (f"{raw}.log", f"{raw}.rank-0.log"):
                grown |= self._tails.setdefault(name, _Tail(self._folder / name)).copy(self._out)
        return grown

    def copy_rest(self) -> None:
        """Copy until the scripts' last words are there, or nothing has come for a while."""
        deadline, is_over = time.monotonic() + _SETTLE_SECONDS, False
        while not is_over:
            is_over = time.monotonic() >= deadline  # asked first: what comes before that moment is copied
            if self.copy():
                deadline, is_over = time.monotonic() + _SETTLE_SECONDS, False
            if all(self._tails[f"{raw}.log"].is_complete for raw in self.raw_ids):
                return
            time.sleep(_POLL_SECONDS / 5)


class _Tail:
    """Copies what has been added to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen, self._end = path, 0, ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    @property
    def is_complete(self) -> bool:
        """Whether the script's last words were the last ones copied."""
        return " ended with exit code " in self._end

    def copy(self, out: TextIO) -> bool:
        """Copy; whether there was anything."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._seen)
                new = file.read()
        except OSError:  # not there yet; or a network file system that will be back
            return False
        if new:
            self._seen += len(new)
            text = self._decode(new)
            self._end = (self._end + text)[-200:]
            out.write(text)
            out.flush()
        return bool(new)
