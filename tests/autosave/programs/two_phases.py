"""One training after the other, each in a function of its own; the second with a new optimizer."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU())
        self.decoder = nn.Linear(10, 6)

    def forward(self, x):
        return self.decoder(self.body(x))


def pretrain(model, loader):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        for x, _ in loader:
            loss = nn.functional.mse_loss(model(x + 0.1 * torch.randn_like(x)), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def finetune(model, loader, epochs):
    head = nn.Linear(10, 2)
    for parameter in model.body[0].parameters():
        parameter.requires_grad = False
    groups = [
        {"params": [each for each in model.body.parameters() if each.requires_grad], "lr": 1e-3},
        {"params": head.parameters(), "lr": 1e-2},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for x, y in loader:
            loss = nn.functional.cross_entropy(head(model.body(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total)
    return head, losses


def main():
    torch.manual_seed(10)
    data = TensorDataset(torch.randn(40, 6), torch.randint(0, 2, (40,)))
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model = Network()
    reached = pretrain(model, loader)
    head, losses = finetune(model, loader, epochs=3)
    torch.save([model.state_dict(), head.state_dict(), reached, losses], sys.argv[1])


if __name__ == "__main__":
    main()
