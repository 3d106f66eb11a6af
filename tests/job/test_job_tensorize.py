"""What [tensorize] refuses before anything is built."""

from __future__ import annotations

import pytest

from outlast.errors import JobError
from outlast.job import load_job

REFUSED = {
    "tensorize.form=btt parallel.tensor=2": "splits low_rank and cola alone",
    "tensorize.form=cola tensorize.initialize=from_dense": "which is no matrix",
    "tensorize.form=tt tensorize.initialize=from_dense model.initialize=scratch": "random weights",
    "tensorize.form=tt tensorize.rank=error=0.1": "needs tensorize.initialize",
    "tensorize.form=btt tensorize.cores=3": "does not apply to tensorize.form",
    "tensorize.form=btt tensorize.spectral_limit=0.1": "bounds two factors",
    "tensorize.form=tt tensorize.mup=true tensorize.initialize=from_dense": "draws factors anew",
    "tensorize.form=cola tensorize.mup=true optimizer.name=muon": 'use "adamw"',
    "tensorize.form=lax parallel.pipeline=2": "hands features from layer to layer",
    "tensorize.form=lax train.compile=true": "hands features from layer to layer",
    "tensorize.adapt_rank=true": "has none that can change alone",
    "tensorize.adapt_rank=true tensorize.form=monarch": "has none that can change alone",
    "tensorize.adapt_rank=true tensorize.form=lax": "has none that can change alone",
    "tensorize.adapt_rank=true tensorize.form=tt parallel.pipeline=2": "parallel.pipeline = 2",
    "tensorize.adapt_rank=true tensorize.form=cola parallel.tensor=2": "parallel.tensor = 2",
    "tensorize.adapt_rank=true tensorize.form=tt recover.mode=live": 'recover.mode = "live"',
    "tensorize.adapt_rank=true tensorize.form=tt coding.scheme=coverage parallel.replicate=2": (
        "that keep their shapes; set coding.scheme back"
    ),
    "tensorize.adapt_rank=true tensorize.form=tt checkpoint.replay=exact": "checkpoint.replay",
    "tensorize.adapt_rank=true tensorize.form=tt tensorize.mup=true": "tensorize.mup = true",
    "tensorize.adapt_rank=true tensorize.form=tt tensorize.smallest_rank=4 "
    "tensorize.largest_rank=2": "is below tensorize.smallest_rank",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_what_cannot_be_combined_is_refused_in_one_sentence(settings: str) -> None:
    with pytest.raises(JobError) as refused:
        load_job(None, settings.split())
    assert len(refused.value.problems) == 1
    assert REFUSED[settings] in refused.value.problems[0]


@pytest.mark.parametrize("rank", ["0", "1.0", "-3", "true", "[]", "parameters=2", "loss=0.1"])
def test_a_rank_that_is_none_says_what_ranks_are(rank: str) -> None:
    with pytest.raises(JobError, match=r"a share such as 0\.25"):
        load_job(None, ["tensorize.form=tt", f"tensorize.rank={rank}"])


@pytest.mark.parametrize("rank", [64, 0.25, "parameters=0.3", "flops=0.5"])
def test_ranks_are_numbers_shares_and_budgets(rank: float | str) -> None:
    shown = f'"{rank}"' if isinstance(rank, str) else rank
    assert load_job(None, ["tensorize.form=tt", f"tensorize.rank={shown}"]).tensorize.rank == rank


def test_an_error_budget_needs_weights_to_compare_with() -> None:
    settings = ["tensorize.form=tt", "tensorize.rank=error=0.1", "tensorize.initialize=from_dense"]
    assert load_job(None, settings).tensorize.rank == "error=0.1"
