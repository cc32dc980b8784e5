"""A cached folder: made once, whole or not at all."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from torch.distributed import TCPStore

from lit_fsdp import host
from lit_fsdp.__main__ import main
from lit_fsdp.errors import CheckpointError, ConfigError
from lit_fsdp.host import free_port, make_once, threads_of_rank


def _write(folder):
    (folder / "file").write_text("content")


def test_others_wait_and_are_told(tmp_path, caplog):
    started, finish, made = threading.Event(), threading.Event(), []

    def slow(folder):
        made.append(folder)
        started.set()
        assert finish.wait(100)
        _write(folder)

    threads = [threading.Thread(target=make_once, args=(tmp_path / "m", slow, "converting x")) for _ in range(2)]
    with caplog.at_level(logging.INFO):
        threads[0].start()
        assert started.wait(100)
        threads[1].start()
        while "waiting for another process" not in caplog.text:
            threads[1].join(0.01)
        assert not (tmp_path / "m").exists()
        finish.set()
        for thread in threads:
            thread.join(100)
    assert len(made) == 1
    assert (tmp_path / "m" / "file").is_file()


def test_failure_leaves_nothing_and_can_be_repeated(tmp_path):
    def fail(folder):
        _write(folder)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        make_once(tmp_path / "m", fail, "x")
    assert [p.name for p in tmp_path.iterdir()] == ["m.lock"]
    folder = make_once(tmp_path / "m", _write, "x")
    assert (folder / "file").stat().st_mode & 0o777 == 0o644
    assert make_once(folder, lambda _: pytest.fail("made twice"), "x") == folder


def test_of_machines_that_do_not_see_each_others_locks_the_first_to_be_ready_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda handle, flags: None)
    monkeypatch.setattr(host.platform, "node", lambda: str(threading.get_ident()))  # each thread is a machine
    together = threading.Barrier(3)

    def make(folder):
        together.wait(100)
        (folder / "file").write_text(str(threading.get_ident()))

    def ask(_):
        return (make_once(tmp_path / "m", make, "x") / "file").read_text()

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(ask, range(3)))) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "m.lock"]


def test_what_a_rank_leaves_for_the_batch_script(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(host.EXIT_DIR, str(tmp_path))
    monkeypatch.setenv("SLURM_PROCID", "3")

    def fail(error):
        monkeypatch.setattr("lit_fsdp.__main__.run", mock.Mock(side_effect=error))
        return main([])

    lost = RuntimeError("Connection closed by peer")
    lost.add_note("rank 3 (n2) lost contact: another rank failed")
    lost.add_note("rank 1 was ended by SIGKILL")
    differing = RuntimeError("[gloo] op.preamble.length <= op.nbytes")
    differing.add_note("rank 3 (n2) lost contact: another rank failed")
    of_save = CheckpointError("saving: rank 3 lost contact with another rank: Connection reset")
    refused, full, mistake = ConfigError("a", 1, "2"), CheckpointError("full"), ZeroDivisionError()
    elsewhere = ConnectionResetError("Connection reset by peer: mlflow")
    elsewhere.add_note("rank 3 (n2) lost contact: another rank failed")
    traced = (differing, elsewhere, mistake)  # where the connection to a rank is closed, the cause is on that rank
    codes = {lost: 76, differing: 76, elsewhere: 76, of_save: 76, refused: 2, full: 1, mistake: 1}
    for error, code in codes.items():
        assert fail(error) == code
        assert (tmp_path / "exit.3").read_text() == f"{code}\n"
        said = capsys.readouterr().err
        assert ("Traceback" in said) == (error in traced)
        assert error is not lost or said == (
            "[rank 3] error: Connection closed by peer: rank 3 (n2) lost contact: another rank failed\n"
            "rank 1 was ended by SIGKILL\n"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["exit.3"]


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def test_a_free_port_is_none_of_outgoing_connections_and_none_where_somebody_listens(monkeypatch):
    assert all(10000 <= free_port() < 20000 for _ in range(50))
    with socket.create_server(("", free_port())) as taken:
        busy, free = taken.getsockname()[1], unused_port()
        monkeypatch.setattr(host, "_PORTS", [busy, free])
        assert free_port() == free
        with pytest.raises(OSError, match="no port is free"):  # the next process that looks is told of another
            free_port()
    store = TCPStore("127.0.0.1", free, 1, is_master=True)  # which reuses addresses, as every rendezvous
    store.set("met", "here")
    assert store.get("met") == b"here"


def test_bf16_is_what_the_cpu_has_and_onednn_may_use(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(host, "Path", lambda path: cpuinfo)
    assert not host.cpu_has_bf16()
    for flags, limit, found in (
        ("flags : fpu avx2 fma", "", False),
        ("flags : avx512f avx512_bf16", "", True),
        ("flags : avx512f avx512_bf16", "avx2", False),
        ("flags : avx512f avx512_bf16", "AVX512_CORE_BF16", True),
        ("flags : amx_tile amx_bf16", "AVX512_CORE", False),
        ("flags : amx_tile amx_bf16", "", True),
        ("Features : asimd sve bf16", "", True),
    ):
        cpuinfo.write_text(f"processor : 0\n{flags}\n")
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
        assert host.cpu_has_bf16() == found, (flags, limit)


@pytest.mark.parametrize(
    ("ranks", "steps_on_host", "environment", "threads"),
    [
        (8, False, {}, 12),
        (1, True, {}, None),  # as torch has it: all
        (8, True, {"OMP_NUM_THREADS": "1"}, None),
        (8, False, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, None),
        (8, True, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 12),
        (8, True, {"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "none"}, None),
        (8, True, {"SLURM_NTASKS": "16", "SLURM_CPUS_PER_TASK": "10"}, 10),  # not bound to them
        (8, True, {"SLURM_CPUS_PER_TASK": "96"}, 12),  # one task, which starts the ranks
        (8, True, {"SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "96", "TORCHELASTIC_RUN_ID": "7"}, 12),
    ],
)
def test_ranks_share_the_cores_of_their_node(monkeypatch, ranks, steps_on_host, environment, threads):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("os.environ", {**os.environ, **environment})
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(96)))
    assert threads_of_rank(ranks, steps_on_host) == threads


def test_the_garbage_collector_pauses_for_the_imports_of_a_command_alone():
    """It runs again afterwards, without the imported objects, and a process that has imported torch is unchanged."""
    code = """
import gc
from lit_fsdp.host import heavy_imports, pause_collection, resume_collection
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
with heavy_imports():
    import torch
    assert not gc.isenabled() and not collections
assert gc.isenabled() and gc.get_freeze_count() > 100_000
frozen = gc.get_freeze_count()
pause_collection()
assert gc.isenabled()
resume_collection()
assert gc.get_freeze_count() == frozen
gc.disable()
with heavy_imports():
    assert not gc.isenabled()
assert not gc.isenabled()
print(gc.get_freeze_count() == frozen)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_signal_after_an_error_changes_neither_the_exit_code_nor_the_message() -> None:
    lines = [
        "import os, signal, time",
        "from lit_fsdp.errors import ConfigError",
        "from lit_fsdp.exit_codes import exit_code_of",
        "from lit_fsdp.signals import SIGNAL_FLAGS",
        "def fail(): raise ConfigError('model', 'one', 'another')",
        "SIGNAL_FLAGS.install()",
        "exit_code_of(fail)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "time.sleep(60)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: model: got one\n  allowed: another\n")
