"""The ranks of `outlast run` begin with what rank 0 has found, not with what they see."""

import dataclasses
import json
import threading

import pytest
import torch.distributed as dist

from outlast.autosave import run as rendezvous_module
from outlast.autosave.run import Begun, RunOptions, _begun, rendezvous
from outlast.autosave.run_folder import RunFolder
from outlast.distributed.ranks import Ranks
from outlast.errors import AutosaveError

DEADLINE_SECONDS = 60.0
FIRST, SECOND = (Ranks(rank, 2, rank, 2, "torchrun") for rank in (0, 1))


@pytest.fixture(params=["torchrun", "srun"])
def launched(request, monkeypatch):
    """The environment of a launcher."""
    store = None
    if request.param == "torchrun":
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("MASTER_PORT", str(store.port))
    else:
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_STEP_ID", "0")
    yield request.param
    del store


def never():
    raise AssertionError("another rank than 0 looked for itself")


def test_others_hear_what_rank_0_says_however_late(launched, tmp_path):
    # What an earlier launch has left is none of this one's.
    (tmp_path / "begun.json").write_text(json.dumps(["6.0.0.2", "mark", {"finished": True}]))
    heard = []
    waiting = threading.Thread(
        target=lambda: heard.append(rendezvous(SECOND, tmp_path, never)), daemon=True
    )
    waiting.start()
    said = Begun(resuming=True, died=True)
    assert rendezvous(FIRST, tmp_path, lambda: said) == said
    waiting.join(DEADLINE_SECONDS)
    assert heard == [said]


@pytest.mark.parametrize("folder", ["there", "not/there/yet"])
@pytest.mark.parametrize(
    ("error", "problem", "crashed"),
    [
        (AutosaveError("another program"), "another program", False),
        (PermissionError(13, "denied"), "PermissionError: [Errno 13] denied", True),
    ],
)
def test_others_end_with_rank_0_when_it_fails(launched, tmp_path, folder, error, problem, crashed):
    (tmp_path / "there").mkdir()

    def fails():
        raise error

    with pytest.raises(type(error)) as raised:
        rendezvous(FIRST, tmp_path / folder, fails)
    assert raised.value is error
    heard = rendezvous(SECOND, tmp_path / folder, never)
    assert heard == Begun(problem=problem, crashed=crashed)


def test_no_word_is_heard_twice(launched, tmp_path, monkeypatch):
    """Neither the agent's store nor a wrapper's loop says that a launch is another one."""
    first, second = Begun(), Begun(resuming=True)
    rendezvous(FIRST, tmp_path, lambda: first)
    assert rendezvous(SECOND, tmp_path, never) == first
    with monkeypatch.context() as hurried:
        hurried.setattr(rendezvous_module, "_DEADLINE_SECONDS", 0.2)
        with pytest.raises(AutosaveError, match="there is no word of this launch in "):
            rendezvous(SECOND, tmp_path, never)
    rendezvous(FIRST, tmp_path, lambda: second)
    assert rendezvous(SECOND, tmp_path, never) == second


@pytest.mark.parametrize("changed", ["TORCHELASTIC_RUN_ID", "WORLD_SIZE"])
def test_the_word_for_another_launch_is_not_heard(tmp_path, monkeypatch, launched, changed):
    rendezvous(FIRST, tmp_path, lambda: Begun(finished=True))
    rank = SECOND
    if changed == "WORLD_SIZE":
        rank = dataclasses.replace(SECOND, world_size=3)
    else:
        monkeypatch.setenv(changed, "two")
        monkeypatch.setenv("SLURM_JOB_ID", "8")
    monkeypatch.setattr(rendezvous_module, "_DEADLINE_SECONDS", 0.2)
    with pytest.raises(AutosaveError, match="there is no word of this launch in "):
        rendezvous(rank, tmp_path, never)


def test_where_nobody_can_write_nobody_waits(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    (tmp_path / "file").touch()
    with pytest.raises(AutosaveError, match="file cannot be written"):
        rendezvous(SECOND, tmp_path / "file" / "run", never)


def test_others_that_cannot_hear_do_not_take_the_run_before_a_fresh_one_for_it(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for rank in (0, 1):
        folder.record("finished", 8, rank)
    asked = RunOptions(tmp_path / "train.py")
    assert _begun(asked, [], folder, SECOND, malleable=False).finished
    anew = dataclasses.replace(asked, fresh=True)
    assert _begun(anew, [], folder, SECOND, malleable=False) == Begun()


def test_a_silent_rank_0_is_not_waited_for_for_ever(launched, tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous_module, "_DEADLINE_SECONDS", 0.2)
    with pytest.raises(AutosaveError, match=r"rank 0 did not say within 0\.2 s"):
        rendezvous(SECOND, tmp_path, never)
