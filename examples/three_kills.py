"""Kill a training three times with ``kill -9``, and lay its loss over that of an undisturbed run.

    python examples/three_kills.py --steps 240 --picture three-kills.svg    # needs matplotlib

Two runs of the embedded default start with the same seed. The second one is killed at three random
steps and started again by the same command: it resumes from its newest checkpoint, and computes the
steps after that a second time. In the end all losses and the weights of both runs are compared.
"""

import argparse
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from outlast.errors import OutlastError
from outlast.records import Run, StepsDone, read_run

SAVE_EVERY = 30


@dataclass(frozen=True)
class Attempt:
    """What one start of a run has done.

    Attributes:
        steps: (n,) step numbers, in order.
        losses: (n,) training loss of each, in nats.
    """

    steps: list[int]
    losses: list[float]


def attempts_of(run: Run) -> list[Attempt]:
    """The starts of a run that have done steps, oldest first."""
    found: dict[int, Attempt] = {}
    for record, event in run.of(StepsDone):
        attempt = found.setdefault(record.attempt, Attempt([], []))
        attempt.steps.append(event.step)
        attempt.losses.append(event.loss)
    return [*found.values()]


def last_step(run: Path) -> int:
    """The last step in the run's records; 0 before it has any."""
    try:
        return max((event.step for _, event in read_run(run).of(StepsDone)), default=0)
    except OutlastError:
        return 0


def train(run: Path, steps: int, kills: list[int]) -> Run:
    """Train to the end; the process is killed once it has done each of the steps in `kills`."""
    settings = [f"run.directory={run.parent}", f"run.name={run.name}", f"train.steps={steps}"]
    settings += [f"checkpoint.every_steps={SAVE_EVERY}", "log.every_steps=1", "recover.mode=off"]
    command = [sys.executable, "-m", "outlast", "train", *settings]
    for kill in kills:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while last_step(run) < kill and process.poll() is None:
            time.sleep(0.05)
        process.kill()
        process.wait()
        print(f"{run.name}: kill -9 after step {last_step(run)}", flush=True)
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return read_run(run)


def weights_of(run: Path) -> bytes:
    """The weights that the run exports, as a safetensors file."""
    output = run.with_name(f"{run.name}-weights")
    command = [sys.executable, "-m", "outlast", "export", str(run), "--output", str(output)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return (output / "model.safetensors").read_bytes()


def draw(clean: list[Attempt], killed: list[Attempt], file: Path) -> None:
    """Both loss curves; a cross where the second run was killed, from which a line leads back."""
    import matplotlib.pyplot as plt

    # Text stays text, and the same runs give the same file.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "outlast"})
    plt.rcParams["font.family"] = ["DejaVu Sans", "sans-serif"]
    figure, axes = plt.subplots(figsize=(8, 3.4), layout="constrained")
    [whole] = clean
    axes.plot(whole.steps, whole.losses, color="#B9C4D0", linewidth=6, label="never killed")
    colours = ["#0B6E4F", "#B3541E", "#5B3E96", "#1F4E8C"]
    for number, attempt in enumerate(killed):
        colour = colours[number % len(colours)]
        axes.plot(
            attempt.steps,
            attempt.losses,
            color=colour,
            linewidth=1.2,
            label=f"start {number + 1}: steps {attempt.steps[0]} to {attempt.steps[-1]}",
        )
        if number < len(killed) - 1:
            axes.plot(
                attempt.steps[-1],
                attempt.losses[-1],
                "x",
                color="#C1121F",
                markersize=10,
                markeredgewidth=2.5,
                label="kill -9" if number == 0 else None,
            )
    axes.set(xlabel="step", ylabel="training loss (nats per byte)", ylim=(None, 4.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2)
    figure.savefig(file, dpi=200, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=240, help="of each run")
    parser.add_argument("--directory", type=Path, default=Path("runs"), help="where both runs go")
    parser.add_argument("--seed", type=int, default=1, help="of the steps that are killed")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="an .svg or .png to draw")
    asked = parser.parse_args()

    chosen = random.Random(asked.seed).sample(range(5, asked.steps - 5), 3)
    clean = train(asked.directory / "never-killed", asked.steps, [])
    killed = train(asked.directory / "killed-three-times", asked.steps, sorted(chosen))

    done = sum(len(attempt.steps) for attempt in attempts_of(killed))
    same_losses = clean.losses() == killed.losses()
    same_weights = weights_of(clean.path) == weights_of(killed.path)
    print(f"{asked.steps} steps; with three kills {done - asked.steps} of them were done twice")
    print(f"losses:  {'the same bits' if same_losses else 'DIFFERENT'}")
    print(f"weights: {'the same bits' if same_weights else 'DIFFERENT'}")
    if asked.picture:
        draw(attempts_of(clean), attempts_of(killed), asked.picture)
    sys.exit(not (same_losses and same_weights))


if __name__ == "__main__":
    main()
