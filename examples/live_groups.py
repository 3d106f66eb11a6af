"""Two replica groups train together; one is killed, the other continues, and the first comes back.

Run it: python examples/live_groups.py
"""

import multiprocessing
import sys
import time
from multiprocessing.synchronize import Event

import torch
import torchft.process_group  # noqa: F401  (loaded once, for all forks)

from outlast.recover.live import Lighthouse, LiveGroups

STEPS, SAMPLES = 600, 12


def train(group: int, lighthouse: str, returning: bool, reached: Event) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = {"model": model, "optimizer": optimizer}
    with LiveGroups(
        state, group=group, lighthouse=lighthouse, returning=returning, awaits=1 if returning else 2
    ) as groups:
        for step in groups.steps(until=STEPS):
            index, count = step.share
            # The samples of a step are a function of its number, whoever takes them.
            first, last = SAMPLES * index // count, SAMPLES * (index + 1) // count
            inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(step.number))
            mine = inputs[first:last]
            loss = (model(mine) - mine.sum(1, keepdim=True).sin()).square().sum() / SAMPLES
            loss.backward()
            if step.commit(loss.detach()):
                optimizer.step()
                if step.number == 100:
                    reached.set()
                if step.number % 100 == 99:
                    print(
                        f"group {group}: step {step.number + 1}, loss {step.loss:.4f}", flush=True
                    )
            optimizer.zero_grad()
            for event in groups.news():
                print(f"group {group}: {event}", flush=True)
            time.sleep(0.01)


def main() -> None:
    # Forked, so that neither group has to import torch again.
    context = multiprocessing.get_context("fork")
    reached = context.Event()

    with Lighthouse(heartbeat_seconds=1.0) as lighthouse:

        def start(group: int, returning: bool = False) -> multiprocessing.Process:
            arguments = (group, lighthouse.address, returning, reached)
            process = context.Process(target=train, args=arguments)
            process.start()
            return process

        groups = [start(0), start(1)]
        reached.wait(timeout=100.0)
        groups[1].kill()
        groups[1].join()
        print("killed group 1", flush=True)
        groups[1] = start(1, returning=True)
        for each in groups:
            each.join()
    sys.exit(max(abs(each.exitcode) for each in groups))


if __name__ == "__main__":
    main()
