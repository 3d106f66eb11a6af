"""Models, runs and a cluster that plans are written out for; as a program, renews `emitted/`."""

from pathlib import Path

from outlast.plan.cluster import Cluster
from outlast.plan.configuration import Configuration
from outlast.plan.emit import EmitSettings, emitted
from outlast.plan.transformer import Transformer

GOLDEN = Path(__file__).parent / "emitted"
PEAKS = dict.fromkeys(("fp32", "fp16", "bf16", "fp8"), 1e15)
CLUSTER = Cluster(
    name="eight nodes",
    device="h100-sxm",
    nodes=8,
    devices_per_node=8,
    fast_domain=8,
    peak_flop_per_s=PEAKS,
    matmul_flop_per_s=PEAKS,
    memory_bytes=80e9,
    memory_bytes_per_s=3e12,
    fast_bytes_per_s=4e11,
    fabric_bytes_per_s=5e10,
    host_cores=96,
)
DENSE = Transformer(
    name="dense",
    layers=14,
    hidden=256,
    heads=8,
    kv_heads=4,
    head_width=32,
    intermediate=512,
    gated=True,
    vocabulary=2048,
)
PLAIN = Transformer(
    name="plain",
    layers=4,
    hidden=256,
    heads=8,
    kv_heads=2,
    head_width=32,
    intermediate=1024,
    gated=False,
    vocabulary=2048,
    tied=True,
)
MIXTURE = Transformer(
    name="mixture",
    layers=4,
    hidden=256,
    heads=8,
    kv_heads=4,
    head_width=32,
    intermediate=512,
    gated=True,
    vocabulary=2048,
    experts=8,
    experts_per_token=2,
    expert_intermediate=128,
    dense_layers=1,
)
SHARED = Transformer(
    name="shared",
    layers=4,
    hidden=256,
    heads=8,
    kv_heads=4,
    head_width=32,
    intermediate=0,
    gated=True,
    vocabulary=2048,
    experts=8,
    experts_per_token=2,
    expert_intermediate=128,
    shared_intermediate=64,
)
SETTINGS = EmitSettings(
    name="demo",
    predicted="step 1.20 s (0.93 to 1.51, 90 %)\nmemory 41 GB of 80 GB",
    predicted_hours=30.0,
)


def configured(**values: object) -> Configuration:
    """A run of 64 samples of 512 tokens, one at a time."""
    return Configuration(**{"sequence": 512, "micro_batch": 1, "batch": 64, **values})


RUNS = {
    "outlast": (
        DENSE,
        configured(data=8, tensor=4, sequence_parallel=False, sharding="parameters"),
    ),
    "torchtitan": (
        DENSE,
        configured(
            data=4, tensor=2, pipeline=4, stages_per_rank=2, sharding="parameters", balance="cost"
        ),
    ),
    "megatron": (
        MIXTURE,
        configured(data=8, tensor=2, expert=4, pipeline=2, sharding="optimizer", precision="fp8"),
    ),
    "deepspeed": (
        DENSE,
        configured(
            data=8, tensor=4, sequence_parallel=False, sharding="gradients", recompute="full"
        ),
    ),
    "accelerate": (
        DENSE,
        configured(
            data=8,
            tensor=2,
            context=2,
            sequence_parallel=False,
            sharding="parameters",
            sharding_ranks=4,
        ),
    ),
}


def golden_files() -> dict[str, str]:
    """Text of every golden file by its name below `emitted/`."""
    files = {}
    for target, (model, run) in RUNS.items():
        settings = EmitSettings(
            name=SETTINGS.name,
            predicted=SETTINGS.predicted,
            predicted_hours=SETTINGS.predicted_hours,
            launches=target,
        )
        for name, text in emitted("sbatch", model, run, CLUSTER, settings).items():
            # Code of another project's style is kept from this one's tools.
            suffix = ".txt" if name.endswith(".py") else ""
            files[f"{target}/{name}{suffix}"] = text
    return files


if __name__ == "__main__":
    for name, text in golden_files().items():
        path = GOLDEN / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
