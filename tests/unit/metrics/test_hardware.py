"""Names of devices as drivers say them, and rates that fit together."""

from __future__ import annotations

import pytest

from lit_fsdp.metrics.hardware import PEAK_RATES, peak_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("Tesla V100-SXM2-16GB", None),  # no bf16
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 with Max-Q Design", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA L40", None),
        ("CPU", None),
        ("", None),
    ],
)
def test_bf16(name: str, tflops: float | None) -> None:
    assert peak_flops(name, "bf16") == (None if tflops is None else tflops * 1e12)


@pytest.mark.parametrize("row", PEAK_RATES, ids=lambda row: row.words)
def test_every_row_is_dense_and_has_a_source(row: object) -> None:
    words, rates, source = row  # type: ignore[misc]
    assert source
    assert words
    assert rates["fp16"] == rates.get("bf16", rates["fp16"])
    for half, whole in (("tf32", "fp16"), ("fp16", "fp8")):  # a figure with sparsity in one place would show
        if half in rates and whole in rates:
            assert rates[whole] / rates[half] == pytest.approx(2, rel=0.03)
