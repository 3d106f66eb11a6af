"""One worker's row of an encoding matrix, as weights of losses.

The gradient of sum_c B[w, c] loss_c is worker w's message: to encode costs neither memory nor time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from outlast.errors import CodingError

if TYPE_CHECKING:
    from outlast.coding.code import GradientCode


class LossWeights:
    """What one worker computes, with the coefficients.

    Args:
        code: A code with real coefficients.
        worker: The worker's number.

    Attributes:
        coefficients: B[w, c] by chunk c, for the chunks of this worker in ascending order.

    Raises:
        CodingError: For a complex code, or a worker that the code does not have.
    """

    def __init__(self, code: GradientCode, worker: int) -> None:
        if np.iscomplexobj(code.matrix.data):
            raise CodingError(
                f"{code.name} has complex coefficients, which losses cannot be multiplied by; "
                "take a real code with the same tolerance, such as cyclic MDS"
            )
        if not 0 <= worker < code.workers:
            raise CodingError(
                f"worker = {worker} is not in [0, {code.workers}), the code's workers"
            )
        self.code = code
        self.worker = worker
        start, stop = code.matrix.indptr[worker : worker + 2]
        chunks = code.matrix.indices[start:stop].tolist()
        values = code.matrix.data[start:stop].tolist()
        self.coefficients: dict[int, float] = dict(sorted(zip(chunks, values, strict=True)))

    def of_samples(
        self, chunk_of_sample: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """What to multiply each sample's loss by, where one batch holds all of a worker's chunks.

        Args:
            chunk_of_sample: (samples,) integers, the chunk that each sample belongs to.
            dtype: Of the result.

        Returns:
            (samples,) weights on the same device.

        Raises:
            CodingError: For a chunk that is not this worker's.
        """
        foreign = set(chunk_of_sample.tolist()) - self.coefficients.keys()
        if foreign:
            raise CodingError(
                f"worker {self.worker} was given samples of chunks {sorted(foreign)}, but its "
                f"chunks are {list(self.coefficients)}"
            )
        table = torch.zeros(self.code.chunks, dtype=dtype)
        for chunk, coefficient in self.coefficients.items():
            table[chunk] = coefficient
        return table.to(chunk_of_sample.device)[chunk_of_sample.long()]
