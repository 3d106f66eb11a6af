"""Staged cases of the guard: wrong attention that was used, healthy losses, faults in memory.

    python benchmarks/never_guard.py [--steps N]

alone runs the long clean campaign of case 3: N steps (1,000) of classifiers with 2 to 50,000
classes, in bf16, fp16 and fp32, at three widths, and says every alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from harness import Bar, at_most
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from outlast.cli.main import main as outlast
from outlast.errors import DataCorruptionError
from outlast.guard import guard
from outlast.job import load_job, to_toml
from outlast.train.loop import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_TYPES = (torch.bfloat16, torch.float16, torch.float32)

_TINY_JOB = (
    *("train.steps=6", "train.batch_size=4", "data.sequence_length=16", "data.source=text"),
    *("model.settings.hidden_size=32", "model.settings.intermediate_size=64"),
    *("model.settings.num_hidden_layers=2", "model.settings.max_position_embeddings=32"),
    *("optimizer.name=adamw", "data.validation_fraction=0.0", "evaluate.every_steps=0"),
    *("sample.tokens=0", "export.huggingface=false", "checkpoint.every_steps=2"),
    *("checkpoint.writer='thread'", "energy.measure=false", "schedule.warmup_steps=1"),
)


class _Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(32, 32)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (8, -1)).transpose(1, 2)
        query, key, value = heads.split((4, 2, 2), 1)
        o = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self.dropout,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return x + self.out(o.transpose(1, 2).flatten(2))


class _Model(nn.Module):
    def __init__(self, dropout: float, checkpointed: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.blocks = nn.ModuleList(_Block(dropout) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return self.head(x)


def attention() -> Bar:
    """Outputs of attention that change once they are handed on; the step must be run again."""
    wrong = staged = 0
    faults: tuple[Callable[[Tensor], Any], ...] = (
        lambda o: o[1, 2, 5, 3].add_(0.2 * o.abs().max()),
        lambda o: o[0, 1, 3].neg_(),
    )
    plain = functional.scaled_dot_product_attention
    for fault, bf16, dropout, masked, checkpointed in product(
        faults, (False, True), (0.0, 0.1), (False, True), (False, True)
    ):
        runs = []
        for strikes in (False, True):
            struck: list[int] = []
            torch.manual_seed(0)
            model = _Model(dropout, checkpointed)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            handle = guard(model, optimizer, "full")
            checked = functional.scaled_dot_product_attention

            def attend(
                *tensors: Any,
                checked: Any = checked,
                fault: Any = fault,
                struck: list[int] = struck,
                strikes: bool = strikes,
                **options: Any,
            ) -> Tensor:
                o: Tensor = checked(*tensors, **options)
                if strikes and not struck:
                    struck.append(1)
                    fault(o.data)
                return o

            functional.scaled_dot_product_attention = attend
            try:
                for step in range(3):
                    ids = torch.randint(0, 64, (2, 12), generator=_seeded(step))
                    mask = torch.rand(12, 12, generator=_seeded(9)) > 0.3 if masked else None
                    if mask is not None:
                        mask |= torch.eye(12, dtype=torch.bool)
                    for _ in handle.attempts():
                        optimizer.zero_grad()
                        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                            logits = model(ids, mask).flatten(0, 1)
                        functional.cross_entropy(logits.float(), ids.flatten()).backward()
                    optimizer.step()
            finally:
                functional.scaled_dot_product_attention = checked
                handle.remove()
            outcomes = {finding.outcome for finding in handle.ledger.findings}
            runs.append(([each.detach() for each in model.parameters()], outcomes))
        (clean, nothing), (weights, outcomes) = runs
        staged += 1
        same = all(map(torch.equal, clean, weights))
        wrong += bool(nothing) or not same or not outcomes <= {"repeated"} or not outcomes
    assert functional.scaled_dot_product_attention is plain
    where = "GQA, causal and masked, dropout, autocast, activation checkpointing"
    return at_most("attention's output changed, and used", wrong, f"of {staged} runs", 0, where)


def losses() -> Bar:
    """Healthy classifiers: none may be stopped, and no check may fail."""
    wrong = staged = 0
    for classes, dtype, width in product((2, 3, 10, 1000), _TYPES, (16, 64)):
        alarms = campaign(classes, dtype, width, steps=80)
        staged += 1
        wrong += bool(alarms)
    peer = "2, 3, 10 and 1,000 classes, bf16, fp16 and fp32, batches of 4 and 64"
    return at_most("healthy classifier alarmed or stopped", wrong, f"of {staged} runs", 0, peer)


def campaign(classes: int, dtype: torch.dtype, width: int, steps: int) -> list[str]:
    """The alarms of a clean training; a batch has 4 or 64 rows in turn."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, classes)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    teacher = torch.randn(20, classes)
    handle = guard(model, optimizer, "full")
    try:
        for step in range(steps):
            rows = 4 if step % 2 else 64
            x = torch.randn(rows, 20)
            target, x = (x @ teacher).argmax(dim=1), x.to(dtype)
            for _ in handle.attempts():
                optimizer.zero_grad()
                functional.cross_entropy(model(x), target).backward()
            optimizer.step()
    except DataCorruptionError as error:
        return [str(error)]
    finally:
        handle.remove()
    return [str(finding) for finding in handle.ledger.findings]


def memory() -> Bar:
    """Bits that flip in weights and moments at rest: the run ends in the clean bits, or says not.

    A training is struck in memory after a step; a drill at a level that cannot see the fault must
    not end as if all were well.
    """
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "corpus").mkdir()
        for number in range(12):
            text = "".join(f"x{i} = {i % 7} + {number}\n" for i in range(300))
            (place / "corpus" / f"{number}.txt").write_text(text)
        clean, _, _ = _outlast("train", place, "none", "guard.policy=full")
        for what in ("weight", "exp_avg", "exp_avg_sq"):
            weights, code, _ = _outlast("train", place, what, "guard.policy=full")
            wrong += code != 0 or not clean or not all(map(torch.equal, clean, weights))
        fault = ("--faults", "weight.rest:bit=22:step=3")
        _, code, said = _outlast("drill", place, "none", "guard.policy=linear", *fault)
        wrong += code == 0 or "differ from the clean run's" not in said
    return at_most(
        "memory fault left in weights without a word",
        wrong,
        "of 4 runs",
        0,
        "outlast train at level full, struck once; outlast drill at level linear",
    )


def _outlast(
    command: str, place: Path, what: str, *arguments: str
) -> tuple[list[Tensor], int, str]:
    """``outlast`` in this process, with one bit that flips in memory after the third step.

    Returns:
        The last weights, the exit code and what was said.
    """
    plain, struck, last, code = Trainer.step, [], [], 0

    def stepped(self: Trainer, number: int, parts: Any) -> Any:
        result = plain(self, number, parts)
        last[:] = [self]
        if number == 2 and what != "none" and not struck:
            struck.append(number)
            parameter = self.optimizers[0].param_groups[0]["params"][1]
            state = self.optimizers[0].state[parameter]
            numbers = parameter if what == "weight" else state[what]
            numbers.data.view(-1)[5:6].view(torch.int32).bitwise_xor_(1 << 20)
        return result

    file = place / f"{command}-{what}.toml"
    names = (f'run.directory="{place}/runs"', f"run.name={command}-{what}")
    corpus = f'data.train=["{place}/corpus/*.txt"]'
    file.write_text(to_toml(load_job(None, [*_TINY_JOB, *names, corpus])))
    before, sys.argv = sys.argv, ["outlast", command, str(file), *arguments]
    Trainer.step = stepped  # type: ignore[method-assign]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            outlast()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv, Trainer.step = before, plain  # type: ignore[method-assign]
    weights = [each.detach() for each in last[0].model.parameters()] if last else []
    return weights, code, said.getvalue()


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CASES: dict[int, Callable[[], Bar]] = {2: attention, 3: losses, 15: memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    for classes, dtype, width in product((2, 10, 100, 1000, 50_000), _TYPES, (16, 64, 256)):
        alarms = campaign(classes, dtype, width, options.steps)
        print(f"{classes} classes, {dtype}, width {width}: {len(alarms)} alarms {alarms[:2]}")


if __name__ == "__main__":
    main()
