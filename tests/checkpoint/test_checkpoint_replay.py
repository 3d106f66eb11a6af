"""Replay logs: every step done survives a kill, bit for bit, or the restore says where it ends."""

import argparse
import inspect
import os
import shutil
import signal
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_states import Holder, Sampler, bits, open_store
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from outlast.checkpoint import Bound, CheckpointStore, Reduction, SaveResult
from outlast.checkpoint.encoder import Encoder, PartJob, Written
from outlast.checkpoint.manifest import REPLAY, STATE
from outlast.checkpoint.restore import ReplayLog
from outlast.errors import CheckpointError

Group = Callable[[int], Callable[..., list[Any]]]
State = dict[str, Any]

VOCABULARY, WIDTH = 13, 10
EVERY = 4


class Net(nn.Module):
    """Tied head, BatchNorm, a frozen layer, a teacher that is moved by hand, an unused layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.rand(500) > 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.hidden:
            hidden = hidden + torch.tanh(layer(hidden))
        hidden = self.norm(hidden.flatten(0, 1)) + self.teacher(self.frozen(hidden.flatten(0, 1)))
        return self.head(hidden)


def adamw(model: nn.Module, **settings: Any) -> list[torch.optim.Optimizer]:
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
    return [torch.optim.AdamW(groups, lr=0.01, **settings)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [layer.weight for layer in model.hidden]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


RECIPES: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "adamw": adamw,
    "adamw-foreach": lambda model: adamw(model, foreach=True),
    "adamw-single": lambda model: adamw(model, foreach=False),
    "adamw-fused": lambda model: adamw(model, fused=True),
    "adamw-tensor-rate": lambda model: [
        torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), amsgrad=True, foreach=False)
    ],
    "sgd": lambda model: [
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True)
    ],
    "adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.02)],
    "muon": muon,
}


def make_state(recipe: str = "adamw", seed: int = 0) -> State:
    model = Net(seed)
    optimizers = RECIPES[recipe](model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizers[-1], lambda step: 1 / (1 + step))
    return {"model": model, "optimizer": optimizers, "data": Sampler(), "schedule": schedule}


def all_bits(state: State) -> State:
    return {**bits(state), "schedule": repr(state["schedule"].state_dict())}


def backward(state: State, step: int) -> None:
    """One batch of its own for each step; clipped gradients."""
    for optimizer in state["optimizer"]:
        optimizer.zero_grad()
    state["data"].advance(step)
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (4, 3), generator=generator)
    loss = nn.functional.cross_entropy(state["model"](tokens), tokens.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
    with torch.no_grad():
        state["model"].teacher.weight.lerp_(state["model"].hidden[0].weight, 0.1)


def train(
    store: CheckpointStore,
    state: State,
    first: int,
    last: int,
    *,
    every: int = EVERY,
    seen: dict[int, Any] | None = None,
    **settings: Any,
) -> dict[int, SaveResult]:
    """Steps `first` to `last`, all logged; returns how the logs went."""
    replay = ReplayLog(store, state, **settings)
    found = {}
    for step in range(first, last + 1):
        backward(state, step)
        found[step] = replay.step(step, then=state["schedule"].step)
        if seen is not None:
            seen[step] = all_bits(state)
        if every and step % every == 0:
            store.save_async(step, state)
    return {step: handle.result() for step, handle in found.items()}


def trained(directory: Path, last: int, recipe: str = "adamw", **settings: Any) -> State:
    state = make_state(recipe)
    with open_store(directory) as store:
        train(store, state, 1, last, **settings)
    return state


def uninterrupted(directory: Path, last: int, recipe: str = "adamw", **settings: Any) -> Any:
    """The bits after every step of a training that writes nothing."""
    seen: dict[int, Any] = {}
    trained(directory / "uninterrupted", last, recipe, every=0, seen=seen, **settings)
    return seen


def restored_from(directory: Path, recipe: str = "adamw", **settings: Any) -> tuple[State, Any]:
    state = make_state(recipe, seed=1)
    with open_store(directory) as store:
        return state, store.restore(state, **settings)


def log_folder(directory: Path, step: int) -> Path:
    [path] = (directory / "replay").glob(f"step-{step:08d}-a*")
    return path


def logged_steps(directory: Path) -> list[int]:
    return sorted(int(path.name[5:13]) for path in (directory / "replay").glob("step-*"))


@pytest.mark.parametrize("gradient", ["bf16", "exact"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_step_comes_back_bit_for_bit(recipe: str, gradient: str, tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path, 10, recipe, gradient=gradient)
    trained(tmp_path, 7, recipe, gradient=gradient)
    state = make_state(recipe, seed=1)
    with open_store(tmp_path) as store:
        restored = store.restore(state)
        assert restored is not None
        assert (restored.step, restored.skipped) == (7, [])
        assert all_bits(state) == expected[7]
        assert all(each.grad is None for each in state["model"].parameters())
        logs = train(store, state, 8, 10, gradient=gradient)
    assert all_bits(state) == expected[10]
    assert "no version of this state" in logs[8].skipped
    assert [logs[step].skipped for step in (9, 10)] == ["", ""]
    state, restored = restored_from(tmp_path, recipe)
    assert restored.step == 10
    assert all_bits(state) == expected[10]


def test_rounding_is_the_only_change_of_the_training(tmp_path: Path) -> None:
    plain = make_state()
    for step in range(1, 7):
        backward(plain, step)
        for optimizer in plain["optimizer"]:
            optimizer.step()
        plain["schedule"].step()
    assert all_bits(trained(tmp_path / "exact", 6, gradient="exact")) == all_bits(plain)
    rounded = trained(tmp_path / "bf16", 6)
    assert all_bits(rounded) != all_bits(plain)
    gradients = [each.grad for each in rounded["model"].parameters() if each.grad is not None]
    assert all(torch.equal(each, each.bfloat16().float()) for each in gradients)
    # It does not depend on whether logs can be written.
    assert uninterrupted(tmp_path, 6)[6] == all_bits(rounded)


def train_and_die(directory: Path, last: int) -> None:
    store = open_store(directory)
    state = make_state()
    replay = ReplayLog(store, state)
    store.save(0, state)
    for step in range(1, last + 1):
        backward(state, step)
        replay.step(step, then=state["schedule"].step)
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % EVERY == 0:
            store.save_async(step, state)


@pytest.mark.distributed
def test_a_kill_after_any_step_loses_at_most_the_log_under_way(tmp_path: Path) -> None:
    end = 10
    expected = uninterrupted(tmp_path, end)
    for last in range(1, end):
        place = tmp_path / str(last)
        process = get_context("fork").Process(target=train_and_die, args=(place, last))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        state = make_state(seed=1)
        with open_store(place) as store:
            restored = store.restore(state)
            assert restored is not None
            assert all("still under way" in each for each in restored.skipped)
            assert restored.step in (last - 1, last)
            assert restored.step == 0 or all_bits(state) == expected[restored.step]
            train(store, state, restored.step + 1, end)
        assert all_bits(state) == expected[end]


def text_batches(steps: int) -> torch.Tensor:
    """(steps, 4, 65) bytes of the standard library's own source text."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    return text[: steps * 4 * 65].reshape(steps, 4, 65)


class TextModel(nn.Module):
    """A byte-level transformer of 1.7 million parameters."""

    def __init__(self, width: int = 256, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


@pytest.mark.slow
def test_a_log_is_at_most_a_ninth_of_the_state(tmp_path: Path) -> None:
    model = TextModel()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
    steps, sizes = 32, []
    with open_store(tmp_path) as store:
        replay = ReplayLog(store, state)
        store.save_async(0, state)
        for step, batch in enumerate(text_batches(steps), 1):
            state["optimizer"].zero_grad()
            logits = model(batch[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            handle = replay.step(step)
            if step > steps - 4:
                sizes.append(handle.wait().bytes)
    expected = [each.clone() for each in model.parameters()]
    raw_bytes = 3 * sum(each.nbytes for each in expected)
    assert raw_bytes / max(sizes) >= 9.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with open_store(tmp_path) as store:
        restored = store.restore(state)
    assert restored is not None
    assert restored.step == steps
    assert all(map(torch.equal, model.parameters(), expected))


def fail_writes(monkeypatch: pytest.MonkeyPatch, kind: str, failing_step: int) -> None:
    write = Encoder.write

    def failing(encoder: Encoder, job: PartJob, check: Callable[[], None]) -> Written:
        if job.kind == kind and job.version.step == failing_step:
            raise OSError(28, "No space left on device")
        return write(encoder, job, check)

    monkeypatch.setattr(Encoder, "write", failing)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_pack(directory: Path, step: int) -> None:
    flip(log_folder(directory, step) / "rank-00000-of-00001.pack")


def damage_manifest(directory: Path, step: int) -> None:
    flip(log_folder(directory, step) / "rank-00000-of-00001.json")


def remove_log(directory: Path, step: int) -> None:
    shutil.rmtree(log_folder(directory, step))


def cut_log_short(directory: Path, step: int) -> None:
    for name in ("version.json", "rank-00000-of-00001.json"):
        (log_folder(directory, step) / name).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_pack, ["step 6 could not be replayed", "checksum"]),
        (damage_manifest, ["step 6 could not be replayed", "is damaged"]),
        (remove_log, ["logs of step 7", "that of step 6 is missing"]),
        (cut_log_short, ["logs of steps 6 to 7", "that of step 6 is incomplete"]),
    ],
)
def test_a_damaged_or_missing_log_ends_the_replay_before_it(
    damage: Callable[[Path, int], None], words: list[str], tmp_path: Path
) -> None:
    expected = uninterrupted(tmp_path, 7)
    trained(tmp_path, 7)
    damage(tmp_path, 6)
    state, restored = restored_from(tmp_path)
    assert restored.step == 5
    assert all_bits(state) == expected[5]
    [sentence] = restored.skipped
    assert all(word in sentence for word in words)


def test_a_log_that_was_cut_short_is_no_word_worth(tmp_path: Path) -> None:
    trained(tmp_path, 7)
    cut_log_short(tmp_path, 7)
    _, restored = restored_from(tmp_path)
    assert (restored.step, restored.skipped) == (6, [])


def test_a_gradient_that_was_changed_before_it_was_written_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_async = CheckpointStore.log_async

    def tampered(store: CheckpointStore, step: int, log: Any, *, base: int) -> Any:
        if step == 7:
            log.tensors["gradient.hidden.0.weight"].view(-1)[3] += 2**-7
        return log_async(store, step, log, base=base)

    monkeypatch.setattr(CheckpointStore, "log_async", tampered)
    expected = uninterrupted(tmp_path, 8)
    trained(tmp_path, 8, every=5)
    state, restored = restored_from(tmp_path)
    assert restored.step == 6
    assert all_bits(state) == expected[6]
    assert "hidden.0.weight" in restored.skipped[0]
    assert "and 2 more than in training" in restored.skipped[0]


class OtherKernel(torch.optim.AdamW):
    """Rounds one element of one step differently."""

    wrong_call = 2
    calls = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.calls += 1
        if self.calls == self.wrong_call:
            with torch.no_grad():
                weight = self.param_groups[0]["params"][0]
                weight.view(torch.int32).view(-1)[0] ^= 1


def test_another_kernel_is_found_and_its_steps_are_left_out(tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path, 7)
    trained(tmp_path, 7)
    state = make_state(seed=1)
    state["optimizer"] = [OtherKernel(state["optimizer"][0].param_groups)]
    state["schedule"].optimizer = state["optimizer"][0]
    with open_store(tmp_path) as store:
        restored = store.restore(state)
    assert restored is not None
    assert restored.step == 5
    assert all_bits(state) == expected[5]
    assert (
        "step 6 could not be replayed: it gives other bits of `embedding.weight`"
        in (restored.skipped[0])
    )


class Broken(torch.optim.AdamW):
    """Cannot continue from what was restored."""

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("no kernel for this")


def test_an_optimizer_that_raises_leaves_the_version(tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path, 4)
    trained(tmp_path, 7)
    state = make_state(seed=1)
    state["optimizer"] = [Broken(state["optimizer"][0].param_groups)]
    with open_store(tmp_path) as store:
        restored = store.restore(state)
    assert restored is not None
    assert restored.step == 4
    assert all_bits(state) == expected[4]
    assert "RuntimeError: no kernel for this" in restored.skipped[0]


def test_a_model_alone_gets_the_newest_version_and_one_word(tmp_path: Path) -> None:
    trained(tmp_path, 7)
    with open_store(tmp_path) as store:
        restored = store.restore({"model": Net(1)})
        assert restored is not None
        assert restored.step == 4
        assert restored.skipped == [
            "3 replay logs after step 4 passed over: they need the optimizer"
        ]
        with pytest.raises(CheckpointError, match="need the optimizer"):
            store.restore({"model": Net(1)}, step=6)


def test_any_logged_step_can_be_asked_for(tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path, 7)
    trained(tmp_path, 7)
    for step in (4, 5, 7):
        state, restored = restored_from(tmp_path, step=step)
        assert (restored.step, restored.skipped) == (step, [])
        assert all_bits(state) == expected[step]
    damage_pack(tmp_path, 6)
    for step, words in ((7, "step 6 could not be replayed"), (9, "step = 9 is not in")):
        with pytest.raises(CheckpointError, match=words):
            restored_from(tmp_path, step=step)


def test_after_a_failed_log_the_next_version_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_writes(monkeypatch, REPLAY, 6)
    expected = uninterrupted(tmp_path, 10)
    state = make_state()
    with open_store(tmp_path) as store:
        logs = train(store, state, 1, 10)
    assert "No space left" in (logs[6].error or "")
    assert logs[7].skipped.startswith("the log of step 6 was not written: ")
    assert logs[8].skipped == logs[7].skipped
    assert [logs[step].skipped for step in (5, 9, 10)] == [""] * 3
    state, restored = restored_from(tmp_path)
    assert (restored.step, restored.skipped) == (10, [])
    assert all_bits(state) == expected[10]


def test_a_failed_version_leaves_the_logs_on_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_writes(monkeypatch, STATE, 8)
    expected = uninterrupted(tmp_path, 10)
    with open_store(tmp_path) as store:
        logs = train(store, make_state(), 1, 10)
    assert not any(logs[step].error or logs[step].skipped for step in range(5, 11))
    state, restored = restored_from(tmp_path)
    assert (restored.step, restored.skipped) == (10, [])
    assert all_bits(state) == expected[10]


def test_without_any_version_nothing_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_writes(monkeypatch, STATE, 4)
    state = make_state()
    with open_store(tmp_path) as store:
        replay = ReplayLog(store, state)
        for step in range(1, 5):
            backward(state, step)
            result = replay.step(step).result()
            assert "no version of this state has been saved" in result.skipped
        assert store.save_async(4, state).result().error
        backward(state, 5)
        assert "the version of step 4 was not saved" in replay.step(5).result().skipped
        # A version of something else is no start, nor is one of another step.
        store.save(5, {"model": state["model"]})
        backward(state, 6)
        assert "the version of step 4 was not saved" in replay.step(6).result().skipped
        store.save(60, state)
        backward(state, 7)
        assert replay.step(7).result().skipped
    assert logged_steps(tmp_path) == []


def test_steps_out_of_order_are_not_logged(tmp_path: Path) -> None:
    state = make_state()
    with open_store(tmp_path) as store:
        train(store, state, 1, 6)
        replay = ReplayLog(store, state)
        store.save(7, state)
        backward(state, 8)
        assert not replay.step(8).result().skipped
        store.restore(state, step=4)
        backward(state, 5)
        result = replay.step(5).result()
    assert "step 5 does not follow the step 8" in result.skipped
    _, restored = restored_from(tmp_path)
    assert restored.step == 8


@pytest.mark.parametrize("when_busy", ["wait", "skip", "replace"])
def test_no_log_is_replaced_by_a_newer_one(when_busy: Any, tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path, 7)
    state = make_state()
    with open_store(tmp_path, when_busy=when_busy) as store:
        logs = train(store, state, 1, 7)
    written = [step for step in range(5, 8) if not logs[step].skipped]
    assert written == list(range(5, 5 + len(written))), "after a skipped log there is none"
    assert when_busy == "skip" or len(written) == 3
    state, restored = restored_from(tmp_path)
    assert (restored.step, restored.skipped) == (4 + len(written), [])
    assert all_bits(state) == expected[restored.step]


def test_logs_up_to_the_newest_version_are_deleted(tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path, 15)
    state = make_state()
    with open_store(tmp_path, keep=1) as store:
        replay = ReplayLog(store, state)
        for step in range(1, 16):
            backward(state, step)
            replay.step(step, then=state["schedule"].step)
            if step % EVERY == 0:
                store.save(step, state)
    kept = logged_steps(tmp_path)
    assert kept[-3:] == [13, 14, 15]
    assert kept[0] >= 11
    state, restored = restored_from(tmp_path)
    assert (restored.step, restored.skipped) == (15, [])
    assert all_bits(state) == expected[15]


def test_logs_whose_version_is_damaged_are_of_no_use(tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path, 4)
    trained(tmp_path, 10)
    flip(tmp_path / "step-00000008-a1" / "rank-00000-of-00001.json")
    state, restored = restored_from(tmp_path)
    assert restored.step == 4
    assert all_bits(state) == expected[4]
    damage, unused = restored.skipped
    assert "step-00000008-a1" in damage
    assert "to 10 cannot be used: that of step 5 is missing" in unused


def test_logs_left_over_from_an_earlier_session_are_not_mixed_in(tmp_path: Path) -> None:
    expected = uninterrupted(tmp_path, 6)
    trained(tmp_path, 7)
    for folder in tmp_path.glob("step-*"):
        shutil.rmtree(folder)
    trained(tmp_path, 6)
    state, restored = restored_from(tmp_path)
    assert (restored.step, restored.skipped) == (6, [])
    assert all_bits(state) == expected[6]


def test_logs_never_lose_a_pack_that_they_refer_to(tmp_path: Path) -> None:
    """Objects that stay the same are stored once; that file must outlive its log."""
    model = nn.Linear(2, 2)
    table = Holder({"table": torch.arange(5000)})
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "table": table}
    with open_store(tmp_path, keep=1) as store:
        replay = ReplayLog(store, state)
        for step in range(1, 16):
            model(torch.ones(1, 2)).sum().backward()
            replay.step(step)
            if step % EVERY == 1:
                store.save(step, state)
    expected = model.weight.clone()
    state["table"] = Holder()
    with open_store(tmp_path) as store:
        restored = store.restore(state)
    assert restored is not None
    assert (restored.step, restored.skipped) == (15, [])
    assert torch.equal(state["table"].state["table"], torch.arange(5000))
    assert torch.equal(model.weight, expected)


def test_a_log_without_an_object_of_the_state_is_not_used(tmp_path: Path) -> None:
    state = make_state()
    with open_store(tmp_path) as store:
        replay = ReplayLog(store, {key: state[key] for key in ("model", "optimizer")})
        store.save(0, state)
        backward(state, 1)
        replay.step(1)
    _, restored = restored_from(tmp_path)
    assert restored.step == 0
    assert "it has no `data`; give ReplayLog the whole state" in restored.skipped[0]


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    state = make_state()
    with pytest.raises(CheckpointError, match="needs a module and its optimizers"):
        ReplayLog(open_store(tmp_path), {"model": state["model"]})
    with pytest.raises(CheckpointError, match='gradient = "fp8" must be bf16 or exact'):
        ReplayLog(open_store(tmp_path), state, gradient="fp8")
    lossy = open_store(tmp_path, reduction=Reduction(lossy={"*exp_avg": Bound(relative=0.01)}))
    with pytest.raises(CheckpointError, match="needs exact versions"):
        ReplayLog(lossy, state)
    model = nn.Embedding(5, 2, sparse=True)
    replay = ReplayLog(
        open_store(tmp_path), {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    )
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(CheckpointError, match=r"gradient of `weight` is torch.sparse_coo"):
        replay.step(1)


class Shared(nn.Module):
    """Sizes that three ranks do not share evenly."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen[1] += tokens.numel()
        hidden = self.embedding(tokens)
        for layer in self.hidden:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden).flatten(0, 1)


def shared_state(kind: str, seed: int, recipe: str = "adamw") -> State:
    if kind != "alone":
        dist.init_process_group("gloo")
    model: nn.Module = Shared(seed)
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.hidden:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "replicated":
        model = DistributedDataParallel(model)
    inner = model.module if kind == "replicated" else model
    return {"model": model, "optimizer": RECIPES[recipe](inner)}


def step_together(replay: ReplayLog, state: State, step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (4, 3), generator=generator)
    nn.functional.cross_entropy(state["model"](tokens), tokens.flatten()).backward()
    nn.utils.clip_grad_norm_(state["model"].parameters(), 1.0)
    handle = replay.step(step)
    for optimizer in state["optimizer"]:
        optimizer.zero_grad()
    return handle


def log_together(directory: Path, kind: str, last: int, *recipe: str) -> dict[int, Any]:
    state = shared_state(kind, 0, *recipe)
    store = open_store(directory)
    replay = ReplayLog(store, state)
    store.save_async(0, state)
    seen = {0: bits(state)}
    for step in range(1, last + 1):
        handle = step_together(replay, state, step)
        seen[step] = bits(state)
    assert not handle.wait().skipped
    dist.barrier()
    return seen


def restore_together(directory: Path, kind: str, *recipe: str) -> tuple[int, list[str], Any]:
    state = shared_state(kind, 1, *recipe)
    restored = open_store(directory).restore(state)
    assert restored is not None
    return restored.step, restored.skipped, bits(state)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_logs_of_three_ranks_are_replayed_on_any_number(
    ranks: Group, kind: str, tmp_path: Path
) -> None:
    seen = ranks(3)(log_together, tmp_path, kind, 4)
    assert all(each == seen[0] for each in seen)
    expected = (4, [], seen[0][4])
    assert restore_together(tmp_path, "alone") == expected
    for count in (2, 4):
        for other in ("sharded", "replicated"):
            assert ranks(count)(restore_together, tmp_path, other) == [expected] * count


def log_own_buffers(directory: Path) -> None:
    state = shared_state("replicated", 0)

    def see(module: nn.Module, *_: Any) -> None:
        module.seen[2] = 1 + dist.get_rank()

    state["model"].module.register_forward_hook(see)
    store = open_store(directory)
    replay = ReplayLog(store, state)
    store.save_async(0, state)
    assert not step_together(replay, state, 1).wait().skipped
    dist.barrier()


@pytest.mark.distributed
def test_logs_hold_the_first_ranks_buffers(ranks: Group, tmp_path: Path) -> None:
    ranks(3)(log_own_buffers, tmp_path)
    state = shared_state("alone", 1)
    restored = open_store(tmp_path).restore(state)
    assert restored is not None
    assert (restored.step, int(state["model"].seen[2])) == (1, 1)


@pytest.mark.distributed
def test_sums_that_depend_on_the_sharding_are_never_taken_for_the_same(
    ranks: Group, tmp_path: Path
) -> None:
    """Muon multiplies whole matrices, whose sums the shards split."""
    seen = ranks(3)(log_together, tmp_path, "sharded", 3, "muon")[0]
    same = ranks(3)(restore_together, tmp_path, "sharded", "muon")
    assert same == [(3, [], seen[3])] * 3
    step, skipped, content = restore_together(tmp_path, "alone", "muon")
    assert content == seen[step]
    assert step == 3 or f"step {step + 1} could not be replayed" in skipped[0]


@pytest.mark.distributed
def test_damage_that_one_rank_meets_ends_the_replay_on_all(ranks: Group, tmp_path: Path) -> None:
    [seen, *_] = ranks(3)(log_together, tmp_path, "sharded", 4)
    flip(log_folder(tmp_path, 3) / "rank-00001-of-00003.pack")
    found = ranks(2)(restore_together, tmp_path, "sharded")
    assert found[0] == found[1]
    step, [sentence], content = found[0]
    assert (step, content) == (2, seen[2])
    assert "step 3 could not be replayed" in sentence


def log_with_one_limited(directory: Path) -> list[SaveResult]:
    """Rank 1 cannot write the log of step 2."""
    state = shared_state("sharded", seed=0)
    store = open_store(directory)
    replay = ReplayLog(store, state)
    store.save(0, state)
    write = Encoder.write

    def failing(encoder: Encoder, job: PartJob, check: Callable[[], None]) -> Written:
        if dist.get_rank() == 1 and job.version.step == 2:
            raise OSError(28, "No space left on device")
        return write(encoder, job, check)

    Encoder.write = failing  # type: ignore[method-assign]
    results = [step_together(replay, state, step).result() for step in range(1, 4)]
    store.save(3, state)
    results.append(step_together(replay, state, 4).result())
    dist.barrier()
    return results


@pytest.mark.distributed
def test_a_log_that_one_rank_cannot_write_ends_them_on_all(ranks: Group, tmp_path: Path) -> None:
    for first, failed, later, again in ranks(2)(log_with_one_limited, tmp_path):
        assert first.error is None
        assert "No space left" in failed.error
        assert later.skipped.startswith("the log of step 2 was not written")
        assert (again.error, again.skipped) == (None, "")
    assert restore_together(tmp_path, "alone")[:2] == (4, [])


def log_privately(directory: Path) -> tuple[int, Any, Any]:
    """Group that see only their own files."""
    state = shared_state("sharded", seed=0)
    with open_store(directory, private=True) as store:
        replay = ReplayLog(store, state)
        store.save(0, state)
        for step in range(1, 4):
            step_together(replay, state, step)
    expected = bits(state)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()
    restored = open_store(directory, private=True).restore(state)
    assert restored is not None
    assert restored.skipped == []
    return restored.step, expected, bits(state)


@pytest.mark.distributed
def test_ranks_with_files_of_their_own_replay_together(ranks: Group, tmp_path: Path) -> None:
    for step, expected, found in ranks(2)(log_privately, tmp_path):
        assert step == 3
        assert found == expected
