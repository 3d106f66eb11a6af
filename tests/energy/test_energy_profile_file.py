"""Profiles from files: what is read is what was written, and what is wrong is refused in words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outlast.energy import example
from outlast.energy.profile import Curve, Key, Point, Profile
from outlast.energy.profile_check import check_profile
from outlast.energy.profile_file import read_profile, write_profile
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
        (HEADER, [*GOOD[:2], "0,forward,1400,0.07,24"], "slower at 1400 MHz"),
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
