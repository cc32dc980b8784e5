"""Files that change after they were written: every change is noticed before anything is loaded."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from lit_fsdp.checkpoint.manifest import read_manifest
from lit_fsdp.checkpoint.ranks import Ranks
from lit_fsdp.checkpoint.run_folder import checkpoints, step_folder
from lit_fsdp.checkpoint.store import verify_files
from lit_fsdp.checkpoint.verify import sound_checkpoint
from lit_fsdp.errors import CheckpointError
from tests.faults.tracked import CHAOS, SURVIVED

KINDS = ("flip a bit", "cut", "remove", "swap shards", "mix two steps")


def harm(kind: str, folder: Path, other: Path, rng: random.Random) -> str:
    """Damage ``folder``; what an error has to name. ``other`` is another step of the same run."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice(files)
    if kind == "flip a bit":
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    elif kind == "cut":
        os.truncate(path, rng.randrange(path.stat().st_size))
    elif kind == "remove":
        path.unlink()
    elif kind == "swap shards":
        path, second = (folder / f"tensors/rank-0000{rank}.safetensors" for rank in (0, 1))
        data = path.read_bytes()
        second.replace(path)
        second.write_bytes(data)
    else:
        names = [file.relative_to(folder) for file in files]
        differ = [n for n in names if (other / n).is_file() and (other / n).read_bytes() != (folder / n).read_bytes()]
        # with every differing file taken over the folder would be the other step's, which is whole
        for name in rng.sample(differ, rng.randrange(1, len(differ))):
            shutil.copyfile(other / name, folder / name)
        return ""
    return path.name


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
        kind = KINDS[trial % len(KINDS)]
        name = harm(kind, victim, other, rng)
        with pytest.raises(CheckpointError) as caught:
            verify_files(victim)
        assert name in str(caught.value)
        path, passed = sound_checkpoint(victim, [step_folder(saved, 2), step_folder(saved, 1)], Ranks())
        assert path == step_folder(saved, 2)
        assert list(passed) == [victim]
        shutil.rmtree(victim)
        SURVIVED[f"damage: {kind}"] += 1
    assert [entry.step for entry in checkpoints(saved)] == [1, 2, 3]
