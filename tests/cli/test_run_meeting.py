"""The ranks of `outlast run` begin with what rank 0 has found, not with what they see."""

import json
import threading

import pytest
import torch.distributed as dist

from outlast.cli import run_meeting
from outlast.cli.run_meeting import Begun, begin_together
from outlast.errors import AutosaveError
from outlast.train.ranks import Ranks

DEADLINE_SECONDS = 60.0
FIRST, SECOND = (Ranks(rank, 2, rank, 2, "torchrun") for rank in (0, 1))


@pytest.fixture(params=["torchrun", "srun"])
def launched(request, monkeypatch):
    """The environment of a launcher."""
    store = None
    if request.param == "torchrun":
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
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
    (tmp_path / "begun.json").write_text(json.dumps(["6.0.0", '{"finished": true}']))
    heard = []
    waiting = threading.Thread(
        target=lambda: heard.append(begin_together(SECOND, tmp_path, never)), daemon=True
    )
    waiting.start()
    said = Begun(resuming=True, died=True)
    assert begin_together(FIRST, tmp_path, lambda: said) == said
    waiting.join(DEADLINE_SECONDS)
    assert heard == [said]


def test_others_end_with_rank_0_when_it_refuses(launched, tmp_path):
    def refused():
        raise AutosaveError("another program")

    with pytest.raises(AutosaveError, match="another program"):
        begin_together(FIRST, tmp_path, refused)
    assert begin_together(SECOND, tmp_path, never).problem == "another program"


def test_a_silent_rank_0_is_not_waited_for_for_ever(launched, tmp_path, monkeypatch):
    monkeypatch.setattr(run_meeting, "_DEADLINE_SECONDS", 0.2)
    with pytest.raises(AutosaveError, match=r"rank 0 did not say within 0\.2 s"):
        begin_together(SECOND, tmp_path, never)
