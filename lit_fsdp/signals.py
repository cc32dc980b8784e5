"""Effect of SIGINT, SIGTERM and SIGUSR1 on a command, from the check of its recipe until the process ends.

A handler only records the signal and does not save: ranks would be interrupted at different points and wait for each
other forever (https://github.com/Lightning-AI/pytorch-lightning/issues/21406).

===================================  ============================  =========================================
phase of ``fit``                     SIGTERM, SIGUSR1              SIGINT (Ctrl-C)
===================================  ============================  =========================================
before any other rank may wait       ends at once, 75              ends at once, 130
before and while the ranks meet      ends 5 s after they begin to  ends at once, 130
                                     meet if they have not met, 75
until the first batch                all ranks agree before it,    ends at once, 130
                                     nothing is saved, 75
training                             all ranks agree after the     the same, 130; a third one ends at once
                                     current global batch, one
                                     checkpoint, 75
a validation, a save                 finishes, and so does the     the same, 130; a third one ends at once
                                     next global batch
after training, while it exits       nothing, 0                    nothing, 0; a third one ends at once
===================================  ============================  =========================================

The other verbs have nothing to save and end at once with the same codes. Signals to a single rank have the same effect,
except that Ctrl-C on a rank started by Lightning waits for the vote before the first batch: its parent would treat the
ended rank as a failure. While the recipe is read, Python's defaults apply. SIGUSR2 does not stop the process, which
writes the Python stack of each thread to standard error.
"""

import atexit
import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from lit_fsdp.host import global_rank, is_first_process, is_launched_by_lightning, tell_job

EXIT_STOPPED, EXIT_INTERRUPTED = 75, 130
_PATIENCE_SECONDS = 5
_NOTHING_YET = "stopped by a signal; there is nothing to save yet"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class SignalFlags:
    """Records signals from :meth:`install` until the process ends.

    A thread listens, because Python's handlers run only after a call into C++ returns, and a rank may be waiting for
    its peers there. ``can_save``: the command trains.
    """

    def __init__(self, can_save: bool = True) -> None:
        self.interrupted = self.terminated = self.training = False
        self.has_peers = any(name in os.environ for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
        """Whether other ranks exist that would wait for this one."""
        self.can_save = can_save
        self._is_meeting = False
        self._timer: threading.Timer | None = None
        self.before_exit: Callable[[], object] = lambda: None
        """Called before the process ends at once."""
        self.failed: int | None = None
        """Exit code of an error that was printed, with which a signal ends the process."""
        self._is_installed = self._is_warned = False

    def install(self) -> None:
        """Handle SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 from now on (main thread only); a second call changes nothing."""
        if self._is_installed:
            return
        self._is_installed = True
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()
        for number in STOPPING:
            signal.signal(number, lambda number, frame: None)
            atexit.register(signal.signal, number, signal.SIG_IGN)  # the interpreter resets its own, but not this
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # ranks start with them blocked
        if sys.__stderr__ is not None:
            faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)

    def _listen(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 16):
                if number in STOPPING:  # an engine may handle other signals
                    self.receive(signal.Signals(number))

    def receive(self, number: signal.Signals) -> None:
        """Record a signal, or end the process according to the table above."""
        if number == signal.SIGINT:
            waits = self.training or (self.can_save and is_launched_by_lightning())
            if self._is_warned or not waits:
                self._end("interrupted", EXIT_INTERRUPTED)
            if self.interrupted:
                self._is_warned = True
                _say("Ctrl-C: finishing and saving the current step; press again to stop at once, without saving")
            self.interrupted = True
        elif self.can_save and (self.training or self.has_peers):
            self.terminated = True
            if self._is_meeting:
                self._end_soon()
        else:
            self._end(_NOTHING_YET, EXIT_STOPPED)

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """While this rank waits for the others, with which it cannot agree yet, a signal ends it after five seconds."""
        self._is_meeting = True
        if self.terminated:
            self._end_soon()
        try:
            yield
        finally:
            self._is_meeting = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _end_soon(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(_PATIENCE_SECONDS, self._end, (_NOTHING_YET, EXIT_STOPPED))
            self._timer.daemon = True
            self._timer.start()

    def _end(self, text: str, code: int) -> None:
        if self.failed is not None:  # Lightning ends the first rank when another one has failed with the same error
            text, code = "", self.failed
        _say(text)
        self.before_exit()
        tell_job(f"exit.{global_rank()}", str(code))
        os._exit(code)


SIGNAL_FLAGS = SignalFlags(can_save=False)
"""The flags of this process."""


def _say(text: str) -> None:
    if text and is_first_process():
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
