"""Data-parallel training that does not wait for a slow process.

Run it on 4 processes:

    torchrun --nproc-per-node=4 --standalone examples/coverage.py

Rank 3 is made ten times slower than the others on purpose. Every process owns 8 micro-batches of a
step; the others take over most of those of rank 3, and the gradient stays exact.
"""

import time

import torch
import torch.distributed as dist
from torch import nn

from outlast.coding.protocol import Coverage

STEPS, CHUNKS, SAMPLES = 5, 8, 16
CHUNK_SECONDS = 0.02


class Slow(nn.Module):
    """Takes time, as a layer of a real model would."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Hands on x, later."""
        time.sleep(self.seconds)
        return x


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank = dist.get_rank()
    seconds = CHUNK_SECONDS / 4 * (10 if rank == 3 else 1)
    layers = [nn.Sequential(Slow(seconds), nn.Linear(32, 32), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    coverage = Coverage(model, chunks_per_rank=CHUNKS)

    def loss_of(step: int, chunk: int) -> torch.Tensor:
        # Any process must be able to compute any chunk: its data depend on its number alone.
        x = torch.randn(SAMPLES, 32, generator=torch.Generator().manual_seed(1000 * step + chunk))
        return (model(x) - x.roll(1, dims=1)).square().mean() / coverage.chunks

    waiting = CHUNKS * CHUNK_SECONDS * 10
    for step in range(STEPS):
        outcome = coverage.step(step, lambda chunk, step=step: loss_of(step, chunk))
        optimizer.step()
        optimizer.zero_grad()
        loss = outcome.loss.clone()
        dist.all_reduce(loss)
        if rank == 0:
            exact = "exact" if outcome.certificate.exact else f"{outcome.certificate.error:.2g}"
            print(
                f"step {step}: loss {loss:.4f}, {outcome.seconds:.2f} s (waiting for rank 3: "
                f"{waiting:.1f} s), gradient {exact}, rank 0 took over {outcome.taken_over} chunks"
            )
    coverage.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
