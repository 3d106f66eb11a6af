"""Worker processes that shuffle, read and augment at random."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self):
        self.images = torch.arange(48.0).reshape(48, 1) / 48.0

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return self.images[index] + 0.1 * torch.randn(4), index % 3


def main():
    torch.manual_seed(12)
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    order = []
    for _ in range(3):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            order.append(labels.tolist())
    torch.save([model.state_dict(), order], sys.argv[1])


if __name__ == "__main__":
    main()
