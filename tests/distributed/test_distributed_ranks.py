"""Who a process is: torchrun's and Slurm's environments, and what is wrong with a broken one."""

import socket
import time

import pytest

from outlast.distributed.group import raise_together
from outlast.distributed.ranks import (
    ALONE,
    Ranks,
    join,
    launched_by,
    ranks_from,
    rendezvous_address,
)
from outlast.errors import DataError, OutlastError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29501",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x1),3",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Put a `scontrol` on PATH that answers as Slurm's would; gives a function that writes it."""

    def write(body):
        script = tmp_path / "scontrol"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return write


def test_torchrun():
    expected = Ranks(rank=5, world_size=8, local_rank=1, local_world_size=4, launch="torchrun")
    assert ranks_from(TORCHRUN) == expected
    assert not expected.is_first
    assert rendezvous_address(TORCHRUN) == ("node7", 29501)


def test_srun():
    expected = Ranks(rank=6, world_size=7, local_rank=2, local_world_size=4, launch="srun")
    assert ranks_from(SRUN) == expected
    assert ranks_from(SRUN | {"SLURM_NTASKS_PER_NODE": "2"}).local_world_size == 2


def test_torchrun_inside_a_slurm_step_is_torchrun():
    assert ranks_from(SRUN | TORCHRUN) == ranks_from(TORCHRUN)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PATH": "/bin"},
        # A batch script: it has a job and tasks, but is no task of a step.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        # srun with one task.
        {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_alone(environment):
    assert launched_by(environment) == "alone"
    assert ranks_from(environment) == ALONE


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE", "torchrun"]),
        (TORCHRUN | {"RANK": "first"}, ["RANK", "WORLD_SIZE", "'first'"]),
        (TORCHRUN | {"WORLD_SIZE": ""}, ["WORLD_SIZE"]),
        ({k: v for k, v in SRUN.items() if k != "SLURM_PROCID"}, ["SLURM_PROCID", "srun"]),
        (TORCHRUN | {"RANK": "8"}, ["RANK = 8", "WORLD_SIZE = 8"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK = -1", "WORLD_SIZE = 8"]),
    ],
)
def test_a_broken_environment_is_one_sentence(environment, names):
    with pytest.raises(OutlastError) as error:
        ranks_from(environment)
    assert "\n" not in str(error.value)
    for name in names:
        assert name in str(error.value)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "many"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"},
    ],
)
def test_without_an_address_for_rank_zero_is_one_sentence(environment):
    with pytest.raises(OutlastError, match="MASTER_ADDR and MASTER_PORT"):
        rendezvous_address(environment)


def test_srun_listens_on_the_first_node_of_the_step(scontrol):
    scontrol(
        'case "$*" in\n"show hostnames gpu[03-04]") echo localhost; echo gpu04;;\n*) exit 1;;\nesac'
    )
    host, port = rendezvous_address(SRUN)
    assert host == "localhost"
    assert 20_000 <= port < 32_000
    # Another step on the same nodes gets another port; every rank of one step the same.
    assert rendezvous_address(SRUN | {"SLURM_STEP_ID": "4"})[1] != port
    assert rendezvous_address(SRUN | {"SLURM_PROCID": "0"}) == (host, port)


def test_a_node_name_that_does_not_resolve_gives_its_slurm_address(scontrol, monkeypatch):
    def resolve(host, *_):
        raise socket.gaierror(f"{host} is not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    scontrol(
        'case "$*" in\n'
        '"show hostnames gpu[03-04]") echo gpu03; echo gpu04;;\n'
        '"show node gpu03") echo "NodeName=gpu03 NodeAddr=10.1.2.3 NodeHostName=gpu03";;\n'
        "*) exit 1;;\n"
        "esac"
    )
    assert rendezvous_address(SRUN)[0] == "10.1.2.3"


def test_a_node_name_without_slurm_address_is_used_as_it_is(scontrol, monkeypatch):
    def resolve(host, *_):
        raise socket.gaierror(f"{host} is not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    scontrol('if [ "$2" = hostnames ]; then echo gpu03; else echo "State=IDLE"; fi')
    assert rendezvous_address(SRUN)[0] == "gpu03"


@pytest.mark.parametrize("body", ["exit 1", "true"])
def test_a_scontrol_that_fails_or_says_nothing_names_the_remedy(scontrol, body):
    scontrol(body)
    with pytest.raises(OutlastError, match="set MASTER_ADDR and MASTER_PORT"):
        rendezvous_address(SRUN)


def test_without_scontrol_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OutlastError, match=r"`scontrol show hostnames gpu\[03-04\]` failed"):
        rendezvous_address(SRUN)


def _one_fails():
    import os

    import torch

    ranks = ranks_from(os.environ)
    join(ranks, torch.device("cpu"), 60.0)
    begun = time.monotonic()
    sentences = []
    for failing in (DataError("no disk left"), ValueError("a bug")):

        def work(failing=failing):
            if ranks.rank == 1:
                raise failing
            return "well"

        try:
            raise_together(work)
        except Exception as error:
            sentences.append(f"{type(error).__name__}: {error}")
    return sentences, raise_together(lambda: ranks.rank), time.monotonic() - begun


@pytest.mark.distributed
def test_all_ranks_hear_of_one_ranks_problem(ranks):
    for rank, (sentences, result, seconds) in enumerate(ranks(3)(_one_fails)):
        told = "ValueError: a bug" if rank == 1 else "OutlastError: ValueError: a bug"
        assert sentences == ["OutlastError: no disk left", told]
        assert result == rank
        assert seconds < 10


def test_a_process_alone_agrees_with_itself():
    assert raise_together(lambda: 7) == 7
    with pytest.raises(OutlastError, match="no disk left"):
        raise_together(_fail)


def _fail():
    raise DataError("no disk left")


def _waits_in_vain():
    import os

    import torch

    os.environ["WORLD_SIZE"] = "2"
    try:
        join(ranks_from(os.environ), torch.device("cpu"), 0.5)
    except OutlastError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_a_rank_that_never_comes_is_waited_for_no_longer_than_said(ranks):
    [sentence] = ranks(1)(_waits_in_vain)
    assert "waited 0.5 s (launch.timeout_seconds)" in sentence
    assert "for 2 processes to come" in sentence
