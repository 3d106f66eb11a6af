"""A layer whose sizes are worked out by SymPy, which fills its caches while the program trains."""

import sys

import sympy
import torch
from torch import nn

x = sympy.Symbol("x", positive=True, integer=True)


def width(step):
    """The positive solution of an equation that is another one in each step."""
    return int(max(sympy.solve(x**2 - (step % 5 + 2) ** 2, x)))


def main(out):
    torch.manual_seed(5)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    widths = []
    for step in range(30):
        widths.append(width(step))
        data = torch.randn(4, 8)
        loss = (model(data)[:, : widths[-1]] - data[:, : widths[-1]]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "widths": widths}, out)


if __name__ == "__main__":
    main(sys.argv[1])
