"""Seconds in which Muon makes the updates of hidden matrices orthogonal."""

from __future__ import annotations

import numpy as np

from outlast.plan.cases import Array, Cases
from outlast.plan.constants import Constants
from outlast.plan.terms.block import half_side
from outlast.plan.terms.links import all_gather_seconds, group

ITERATIONS = 5.0
"""Of Newton and Schulz, as torch.optim.Muon does by default."""
KERNELS = 15.0
"""Of the update of one matrix."""
SHARDED_KERNELS = 700.0
"""In kernel starts: what dispatching and collectives on a sharded matrix cost the host.

Own prior: 14 ms for a small matrix of two gloo ranks on two cores, 0.4 ms for a whole one."""
_BYTES = 2.0


def orthogonal_seconds(cases: Cases, constants: Constants, blocks: Array) -> Array:
    """Of the matrices of some blocks on one rank, once per step.

    An iteration on a matrix of k rows and l >= k columns multiplies it by its transpose, squares
    the product and multiplies the matrix by the result: `4 k^2 l + 2 k^3` FLOPs, in bf16 whatever
    the run's precision (Jordan et al. 2024, "Muon", section "Newton-Schulz"). Replicas all do it;
    ranks that have shards of the matrices also gather them.

    Args:
        cases: (cases,).
        constants: Efficiencies of products and of memory.
        blocks: (cases,) of the rank.

    Returns:
        (cases,), 0 where another optimizer is used.
    """
    if not (cases.muon > 0.0).any():
        return np.zeros(1)
    hidden = cases.hidden
    plain = _iterations(cases, constants, hidden, cases.query_width) * 2.0
    plain = plain + _iterations(cases, constants, hidden, cases.kv_width) * 2.0
    plain = plain + _gathered(cases, constants, hidden, cases.query_width) * 2.0
    plain = plain + _gathered(cases, constants, hidden, cases.kv_width) * 2.0
    mixture = cases.mixture_layers / cases.layers
    dense = cases.matrices * _iterations(cases, constants, hidden, cases.intermediate)
    # The last matrix of a feed-forward layer is the one with fewer rows than columns.
    dense = dense + _gathered(cases, constants, hidden, cases.intermediate)
    experts = cases.experts * cases.matrices
    routed = experts * _iterations(cases, constants, hidden, cases.expert_intermediate)
    shared = cases.matrices * _iterations(cases, constants, hidden, cases.shared_intermediate)
    own = plain + (1.0 - mixture) * dense + mixture * (routed / cases.expert + shared)
    return np.where(cases.muon > 0.0, blocks * own / cases.tensor, 0.0)


def _gathered(cases: Cases, constants: Constants, rows: Array, columns: Array) -> Array:
    """Of the collectives on one matrix whose rows are divided among ranks; 0 where it is whole.

    A product of two divided matrices wants one of them whole: in each iteration the matrix twice,
    and its square once.
    """
    shard = group(cases, constants, cases.shards, cases.tensor)
    short, long = np.minimum(rows, columns), np.maximum(rows, columns)
    sent = _BYTES * (2.0 * short * long + short**2)
    seconds = ITERATIONS * all_gather_seconds(shard, sent)
    return np.where(cases.sharding == 3.0, seconds, 0.0)


def _iterations(cases: Cases, constants: Constants, one: Array, other: Array) -> Array:
    """Of one matrix; 0 where it has no columns."""
    short, long = np.minimum(one, other), np.maximum(one, other)
    flops = 4.0 * short**2 * long + 2.0 * short**3
    rate = cases.newton_flop_per_s * constants.matmul_efficiency
    half = half_side(cases, constants, cases.newton_flop_per_s)
    moved = _BYTES * (4.0 * short * long + 4.0 * short**2)
    bandwidth = cases.memory_bytes_per_s * constants.memory_efficiency
    each = flops / rate * (1.0 + half / np.maximum(short, 1.0)) + moved / (2.0 * bandwidth)
    # Its operations are started one by one, and so are those of other optimizers' many tensors.
    kernels = np.where(cases.sharding == 3.0, SHARDED_KERNELS, KERNELS)
    host = constants.kernel_seconds * np.where(cases.processor > 0.0, kernels, KERNELS)
    # Scaling, momentum and the update itself: about ten passes over the fp32 matrix.
    return np.where(short > 0.0, ITERATIONS * each + 40.0 * short * long / bandwidth + host, 0.0)
