"""The peer of restarting from memory: a plain script under torchrun that reloads a DCP checkpoint.

    torchrun --standalone --nproc-per-node=4 --max-restarts=9 recover_torchrun.py FOLDER SETTINGS

It is what PyTorch's own tutorial has: DDP, `torch.distributed.checkpoint` every few steps, and the
newest checkpoint after a restart. `reload_seconds` starts it, kills workers, and says how long the
next step takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_LOG = "steps.jsonl"
_DEADLINE_SECONDS = 180.0


def reload_seconds(
    settings: dict[str, Any], workers: int, kills: int, every_steps: int
) -> tuple[list[float], list[int]]:
    """Kill one of the workers so often.

    Args:
        settings: Of the Hugging Face model, and ``batch_size`` and ``sequence_length``.
        workers: Processes.
        kills: How often, each after a checkpoint of the attempt's own.
        every_steps: Steps between checkpoints.

    Returns:
        For each kill, seconds until the next step was done, and the steps that were done again.
    """
    draw, waits, again = random.Random(0), [], []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        command = ["--standalone", f"--nproc-per-node={workers}", f"--max-restarts={4 * kills}"]
        run = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *command, __file__, folder]
            + [json.dumps({**settings, "every_steps": every_steps})],
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            attempt = 0
            for _ in range(kills):
                # Between two checkpoints, as far into the interval as chance says.
                beyond = 2 * every_steps + draw.randrange(every_steps)
                _wait(place, run, attempt, beyond)
                worker = int((place / f"pid{draw.randrange(workers)}").read_text())
                last = _steps(place)[-1]
                os.kill(worker, signal.SIGKILL)
                struck = time.monotonic()
                # A start of the group may itself fail, and be followed by another.
                first = _wait(place, run, attempt + 1, 1)
                attempt = first["attempt"]
                waits.append(first["at"] - struck)
                again.append(last["step"] + 1 - first["step"])
        finally:
            _end(place, run)
    return waits, again


def _end(place: Path, run: subprocess.Popen[bytes]) -> None:
    """End the launcher and its workers, which stand in sessions of their own."""
    run.kill()
    run.wait()
    for each in place.glob("pid*"):
        process = int(each.read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        while Path(f"/proc/{process}").exists():
            time.sleep(0.01)


def _steps(place: Path) -> list[dict[str, Any]]:
    text = (place / _LOG).read_text() if (place / _LOG).exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _wait(place: Path, run: subprocess.Popen[bytes], attempt: int, steps: int) -> dict[str, Any]:
    """The record of step number `steps` since a start of the group."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while time.monotonic() < deadline:
        found = [each for each in _steps(place) if each["attempt"] >= attempt]
        if len(found) >= steps:
            return found[steps - 1]
        if run.poll() is not None:
            raise RuntimeError(f"the peer ended with exit code {run.returncode}")
        time.sleep(0.01)
    raise RuntimeError(f"the peer did not come to step {steps} in {_DEADLINE_SECONDS:g} s")


def main() -> None:
    """The script itself."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.nn.parallel import DistributedDataParallel
    from transformers import AutoConfig, AutoModelForCausalLM

    place, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    every, batch = settings.pop("every_steps"), settings.pop("batch_size")
    length = settings.pop("sequence_length")
    rank, ranks, attempt = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    )
    # In torch 2.13 a restarted group finds the addresses of the dead one, and waits for them: a
    # prefix of its own spares the peer that wait.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(f"{attempt}", dist.TCPStore(address, port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    (place / f"pid{rank}").write_text(str(os.getpid()))
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    called = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    saved = sorted(place.glob("checkpoint-*/.metadata"), key=lambda each: each.stat().st_mtime)
    if saved:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=saved[-1].parent)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        step = int(saved[-1].parent.name.split("-")[1])
    while True:
        tokens = torch.randint(
            settings["vocab_size"],
            (batch // ranks, length),
            generator=torch.Generator().manual_seed(step * ranks + rank),
        )
        called(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            with (place / _LOG).open("a") as log:
                record = {"attempt": attempt, "step": step, "at": time.monotonic()}
                log.write(json.dumps(record) + "\n")
        if step % every == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments}
            dcp.save(state, checkpoint_id=place / f"checkpoint-{step}")


if __name__ == "__main__":
    main()
