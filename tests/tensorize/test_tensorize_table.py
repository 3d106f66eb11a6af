import json
from dataclasses import replace

import torch
from torch import nn

from outlast.tensorize.replace import Replacement, Replacements, tensorize


def _row(name: str, **changes: object) -> Replacement:
    row = Replacement(name, "low_rank", 64, 98_304, 262_144, 196_608.0, 524_288.0, 1.9)
    return replace(row, **changes)  # type: ignore[arg-type]


def _report(*rows: Replacement, **refused: str) -> Replacements:
    before = 10_000_000
    saved = sum(row.dense_parameters - row.parameters for row in rows)
    return Replacements(rows, refused, {}, before - saved, before, 4096)


def test_equal_layers_share_a_line() -> None:
    rows = [_row(f"model.layers.{block}.mlp.up_proj") for block in range(12)]
    lines = str(_report(*rows, _row("model.layers.0.mlp.down_proj", rank=48))).splitlines()
    [line] = [line for line in lines if "up_proj" in line]
    assert line.split()[:3] == ["model.layers.*.mlp.up_proj", "x12", "low_rank"]
    assert "98.3 k" in line
    assert "262.1 k" in line
    assert "1.90x" in line
    [line] = [line for line in lines if "down_proj" in line]
    assert line.split()[0] == "model.layers.0.mlp.down_proj"
    assert any(line.startswith("13 layers") and "1.278 M" in line for line in lines)


def test_layers_that_differ_do_not() -> None:
    rows = [_row("layers.0.up", rank=64), _row("layers.1.up", rank=32)]
    text = str(_report(*rows))
    assert "layers.0.up" in text
    assert "layers.1.up" in text


def test_errors_of_a_group_are_a_range() -> None:
    rows = [_row(f"layers.{block}.up", error=0.1 * (block + 1)) for block in range(3)]
    [line] = [line for line in str(_report(*rows)).splitlines() if "layers.*.up x3" in line]
    assert line.endswith("0.100 to 0.300")
    [line] = [line for line in str(_report(rows[0])).splitlines() if "layers.0.up" in line]
    assert line.endswith("0.100")


def test_what_is_not_known_is_left_out() -> None:
    text = str(_report(_row("a", speed=None), _row("b", rank=(2, 4, 2), parameters=0)))
    assert "0.00x" not in text
    [line] = [line for line in text.splitlines() if line.startswith("b ")]
    assert "2-4-2" in line
    assert "shared" in line
    assert "predicted for 4096 tokens" in text


def test_the_whole_is_as_fast_as_its_parts() -> None:
    rows = [_row("a", speed=2.0), _row("b", speed=1.0)]
    [total] = [line for line in str(_report(*rows)).splitlines() if line.startswith("2 layers")]
    assert "1.33x" in total


def test_what_stays_dense_is_said_once_per_reason() -> None:
    refused = {f"layers.{block}.gate": "too narrow" for block in range(4)} | {"other": "too slow"}
    text = str(Replacements((_row("a"),), refused, {}, 9, 10, 4096))
    assert "kept dense: layers.*.gate x4: too narrow" in text
    assert "kept dense: other: too slow" in text


def test_brackets_in_names_are_printed_as_they_are() -> None:
    assert "tower[bold].up" in str(_report(_row("tower[bold].up")))


def test_the_dict_is_plain() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 8))
    report = tensorize(model, "low_rank", 16)
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["replaced"][0]["name"] == "0"
    assert plain["replaced"][0]["parameters"] == 2 * 16 * 128
    assert plain["replaced"][0]["dense_flops_per_token"] == 2 * 128 * 128
    assert list(plain["refused"]) == ["1"]
    assert plain["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert plain["dense_parameters"] == 128 * 128 + 128 + 128 * 8 + 8
    assert len(report) == 1
    assert [row.rank for row in report] == [16]
    assert report.modules["0"] is model[0]
