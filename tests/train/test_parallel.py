"""Every parallel layout gives the one-process run, up to floating-point reduction noise."""

from pathlib import Path

import pytest
from tiny import evaluations, layouts, losses, tiny_job, train

from outlast.errors import EXIT_DONE

pytestmark = pytest.mark.distributed

# Largest difference in training loss (nats) over the six steps; measured: see docs/train.md.
TOLERANCE = 2e-5

LAYOUTS = {
    "replicate 2": (2, ["parallel.replicate=2"]),
    "replicate 4": (4, ["parallel.replicate=4"]),
    "replicate 3, uneven": (3, ["train.micro_batch_size=3"]),
    "shard 2": (2, ["parallel.shard=2"]),
    "shard 4": (4, ["parallel.shard=4"]),
    "tensor 2": (2, ["parallel.tensor=2"]),
    "tensor 4": (4, ["parallel.tensor=4"]),
    "pipeline 2": (2, ["parallel.pipeline=2", "parallel.pipeline_microbatches=4"]),
    "pipeline 4": (4, ["parallel.pipeline=4", "parallel.pipeline_microbatches=4"]),
    "interleaved 2": (
        2,
        [
            "parallel.pipeline=2",
            "parallel.pipeline_schedule=interleaved",
            "parallel.pipeline_microbatches=4",
        ],
    ),
    "replicate 2 x shard 2": (4, ["parallel.replicate=2", "parallel.shard=2"]),
    "shard 2 x tensor 2": (4, ["parallel.shard=2", "parallel.tensor=2"]),
    "replicate 2 x pipeline 2": (
        4,
        ["parallel.replicate=2", "parallel.pipeline=2", "parallel.pipeline_microbatches=2"],
    ),
    "gradient accumulation": (2, ["train.micro_batch_size=2"]),
    "activation checkpointing": (2, ["parallel.shard=2", "train.activation_checkpointing=true"]),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float], list[float]]:
    folder = tmp_path_factory.mktemp("parallel")
    job = tiny_job(folder, "reference")
    assert train(job, 1) == EXIT_DONE
    return folder, losses(job), evaluations(job)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_one_process_run(
    name: str, reference: tuple[Path, list[float], list[float]]
) -> None:
    folder, expected, expected_validation = reference
    size, overrides = LAYOUTS[name]
    job = tiny_job(folder, name.replace(" ", "-").replace(",", ""), *overrides)
    assert train(job, size) == EXIT_DONE
    found = losses(job)
    assert len(found) == len(expected)
    assert found == pytest.approx(expected, abs=TOLERANCE)
    assert evaluations(job) == pytest.approx(expected_validation, abs=TOLERANCE)
    [layout] = layouts(job)
    for override in overrides:
        axis, _, degree = override.removeprefix("parallel.").partition("=")
        if axis in layout:
            assert layout[axis] == int(degree)
