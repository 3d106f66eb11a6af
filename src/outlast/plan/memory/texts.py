"""Formula, constants and source of each term of memory."""

from __future__ import annotations

from outlast.plan.terms.texts import Text

ZERO = "ZeRO: Rajbhandari et al. 2019 (1910.02054), section 5"
KEPT = "Korthikanti et al. 2022 (2205.05198), section 4"

MEMORY: dict[str, Text] = {
    "weights": Text("parameters per rank * bytes of a value / shards if parameters are", (), ZERO),
    "gradients": Text("parameters per rank * gradient bytes / shards if gradients are", (), ZERO),
    "optimizer states": Text(
        "parameters per rank * (4 + moment bytes) / shards if the optimizer is", (), ZERO
    ),
    "gradient buckets": Text(
        "parameters per rank * bucket_bytes, with replicas and no sharding", ("bucket_bytes",)
    ),
    "gradients on their way": Text(
        "(block + tables) * bytes of a value, and gradient bytes where they are scattered: of all "
        "parameters in a pipeline"
    ),
    "gathered weights": Text(
        "(min(blocks, 2) * block + tables) * bytes of a value, with sharded parameters; all of a "
        "pipeline's stage",
        (),
        "ZeRO (1910.02054), section 7.2; two blocks at a time: FSDP (2304.11277), section 3.3",
    ),
    "activations": Text(
        "blocks * in flight * tokens * bytes * (hidden_values h / t + attention_values (q + kv) / t"
        " + 2 (matrices - 1) f / t)",
        ("hidden_values", "attention_values"),
        KEPT,
    ),
    "logits and loss": Text(
        "logit_copies * tokens * vocabulary / t * (bytes of a value + 2 loss bytes)",
        ("logit_copies",),
    ),
    "backward pass of a block": Text(
        "tokens * bytes * (backward_blocks * kept values + 3 h) + what is computed again",
        ("backward_blocks",),
        KEPT,
    ),
    "tensor-parallel buffers": Text("gather_buffers * tokens * h * bytes", ("gather_buffers",)),
    "workspaces and libraries": Text(
        "workspace_bytes + (library_bytes or, on processors, process_bytes)",
        ("workspace_bytes", "library_bytes", "process_bytes"),
    ),
    "copies after the step": Text(
        "max(0, parameters (bucket_bytes + copy_bytes (1 + 1 / shards)) - all of the passes)",
        ("bucket_bytes", "copy_bytes"),
    ),
    "cached pieces": Text(
        "fragment_share * (activations + logits + backward pass), as far as there is room",
        ("fragment_share", "usable_share"),
    ),
    "cached for collectives": Text(
        "min(buffers_ahead, 4 blocks * in flight) * tokens * h * bytes, as far as there is room",
        ("buffers_ahead", "usable_share"),
    ),
    "cached for the step": Text(
        "norm_5(passes, parameters * step_copy_bytes + states after the step) - passes",
        ("step_copy_bytes", "usable_share"),
    ),
}
