"""Gradient accumulation over micro-batches that do not divide the epoch; autocast and a scaler."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 4


def main(out):
    torch.manual_seed(2)
    loader = DataLoader(
        TensorDataset(torch.randn(54, 10), torch.randn(54, 1)), batch_size=5, shuffle=True
    )
    model = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    updates = 0
    for epoch in range(4):
        for i, (x, y) in enumerate(loader, start=1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
            scaler.scale(loss).backward()
            if i % ACCUMULATE == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                updates += 1
    torch.save(
        {"model": model.state_dict(), "scaler": scaler.state_dict(), "updates": updates}, out
    )


if __name__ == "__main__":
    main(sys.argv[1])
