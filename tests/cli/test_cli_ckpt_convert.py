"""``outlast ckpt export`` and ``outlast ckpt import`` as a user types them."""

import json
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from outlast.cli.ckpt import export, import_
from outlast.errors import CheckpointError


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command("export")(export)
    app.command("import")(import_)
    return app


def test_a_model_goes_in_and_out(app: typer.Typer, tmp_path: Path) -> None:
    weights = {"a": torch.randn(4, 3), "b": torch.randn(3).bfloat16()}
    torch.save({**weights, "epoch": 1}, tmp_path / "a.pt")
    store = str(tmp_path / "store")
    arguments = ["import", str(tmp_path / "a.pt"), store, "--prefix", "model.", "--step", "7"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    assert f"imported {tmp_path / 'a.pt'} into {store} as step 7: 2 tensors, 0.0 MB" in done.output
    arguments = ["export", store, str(tmp_path / "out"), "--prefix", "model."]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert f"wrote step 7 of {store} to {tmp_path / 'out'}: 2 tensors" in done.output
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], each) for name, each in weights.items())
    arguments = ["export", store, str(tmp_path / "out.pt"), "--to", "torch"]
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert torch.load(tmp_path / "out.pt")["epoch"] == 1
    arguments = ["export", store, str(tmp_path / "again.pt"), "--to", "torch", "--json"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert json.loads(done.output)["step"] == 7


def test_errors_are_for_main_to_print(app: typer.Typer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist, is empty or is a file"):
        CliRunner().invoke(
            app, ["export", str(tmp_path), str(tmp_path / "x")], catch_exceptions=False
        )
    done = CliRunner().invoke(app, ["export", str(tmp_path), "x", "--step", "-1"])
    assert done.exit_code == 2


def test_the_help_names_formats(app: typer.Typer) -> None:
    text = " ".join(CliRunner().invoke(app, ["import", "--help"]).output.split())
    for word in ("safetensors", "deepspeed", "torch.save", "--prefix"):
        assert word in text
