"""Scripts of several processes under `outlast run --nproc` and under torchrun."""

import os
import subprocess
import sys

import psutil
import pytest
import torch
from running import RANKS_SCRIPT, TORCHRUN

pytestmark = pytest.mark.distributed

DEADLINE_SECONDS = 240.0


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(RANKS_SCRIPT)
    return path


def python(*arguments):
    """Run Python to its end; no process of its group is left behind."""
    command = [sys.executable, *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        said, _ = process.communicate(timeout=DEADLINE_SECONDS)
        return process.returncode, said
    finally:
        end_all(process)


def end_all(process):
    family = [process]
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]
    except psutil.NoSuchProcess:
        return
    for each in family:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(DEADLINE_SECONDS)


def results(script):
    return [torch.load(script.parent / f"result{rank}.pt", weights_only=True) for rank in (0, 1)]


def undisturbed(script, how):
    code, said = python(*TORCHRUN, script, how)
    assert code == 0, said
    found = results(script)
    for rank in (0, 1):
        (script.parent / f"result{rank}.pt").unlink()
    return found


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one["losses"] == other["losses"]
        assert one["model"].keys() == other["model"].keys()
        for name, tensor in other["model"].items():
            assert torch.equal(one["model"][name], tensor), name


def disturb(script, step, what, ranks=(0, 1)):
    for rank in ranks:
        (script.parent / f"plan{rank}").write_text(f"{step} {what}")


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_two_ranks_killed_go_on_to_the_weights_of_torchrun(script, how):
    expected = undisturbed(script, how)
    disturb(script, 11, "SIGKILL")
    code, said = python("-m", "outlast", "run", "--nproc=2", "--every=2", script, how)
    assert code == 1, said
    assert "was killed by SIGKILL; the same command continues" in said
    code, said = python("-m", "outlast", "run", "--nproc=2", "--every=2", script, how)
    assert code == 0, said
    assert "resumed at step" in said
    same(results(script), expected)


def test_signal_to_one_rank_stops_all_at_the_same_step_and_another_number_is_refused(script):
    expected = undisturbed(script, "ddp")
    disturb(script, 9, "SIGTERM", ranks=[1])
    code, said = python("-m", "outlast", "run", "--nproc=2", "--every=1000", script, "ddp")
    assert code == 3, said
    assert "the same command continues from there" in said
    code, said = python("-m", "outlast", "run", "--nproc=3", "--every=1000", script, "ddp")
    assert code == 2, said
    assert "was saved by 2 processes and cannot continue with 3 processes" in said
    code, said = python(*TORCHRUN, "-m", "outlast", "run", "--every=1000", script, "ddp")
    assert code == 0, said
    assert "resumed at step" in said
    same(results(script), expected)


def test_launcher_told_to_stop_passes_it_on(script):
    text = script.read_text().replace(
        "            os.kill(os.getpid(), getattr(signal, what))",
        "            came, number = [], getattr(signal, what)\n"
        "            before = signal.signal(number, lambda *how: (came.append(1), before(*how)))\n"
        "            os.kill(os.getppid(), number)\n"
        "            end = time.monotonic() + 60\n"
        "            while not came and time.monotonic() < end:\n"
        "                time.sleep(0.01)\n"
        "            signal.signal(number, before)",
    )
    script.write_text(text.replace("import signal\n", "import signal\nimport time\n"))
    disturb(script, 5, "SIGUSR1", ranks=[0])
    code, said = python("-m", "outlast", "run", "--nproc=2", "--every=1000", script, "ddp")
    assert code == 3, said
    assert "(SIGUSR1); the same command continues from there" in said


def test_run_has_finished_when_all_its_ranks_have(script):
    # Rank 1 dies behind its last step, when rank 0 has come to its end already.
    text = script.read_text().replace(
        "    dist.destroy_process_group()\n",
        "    dist.destroy_process_group()\n"
        "    if rank == 1 and (HERE / 'die').exists():\n"
        "        import time\n"
        "        end = time.monotonic() + 120\n"
        "        while not any(\n"
        "            'finished' in each.read_text()\n"
        "            for each in HERE.glob('.outlast/*/outcome.json')\n"
        "        ):\n"
        "            assert time.monotonic() < end\n"
        "            time.sleep(0.01)\n"
        "        (HERE / 'die').unlink()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    script.write_text(text)
    (script.parent / "die").touch()
    command = ("-m", "outlast", "run", "--nproc=2", "--every=4", script, "ddp")
    code, said = python(*command)
    assert code == 1, said
    expected = results(script)
    code, said = python(*command)
    assert code == 0, said
    assert "has finished" not in said
    assert "resumed at step" in said
    same(results(script), expected)
    code, said = python(*command)
    assert code == 0, said
    assert "this run has finished" in said
    for rank in (0, 1):
        (script.parent / f"result{rank}.pt").unlink()
    code, said = python(*TORCHRUN, "-m", "outlast", "run", "--fresh", "--every=4", script, "ddp")
    assert code == 0, said
    assert "moved the earlier run to" in said
    same(results(script), expected)


def test_ranks_with_uneven_steps_stop_soon_and_say_which(script):
    # No step waits for the other rank, but the end does.
    script.write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4 + 4 * (dist.get_rank() == 0)):\n"
        "    model(torch.ones(2)).sum().backward()\n"
        "    optimizer.step()\n"
        "if dist.get_rank() == 0:\n"
        "    dist.barrier()\n"
    )
    code, said = python("-m", "outlast", "run", "--nproc=2", "--every=2", script)
    assert code == 2, said
    assert "rank 1 has ended after 4 steps, and rank 0 did 6: all ranks must do the same" in said
