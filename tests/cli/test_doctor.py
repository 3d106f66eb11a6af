"""The doctor's report: collected once for real, rendered, and failing where it should."""

import io
import json

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from outlast.cli import doctor as diagnosis
from outlast.cli.doctor import doctor, matmul_check, render
from outlast.errors import HardwareError
from outlast.hardware.detect import Check

GROUPS = ["Python and Outlast", "PyTorch", "Machine", "Accelerators", "Energy sensors", "Cluster"]


def run(*arguments: str):
    app = typer.Typer()
    app.command()(doctor)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.distributed
def test_the_whole_report_as_json(tmp_path):
    result = run("--json", "--path", str(tmp_path))
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["ok"] is True
    assert report["seconds"] < 60
    assert report["machine"]["host_name"]
    groups = list(dict.fromkeys(check["group"] for check in report["checks"]))
    assert groups == [*GROUPS, "Storage", "Optional"]
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert states["all-reduce"] == "ok"
    assert states["matmul float32"] == "ok"
    assert states["rename"] == "ok"


def test_a_broken_essential_gives_exit_code_1_and_is_named(tmp_path, monkeypatch):
    broken = Check(
        group="PyTorch",
        name="all-reduce",
        state="missing",
        found="no result within 10 s",
        remedy="look at the firewall [lo]",
        essential=True,
    )
    optional = Check(group="Optional", name="wandb", state="missing", found="not installed")
    monkeypatch.setattr(diagnosis, "collect", lambda _path, _machine: [broken, optional])
    result = run("--path", str(tmp_path))
    assert result.exit_code == 1
    assert "Training does not work here. Broken: PyTorch: all-reduce." in result.stdout
    assert "firewall [lo]" in result.stdout
    report = json.loads(run("--json", "--path", str(tmp_path)).stdout)
    assert report["ok"] is False


def test_a_missing_option_is_not_a_failure():
    text = io.StringIO()
    optional = Check(group="Optional", name="wandb", state="missing", found="not installed")
    render([optional], 1.0, Console(file=text, width=100))
    assert "Training works on this machine." in text.getvalue()


def test_a_wrong_path_is_refused_at_once(tmp_path):
    with pytest.raises(HardwareError, match=r"--path = .*none is not a directory"):
        doctor(path=tmp_path / "none")


def test_a_wrong_product_is_noticed(monkeypatch):
    torch = pytest.importorskip("torch")
    assert matmul_check("cpu", "bfloat16", size=32).state == "ok"
    assert matmul_check("cpu", "float32", size=32).state == "ok"
    right = torch.Tensor.__matmul__

    def wrong(a, b):
        product = right(a, b)
        if a.dtype == torch.float32:
            product[3, 3] += 0.1 * product.abs().max()
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert matmul_check("cpu", "float32", size=32).broken


def test_checkpoints_without_compiled_code_are_said_to_be_slower(monkeypatch):
    monkeypatch.setattr("outlast.checkpoint.compiled._library", lambda: "no C compiler was found")
    [check] = [found for found in diagnosis._python_checks() if found.name == "checkpoints"]
    assert (check.state, check.found) == ("degraded", "no C compiler was found")
    assert "gcc" in check.remedy
