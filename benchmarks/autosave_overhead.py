"""What resuming costs while nothing is saved: per step, before the first step, and in bytes."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from harness import Bar, at_most, median

_SCRIPT = """
import os, sys, time
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
layers, width, steps = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())
                        for _ in range(layers)))
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(16, width)
for step in range(steps):
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 0:
        first = time.time()
    if step == min(steps - 2, 9):
        ready = time.process_time()
state = sum(each.numel() * each.element_size() for each in model.state_dict().values())
state += sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values())
whole = time.process_time() - ready
print(first, whole / max(steps - 10, 1), state)
"""

_ALTERNATING = """
import time
import torch
from torch import nn
from torch.optim import optimizer as hooks

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU())
                        for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
inputs = torch.randn(16, 256)
unseen = compile(
    "for step in range(STEPS):\\n"
    "    loss = model(inputs).square().mean()\\n"
    "    optimizer.zero_grad()\\n"
    "    loss.backward()\\n"
    "    optimizer.step()\\n",
    "unseen", "exec",
)
seconds = [[], []]

def plainly():
    ours = dict(hooks._global_optimizer_pre_hooks)
    assert ours
    hooks._global_optimizer_pre_hooks.clear()
    begun = time.process_time()
    exec(unseen, globals())
    seconds[1].append(time.process_time() - begun)
    hooks._global_optimizer_pre_hooks.update(ours)

for block in range(BLOCKS):
    # Who comes first takes turns.
    if block % 2:
        plainly()
    begun = time.process_time()
    for step in range(STEPS):
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds[0].append(time.process_time() - begun)
    if block % 2 == 0:
        plainly()
print(*seconds[0][1:], *seconds[1][1:])
"""
"""Steps as they are run, and in code that is not rewritten, in turns and in one process."""


def bars(quick: bool) -> list[Bar]:
    """The rows of this part."""
    repeats, steps = (1, 50) if quick else (9, 2000)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(textwrap.dedent(_SCRIPT), encoding="utf-8")
        plain, ours = [], []
        for repeat in range(repeats):
            size = ["4", "256", str(steps)]
            save = ["--every", str(10 * steps), "--directory", f"{folder}/saves-{repeat}"]
            command = [sys.executable, "-m", "outlast", "run", *save, str(script), *size]
            sides = [(plain, [sys.executable, str(script), *size]), (ours, command)]
            # Whoever is first finds the caches cold: take turns.
            for side, words in sides[:: 1 if repeat % 2 else -1]:
                side.append(_run(words))
        ratio = median([b[1] / a[1] for a, b in zip(plain, ours, strict=True)])
        spread = [a[1] for a in plain]
        found = [
            _per_step(Path(folder), quick),
            Bar(
                "the same, of a process over another one",
                round(ratio - 1.0, 4),
                "of step",
                "reported",
                True,
                f"python train.py, whose own processes differ by "
                f"{max(spread) / min(spread) - 1.0:.1%}",
            ),
        ]
        layers = 10 if quick else 100
        large = [str(layers), "128", "4"]
        bare = _run([sys.executable, str(script), *large])
        save = ["--every", "2", "--directory", f"{folder}/large"]
        with_us = _run([sys.executable, "-m", "outlast", "run", *save, str(script), *large])
        found.append(
            at_most(
                f"first step later, {layers} layers",
                max(with_us[0] - bare[0], 0.0),
                "s",
                5.0,
                "python train.py",
            )
        )
        found.append(_analysis(script, layers))
        found.append(_bytes(Path(folder) / "large", with_us[2]))
    return found


def _per_step(folder: Path, quick: bool) -> Bar:
    """CPU time of rewritten steps over that of the same steps as they stand."""
    processes, blocks, steps = (1, 4, 20) if quick else (5, 40, 100)
    script = folder / "alternating.py"
    text = _ALTERNATING.replace("BLOCKS", str(blocks)).replace("STEPS", str(steps))
    script.write_text(textwrap.dedent(text), encoding="utf-8")
    ratios, more, plain = [], [], []
    for process in range(processes):
        save = ["--every", str(10 * blocks * steps), "--directory", f"{folder}/turns-{process}"]
        command = [sys.executable, "-m", "outlast", "run", *save, str(script)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds = [float(each) for each in done.stdout.split()]
        for ours, theirs in zip(seconds[: blocks - 1], seconds[blocks - 1 :], strict=True):
            ratios.append(ours / theirs - 1.0)
            more.append((ours - theirs) / steps)
            plain.append(theirs / steps)
    ratios.sort()
    lower, upper = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return at_most(
        "per-step overhead",
        median(ratios),
        "of step",
        0.01,
        f"the same steps unseen, in turns in one process: {1e6 * median(more):.0f} us of "
        f"{1e3 * median(plain):.1f} ms of CPU time; half of the turns between {lower:+.1%} and "
        f"{upper:+.1%}",
    )


def _run(command: list[str]) -> list[float]:
    """Seconds until the first step is done, CPU seconds of a later one, bytes of state."""
    begun = time.time()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    first, step, size = (float(each) for each in done.stdout.split()[-3:])
    return [first - begun, step, size]


def _analysis(script: Path, layers: int) -> Bar:
    """Reading the text, and finding the state of a model's step (trace, graph, contents)."""
    import torch
    from torch import nn

    from outlast.autosave import find_state
    from outlast.autosave.libraries import read_and_rewrite

    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(8, 64)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    begun = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        read_and_rewrite(script)
        find_state(step, {"model": model, "optimizer": optimizer})
    seconds = time.process_time() - begun
    return at_most(f"analysis and trace, {layers} layers", seconds, "CPU s", 10.0, "no peer")


def _bytes(folder: Path, naive: float) -> Bar:
    """Bytes that a save stages, without the program itself, over model and optimizer state."""
    from outlast.checkpoint import CheckpointStore

    class Seen:
        size = 0

        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state: dict[str, object]) -> None:
            tensors = state["tensors"]
            assert isinstance(tensors, dict)
            self.size = sum(each.numel() * each.element_size() for each in tensors.values())

    seen = Seen()
    with CheckpointStore(folder / "checkpoints") as store:
        store.restore({"rank0": seen}, allow=["unexpected"])
    return at_most(
        "bytes of tensors in a save over model and optimizer state",
        seen.size / naive,
        "",
        1.02,
        "state_dict() of both; the difference is the program's own data",
    )
