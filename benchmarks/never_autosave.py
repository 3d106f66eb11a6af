"""Scripts under `outlast run`, killed: none ends with other results, or fails at its first save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import harness
from harness import Bar

if TYPE_CHECKING:
    from collections.abc import Callable

_STEPS, _KILLED_AT, _EVERY, _PERIOD = 22, 12, 5, 9

_DESCRIPTOR = """
import weakref
class D:
    v = weakref.WeakKeyDictionary()
    def __get__(self, owner, kind=None): return D.v.get(owner, 0)
    def __set__(self, owner, n): D.v[owner] = n
class A:
    d = D()
a = A()
"""
_DATABASE = """
import sqlite3
db = sqlite3.connect(":memory:")
db.execute("create table t(n)")
db.execute("insert into t values (0)")
"""
_STATE = {
    "a context variable": (
        "import contextvars; v = contextvars.ContextVar('v', default=0)",
        "v.set(v.get() + 1)",
        "v.get()",
    ),
    "a thread's variable": (
        "import threading; t = threading.local(); t.n = 0", "t.n += 1", "t.n",
    ),
    "a descriptor": (
        _DESCRIPTOR,
        "a.d += 1",
        "a.d",
    ),
    "os.environ": (
        "os.environ['N'] = '0'", "os.environ['N'] = str(int(os.environ['N']) + 1)",
        "int(os.environ['N'])",
    ),
    "a database in memory": (
        _DATABASE,
        "db.execute('update t set n = n + 1')",
        "db.execute('select n from t').fetchone()[0]",
    ),
    "a package": ("import pkg", "pkg.bump()", "pkg.count"),
    "torch": ("torch.my_counter = 0", "torch.my_counter += 1", "torch.my_counter"),
}  # fmt: skip
"""Where state lies: how it is made, what a step does to it, and how it is read."""

_SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "site-packages"))
{setup}
DIE = os.environ.get("DIE")
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
features = torch.randn(8, 4)
for step in range({steps}):
{step}
    loss = model(features).square().mean()
    for place, n in enumerate([{read}]):
        if n % {period} == 0: loss = loss * (1.01 + place / 100)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if DIE == str(step): os.kill(os.getpid(), signal.SIGKILL)
counted = [{read}]
torch.save((counted, DIE, [each.detach() for each in model.parameters()]), HERE / "result.pt")
"""

_FUNCTION = """
import torch
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value): ctx.save_for_backward(value); return value * 2
    @staticmethod
    def backward(ctx, grad): return grad * 2
{setup}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    Doubled.apply(model(torch.ones(3, 2)).mean()).backward()
    optimizer.step(); optimizer.zero_grad()
    {step}
    print("step", step)
"""
_UNSAVEABLE = "stream = (each for each in range(99))", "next(stream)"


def hidden_state() -> Bar:
    """State in seven places, each with an effect every ninth step, and a kill between two saves."""
    setup, step, read = _together()
    text = _SCRIPT.format(setup=setup, step=f"    {step}", read=read, steps=_STEPS, period=_PERIOD)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, name) for name in ("plain", "killed")]
        for place in places:
            (place / "site-packages").mkdir(parents=True)
            package = "count = 0\ndef bump():\n    global count\n    count += 1\n"
            (place / "site-packages" / "pkg.py").write_text(package)
            (place / "train.py").write_text(text)
        assert _run([str(places[0] / "train.py")]).returncode == 0
        command = ["-m", "outlast", "run", "--every", str(_EVERY), str(places[1] / "train.py")]
        killed = _run(command, DIE=str(_KILLED_AT))
        ended = _run(command)
        if killed.returncode != -signal.SIGKILL or ended.returncode != 0:
            # Refused, and said so, or stopped by its own comparison: not wrong, but not done.
            wrong = len(_STATE)
        else:
            wrong = _differences(*(place / "result.pt" for place in places))
    return harness.at_most(
        "state that outlast run resumes otherwise", wrong, f"of {len(_STATE) + 2} places", 0,
        f"SIGKILL at step {_KILLED_AT}, effect every {_PERIOD}th step, against plain Python",
    )  # fmt: skip


def refusals() -> Bar:
    """A custom autograd function is saved; what cannot be saved is refused before any step."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, (setup, step, steps) in enumerate((("", "", 4), (*_UNSAVEABLE, 0))):
            script = Path(folder, f"train{number}.py")
            script.write_text(_FUNCTION.format(setup=setup, step=step))
            ended = _run(["-m", "outlast", "run", "--every", "2", str(script)])
            wrong += ended.stdout.count("step") != steps or ended.returncode != (0 if steps else 2)
    return harness.at_most(
        "custom autograd functions and late refusals", wrong, "of 2 scripts", 0,
        "outlast run, a save every second step",
    )  # fmt: skip


def _together() -> tuple[str, str, str]:
    setups, steps, reads = zip(*_STATE.values(), strict=True)
    return "\n".join(setups), "\n    ".join(steps), ", ".join(reads)


def _differences(plain: Path, resumed: Path) -> int:
    import torch

    one, other = (torch.load(each, weights_only=False) for each in (plain, resumed))
    counted = sum(mine != its for mine, its in zip(one[0], other[0], strict=True))
    weights = all(map(torch.equal, one[2], other[2]))
    return counted + (one[1] != other[1]) + (not weights)


def _run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    own = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, env=own, capture_output=True, text=True, check=False)


CASES: dict[int, Callable[[], Bar]] = {12: hidden_state, 13: refusals}
