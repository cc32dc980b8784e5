"""Start the other ranks of a run on one machine before heavy imports, so that all ranks import at the same time.

Lightning would start them only after the first rank has imported everything. If the recipe alone determines the number
of ranks, they are started here instead, in the environment that Lightning would set.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from lit_fsdp.host import EXIT_LOST, FIRST, GO, free_port
from lit_fsdp.launch.launcher import devices_of, is_srun, other_launcher
from lit_fsdp.signals import STOPPING

_POLL_SECONDS, _GRACE_SECONDS = 1.0, 10.0


class LaunchedRanks:
    """The further ranks that this process has started."""

    def __init__(self) -> None:
        self.children: list[subprocess.Popen[bytes]] = []
        self._go = -1

    def start(self, trainer: Mapping[str, Any]) -> None:
        """Start ranks 1 to N - 1 with this process's command line, if the recipe has N > 1 and no other launcher does.

        They run as far as possible without the others and then wait for :meth:`release`.
        """
        devices = devices_of(trainer) or 1
        others = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "NODE_RANK")
        is_launched = is_srun(os.environ) or other_launcher(os.environ)[0] != ""
        is_plain = not is_launched and not any(name in os.environ for name in others)
        if devices < 2 or int(trainer.get("num_nodes") or 1) > 1 or trainer.get("plugins") or not is_plain:
            return
        os.environ.update(MASTER_ADDR="127.0.0.1", NODE_RANK="0", WORLD_SIZE=str(devices), LOCAL_RANK="0")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        os.environ[FIRST] = str(os.getpid())
        waiting, self._go = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until a child has handlers: SignalFlags.install
        for rank in range(1, devices):
            environment = os.environ | {"LOCAL_RANK": str(rank), GO: str(waiting)}
            command = [sys.executable, *sys.orig_argv[1:]]
            self.children.append(subprocess.Popen(command, env=environment, pass_fds=(waiting,)))  # noqa: S603
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(waiting)
        threading.Thread(target=self._watch, args=(list(self.children),), name="ranks", daemon=True).start()

    def release(self) -> None:
        """Let the others continue after the shared preparation."""
        if self._go >= 0:
            with contextlib.suppress(BrokenPipeError):  # all have ended; the watching thread reports it
                os.write(self._go, bytes(len(self.children)))
            os.close(self._go)
            self._go = -1

    def end(self, grace_seconds: float) -> str:
        """Kill ranks that have not ended after ``grace_seconds``; return a line for each that a signal had ended."""
        deadline = time.monotonic() + grace_seconds
        children, self.children = self.children, []
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        first = 1 + int(os.environ.get("NODE_RANK") or 0) * (len(children) + 1)
        codes = {rank: child.poll() or 0 for rank, child in enumerate(children, first)}
        for child in children:
            if child.poll() is None:
                child.kill()
        return "\n".join(f"rank {rank} {_ending(code)}" for rank, code in codes.items() if code < 0)

    def _watch(self, children: list[subprocess.Popen[bytes]]) -> None:
        """End the run if a rank fails and this process does not notice because it waits in a collective."""
        while any(child.poll() is None for child in children):
            time.sleep(_POLL_SECONDS)
            failed = next((rank for rank, child in enumerate(children, 1) if child.poll()), None)
            if failed is None:
                continue
            time.sleep(_GRACE_SECONDS)
            if not self.children:
                return  # this process is already ending
            print(f"error: rank {failed} {_ending(children[failed - 1].returncode)}", file=sys.stderr, flush=True)
            self.end(grace_seconds=0)
            os._exit(EXIT_LOST)


def _ending(code: int) -> str:
    """Describe how a process ended by its return code, which is negative after a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ": the host may have run out of memory (see dmesg)" if -code == signal.SIGKILL else ""
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was ended by {name}{memory}"


LAUNCHED_RANKS = LaunchedRanks()
"""The ranks started by this process."""
