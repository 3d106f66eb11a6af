"""State in odd places that has its effect every ninth step, killed under `outlast run`."""

import signal

import pytest
import torch
from running import outlast, plain

pytestmark = pytest.mark.distributed

PACKAGE = """
import contextvars
import itertools
import threading

count = 0
table = {"n": 0}
numbers = itertools.count(1)
local = threading.local()
local.n = 0


class Holder:
    made = []
    ids = itertools.count(1)


def bump():
    global count
    count += 1
    return count


def default(seen=[]):
    seen.append(1)
    return len(seen)


def make():
    n = [0]

    def inner():
        nonlocal n
        n = [n[0] + 1]
        return n[0]

    return inner


inner = make()
"""

SCRIPT = """
import builtins
import contextvars
import itertools
import logging
import os
import signal
import sqlite3
import sys
import threading
import time
import types
import warnings
import weakref
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "site-packages"))
import pkg
from pkg import default as pkg_default

variable = contextvars.ContextVar("variable", default=0)
listed = contextvars.ContextVar("listed")
listed.set([0])
local = threading.local()
local.n = 0
database = sqlite3.connect(":memory:")
database.execute("create table counted (n)")
database.execute("insert into counted values (0)")
torch.my_counter = 0
torch.nn.functional.my_table = {"n": 0}
nn.Linear.calls = 0
nn.functional.mse_loss.calls = 0
builtins.my_list = [0]
loose = types.ModuleType("loose")
loose.n = 0
sys.modules["listed_module"] = types.ModuleType("listed_module")
sys.modules["listed_module"].n = 0
round_and_round = itertools.cycle([3, 9, 18])
growing = [0]
grown = iter(growing)


class Value:
    def __init__(self):
        self.of = weakref.WeakKeyDictionary()

    def __get__(self, owner, kind=None):
        return self.of.get(owner, 0)

    def __set__(self, owner, value):
        self.of[owner] = value


class Reads:
    def __init__(self):
        self.n = 0

    def __get__(self, owner, kind=None):
        self.n += 1
        return self.n


def counting():
    n = 0

    def get(self):
        nonlocal n
        n += 1
        return n

    return property(get)


class Owner:
    value = Value()
    reads = Reads()
    closed = counting()
    __count__ = 0


owner = Owner()


class Counting(logging.Handler):
    n = 0

    def emit(self, record):
        self.n += 1


logging.getLogger("counted").addHandler(Counting())
logging.getLogger("counted").propagate = False


def rebinding():
    n = [0]

    def get():
        nonlocal n
        n = [n[0] + 1]
        return n[0]

    return get


rebound = rebinding()


class Doubled(torch.autograd.Function):
    passed = 0

    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value * 2

    @staticmethod
    def backward(ctx, grad):
        Doubled.passed += 1
        return grad * 2


def within():
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.exp()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return grad

    return Inner.apply


inner = within()


def counts(step):
    variable.set(variable.get() + 1)
    listed.get()[0] += 1
    local.n += 1
    database.execute("update counted set n = n + 1")
    torch.my_counter += 1
    torch.later_counter = getattr(torch, "later_counter", 0) + 1
    nn.functional.my_table["n"] += 1
    nn.Linear.calls += 1
    nn.functional.mse_loss.calls += 1
    builtins.my_list[0] += 1
    loose.n += 1
    sys.modules["listed_module"].n += 1
    if "late_module" not in sys.modules:
        sys.modules["late_module"] = types.ModuleType("late_module")
        sys.modules["late_module"].n = 0
    sys.modules["late_module"].n += 1
    growing.append(step)
    owner.value += 1
    Owner.__count__ += 1
    os.environ["COUNTED"] = str(int(os.environ.get("COUNTED", "0")) + 1)
    pkg.table["n"] += 1
    pkg.Holder.made.append(step)
    pkg.local.n += 1
    logging.getLogger("counted").warning("step")
    if step == 5:
        os.chdir(HERE / "site-packages")
        torch.set_flush_denormal(True)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        warnings.simplefilter("error", BytesWarning)
    return {
        "context variable": variable.get(),
        "list in a context variable": listed.get()[0],
        "thread's variable": local.n,
        "database": database.execute("select n from counted").fetchone()[0],
        "attribute of torch": torch.my_counter,
        "later attribute of torch": torch.later_counter,
        "dictionary in a module of torch": nn.functional.my_table["n"],
        "variable of a class of torch": nn.Linear.calls,
        "attribute of a function of torch": nn.functional.mse_loss.calls,
        "builtins": builtins.my_list[0],
        "module that no import finds": loose.n,
        "module among those of the process": sys.modules["listed_module"].n,
        "module that training makes": sys.modules["late_module"].n,
        "cycle": next(round_and_round),
        "iterator of a list that grows": next(grown),
        "descriptor with weak references": owner.value,
        "descriptor that counts": owner.reads,
        "property with a closure": owner.closed,
        "special name of a class": Owner.__count__,
        "environment": int(os.environ["COUNTED"]),
        "handler of a logger": logging.getLogger("counted").handlers[0].n,
        "list of a closure": rebound(),
        "autograd function": Doubled.passed,
        "global of a package": pkg.bump(),
        "dictionary of a package": pkg.table["n"],
        "list of a package's class": len(pkg.Holder.made),
        "iterator of a package": next(pkg.numbers),
        "iterator of a package's class": next(pkg.Holder.ids),
        "default argument in a package": pkg_default(),
        "closure in a package": pkg.inner(),
        "thread's variable in a package": pkg.local.n,
        "folder": Path.cwd().name == "site-packages",
        "denormals": bool((torch.tensor(1e-310, dtype=torch.float64) * 1).item()),
        "signal": int(signal.getsignal(signal.SIGALRM)),
        "warnings": warnings.filters[0][2] is BytesWarning,
    }


torch.manual_seed(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
features = torch.randn(8, 4)
for step in range(22):
    counted = counts(step)
    loss = Doubled.apply(inner(model(features).float()).square().mean())
    for place, n in enumerate(counted.values()):
        if n % 9 == 0:
            loss = loss * (1.01 + 0.001 * place)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 12 and (HERE / "plan").exists():
        while not [*HERE.glob(".outlast/*/checkpoints/step-00000010-*/rank-*.json")]:
            time.sleep(0.01)
        (HERE / "plan").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
weights = [each.detach() for each in model.parameters()]
torch.save({"counted": counted, "weights": weights}, HERE / "result.pt")
"""


def staged(place, text, **files):
    place.mkdir()
    (place / "train.py").write_text(text)
    (place / "site-packages").mkdir()
    (place / "site-packages" / "pkg.py").write_text(PACKAGE)
    for name, each in files.items():
        (place / name).write_text(each)
    return place / "train.py"


def test_state_in_odd_places_is_as_in_a_run_without_a_kill(tmp_path):
    whole = staged(tmp_path / "plain", SCRIPT)
    ended = plain(whole)
    assert ended.code == 0, ended.said
    killed = staged(tmp_path / "killed", SCRIPT, plan="")
    ended = outlast("run", "--every", 5, killed)
    assert ended.code == -signal.SIGKILL, ended.said
    ended = outlast("run", "--every", 5, killed)
    assert ended.code == 0, ended.said
    assert "resumed at step 10" in ended.said
    expected, found = (torch.load(each.parent / "result.pt") for each in (whole, killed))
    wrong = [name for name, n in expected["counted"].items() if found["counted"][name] != n]
    assert wrong == []
    assert all(map(torch.equal, expected["weights"], found["weights"]))


REFUSED = """
import signal, os
from pathlib import Path
import torch
%s
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    %s
    Path(__file__).with_name("stepped").write_text(str(step))
"""

REFUSALS = {
    "rows of a cursor": (
        "import sqlite3; cursor = sqlite3.connect(':memory:').cursor(); "  # noqa: ISC004
        "cursor.execute('select 1 union select 2 union select 3')",
        "cursor.fetchone()",
        "rows that have not been read",
    ),
    "entropy of the machine": (
        "import random\nsource = random.SystemRandom()",
        "source.random()",
        "SystemRandom",
    ),
    "generator expression": (
        "stream = (each for each in range(99))",
        "next(stream)",
        "generator expression",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_save_would_refuse_is_refused_before_the_first_step(tmp_path, name):
    setup, step, sentence = REFUSALS[name]
    script = staged(tmp_path / "run", REFUSED % (setup, step))
    ended = outlast("run", "--every", 1000, script)
    assert ended.code == 2, ended.said
    assert sentence in ended.said
    assert not script.with_name("stepped").exists()


def test_what_is_made_in_the_first_step_and_cannot_be_saved_is_refused_behind_it(tmp_path):
    script = staged(
        tmp_path / "run", REFUSED % ("import threading", "model.keep = threading.Lock()")
    )
    ended = outlast("run", "--every", 1000, script)
    assert ended.code == 2, ended.said
    assert "a _thread.lock, cannot be saved" in ended.said
    assert script.with_name("stepped").read_text() == "0"


ENVIRONMENT = """
import argparse, dataclasses, os, signal
import torch

DIE = os.environ.get("DIE")
PORT = int(os.environ.get("MASTER_PORT", "1"))
scratch = os.path.join(os.environ.get("TMPDIR", "/tmp"), "x")
count = int(os.environ.get("START", "0"))


def job():
    return os.environ.get("SLURM_JOB_ID")


class Link:
    job = job()

    def __init__(self, port):
        self.to = port


@dataclasses.dataclass
class Settings:
    port: int = 0


link, settings, table = Link(PORT), Settings(port=PORT), {"port": PORT, "n": 0}


def main():
    global count
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=PORT)
    arguments = parser.parse_args()
    die = os.environ.get("DIE")
    asked = lambda: die
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1
        table["n"] += 1
        if die == str(step):
            os.kill(os.getpid(), signal.SIGKILL)
    print("END", DIE, PORT, scratch, Link.job, link.to, settings.port, table["port"], end=" ")
    print(arguments.port, die, asked(), table["n"], count)


main()
"""


def test_what_set_up_reads_from_the_environment_is_that_of_the_new_start(tmp_path):
    script = staged(tmp_path / "run", ENVIRONMENT)
    first = {"DIE": "6", "MASTER_PORT": "11", "TMPDIR": "/a", "SLURM_JOB_ID": "1", "START": "5"}
    ended = outlast("run", "--every", 2, script, environment=first)
    assert ended.code == -signal.SIGKILL, ended.said
    later = first | {"DIE": "", "MASTER_PORT": "22", "TMPDIR": "/b", "SLURM_JOB_ID": "2"}
    ended = outlast("run", "--every", 2, script, environment=later)
    assert ended.code == 0, ended.said
    assert "END  22 /b/x 2 22 22 22 22   9 14" in ended.said
    assert "takes this from the environment" in ended.said


RATE = """
import os, signal, time
from pathlib import Path
import torch
RATE = float(os.environ["RATE"])
DIE = os.environ.get("DIE")
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(9):
    loss = model(torch.ones(1, 2)).square().sum() * RATE
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if DIE == str(step):
        end = time.monotonic() + 60
        here = Path(__file__).parent
        while time.monotonic() < end and not any(here.glob(".outlast/**/version.json")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
print("END")
"""


def test_results_that_differ_by_a_value_from_the_environment_stop_the_run(tmp_path):
    script = staged(tmp_path / "run", RATE)
    ended = outlast("run", "--every", 3, script, environment={"RATE": "1.0", "DIE": "5"})
    assert ended.code == -signal.SIGKILL, ended.said
    ended = outlast("run", "--every", 3, script, environment={"RATE": "0.5", "DIE": ""})
    assert ended.code == 2, ended.said
    assert "or its environment has changed" in ended.said
    assert "--accept-changes" in ended.said
    wanted = ("run", "--every", 3, "--accept-changes", script)
    ended = outlast(*wanted, environment={"RATE": "0.5", "DIE": ""})
    assert ended.code == 0, ended.said
    assert "END" in ended.said


ONE_STEP = """
import os, signal, time
from pathlib import Path
import torch
HERE = Path(__file__).parent
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    # One life has time for one step, and for its save.
    life = HERE / f"life-{os.getpid()}"
    if life.exists():
        end = time.monotonic() + 60
        saved = f".outlast/*/checkpoints/step-*{step}-*/version.json"
        while time.monotonic() < end and not any(HERE.glob(saved)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    life.touch()
    loss = model(torch.ones(1, 2)).square().sum()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print("END")
"""


def test_the_first_step_of_a_resumed_program_is_saved(tmp_path):
    script = staged(tmp_path / "run", ONE_STEP)
    lives = [outlast("run", "--every", 1, script) for _ in range(4)]
    assert [life.code for life in lives[:3]] == [-signal.SIGKILL] * 3, lives[-1].said
    assert lives[3].code == 0, lives[3].said
    assert "END" in lives[3].said
