"""Profiles from files: what is read is what was written, and what is wrong is refused in words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outlast.energy import example
from outlast.energy.profile import (
    Curve,
    Key,
    Point,
    Profile,
    check_profile,
    read_profile,
    write_profile,
)
from outlast.errors import EnergyError

HEADER = "stage,phase,clock_mhz,seconds,joules"
GOOD = ["0,forward,1000,0.06,17", "0,forward,1200,0.055,18", "0,forward,1400,0.05,24"]


def csv(tmp_path: Path, *rows: str, header: str = HEADER) -> Path:
    path = tmp_path / "profile.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.mark.parametrize("device", ["a100", "a40"])
@pytest.mark.parametrize("ending", ["csv", "json"])
def test_a_profile_comes_back_as_it_was_written(tmp_path: Path, device: str, ending: str) -> None:
    profile = example.profile(device)
    path = tmp_path / f"profile.{ending}"
    write_profile(profile, path)
    assert read_profile(path) == profile
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_names_of_other_tools_are_understood(tmp_path: Path) -> None:
    path = csv(tmp_path, *GOOD, header="stage,instruction,frequency,time,energy")
    profile = read_profile(path, blocking_watts=80, device="A100")
    assert profile.curve(Key(0, "forward")).at(1200) == Point(1200, 0.055, 18)
    assert profile.device == "A100"


@pytest.mark.parametrize(
    ("header", "rows", "words"),
    [
        (HEADER.replace("joules", "joulse"), GOOD, "did you mean joules?"),
        ("stage,phase,clock_mhz,seconds", ["0,forward,1000,1"], "no column for joules"),
        (HEADER + ",energy", ["0,forward,1000,1,200,200"], "more than one column for joules"),
        (HEADER, [*GOOD, GOOD[0]], "line 5 gives stage 0 forward at 1000 MHz a second time"),
        (HEADER, ["0,forward,1000,nan,17"], 'seconds = "nan" is not a finite number'),
        (HEADER, ["0,forward,1000,0.1,inf"], 'joules = "inf" is not a finite number'),
        (HEADER, ["0,forward,1000,0,17"], "seconds = 0, which must be above 0"),
        (HEADER, ["0,forward,1000,0.1,-3"], "joules = -3, which must be above 0"),
        (HEADER, ["0,forward,1.41,0.1,17"], "clock_mhz = "),
        (HEADER, ["0,forward,1410000000,0.1,17"], "give clocks in MHz"),
        (HEADER, ["0,forward,1000,0.1"], "line 2 has 4 values for 5 columns"),
        (HEADER, ["0,,1000,0.1,17"], "is no name"),
        (HEADER, [], "no measurements"),
        (HEADER, ["0,forward,1000,60,17", "0,forward,1400,50,24"], "are the times in ms"),
        (HEADER, ["0,forward,1000,0.06,17000", "0,forward,1400,0.05,24000"], "energy in mJ"),
        (HEADER, [*GOOD, "0,backward,1000,0.1,33", "0,backward,1400,0.09,40"], "lacks 1200 MHz"),
        (
            HEADER,
            [*GOOD[:2], "0,forward,1400,0.07,24"],
            "27.3% slower at its top clock of 1400 MHz",
        ),
        (
            HEADER,
            ["0,forward,1000,0.06,17", "0,forward,1200,0.055,30", "0,forward,1400,0.05,20"],
            "energy falls and then rises",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, header: str, rows: list[str], words: str) -> None:
    with pytest.raises(EnergyError) as caught:
        read_profile(csv(tmp_path, *rows, header=header), blocking_watts=80)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_without_blocking_power_says_how_to_give_it(tmp_path: Path) -> None:
    with pytest.raises(EnergyError, match="# blocking_watts = "):
        read_profile(csv(tmp_path, *GOOD))


def test_json_is_as_strict(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(example.profile("a100"), path)
    content = json.loads(path.read_text())
    content["blocking_wats"] = 3
    path.write_text(json.dumps(content))
    with pytest.raises(EnergyError, match="did you mean blocking_watts"):
        read_profile(path)
    path.write_text("[1, 2")
    with pytest.raises(EnergyError, match="no JSON file"):
        read_profile(path)


def test_a_wrong_profile_is_not_written(tmp_path: Path) -> None:
    wrong = Profile({Key(0, "forward"): Curve((Point(1000, -1, 5),))}, 80)
    with pytest.raises(EnergyError, match="seconds = -1"):
        write_profile(wrong, tmp_path / "profile.csv")
    assert not list(tmp_path.iterdir())


def test_stages_on_different_devices_and_transfers_are_no_mistake() -> None:
    mixed = {
        **{key: each for key, each in example.profile("a100").curves.items() if key.stage < 4},
        Key(1, "transfer"): Curve((Point(0, 0.001, 0),)),
        Key(9, "forward"): Curve((Point(600, 0.1, 20), Point(2000, 0.08, 25))),
    }
    check_profile(replace(example.profile("a100"), curves=mixed))


def with_curve(profile: Profile, key: Key, times: float, joules: float = 1.0) -> Profile:
    points = (
        Point(p.clock_mhz, p.seconds * times, p.joules * joules) for p in profile.curve(key).points
    )
    return replace(profile, curves={**profile.curves, key: Curve(tuple(points))})


@pytest.mark.parametrize(
    ("times", "joules", "words"),
    [
        (1000, 1, "stage 3 forward has a power of .* are the times in ms"),
        (1, 1000, "stage 3 forward has a power of .* is the energy in mJ"),
        (1000, 1000, "stage 3 forward takes .* is one of them in ms"),
        (0.001, 0.001, "stage 3 forward takes .* is one of them in ms"),
    ],
)
def test_one_stage_in_other_units_is_found(times: float, joules: float, words: str) -> None:
    wrong = with_curve(example.profile("a100"), Key(3, "forward"), times, joules)
    with pytest.raises(EnergyError, match=words):
        check_profile(wrong)


def test_a_stage_may_be_much_lighter_than_others() -> None:
    check_profile(with_curve(example.profile("a100"), Key(0, "forward"), 0.02, 0.02))


@pytest.mark.parametrize(
    ("watts", "words"),
    [
        (0.08364, "blocking_watts = 0.08364 .* is it in kW"),
        (230, "blocking_watts = 230 is above the 228 W of stage"),
        (83640, "looks like mW"),
        (-1, "must be the power of a waiting device"),
    ],
)
def test_a_blocking_power_that_does_not_fit_is_refused(watts: float, words: str) -> None:
    with pytest.raises(EnergyError, match=words):
        check_profile(replace(example.profile("a100"), blocking_watts=watts))


def test_blocking_power_may_be_left_out() -> None:
    check_profile(replace(example.profile("a100"), blocking_watts=0.0))


def test_stages_on_two_kinds_of_devices_are_a_profile() -> None:
    fast, slow = example.profile("a100"), example.profile("a40")
    curves = {key: (fast if key.stage < 4 else slow).curve(key) for key in fast.curves}
    check_profile(replace(fast, curves=curves, blocking_watts=70.38))


def test_a_clock_that_one_stage_lacks_is_named() -> None:
    whole, key = example.profile("a100"), Key(3, "forward")
    points = tuple(point for point in whole.curve(key).points if point.clock_mhz != 1200)
    curves = {each: curve for each, curve in whole.curves.items() if each != Key(3, "backward")}
    with pytest.raises(EnergyError, match="stage 3 forward lacks 1200 MHz, which stage 0"):
        check_profile(replace(whole, curves={**curves, key: Curve(points)}))


def slower_top(noise: float) -> Profile:
    """Times of 1 / f with alternating noise; the top clock is 3 % slower than the one below."""
    points = [
        Point(clock, 100 / clock * (1 + noise * (-1) ** place), 30.0)
        for place, clock in enumerate(range(900, 1410, 15))
    ]
    below = points[-2]
    points[-1] = Point(
        points[-1].clock_mhz, min(p.seconds for p in points[:-1]) * 1.03, below.joules
    )
    return Profile({Key(0, "forward"): Curve(tuple(points))}, 80)


def test_a_top_clock_slower_than_a_lower_one_must_be_noise() -> None:
    with pytest.raises(EnergyError, match=r"3\.0% slower at its top clock .*: throttled\?"):
        check_profile(slower_top(0.0))
    check_profile(slower_top(0.01))


def test_numbers_and_fields_beyond_all_bounds_are_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(example.profile("a100"), path)
    content = json.loads(path.read_text())
    content["points"][0]["seconds"] = 10**400
    path.write_text(json.dumps(content))
    with pytest.raises(EnergyError, match=r"seconds = 1000.* is not a finite number"):
        read_profile(path)
    with pytest.raises(EnergyError, match=r"is no CSV file .*field larger than"):
        read_profile(csv(tmp_path, "0," + "f" * 200_000 + ",1000,0.1,17"), blocking_watts=80)


@pytest.mark.parametrize("ending", ["csv", "json"])
def test_flags_survive_the_file(tmp_path: Path, ending: str) -> None:
    flags = ("stage 0 forward: from one probe", "a = b, and c")
    profile = replace(example.profile("a100"), flags=flags)
    path = tmp_path / f"profile.{ending}"
    write_profile(profile, path)
    assert read_profile(path) == profile


def test_flags_that_are_no_sentences_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(example.profile("a100"), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"flags": "careful"}))
    with pytest.raises(EnergyError, match='flags = "careful" is no list of sentences'):
        read_profile(path)
