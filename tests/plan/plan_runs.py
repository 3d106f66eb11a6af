"""Models, clusters and runs that the planner's tests share."""

import sys
from dataclasses import replace
from pathlib import Path

from outlast.plan.cluster import Cluster, Prices
from outlast.plan.configuration import Configuration
from outlast.plan.transformer import Transformer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from plan_models import first_stage_allocated, first_stage_reserved, shared, uncalibrated

__all__ = ["first_stage_allocated", "first_stage_reserved", "shared", "uncalibrated"]

LLAMA_8B = Transformer(
    name="llama-3-8b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_width=128,
    intermediate=14336,
    gated=True,
    vocabulary=128256,
)
MIXTURE = Transformer(
    name="mixtral-8x7b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_width=128,
    intermediate=0,
    gated=True,
    vocabulary=32000,
    experts=8,
    experts_per_token=2,
    expert_intermediate=14336,
)
H100 = Cluster(
    name="h100x64",
    device="h100-sxm",
    nodes=8,
    devices_per_node=8,
    fast_domain=8,
    peak_flop_per_s={"fp32": 67e12, "bf16": 989e12, "fp8": 1979e12},
    matmul_flop_per_s={"fp32": 50e12, "bf16": 795e12, "fp8": 1403e12},
    memory_bytes=80 * 2**30,
    memory_bytes_per_s=3.35e12,
    fast_bytes_per_s=450e9,
    fabric_bytes_per_s=50e9,
)

TINY = Transformer(
    name="tiny",
    layers=4,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_width=16,
    intermediate=128,
    gated=True,
    vocabulary=512,
)
NODE = Cluster(
    name="here",
    device="h100",
    nodes=1,
    devices_per_node=8,
    fast_domain=8,
    peak_flop_per_s={"bf16": 989e12},
    matmul_flop_per_s={"bf16": 720e12},
    memory_bytes=80e9,
    memory_bytes_per_s=3.35e12,
    fast_bytes_per_s=450e9,
    fabric_bytes_per_s=50e9,
    prices=Prices(currency="EUR", per_kwh=0.2),
)
SHORT = Configuration(sequence=256, micro_batch=1, batch=8)


def configuration(**changes: object) -> Configuration:
    """Eight devices, one micro-batch of 8192 tokens at a time, with changes."""
    base = Configuration(data=8, sequence=8192, micro_batch=1, batch=64)
    return replace(base, **changes)  # type: ignore[arg-type]
