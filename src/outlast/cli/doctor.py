"""``outlast doctor``: what this machine can do for a training run, and what to install or fix."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import outlast
from outlast.cli.console import facts_table, print_json
from outlast.cli.options import AsJson
from outlast.errors import EXIT_CRASHED, HardwareError

if TYPE_CHECKING:
    from rich.console import Console

    from outlast.hardware import Machine
    from outlast.hardware.detect import Check


def doctor(
    path: Annotated[
        Path, typer.Option(help="Directory whose storage is tested: where checkpoints will go.")
    ] = Path(),
    json: AsJson = False,
) -> None:
    """Check this machine for training and say what to install or fix.

    Really runs a two-process all-reduce, small matrix products and fsyncs; changes nothing.

    Exit code 0: training works here; 1: an essential part is broken.

    --json: {"ok", "seconds", "checks": [{"group", "name", "state", "found", "means", "remedy",
    "essential"}], "machine"}.
    """
    if not diagnose(path, as_json=json):
        raise typer.Exit(EXIT_CRASHED)


PYTHON_RANGE = ((3, 11), (3, 13))


TORCH_RANGE = ((2, 11), (2, 13))


GLOO_SECONDS = 10.0


# Of the largest entry: wide enough for tf32 in place of fp32, narrow enough for a wrong product.
MATMUL_TOLERANCE = {"float32": 2e-3, "bfloat16": 3e-2}


CORE_LIBRARIES = ("numpy", "safetensors", "pydantic", "blosc2", "backports.zstd")


# Distribution names to look for, what it serves, and the command that installs it.
OPTIONAL = (
    (("transformers",), "trains Hugging Face models", "pip install 'outlast[train]'"),
    (("plotly",), "draws reports", "pip install 'outlast[report]'"),
    (("scipy",), "plans runs, clocks and gradient codes", "pip install 'outlast[plan]'"),
    (("highspy",), "plans clocks", "pip install 'outlast[energy]'"),
    (("nvidia-ml-py",), "measures the energy of NVIDIA GPUs", "pip install 'outlast[energy]'"),
    (("opt_einsum",), "contracts layers of several cores", "pip install 'outlast[tensorize]'"),
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
        print_json(as_dict(checks, machine, seconds))
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
    from outlast.hardware.detect import (
        Check,
        end_ranks,
        gloo_check,
        machine_checks,
        start_gloo_ranks,
        storage_checks,
    )

    # The ranks import PyTorch while this process does: both wait for it once.
    with tempfile.TemporaryDirectory(prefix="outlast-doctor-") as scratch:
        ranks = start_gloo_ranks(Path(scratch) / "store", GLOO_SECONDS)
        try:
            torch_checks = list(_torch_checks(machine))
            gloo = gloo_check(ranks, GLOO_SECONDS)
        finally:
            end_ranks(ranks)
    optional = []
    for names, serves, remedy in OPTIONAL:
        version = next((v for name in names if (v := _version(name))), None)
        optional.append(
            Check(
                group="Optional",
                name=names[0],
                state="ok" if version else "missing",
                found=version or "not installed",
                means=serves,
                remedy="" if version else remedy,
            )
        )
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
    """Prints the checks by group, and a verdict."""
    from rich.markup import escape
    from rich.text import Text

    listed = list(checks)
    rows: list[tuple[str | Text, ...]] = []
    for group in dict.fromkeys(check.group for check in listed):
        rows.append((Text(group, "bold default"), "", ""))
        for check in (c for c in listed if c.group == group):
            style = STATE_STYLE[check.state]
            if check.state == "missing" and not check.essential:
                style = "dim"
            found = Text(check.found)
            if check.means:
                found.append(f" - {check.means}", "dim")
            if check.remedy:
                found.append(f"\n-> {check.remedy}", "cyan")
            rows.append((f"  {check.name}", Text(check.state, style), found))
    console.print(facts_table(rows))
    broken = [f"{check.group}: {check.name}" for check in listed if check.broken]
    verdict = (
        f"[bold red]Training does not work here. Broken: {escape(', '.join(broken))}.[/bold red]"
        if broken
        else "[bold green]Training works on this machine.[/bold green]"
    )
    console.print(f"\n{verdict} [dim]({seconds:.1f} s)[/dim]")


def _python_checks() -> Iterator[Check]:
    from outlast.hardware.detect import Check

    group = "Python and Outlast"
    good = PYTHON_RANGE[0] <= sys.version_info[:2] <= PYTHON_RANGE[1]
    yield Check(
        group=group,
        name="Python",
        state="ok" if good else "degraded",
        found=f"{platform.python_version()} at {sys.executable}",
        means="" if good else "tested with Python 3.11 to 3.13",
        remedy="" if good else "make the environment with python3.13 -m venv .venv",
    )
    yield Check(group=group, name="Outlast", state="ok", found=outlast.__version__)
    found = {name: _version(name) for name in CORE_LIBRARIES}
    lacking = [name for name, version in found.items() if version is None]
    yield Check(
        group=group,
        name="libraries",
        state="missing" if lacking else "ok",
        found=", ".join(f"{name} {version or 'missing'}" for name, version in found.items()),
        remedy=f"pip install {' '.join(lacking)}" if lacking else "",
        essential=True,
    )
    if not lacking:
        from outlast.checkpoint.compiled import why_not

        problem = why_not()
        yield Check(
            group=group,
            name="checkpoints",
            state="degraded" if problem else "ok",
            found=problem or "read and written by compiled C code",
            means="saves and restores take two to four times the CPU time" if problem else "",
            remedy="install gcc or clang" if problem else "",
        )


def _torch_checks(machine: Machine) -> Iterator[Check]:
    from outlast.hardware import Unavailable
    from outlast.hardware.detect import Check

    group = "PyTorch"
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Check(
            group=group,
            name="import",
            state="missing",
            found=f"PyTorch cannot be imported: {error}",
            means="nothing can be trained",
            remedy="pip install 'torch>=2.11,<2.14'",
            essential=True,
        )
        return
    release = tuple(
        int(part) for part in torch.__version__.split("+", maxsplit=1)[0].split(".")[:2]
    )
    good = TORCH_RANGE[0] <= release <= TORCH_RANGE[1]
    yield Check(
        group="PyTorch",
        name="version",
        state="ok" if good else "degraded",
        found=torch.__version__,
        means="" if good else "outside the supported range 2.11 to 2.13",
        remedy="" if good else "pip install 'torch>=2.11,<2.14'",
    )
    built = "CPU only"
    if torch.version.cuda:
        built = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        built = f"ROCm {torch.version.hip}"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    listed = ", ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))
    has_gpu = not isinstance(machine.gpus, Unavailable) and bool(machine.gpus.visible)
    unused = has_gpu and not names
    yield Check(
        group="PyTorch",
        name="build",
        state="degraded" if unused else "ok",
        found=f"{built}; devices: {listed or 'CPU'}",
        means="NVML shows a GPU that PyTorch cannot use" if unused else "",
        remedy="install PyTorch for CUDA: see pytorch.org/get-started" if unused else "",
    )
    yield _backends_check()
    threads, cores = torch.get_num_threads(), machine.usable_cores
    crowded = threads > max(1.0, cores)
    yield Check(
        group=group,
        name="threads",
        state="degraded" if crowded else "ok",
        found=f"{threads} compute threads for {cores:g} usable cores",
        means="more threads than cores slow each other down" if crowded else "",
        remedy=f"export OMP_NUM_THREADS={max(1, int(cores))}" if crowded else "",
    )
    if torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        where = torch.cuda.get_device_name(0)
    else:
        native = bool({"avx512_bf16", "amx_bf16", "bf16"} & set(machine.cpu_features))
        where = "this CPU"
    yield Check(
        group="PyTorch",
        name="bf16",
        state="ok" if native else "degraded",
        found=f"{'native' if native else 'emulated'} on {where}",
        means="" if native else "right results, but usually slower than fp32",
        remedy="" if native else "train in fp32 on this machine",
    )
    for device in ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]:
        yield from (matmul_check(device, dtype) for dtype in ("float32", "bfloat16"))


def _backends_check() -> Check:
    import torch
    import torch.distributed as dist

    from outlast.hardware.detect import Check

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

    from outlast.hardware.detect import Check

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
    return Check(
        group="PyTorch",
        name=f"matmul {dtype_name}",
        state="missing" if problem else "ok",
        found=problem or f"right on {device}, {size}^3 in {seconds * 1000:.1f} ms (measured)",
        means="this device computes wrong values or not at all" if problem else "",
        remedy="run memtest or dcgmi diag, and reinstall PyTorch" if problem else "",
        essential=dtype_name == "float32",
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except PackageNotFoundError:
        return None
