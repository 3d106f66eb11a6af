"""The table at the end of a run: finished, stopped, or with nothing to show."""

import pytest

from outlast.cli.train import print_summary
from outlast.job import load_job, to_toml
from outlast.records import (
    AttemptEnded,
    AttemptStarted,
    Evaluated,
    GradientsCoded,
    RanksChanged,
    RecordWriter,
    RunDirectory,
    Sampled,
    StepsDone,
    Tensorized,
    TrainingStarted,
)

STARTED = AttemptStarted(
    fingerprint="f",
    world_size=1,
    launch="alone",
    parallel={},
    machine={},
    versions={},
    total_steps=20,
    samples_per_step=16,
    tokens_per_step=2048,
    parameters=1234567,
    flops_per_token=1.0,
)


@pytest.fixture
def job():
    return load_job(None, ["train.steps=20", "schedule.warmup_steps=0"])


@pytest.fixture
def summary(tmp_path, job, capsys):
    """Write these events as a run's; gives what is printed at its end."""
    directory = RunDirectory(tmp_path / "run[1]")
    directory.create(to_toml(job))

    def show(*events):
        writer = RecordWriter(directory.path)
        for event in events:
            writer.write(event)
        writer.close()
        print_summary(job, directory, directory.report)
        return " ".join(capsys.readouterr().out.split())

    return show


def steps_done(step):
    return StepsDone(step, 10, 2.5, 1.0, 1e-3, step * 2048, [0.5] * 10, {"compute": 5.0})


def test_a_finished_run(summary, job, tmp_path):
    (tmp_path / "run[1]" / "model").mkdir()
    shown = summary(
        STARTED,
        TrainingStarted(0, 2.0, {}),
        steps_done(10),
        steps_done(20),
        Evaluated(20, 1.25, 1.8034, 640, 0.5),
        Sampled(20, "def ", "f(x): return x[0] # [bold]"),
        AttemptEnded(20, "completed", "", {"evaluation": 0.5}),
    )
    assert "run[1]: completed" in shown
    assert "validation loss 1.2500 nats per token, 1.8034 bits per byte (step 20)" in shown
    assert "training loss 2.5000 nats per token (step 20)" in shown
    assert "steps 20 of 20" in shown
    assert "tokens 40,960" in shown
    assert "throughput 4,096 tokens/s within steps" in shown
    assert "parameters 1,234,567" in shown
    assert "12.5 s in 1 attempt: compute 10.0 s (80.0%), startup 2.0 s (16.0%)" in shown
    assert "evaluation 0.5 s (4.0%)" in shown
    assert "def f(x): return x[0] # [bold]" in shown
    # Paths are whole, however narrow the output.
    joined = shown.replace(" ", "")
    assert f"report{tmp_path}/run[1]/report.html" in joined
    assert f"model{tmp_path}/run[1]/model" in joined


def test_a_stopped_run(summary):
    shown = summary(
        STARTED,
        TrainingStarted(0, 2.0, {}),
        steps_done(10),
        AttemptEnded(10, "to_be_continued", "SIGTERM", {}),
    )
    assert "stopped, to be continued: the same command continues" in shown
    assert "validation loss unavailable: nothing was evaluated yet" in shown
    assert "steps 10 of 20" in shown


def test_a_run_that_died_and_one_that_never_began(summary):
    assert "not started" in summary()
    assert "died" in summary(STARTED)


def test_bits_per_byte_that_are_not_known_are_not_zero(summary):
    shown = summary(STARTED, TrainingStarted(0, 2.0, {}), Evaluated(3, 1.25, None, 640, 0.5))
    assert "bits per byte unavailable: the number of source bytes is not known" in shown


def coded(step, stragglers, **changes):
    """Four steps of coverage; those with a straggler took 2 s and not 4 s."""
    count = len(stragglers)
    known = {
        "scheme": "coverage",
        "replicas": 4,
        "claims": [3 * len(each) for each in stragglers],
        "duplicates": [0] * count,
        "lost": [0] * count,
        "errors": [0.0] * count,
        "coded_seconds": [2.0] * count,
        "waiting_seconds": [4.0] * count,
    }
    return GradientsCoded(step, stragglers=stragglers, **{**known, **changes})


def test_gradient_coding_is_summed_up(summary):
    shown = summary(STARTED, TrainingStarted(0, 4.0, {}), coded(4, [[], [1], [], [2]]))
    assert (
        "gradient coding coverage: 2 of 4 steps had a straggler, 6 micro-batches taken over, all "
        "exact; saved at least 4.0 s" in shown
    )


def test_errors_and_advice_of_gradient_coding_are_shown(summary):
    late = coded(6, [[1]] * 6, lost=[1, 0, 0, 0, 0, 0], errors=[1.25, 0, 0, 0, 0, 0])
    shown = summary(STARTED, TrainingStarted(0, 4.0, {}), late)
    assert "1 not exact (certified error up to 1.25)" in shown
    assert "replica 1 was slow in 100 % of the steps: give it less work or replace it" in shown
    assert "1 step was made with an inexact gradient" in shown


def test_a_run_without_gradient_coding_shows_no_line_for_it(summary):
    assert "gradient coding" not in summary(STARTED, TrainingStarted(0, 4.0, {}), steps_done(10))


def test_tensorized_layers_are_set_against_the_dense_model(summary):
    event = Tensorized(
        form="cola",
        wanted_rank="0.25",
        modules=[{"name": f"layer.{number}"} for number in range(42)],
        kept={"layer.odd": "gains nothing"},
        parameters=2_100_000,
        dense_parameters=5_250_000,
        flops_per_token=4.3e6,
        dense_flops_per_token=1e7,
    )
    shown = summary(STARTED, event, steps_done(10))
    assert (
        "tensorized cola, rank 0.25: 42 layers, 1 kept dense; 2,100,000 of 5,250,000 parameters "
        "(0.40x), 0.43x FLOPs per token"
    ) in shown


def test_ranks_that_have_changed_give_the_model_another_size(summary):
    event = Tensorized(
        form="low_rank",
        wanted_rank="0.25",
        modules=[{"name": "layer.0"}],
        kept={},
        parameters=2_000_000,
        dense_parameters=5_000_000,
        flops_per_token=4e6,
        dense_flops_per_token=1e7,
    )
    change = {"name": "layer.0", "bond": "r", "before": 64, "after": 32, "error": 0.01}
    changed = RanksChanged(5, [change], 1_000_000, 2e6, 0.4)
    shown = summary(STARTED, event, TrainingStarted(0, 4.0, {}), changed, steps_done(10))
    assert "parameters 1,000,000" in shown
    assert (
        "tensorized low_rank, rank 0.25: 1 layers; 1,000,000 of 5,000,000 parameters (0.20x), "
        "0.20x FLOPs per token; ranks last changed after step 5"
    ) in shown


def test_a_dense_model_says_nothing_of_tensors(summary):
    assert "tensorized" not in summary(STARTED, steps_done(10))
