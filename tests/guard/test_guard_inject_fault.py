"""Faults as text."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import GuardError
from outlast.guard.findings import SITES
from outlast.guard.inject import Fault, ProcessFault, parse_fault, parse_faults
from outlast.guard.inject.fault import Pattern

small = st.integers(0, 1000)
some_bits = st.sets(st.integers(0, 63), max_size=3).map(lambda bits: tuple(sorted(bits)))
extents = st.one_of(
    st.just({}),
    st.builds(
        lambda extent, length: {"extent": extent, "length": length},
        st.sampled_from(["segment", "stride"]),
        st.integers(1, 64),
    ),
)
patterns = st.one_of(
    st.builds(lambda bits, extent: Pattern(bits=bits, **extent), some_bits, extents),
    st.builds(
        lambda bits, sign, cast, extent: Pattern(
            "carry", bits=bits[:1], sign=sign, before_cast=cast, **extent
        ),
        some_bits,
        st.sampled_from([1, -1]),
        st.booleans(),
        extents,
    ),
    st.builds(lambda value, extent: Pattern("stuck", value=value, **extent), st.floats(), extents),
)
places = {
    "site": st.sampled_from(SITES),
    "pattern": patterns,
    "module": st.sampled_from(["*", "*.mlp.*", "layers.0.attention"]),
    "step": small,
    "position": st.none() | small,
    "rank": small,
}
faults = st.one_of(
    st.builds(Fault, every=small, occurrence=small, **places),
    st.builds(Fault, duration=st.just("permanent"), **places),
    st.builds(
        Fault,
        duration=st.just("intermittent"),
        probability=st.floats(0, 1, exclude_min=True),
        **places,
    ),
    st.builds(ProcessFault, st.just("kill"), small, small),
    st.builds(ProcessFault, st.just("stop"), small, small, st.floats(0.001, 1e6)),
    st.builds(
        ProcessFault,
        st.just("disk-full"),
        small,
        rank=small,
        steps=st.integers(1, 9),
        room_bytes=small,
    ),
)


@given(faults)
def test_a_fault_printed_and_parsed_is_the_same_fault(fault):
    assert parse_fault(str(fault)) == fault


def test_the_texts_of_the_manual():
    fault = parse_fault("linear.output:module=*.mlp.*:bit=14:every=5")
    assert fault == Fault("linear.output", Pattern(bits=(14,)), module="*.mlp.*", every=5)
    assert [step for step in range(12) if fault.due(step)] == [0, 5, 10]
    assert parse_fault("linear.dw:carry=-10:step=3") == Fault(
        "linear.dw", Pattern("carry", bits=(10,), sign=-1), step=3
    )
    several = parse_faults(["kill:step=12, linear.dx:nan:segment=32:permanent", "stop:step=2"])
    assert several == (
        ProcessFault("kill", 12),
        Fault(
            "linear.dx",
            Pattern("stuck", value=math.nan, extent="segment", length=32),
            duration="permanent",
        ),
        ProcessFault("stop", 2),
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("linear.outptu:bit=3:every=5", "did you mean 'linear.output'"),
        ("kil:step=3", "did you mean 'kill'"),
        ("linear.dw:bti=3:every=5", "did you mean 'bit'"),
        ("linear.dw:bit=3", "needs a time, as in step=12 or every=5"),
        ("linear.dw:bit=3:nan:step=1", "bit and nan exclude each other"),
        ("linear.dw:bit=x:step=1", "bit = 'x' is not a whole number"),
        ("linear.dw:bit=64:step=1", "not within 0 to 63"),
        ("linear.dw:bit=3:step=1:step=2", "step stands twice"),
        ("linear.dw:intermittent", "intermittent = '' is not a number"),
        ("linear.dw:intermittent=1.5", "give one above 0 and at most 1"),
        ("linear.dw:permanent:every=5", "leave them out"),
        ("linear.dw:permanent=yes", "permanent takes no value"),
        ("linear.dw:segment=0:step=1", "segment = 0 is below 1"),
        ("linear.dw:cast=after:step=1", "is not before"),
        ("linear.dw:step=-1", "step = -1 of a fault is below 0"),
        ("kill", "kill needs a step, as in kill:step=12"),
        ("kill:step=1:seconds=2", "'seconds' is no key of kill"),
        ("stop:step=1:seconds=0", "not a finite time above 0"),
        ("disk-full:step=1:steps=0", "below 1"),
    ],
)
def test_what_cannot_be_read_is_explained(text, sentence):
    with pytest.raises(GuardError) as error:
        parse_fault(text)
    assert sentence in str(error.value)
    assert text in str(error.value)
