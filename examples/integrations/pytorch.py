"""A hand-written training loop with all of Outlast beside it.

    python pytorch.py                                    # trains; after a kill, continues
    python pytorch.py checkpoint.every_steps=20 guard.policy=linear
    outlast report runs/bytes

Five lines are Outlast's: the import, the `with`, the loop's loader, and what the records are told.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import outlast

LENGTH, WIDTH, BYTES = 32, 64, 256


class NextByte(nn.Module):
    """Logits of the byte after each byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, length) bytes to (batch, length, 256) logits."""
        return self.head(self.memory(self.embedding(text))[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", nargs="*", help="settings as section.key=value")
    parser.add_argument("--steps", type=int, help="how many steps; default: three epochs")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    # Any text: here that of the standard library's argparse.
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    samples = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    loader = DataLoader(TensorDataset(samples), batch_size=32, shuffle=True)
    model = NextByte()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100, gamma=0.5)

    with outlast.Run(
        "runs/bytes",
        model=model,
        optimizer=optimizer,
        loader=loader,
        epochs=3,
        steps=arguments.steps,
        state={"schedule": schedule},
        settings=arguments.settings,
        tokens_per_step=32 * (LENGTH - 1),
    ) as run:
        print(f"{run.step} steps are done", flush=True)
        for (batch,) in run:
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            run.log(loss, gradient_norm=norm)
    print(f"{run.step} steps are done; see {run.directory}")


if __name__ == "__main__":
    main()
