"""Every parallel layout gives the one-process run, up to floating-point reduction noise."""

from collections.abc import Callable
from pathlib import Path

import pytest
from forked import RanksFailedError
from tiny import evaluations, layouts, losses, tiny_job, train

from outlast.errors import EXIT_DONE

pytestmark = pytest.mark.distributed

# Largest difference in training loss (nats) over the six steps; measured: see docs/train.md.
TOLERANCE = 2e-5

LAYOUTS = {
    "replicate 2": (2, ["parallel.replicate=2"]),
    "replicate 3, uneven": (3, ["train.micro_batch_size=3"]),
    "shard 2": (2, ["parallel.shard=2"]),
    "tensor 2": (2, ["parallel.tensor=2"]),
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


# Muon's bfloat16 iteration amplifies reduction noise; largest difference seen here: 4e-3.
MUON_TOLERANCE = 2e-2
BF16_TOLERANCE = 5e-2


MUON = ("optimizer.name=muon", "parallel.pipeline_microbatches=2")
BF16 = ("train.precision=bf16",)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """A function from settings to the losses of one process with them."""
    folder = tmp_path_factory.mktemp("alone")
    known: dict[tuple[str, ...], list[float]] = {}

    def of(*settings: str) -> list[float]:
        if settings not in known:
            job = tiny_job(folder, f"alone{len(known)}", *settings)
            assert train(job, 1) == EXIT_DONE
            known[settings] = losses(job)
        return known[settings]

    return of


@pytest.mark.parametrize("axis", ["replicate", "shard", "tensor", "pipeline"])
def test_muon_trains_alike_on_every_layout(
    axis: str, tmp_path: Path, alone: Callable[..., list[float]]
) -> None:
    spread = tiny_job(tmp_path, "spread", *MUON, f"parallel.{axis}=2")
    assert train(spread, 2) == EXIT_DONE
    assert losses(spread) == pytest.approx(alone(*MUON), abs=MUON_TOLERANCE)


@pytest.mark.parametrize("axis", ["replicate", "shard", "tensor"])
def test_bf16_trains_alike_on_every_layout(
    axis: str, tmp_path: Path, alone: Callable[..., list[float]]
) -> None:
    spread = tiny_job(tmp_path, "spread", *BF16, f"parallel.{axis}=2")
    assert train(spread, 2) == EXIT_DONE
    assert losses(spread) == pytest.approx(alone(*BF16), abs=BF16_TOLERANCE)


def test_micro_batches_that_are_empty_on_some_ranks_do_no_harm(tmp_path: Path) -> None:
    settings = ["train.batch_size=7", "train.micro_batch_size=1"]
    alone = tiny_job(tmp_path, "alone", *settings)
    spread = tiny_job(tmp_path, "spread", *settings)
    assert train(alone, 1) == EXIT_DONE
    assert train(spread, 2) == EXIT_DONE
    assert losses(spread) == pytest.approx(losses(alone), abs=TOLERANCE)


@pytest.mark.parametrize("kind", ["qwen3", "granite"])
def test_models_that_a_layout_would_change_are_refused(kind: str, tmp_path: Path) -> None:
    settings = (
        f'model.settings={{model_type="{kind}", vocab_size=256, hidden_size=32, head_dim=8, '
        "intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, "
        "num_key_value_heads=4, max_position_embeddings=32, tie_word_embeddings=false}"
    )
    if kind == "granite":
        settings = settings.replace("head_dim=8, ", "")
    layout = "parallel.tensor=2" if kind == "qwen3" else "parallel.pipeline=2"
    job = tiny_job(tmp_path, kind, settings, layout, "parallel.pipeline_microbatches=2")
    with pytest.raises(RanksFailedError, match=r"use parallel\.shard instead"):
        train(job, 2)
