"""GPUs, driver and NCCL against the build of torch and against the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_fsdp.launch.checks.row import GIB, Row, Wanted

_CUDA_TORCH = "install a CUDA build of torch (pytorch.org/get-started names the line), see nvidia-smi"


def judge_devices(facts: Mapping[str, Any], wanted: Wanted) -> list[Row]:
    """Rows on the devices of one machine.

    Args:
        facts: Of :func:`lit_fsdp.launch.checks.torch_facts.gather`.
        wanted: By the recipe.
    """
    if "error" in facts:
        fix = "python -c 'import torch; print(torch.cuda.is_available())' shows it; install torch again, or see dmesg"
        return [Row("torch loads", facts["error"], "bad", fix)]
    rows = [_count(facts, wanted)]
    if not facts["devices"]:
        return [*rows, _gloo(facts)]
    rows += [_memory_and_kind(facts), _driver(facts), _dtype(facts, wanted)]
    return [*rows, _nccl(facts), _peers(facts), _gloo(facts)]


def _count(facts: Mapping[str, Any], wanted: Wanted) -> Row:
    found = len(facts["devices"])
    build = f"CUDA {facts['cuda_build']}" if facts["cuda_build"] else "CPU"
    build = f"ROCm {facts['hip_build']}" if facts["hip_build"] else build
    if wanted.accelerator == "cpu":
        return Row("GPUs", f"{found}; the recipe is for the CPU (torch: {build} build)")
    asked = int(wanted.accelerator == "gpu")
    if wanted.devices and (asked or found):  # accelerator auto takes GPUs where there are any
        asked = wanted.devices
    hidden = "" if facts["visible"] is None else f"; CUDA_VISIBLE_DEVICES={facts['visible'] or '(empty)'}"
    if found == 0:
        there = len(facts["nvidia_files"])
        found_text = f"none (torch: {build} build{hidden})"
        grade = "bad" if asked or (there and facts["cuda_build"] and facts["visible"] is None) else "warning"
        if there:
            text = f"none that torch can use, but {there} in /dev (torch: {build} build{hidden})"
            return Row("GPUs", text, grade, _why_not(facts))  # type: ignore[arg-type]
        if asked:
            fix = "run on a machine with GPUs, or add --config configs/debug/smoke.yaml to try the recipe on the CPU"
            return Row("GPUs", f"{found_text}; the recipe asks for {wanted.devices or 'some'} per node", "bad", fix)
        return Row("GPUs", found_text, "warning", "nothing to do where the CPU is what you want; else see nvidia-smi")
    if asked > found:
        fix = f"set trainer.devices: {found}, or run where there are {asked}"
        return Row("GPUs", f"{found}; the recipe asks for {asked} per node{hidden}", "bad", fix)
    return Row("GPUs", f"{found} (torch: {build} build{hidden})")


def _why_not(facts: Mapping[str, Any]) -> str:
    if facts["visible"] is not None:
        return "unset CUDA_VISIBLE_DEVICES, or ask the job for GPUs (--gpus-per-node)"
    if facts["cuda_build"] is None and facts["hip_build"] is None:
        return _CUDA_TORCH
    driver = facts["driver_cuda"]
    if driver is not None and _older(driver, facts["cuda_build"]):
        return f"the driver runs CUDA {driver}: update it, or install a torch that is built for CUDA {driver}"
    return "see nvidia-smi and dmesg; in a container: --gpus all"


def _memory_and_kind(facts: Mapping[str, Any]) -> Row:
    kinds: dict[str, int] = {}
    for device in facts["devices"]:
        capability = ".".join(map(str, device["capability"]))
        kind = f"{device['name']}, {device['memory_bytes'] / GIB:.0f} GiB, compute capability {capability}"
        kinds[kind] = kinds.get(kind, 0) + 1
    text = "; ".join(f"{count} × {kind}" for kind, count in kinds.items())
    if len(kinds) > 1:
        fix = "choose equal ones by CUDA_VISIBLE_DEVICES: the slowest sets the pace, the smallest the batch"
        return Row("kind of GPU", text, "warning", fix)
    return Row("kind of GPU", text)


def _driver(facts: Mapping[str, Any]) -> Row:
    built, driver = facts["cuda_build"], facts["driver_cuda"]
    if built is None:
        return Row("driver", f"of ROCm {facts['hip_build']}: not compared")
    if driver is None:
        return Row("driver", "does not say its version", "warning", "see nvidia-smi")
    text = f"runs up to CUDA {driver}; torch is built for {built}"
    if _older(driver, built):
        fix = f"update the driver, or install a torch that is built for CUDA {driver}"
        return Row("driver", text, "bad", fix)
    return Row("driver", text)


def _older(driver: str, built: str | None) -> bool:
    """Whether a driver is too old: within a major version of CUDA from 11 on, any driver runs any build."""
    if built is None:
        return False
    return int(driver.split(".")[0]) < int(built.split(".")[0])


def _dtype(facts: Mapping[str, Any], wanted: Wanted) -> Row:
    least = min(tuple(device["capability"]) for device in facts["devices"])
    has_bf16, dtype = bool(facts["bf16"]), wanted.compute_dtype
    is_cuda = facts["cuda_build"] is not None
    text = f"bf16 {'in hardware' if has_bf16 else 'not in hardware'}"
    if dtype == "fp8" and is_cuda and least < (8, 9):
        fix = "set trainer.strategy.init_args.precision: mixed"
        return Row("dtypes", f"no fp8 on compute capability {least[0]}.{least[1]}", "bad", fix)
    if not has_bf16 and dtype in ("bf16", "fp8"):
        fix = "set trainer.strategy.init_args.precision: fp16_mixed, or use Ampere or newer"
        return Row("dtypes", f"{text}; the recipe computes in {dtype}", "bad", fix)
    if not has_bf16 and dtype is None:
        fix = "a recipe for this GPU needs precision: fp16_mixed or fp32"
        return Row("dtypes", text, "warning", fix)
    return Row("dtypes", text)


def _nccl(facts: Mapping[str, Any]) -> Row:
    runs, package = facts["nccl_runs"], facts["nccl_package"]
    if not facts["nccl"] or runs is None:
        return Row("NCCL", "this torch was built without it", "bad", _CUDA_TORCH)
    text = f"{runs}" if not facts["nccl_loaded"] else f"{runs} from {', '.join(facts['nccl_loaded'])}"
    if package is not None and not _same_release(runs, package):
        other = ", ".join(facts["nccl_elsewhere"]) or "another library"
        fix = f"take {other} out of LD_LIBRARY_PATH and LD_PRELOAD, or install torch again"
        return Row("NCCL", f"{text}, but torch comes with {package}", "bad", fix)
    if facts["nccl_elsewhere"]:
        fix = "take that folder out of LD_LIBRARY_PATH and LD_PRELOAD, unless your site wants it"
        return Row("NCCL", f"{text}; the environment names {', '.join(facts['nccl_elsewhere'])}", "warning", fix)
    return Row("NCCL", text)


def _same_release(runs: str, package: str) -> bool:
    """``2.27.5`` and ``2.27.5.1`` are."""
    return package.split(".")[:3] == runs.split(".")[:3]


def _peers(facts: Mapping[str, Any]) -> Row:
    if len(facts["devices"]) == 1:
        return Row("peer access", "one GPU: nothing to access")
    if facts["no_peer"]:
        pairs = ", ".join(f"{a}→{b}" for a, b in facts["no_peer"][:8])
        more = "" if len(facts["no_peer"]) <= 8 else f" and {len(facts['no_peer']) - 8} more"
        fix = (
            "see nvidia-smi topo -m; on PCIe, IOMMU (ACS) off lets GPUs talk directly; without it all goes by the host"
        )
        return Row("peer access", f"not from {pairs}{more}", "warning", fix)
    return Row("peer access", "every GPU to every other")


def _gloo(facts: Mapping[str, Any]) -> Row:
    if facts["gloo"]:
        return Row("gloo", "there")
    return Row("gloo", "this torch was built without it", "bad", "install a torch from PyPI: checkpoints need gloo")
