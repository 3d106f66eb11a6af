"""Averaged weights by hand and by torch, a counter and a running mean kept as plain attributes."""

import copy
import sys

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset


class Whitened(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.mean = torch.zeros(6)
        self.seen = 0

    def forward(self, x):
        if self.training:
            self.seen += len(x)
            self.mean.lerp_(x.mean(0), 0.1)
        return self.inner(x - self.mean)


def main():
    torch.manual_seed(7)
    loader = DataLoader(TensorDataset(torch.randn(36, 6) + 2.0), batch_size=6, shuffle=True)
    model = nn.Sequential(Whitened(), nn.ReLU(), nn.Linear(6, 6))
    shadow = copy.deepcopy(model).requires_grad_(False)
    average = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    slow = SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    for epoch in range(5):
        for (x,) in loader:
            loss = (model(x) - x).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for mine, theirs in zip(shadow.parameters(), model.parameters(), strict=True):
                    mine.mul_(0.9).add_(theirs, alpha=0.1)
        if epoch >= 2:
            average.update_parameters(model)
            slow.step()
    first = model[0]
    torch.save(
        [model.state_dict(), shadow.state_dict(), average.state_dict(), first.mean, first.seen],
        sys.argv[1],
    )


if __name__ == "__main__":
    main()
