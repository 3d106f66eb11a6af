"""Cases of the Run API, the adapters and the first minutes with Outlast."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

from harness import Bar, at_most

ROOT = Path(__file__).resolve().parents[1]

LOOP = """
import numpy as np, torch, outlast
from torch import nn

torch.manual_seed(0)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [torch.ones(4, 2)] * 4
with outlast.Run(
    model=model, optimizer=optimizer, loader=loader,
    settings=["checkpoint.writer=thread", "energy.measure=false", "log.every_steps=4"],
) as run:
    for batch in run:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss, accuracy=np.float32(0.5), words=torch.tensor(3), ratio=float("nan"))
"""

TWO_ACCELERATORS = """
import torch
from accelerate import Accelerator
from pathlib import Path
from outlast.integrations.accelerate import add_checkpoints

def made():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2000, 2000)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    saving = add_checkpoints(accelerator, Path("store"), writer="thread")
    return accelerator, model, optimizer, saving

wrong = 0
for steps in (0, 1):
    accelerator, model, optimizer, saving = made()
    for _ in range(steps):
        model(torch.randn(2, 2000)).sum().backward()
        optimizer.step()
    accelerator.save_state(f"state-{steps}")
    other, loaded, _, seen = made()
    try:
        found = seen.newest()
        other.load_state(f"state-{steps}")
        wrong += found != steps or not torch.equal(model.weight, loaded.weight)
    except Exception as error:
        print(error)
        wrong += 1
    saving.close()
print("wrong", wrong)
"""

BYTEARRAY = """
import torch
from outlast.checkpoint import CheckpointStore

class Held:
    def __init__(self, value): self.value = value
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

with CheckpointStore("store", writer="thread") as store:
    store.save(1, {"held": Held({"a": bytearray(b"12"), "b": b"34"})})
    held = Held({"a": bytearray(), "b": b""})
    store.restore({"held": held})
found = held.value
right = found == {"a": bytearray(b"12"), "b": b"34"}
print("wrong", int(not (right and type(found["a"]) is bytearray and type(found["b"]) is bytes)))
"""

RESUMED = """
import sys, torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from outlast.integrations.accelerate import add_checkpoints

def looped(folder, accumulated, stop, resumes):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1))
    x = torch.randn(48, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True)
    torch.manual_seed(7 if resumes else 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    saving = add_checkpoints(accelerator, folder / "store", writer="thread")
    done = 0
    if resumes:
        accelerator.load_state(str(folder / "state"))
        done = stop
    for epoch in range(done // 12, 2):
        loader.set_epoch(epoch)
        for x, y in accelerator.skip_first_batches(loader, done - 12 * epoch):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            done += 1
            if done == stop and not resumes:
                accelerator.save_state(str(folder / "state"))
    saving.finish()
    accelerator.end_training()
    return torch.cat([each.detach().flatten() for each in model.parameters()])

wrong = 0
for accumulated in (1, 4):
    for stop in (5, 12, 18):
        folder = Path(f"{accumulated}-{stop}")
        first, again = (looped(folder, accumulated, stop, each) for each in (False, True))
        wrong += not torch.equal(first, again)
print("wrong", wrong)
"""


def _python(text: str, folder: Path) -> str:
    """What a script says, on both streams."""
    (folder / "script.py").write_text(textwrap.dedent(text))
    run = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    return run.stdout


def _wrong(text: str, most: int = 1) -> int:
    """What a script that counts has counted; `most` where it did not come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        found = re.findall(r"^wrong (\d+)$", _python(text, Path(folder)), re.MULTILINE)
    return sum(map(int, found)) if len(found) == text.count('print("wrong"') else most


def run_api() -> Bar:
    """Point 14: figures that are logged, a complete run, a second accelerator, a bytearray."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, again = _python(LOOP, folder), _python(LOOP, folder)
        file = folder / "runs" / "run" / "events.jsonl"
        told = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    metrics: dict[str, object] = {}
    for each in told:
        metrics |= each.get("metrics", {})
    wrong = metrics != {"accuracy": 0.5, "words": 3.0, "ratio": "nan"}
    wrong += "ratio = nan" not in first
    wrong += not re.search(r"is complete: step 4, since .*larger epochs.*fresh=True", again)
    wrong += _wrong(TWO_ACCELERATORS + BYTEARRAY, 3)
    return at_most(
        "logged, complete, second accelerator, bytearray: what went wrong",
        wrong,
        "of 6",
        0,
        "outlast.Run twice, two Accelerators of a process, a CheckpointStore",
    )


def resumed_within_an_epoch() -> Bar:
    """Point 16: the bits that docs/integrations/accelerate.md promises."""
    return at_most(
        "resumed within an epoch on Accelerate, other weights",
        _wrong(RESUMED, 6),
        "of 6",
        0,
        "dropout, shuffle, accumulation of 1 and 4, stopped at 3 places",
    )


def described() -> Bar:
    """Point 18: CONTRIBUTING.md names each package and the layers that are checked."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    packages = [each.parent.name for each in (ROOT / "src" / "outlast").glob("*/__init__.py")]
    missing = sum(not re.search(rf"^  {name}/ +\w", text, re.MULTILINE) for name in packages)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    [layers] = [
        each["layers"]
        for each in project["tool"]["importlinter"]["contracts"]
        if each["type"] == "layers"
    ]
    missing += sum(
        not re.search(rf"^{re.escape(each.replace('outlast.', ''))}$", text, re.MULTILINE)
        for each in layers
    )
    return at_most(
        "packages and layers that CONTRIBUTING.md does not name",
        missing,
        f"of {len(packages) + len(layers)}",
        0,
        "src/outlast and pyproject.toml",
    )


def _outlast(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outlast", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


def _own_loop(folder: Path) -> int:
    """Failures of the page's own-loop diff with the files that `outlast init` writes."""
    page = ROOT / "docs" / "integrations" / "pytorch.md"
    diffs = re.findall(r"```diff\n(.*?)```", page.read_text(), re.DOTALL)
    [diff] = [each for each in diffs if "outlast.Run" in each]
    body = "\n".join(
        line[1:] for line in diff.splitlines() if line[:1] in ("+", " ") and "import" not in line
    )
    script = (
        "import torch, outlast\nfrom types import SimpleNamespace\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return SimpleNamespace(loss=super().forward(x).square().mean())\n"
        "model = Model(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"loader = [{{'x': torch.ones(4, 2)}}] * 4\n{body}\nprint('trained', run.step)\n"
    ).replace('"runs/a"', '"job.toml"')
    made = _outlast(folder, "init", "--loop")
    failures = made.returncode != 0 or "trained 12" not in _python(script, folder)
    _outlast(folder, "init", "--force")
    said = _python(script, folder)
    # A trainer's file works, or is refused in one sentence with the remedy.
    problems = [line for line in said.splitlines() if line.startswith("  - ")]
    refused = len(problems) == 1 and "outlast init --loop" in problems[0]
    return failures + ("trained 12" not in said and not refused)


def _interrupted(folder: Path, seconds: float, arguments: list[str]) -> bool:
    """Whether a command answers Ctrl-C otherwise than in a line, or by a save."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "outlast", *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Processes in the background of a shell ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    assert process.stderr is not None
    said: list[str] = []
    begun = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            if "outlast.cli.main" in line:
                begun.set()
            if not line.startswith("import time:"):
                said.append(line)
        begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    # What comes before is Python's own start.
    begun.wait(60)
    time.sleep(0.005 + seconds)
    process.send_signal(signal.SIGINT)
    code = process.wait(60)
    reader.join()
    return "Traceback" in "".join(said) or code not in (0, 3, 130)


def dead_ends() -> int:
    """Failures outside of clusters: the own loop of its page, Ctrl-C, a text for a list."""
    plan = ["plan", "llama-3-8b", "--cluster", "h100x64", "--tokens", "300B"]
    train = ["train", "train.steps=100000"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        failures = _own_loop(folder)
        for seconds, command in ((0.1, train), (0.5, train), (2.0, train), (0.3, plan)):
            failures += _interrupted(folder, seconds, command)
        said = _outlast(folder, "train", "data.source=tokens", "data.train=none.bin").stderr
        failures += "should be a list" in said
    return failures


CASES: dict[int, Callable[[], Bar]] = {
    14: run_api,
    16: resumed_within_an_epoch,
    18: described,
}
