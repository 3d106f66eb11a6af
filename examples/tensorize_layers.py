"""A transformer whose linear layers have a quarter of the rank.

Run it: python examples/tensorize_layers.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outlast.tensorize import account, tensorize


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, vocab_size=512
    )
    model = LlamaForCausalLM(config)
    tokens = torch.randint(512, (8, 64))

    def loss_of_model() -> torch.Tensor:
        return model(tokens, labels=tokens).loss

    print(account(model, loss_of_model, tokens=tokens.numel()))
    print(tensorize(model, form="cola", rank=0.25, match="model.layers.*", tokens=tokens.numel()))
    print(account(model, loss_of_model, tokens=tokens.numel()))

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(10):
        loss = loss_of_model()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
