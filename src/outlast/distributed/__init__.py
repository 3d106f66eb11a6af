"""Who this process is among the others, and how ranks agree; on `torch.distributed` alone.

`Ranks` and `join` are of the launch (torchrun, Slurm, one process), `Group` of the agreement:
`gather`, `any`, `raise_together`, `from_first`.
"""
