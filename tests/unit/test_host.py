"""A cached folder: made once, whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import socket
import threading
import time

import pytest

from lit_fsdp import host
from lit_fsdp.errors import CheckpointError
from lit_fsdp.host import cache_root, free_port, make_once
from tests.ports import own_port


def _write(folder):
    (folder / "file").write_text("content")


def test_second_call_reuses(tmp_path):
    folder = make_once(tmp_path / "a" / "model-1", _write, "x")
    assert (folder / "file").read_text() == "content"
    assert (folder / "file").stat().st_mode & 0o777 == 0o644
    assert make_once(folder, lambda _: pytest.fail("made twice"), "x") == folder


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
    assert make_once(tmp_path / "m", _write, "x").is_dir()


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    """Those of another machine, which a lock here may say nothing about, once they have been idle for an hour."""
    mine, other, old = (tmp_path / f".m.{name}.x.partial" for name in (host._boot(), "other", "older"))
    for leftover in (mine, other, old):
        leftover.mkdir()
        (leftover / "half").write_text("")
    for path in (old / "half", old):
        os.utime(path, (0, time.time() - 4000))
    make_once(tmp_path / "m", _write, "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == [other.name, "m", "m.lock"]


@pytest.mark.parametrize("locks", ["none", "of one machine"])
def test_without_locks_the_first_to_be_ready_wins(tmp_path, monkeypatch, caplog, locks):
    """A network file system may refuse locks, or hold them among the processes of one machine only."""

    def flock(handle, flags):
        if locks == "none":
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(host, "_boot", lambda: str(threading.get_ident()))  # every thread is a machine of its own
    together = threading.Barrier(3)

    def make(folder):
        together.wait(100)
        (folder / "file").write_text(str(threading.get_ident()))

    found = []
    threads = [
        threading.Thread(target=lambda: found.append((make_once(tmp_path / "m", make, "x") / "file").read_text()))
        for _ in range(3)
    ]
    with caplog.at_level(logging.INFO):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "m.lock"]
    assert caplog.text.count("another process was first, its result is used") == 2
    assert ("no file locks here" in caplog.text) == (locks == "none")


def test_full_disk_names_the_way_out(tmp_path):
    def full(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"No space left.*LIT_FSDP_CACHE"):
        make_once(tmp_path / "m", full, "x")
    assert not (tmp_path / "m").exists()


def test_place_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_FSDP_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("LIT_FSDP_CACHE")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(cache_root()) == "/home/somebody/.cache/lit_fsdp"


def test_a_free_port_is_none_of_those_of_outgoing_connections():
    ports = {free_port() for _ in range(50)}
    assert all(10000 <= port < 20000 for port in ports)
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_processes_of_one_seed_choose_different_ports():
    chosen = []
    for _ in range(2):
        random.seed(1)
        chosen.append([free_port() for _ in range(3)])
    assert chosen[0] != chosen[1]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_a_port_where_somebody_listens_is_passed_over(monkeypatch: pytest.MonkeyPatch, family: socket.AddressFamily):
    if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 on this host")
    dual = family == socket.AF_INET6
    with socket.create_server(("", free_port()), family=family, dualstack_ipv6=dual) as taken:
        busy, free = taken.getsockname()[1], own_port()
        monkeypatch.setattr(host, "_PORTS", [busy, free])
        monkeypatch.setattr(host, "_PORTS_TRIED", 2)
        assert {free_port() for _ in range(10)} == {free}
        monkeypatch.setattr(host, "_PORTS", [busy])
        monkeypatch.setattr(host, "_PORTS_TRIED", 1)
        with pytest.raises(OSError, match=f"from {busy} to {busy} is free"):
            free_port()


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
