"""The server behind :mod:`tests.dist.forks`: a process that has imported everything, and forks programs and ranks.

Each has words or a job, environment, open files and an exit code of its own. What the last one had to import beside, of
packages that are known already, is imported here too, so that the next one finds it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import json
import logging
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]


def main(folder: Path, listening: socket.socket) -> None:
    """Serve until whoever started this process ends it, or ends."""
    import torch

    die_with_parent()
    torch.set_num_threads(1)  # a forked process must not inherit the idea of threads it does not have
    jobs: dict[str, Any] = {}
    folders = [ROOT / "tests" / name for name in ("dist", "faults", "sim")]
    for path in (path for folder in folders for path in sorted(folder.glob("*jobs.py"))):
        jobs = {**vars(importlib.import_module(f"tests.{path.parent.name}.{path.stem}")), **jobs}
    _build_parsers()
    _fit_without_others(folder)
    selector = selectors.DefaultSelector()
    selector.register(listening, selectors.EVENT_READ)
    programs: dict[Any, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is listening:
                client = listening.accept()[0]
                request, files = _receive(client)
                if request is None:
                    client.close()
                    continue
                gc.freeze()  # what all share is then neither searched nor copied by their garbage collection
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for known in (listening, client, *programs):
                        known.close()
                    _run(request, files, folder, jobs)
                if "group" in request:
                    with contextlib.suppress(PermissionError, ProcessLookupError):  # it is dead already
                        os.setpgid(pid, request["group"] or pid)
                for number in files:
                    os.close(number)
                with contextlib.suppress(BrokenPipeError):  # a client that was killed is seen below
                    client.sendall(b"%d\n" % pid)
                programs[client] = pid
                selector.register(client, selectors.EVENT_READ)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, client)
            elif key.data is None:  # a client was killed
                selector.unregister(key.fileobj)
                os.kill(programs[key.fileobj], signal.SIGKILL)
            else:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                _tell(key.data, programs.pop(key.data), folder)
                with contextlib.suppress(KeyError):
                    selector.unregister(key.data)
                key.data.close()


def _build_parsers() -> None:
    """Those of a recipe and of its sections, for which every rank and command would need a tenth of a second.

    And as much that other packages find out once per process: how files of models are named, which packages extend.
    """
    from lightning.fabric.utilities import registry
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from lit_fsdp import CausalLMDataModule, CausalLMModule, Checkpoint, fsdp_strategy
    from lit_fsdp.config.parser import load_recipe, recipe_parser
    from lit_fsdp.metrics.hardware import gpus
    from tests.dist.forks import SMOKE

    recipe_parser()
    load_recipe(SMOKE, "fit")
    gpus()
    CausalLMModule(name="a-model")
    CausalLMDataModule(train="rows.jsonl")
    Checkpoint()
    fsdp_strategy()
    get_checkpoint_conversion_mapping("llama")
    registry.entry_points = functools.cache(registry.entry_points)
    registry.entry_points(group="lightning.pytorch.callbacks_factory")


def _fit_without_others(folder: Path) -> None:
    """A step of each engine in one process that stands for two, for which every rank would need a tenth of a second.

    It has no backward pass, as autograd's threads do not survive a fork, and torch's fake group, which has no threads.
    """
    import torch
    import torch.distributed as dist
    from lightning.pytorch import Trainer
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lit_fsdp import CausalLMModule, fsdp_strategy
    from lit_fsdp.host import say_once
    from lit_fsdp.parallel.norms import STRATEGIES
    from tests.dist.jobs import TinyData
    from tests.dist.reference import TINY

    class ForwardOnly(CausalLMModule):
        def training_step(self, *args: Any) -> torch.Tensor:
            with torch.no_grad():
                return super().training_step(*args)

        def backward(self, *args: Any) -> None:
            """See above."""

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.trainer.strategy.reshard()  # type: ignore[attr-defined]
            for param in self.parameters():
                param.grad = torch.zeros_like(param)

    env, quiet = dict(os.environ), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    random_state, excepthook = (torch.get_rng_state(), random.getstate()), sys.excepthook
    TINY.save_pretrained(folder / "tiny")
    logging.disable()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", NODE_RANK="0")
    with warnings.catch_warnings():
        for engine in ("fsdp2", "fsdp1"):
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
            module = ForwardOnly(name=str(folder / "tiny" / "config.json"), optim={"lr": 1e-3})
            options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_steps": 1}
            options |= {"enable_checkpointing": False, "use_distributed_sampler": False}
            trainer = Trainer(strategy=fsdp_strategy(engine=engine), **options, **quiet)
            trainer.fit(module, datamodule=TinyData())
            dist.destroy_process_group()
    _clear_sharding_prop_cache()  # what follows depends on the rank
    _redistribute._gen_transform_infos.cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # not in torch 2.11
        _redistribute.clear_redistribute_planner_cache()
    STRATEGIES.clear()
    sys.excepthook = excepthook
    say_once.cache_clear()
    logging.disable(logging.NOTSET)
    torch.set_rng_state(random_state[0])
    random.setstate(random_state[1])
    os.environ.clear()
    os.environ.update(env)


def _receive(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """What a client asks for, and its files; nothing if it was killed before it had said it all."""
    first, files, _, _ = socket.recv_fds(client, 1, 256)
    line = first + client.makefile("rb").readline()
    if line.endswith(b"\n"):
        return json.loads(line), files
    for number in files:
        os.close(number)
    return None, []


def _tell(client: socket.socket, pid: int, folder: Path) -> None:
    """The exit code; then import what the program had to, but not what it found in its own folder."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        client.sendall(b"%d\n" % code)
    imported = folder / str(pid)
    if imported.exists():
        for name in json.loads(imported.read_text()):
            if name.partition(".")[0] in sys.modules:
                with contextlib.suppress(ImportError):  # what only looks like a module
                    importlib.import_module(name)
        imported.unlink()


def die_with_parent() -> None:
    """However the one that started this process ends, this one must not stay; Linux only, as the rest."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _run(request: dict[str, Any], files: list[int], folder: Path, jobs: dict[str, Any]) -> NoReturn:
    import torch

    die_with_parent()
    torch.set_num_threads(1)  # makes torch's thread pool anew, which two threads at once might do, and one fail
    _give_files(files, request["files"])
    code, known = 1, set(sys.modules)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.executable = str(folder / "python")  # what this program starts is forked, too
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    try:
        if "job" in request:
            Path(request["answer"]).write_text(json.dumps(_run_job(jobs[request["job"]], request)))
        else:
            _run_words(request["words"], request["cwd"], folder)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # as the interpreter does it at its end
    finally:
        if "words" in request:
            # as an interpreter ends; only memory is not given back object by object, which takes a second
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        (folder / str(os.getpid())).write_text(json.dumps(sorted(set(sys.modules) - known)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_job(job: Callable[..., Any], request: dict[str, Any]) -> Any:
    """Each case begins with the environment and the random state that the process has begun with."""
    import torch

    state, found = torch.get_rng_state(), []
    for case in request["each"] or [{}]:
        os.environ.update(request["env"])
        torch.set_rng_state(state)
        random.seed(0)  # Python gives each fork another seed, and checkpoints hold its state
        found.append(json.loads(json.dumps(job(**request["arguments"], **case))))  # whatever the next ones add to it
    return found if request["each"] else found[0]


def _run_words(words: list[str], cwd: str, folder: Path) -> None:
    os.setsid()
    sys.orig_argv = ["python", *words]
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    sys.path[:0] = [cwd if is_module else str(Path(words[0]).resolve().parent)]
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", *sys.path)]
    if is_module:
        sys.modules.pop(f"{words[1]}.__main__", None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


def _give_files(files: list[int], numbers: list[int]) -> None:
    """What was open for the client is open here, under the same numbers."""
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, 300) for number in files]  # no file of a program has such a number
    for number in files:
        os.close(number)
    for number, wanted in zip(high, numbers, strict=True):
        os.dup2(number, wanted)
        os.close(number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115


if __name__ == "__main__":
    main(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
