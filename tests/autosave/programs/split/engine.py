"""The loop of `split_files.py`."""

import torch
from torch import nn

_history = {"loss": []}


def run(model, loader, epochs, on_epoch=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(epochs):
        _run_epoch(model, loader, optimizer)
        if on_epoch is not None:
            on_epoch(epoch, _history)
    return _history


def _run_epoch(model, loader, optimizer):
    for index, (x, y) in enumerate(loader):
        if index == 0:
            _history["loss"].append(0.0)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        _history["loss"][-1] += loss.item()
