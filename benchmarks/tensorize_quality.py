"""Tensorized against dense pre-training of a small GPT: loss at equal steps, FLOPs and CPU seconds.

    python benchmarks/tensorize_quality.py [--quick] [--json FILE] [--directory DIR]

A byte-level Llama learns the source text of Python's standard library. Two processes of one thread
train, and every training leaves a line in DIR/trainings.jsonl, so that a benchmark that was killed
continues where it stopped. All forms see the same samples in the
same order and have the same schedule, decay and betas; each has its best learning rate of those
listed, found with the first seed. Seconds are CPU seconds of the training thread, evaluations left
out.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import Bar, at_most, publish

RATES: dict[str, tuple[float, ...]] = {
    "dense": (2.5e-4, 5e-4, 1e-3),
    "cola": (2e-3,),
    "monarch": (3e-3,),
    "btt": (3e-3,),
    "lax": (2e-3,),
    "low_rank": (1e-3,),
    "low_rank, bounded": (2e-3,),
    "tt": (2e-3,),
    "sltrain": (2e-3,),
}
"""Learning rates that are tried, by form; those of one rate were chosen in shorter trainings."""

RANKS: dict[str, Any] = {
    "cola": 0.25,
    "monarch": 8,
    "btt": 2,
    "lax": 0.25,
    "low_rank": 0.25,
    "low_rank, bounded": 0.25,
    "tt": 64,
    "sltrain": 0.25,
}
"""As `tensorize` takes them; of ``monarch`` the number of blocks."""

BOUND = 0.05
"""Largest spectral norm of a step of the product, at the peak rate, of ``bounded`` factors."""

CONTENDERS = ("cola", "monarch")
"""Forms that are trained with every seed, as the dense model is."""

SEEDS = (0, 1, 2)
SHORT = 0.75
"""Share of the dense model's CPU seconds in which its loss is to be reached."""


@dataclass(frozen=True)
class Scale:
    """How much is trained.

    Attributes:
        width: Of the model; the MLP is three times as wide.
        layers: Blocks.
        sequence: Tokens in a sample.
        batch: Samples in a step.
        steps: Optimizer steps.
        every: Steps between evaluations.
        samples: Validation samples.
    """

    width: int
    layers: int
    sequence: int
    batch: int
    steps: int
    every: int
    samples: int


FULL = Scale(width=256, layers=6, sequence=256, batch=4, steps=300, every=25, samples=48)
QUICK = Scale(width=64, layers=2, sequence=64, batch=4, steps=20, every=5, samples=8)


@dataclass(frozen=True)
class Training:
    """One training, and the name of its line in the results."""

    scale: Scale
    form: str
    rate: float
    seed: int
    share: float = 1.0

    @property
    def steps(self) -> int:
        """Optimizer steps, `share` of the scale's; the schedule ends with them."""
        return round(self.scale.steps * self.share)

    @property
    def key(self) -> str:
        """Everything that decides the result."""
        bound = BOUND if self.form.endswith("bounded") else 0.0
        fields = asdict(self) | {"rank": RANKS.get(self.form), "bound": bound}
        return json.dumps(fields, sort_keys=True)


@dataclass(frozen=True)
class Course:
    """What a training gave; arrays of one element per evaluation.

    Attributes:
        step: Steps done.
        loss: Validation loss, nats per byte.
        seconds: CPU seconds of all steps so far.
        parameters: Of the model.
        flops_per_token: Of forward and backward.
    """

    step: np.ndarray
    loss: np.ndarray
    seconds: np.ndarray
    parameters: int
    flops_per_token: float


def main() -> None:
    """Run the benchmark, or one training of it."""
    parser = argparse.ArgumentParser(description="Loss of tensorized and dense models")
    parser.add_argument("--quick", action="store_true", help="under a minute on 2 cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the bars to FILE")
    parser.add_argument("--directory", type=Path, help="keeps results; default: a temporary one")
    parser.add_argument("--forms", nargs="*", default=list(RATES), help="which forms")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        for line in sys.stdin:
            fields = json.loads(line)
            _one(Training(Scale(**fields.pop("scale")), **fields), given.directory)
        return
    bars = list(quality_bars(quick=given.quick, directory=given.directory, forms=given.forms))
    publish("tensorize quality", bars, given.json)


def quality_bars(
    *, quick: bool, directory: Path | None = None, forms: Sequence[str] = tuple(RATES)
) -> Iterator[Bar]:
    """Train everything that has not been trained yet, and compare.

    Args:
        quick: A tiny model, whose bars mean nothing.
        directory: Where results are kept.
        forms: Which forms; dense is always among them.
    """
    forms = list(dict.fromkeys(["dense", *forms]))
    with tempfile.TemporaryDirectory() as temporary:
        directory = directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        _data(directory)
        _calibrate()
        scale = QUICK if quick else FULL
        first = [Training(scale, form, rate, 0) for form in forms for rate in RATES[form]]
        done = _trained(first, directory)
        best = {form: _best(form, first, done) for form in forms}
        others = [
            replace(best[form], seed=seed)
            for seed in SEEDS[1:]
            for form in forms
            if form in ("dense", *CONTENDERS)
        ]
        short = replace(best["dense"], share=SHORT)
        done |= _trained([*others, short], directory)
    courses = {
        form: [
            done[each.key]
            for each in (replace(best[form], seed=seed) for seed in SEEDS)
            if each.key in done
        ]
        for form in forms
    }
    yield from _bars(scale, best, courses, done[short.key])


def _best(form: str, trainings: Iterable[Training], done: dict[str, Course]) -> Training:
    tried = [each for each in trainings if each.form == form]
    return min(tried, key=lambda each: float(done[each.key].loss[-1]))


def _bars(
    scale: Scale, best: dict[str, Training], courses: dict[str, list[Course]], short: Course
) -> Iterator[Bar]:
    dense = _mean(courses["dense"])
    target = float(dense.loss[-1])
    total = float(dense.seconds[-1])
    tokens = scale.batch * scale.sequence
    yield _reported(
        f"dense, rate {best['dense'].rate:g}: validation loss after {scale.steps} steps",
        target,
        "nats/byte",
        f"best of {len(RATES['dense'])} rates, mean of {len(courses['dense'])} seeds, "
        f"{dense.parameters / 1e6:.2f} M parameters, {total:.0f} CPU s",
    )
    yield _reported(
        f"dense with {SHORT:g} of the steps: loss above that",
        float(short.loss[-1]) - float(courses["dense"][0].loss[-1]),
        "nats/byte",
        "what a shorter schedule alone costs, first seed",
    )
    reached: dict[str, float] = {}
    for form, training in best.items():
        if form == "dense":
            continue
        seeds = courses[form]
        mean, peer = _mean(seeds), _mean(courses["dense"][: len(seeds)])
        what = f"{form} {RANKS[form]}, rate {training.rate:g}, {len(seeds)} seed(s)"
        loss, seconds = float(mean.loss[-1]), float(mean.seconds[-1])
        facts = (
            f"{mean.parameters / dense.parameters:.2f}x parameters, "
            f"{mean.flops_per_token / dense.flops_per_token:.2f}x FLOPs, "
            f"{seconds / float(peer.seconds[-1]):.2f}x CPU s"
        )
        yield _reported(
            f"{what}: loss at equal steps, above dense", loss - float(peer.loss[-1]), "nats/byte",
            facts,
        )  # fmt: skip
        yield _at_equal("CPU seconds", what, (mean.seconds, mean), (peer.seconds, peer))
        own_flops, dense_flops = (
            each.step * (tokens * each.flops_per_token) for each in (mean, peer)
        )
        yield _at_equal("FLOPs", what, (own_flops, mean), (dense_flops, peer))
        moment = _reached(mean, float(peer.loss[-1]))
        if moment is None:
            yield Bar(
                f"{what}: CPU seconds to dense's loss", None, "of dense's", "reported", True,
                f"not reached in {training.steps} steps",
            )  # fmt: skip
            continue
        ratio = moment / float(peer.seconds[-1])
        yield _reported(f"{what}: CPU seconds to dense's loss", ratio, "of dense's", "tuned dense")
        if len(seeds) == len(SEEDS):
            reached[form] = ratio
    name = f"small GPT: CPU seconds to the tuned dense loss, mean of {len(SEEDS)} seeds"
    if reached:
        form = min(reached, key=reached.__getitem__)
        yield at_most(f"{name}: {form}", reached[form], "of dense's", SHORT, "tuned dense")
    else:
        yield Bar(
            name, None, "of dense's", f"<= {SHORT:g}", False,
            "no form that was trained with all seeds has reached it",
        )  # fmt: skip


def _at_equal(
    what: str, name: str, own: tuple[np.ndarray, Course], dense: tuple[np.ndarray, Course]
) -> Bar:
    """The loss above dense where both have spent as much as the one that spent less in all."""
    amount = min(float(own[0][-1]), float(dense[0][-1]))
    name = f"{name}: loss at equal {what}, above dense"
    if amount < max(float(own[0][0]), float(dense[0][0])):
        why = f"takes so many more {what} that the curves do not meet"
        return Bar(name, None, "nats/byte", "reported", True, why)
    losses = [float(np.interp(amount, spent, course.loss)) for spent, course in (own, dense)]
    whose = "dense" if amount < float(dense[0][-1]) else "this form"
    peer = f"{whose} in the middle of its schedule"
    return _reported(name, losses[0] - losses[1], "nats/byte", peer)


def _reported(name: str, figure: float, unit: str, peer: str) -> Bar:
    return Bar(name, round(figure, 4), unit, "reported", True, peer)


def _mean(courses: Sequence[Course]) -> Course:
    return replace(
        courses[0],
        loss=np.mean([each.loss for each in courses], axis=0),
        seconds=np.mean([each.seconds for each in courses], axis=0),
    )


def _reached(course: Course, target: float) -> float | None:
    """CPU seconds from which on the loss is at or below `target`, between evaluations linearly."""
    above = np.flatnonzero(course.loss > target)
    if not len(above):
        return float(course.seconds[0])
    last = int(above[-1])
    if last + 1 == len(course.loss):
        return None
    upper, lower = float(course.loss[last]), float(course.loss[last + 1])
    share = (upper - target) / (upper - lower)
    begun, ended = float(course.seconds[last]), float(course.seconds[last + 1])
    return begun + share * (ended - begun)


def _trained(trainings: Iterable[Training], directory: Path) -> dict[str, Course]:
    """All courses by key; those that are missing are trained, two at a time."""
    found = _read(directory)
    waiting = [each for each in trainings if each.key not in found]
    # The longest first, so that no core is left alone at the end.
    waiting.sort(key=lambda each: (each.form != "dense", -each.share))
    with ThreadPoolExecutor(2) as pool:
        queue = deque(waiting)
        # A worker that fails ends the benchmark; the other ends its training before.
        for worker in [pool.submit(_work, queue, directory) for _ in range(min(2, len(waiting)))]:
            worker.result()
    return _read(directory)


def _work(queue: deque[Training], directory: Path) -> None:
    """Have a process of its own train what is in the queue, one after the other."""
    command = [sys.executable, __file__, "--worker", "--directory", str(directory)]
    pipe, environment = subprocess.PIPE, {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        while queue:
            training = queue.popleft()
            worker.stdin.write(json.dumps(asdict(training)) + "\n")
            worker.stdin.flush()
            if not (said := worker.stdout.readline()):
                queue.clear()
                raise SystemExit(f"the training of {training.form} failed")
            print(said, end="", flush=True)


def _read(directory: Path) -> dict[str, Course]:
    file = directory / "trainings.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = {}
    for line in lines:
        fields = json.loads(line)
        key, curve = fields.pop("key"), np.array(fields.pop("curve"))
        found[key] = Course(curve[:, 0], curve[:, 1], curve[:, 2], **fields)
    return found


def _data(directory: Path) -> Any:
    from outlast.data import prepare

    return prepare("stdlib", cache=directory / "tokens", validation_fraction=0.05)


def _calibrate() -> None:
    """Measure what operations cost with one thread, if no file says it, for all trainings."""
    program = (
        "import torch; from outlast.tensorize.measure import calibrate; "
        "calibrate(torch.float32, torch.device('cpu'))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def _one(training: Training, directory: Path) -> None:
    """Train once and add a line to the results."""
    import torch

    from outlast.data import BatchLoader, SampleOrder, SampleWindow
    from outlast.job import ScheduleSection
    from outlast.tensorize.optimizers import SpectralBound
    from outlast.train.loop import learning_rate_factor
    from outlast.train.model import size_of

    torch.set_num_threads(1)
    torch.manual_seed(training.seed)
    scale, steps = training.scale, training.steps
    data = _data(directory)
    model = _model(scale)
    _tensorize(model, training.form)
    size = size_of(model, scale.sequence)
    windows = SampleWindow(data.train, scale.sequence)
    order = SampleOrder(windows.samples, training.seed)
    batches = BatchLoader(windows, order, batch_size=scale.batch)
    held_out = SampleWindow(data.validation, scale.sequence)
    matrices = [each for each in model.parameters() if each.ndim >= 2]
    vectors = [each for each in model.parameters() if each.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=training.rate, betas=(0.9, 0.95))
    if training.form.endswith("bounded"):
        SpectralBound(optimizer, model, BOUND)
    warmup = max(steps // 15, 1)
    schedule = ScheduleSection(name="cosine", warmup_steps=warmup, final_fraction=0.05)
    curve: list[tuple[int, float, float]] = []
    seconds = 0.0
    for group in optimizer.param_groups:
        group["initial_lr"] = training.rate
    for step in range(steps):
        parts = batches.batch(step)
        begun = time.thread_time()
        for group in optimizer.param_groups:
            group["lr"] = training.rate * learning_rate_factor(step, steps, schedule)
        loss = _loss(model, parts[0].inputs, parts[0].targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.thread_time() - begun
        done = step + 1
        if done == steps or (done % scale.every == 0 and 4 * done >= steps):
            curve.append((done, _validation(model, held_out, scale), seconds))
    line = {
        "key": training.key,
        "curve": curve,
        "parameters": size.parameters,
        "flops_per_token": size.flops_per_token,
    }
    with (directory / "trainings.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")
    print(
        f"{training.form} rate {training.rate:g} seed {training.seed} share {training.share:g}: "
        f"{curve[-1][1]:.4f} nats/byte, {seconds:.0f} CPU s",
        flush=True,
    )


def _model(scale: Scale) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=scale.width,
        intermediate_size=3 * scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=scale.sequence,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config)


def _tensorize(model: Any, form: str) -> None:
    """Replace the linear layers of all blocks; the head and the embedding stay."""
    if form == "dense":
        return
    from outlast.tensorize import tensorize

    # With the costs that were measured when the benchmark began, on an idle machine.
    tensorize(model, form.partition(",")[0], RANKS[form], force=True, calibrate=True)


def _loss(model: Any, inputs: np.ndarray, targets: np.ndarray) -> Any:
    import torch
    from torch.nn import functional

    logits = model(torch.from_numpy(inputs)).logits
    return functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())


def _validation(model: Any, windows: Any, scale: Scale) -> float:
    """Mean loss over samples that are spread evenly over the validation text."""
    import torch

    ids = np.arange(scale.samples) * windows.samples // scale.samples
    with torch.no_grad():
        losses = [
            float(_loss(model, *windows.gather(ids[begin : begin + 8])))
            for begin in range(0, scale.samples, 8)
        ]
    return float(np.mean(losses))


if __name__ == "__main__":
    main()
