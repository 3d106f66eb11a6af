"""Two models that train in turns; the critic several times for each step of the generator."""

import random
import sys

import torch
from torch import nn


def noise(count):
    return torch.randn(count, 4)


def main():
    torch.manual_seed(3)
    random.seed(3)
    generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 2))
    critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    g_optimizer = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    c_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    real_data = torch.randn(256, 2) * 0.5 + 1.0
    rows = list(range(256))
    g_losses, c_losses = [], []
    for iteration in range(24):
        for _ in range(3):
            batch = real_data[random.sample(rows, 16)]
            fake = generator(noise(16)).detach()
            c_loss = critic(fake).mean() - critic(batch).mean()
            c_optimizer.zero_grad()
            c_loss.backward()
            c_optimizer.step()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.05, 0.05)
        c_losses.append(c_loss.item())
        g_loss = -critic(generator(noise(16))).mean()
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()
        g_losses.append(g_loss.item())
        if iteration % 8 == 7:
            for group in g_optimizer.param_groups:
                group["lr"] *= 0.5
    torch.save([generator.state_dict(), critic.state_dict(), g_losses, c_losses], sys.argv[1])


main()
