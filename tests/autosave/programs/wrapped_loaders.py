"""Two loaders side by side under a progress bar; one of them has a generator of its own."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from tqdm import tqdm


def main():
    torch.manual_seed(11)
    own = torch.Generator().manual_seed(99)
    labelled = DataLoader(
        TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), 8, shuffle=True, generator=own
    )
    free = TensorDataset(torch.randn(64, 4))
    sampler = WeightedRandomSampler(torch.rand(64), 40)
    unlabelled = DataLoader(free, batch_size=8, sampler=sampler)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
    for epoch in range(6):
        bar = tqdm(zip(labelled, unlabelled), total=len(labelled), desc=f"epoch {epoch}")
        for (x, y), (u,) in bar:
            consistency = (model(u) - model(u)).square().mean()
            loss = nn.functional.mse_loss(model(x), y) + consistency
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.3f}")
    torch.save([model.state_dict(), own.get_state()], sys.argv[1])


if __name__ == "__main__":
    main()
