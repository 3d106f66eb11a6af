"""A torchx component: torchx run -s kubernetes train_torchx.py:train --job job.toml --nproc 8.

torchx knows one number of retries for all exit codes but 0. After 3 (saved, to be continued) and
after a crash the same command continues; after 2, 4, 5 or 6 it ends at once with the same code
until the retries are used up, and no step is lost or done twice.
"""

from torchx import specs


def train(  # noqa: PLR0917 - as torchx reads components
    job: str = "job.toml",
    image: str = "registry.example.com/team/train:latest",
    nproc: int = 8,
    gpu: int = 8,
    cpu: int = 96,
    memory_gib: int = 900,
    retries: int = 100,
) -> specs.AppDef:
    """One training run on one node, started again until it is done.

    Args:
        job: The job file.
        image: With Outlast in it.
        nproc: Processes.
        gpu: GPUs of the node.
        cpu: CPUs of the node.
        memory_gib: Memory of the node.
        retries: How often it is started again, whatever the reason.
    """
    role = specs.Role(
        name="train",
        image=image,
        # Not under torchrun (dist.ddp), which would turn exit code 3 into 1 and give 30 s to save.
        entrypoint="outlast",
        args=["train", job, "--nproc", str(nproc)],
        max_retries=retries,
        retry_policy=specs.RetryPolicy.APPLICATION,
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=1024 * memory_gib),
    )
    return specs.AppDef(name="train", roles=[role])
