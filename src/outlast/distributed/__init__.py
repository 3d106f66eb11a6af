"""Identity of this process among the others, and agreement between ranks.

`Ranks` and `join` are of the launch (torchrun, Slurm, one process), `Group` of the agreement:
`gather`, `any`, `raise_together`, `from_first`.
"""
