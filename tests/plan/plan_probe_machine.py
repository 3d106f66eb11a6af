"""A machine of processors that probes can be run on without running anything."""

from pathlib import Path

import numpy as np

from outlast.errors import PlanError
from outlast.plan.cluster import divided
from outlast.plan.cluster_file import read_cluster
from outlast.plan.constants import constants
from outlast.plan.probes import Probe, Rates, machine_text, numbers_of
from outlast.plan.rows import Row
from outlast.plan.step_time import step_seconds

RATES = Rates(
    matmul_flop_per_s={"fp32": 3.3e11, "bf16": 1.2e12},
    memory_bytes_per_s=2.5e10,
    link_bytes_per_s=2.5e9,
    threads=2,
)
MACHINE = read_cluster(machine_text(RATES))
TRUTH = {
    "matmul_efficiency": 0.6,
    "matmul_half_side": 500.0,
    "memory_efficiency": 0.4,
    "kernel_seconds": 6e-5,
    "fast_efficiency": 0.2,
    "collective_seconds": 2e-4,
    "gather_exposed": 0.8,
    "step_seconds": 0.004,
}
START_SECONDS = 8.0


class Simulated:
    """Steps as the model has them with other constants than the priors', and a little noise."""

    nowhere = Path("does-not-exist")

    def __init__(self, *, failing=False):
        self.failing = failing
        self.spent_seconds = 0.0
        self.noise = np.random.default_rng(1)

    def step_seconds(self, setting):
        return float(step_seconds(numbers_of([setting], MACHINE), constants(TRUTH))[0])

    def run(self, setting, cluster, folder, steps, timeout_seconds):
        del folder
        step = self.step_seconds(setting)
        seconds = START_SECONDS + steps * step
        if self.failing or seconds > timeout_seconds:
            raise PlanError(f"probe {setting.name} does not run here")
        self.spent_seconds += seconds
        row = Row(
            name=setting.name,
            model=setting.model,
            run=setting.run,
            cluster=divided(cluster, setting.run.devices),
            source=cluster.name,
            framework="outlast",
            step_seconds=step * float(np.exp(0.02 * self.noise.normal())),
        )
        return Probe(setting, row, seconds, steps)
