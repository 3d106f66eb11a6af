"""`outlast.checkpoint` against the ways of saving that people use today.

The state is that of a model which is really trained (see `checkpoint_workload`). Peers are asked
for the same: every one syncs its files, in the same process, in turn; figures are medians. Peers
that are not installed are reported as unavailable: pip install 'outlast[bench]'.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_workload import LiveTraining, resumed, snapshots
from harness import Bar, at_least, at_most, median
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict

from outlast.checkpoint import (
    CheckpointStore,
    Compression,
    IntervalEstimator,
    Reduction,
    storage_of,
)
from outlast.checkpoint.dcp import OutlastWriter
from outlast.checkpoint.encoder import Encoder, PartJob, StagedPiece
from outlast.checkpoint.manifest import Catalogue, TensorFacts
from outlast.checkpoint.reader import VersionReader, Wanted
from outlast.checkpoint.version import Version, load
from outlast.state.box import Box, whole

MEGABYTE = 1e6
ROOT = Path(__file__).parent.parent


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder on the disk of the repository, gone afterwards."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix=".checkpoint-") as folder:
        yield Path(folder)


def size_of(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# What the codecs do to a real state, without the training process.


@dataclass(frozen=True)
class Coded:
    """One version, coded and decoded: bytes in per byte out, MB per CPU-second."""

    ratio: float
    encode: float
    decode: float


def coded(state: dict[str, np.ndarray], dtype: str) -> Coded:
    """Code and decode `state`, without the training process; medians of three."""
    facts = {name: TensorFacts.of(dtype, array.shape) for name, array in state.items()}
    pieces, start = [], 0
    for name, array in state.items():
        pieces.append(StagedPiece(name, whole(array.shape), start))
        start += -(-array.nbytes // 64) * 64
    arena = np.zeros(start, np.uint8)
    for piece in pieces:
        raw = state[piece.name].reshape(-1).view(np.uint8)
        arena[piece.start : piece.start + raw.size] = raw
    # Touched, as the memory of a live model is.
    found = {name: np.ones_like(array) for name, array in state.items()}
    wanted = [
        Wanted(name, whole(array.shape), array.view(f"u{array.itemsize}"))
        for name, array in found.items()
    ]
    rows = []
    for _ in range(3):
        with scratch() as folder:
            storage = storage_of(folder)
            job = PartJob(Version(1, 1), 0, 1, Catalogue(facts), pieces)
            encoder = Encoder(storage, Reduction(), memoryview(arena))
            begun = time.process_time()
            written = encoder.write(job, lambda: None)
            encoding = time.process_time() - begun
            rounds = []
            with VersionReader(storage, load(storage, Version(1, 1))) as reader:
                for _ in range(4):
                    begun = time.process_time()
                    reader.read(wanted)
                    rounds.append(time.process_time() - begun)
        for name, array in state.items():
            assert np.array_equal(found[name].view(np.uint8), array.view(np.uint8)), name
        # The first round makes the reader's scratch memory.
        decoding = median(rounds[1:])
        sizes = written.raw_bytes / written.stored_bytes, written.raw_bytes / MEGABYTE
        rows.append((sizes[0], sizes[1] / encoding, sizes[1] / decoding))
    return Coded(*(median([row[column] for row in rows]) for column in range(3)))


def as_bf16(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights rounded to bfloat16, as 16-bit words."""
    found = {}
    for name, array in state.items():
        if name.startswith("w."):
            words = array.view(np.uint32)
            found[name] = ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
    return found


def codec_bars(quick: bool) -> list[Bar]:
    """Sizes and speeds of full versions, files included."""
    now = load_file(snapshots(quick=quick)[250])
    full, bf16 = coded(now, "float32"), coded(as_bf16(now), "bfloat16")
    bars = [
        at_least("fp32 AdamW state, full", full.ratio, "ratio", 1.18, "moonclip 1.09 (published)"),
        at_least("bf16 weights, full", bf16.ratio, "ratio", 1.48, "ZipNN 1.51 (published)"),
    ]
    peer = "blosc2 375 and 850 (measured earlier), moonclip 120-160 (published)"
    for name, speed, bar in (("encode", full.encode, 1200), ("decode", full.decode, 2500)):
        row = f"{name}, fp32 AdamW state, with its files"
        bars.append(at_least(row, speed, "MB/CPU-s", bar, peer))
    return bars


# Saves from a live training, next to the peers.


@dataclass
class Timing:
    """Seconds of the saves of one way: training blocked, until durable."""

    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)


def flat_state(training: LiveTraining) -> dict[str, torch.Tensor]:
    """Parameters and optimizer states by name."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    found = {f"model.{name}": tensor for name, tensor in model.items()}
    for name, parts in optimizer["state"].items():
        found.update({f"optimizer.{name}.{part}": value for part, value in parts.items()})
    return found


def sync(path: Path) -> None:
    """Fsync a file, as all ways are asked to."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


class Peers:
    """Every way of saving, each as a function that returns what waits until it is durable."""

    def __init__(self, folder: Path, training: LiveTraining) -> None:
        self.folder = folder
        self.training = training
        self.missing: dict[str, str] = {}
        self._closers: list[Callable[[], None]] = []
        self.store = CheckpointStore(folder / "outlast", keep=2)
        self._closers.append(self.store.close)
        self._buffers = {k: torch.empty_like(v) for k, v in flat_state(training).items()}
        self._moonclip = self._optional("moonclip", self._make_moonclip)
        self._manager = self._optional("torch_checkpointing", self._make_manager)

    def ways(self) -> dict[str, Callable[[int], Callable[[], None]]]:
        """Name to way."""
        found: dict[str, Callable[[int], Callable[[], None]]] = {
            "memcpy": self._memcpy,
            "outlast": self._outlast,
            "dcp.async_save": self._dcp_async,
            "dcp.save": self._dcp,
            "dcp.save zstd": self._dcp_zstd,
            "torch.save": self._torch,
            "safetensors": self._safetensors,
        }
        if self._moonclip is not None:
            found["moonclip"] = self._save_moonclip
        if self._manager is not None:
            found["torch_checkpointing"] = self._save_manager
        return found

    def close(self) -> None:
        """End what runs in the background."""
        for close in self._closers:
            with contextlib.suppress(Exception):
                close()

    def _optional(self, name: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except Exception as error:
            self.missing[name] = f"{type(error).__name__}: {error}"
            return None

    def _memcpy(self, step: int) -> Callable[[], None]:
        del step
        for name, tensor in flat_state(self.training).items():
            self._buffers[name].copy_(tensor)
        return lambda: None

    def _outlast(self, step: int) -> Callable[[], None]:
        state = {"model": self.training.model, "optimizer": self.training.optimizer}
        handle = self.store.save_async(step, state)
        return lambda: (handle.wait(), None)[1]

    def _dcp_async(self, step: int) -> Callable[[], None]:
        writer = dcp.FileSystemWriter(self.folder / "dcp-async" / str(step), sync_files=True)
        future = dcp.async_save(flat_state(self.training), storage_writer=writer)
        return lambda: (future.result(), None)[1]

    def _dcp(self, step: int) -> Callable[[], None]:
        writer = dcp.FileSystemWriter(self.folder / "dcp" / str(step), sync_files=True)
        dcp.save(flat_state(self.training), storage_writer=writer)
        return lambda: None

    def _dcp_zstd(self, step: int) -> Callable[[], None]:
        from torch.distributed.checkpoint._extension import ZStandard

        writer = dcp.FileSystemWriter(
            self.folder / "dcp-zstd" / str(step), sync_files=True, _extensions=[ZStandard()]
        )
        dcp.save(flat_state(self.training), storage_writer=writer)
        return lambda: None

    def _torch(self, step: int) -> Callable[[], None]:
        path = self.folder / "torch" / f"{step}.pt"
        path.parent.mkdir(exist_ok=True)
        torch.save(flat_state(self.training), path)
        sync(path)
        return lambda: None

    def _safetensors(self, step: int) -> Callable[[], None]:
        path = self.folder / "safetensors" / f"{step}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file(flat_state(self.training), path)
        sync(path)
        return lambda: None

    def _make_moonclip(self) -> Any:
        from moonclip.pytorch import CheckpointManager

        return CheckpointManager(str(self.folder / "moonclip"), world_size=1, rank=0)

    def _save_moonclip(self, step: int) -> Callable[[], None]:
        self._moonclip.save(step=step, model=self.training.model, optimizer=self.training.optimizer)
        return lambda: (self._moonclip.flush(), None)[1]

    def _make_manager(self) -> Any:
        from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        stager = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        # Its direct I/O refuses file lengths that are no multiple of a block.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        config = CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(staging_config=stager), storage_config=storage
        )
        manager = config.build()
        self._closers.append(manager.close)
        return manager

    def _save_manager(self, step: int) -> Callable[[], None]:
        place = str(self.folder / "torch_checkpointing" / str(step))
        written = self._manager.save(place, {"state": flat_state(self.training)})
        # A step may change what is still being staged, so training has to wait for that.
        staged = getattr(self._manager, "_staging_future", None)
        if staged is not None:
            staged.result()
        return lambda: (written.result(), None)[1]


def save_bars(training: LiveTraining, rounds: int) -> list[Bar]:
    """Blocked time and time until durable of every way, in turn, on a state that changes."""
    timings: dict[str, Timing] = {}
    with scratch() as folder:
        peers = Peers(folder, training)
        broken: dict[str, str] = dict(peers.missing)
        try:
            for number in range(rounds + 1):
                training.step()
                for name, save in peers.ways().items():
                    if name in broken:
                        continue
                    gc.collect()
                    begun = time.perf_counter()
                    try:
                        wait = save(number)
                        blocked = time.perf_counter() - begun
                        wait()
                    except Exception as error:
                        broken[name] = f"{type(error).__name__}: {error}"
                        continue
                    # The first round allocates buffers and starts processes.
                    if number:
                        timing = timings.setdefault(name, Timing())
                        timing.blocked.append(blocked)
                        timing.durable.append(time.perf_counter() - begun)
                for each in folder.iterdir():
                    if each.name not in ("outlast", "moonclip"):
                        shutil.rmtree(each)
        finally:
            peers.close()
    blocked = {name: median(timing.blocked) for name, timing in timings.items()}
    ours, copy = blocked["outlast"], blocked["memcpy"]
    bars = [
        at_most(
            "blocked / dcp.async_save's",
            ours / blocked["dcp.async_save"],
            "ratio",
            1.0,
            "dcp.async_save",
        ),
        at_most("blocked / one memcpy of the state", ours / copy, "ratio", 1.1, "memcpy"),
    ]
    for name, timing in timings.items():
        words = "reported"
        bars.append(
            Bar(f"- blocked, {name}", round(median(timing.blocked), 4), "s", words, True, "")
        )
        bars.append(
            Bar(f"- until durable, {name}", round(median(timing.durable), 4), "s", words, True, "")
        )
    for name, why in broken.items():
        bars.append(Bar(f"- {name}", None, "s", "reported", True, why[:120]))
    return bars


def slowdown_bar(training: LiveTraining, steps: int) -> Bar:
    """Time that saves at the automatic interval add to training, from pairs of stretches."""
    estimator = IntervalEstimator(mtbf_seconds=600.0, first_save_steps=3)
    shares = []
    state = {"model": training.model, "optimizer": training.optimizer}
    with scratch() as folder, CheckpointStore(folder, keep=2) as store:
        store.save(0, state)
        for _ in range(3):
            begun = time.perf_counter()
            for _ in range(steps):
                training.step()
            plain = time.perf_counter() - begun
            handle, since, begun = None, 0, time.perf_counter()
            for _ in range(steps):
                saving = handle is not None and not handle.done()
                step_begun = time.perf_counter()
                training.step()
                estimator.observe_step(time.perf_counter() - step_begun, saving)
                since += 1
                if handle is not None and handle.done():
                    result = handle.wait()
                    estimator.observe_save(result.blocked_seconds, result.seconds)
                    handle = None
                if handle is None and since >= estimator.next_interval_steps():
                    handle = store.save_async(training.steps_done, state)
                    since = 0
            shares.append((time.perf_counter() - begun) / plain - 1.0)
            if handle is not None:
                handle.wait()
    return at_most(
        "step slowdown at the automatic interval",
        median(shares),
        "share",
        0.035,
        f"the same steps without saves; {estimator.explain()}",
    )


# Memory, resharding, restoring, disk.


def memory_bar(quick: bool) -> Bar:
    """Memory that a full save needs beside the state, on a state of about 1 GB."""
    elements = (8 if quick else 128) << 20
    model = torch.nn.Module()
    for number in range(2):
        model.register_parameter(
            str(number), torch.nn.Parameter(torch.randn(elements // 1024, 1024))
        )
    raw = 2 * elements * 4
    process = psutil.Process()
    with scratch() as folder, CheckpointStore(folder, keep=1) as store:
        gc.collect()
        before = process.memory_full_info().pss
        handle = store.save_async(1, {"model": model})
        peak = 0
        while not handle.done():
            children = [child.memory_full_info().pss for child in process.children()]
            peak = max(peak, process.memory_full_info().pss + sum(children))
            time.sleep(0.02)
        handle.wait()
    return at_most(
        f"peak extra memory of a full save ({raw / 1e9:.1f} GB)",
        (peak - before) / raw,
        "x staged",
        1.1,
        "the staged copy alone is 1.0",
    )


def small_bars() -> list[Bar]:
    """Time of the training thread that saves of many small tensors take: 64 elements each."""
    found = {}
    for parameters in (5_000, 20_000):
        model = torch.nn.ParameterList(torch.randn(64) for _ in range(parameters))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        state = {"model": model, "optimizer": optimizer}
        seconds = []
        with scratch() as folder, CheckpointStore(folder, keep=1) as store:
            for step in range(4):
                optimizer.step()
                gc.collect()
                begun = time.thread_time()
                handle = store.save_async(step, state)
                seconds.append(time.thread_time() - begun)
                handle.wait()
        found[4 * parameters] = seconds[0], median(seconds[1:])
    bars = [at_most("a later save of 20,000 small tensors", found[20_000][1], "CPU-s", 0.1, "")]
    figures = {
        "the first save of them": found[20_000][0],
        "a later save of 80,000": found[80_000][1],
        "the first save of these": found[80_000][0],
    }
    return bars + [
        Bar(f"- {name}", round(figure, 3), "CPU-s", "reported", True, "")
        for name, figure in figures.items()
    ]


def reshard_bars(quick: bool) -> list[Bar]:
    """Bytes decoded per byte needed when 3 ranks' shards are read by others."""
    state = load_file(snapshots(quick=quick)[250])
    state = {name: array for name, array in state.items() if array.ndim == 2}
    facts = {name: TensorFacts.of("float32", array.shape) for name, array in state.items()}
    with scratch() as folder:
        storage = storage_of(folder)
        for rank in range(3):
            boxes = {name: shard(array.shape, 0, rank, 3) for name, array in state.items()}
            pieces, start, parts = [], 0, []
            for name, box in boxes.items():
                part = np.ascontiguousarray(state[name][box.within(whole(state[name].shape))])
                pieces.append(StagedPiece(name, box, start))
                parts.append(part.reshape(-1).view(np.uint8))
                start += part.nbytes
            arena = memoryview(np.concatenate(parts))
            job = PartJob(Version(1, 1), rank, 3, Catalogue(facts), pieces)
            Encoder(storage, Reduction(), arena).write(job, lambda: None)
        contents = load(storage, Version(1, 1))
        bars = []
        dcp_figures = {(0, 1): "1.0", (0, 2): "1.33", (0, 4): "-", (1, 2): "2.0", (1, 4): "4.0"}
        for dimension, world in ((0, 1), (0, 2), (0, 4), (1, 2), (1, 4)):
            needed = touched = read = 0
            for rank in range(world):
                with VersionReader(storage, contents) as reader:
                    wanted = []
                    for name, array in state.items():
                        box = shard(array.shape, dimension, rank, world)
                        wanted.append(Wanted(name, box, np.empty(box.shape, "u4")))
                    reader.read(wanted)
                    for want in wanted:
                        expected = state[want.name][want.box.within(whole(state[want.name].shape))]
                        assert np.array_equal(want.out, expected.view("u4"))
                    needed += reader.counters.needed_bytes
                    touched += reader.counters.touched_bytes
                    read += reader.counters.read_bytes
            bars.append(
                at_most(
                    f"decoded / needed bytes, 3 ranks -> {world} along dimension {dimension}",
                    touched / needed,
                    "ratio",
                    1.1,
                    f"DCP {dcp_figures[dimension, world]} (published); "
                    f"{read / needed:.3f} read from disk",
                )
            )
    return bars


def shard(shape: tuple[int, ...], dimension: int, rank: int, world: int) -> Box:
    """The box of `rank` as torch's Shard(dimension) cuts it."""
    step = -(-shape[dimension] // world)
    first = min(rank * step, shape[dimension])
    extent = min(step, shape[dimension] - first)
    offset, size = [0] * len(shape), list(shape)
    offset[dimension], size[dimension] = first, extent
    return Box(tuple(offset), tuple(size))


def drop_cache(folder: Path) -> None:
    """Make the next reads come from the disk."""
    for path in [folder] if folder.is_file() else folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@dataclass
class Costs:
    """CPU seconds of this process and its children, and wall seconds, of every round."""

    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Measure the block."""
        cpu, wall = self._cpu(), time.perf_counter()
        yield
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(self._cpu() - cpu)

    @staticmethod
    def _cpu() -> float:
        nanoseconds = 0
        for child in psutil.Process().children(recursive=True):
            for thread in Path(f"/proc/{child.pid}/task").glob("*/schedstat"):
                nanoseconds += int(thread.read_text().split()[0])
        return time.process_time() + 1e-9 * nanoseconds


def restore_bars(
    size: str,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Callable[[], dict[str, torch.Tensor]],
    rounds: int,
) -> list[Bar]:
    """Saving and restoring a state in turn with `dcp.save` and a safetensors file of it.

    Args:
        size: Of the state, in words.
        model: As it trains.
        optimizer: The same.
        tensors: Gives all tensors of both, by name.
        rounds: After one that makes buffers and starts processes.
    """
    state = {"model": model, "optimizer": optimizer}
    costs: dict[str, Costs] = {}
    with scratch() as folder, contextlib.ExitStack() as stack:
        stores = {
            name: stack.enter_context(
                CheckpointStore(folder / name, keep=1, reduction=Reduction(Compression(codec)))
            )
            for name, codec in (("compressed", "auto"), ("plain", "none"))
        }
        file = folder / "state.safetensors"

        def from_safetensors() -> None:
            loaded = load_torch(file)
            with torch.no_grad():
                for name, tensor in tensors().items():
                    tensor.copy_(loaded[name])

        def from_store(name: str) -> Callable[[], None]:
            def restore() -> None:
                with CheckpointStore(folder / name) as store:
                    assert store.restore(state) is not None

            return restore

        def by_dcp(step: int) -> None:
            # As the others do, it keeps the checkpoint before until the new one is durable.
            writer = dcp.FileSystemWriter(folder / f"dcp-{step}", sync_files=True)
            dcp.save(tensors(), storage_writer=writer)
            shutil.rmtree(folder / f"dcp-{step - 1}", ignore_errors=True)

        blocked: dict[str, list[float]] = {}

        def by_outlast(name: str, codec: str, *, background: bool = False) -> Callable[[int], None]:
            writer = OutlastWriter(
                folder / name,
                keep=1,
                reduction=Reduction(Compression(codec)),
                background=background,
            )
            stack.callback(writer.close)

            def save(step: int) -> None:
                begun = time.perf_counter()
                writer.step = step
                dcp.save(tensors(), storage_writer=writer)
                blocked.setdefault(name, []).append(time.perf_counter() - begun)
                writer.wait()

            return save

        saves: dict[str, Callable[[int], object]] = {
            "dcp.save": by_dcp,
            "OutlastWriter": by_outlast("OutlastWriter", "auto"),
            "OutlastWriter plain": by_outlast("OutlastWriter plain", "none"),
            "OutlastWriter background": by_outlast(
                "OutlastWriter background", "auto", background=True
            ),
            "save": lambda step: stores["compressed"].save(step, state),
        }
        for number in range(rounds + 1):
            with torch.no_grad():
                # Content that was saved before would not be written again.
                for tensor in tensors().values():
                    if tensor.is_floating_point() and tensor.ndim:
                        tensor.mul_(1.0009765625)
            # Who writes after others have waits for the disk, in CPU time too.
            turn = number % len(saves)
            for name, save in [*saves.items()][turn:] + [*saves.items()][:turn]:
                gc.collect()
                with (costs.setdefault(name, Costs()) if number else Costs()).round():
                    save(number)
                # The kernel's work for a page differs by whether it was in use before.
                drop_cache(folder)
            stores["plain"].save(number, state)
        for store in stores.values():
            store.close()
        save_file({name: tensor.contiguous() for name, tensor in tensors().items()}, file)
        ways = {
            "safetensors": (file, from_safetensors),
            "compressed": (folder / "compressed", from_store("compressed")),
            "plain": (folder / "plain", from_store("plain")),
        }
        for number in range(rounds + 1):
            for cache in ("cold", "warm"):
                for name, (place, work) in ways.items():
                    if cache == "cold":
                        drop_cache(place)
                    gc.collect()
                    key = f"{name} {cache}"
                    with (costs.setdefault(key, Costs()) if number else Costs()).round():
                        work()

    def ratio(one: str, other: str, what: str) -> float:
        return median(getattr(costs[one], what)) / median(getattr(costs[other], what))

    cores = len(os.sched_getaffinity(0))
    rows = []
    for name, words, warm, wall, cold in (
        ("compressed", "restore", 3.5, 2.0, 1.0),
        ("plain", "restore, compression off", 1.8, 1.2, None),
    ):
        peer = "safetensors load_file into the same objects"
        ours, theirs = f"{name} warm", "safetensors warm"
        rows += [
            (f"{words}, {size}: CPU, warm cache", ratio(ours, theirs, "cpu"), warm, peer),
            (
                f"{words}, {size}: wall, warm cache, {cores} cores",
                ratio(ours, theirs, "wall"),
                wall,
                peer,
            ),
        ]
        if cold is not None:
            found = ratio(f"{name} cold", "safetensors cold", "wall")
            rows.append((f"{words}, {size}: wall, cold cache", found, cold, peer))
    rows += [
        (f"save, {size}: CPU", ratio("save", "dcp.save", "cpu"), 0.9, "dcp.save, synced"),
        (
            f"OutlastWriter, {size}: CPU",
            ratio("OutlastWriter", "dcp.save", "cpu"),
            1.0,
            "dcp.save, synced",
        ),
        (
            f"OutlastWriter, {size}: CPU, compression off",
            ratio("OutlastWriter plain", "dcp.save", "cpu"),
            1.0,
            "dcp.save, synced",
        ),
        (
            f"OutlastWriter, {size}: CPU, background",
            ratio("OutlastWriter background", "dcp.save", "cpu"),
            1.0,
            "dcp.save, synced",
        ),
        (
            f"OutlastWriter, {size}: blocked, background",
            median(blocked["OutlastWriter background"][1:]) / median(costs["dcp.save"].wall),
            1.0,
            "dcp.save, synced",
        ),
    ]
    return [at_most(name, figure, "ratio", bar, peer) for name, figure, bar, peer in rows]


def large_bars(elements: int, rounds: int) -> list[Bar]:
    """`restore_bars` of a model of large matrices under AdamW."""
    torch.manual_seed(0)
    side = 2048
    layers = [torch.nn.Linear(side, side) for _ in range(elements // side**2)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(16, side)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def tensors() -> dict[str, torch.Tensor]:
        found = dict(model.state_dict())
        for number, parts in enumerate(optimizer.state.values()):
            found |= {f"{number}.{name}": part for name, part in parts.items()}
        return found

    size = f"{12 * elements / 1e9:.1f} GB"
    return restore_bars(size, model, optimizer, tensors, rounds)


def disk_bars(training: LiveTraining, steps: int) -> list[Bar]:
    """All versions of a stretch of training on disk, one per step, as replay logs."""
    from outlast.checkpoint import ReplayLog, Retention

    state = {"model": training.model, "optimizer": training.optimizer}
    raw = sum(tensor.nbytes for tensor in flat_state(training).values())
    with scratch() as folder:
        dcp.save(
            flat_state(training),
            storage_writer=dcp.FileSystemWriter(folder / "dcp", sync_files=True),
        )
        one_dcp = size_of(folder / "dcp")
        everything = Retention(keep=10**6)
        logs = CheckpointStore(folder / "logs", keep=everything)
        replay = ReplayLog(logs, state)
        logs.save(training.steps_done, state)
        base = size_of(folder / "logs")
        for _ in range(steps):
            training.step(lambda: replay.step(training.steps_done + 1))
        logs.close()
        log = (size_of(folder / "logs") - base) / steps
        weights = {"model": training.model, "optimizer": training.optimizer}
        before = {name: tensor.clone() for name, tensor in flat_state(training).items()}
        with CheckpointStore(folder / "logs") as store:
            restored = store.restore(weights)
        assert restored is not None
        wrong = sum(
            not torch.equal(before[name].view(torch.uint8), tensor.view(torch.uint8))
            for name, tensor in flat_state(training).items()
            if tensor.ndim
        )
        total = size_of(folder / "logs") / (one_dcp * (steps + 1))
    return [
        at_least("replay log, state / log of a step", raw / log, "ratio", 10.0, "published 9.8"),
        at_most(
            f"- tensors that differ after replaying {steps} steps",
            wrong,
            "tensors",
            0,
            f"restored step {restored.step} of {training.steps_done}",
        ),
        at_most(f"{steps + 1} versions on disk, replay logs", total, "x DCP's", 0.5, "dcp.save"),
    ]


def bars(quick: bool) -> list[Bar]:
    """All rows of this file."""
    torch.set_num_threads(1)
    bars = codec_bars(quick)
    bars += reshard_bars(quick)
    training = resumed(quick=quick)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bars += save_bars(training, 2 if quick else 7)
    bars += restore_bars(
        "a small state" if quick else "58 MB",
        training.model,
        training.optimizer,
        lambda: flat_state(training),
        2 if quick else 7,
    )
    if not quick:
        bars += large_bars(125 << 20, 5)
    dist.destroy_process_group()
    bars += small_bars()
    bars.append(memory_bar(quick))
    bars.append(slowdown_bar(training, 6 if quick else 60))
    bars += disk_bars(training, 5 if quick else 100)
    if quick:
        # A state so small costs files and threads, whatever its tiles cost.
        exact = ("fp32", "bf16", "replay log", "- tensors")
        bars = [
            bar if bar.name.startswith(exact) else replace(bar, bar="reported", holds=True)
            for bar in bars
        ]
    return bars
