"""The model of `split_files.py`; counts its calls in a global variable."""

from torch import nn

calls = 0


class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        global calls
        calls += 1
        for layer in self.layers:
            x = layer(x).relu() + x
        return self.norm(x)
