"""Laws that hold for every program: rewriting changes nothing, and resuming changes nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from program_texts import programs
from rerun import DictKeeper, Program, run_plain

from outlast.errors import AutosaveError


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(programs())
def test_a_program_resumed_at_any_step_prints_what_it_prints_plainly(text):
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(text)
        counting = DictKeeper()
        try:
            first, second = Program(script), Program(script)
            printed = first.run(counting)
        except AutosaveError as error:
            event(str(error).partition(": ")[2][:60])
            assume(False)
        plain = run_plain(script)
        assert printed == plain
        for step in counting.asked[:12]:
            keeper = DictKeeper(step)
            assert first.run(keeper) == ""
            assert keeper.saved is not None
            assert second.run(DictKeeper(), keeper.saved) == plain
