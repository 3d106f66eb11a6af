"""All sets of survivors of a small code, and what linear algebra says of each."""

import numpy as np


def every_mask(workers: int) -> np.ndarray:
    """(2^workers, workers) every set of survivors."""
    return (np.arange(2**workers)[:, None] >> np.arange(workers)) % 2 == 1


def least_error(code, alive: np.ndarray) -> float:
    """Squared distance of 1 from the span of the survivors' rows, by least squares."""
    system = code.matrix.toarray()[alive].T
    ones = np.ones(code.chunks)
    weights = np.linalg.lstsq(system, ones, rcond=None)[0]
    return float(np.sum(np.abs(system @ weights - ones) ** 2))


def check_every_pattern(code) -> None:
    """Decodings have the least error, vectorised errors are theirs, and stated bounds hold."""
    masks = every_mask(code.workers)
    least = np.array([least_error(code, alive) for alive in masks])
    decoded = [code.decode(alive) for alive in masks]
    np.testing.assert_allclose([each.error for each in decoded], least, atol=1e-9)
    np.testing.assert_allclose(code.errors(masks), least, atol=1e-5)
    for alive, each in zip(masks, decoded, strict=True):
        assert not each.weights[~alive].any()
    check_bounds(code, masks, least)


def check_bounds(code, masks: np.ndarray, errors: np.ndarray) -> None:
    """`tolerance`, `worst_error` and `expected_error` against all sets of survivors."""
    gone = code.workers - masks.sum(axis=1)
    for stragglers in range(code.workers + 1):
        found = errors[gone == stragglers]
        if stragglers <= code.tolerance:
            assert found.max() < 1e-9
        holds(code.worst_error(stragglers), found.max())
        mean = code.expected_error(stragglers)
        if mean is not None:
            holds(mean, found.mean())


def holds(bound, figure: float) -> None:
    """Whether a statement is true of a figure."""
    assert bound.kind in ("exact", "upper", "lower")
    if bound.kind != "lower":
        assert figure <= bound.value + 1e-9
    if bound.kind != "upper":
        assert figure >= bound.value - 1e-9
