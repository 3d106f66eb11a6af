"""``outlast doctor``: what this machine can do for a training run, and what to install or fix.

Whether processes of this machine can train together is shown by a real all-reduce over loopback, in
two fresh Python processes that import PyTorch themselves.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

import outlast
from outlast.errors import EXIT_CRASHED, HardwareError

if TYPE_CHECKING:
    from rich.console import Console

    from outlast.hardware import Machine


def doctor(
    path: Annotated[
        Path, typer.Option(help="Directory whose storage is tested: where checkpoints will go.")
    ] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Check this machine for training and say what to install or fix.

    Really runs a two-process all-reduce, small matrix products and fsyncs; changes nothing.

    Exit code 0: training works here; 1: an essential part is broken.
    """
    if not diagnose(path, as_json=json):
        raise typer.Exit(EXIT_CRASHED)


State: TypeAlias = Literal["ok", "degraded", "missing"]

PYTHON_RANGE = ((3, 11), (3, 13))

TORCH_RANGE = ((2, 11), (2, 13))

GLOO_SECONDS = 10.0

# Of the largest entry: wide enough for tf32 in place of fp32, narrow enough for a wrong product.
MATMUL_TOLERANCE = {"float32": 2e-3, "bfloat16": 3e-2}

CORE_LIBRARIES = ("transformers", "safetensors", "numpy", "pydantic", "nvidia-ml-py")

# Distribution names to look for, what it serves, and the command that installs it.
OPTIONAL = (
    (("tensorboard",), "writes TensorBoard logs", "pip install 'outlast[tensorboard]'"),
    (("wandb",), "logs to Weights & Biases", "pip install 'outlast[wandb]'"),
    (("mlflow-skinny", "mlflow"), "logs to MLflow", "pip install 'outlast[mlflow]'"),
    (("trackio",), "logs to trackio", "pip install 'outlast[trackio]'"),
    (("sentencepiece",), "reads Llama-style tokenizers", "pip install 'outlast[sentencepiece]'"),
    (("sphinx",), "builds the documentation", "pip install 'outlast[docs]'"),
    (("pytest",), "runs the tests", "pip install 'outlast[test]'"),
    (("triton",), "compiles GPU kernels", "comes with PyTorch for CUDA or ROCm"),
    (
        ("torchft", "torchft-nightly"),
        "per-step recovery across groups",
        "pip install torchft-nightly",
    ),
)

STATE_STYLE = {"ok": "green", "degraded": "yellow", "missing": "red"}

LEAST_MEMORY_BYTES = 2 * 2**30

LEAST_FREE_BYTES = 5 * 2**30

SLOW_FSYNC_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's report.

    Attributes:
        group: Heading it stands under.
        name: What was looked at.
        state: "ok", "degraded" (works, but worse than it could) or "missing".
        found: What was found, in a few words.
        means: What follows from it; empty where that is plain.
        remedy: The command or setting that improves it; empty where nothing is to be done.
        essential: True where training does not work at all in state "missing".
    """

    group: str
    name: str
    state: State
    found: str
    means: str = ""
    remedy: str = ""
    essential: bool = False

    @property
    def broken(self) -> bool:
        """True if training cannot work."""
        return self.essential and self.state == "missing"


def _checked(
    group: str,
    name: str,
    found: str,
    problem: str = "",
    remedy: str = "",
    *,
    state: State = "degraded",
    essential: bool = False,
) -> Check:
    """A check that is "ok" unless there is a `problem`, which gives it `state` and `remedy`."""
    if not problem:
        return Check(group, name, "ok", found, essential=essential)
    return Check(group, name, state, found, problem, remedy, essential)


def diagnose(path: Path, *, as_json: bool) -> bool:
    """Run every check and print the report.

    Returns:
        Whether all essential parts work.

    Raises:
        HardwareError: When `path` is not a directory.
    """
    from rich.console import Console

    from outlast.hardware import this_machine

    if not path.is_dir():
        raise HardwareError(f"--path = {path} is not a directory: make it, or name another one")
    start = time.perf_counter()
    with Console(stderr=True).status("Looking at this machine (PyTorch takes a moment) ..."):
        machine = this_machine()
        checks = collect(path, machine)
    seconds = time.perf_counter() - start
    if as_json:
        print(dumps(as_dict(checks, machine, seconds), indent=2))
    else:
        render(checks, seconds, Console())
    return not any(check.broken for check in checks)


def collect(path: Path, machine: Machine) -> list[Check]:
    """Runs every check.

    Args:
        path: Directory whose storage is tested.
        machine: This machine.

    Returns:
        The checks in the order of the report.
    """
    # The ranks import PyTorch while this process does: both wait for it once.
    with tempfile.TemporaryDirectory(prefix="outlast-doctor-") as scratch:
        ranks = start_gloo_ranks(Path(scratch) / "store", GLOO_SECONDS)
        try:
            torch_checks = list(_torch_checks(machine))
            gloo = gloo_check(ranks, GLOO_SECONDS)
        finally:
            end_ranks(ranks)
    optional = []
    for names, serves, install in OPTIONAL:
        version = next((v for name in names if (v := _version(name))), None)
        remedy = "" if version else install
        state: State = "ok" if version else "missing"
        found = version or "not installed"
        optional.append(Check("Optional", names[0], state, found, serves, remedy))
    return [
        *_python_checks(),
        *torch_checks,
        gloo,
        *machine_checks(machine),
        *storage_checks(path),
        *optional,
    ]


def as_dict(checks: Iterable[Check], machine: Machine, seconds: float) -> dict[str, object]:
    """Returns the report as JSON types: ok, seconds, checks and machine."""
    listed = list(checks)
    return {
        "ok": not any(check.broken for check in listed),
        "seconds": round(seconds, 2),
        "checks": [asdict(check) for check in listed],
        "machine": machine.to_dict(),
    }


def render(checks: Iterable[Check], seconds: float, console: Console) -> None:
    """Prints one table per group and a verdict."""
    from rich.markup import escape
    from rich.table import Table

    listed = list(checks)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for group in dict.fromkeys(check.group for check in listed):
        table.add_row(f"[bold]{escape(group)}[/bold]")
        for check in (c for c in listed if c.group == group):
            style = STATE_STYLE[check.state]
            if check.state == "missing" and not check.essential:
                style = "dim"
            lines = [escape(check.found)]
            if check.means:
                lines[0] += f" [dim]- {escape(check.means)}[/dim]"
            if check.remedy:
                lines.append(f"[cyan]-> {escape(check.remedy)}[/cyan]")
            table.add_row(
                f"  {escape(check.name)}", f"[{style}]{check.state}[/{style}]", "\n".join(lines)
            )
    console.print(table)
    broken = [f"{check.group}: {check.name}" for check in listed if check.broken]
    verdict = (
        f"[bold red]Training does not work here. Broken: {escape(', '.join(broken))}.[/bold red]"
        if broken
        else "[bold green]Training works on this machine.[/bold green]"
    )
    console.print(f"\n{verdict} [dim]({seconds:.1f} s)[/dim]")


def _python_checks() -> Iterator[Check]:
    group = "Python and Outlast"
    good = PYTHON_RANGE[0] <= sys.version_info[:2] <= PYTHON_RANGE[1]
    found = f"{platform.python_version()} at {sys.executable}"
    means = "" if good else "tested with Python 3.11 to 3.13"
    yield _checked(
        group, "Python", found, means, "make the environment with python3.13 -m venv .venv"
    )
    yield Check(group, "Outlast", "ok", outlast.__version__)
    versions = {name: _version(name) for name in CORE_LIBRARIES}
    lacking = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    remedy = f"pip install {' '.join(lacking)}" if lacking else ""
    state: State = "missing" if lacking else "ok"
    yield Check(group, "libraries", state, found, remedy=remedy, essential=True)


def _torch_checks(machine: Machine) -> Iterator[Check]:
    from outlast.hardware import Unavailable

    group, install = "PyTorch", "pip install 'torch>=2.11,<2.14'"
    try:
        import torch
    except (ImportError, OSError) as error:
        found = f"PyTorch cannot be imported: {error}"
        yield Check(
            group, "import", "missing", found, "nothing can be trained", install, essential=True
        )
        return
    release = tuple(
        int(part) for part in torch.__version__.split("+", maxsplit=1)[0].split(".")[:2]
    )
    good = TORCH_RANGE[0] <= release <= TORCH_RANGE[1]
    means = "" if good else "outside the supported range 2.11 to 2.13"
    yield _checked(group, "version", torch.__version__, means, install)
    built = "CPU only"
    if torch.version.cuda:
        built = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        built = f"ROCm {torch.version.hip}"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    listed = ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
    has_gpu = not isinstance(machine.gpus, Unavailable) and bool(machine.gpus.visible)
    means = "NVML shows a GPU that PyTorch cannot use" if has_gpu and not names else ""
    remedy = "install PyTorch for CUDA: see pytorch.org/get-started"
    yield _checked(group, "build", f"{built}; devices: {listed or 'CPU'}", means, remedy)
    yield _backends_check()
    threads, cores = torch.get_num_threads(), machine.usable_cores
    found = f"{threads} compute threads for {cores:g} usable cores"
    means = "more threads than cores slow each other down" if threads > max(1.0, cores) else ""
    yield _checked(group, "threads", found, means, f"export OMP_NUM_THREADS={max(1, int(cores))}")
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        where = torch.cuda.get_device_name(0)
    else:
        native = bool({"avx512_bf16", "amx_bf16", "bf16"} & set(machine.cpu_features))
        where = "this CPU"
    found = f"{'native' if native else 'emulated'} on {where}"
    means = "" if native else "right results, but usually slower than fp32"
    yield _checked(group, "bf16", found, means, "train in fp32 on this machine")
    for device in ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]:
        yield from (matmul_check(device, dtype) for dtype in ("float32", "bfloat16"))


def _backends_check() -> Check:
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    available = dist.is_available()
    built = {
        "gloo": available and dist.is_gloo_available(),
        "nccl": available and dist.is_nccl_available() and gpu,
        "ucc": available and dist.is_ucc_available(),
    }
    lost = gpu and not built["nccl"]
    return Check(
        group="PyTorch",
        name="backends",
        state="missing" if not built["gloo"] else "degraded" if lost else "ok",
        found=", ".join(f"{name} {'yes' if usable else 'no'}" for name, usable in built.items()),
        means="nccl needs a GPU" if not gpu else "GPUs without nccl train slowly" if lost else "",
        remedy="install a PyTorch build with distributed support" if not built["gloo"] else "",
        essential=True,
    )


def matmul_check(device: str, dtype_name: str, size: int = 512) -> Check:
    """Multiplies two random matrices and compares with float64.

    Args:
        device: PyTorch device, for example "cpu".
        dtype_name: "float32" or "bfloat16".
        size: Rows and columns.

    Returns:
        State "missing" if the product is wrong or the operation fails.
    """
    import torch

    dtype: torch.dtype = getattr(torch, dtype_name)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator, dtype=torch.float64) for _ in "ab")
    problem, seconds = "", 0.0
    try:
        a_low, b_low = (x.to(dtype).to(device) for x in (a, b))
        exact = a_low.cpu().double() @ b_low.cpu().double()
        (a_low @ b_low).sum().item()
        start = time.perf_counter()
        product = a_low @ b_low
        product.sum().item()
        seconds = time.perf_counter() - start
        error = ((product.cpu().double() - exact).abs().max() / exact.abs().max()).item()
        if not error < MATMUL_TOLERANCE[dtype_name]:
            problem = f"wrong by {error:.2g} of the largest entry"
    except RuntimeError as failure:
        problem = str(failure).splitlines()[0]
    return _checked(
        "PyTorch",
        f"matmul {dtype_name}",
        problem or f"right on {device}, {size}^3 in {seconds * 1000:.1f} ms (measured)",
        "this device computes wrong numbers or not at all" if problem else "",
        "run memtest or dcgmi diag, and reinstall PyTorch",
        state="missing",
        essential=dtype_name == "float32",
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except PackageNotFoundError:
        return None


def machine_checks(machine: Machine) -> list[Check]:
    """Return the checks of processors, memory, GPUs, energy sensors and the cluster."""
    checks = (_processor_checks, _gpu_checks, _energy_checks, _cluster_checks)
    return [line for check in checks for line in check(machine)]


def storage_checks(path: Path) -> list[Check]:
    """Probe the file system under a directory and return its checks."""
    from outlast.hardware import probe

    group, few, slow = "Storage", "", ""
    try:
        facts = probe(path)
    except HardwareError as error:
        means = "no checkpoint can be written here"
        remedy = "name a directory that you may write to: --path DIR"
        return [Check(group, "write", "missing", str(error), means, remedy, essential=True)]
    if facts.is_memory:
        few = "in memory: checkpoints vanish with the machine"
    elif facts.free_bytes < LEAST_FREE_BYTES:
        few = "a few checkpoints may fill it"
    if facts.directory_fsync is not True:
        slow = "a directory cannot be fsynced: a power failure may undo the newest checkpoint"
    elif facts.fsync_seconds > SLOW_FSYNC_SECONDS:
        slow = "each file of a checkpoint waits this long"
    shared = ", shared" if facts.is_network else ""
    space = f"{_gib(facts.free_bytes)} free on {facts.type} at {facts.mount_point}{shared}"
    fsync = f"{facts.fsync_seconds * 1000:.2f} ms for 4 KiB (median, measured)"
    atomic = facts.rename_is_atomic
    return [
        _checked(group, "space", space, few, "keep checkpoints on a larger, durable file system"),
        _checked(group, "fsync", fsync, slow, "use a local disk for checkpoints"),
        _checked(
            group,
            "rename",
            "replaces atomically" if atomic else "a reader saw a torn file",
            "" if atomic else "a crash could leave half a checkpoint visible",
            f"use another file system than {facts.type}",
            state="missing",
            essential=True,
        ),
    ]


def _processor_checks(machine: Machine) -> Iterator[Check]:
    from outlast.hardware import Unavailable

    group = "Machine"
    features = ", ".join(machine.cpu_features) or "no vector extensions known"
    yield Check(group, "processor", "ok", f"{machine.cpu_model} ({features})")
    quota = "" if machine.quota_cores is None else f", quota {machine.quota_cores:g}"
    cores = f"{machine.usable_cores:g} usable of {machine.logical_cores}{quota}"
    held = machine.usable_cores < machine.logical_cores
    means = "affinity or the control group holds the process below the machine" if held else ""
    yield Check(group, "cores", "ok", cores, means)
    usable, limit = machine.usable_memory_bytes, machine.memory_limit_bytes
    held = limit is not None and limit < machine.memory_total_bytes
    memory = f"{_gib(machine.memory_available_bytes)} available, {_gib(usable)} at most"
    memory += " (control group)" if held else ""
    small = min(usable, machine.memory_available_bytes) < LEAST_MEMORY_BYTES
    means = f"less than {_gib(LEAST_MEMORY_BYTES)}: a small model may not fit" if small else ""
    yield _checked(group, "memory", memory, means, "ask for more memory: sbatch --mem=16G")
    network = machine.network_ports
    if isinstance(network, Unavailable):
        means = "several nodes would talk over TCP; one node is not concerned"
        yield Check(group, "RDMA network", "missing", network.reason, means)
        return
    ports = ", ".join(f"{port.device}/{port.port} {port.rate} {port.state}" for port in network)
    active = any("ACTIVE" in port.state for port in network)
    means = "" if active else "no port is active: ranks would talk over TCP"
    remedy = "ibstat shows why; ask the administrator"
    yield _checked(group, "RDMA network", ports, means, remedy)


def _gpu_checks(machine: Machine) -> Iterator[Check]:
    from outlast.hardware import Unavailable

    group, gpus = "Accelerators", machine.gpus
    if isinstance(gpus, Unavailable):
        means = "training runs on the CPU"
        yield Check(group, "NVML", "missing", gpus.reason, means, gpus.remedy)
        return
    found = f"driver {gpus.driver_version}, {len(gpus.visible)} of {gpus.installed_count} GPUs"
    hidden = gpus.installed_count - len(gpus.visible)
    means = f"CUDA_VISIBLE_DEVICES hides {hidden}" if hidden else ""
    remedy = "" if gpus.visible else "unset CUDA_VISIBLE_DEVICES, or ask Slurm for --gpus"
    yield Check(group, "NVML", "ok" if gpus.visible else "degraded", found, means, remedy)
    for gpu in gpus.visible:
        found, limit, means = gpu.name, gpu.power_limit_watts, ""
        if not isinstance(gpu.memory_bytes, Unavailable):
            found += f", {_gib(gpu.memory_bytes)}"
        if not isinstance(limit, Unavailable):
            found += f", {limit:.0f} W"
        if gpu.mig_enabled is True:
            found += ", MIG on"
            means = "MIG slices: no NCCL between slices, and power is that of the whole GPU"
        elif isinstance(gpu.facts, Unavailable):
            means = "the planner has no facts about this model and must be calibrated"
        yield _checked(group, f"GPU {gpu.index}", found, means)


def _energy_checks(machine: Machine) -> Iterator[Check]:
    from outlast.hardware import Unavailable

    group, gpus, rapl = "Energy sensors", machine.gpus, machine.rapl
    visible = () if isinstance(gpus, Unavailable) else gpus.visible
    counting = sum(gpu.energy_counter is True for gpu in visible)
    found = f"energy counter on {counting} of {len(visible)} GPUs" if visible else "no visible GPU"
    means = "" if counting else "GPU energy will be reported as unavailable, not as zero"
    yield _checked(group, "GPU (NVML)", found, means, state="missing")
    if isinstance(rapl, Unavailable):
        means = "CPU energy will be reported as unavailable"
        yield Check(group, "CPU (RAPL)", "missing", rapl.reason, means, rapl.remedy)
    else:
        yield Check(group, "CPU (RAPL)", "ok", f"reads {', '.join(rapl.zones)}")


def _cluster_checks(machine: Machine) -> Iterator[Check]:
    from outlast.hardware import Unavailable

    group, slurm = "Cluster", machine.slurm
    if isinstance(slurm, Unavailable):
        means = "outlast submit needs it; training on this machine does not"
        yield Check(group, "Slurm", "missing", slurm.reason, means, slurm.remedy)
        return
    found = f"{slurm.version}: {', '.join(slurm.commands)}"
    lacking = ", ".join(slurm.missing_commands)
    means = f"missing: {lacking}" if lacking else ""
    yield _checked(group, "Slurm", found, means, "apt-get install slurm-client")
    munge = slurm.munge_socket or (shutil.which("munge") and "installed, no socket") or "not found"
    means = "" if slurm.munge_socket else "Slurm may refuse this machine's requests"
    remedy = "apt-get install munge; systemctl start munge"
    yield _checked(group, "munge", munge, means, remedy)
    found = f"inside job {slurm.job_id}" if slurm.job_id else "not inside a Slurm job"
    means = "" if slurm.job_id else "the queue's limits do not bind here"
    yield Check(group, "job", "ok", found, means)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"


# One rank of the smoke test. The result is checked in the rank itself: 1 + 2 = 3.
GLOO_RANK = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
timeout = timedelta(seconds=float(sys.argv[3]))
dist.init_process_group("gloo", f"file://{store}", timeout, world_size=2, rank=rank)
x = torch.full((1024,), rank + 1.0)
dist.all_reduce(x)
assert bool((x == 3).all()), x[:4]
dist.destroy_process_group()
"""


def start_gloo_ranks(store: Path, timeout_seconds: float) -> list[subprocess.Popen[str]]:
    """Start two ranks of an all-reduce over the loopback interface.

    Args:
        store: File that the ranks meet in; must not exist.
        timeout_seconds: How long a rank waits for the other.

    Returns:
        The two processes, for `gloo_check` and then `end_ranks`.
    """
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-c", GLOO_RANK, str(rank), str(store), str(timeout_seconds)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def gloo_check(ranks: list[subprocess.Popen[str]], deadline_seconds: float) -> Check:
    """Wait for the ranks of `start_gloo_ranks` and report.

    Args:
        ranks: The processes.
        deadline_seconds: How long to wait from now, for all of them together.
    """
    end = time.monotonic() + deadline_seconds
    while time.monotonic() < end:
        codes = [process.poll() for process in ranks]
        # One failed rank leaves the other waiting: do not wait with it.
        if None not in codes or any(codes):
            break
        time.sleep(0.02)
    codes = [process.poll() for process in ranks]
    problem = f"no result within {deadline_seconds:g} s" if None in codes else ""
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is not None:
        _, error = ranks[failed].communicate()
        last = (error.strip().splitlines() or ["no message"])[-1]
        problem = f"rank {failed} failed with exit code {codes[failed]}: {last}"
    return _checked(
        "PyTorch",
        "all-reduce",
        problem or "two gloo processes summed 1,024 numbers over loopback",
        "several processes cannot train together" if problem else "",
        "look at the firewall, or set GLOO_SOCKET_IFNAME to a working interface",
        state="missing",
        essential=True,
    )


def end_ranks(ranks: list[subprocess.Popen[str]]) -> None:
    """End the ranks that still run and free their pipes."""
    for process in ranks:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
