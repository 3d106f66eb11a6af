"""Live recovery: replica groups that continue, in their processes, when one of them dies or stops.

A group that is behind takes over the whole state of a peer (it heals), while the others continue
with their step. The peer serves its live tensors; it changes them at its next optimizer step,
before which `Transfer.close` waits for those that still read. What was fetched is put in place only
when all of it is there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import select
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from outlast.errors import DataCorruptionError, RecoverError
from outlast.records import StateRecovered
from outlast.recover.cost import SILENCE_SHARE
from outlast.recover.quorum import (
    Buckets,
    Connections,
    PartSums,
    QuorumClient,
    RoundFailedError,
    committed_lineage,
    initial_lineage,
    membership,
    membership_events,
    must_restore,
)
from outlast.state.install import Saved, check_fit, find_targets, install
from outlast.state.live import State, collect, local_box
from outlast.state.tensors import dtype_name, opaque_array
from outlast.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from outlast.records.events import Event
    from outlast.recover.quorum import Member, Membership

TICK_MS = 10
_START_SECONDS = 20.0
_PATIENCE_SECONDS = 5.0
_GOOD, _LOSS = 0, 1
_LOOK_SECONDS = 0.01
_REFUSALS = 10


def require_torchft() -> None:
    """Raises RecoverError when the extra ``ft`` is not installed."""
    if importlib.util.find_spec("torchft") is None:
        raise RecoverError(
            'recover.mode = "live" needs torchft, which is not installed; '
            'install it with `pip install "outlast[ft]"`, or choose recover.mode = "restart"'
        )


class Lighthouse:
    """A lighthouse process on this machine, always at the same port.

    Args:
        heartbeat_seconds: A group that is silent for so long has been dropped by then.
        smallest: Fewest groups that may train.
        join_seconds: How long a quorum waits for a group that is alive but does not come.
        host: Under which the groups reach this machine.

    Raises:
        RecoverError: When torchft is missing, or the process does not start.
    """

    def __init__(
        self,
        heartbeat_seconds: float = 1.0,
        *,
        smallest: int = 1,
        join_seconds: float = 60.0,
        host: str = "127.0.0.1",
    ) -> None:
        require_torchft()
        self._settings = [
            str(smallest),
            str(max(int(1000 * SILENCE_SHARE * heartbeat_seconds), 1)),
            str(TICK_MS),
            str(int(1000 * join_seconds)),
        ]
        self._process, port = self._start(0)
        self._port = port
        self.address = f"{host}:{port}"

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def keep_alive(self) -> bool:
        """Start the process again if it has died; whether that was needed.

        Raises:
            RecoverError: When it does not start.
        """
        if self._process.poll() is None:
            return False
        self._process, _ = self._start(self._port)
        return True

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Lighthouse:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, port: int) -> tuple[subprocess.Popen[bytes], int]:
        arguments = ", ".join([str(port), *self._settings])
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"{inspect.getsource(_serve)}\n_serve({arguments})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # torchft logs several lines for each quorum, and cannot be asked for fewer.
            stderr=subprocess.DEVNULL,
            # Ctrl-C is for the workers, which then stop at a step's end and need a quorum for it.
            start_new_session=True,
        )
        assert process.stdout is not None
        deadline = time.monotonic() + _START_SECONDS
        ready, _, _ = select.select([process.stdout], [], [], deadline - time.monotonic())
        line = process.stdout.readline() if ready else b""
        if not line.strip().isdigit():
            process.kill()
            process.wait()
            problem = line.decode(errors="replace").strip() or "it said nothing"
            raise RecoverError(
                f"torchft's lighthouse did not start at port {port or 'any'} within "
                f"{_START_SECONDS:g} s: {problem}"
            )
        return process, int(line)


def _serve(port: int, groups: int, silence_ms: int, tick_ms: int, join_ms: int) -> None:
    """Serve on `port` (0: a free one, printed as a line) until the standard input ends.

    Runs as a program of its own, which loads the lighthouse's library alone: importing torch would
    take a second at every start.
    """
    import importlib.machinery
    import importlib.util
    import sys
    from pathlib import Path

    package = importlib.util.find_spec("torchft")
    if package is None or not package.submodule_search_locations:
        raise ImportError("torchft is not installed")
    (file,) = Path(package.submodule_search_locations[0]).glob("_torchft.*.so")
    name = "torchft._torchft"
    loader = importlib.machinery.ExtensionFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    library = importlib.util.module_from_spec(spec)
    loader.exec_module(library)
    try:
        server = library.LighthouseServer(
            bind=f"0.0.0.0:{port}",
            min_replicas=groups,
            join_timeout_ms=join_ms,
            quorum_tick_ms=tick_ms,
            heartbeat_timeout_ms=silence_ms,
        )
    except Exception as error:
        print(error, flush=True)
        sys.exit(1)
    print(server.address().rpartition(":")[2], flush=True)
    sys.stdin.buffer.read()
    server.shutdown()


@dataclass(frozen=True)
class SavedElsewhere:
    """A state that outlives all groups, e.g. in a run's checkpoints.

    Attributes:
        newest: Step of the newest state there; 0 where there is none.
        restore: Loads it into the live objects and returns its step.
    """

    newest: Callable[[], int]
    restore: Callable[[], int]


@dataclass
class LiveStep:
    """One step, or one more attempt at it, of this group.

    Attributes:
        number: Steps committed before it.
        share: This group's index and the number of groups among which the global batch is divided.
        idle: Whether the others do this step's whole batch, because this group has only just taken
            their state. A loop may then leave out both passes, which spares the others a wait;
            what it computes does not count.
        committed: Whether it has been committed; None before `commit`.
        loss: Sum of the groups' losses, once committed.
        sums: Sums over the groups of what was given to `commit`, once committed.
    """

    number: int
    share: tuple[int, int]
    idle: bool
    _commit: Callable[[LiveStep, torch.Tensor | float, bool, Sequence[float]], bool]
    _parts: PartSums | None = None
    committed: bool | None = None
    loss: float = float("nan")
    sums: list[float] = field(default_factory=list)

    @property
    def parts(self) -> range:
        """Numbers of the batch's parts that this group computes, where it was cut into parts."""
        return self._sums.own

    def add(self, part: int, loss: torch.Tensor | float = 0.0) -> None:
        """Take the gradients as those of one part of the batch, and drop them from the parameters.

        Args:
            part: One of `parts`, each once.
            loss: The part's share of the loss.

        Raises:
            RecoverError: Without `LiveGroups(parts=...)`, or for another part.
        """
        self._sums.add(part, float(loss))

    def clear(self) -> None:
        """Forget what was added, to compute all of `parts` again."""
        self._sums.clear()

    @property
    def _sums(self) -> PartSums:
        if self._parts is None:
            raise RecoverError(
                "the batch is not cut into parts: give LiveGroups(parts=...), or only commit"
            )
        return self._parts

    def commit(
        self, loss: torch.Tensor | float = 0.0, *, good: bool = True, values: Sequence[float] = ()
    ) -> bool:
        """Sum the gradients over the groups in place, and vote.

        Args:
            loss: This group's part of the loss; of a batch in parts, those given to `add` count.
            good: Whether this group trusts its gradients. If one group does not, none commits.
            values: Further numbers to be summed, as many in every group.

        Returns:
            Whether every group has all sums: step the optimizer then. If not, the gradients are
            gone, and the next attempt at this step follows.
        """
        return self._commit(self, loss, good, values)


class TensorKind(NamedTuple):
    """Element type, without ``torch.``, and shape of a global tensor."""

    dtype: str
    shape: tuple[int, ...]


class Transfer:
    """Serves this process's state to peers, and fetches theirs (torchft's HTTP transport).

    Args:
        state: What a training state consists of; see `outlast.state`.
        host: Under which peers reach this machine.
        timeout_seconds: Longest wait for a peer.

    Attributes:
        address: Where it is served.
    """

    def __init__(self, state: State, host: str, timeout_seconds: float) -> None:
        self._state = state
        self._host = host
        self._timeout_seconds = timeout_seconds
        self._limit = timedelta(seconds=timeout_seconds)
        self._patience = timedelta(seconds=min(timeout_seconds, _PATIENCE_SECONDS))
        self._listen()

    def _listen(self) -> None:
        from torchft.checkpointing import HTTPTransport

        try:
            # How long the server waits for a peer that takes nothing, and we for the server.
            self._server: Any = HTTPTransport(self._patience, num_chunks=0)
        except OSError as error:
            raise RecoverError(
                f"the server from which other groups would heal cannot listen: {error}; "
                "torchft needs IPv6 to be there"
            ) from None
        # Each request would be a line on the terminal.
        self._server._server.RequestHandlerClass.log_message = lambda *_: None
        port = self._server.address().rpartition(":")[2].partition("/")[0]
        self.address = f"http://{self._host}:{port}/checkpoint/"

    def serve(self, step: int, peers: list[int]) -> None:
        """Let `peers` read the state of `step` until `close` is called."""
        live = collect(self._state)
        modules = [item for item in self._state.values() if isinstance(item, nn.Module)]
        buffers = {id(buffer) for module in modules for buffer in module.buffers()}
        tensors, kinds = {}, {}
        for name, tensor in live.tensors.items():
            _, local = local_box(tensor)
            # A forward pass changes buffers, an optimizer step the rest.
            tensors[name] = local.clone() if id(tensor) in buffers else local
            kinds[name] = (dtype_name(tensor), tuple(tensor.shape))
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random["cuda"] = torch.cuda.get_rng_state()
        content = {"tensors": tensors, "kinds": kinds, "values": live.values, "random": random}
        self._server.send_checkpoint(peers, step, content, self._limit)

    def close(self) -> None:
        """Wait for those who still read, and serve no more.

        Who still reads when a round has failed may be stopped. Then another server takes over: what
        that peer gets is of a step that is over, so that it has to heal again.
        """
        try:
            self._server.disallow_checkpoint()
        except TimeoutError:
            self._listen()

    def fetch(self, step: int, source: Member, client: QuorumClient) -> dict[str, Any]:
        """Read the state of `step` from a peer; nothing is put in place yet.

        Raises:
            RoundFailedError: When the peer is gone, or has another step by now.
        """
        done = threading.Event()
        found: list[Any] = []
        problem: list[Exception] = []

        def read() -> None:
            try:
                found.append(self._server.recv_checkpoint(0, source.serves, step, self._limit))
            except Exception as error:
                problem.append(error)
            done.set()

        # What arrives is only ever copied from.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        threading.Thread(target=read, daemon=True).start()
        why = client.wait(done, [source], self._timeout_seconds)
        if why or problem:
            raise RoundFailedError(why or f"group {source.number} gave no state: {problem[0]}")
        content: dict[str, Any] = found[0]
        return content

    def install(self, content: Mapping[str, Any]) -> None:
        """Put what was fetched in place.

        Raises:
            RecoverError: When it does not fit the live objects, which are then untouched.
        """
        saved = Saved(
            {name: TensorKind(*kind) for name, kind in content["kinds"].items()},
            content["values"],
            content["values"],
        )
        targets = find_targets(self._state, saved)
        taken = {*targets.tensors, *targets.values}
        if misfit := check_fit(targets, saved, taken, ()):
            raise RecoverError(f"the state of another group does not fit this one's: {misfit}")
        with torch.no_grad():
            for name, tensor in targets.tensors.items():
                if name in content["tensors"]:
                    local_box(tensor)[1].copy_(content["tensors"][name])
        install(self._state, targets, saved)
        torch.set_rng_state(content["random"]["cpu"])
        if "cuda" in content["random"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(content["random"]["cuda"])

    def shutdown(self) -> None:
        """End the server."""
        self._server.allow_checkpoint(-1)
        self._server.shutdown()


def state_digest(state: State) -> str:
    """A hash of all bits of this process's part of a state: equal where the states are equal."""
    live = collect(state)
    total = xxhash.xxh3_128()
    for name in sorted(live.tensors):
        box, local = local_box(live.tensors[name])
        host = local.detach().cpu().contiguous()
        total.update(f"{name} {dtype_name(host)} {box}".encode())
        total.update(opaque_array(host).reshape(-1).view("u1").data)
    total.update(repr(sorted(live.values.items())).encode())
    return total.hexdigest()


class LiveGroups:
    """This process's replica group among the others of a job.

    The groups hold equal states and divide each global batch among themselves. When one dies, the
    others take over its share of the same step; one that returns takes a peer's state. A loop is::

        groups = LiveGroups({"model": model, "optimizer": optimizer}, group=0, lighthouse=address)
        for step in groups.steps(until=1000):
            loss = forward_backward(batch(step.number, *step.share))  # of the global batch's mean
            if step.commit(loss):
                optimizer.step()
            optimizer.zero_grad()

    Args:
        state: What equal groups have equal: the model (under any name), its optimizers, objects
            with a state_dict().
        group: Number of this group.
        lighthouse: ``host:port`` of torchft's lighthouse; see `Lighthouse`.
        identity: Names the job; groups of another job, version of Outlast or of torch are refused.
        step: Steps done in `state`.
        saved_elsewhere: Where a newer state than any group's may lie.
        known: The newest step that the run is known to have reached, from its records for example.
        returning: Whether this group has been started again; then it does not begin anew.
        awaits: How many groups are to be there before the first step.
        heartbeat_seconds: A group that is silent for so long has been dropped by then. All groups
            and the lighthouse must have the same.
        timeout_seconds: Longest wait for a quorum, or for groups that are alive.
        host: Under which the other groups reach this machine.
        parts: Into how many parts each global batch is cut, whose gradients are summed in one order
            however many groups there are, so that weights do not depend on deaths to the last bit;
            see `outlast.recover.live.reduce`. Then each of `LiveStep.parts` is given to
            `LiveStep.add` before `commit`. 0: gradients are summed as they come.

    Raises:
        RecoverError: When torchft is missing, the lighthouse cannot be reached, or this group may
            not take part.
    """

    def __init__(
        self,
        state: State,
        *,
        group: int,
        lighthouse: str,
        identity: str = "",
        step: int = 0,
        saved_elsewhere: SavedElsewhere | None = None,
        known: int = 0,
        returning: bool = False,
        awaits: int = 1,
        heartbeat_seconds: float = 1.0,
        timeout_seconds: float = 120.0,
        host: str = "127.0.0.1",
        parts: int = 0,
    ) -> None:
        require_torchft()
        self.group = group
        self._state, self._step = state, step
        self._saved_elsewhere, self._known, self._returning = saved_elsewhere, known, returning
        self._timeout_seconds = timeout_seconds
        self._host = host
        models = [item for item in state.values() if isinstance(item, nn.Module)]
        self._parameters = [p for model in models for p in model.parameters() if p.requires_grad]
        if not self._parameters:
            raise RecoverError("the state has no module with parameters that are trained; give one")
        self._buckets = Buckets(self._parameters)
        self._parts = PartSums(self._buckets, parts) if parts else None
        if parts:
            _refuse_running_statistics(models)
        self._device = self._parameters[0].device
        self._transfer = Transfer(state, host, timeout_seconds)
        self._lineage = initial_lineage(state_digest(state))
        self._client = functools.partial(
            QuorumClient,
            lighthouse=lighthouse,
            number=group,
            identity=f"{identity or 'unnamed job'}, outlast {__version__}, "
            f"torch {torch.__version__}" + (f", batches in {parts} parts" if parts else ""),
            host=host,
            heartbeat_seconds=heartbeat_seconds,
            timeout_seconds=timeout_seconds,
        )
        self._links: tuple[QuorumClient, Connections] | None = None
        self._awaits = awaits
        self._since = ""
        self._serving = False
        self._refusals = 0
        self._open: LiveStep | None = None
        self._found: Membership | None = None
        self._events: list[Event] = []
        self._last_commit = time.perf_counter()

    @property
    def step(self) -> int:
        """Steps committed in this group's state."""
        return self._step

    @property
    def met(self) -> bool:
        """True if this group has done a round with the others."""
        return self._found is not None

    @property
    def writes(self) -> bool:
        """True if this group writes what is written once, by its last round."""
        if self._found is None:
            return False
        return self._found.writer == self._found.members[self._found.index].life

    def steps(self, until: int) -> Iterator[LiveStep]:
        """Every attempt at every step up to `until`, this group's share of it each time.

        Raises:
            RecoverError: When there is no quorum in time, or this group may not continue.
        """
        while self._step < until:
            step = self.begin()
            try:
                yield step
            except GeneratorExit:
                self.end(step)
                raise
            if step.committed is None:
                raise RecoverError(
                    f"step {step.number} ended without step.commit(loss); call it once for each "
                    "step, after the backward pass"
                )
            self.end(step)

    def begin(self) -> LiveStep:
        """Agree with the other groups on the next step, and heal if they are ahead.

        A step that is open already is returned again.

        Raises:
            RecoverError: As `steps`.
        """
        if self._open is not None:
            return self._open
        deadline = time.monotonic() + self._timeout_seconds
        while True:
            client, connections = self._linked()
            name, members = client.join(
                step=self._step,
                lineage=self._lineage,
                serves=self._transfer.address,
                connected=connections.round,
                since=self._since,
                awaits=self._awaits,
            )
            found = membership(name, members, client.life)
            why = "could be connected"
            if not found.complete:
                why = f"were there, of {self._awaits} that are awaited"
            elif self._restored(found):
                continue
            elif self._met(found):
                break
            time.sleep(_LOOK_SECONDS)
            if time.monotonic() > deadline:
                raise RecoverError(
                    f"group {self.group} found no round in {self._timeout_seconds:g} s: only "
                    f"the groups {', '.join(str(member.number) for member in found.members)} {why};"
                    " look at the other groups and the network between them"
                )
        before, self._found = self._found, found
        if before is not None and before.lives != found.lives:
            since = time.perf_counter() - self._last_commit
            self._events += membership_events(before, found, self._step, since)
        self._since = self._since or found.round
        idle = found.source is not None
        if self._parts is not None:
            self._parts.begin(found.share, idle=idle)
        self._open = LiveStep(self._step, found.share, idle, self._commit, self._parts)
        return self._open

    def end(self, step: LiveStep) -> None:
        """Close an attempt, after the optimizer's step if it was committed."""
        self._open = None
        if step.committed:
            assert self._found is not None
            self._step += 1
            self._awaits = 0
            self._lineage = committed_lineage(self._found.round)
            self._last_commit = time.perf_counter()

    def news(self) -> list[Event]:
        """Events of this group since the last call, for the run's records."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Leave: close connections and the registration."""
        self._close_serving()
        if self._links is not None:
            client, connections = self._links
            connections.drop()
            client.close()
        self._transfer.shutdown()

    def __enter__(self) -> LiveGroups:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _linked(self) -> tuple[QuorumClient, Connections]:
        """The client and the connections, from the first step on: who is registered is awaited."""
        if self._links is None:
            store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
            client = self._client(store=f"{self._host}:{store.port}")
            self._store = store
            self._links = (client, Connections(client, self._device, self._timeout_seconds))
        return self._links

    def _restored(self, found: Membership) -> bool:
        """Load a saved state if the groups may not continue without; whether it did."""
        if self._found is not None and found.lives == self._found.lives:
            return False
        newest = None if self._saved_elsewhere is None else self._saved_elsewhere.newest()
        why = must_restore(
            found.step,
            committed=found.committed,
            newest=newest,
            known=self._known,
            returning=self._returning,
        )
        if why is None:
            return False
        begun_at = time.perf_counter()
        step = 0 if self._saved_elsewhere is None else self._saved_elsewhere.restore()
        if step <= found.step:
            raise RecoverError(
                f"group {self.group} does not train on: {why}; start the group that has the newer "
                "state, or restore a checkpoint"
            )
        self._step, self._lineage = step, initial_lineage(state_digest(self._state))
        lost = max(self._known - step, 0)
        self._known = step
        self._events.append(
            StateRecovered(step, "shared", time.perf_counter() - begun_at, lost, 0, [why])
        )
        return True

    def _met(self, found: Membership) -> bool:
        """Connect to the members, and heal from or serve those that need it; whether it worked."""
        client, connections = self._linked()
        try:
            connections.connect(found)
            if found.source is not None:
                begun_at = time.perf_counter()
                content = self._transfer.fetch(found.step, found.source, client)
                self._transfer.install(content)
                # Whoever has missed a step does not write on from where it was.
                self._since = found.round
                self._step, self._lineage = found.step, found.lineage
                seconds = time.perf_counter() - begun_at
                size = sum(tensor.nbytes for tensor in content["tensors"].values())
                self._events.append(StateRecovered(found.step, "peer", seconds, 0, size))
            elif found.heals:
                self._transfer.serve(self._step, list(found.heals))
                self._serving = True
        except RoundFailedError:
            self._close_serving()
            connections.drop()
            return False
        return True

    def _close_serving(self) -> None:
        if self._serving:
            self._serving = False
            self._transfer.close()

    def _commit(
        self, step: LiveStep, loss: torch.Tensor | float, good: bool, values: Sequence[float]
    ) -> bool:
        if step.committed is not None:
            raise RecoverError(f"step {step.number} was voted on already; commit it once")
        step.committed = False
        # Connections that failed are dropped already; the next round makes new ones.
        with contextlib.suppress(RoundFailedError):
            step.committed = self._sum_and_vote(step, float(loss), good, values)
        # From here on the optimizer may change what was served.
        self._close_serving()
        if not step.committed:
            self._buckets.drop()
        return step.committed

    def _sum_and_vote(
        self, step: LiveStep, loss: float, good: bool, values: Sequence[float]
    ) -> bool:
        _, connections = self._linked()
        if step.idle:
            self._buckets.drop()
            loss = 0.0
        losses: list[float] = []
        if self._parts is None:
            flat, used = self._buckets.packed()
            connections.sum(flat)
        else:
            flat = self._parts.sum(connections.sum)
            used, losses, loss = self._parts.used, self._parts.losses, 0.0
        used = used or [0.0] * len(self._parameters)
        # Only who has all sums votes, so a full count says that everybody has them.
        vote = torch.tensor(
            [1.0 if good else 0.0, loss, *values, *used, *losses],
            dtype=torch.float64,
            device=self._device,
        )
        connections.sum([vote])
        numbers = vote.tolist()
        assert self._found is not None
        if round(numbers[_GOOD]) != self._found.count:
            self._refusals += 1
            if self._refusals >= _REFUSALS:
                raise DataCorruptionError(
                    f"step {step.number} was refused {_REFUSALS} times in a row by a group that "
                    "does not trust its gradients; look at that group's device"
                )
            return False
        self._refusals = 0
        self._buckets.unpack(flat, numbers[2 + len(values) :])
        each = numbers[len(numbers) - len(losses) :]
        step.loss, step.sums = sum(each, numbers[_LOSS]), numbers[2 : 2 + len(values)]
        return True


def _refuse_running_statistics(models: list[nn.Module]) -> None:
    for model in models:
        for name, module in model.named_modules():
            if getattr(module, "track_running_stats", False):
                raise RecoverError(
                    f"parts: {name or 'the model'} keeps running statistics of the samples that "
                    "its own group has seen, which depend on deaths; leave parts out, or use "
                    "another normalisation"
                )
