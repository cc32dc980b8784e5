"""What the libraries accept in other forms: JSON text, files, words in any case, empty values, standard input."""

from __future__ import annotations

import base64
import io
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from lit_fsdp.commands import run
from lit_fsdp.convert.convert import convert_file
from lit_fsdp.convert.result import Conversion

FSDP = {"distributed_type": "FSDP", "num_processes": 8}


def _convert(folder: Path, kind: str, given: dict[str, Any] | str, ranks: int | None = None) -> Conversion:
    file = folder / "in.json"
    file.write_text(given if isinstance(given, str) else json.dumps(given))
    return convert_file(kind, file, ranks)


def _init_args(found: Conversion) -> dict[str, Any]:
    return dict(found.recipe["trainer"]["strategy"]["init_args"])


def _said(found: Conversion) -> dict[str, str]:
    return {fate.key: fate.text for fate in found.fates}


@pytest.mark.parametrize(
    ("key", "text", "beside"),
    [
        ("fsdp_config", '{"version": "1", "backward_prefetch": "backward_post"}', {"fsdp": True}),
        ("deepspeed", '{"zero_optimization": {"stage": "2"}, "gradient_clipping": "1.0"}', {}),
        ("lr_scheduler_kwargs", '{"min_lr": 1e-6}', {"lr_scheduler_type": "cosine_with_min_lr"}),
        ("accelerator_config", '{"split_batches": "true"}', {}),
        ("accelerator_config", '{"gradient_accumulation_kwargs": {"num_steps": "4"}}', {}),
    ],
)
def test_json_text_is_the_mapping_it_holds(tmp_path: Path, key: str, text: str, beside: dict[str, Any]) -> None:
    as_text = _convert(tmp_path, "hf-trainer", {**beside, key: text}, 2)
    as_mapping = _convert(tmp_path, "hf-trainer", {**beside, key: json.loads(text)}, 2)
    assert as_text.recipe == as_mapping.recipe
    assert as_text.fates == as_mapping.fates
    assert as_text.recipe != _convert(tmp_path, "hf-trainer", {**beside, "seed": 42}, 2).recipe


def test_deepspeed_in_base64(tmp_path: Path) -> None:
    text = base64.urlsafe_b64encode(b'{"zero_optimization": {"stage": 3}}').decode()
    assert _init_args(_convert(tmp_path, "hf-trainer", {"deepspeed": text}, 2))["sharding"] == "full_shard"


def test_json_file_of_the_accelerator(tmp_path: Path) -> None:
    (tmp_path / "accelerator.json").write_text('{"split_batches": true}')
    found = _convert(tmp_path, "hf-trainer", {"accelerator_config": "accelerator.json"}, 4)
    assert found.recipe["data"] == {"micro_batch_size": 2, "global_batch_size": 8}


@pytest.mark.parametrize(
    ("config", "ranks", "data"),
    [
        ({"split_batches": True, "gradient_accumulation_kwargs": {"num_steps": 4}}, 2, (4, 32)),
        ({"split_batches": True}, None, (1, 8)),
        ({"gradient_accumulation_kwargs": {"num_steps": 4}}, 2, (8, 64)),
        ({"split_batches": False, "even_batches": True}, 2, (8, 16)),
    ],
)
def test_accelerator_config_decides_about_batches(
    tmp_path: Path, config: dict[str, Any], ranks: int | None, data: tuple[int, int]
) -> None:
    found = _convert(tmp_path, "hf-trainer", {"accelerator_config": config}, ranks)
    assert (found.recipe["data"]["micro_batch_size"], found.recipe["data"]["global_batch_size"]) == data
    assert not found.differs


@pytest.mark.parametrize(
    ("given", "compiles", "differs"),
    [
        ({"torch_compile_backend": "inductor"}, True, False),
        ({"torch_compile": False, "torch_compile_mode": "max-autotune"}, True, False),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, False, True),
        ({"torch_compile_backend": "aot_eager"}, False, True),
        ({"torch_compile": False}, False, False),
    ],
)
def test_what_turns_compiling_on(tmp_path: Path, given: dict[str, Any], compiles: bool, differs: bool) -> None:
    found = _convert(tmp_path, "hf-trainer", given, 2)
    assert (_init_args(found)["compile"], found.differs) == (compiles, differs)
    assert set(given) <= set(_said(found))


@pytest.mark.parametrize(
    ("config", "sharding", "line"),
    [
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "full_shard", "replaced by sharding: full_shard"),
        ({"fsdp_sharding_strategy": 5}, "shard_grad_op", "replaced by sharding: shard_grad_op"),
        ({"fsdp_reshard_after_forward": True}, "full_shard", "dropped because version 1"),
        ({"fsdp_reshard_after_forward": "false"}, "full_shard", "dropped because version 1"),
        ({"fsdp_reshard_after_forward": "NO_RESHARD"}, "full_shard", "dropped because version 1"),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_version": 2}, "full_shard", "dropped because version 2"),
    ],
)
def test_what_accelerate_does_not_read_or_cannot_do(
    tmp_path: Path, config: dict[str, Any], sharding: str, line: str
) -> None:
    found = _convert(tmp_path, "accelerate", {**FSDP, "fsdp_config": config})
    assert _init_args(found)["sharding"] == sharding
    assert _said(found)[f"fsdp_config.{next(iter(config))}"].startswith(line)
    assert not found.differs


@pytest.mark.parametrize("names", ["A B", "A, B", "A,B", " A  B ", ["A", "B"], ["A, B"]])
def test_class_names_with_commas_or_spaces(tmp_path: Path, names: Any) -> None:
    config = {"transformer_layer_cls_to_wrap": names, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    named = {"classes": ["A", "B"], "embedding_and_head": False}
    assert _init_args(_convert(tmp_path, "accelerate", {**FSDP, "fsdp_config": config}))["wrap"] == named
    given = {"fsdp": True, "fsdp_config": config}
    assert _init_args(_convert(tmp_path, "hf-trainer", given, 2))["wrap"] == named


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("accelerate", {**FSDP, "use_cpu": True, "mixed_precision": "bf16",
                        "fsdp_config": {"fsdp_version": 1, "fsdp_offload_params": True}}),
        ("hf-trainer", {"use_cpu": True, "bf16": True, "fsdp": "full_shard offload", "fsdp_config": {"version": 1}}),
    ],
)  # fmt: skip
def test_fsdp_on_a_cpu_is_ddp(tmp_path: Path, kind: str, given: dict[str, Any]) -> None:
    found = _convert(tmp_path, kind, given, 8 if kind == "hf-trainer" else None)
    strategy = _init_args(found)
    assert (strategy["engine"], strategy["precision"], strategy.get("cpu_offload")) == ("ddp", "mixed", None)
    assert found.recipe["trainer"]["accelerator"] == "cpu"
    said = _said(found)
    assert "engine: ddp" in said.get("distributed_type", said.get("fsdp", ""))


def test_the_word_beside_a_key_that_version_2_does_not_read(tmp_path: Path) -> None:
    given = {"fsdp": "shard_grad_op", "fsdp_config": {"sharding_strategy": "FULL_SHARD"}}
    assert _init_args(_convert(tmp_path, "hf-trainer", given, 2))["sharding"] == "shard_grad_op"


def test_files_are_kept_as_a_list(tmp_path: Path) -> None:
    found = _convert(tmp_path, "hf-trainer", {"train_file": ["a", "b"], "validation_file": "v"}, 2)
    assert (found.recipe["data"]["train"], found.recipe["data"]["val"]) == (["a", "b"], "v")


def test_gpus_as_a_list(tmp_path: Path) -> None:
    for ids in ([0, 3], "0,3", "0, 3,"):
        found = _convert(tmp_path, "accelerate", {**FSDP, "num_processes": 2, "gpu_ids": ids})
        assert found.recipe["trainer"]["devices"] == [0, 3]


def test_json_with_tabs_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text('\ufeff{"fsdp": "full_shard",\n\t"learning_rate": 2e-5}', encoding="utf-8")
    assert convert_file("hf-trainer", file, 2).recipe["model"]["optim"]["lr"] == 2e-5


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("distributed_type: FSDP\nnum_processes: 2\n"))
    assert run(["convert", "accelerate", "-"]) == 0
    assert capsys.readouterr().out.startswith("# Converted from standard input (accelerate).")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("distributed_type: FSDP\nnum_processes: 2\n",))
    writer.start()
    assert convert_file("accelerate", pipe).recipe["trainer"]["devices"] == 2
    writer.join()


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("accelerate", {**FSDP, "fsdp_config": None, "gpu_ids": None, "dynamo_config": {}, "main_process_ip": None}),
        ("accelerate", {**FSDP, "fsdp_config": {"fsdp_version": 2, "fsdp_backward_prefetch": None}}),
        ("accelerate", {**FSDP, "fp16": True, "mixed_precision": "bf16"}),
        ("accelerate", {**FSDP, "fp16": True, "mixed_precision": None}),
        ("hf-trainer", {"bf16": False, "fp16": False}),
        ("hf-trainer", {"bf16": True, "fp16": False}),
        ("hf-trainer", {"bf16": None, "max_steps": 5, "hub_token": None, "fsdp": True, "fsdp_config": {}}),
        ("hf-trainer", {"fsdp": True, "fsdp_config": None, "deepspeed": ""}),
        ("hf-trainer", {"accelerator_config": {"even_batches": None}}),
        ("hf-trainer", {"bf16": False, "fp16": False, "deepspeed": {"zero_optimization": {"stage": 2}}}),
        ("deepspeed", {"train_batch_size": 8, "optimizer": None, "scheduler": {}, "bf16": {"enabled": None}}),
    ],
)  # fmt: skip
def test_every_key_has_a_line_null_or_not(tmp_path: Path, kind: str, given: dict[str, Any]) -> None:
    found = _convert(tmp_path, kind, given, None if kind == "accelerate" else 2)
    said = [fate.key for fate in found.fates]
    for key, value in given.items():
        for path in [f"{key}.{inner}" for inner in value] if isinstance(value, dict) and value else [key]:
            assert any(one == path or one.startswith(f"{path}.") for one in said), (path, said)
    assert not found.differs


def test_accelerate_reads_mixed_precision_where_both_are_there(tmp_path: Path) -> None:
    found = _convert(tmp_path, "accelerate", {**FSDP, "fp16": True, "mixed_precision": "bf16"})
    assert _init_args(found)["precision"]["mode"] == "mixed"
    assert _said(found)["fp16"] == "dropped because Accelerate reads mixed_precision (bf16) instead"
    assert _init_args(_convert(tmp_path, "accelerate", {**FSDP, "fp16": True}))["precision"]["mode"] == "fp16_mixed"
