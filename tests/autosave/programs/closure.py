"""L-BFGS with a closure that is defined in the loop."""

import sys

import torch
from torch import nn


def main():
    torch.manual_seed(8)
    x, y = torch.randn(30, 3), torch.randn(30, 1)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4, history_size=5)
    calls = 0
    for step in range(14):
        rows = torch.randperm(30)[:20]

        def closure():
            nonlocal calls
            calls += 1
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            loss.backward()
            return loss

        final = optimizer.step(closure)
    torch.save([model.state_dict(), calls, float(final), step], sys.argv[1])


if __name__ == "__main__":
    main()
