"""Learning from a buffer that the loop itself fills, with an environment that has a state."""

import random
import sys
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn


@dataclass
class Walk:
    place: float = 0.0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(15))

    def step(self, action):
        self.place += (1.0 if action else -1.0) + self.random.normal(scale=0.1)
        done = abs(self.place) > 4.0
        reward = -abs(self.place)
        if done:
            self.place = 0.0
        return self.place, reward, done


def main():
    random.seed(15)
    torch.manual_seed(15)
    environment = Walk()
    buffer = deque(maxlen=64)
    online, target = nn.Linear(1, 2), nn.Linear(1, 2)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=0.01)
    epsilon, place, episodes = 1.0, 0.0, 0
    for step in range(80):
        if random.random() < epsilon:
            action = random.randrange(2)
        else:
            action = int(online(torch.tensor([place])).argmax())
        following, reward, done = environment.step(action)
        buffer.append((place, action, reward, following, done))
        place = following
        episodes += done
        if len(buffer) < 16:
            continue
        places, actions, rewards, nexts, ends = map(
            torch.tensor, zip(*random.sample(buffer, 8), strict=True)
        )
        with torch.no_grad():
            best = target(nexts.float()[:, None]).max(1).values
            wanted = rewards.float() + 0.9 * best * ~ends
        value = online(places.float()[:, None]).gather(1, actions[:, None]).squeeze(1)
        loss = nn.functional.huber_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epsilon *= 0.97
        if step % 10 == 0:
            target.load_state_dict(online.state_dict())
    torch.save([online.state_dict(), target.state_dict(), list(buffer), episodes], sys.argv[1])


if __name__ == "__main__":
    main()
