"""Run directories as a real run leaves them, written with the real writer on a clock of its own."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outlast import records

if TYPE_CHECKING:
    from pathlib import Path

START_TIME = 1_760_000_000.0
TOKENS_PER_STEP = 2048


@dataclass
class Clock:
    now: float = START_TIME

    def time(self) -> float:
        return self.now

    monotonic = time


@dataclass
class RunMaker:
    """Writes a run's events; `clock` is what the writer believes to be the time."""

    path: Path
    clock: Clock
    attempt: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(7))
    writer: records.RecordWriter | None = None

    def start(self, world_size: int = 4, startup_seconds: float = 6.0, **changes: Any) -> None:
        self.attempt = records.RunDirectory(self.path).next_attempt()
        self.writer = records.RecordWriter(self.path, attempt=self.attempt)
        known = {
            "fingerprint": "0123456789abcdef",
            "world_size": world_size,
            "launch": "torchrun",
            "parallel": {"replicate": world_size, "shard": 1, "tensor": 1, "pipeline": 1},
            "machine": {
                "host_name": "node-17",
                "cpu_model": "A processor with 64 cores",
                "usable_cores": 64.0,
                "memory_total_bytes": 274_877_906_944,
                "gpus": {"unavailable": "NVML does not start", "remedy": ""},
            },
            "versions": {"outlast": "0.1.0", "torch": "2.13.0", "python": "3.12.4"},
            "total_steps": 600,
            "samples_per_step": 16,
            "tokens_per_step": TOKENS_PER_STEP,
            "parameters": 459_264,
            "flops_per_token": 2.9e6,
            "data": {"source": "stdlib", "train_tokens": 22_193_664},
        }
        self.write(records.AttemptStarted(**{**known, **changes}))
        self.clock.now += startup_seconds

    def ready(self, step: int = 0, seconds: float = 6.0) -> None:
        self.write(
            records.TrainingStarted(step, seconds, {"torch": seconds / 2, "model": seconds / 2})
        )

    def write(self, event: records.Event) -> None:
        assert self.writer is not None
        self.writer.write(event)

    def steps(self, first: int, last: int, *, every: int = 5, seconds: float = 0.1) -> None:
        """Do the steps from `first` + 1 to `last`, one record for `every` of them."""
        for step in range(first + every, last + 1, every):
            loss = 1.4 + 4.1 * math.exp(-step / 90) + self.random.gauss(0, 0.05)
            self.done(step, every, loss, seconds)

    def done(self, step: int, steps: int, loss: float, seconds: float = 0.1) -> None:
        each = [seconds * self.random.lognormvariate(0, 0.08) for _ in range(steps)]
        total = sum(each)
        self.clock.now += total
        shares = {"compute": 0.86, "data": 0.02, "communication": 0.07, "other": 0.05}
        split = {name: share * total for name, share in shares.items()}
        self.write(
            records.StepsDone(
                step, steps, loss, 1.2 * math.exp(-step / 400) + self.random.random() * 0.2,
                0.004 * min(1.0, step / 20) * (1 - 0.9 * step / 600), step * TOKENS_PER_STEP,
                each, split,
            )
        )  # fmt: skip

    def evaluate(self, step: int, loss: float, bits: float | None = None) -> None:
        event = records.Evaluated(step, loss, bits, step * TOKENS_PER_STEP, 1.5)
        self.write(event)

    def save(self, step: int) -> None:
        self.write(records.CheckpointSaved(step, 0.031, 0.42, 5_511_168))

    def end(self, step: int, outcome: str, reason: str = "", **seconds: float) -> None:
        self.clock.now += sum(seconds.values())
        self.write(records.AttemptEnded(step, outcome, reason, seconds))
        self.close()

    def close(self) -> None:
        assert self.writer is not None
        self.writer.close()


def eventful(run: RunMaker) -> RunMaker:
    """Two attempts: the first dies at step 230, the second continues at 200 with two processes."""
    run.start(world_size=4)
    run.ready()
    for at in range(0, 200, 50):
        run.steps(at, at + 50)
        run.save(at + 50)
        if at + 50 == 100:
            run.evaluate(100, 2.875, 4.148)
    run.write(records.CheckpointFailed(210, "No space left on device"))
    run.write(records.Warned("the disk is <almost> full"))
    run.steps(200, 230)
    run.close()
    run.clock.now += 95
    run.start(world_size=2, startup_seconds=9.0)
    change = {"name": "optimizer.weight_decay", "before": 0.1, "after": 0.2}
    run.write(records.SettingsChanged([change]))
    run.write(records.CheckpointRestored(200, 0.8, ["step 210: torn manifest"]))
    run.ready(200, 9.0)
    run.steps(200, 400, seconds=0.19)
    run.done(405, 5, float("nan"), 0.19)
    run.steps(405, 600, seconds=0.19)
    run.evaluate(600, 1.4321, 2.0661)
    run.save(600)
    run.write(records.Sampled(600, "def ", "def main(path):\n    return '</script>' & path\n"))
    run.end(600, "completed", "", checkpoint=0.4, evaluation=1.5, other=0.2)
    return run


def tear_last_line(path: Path) -> None:
    """Cut the event log in the middle of its last line, as ``kill -9`` may."""
    file = path / "events.jsonl"
    file.write_bytes(file.read_bytes()[:-25])


def figures_of(page: str) -> dict[str, Any]:
    """The figures' data that a page carries."""
    text = page.partition('id="figure-data">')[2].partition("</script>")[0]
    found: dict[str, Any] = json.loads(text)
    return found


def run_with(run: RunMaker, *events: records.Event) -> RunMaker:
    """A complete run of 50 steps with these events at its end."""
    run.start()
    run.ready()
    run.steps(0, 50)
    for event in events:
        run.write(event)
    run.end(50, "completed")
    return run
