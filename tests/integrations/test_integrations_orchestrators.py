"""Signals and exit codes as orchestrators see them: real submitit jobs, the rules of the others."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from outlast.errors import (
    EXIT_BAD_INPUT,
    EXIT_CRASHED,
    EXIT_DATA_CORRUPTION,
    EXIT_DONE,
    EXIT_GIVE_UP,
    EXIT_HUNG,
    EXIT_TO_BE_CONTINUED,
)

EXAMPLES = Path(__file__).parents[2] / "examples" / "integrations"
FOR_A_PERSON = (EXIT_BAD_INPUT, EXIT_DATA_CORRUPTION, EXIT_GIVE_UP, EXIT_HUNG)
KILLED = 137

# At its first start it waits in its tenth step for the signal, so that it is in the middle.
SCRIPT = """
import signal, sys, time
from pathlib import Path
import torch, outlast
folder, disturbed = Path(sys.argv[1]), Path(sys.argv[1], "disturbed")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=4, shuffle=True)
settings = [f"run.directory={folder}", "energy.measure=false"]
arrived = []
with outlast.Run(model=model, optimizer=optimizer, loader=data, settings=settings) as run:
    ours = signal.getsignal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *each: (ours(*each), arrived.append(each)))
    for batch in run:
        if "wait" in sys.argv and run.step == 10 and not disturbed.exists():
            disturbed.touch()
            end = time.monotonic() + 120
            while not arrived and time.monotonic() < end:
                time.sleep(0.01)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
torch.save(model.state_dict(), folder / "weights.pt")
"""


def submitit_example(folder: Path) -> Any:
    """The example as a module that jobs can import, too: beside it lie names of other packages."""
    shutil.copy(EXAMPLES / "train_submitit.py", folder / "train_submitit.py")
    os.environ["PYTHONPATH"] = str(folder)
    spec = importlib.util.spec_from_file_location("train_submitit", folder / "train_submitit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_submitit"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("submitit", reason="submitit is not installed")
    monkeypatch.setenv("PYTHONPATH", "")
    yield submitit_example(tmp_path)
    del sys.modules["train_submitit"]


@pytest.mark.distributed
@pytest.mark.supports("pytorch", "chain")
def test_submitit_requeues_an_interrupted_script_which_ends_as_if_nothing_had_been(
    example: Any, tmp_path: Path
) -> None:
    import submitit
    import torch

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    plain = [sys.executable, str(script), str(tmp_path / "plain")]
    (tmp_path / "plain").mkdir()
    (tmp_path / "job").mkdir()
    subprocess.run(plain, check=True, timeout=200)
    executor = submitit.LocalExecutor(tmp_path / "submitit")
    executor.update_parameters(timeout_min=10)
    job = executor.submit(example.Training(f"{sys.executable} {script} {tmp_path / 'job'} wait"))
    deadline = time.monotonic() + 120
    while not (tmp_path / "job" / "disturbed").exists():
        assert time.monotonic() < deadline, job.stderr()
        assert not job.done(), job.stderr()
        time.sleep(0.02)
    # As Slurm does it: to the tasks of the job.
    (task,) = psutil.Process(job._process.pid).children()
    task.send_signal(signal.SIGUSR2)
    assert job.result() == EXIT_DONE
    assert "Requeued job" in job.stderr() + job.stdout()
    weights = [torch.load(tmp_path / name / "weights.pt") for name in ("plain", "job")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.distributed
def test_the_submitit_example_goes_on_after_3_and_crashes_and_stops_for_a_person(
    example: Any, tmp_path: Path
) -> None:
    import submitit

    executor = submitit.LocalExecutor(tmp_path / "submitit")
    count = tmp_path / "count"
    for codes in ([3, 3, 0], [1, 3, 4], [2], [1, 1, 1]):
        count.write_text("")
        program = (
            f"from pathlib import Path; file = Path({str(count)!r}); "
            "text = file.read_text() + '.'; file.write_text(text); "
            f"raise SystemExit({codes}[len(text) - 1])"
        )
        command = f'{sys.executable} -c "{program}"'
        assert example.train(executor, command, crashes=2) == codes[-1]
        assert len(count.read_text()) == len(codes)


def kubernetes_outcome(job: dict[str, Any], code: int) -> str:
    """What a Job's controller does with a pod whose container ended with `code`."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        wanted = rule.get("onExitCodes")
        if wanted is None:
            continue
        assert wanted["operator"] in ("In", "NotIn")
        assert 0 not in wanted["values"] or wanted["operator"] == "NotIn"
        if (code in wanted["values"]) == (wanted["operator"] == "In"):
            return str(rule["action"])
    return "Count"


def test_a_kubernetes_job_treats_every_exit_code_as_it_should() -> None:
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    # Without it, Kubernetes refuses a podFailurePolicy.
    assert pod["restartPolicy"] == "Never"
    assert {kubernetes_outcome(job, code) for code in FOR_A_PERSON} == {"FailJob"}
    assert kubernetes_outcome(job, EXIT_TO_BE_CONTINUED) == "Ignore"
    assert {kubernetes_outcome(job, code) for code in (EXIT_CRASHED, KILLED)} == {"Count"}
    assert job["spec"]["backoffLimit"] > 0
    (container,) = pod["containers"]
    named = {
        rule["onExitCodes"]["containerName"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert named == {container["name"]}
    # A shell between would keep SIGTERM to itself.
    assert container["command"][0] == "outlast"
    assert pod["terminationGracePeriodSeconds"] > 30
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}


def test_the_kubernetes_file_fits_the_api() -> None:
    client = pytest.importorskip("kubernetes.client", reason="kubernetes is not installed")
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    assert unknown_keys(client, job, "V1Job") == []


def unknown_keys(client: Any, value: Any, kind: str) -> list[str]:
    """Keys that the API does not have, with the type that lacks them."""
    if kind.startswith("list["):
        return [bad for each in value for bad in unknown_keys(client, each, kind[5:-1])]
    model = getattr(client, kind, None)
    if model is None or not isinstance(value, dict):
        return []
    fields = {model.attribute_map[name]: each for name, each in model.openapi_types.items()}
    bad = [f"{kind}.{key}" for key in value if key not in fields]
    for key in value.keys() & fields.keys():
        bad += unknown_keys(client, value[key], fields[key])
    return bad


def test_skypilot_restarts_what_is_to_be_continued_and_nothing_else() -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    recovery = task["resources"]["job_recovery"]
    assert recovery == {
        "recover_on_exit_codes": [EXIT_TO_BE_CONTINUED],
        "max_restarts_on_errors": 0,
    }
    last = task["run"].strip().splitlines()[-1]
    assert last.startswith("exec outlast train"), "a shell between keeps signals and codes"
    store = next(iter(task["file_mounts"]))
    assert f"run.directory={store}" in last


def test_the_skypilot_file_fits_its_schema() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    jsonschema.validate(task, schemas.get_task_schema())


def test_torchx_takes_the_component() -> None:
    pytest.importorskip("torchx", reason="torchx is not installed")
    from torchx.runner import get_runner
    from torchx.specs import RetryPolicy

    with get_runner() as runner:
        info = runner.dryrun_component(
            f"{EXAMPLES / 'train_torchx.py'}:train",
            ["--job", "other.toml", "--nproc", "4", "--retries", "7"],
            scheduler="local_cwd",
        )
    (role,) = info._app.roles
    assert [role.entrypoint, *role.args] == ["outlast", "train", "other.toml", "--nproc", "4"]
    assert (role.max_retries, role.retry_policy) == (7, RetryPolicy.APPLICATION)
