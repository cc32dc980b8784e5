"""The end of a process: its exit code, its error message, and the file for the job that it belongs to."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable

from lit_fsdp.errors import (
    CheckpointError,
    ConfigError,
    ContractError,
    DataError,
    NonFiniteGradientError,
    RefusedByLightning,
)
from lit_fsdp.host import EXIT_LOST, first_one_speaks, global_rank, is_first_process, is_launched_by_lightning, tell_job
from lit_fsdp.redaction import guarded_streams
from lit_fsdp.signals import SIGNAL_FLAGS

_CLOSED = re.compile("Connection (closed|reset|refused)( by peer)?|Broken pipe")
"""Messages of a connection to a rank that has ended."""


def exit_code_of(act: Callable[[], int], debug: bool = False) -> int:
    """Run ``act``, return its exit code and write it for the job; see :func:`lit_fsdp.__main__.main`.

    With ``debug``, errors that a user can fix also show a traceback.
    """
    code, SIGNAL_FLAGS.failed = 1, None  # the code of an uncaught exception
    try:
        with guarded_streams():
            code = _exit_code_of(act, debug)
        return code
    finally:
        tell_job(f"exit.{global_rank()}", str(code))


def _exit_code_of(act: Callable[[], int], debug: bool) -> int:
    try:
        with first_one_speaks():
            code = act()
        print(end="", flush=True)  # raise write errors here, not at interpreter exit
        return code
    except ConfigError as error:
        if debug:
            traceback.print_exc()
        if isinstance(error, RefusedByLightning) and is_launched_by_lightning():
            return 2  # the first process prints it
        return _say(str(error), 2)
    except (CheckpointError, ContractError, DataError, NonFiniteGradientError) as error:
        if debug:
            traceback.print_exc()
        notes = getattr(error, "__notes__", ()) if is_lost(error) else ()
        return _say("\n".join([str(error), *notes]), EXIT_LOST if is_lost(error) else 1)
    except KeyboardInterrupt:
        return _say("interrupted", 130) if is_first_process() else 130
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if is_out_of_memory(error) and not debug:
            return _say("\n".join([_where(error), str(error), *getattr(error, "__notes__", ())]), 1)
        lost = _lost(error)
        closed = _CLOSED.search(str(error)) if lost and isinstance(error, RuntimeError) else None
        if closed and not debug:  # the traceback of the rank that ended is the one to read
            others = [note for note in error.__notes__ if note != lost]
            return _say("\n".join([f"{closed[0]}: {lost}", *others]), EXIT_LOST)
        traceback.print_exc()
        return EXIT_LOST if lost else 1


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator of an accelerator, torch's CPU allocator or Python itself ran out of memory."""
    texts = ("CUDA error: out of memory", "DefaultCPUAllocator: can't allocate")
    # torch's class by name, as most commands run without torch
    is_one = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_one or any(text in str(error) for text in texts)


def _where(error: BaseException) -> str:
    """The last line outside torch that an error about memory passed."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((one for one in reversed(frames) if f"{os.sep}torch{os.sep}" not in one.filename), frames[-1])
    return f"out of memory in {frame.filename}, line {frame.lineno}: {frame.line}"


def is_lost(error: BaseException) -> bool:
    """Whether other ranks caused the failure."""
    return bool(_lost(error)) or " lost contact with another rank: " in str(error)  # in a save or load


def _lost(error: BaseException) -> str:
    """Return the strategy's note that other ranks caused the failure; empty without one."""
    return next((note for note in getattr(error, "__notes__", ()) if " lost contact: " in note), "")


def _say(text: str, code: int) -> int:
    # quoted rows and file names may contain escape sequences, which must not reach the terminal
    text = "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    rank, SIGNAL_FLAGS.failed = global_rank(), code
    with contextlib.suppress(OSError):  # without output the exit code still counts
        print(f"[rank {rank}] error: {text}" if rank else f"error: {text}", file=sys.stderr, flush=True)
    return code
