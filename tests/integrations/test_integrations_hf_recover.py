"""Hugging Face's Trainer under torchrun: a killed rank, and a group that continues from memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from forked import torchrun
from hf_training import Outcome, Plan, together, trainer_of

from outlast.errors import IntegrationError
from outlast.integrations.hf_trainer import add_checkpoints, add_recover
from outlast.records import CheckpointRestored, CheckpointSaved, StateRecovered, read_run

pytestmark = pytest.mark.distributed

OPTIONS = {
    "gradient_accumulation_steps": 2, "logging_steps": 3, "save_steps": 100,
    "eval_strategy": "epoch",
}  # fmt: skip
"""Eight steps an epoch on two ranks with batches of two, and logs that steps are added up for."""

SCRIPT = """
import json
import os
import sys

sys.path[:0] = {paths!r}
from hf_training import Plan, train

life, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
output = sys.argv[1]
# The first group loses a rank within an epoch, the second one in the first step of the next.
dies_at = {{(0, 1): 5, (1, 0): 8}}.get((life, rank), 0)
settings = ("guard.policy=off", f'recover.memory="{{output}}/memory"')
found = train(
    Plan(
        output, ("outlast",), settings, resume="if any", batch=2, dies_at=dies_at, waits=False,
        options={options!r},
    )
)
with open(f"{{output}}/outcome{{rank}}", "w") as file:
    json.dump([found.digest, found.history, found.first], file)
"""


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are told what torchrun tells those that it would start again."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")


def figures(history: list[dict[str, float]]) -> list[tuple[int, float]]:
    """Steps and losses of the logs and the evaluations."""
    return [
        (int(each["step"]), each[name])
        for each in history
        for name in ("loss", "eval_loss")
        if name in each
    ]


@pytest.mark.supports("transformers", "recover", "resume")
def test_killed_ranks_of_a_trainer_cost_one_step_at_most_and_no_bit(tmp_path: Path) -> None:
    whole = together(2, Plan(str(tmp_path / "whole"), (), batch=2, options=OPTIONS))[0]
    assert whole is not None
    script, output = tmp_path / "train.py", tmp_path / "killed"
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    script.write_text(SCRIPT.format(paths=paths, options=OPTIONS))
    done = torchrun(
        tmp_path / "output",
        "--nproc-per-node=2",
        "--max-restarts=3",
        script,
        str(output),
    )
    assert done.code == 0, done.said
    for rank in (0, 1):
        digest, history, first = json.loads((output / f"outcome{rank}").read_text())
        assert digest == whole.digest
        assert first == 8
        # The means of the logs count the steps before a death, and no evaluation is left out.
        assert figures(history) == figures(whole.history)
    run = read_run(output)
    # The first rank writes, and is the one that the second group loses.
    assert [each.outcome for each in run.attempts[1:]] == ["died", "completed"]
    recovered = [event for _, event in run.of(StateRecovered)]
    assert [(each.step, each.source) for each in recovered] == [(5, "memory"), (8, "memory")]
    assert all(each.lost_steps <= 1 for each in recovered)
    assert not run.of(CheckpointRestored)
    # All is saved at the end, and nothing is left in memory.
    assert [event.step for _, event in run.of(CheckpointSaved)] == [12]
    assert not list((output / "memory").rglob("rank-*"))


def _plan(output: Path, **changes: object) -> Plan:
    settings = ("guard.policy=off", f'recover.memory="{output}/memory"')
    return Plan(str(output), ("outlast",), settings, resume="if any", **changes)  # type: ignore[arg-type]


def _finished(outcomes: list[Outcome | None]) -> Outcome:
    assert outcomes[0] is not None, "the process has died"
    return outcomes[0]


@pytest.mark.supports("transformers", "recover", "malleable")
@pytest.mark.usefixtures("restarted")
def test_what_two_ranks_kept_one_goes_on_from(tmp_path: Path) -> None:
    plain = {"dropout": 0.0, "steps": 8, "options": {"save_steps": 100}}
    whole = _finished(together(2, Plan(str(tmp_path / "whole"), (), batch=2, **plain)))  # type: ignore[arg-type]
    output = tmp_path / "out"
    assert together(2, _plan(output, batch=2, dies_at=5, waits=False, **plain)) == [None, None]
    shrunk = _finished(together(1, _plan(output, batch=4, **plain)))
    assert shrunk.first == 5
    assert shrunk.losses == pytest.approx(whole.losses, rel=1e-4)


@pytest.mark.usefixtures("restarted")
def test_memory_is_passed_over_where_the_best_checkpoint_was_cut_short(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    whole = _finished(together(1, Plan(str(tmp_path / "whole"), (), options=options)))
    output = tmp_path / "out"
    assert together(1, _plan(output, dies_at=5, options=options)) == [None]
    # As if the process had died before the version was complete.
    for each in (output / "checkpoints").glob("step-00000004-*"):
        shutil.rmtree(each)
    resumed = _finished(together(1, _plan(output, options=options)))
    assert resumed.first == 2
    assert any("the best checkpoint, of step 4, was not complete" in each for each in resumed.said)
    assert resumed.digest == whole.digest
    assert resumed.best is not None
    assert not read_run(output).of(StateRecovered)
    # With no other checkpoint, memory is all that there is.
    output = tmp_path / "first"
    assert together(1, _plan(output, dies_at=3, options=options)) == [None]
    shutil.rmtree(output / "checkpoints")
    resumed = _finished(together(1, _plan(output, options=options)))
    assert resumed.first == 3
    assert any("it continues from memory and looks for the best" in each for each in resumed.said)
    assert resumed.best is not None
    assert not any("begins anew" in each for each in resumed.said)


def test_a_memory_needs_a_store(tmp_path: Path) -> None:
    trainer = trainer_of(Plan(str(tmp_path)))
    with pytest.raises(IntegrationError, match=r"call add_checkpoints\(trainer\) before"):
        add_recover(trainer)
    add_checkpoints(trainer, writer="thread")
    with pytest.raises(IntegrationError, match="leave it out"):
        add_recover(trainer, mode="off")
    add_recover(trainer)
    with pytest.raises(IntegrationError, match="has its remembering already"):
        add_recover(trainer)
