"""No optimizer: the weights are changed by hand, with a momentum of the program's own."""

import sys

import torch

torch.manual_seed(9)
weights = [torch.randn(4, 8, requires_grad=True), torch.randn(8, 1, requires_grad=True)]
velocity = [torch.zeros_like(each) for each in weights]
inputs, targets = torch.randn(64, 4), torch.randn(64, 1)
rate = 0.01
for step in range(40):
    rows = torch.randint(0, 64, (8,))
    loss = (torch.relu(inputs[rows] @ weights[0]) @ weights[1] - targets[rows]).square().mean()
    loss.backward()
    with torch.no_grad():
        for weight, speed in zip(weights, velocity):
            speed.mul_(0.9).sub_(weight.grad, alpha=rate)
            weight.add_(speed)
            weight.grad = None
    if step % 10 == 9:
        rate *= 0.5
torch.save([weights, velocity, rate], sys.argv[1])
