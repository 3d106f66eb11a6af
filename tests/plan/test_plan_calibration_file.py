"""A calibration survives its file exactly, and a file that is not right is refused."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import PlanError
from outlast.plan.calibration import (
    Calibration,
    Constant,
    Provenance,
    from_text,
    read_calibration,
    to_text,
    write_calibration,
)
from outlast.plan.conformal import OTHERS, Conformal, Support
from outlast.plan.step_fit import FEATURES, Residual


def calibration(seed=0, residual=True):
    random = np.random.default_rng(seed)
    order = ("matmul_efficiency", "kernel_seconds", 'fabric "here" @ cluster a.b')
    factor = random.normal(size=(3, 5))
    covariance = factor @ factor.T
    deviations = np.sqrt(np.diag(covariance))
    points = Residual(
        features=random.normal(size=(4, len(FEATURES))),
        places=("p", "p", "q", "ü"),
        residuals=random.normal(size=4),
        noises=random.exponential(size=4),
        amplitude=0.12,
        length=2.0,
    )
    return Calibration(
        constants={
            order[0]: Constant(random.random(), 0.05, "1", "calibrated"),
            order[1]: Constant(1.5e-5 * random.random(), 0.3, "s", "calibrated", "nanotron"),
            order[2]: Constant(random.normal(), 0.1, "1", "calibrated", "a.b"),
            "score_passes": Constant(8.0, 0.0, "1", "prior"),
        },
        order=order,
        correlation=covariance / np.outer(deviations, deviations),
        residual=points if residual else None,
        widths=Conformal(
            quantiles={"nanotron on h100-sxm": random.random() * 3, OTHERS: 4.1},
            floor=random.random() / 10,
        ),
        support=Support({"devices": (8.0, 512.0), "expert": (0.0, 0.0)}),
        provenance=Provenance(
            date="2026-11-22",
            version="0.1.0",
            rows=("r1", 'r"2\n'),
            sources=("runs/a",),
            flagged=("row r9: too slow",),
            text="on two nodes",
        ),
    )


def assert_equal(first, second):
    for field in dataclasses.fields(Calibration):
        mine, theirs = getattr(first, field.name), getattr(second, field.name)
        if field.name == "correlation":
            assert np.array_equal(mine, theirs)
        elif field.name == "residual" and mine is not None:
            for inner in dataclasses.fields(Residual):
                assert np.array_equal(getattr(mine, inner.name), getattr(theirs, inner.name))
        else:
            assert mine == theirs


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_plan_calibration_file_round_trip_is_exact(seed, residual):
    before = calibration(seed, residual)
    after = from_text(to_text(before))
    assert_equal(before, after)
    assert to_text(after) == to_text(before)


def test_plan_calibration_file_on_disk(tmp_path):
    write_calibration(calibration(), tmp_path / "c.toml")
    found = read_calibration(tmp_path / "c.toml")
    assert_equal(calibration(), found)
    assert found.widths.half_widths(np.full(1, 0.03), ["nanotron on h100-sxm"], np.zeros(1)) > 0.0
    assert found.support.outside({"devices": 1024.0})
    assert [each.name for each in tmp_path.iterdir()] == ["c.toml"]


def test_plan_calibration_file_can_be_read_by_people():
    text = to_text(calibration())
    assert "[constants.matmul_efficiency]" in text
    assert 'unit = "s"' in text
    assert "devices = [8.0, 512.0]" in text
    assert max(len(line) for line in text.splitlines()) < 200


def test_plan_calibration_file_any_changed_digit_is_noticed():
    text = to_text(calibration())
    value = f"{calibration().constants['matmul_efficiency'].value!r}"
    assert value in text
    changed = text.replace(value, value[:-1] + ("1" if value[-1] != "1" else "2"))
    with pytest.raises(PlanError, match="changed or damaged"):
        from_text(changed, "c.toml")
    meant = "\n".join(line for line in changed.splitlines() if not line.startswith("digest"))
    assert from_text(meant).constants["matmul_efficiency"].unit == "1"


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
def test_plan_calibration_file_cut_off_is_refused(tmp_path, share):
    text = to_text(calibration())
    (tmp_path / "c.toml").write_text(text[: int(share * len(text))])
    with pytest.raises(PlanError, match=r"c\.toml"):
        read_calibration(tmp_path / "c.toml")


def edited(old, new):
    text = to_text(calibration())
    assert old in text
    lines = [line for line in text.replace(old, new, 1).splitlines() if line[:6] != "digest"]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("coverage = 0.9", "covrage = 0.9", "did you mean coverage"),
        ("log_deviation = 0.05", "log_deviatoin = 0.05", "did you mean log_deviation"),
        ("coverage = 0.9", "coverage = 1.5", "coverage = 1.5"),
        ("coverage = 0.9", "coverage = true", "wrong type"),
        ("log_deviation = 0.05", "log_deviation = -1.0", "not finite"),
        ("log_deviation = 0.05", "log_deviation = nan", "not finite"),
        ('origin = "prior"', 'origin = "guess"', "origin 'guess'"),
        ("format = 2", "format = 1", "calibrate again"),
        ("format = 2", "format = 3", "calibrate again"),
        ("[8.0, 512.0]", "[512.0, 8.0]", "support of devices"),
        ("[8.0, 512.0]", "[8.0]", "lowest, highest"),
        ("amplitude = 0.12", "", "lacks amplitude"),
        ("length_scales = [2.0, ", "length_scales = [", "length_scales"),
        ("length_scales = [2.0, ", "length_scales = [4.0, ", "other features"),
        ('"*" = 4.1', '"*" = -4.1', "quantile of"),
        ('order = ["matmul_efficiency"', 'order = ["matmul_eficiency"', "order names"),
    ],
)
def test_plan_calibration_file_says_what_is_wrong(old, new, words):
    with pytest.raises(PlanError, match=r"c\.toml") as caught:
        from_text(edited(old, new), "c.toml")
    assert words in str(caught.value)


def test_plan_calibration_file_missing(tmp_path):
    with pytest.raises(PlanError, match="No such file"):
        read_calibration(tmp_path / "none.toml")
    with pytest.raises(PlanError, match="cannot be written"):
        write_calibration(calibration(), tmp_path / "no" / "folder.toml")


@pytest.mark.parametrize(
    ("correlation", "words"),
    [
        (np.eye(2), "shape"),
        (np.array([[1, 0.5, 0], [0, 1, 0], [0, 0, 1.0]]), "symmetric"),
        (np.array([[1, 0.9, 0], [0.9, 1, 0.9], [0, 0.9, 1.0]]), "negative eigenvalue"),
    ],
)
def test_plan_calibration_file_correlation_must_be_one(correlation, words):
    with pytest.raises(PlanError, match=words):
        dataclasses.replace(calibration(), correlation=correlation)
