"""What takes the place of a damaged checkpoint, and how a run that goes back makes room."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_fsdp.checkpoint.run_folder import checkpoints, choose, damaged, move_newer_aside, moved_aside, survey
from lit_fsdp.errors import CheckpointError
from tests.unit.checkpoint.conftest import make


@pytest.fixture
def four(tmp_path: Path) -> list[Path]:
    return [make(tmp_path, step, loss=loss) for step, loss in {1: 0.3, 2: 0.1, 3: 0.2, 4: 0.4}.items()]


def pick(run: Path, word: str | Path, fallback: bool = False):
    return choose(word, run, "loss", "min", fallback)


def test_the_order_of_substitutes(four: list[Path], tmp_path: Path):
    last, best = pick(tmp_path, "last"), pick(tmp_path, "best")
    assert (last.path, last.others) == (four[3], (four[2], four[1], four[0]))
    assert (best.path, best.others) == (four[1], (four[2], four[0], four[3]))
    assert pick(tmp_path, four[2], fallback=True).others == ()
    assert last.damaged == best.damaged == ()


@pytest.mark.parametrize("harm", ["cut", "remove", "manifest"])
def test_the_newest_complete_one(four: list[Path], tmp_path: Path, harm: str):
    for folder in four[2:]:
        path = folder / ("manifest.json" if harm == "manifest" else "data")
        path.unlink() if harm == "remove" else path.write_bytes(b"{}")
    choice = pick(tmp_path, "last", fallback=True)
    assert (choice.path, choice.others) == (four[1], (four[0],))
    assert [entry.path for entry in choice.damaged] == [four[3], four[2]]
    with pytest.raises(CheckpointError) as error:
        pick(tmp_path, "last")
    text = str(error.value)
    assert text.index(f"  {four[3]} is damaged: ") < text.index(f"  {four[2]} is damaged: ")
    assert f"the newest complete one is {four[1]}: to go on from there" in text
    assert "--resume.fallback true" in text


def test_damage_to_the_best(four: list[Path], tmp_path: Path):
    (four[1] / "data").unlink()
    with pytest.raises(CheckpointError, match=r"the best complete one is .*step-00000003"):
        pick(tmp_path, "best")
    choice = pick(tmp_path, "best", fallback=True)
    assert (choice.path, choice.others) == (four[2], (four[0], four[3]))
    assert [entry.path for entry in choice.damaged] == [four[1]]
    assert pick(tmp_path, "last").path == four[3]  # an older one is in nobody's way


def test_what_was_worse_is_in_nobodys_way(four: list[Path], tmp_path: Path):
    (four[3] / "data").unlink()
    assert pick(tmp_path, "best").path == four[1]
    (four[3] / "manifest.json").unlink()  # now nobody knows
    with pytest.raises(CheckpointError, match="would come first or may"):
        pick(tmp_path, "best")
    assert pick(tmp_path, "best", fallback=True).path == four[1]


def test_a_damaged_path_is_never_replaced(four: list[Path], tmp_path: Path):
    (four[3] / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="damaged or not ours"):
        pick(tmp_path, four[3], fallback=True)


def test_all_are_damaged(four: list[Path], tmp_path: Path):
    for folder in four:
        (folder / "data").unlink()
    with pytest.raises(CheckpointError, match=r"no complete checkpoint in .*; damaged:\n  step-00000001"):
        pick(tmp_path, "last", fallback=True)


def test_newer_ones_move_aside(four: list[Path], tmp_path: Path):
    (four[2] / "data").unlink()
    content = {path.name: path.read_bytes() for path in four[3].iterdir()}
    moved = move_newer_aside(tmp_path, 1, damaged=[four[3]])
    assert list(moved) == four[1:]
    words = [new.name.rpartition("-")[0] for new in moved.values()]
    assert words == ["superseded-step-00000002", "damaged-step-00000003", "damaged-step-00000004"]
    assert {path.name: path.read_bytes() for path in moved[four[3]].iterdir()} == content
    assert [entry.path for entry in survey(tmp_path / "checkpoints")] == [four[0]]
    assert sorted(moved.values()) == moved_aside(tmp_path / "checkpoints")
    assert pick(tmp_path, "last").path == four[0]
    assert damaged(tmp_path) == []
    assert move_newer_aside(tmp_path, 1) == {}
    again = make(tmp_path, 2)
    assert len({*moved.values(), *move_newer_aside(tmp_path, 1).values()}) == 4
    assert not again.exists()
    assert [entry.step for entry in checkpoints(tmp_path)] == [1]


def test_a_run_without_checkpoints_has_nothing_to_move(tmp_path: Path):
    assert move_newer_aside(tmp_path, 0) == {}
