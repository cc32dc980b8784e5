"""Names of devices as drivers say them, and rates that fit together."""

from __future__ import annotations

import pytest

from lit_fsdp.metrics.hardware import gpus, peak_flops


def test_bf16() -> None:
    for name, tflops in (
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H200 NVL", 835.5),
    ):
        assert peak_flops(name, "bf16") == tflops * 1e12, name
    for name in (
        "Tesla V100-SXM2-16GB",  # no bf16
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 with Max-Q Design",
        "NVIDIA H200 MIG 1g.18gb",
        "CPU",
        "",
    ):
        assert peak_flops(name, "bf16") is None, name


def test_every_row_is_dense_and_has_a_source() -> None:
    for row in gpus():
        rates = row.tflops
        assert row.source
        assert rates["fp16"] == rates.get("bf16", rates["fp16"])
        for half, whole in (("tf32", "fp16"), ("fp16", "fp8")):  # a figure with sparsity in one place would show
            if half in rates and whole in rates:
                assert rates[whole] / rates[half] == pytest.approx(2, rel=0.03), row.words
