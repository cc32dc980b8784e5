"""``lit-fsdp recipes``: what ships is listed, printed and copied, from a checkout and from a wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lit_fsdp.commands import run
from lit_fsdp.commands.recipes import find_shipped
from lit_fsdp.config.command_line import read_command_line
from lit_fsdp.errors import ConfigError

ROOT = Path(__file__).parents[3]
SMOKE = ROOT / "configs" / "debug" / "smoke.yaml"


def test_ls_is_a_table_of_all_recipes_and_the_names_of_fragments(capsys: pytest.CaptureFixture[str]):
    assert run(["recipes", "ls"]) == 0
    table, _, fragments = capsys.readouterr().out.partition("\n\nfragments:\n")
    head, *lines = table.splitlines()
    assert head.split() == ["recipe", "parameters", "hardware"]
    names = [line.split()[0] for line in lines]
    assert sorted(names) == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
    assert names.index("gemma3-4b_full_fsdp2_8x80gb") < names.index("gemma3-12b_full_fsdp2_4x80gb")
    line = next(line for line in lines if line.startswith("llama3.1-8b_full_fsdp2_8x80gb "))
    assert " ".join(line.split()) == "llama3.1-8b_full_fsdp2_8x80gb 8.0B 8 × 80 GB"
    assert max(map(len, [head, *lines])) <= 80
    assert {"engine/ddp", "model/Qwen3-32B", "debug/smoke"} <= set(fragments.splitlines())

    assert run(["recipes", "ls", "Qwen3", "lora"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["recipe", "parameters", "hardware"]
    found = [line.split()[0] for line in lines]
    assert found == [name for name in names if "qwen3" in name and "lora" in name]
    assert run(["recipes", "ls", "smoke"]) == 0
    assert capsys.readouterr().out == "fragments:\ndebug/smoke\n"
    with pytest.raises(ConfigError, match="got qwen3 gpt2"):
        run(["recipes", "ls", "qwen3", "gpt2"])


def test_a_typo_names_what_is_near_and_only_what_ships_is_found():
    for name, first in (
        ("quickstrat", "quickstart"),
        ("recipes/mistral-7b_full_fsdp2_8x80g.yaml", "mistral-7b_full_fsdp2_8x80gb"),
    ):
        with pytest.raises(ConfigError) as caught:
            find_shipped(name)
        assert caught.value.fix == f"write {first}"
    for name in ("", "nothing-like-it-at-all", "../pyproject", "/etc/passwd"):
        with pytest.raises(ConfigError, match="lit-fsdp recipes ls"):
            find_shipped(name)


def test_cp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    for dest, copy in ((".", "smoke.yaml"), ("new/deep/", "new/deep/smoke.yaml"), ("there", "there/smoke.yaml")):
        assert run(["recipes", "cp", "debug/smoke", dest]) == 0
        assert capsys.readouterr().out == f"{copy}\n"
        assert Path(copy).read_bytes() == SMOKE.read_bytes()
    Path("smoke.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="which exists"):
        run(["recipes", "cp", "debug/smoke"])
    assert Path("smoke.yaml").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"got smoke\.yaml \(File exists\)"):
        run(["recipes", "cp", "debug/smoke", "smoke.yaml/copy.yaml"])


def test_a_run_takes_recipes_and_fragments_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From any folder, under each way to write the name; a file of that path comes first."""
    monkeypatch.chdir(tmp_path)
    recipe = "qwen3-0.6b_full_fsdp2_1x24gb"
    for name in (recipe, f"{recipe}.yaml", f"recipes/{recipe}.yaml", f"somewhere/recipes/{recipe}.yaml"):
        line = read_command_line(["--config", name, "--config=debug/smoke"])
        assert line.files == [ROOT / "recipes" / f"{recipe}.yaml", SMOKE]
    Path(recipe).write_text("seed_everything: 7\n")
    assert read_command_line(["--config", recipe]).contents == [{"seed_everything": 7}]
    for prefix in ("llama3.1-70b_lora", "llama3.1-70b_lora_fsdp2_4", "qwen3-4b", "debug/smok"):
        with pytest.raises(ConfigError) as caught:
            read_command_line(["--config", prefix])
        names = str(caught.value.allowed).rpartition(": ")[2].split(", ")
        assert all(name.startswith(prefix) for name in names)
        assert caught.value.fix == f"write --config {min(names, key=len)}"
    with pytest.raises(ConfigError) as caught:
        find_shipped("Qwen3-4")
    assert caught.value.allowed.startswith("model/Qwen3-4B")
    with pytest.raises(ConfigError, match=r"got model/Qwen3-4B"):
        read_command_line(["--config", "model/Qwen3-4B"])


def test_from_a_wheel(tmp_path: Path):
    """Built as pip does, with the setuptools at hand, and used outside of the checkout."""
    pytest.importorskip("setuptools", minversion="77", reason="pip fetches the setuptools that it builds with")
    source, site = tmp_path / "source", tmp_path / "site"
    no_cache = shutil.ignore_patterns("__pycache__")
    for name in ("lit_fsdp", "configs", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=no_cache)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(source / done.stdout.splitlines()[-1]) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(site)
    for folder, inside in (("lit_fsdp", "lit_fsdp"), ("configs", "lit_fsdp/configs"), ("recipes", "lit_fsdp/recipes")):
        files = [path.relative_to(source / folder) for path in (source / folder).rglob("*") if path.is_file()]
        assert {f"{inside}/{path}" for path in files} <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"lit_fsdp"}
    command = [sys.executable, "-m", "lit_fsdp", "recipes", "cp", "debug/smoke", "a/"]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, check=True)
    assert (tmp_path / "a/smoke.yaml").read_bytes() == SMOKE.read_bytes()
