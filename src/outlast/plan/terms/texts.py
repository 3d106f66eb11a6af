"""Formula, constants and source of each term of a step's time."""

from __future__ import annotations

from typing import NamedTuple


class Text(NamedTuple):
    """What `explain` prints beside a term's value."""

    formula: str
    constants: tuple[str, ...] = ()
    source: str = "own"


RATES = ("matmul_efficiency", "matmul_half_side", "memory_efficiency")
NETWORK = ("fast_efficiency", "fabric_efficiency", "collective_seconds")

STEP: dict[str, Text] = {
    "matrix products": Text(
        "batches * blocks * (3 + recomputed) * sum(2 m k n (1 + s_half / s) / F + traffic / 2 B)",
        RATES,
        "roofline: Williams et al. 2009; recomputation: Chen et al. 2016 (1604.06174)",
    ),
    "attention": Text(
        "batches * blocks * passes * 2 tokens * sequence * width / (F_peak * efficiency); on "
        "processors, of the fp32 rate (twice in bf16) as far as softmax leaves it, and in bf16 3 "
        "kernels for each block of scores",
        ("attention_efficiency", "score_passes", "kernel_seconds"),
        "FlashAttention-2 (2307.08691), section 4; torch's FlashAttentionKernel.cpp",
    ),
    "memory-bound operations": Text(
        "batches * blocks * (3 + recomputed) * bytes / B (3.5 times the bytes on processors, which "
        "fuse no operations)",
        ("memory_efficiency", "cast_passes"),
    ),
    "host and kernel starts": Text(
        "batches * blocks * (norm_4(device, kernels * t_kernel + waits) - device); on processors, "
        "which start and compute in turn, kernels * t_kernel + waits",
        ("kernel_seconds", "pipelined_wait_seconds"),
    ),
    "tensor-parallel collectives": Text(
        "batches * blocks * (4 + 2 recomputed) * exposed * (2 (t - 1) / t * bytes / B_link "
        "+ 2 latency)",
        ("tensor_exposed", *NETWORK),
        "Shoeybi et al. 2019 (1909.08053), section 3; Korthikanti et al. 2022 (2205.05198)",
    ),
    "context-parallel transfers": Text(
        "batches * blocks * max(passed - attention / 2, passed / 10)",
        NETWORK,
        "ring attention (2310.01889)",
    ),
    "expert all-to-all": Text(
        "batches * blocks * mixture share * (4 + 2 recomputed) * imbalance * bytes of tokens * "
        "(domains reached / B_network + experts reached / B_fast)",
        ("expert_imbalance", *NETWORK),
        "GShard (2006.16668), section 3; two stages: DeepSeek-V3 (2412.19437), section 3.2.2",
    ),
    "head and loss": Text(
        "batches * (3 products of tokens * hidden * vocabulary + 6 passes over logits) / stages",
        RATES,
    ),
    "gradient accumulation": Text(
        "batches * parameters * (2 gradient bytes + weight bytes, and of casts where processors "
        "run in bf16 6 in each of 2 or 3 passes) / B",
        ("memory_efficiency",),
    ),
    "uneven stages": Text("batches * (slowest stage - mean stage)", RATES),
    "pipeline bubble": Text(
        "(stages - 1) / stages per rank * mean stage (a third of it without bubbles)",
        (),
        "Narayanan et al. 2021 (2104.04473), section 2.2; zero bubble: Qi et al. 2023 (2401.10241)",
    ),
    "pipeline transfers": Text(
        "exposed * (batches * stages per rank + stages - 1) * bytes / B_link",
        ("transfer_exposed", *NETWORK),
    ),
    "gradient sum": Text(
        "exposed * 2 (d - 1) / d * parameters * gradient bytes / B_link (routed experts among the "
        "ranks that hold the same ones)",
        ("gradient_exposed", *NETWORK),
        "ring all-reduce: Thakur et al. 2005; sharded: ZeRO (1910.02054), section 7",
    ),
    "gathering of weights": Text(
        "gathered - hidden + exposed * hidden, hidden = min(gathered, 0.9 computing); gathered and "
        "scattered once in a step by pipelines, else in every pass",
        ("gather_exposed", *NETWORK),
        "ZeRO (1910.02054), section 7.2",
    ),
    "optimizer": Text(
        "parameters / shards * 30 bytes / (B * efficiency); processors: and 40 kernels per block",
        ("optimizer_efficiency", "kernel_seconds"),
    ),
    "orthogonal updates": Text(
        "blocks * sum over matrices of 5 ((4 k^2 l + 2 k^3) (1 + s_half / k) / F_bf16 + bytes / B) "
        "+ kernels * t_kernel; of matrices in shards also 5 gatherings of 2 k l + k^2 values",
        (*RATES, "kernel_seconds", *NETWORK),
        "Muon: Jordan et al. 2024, Newton-Schulz; own for shards",
    ),
    "fixed": Text(
        "once per step; on processors, also batches * 150 kernels * t_kernel",
        ("step_seconds", "kernel_seconds"),
    ),
    "slowest node": Text("total * share * log2(nodes)", ("tail_per_doubling",)),
}
