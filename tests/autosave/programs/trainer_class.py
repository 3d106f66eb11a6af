"""A trainer object with a fit method, methods per epoch and step, and callbacks."""

import sys
from collections import defaultdict

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Points(Dataset):
    def __init__(self, count):
        generator = np.random.default_rng(4)
        self.x = generator.normal(size=(count, 5)).astype(np.float32)
        self.y = self.x.sum(1, keepdims=True).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] + np.random.normal(scale=0.01, size=5).astype(np.float32), self.y[
            index
        ]


class Trainer:
    def __init__(self, model, loader, epochs):
        self.model = model
        self.loader = loader
        self.epochs = epochs
        self.optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, 0.02, total_steps=epochs * len(loader)
        )
        self.metrics = defaultdict(list)
        self.global_step = 0
        self.callbacks = [self.record]

    def record(self, loss):
        self.metrics["loss"].append(loss)
        self.metrics["rate"].append(self.scheduler.get_last_lr()[0])

    def training_step(self, batch):
        x, y = batch
        loss = nn.functional.smooth_l1_loss(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def train_epoch(self):
        for batch in self.loader:
            loss = self.training_step(batch)
            self.global_step += 1
            for callback in self.callbacks:
                callback(loss)

    def fit(self):
        for self.epoch in range(self.epochs):
            self.train_epoch()
        return self


def main():
    np.random.seed(4)
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 1))
    loader = DataLoader(Points(42), batch_size=6, shuffle=True, drop_last=True)
    trainer = Trainer(model, loader, epochs=4).fit()
    torch.save([model.state_dict(), dict(trainer.metrics), trainer.global_step], sys.argv[1])


if __name__ == "__main__":
    main()
