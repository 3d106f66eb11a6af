"""Slurm's time formats, read and written."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.durations import (
    duration_text,
    limit_seconds,
    limit_text,
    shown_seconds,
)
from outlast.errors import ClusterError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("2:00:00", 7200),
        ("02:00:01", 7201),
        ("1-0", 86400),
        ("1-12", 86400 + 12 * 3600),
        ("1-02:03", 86400 + 2 * 3600 + 180),
        ("7-00:00:00", 7 * 86400),
        ("0:00", 0),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
        ("8h", 28800),
        ("90min", 5400),
        ("90 m", 5400),
        ("1.5d", 129600),
        ("45s", 45),
    ],
)
def test_every_form_of_a_limit_is_read(text: str, seconds: float) -> None:
    assert limit_seconds(text) == seconds
    assert shown_seconds(text) == seconds


def test_sacct_shows_fractions_of_a_second() -> None:
    assert shown_seconds("00:00:03.250") == 3.25


@pytest.mark.parametrize(
    "text", ["INVALID", "NOT_SET", "n/a", "N/A", "", "Partition_Limit", "(null)", "Unknown"]
)
def test_what_slurm_does_not_know_is_none_and_no_limit(text: str) -> None:
    assert shown_seconds(text) is None
    with pytest.raises(ClusterError, match="no length of time"):
        limit_seconds(text)


@pytest.mark.parametrize("text", ["abc", "1:2:3:4", "-5", "1--2", "12:", "1-2-3", "5 weeks"])
def test_what_is_no_time_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ClusterError, match="HH:MM:SS"):
        limit_seconds(text)


@given(st.integers(0, 400 * 86400))
def test_a_duration_reads_back(seconds: int) -> None:
    text = duration_text(seconds)
    assert shown_seconds(text) == seconds


@given(st.floats(0.001, 1e8))
def test_a_limit_is_rounded_up_to_less_than_a_minute_more(seconds: float) -> None:
    written = limit_seconds(limit_text(seconds))
    assert written % 60 == 0
    assert seconds <= written < seconds + 60


def test_unlimited_stays_unlimited_and_nothing_is_no_limit() -> None:
    assert limit_text(math.inf) == duration_text(math.inf) == "UNLIMITED"
    with pytest.raises(ClusterError, match="more than 0 s"):
        limit_text(0.0)
    with pytest.raises(ClusterError, match="more than 0 s"):
        limit_text(math.nan)
