"""Truncated backpropagation: a hidden state continues from window to window."""

import sys

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.cell = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, 20)
        self.head_scale = torch.ones(())

    def forward(self, tokens, hidden):
        outputs, hidden = self.cell(self.embed(tokens), hidden)
        self.head_scale = 0.9 * self.head_scale + 0.1 * outputs.detach().abs().mean()
        return self.head(outputs) * self.head_scale, hidden


def main():
    torch.manual_seed(6)
    text = torch.randint(0, 20, (3, 161))
    model = Tagger()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for _ in range(2):
        hidden = None
        for start in range(0, 160, 8):
            window = text[:, start : start + 9]
            if hidden is not None:
                hidden = tuple(each.detach() for each in hidden)
            logits, hidden = model(window[:, :-1], hidden)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.save(
        [model.state_dict(), model.head_scale, [each.detach() for each in hidden]], sys.argv[1]
    )


if __name__ == "__main__":
    main()
