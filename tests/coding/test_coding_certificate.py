import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.certificate import certify, roundoff
from outlast.coding.code import FractionalRepetition
from outlast.coding.cyclic import CyclicMDS, CyclicRepetition, RealReedSolomon, ReedSolomon
from outlast.coding.design import (
    BernoulliCode,
    SoftDesign,
    SymmetricDesign,
)
from outlast.coding.graph import Expander, GraphCode
from outlast.errors import CodingError

ANY = float("inf")
CODES = {
    "repetition": FractionalRepetition(12, 2, dtype="bfloat16"),
    "random": CyclicRepetition(12, 2, dtype="bfloat16", tolerance=ANY),
    "mds": CyclicMDS(12, 3, dtype="bfloat16", tolerance=ANY),
    "roots": ReedSolomon(12, 2, dtype="bfloat16", tolerance=ANY),
    "real roots": RealReedSolomon(12, 2, dtype="bfloat16", tolerance=ANY),
}
EVERY = pytest.mark.parametrize("code", CODES.values(), ids=CODES)


def to_bfloat16(values):
    """Round to nearest, ties to even, keeping 8 bits of the significand."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def to_float32(values):
    return np.asarray(values, np.float32).astype(np.float64)


def rounded(values, rounding):
    if np.iscomplexobj(values):
        return rounding(values.real) + 1j * rounding(values.imag)
    return rounding(values)


def orthogonal(chunks, size, generator):
    return np.linalg.qr(generator.standard_normal((size, chunks)))[0].T


@EVERY
@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float32", to_float32), ("bfloat16", to_bfloat16)]
)
def test_rounding_of_messages_stays_below_its_bound_for_orthogonal_gradients(code, dtype, rounding):
    generator = np.random.default_rng(0)
    gradients = orthogonal(code.chunks, 200, generator)
    true = gradients.sum(axis=0)
    messages = code.matrix @ gradients
    sent = rounded(messages, rounding)
    largest = 0.0
    for _ in range(60):
        alive = np.ones(code.workers, dtype=bool)
        alive[generator.choice(code.workers, code.tolerance, replace=False)] = False
        decoded = code.decode(alive)
        bound = certify(decoded.coefficients, decoded.weights, code.message_norms, dtype).rounding
        error = np.linalg.norm(decoded.weights @ sent - true) / np.linalg.norm(true)
        assert error <= bound
        largest = max(largest, error / bound)
    # A bound that is far above what happens would say nothing.
    assert largest > 0.03


def test_the_rounding_bound_is_attained_where_every_message_rounds_by_half_a_unit():
    code = FractionalRepetition(1, 0, dtype="bfloat16")
    # Between 1 and the next bfloat16; ties go to the even 1.
    gradient = np.full(64, 1.0 + 2.0**-8)
    error = np.linalg.norm(to_bfloat16(gradient) - gradient) / np.linalg.norm(gradient)
    assert error == pytest.approx(code.decode([0]).certificate.rounding, rel=0.01)


@EVERY
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), alive_share=st.floats(0.1, 1.0))
def test_no_gradients_break_the_error_bounds(code, seed, alive_share):
    generator = np.random.default_rng(seed)
    alive = generator.random(code.workers) < alive_share
    gradients = generator.standard_normal((30, code.chunks)) + 3 * generator.standard_normal(
        (30, 1)
    )
    true = gradients.sum(axis=1)
    decoded = code.decode(alive)
    certificate = decoded.certificate
    found = gradients @ decoded.coefficients
    slack = 1e-6 * np.linalg.norm(gradients)
    assert np.linalg.norm(found - true) <= certificate.bound(np.linalg.norm(gradients, 2)) + slack
    if np.isfinite(certificate.scale):
        differences = gradients - gradients.mean(axis=1, keepdims=True)
        off = np.linalg.norm(certificate.scale * found - true)
        size = slack * certificate.scale
        # The sum of complex coefficients need not be real; then only the first bound holds.
        if not np.iscomplexobj(decoded.coefficients):
            bound = np.sqrt(certificate.centred) * np.linalg.norm(differences, 2)
            assert off <= bound + size


def test_the_error_bound_is_attained_by_gradients_along_the_missing_coefficients():
    decoded = FractionalRepetition(6, 1).decode([0, 1, 2])
    missing = decoded.coefficients - 1.0
    gradients = np.outer(np.ones(4), missing)
    off = np.linalg.norm(gradients @ missing)
    assert off == pytest.approx(decoded.certificate.bound(np.linalg.norm(gradients, 2)))


def test_rescaling_removes_the_error_of_equal_gradients():
    certificate = FractionalRepetition(6, 1).decode([0, 2]).certificate
    assert not certificate.exact
    assert certificate.scale == 1.5
    assert certificate.error == 2.0
    assert certificate.centred == pytest.approx(4 * 0.25 + 2)


def test_without_survivors_there_is_no_scale():
    decoded = FractionalRepetition(4, 1).decode([])
    assert decoded.error == 4.0
    assert decoded.certificate.scale == decoded.certificate.centred == float("inf")


def test_the_error_of_an_exact_decoding_is_exactly_zero():
    weights, error = CyclicMDS(12, 3).decode([0, 1, 2, 3, 4, 5, 6, 8, 11])
    assert error == 0.0
    assert weights.shape == (12,)


def test_an_unknown_type_is_refused_with_the_known_ones():
    with pytest.raises(CodingError, match="'int8' is not one of float64, float32"):
        roundoff("int8")


def test_huge_weights_do_not_make_an_error_exact():
    # Beyond its tolerance this code nearly decodes, with weights of 1e11: nothing is exact then.
    code = CyclicMDS(60, 21, tolerance=ANY)
    decoded = code.decode(np.arange(60) >= 31)
    assert decoded.certificate.amplification > 1e9
    assert not decoded.certificate.exact
    assert decoded.error > 1.0


@EVERY
def test_a_decoder_that_does_not_exist_is_refused(code):
    with pytest.raises(CodingError, match="decoder = 'best' is not one of optimal, fixed"):
        code.decode([0, 1], "best")
    with pytest.raises(CodingError, match="decoder = 'best'"):
        code.errors(np.ones((1, code.workers), dtype=bool), "best")


@EVERY
@pytest.mark.parametrize("stragglers", [-1, 13])
def test_bounds_for_stragglers_that_there_are_not_are_refused(code, stragglers):
    for bound in (code.worst_error, code.expected_error):
        with pytest.raises(CodingError, match=f"stragglers = {stragglers} is not in"):
            bound(stragglers)


@pytest.mark.parametrize(
    "build",
    [
        lambda dtype: FractionalRepetition(6, 2, dtype=dtype),
        lambda dtype: CyclicMDS(6, 3, dtype=dtype, tolerance=ANY),
        lambda dtype: SymmetricDesign(7, dtype=dtype),
        lambda dtype: SoftDesign(6, 2, dtype=dtype),
        lambda dtype: BernoulliCode(6, 2, dtype=dtype),
        lambda dtype: GraphCode.random_regular(workers=12, degree=3, dtype=dtype),
        lambda dtype: Expander(6, 3, dtype=dtype),
    ],
)
def test_messages_of_an_unknown_type_are_refused_at_construction(build):
    assert build("bfloat16").dtype == "bfloat16"
    with pytest.raises(CodingError, match="dtype = 'float8' is not one of"):
        build("float8")


def test_survivors_that_are_no_whole_numbers_are_refused():
    with pytest.raises(CodingError, match="whole numbers"):
        FractionalRepetition(6, 2).decode([0.7, 3])
