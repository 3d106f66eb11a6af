"""Generators of the program: batches drawn from a permutation, cycled without end."""

import itertools
import sys

import torch
from torch import nn


def batches(data, size):
    for rows in torch.randperm(len(data)).split(size):
        yield data[rows]


def cycle(data, size):
    while True:
        yield from batches(data, size)


def main():
    torch.manual_seed(5)
    data = torch.randn(30, 4)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, nesterov=True)
    total = torch.zeros(())
    for step, batch in enumerate(itertools.islice(cycle(data, 7), 33)):
        loss = (model(batch + 0.1 * torch.randn_like(batch)) - batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * (step + 1)
    torch.save([model.state_dict(), total], sys.argv[1])


if __name__ == "__main__":
    main()
