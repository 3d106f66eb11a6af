"""Epochs and batches, a function per epoch, batch norm, dropout, a schedule."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_epoch(model, loader, optimizer, criterion):
    model.train()
    running_loss = 0.0
    correct = 0
    for _, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        running_loss += loss.item() * inputs.size(0)
        correct += (outputs.argmax(1) == targets).sum().item()
    return running_loss / len(loader.dataset), correct / len(loader.dataset)


@torch.no_grad()
def evaluate(model, loader, criterion):
    model.eval()
    return sum(criterion(model(x), y).item() for x, y in loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    torch.manual_seed(0)
    features, labels = torch.randn(64, 8), torch.randint(0, 3, (64,))
    train = DataLoader(TensorDataset(features[:48], labels[:48]), batch_size=6, shuffle=True)
    test = DataLoader(TensorDataset(features[48:], labels[48:]), batch_size=8)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    best, history = float("inf"), []
    for epoch in range(args.epochs):
        loss, accuracy = train_epoch(model, train, optimizer, criterion)
        validation = evaluate(model, test, criterion)
        scheduler.step()
        history.append({"epoch": epoch, "loss": loss, "accuracy": accuracy})
        if validation < best:
            best = validation
            best_weights = {name: each.clone() for name, each in model.state_dict().items()}
    torch.save({"model": model.state_dict(), "best": best_weights, "history": history}, args.out)


if __name__ == "__main__":
    main()
