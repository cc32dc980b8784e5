"""Files that change after they were written: every change is noticed before anything is loaded."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.run_folder import checkpoints, step_folder
from lit_fsdp.checkpoint.store import verify_files
from lit_fsdp.checkpoint.verify import sound_checkpoint
from lit_fsdp.errors import CheckpointError
from tests.faults.tracked import CHAOS, SURVIVED


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip_a_bit(folder: Path, other: Path, rng: random.Random) -> str:
    path = rng.choice([path for path in files_of(folder) if path.stat().st_size])
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return path.name


def cut(folder: Path, other: Path, rng: random.Random) -> str:
    path = rng.choice([path for path in files_of(folder) if path.stat().st_size])
    with path.open("r+b") as file:
        file.truncate(rng.randrange(path.stat().st_size))
    return path.name


def remove(folder: Path, other: Path, rng: random.Random) -> str:
    path = rng.choice(files_of(folder))
    path.unlink()
    return path.name


def swap_shards(folder: Path, other: Path, rng: random.Random) -> str:
    """Shards of two ranks."""
    first, second = (folder / f"tensors/rank-0000{rank}.safetensors" for rank in (0, 1))
    between = folder / "between"
    first.rename(between)
    second.rename(first)
    between.rename(second)
    return first.name


def mix_two_steps(folder: Path, other: Path, rng: random.Random) -> str:
    """Some files of another step of the same run, under the same names; at least one of them differs."""
    names = [path.relative_to(folder) for path in files_of(folder)]
    different = [n for n in names if (other / n).is_file() and (other / n).read_bytes() != (folder / n).read_bytes()]
    # with every differing file taken over the folder would be the other step's, which is whole
    for name in rng.sample(different, rng.randrange(1, len(different))):
        shutil.copyfile(other / name, folder / name)
    return "mixed"


KINDS: list[Callable[[Path, Path, random.Random], str]] = [flip_a_bit, cut, remove, swap_shards, mix_two_steps]


@pytest.mark.timeout(3600)
def test_all_damage_is_noticed(saved: Path, tmp_path: Path) -> None:
    """Also in the manifest itself; undamaged copies pass, and the way back leads to the newest sound one."""
    rng = random.Random(5)
    other, victim = step_folder(saved, 2), step_folder(tmp_path, 3)
    for trial in range(5000 if CHAOS else 40):
        shutil.copytree(step_folder(saved, 3), victim)
        read_manifest(victim)
        if trial % 10 == 0:
            verify_files(victim)
        name = KINDS[trial % len(KINDS)](victim, other, rng)
        with pytest.raises(CheckpointError) as caught:
            verify_files(victim)
        assert name == "mixed" or name in str(caught.value)
        path, passed = sound_checkpoint(victim, [step_folder(saved, 2), step_folder(saved, 1)], Ranks())
        assert path == step_folder(saved, 2)
        assert list(passed) == [victim]
        shutil.rmtree(victim)
        SURVIVED[f"damage: {KINDS[trial % len(KINDS)].__name__.replace('_', ' ')}"] += 1
    assert [entry.step for entry in checkpoints(saved)] == [1, 2, 3]
