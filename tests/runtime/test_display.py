"""What a person sees while training, on a terminal and in a log."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from outlast.records import (
    AttemptEnded,
    AttemptStarted,
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    Evaluated,
    GradientsCoded,
    Sampled,
    StepsDone,
    StopRequested,
    TrainingStarted,
    Warned,
)
from outlast.runtime import display as displays
from outlast.runtime.display import (
    LineDisplay,
    Rate,
    Shown,
    TerminalDisplay,
    message_of,
    progress_sink,
)

STARTED = AttemptStarted(
    fingerprint="f",
    world_size=4,
    launch="nproc",
    parallel={"replicate": 2, "shard": 2, "tensor": 1, "pipeline": 1},
    machine={},
    versions={},
    total_steps=40,
    samples_per_step=16,
    tokens_per_step=2048,
    parameters=1234567,
    flops_per_token=1.0,
)


def coded(step, errors):
    count = len(errors)
    return GradientsCoded(
        step=step,
        scheme="coverage",
        replicas=4,
        stragglers=[[1]] * count,
        claims=[1] * count,
        duplicates=[0] * count,
        lost=[int(error > 0) for error in errors],
        errors=errors,
        coded_seconds=[0.5] * count,
        waiting_seconds=[0.9] * count,
    )


def steps_done(step, seconds=0.5):
    return StepsDone(step, 1, 2.25, 1.0, 1e-3, step * 2048, [seconds], {"compute": seconds})


EVENTS = [
    Warned("before the start"),
    STARTED,
    CheckpointRestored(3, 0.25, ["step 4 is damaged"]),
    TrainingStarted(3, 4.0, {"imports": 2.5, "model": 1.0, "data": 0.25, "restore": 0.25}),
    steps_done(4),
    Evaluated(4, 1.5, 2.125, 64, 0.5),
    Evaluated(4, 1.5, None, 64, 0.5),
    CheckpointSaved(4, 0.005, 0.5, 2_500_000),
    CheckpointFailed(5, "the disk [/data/runs] is full"),
    Warned("no file matches [a-z]*.txt, and [/bold] is no markup"),
    coded(5, [0.0, 0.0, 0.0, 0.0, 0.0]),
    coded(10, [0.0, 1.25, 0.0, 2.5, 0.0]),
    StopRequested(6, "SIGTERM"),
    steps_done(40),
    Sampled(40, "def ", "x[0] = 1"),
    AttemptEnded(6, "to_be_continued", "SIGTERM", {}),
    AttemptEnded(40, "completed", "", {}),
]

SAID = [
    "warning: before the start",
    "model: 1,234,567 parameters on 4 processes (replicate 2, shard 2)",
    "restored the checkpoint of step 3 in 0.25 s",
    "ready at step 3 after 4.0 s (imports 2.5 s, model 1.0 s, data 0.2 s)",
    "step 4: validation loss 1.5000 nats, 2.125 bits/byte",
    "step 4: validation loss 1.5000 nats",
    "step 4: checkpoint saved, 2.5 MB in 0.50 s (training waited 5 ms)",
    "warning: the disk [/data/runs] is full; training continues",
    "warning: no file matches [a-z]*.txt, and [/bold] is no markup",
    "step 10: 2 of the last 5 gradients inexact, certified error up to 2.5",
    "step 6: stopping (SIGTERM)",
    "saved at step 6; the same command continues from there",
]


@pytest.fixture
def shown():
    return Shown("quickstart", steps=40, tokens_per_step=2048)


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(displays, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_lines_say_every_event_in_words(shown, capsys):
    display = LineDisplay(shown)
    for event in EVENTS:
        display.write(event)
    display.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "tokens/s" not in line] == SAID
    assert [message_of(event) for event in EVENTS if message_of(event)] == SAID


def test_a_log_gets_one_line_per_interval_and_the_last_step(shown, clock, capsys):
    display = LineDisplay(shown)
    for step in range(1, 41):
        clock.seconds += 1.0
        display.write(steps_done(step))
    lines = capsys.readouterr().out.splitlines()
    assert [int(re.match(r"step (\d+)/40 ", line)[1]) for line in lines] == [
        *range(1, 40, 5),
        40,
    ]
    assert lines[1] == "step 6/40  loss 2.2500  4,096 tokens/s  500.0 ms/step  eta 17 s"


def test_one_process_is_called_one(shown, capsys):
    event = AttemptStarted(**(STARTED.__dict__ | {"world_size": 1, "parallel": {"shard": 1}}))
    LineDisplay(shown).write(event)
    assert capsys.readouterr().out == "model: 1,234,567 parameters on 1 process\n"


def test_a_terminal_shows_the_same_and_a_bar(shown, monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160, color_system=None)
    monkeypatch.setattr(displays, "Console", lambda: console)
    display = TerminalDisplay(shown)
    for event in EVENTS:
        display.write(event)
    display._progress.refresh()
    display.close()
    shown = screen.getvalue()
    for sentence in SAID:
        assert sentence in shown
    assert re.search(r"quickstart .* 40/40 loss 2\.250  4\.1k tokens/s  500\.0 ms/step", shown)
    assert "saved at 4" in shown


def test_a_bar_names_a_save_after_the_last_step(shown, monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160, color_system=None)
    monkeypatch.setattr(displays, "Console", lambda: console)
    display = TerminalDisplay(shown)
    display.write(TrainingStarted(0, 1.0, {}))
    display.write(steps_done(40))
    display.write(CheckpointSaved(40, 0.1, 0.2, 1000))
    display._progress.refresh()
    display.close()
    *_, last = screen.getvalue().rpartition("no checkpoint yet")
    assert "saved at 40" in last


def test_a_terminal_display_that_never_became_ready_closes(shown, monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(displays, "Console", lambda: console)
    display = TerminalDisplay(shown)
    display.write(steps_done(1))
    display.close()


@pytest.mark.parametrize(("terminal", "kind"), [(True, TerminalDisplay), (False, LineDisplay)])
def test_the_display_fits_where_the_output_goes(shown, monkeypatch, terminal, kind):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr("sys.stdout", stream)
    assert isinstance(progress_sink(shown), kind)


def test_the_rate_is_that_of_the_last_steps():
    rate = Rate(1000)
    assert rate.tokens_per_second == 0.0
    for seconds in [100.0] * 10 + [0.5] * 50:
        rate.add(steps_done(1, seconds))
    assert rate.tokens_per_second == pytest.approx(2000.0)
    assert rate.step_seconds == pytest.approx(0.5)
