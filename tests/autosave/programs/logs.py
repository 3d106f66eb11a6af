"""Logs beside the run: one appended to, a table written anew, and the best weights on disk."""

import csv
import logging
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logger = logging.getLogger("training")


def main():
    out = Path(sys.argv[1])
    handler = logging.FileHandler(out.with_suffix(".log"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    table_file = open(out.with_suffix(".csv"), "w", newline="")
    table = csv.writer(table_file)
    table.writerow(["step", "loss"])
    torch.manual_seed(13)
    loader = DataLoader(TensorDataset(torch.randn(40, 3)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = float("inf")
    step = 0
    with open(out.with_suffix(".txt"), "a") as lines:
        for epoch in range(5):
            epoch_loss = 0.0
            for (x,) in loader:
                loss = nn.functional.mse_loss(model(x), x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                epoch_loss += loss.item()
                table.writerow([step, loss.item()])
                print(step, loss.item(), file=lines)
            logger.info("epoch %d: %.6f", epoch, epoch_loss)
            if epoch_loss < best:
                best = epoch_loss
                torch.save(model.state_dict(), out.with_suffix(".best"))
    table_file.close()
    torch.save([model.state_dict(), best], out)


if __name__ == "__main__":
    main()
