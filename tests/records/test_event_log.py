"""The event log: what is written is read back, also after a kill or on a full disk."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import RunError
from outlast.records import Event, RecordWriter, RunDirectory, Warned, event_file, read_run
from outlast.records.events import KINDS, StepsDone

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
BY_ANNOTATION: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(),
    "float": st.floats(),
    "float | None": st.none() | st.floats(),
    "str": st.text(),
    "list[int]": st.lists(st.integers(), max_size=5),
    "list[list[int]]": st.lists(st.lists(st.integers(), max_size=3), max_size=3),
    "list[float]": st.lists(st.floats(), max_size=5),
    "list[str]": st.lists(st.text(), max_size=3),
    "dict[str, int]": st.dictionaries(st.text(), st.integers(), max_size=3),
    "dict[str, float]": st.dictionaries(st.text(), st.floats(), max_size=3),
    "dict[str, str]": st.dictionaries(st.text(), st.text(), max_size=3),
    "dict[str, dict[str, Any]]": st.dictionaries(
        st.text(), st.dictionaries(st.text(), JSON_VALUES, max_size=3), max_size=3
    ),
    "dict[str, Any]": st.dictionaries(st.text(), JSON_VALUES, max_size=3),
    "list[dict[str, Any]]": st.lists(
        st.dictionaries(st.text(), JSON_VALUES, max_size=3), max_size=3
    ),
}


def events(kind: type[Event]) -> st.SearchStrategy[Event]:
    fields = dataclasses.fields(kind)
    return st.builds(kind, **{each.name: BY_ANNOTATION[str(each.type)] for each in fields})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    RunDirectory(tmp_path / "run").create("")
    return tmp_path / "run"


def steps_done(step: int, loss: float = 1.5) -> StepsDone:
    return StepsDone(step, 1, loss, 0.5, 1e-3, 64 * step, [0.1], {"compute": 0.1})


def messages(directory: Path, rank: int = 0) -> list[str]:
    return [event.message for _, event in read_run(directory).of(Warned, rank)]


def test_every_kind_is_known_to_the_round_trip() -> None:
    assert len(KINDS) >= 11
    assert set(KINDS) == {kind.kind for kind in KINDS.values()}


def test_no_field_is_named_as_one_of_the_envelope() -> None:
    envelope = {"v", "kind", "time", "monotonic", "rank", "attempt"}
    for kind in KINDS.values():
        assert not envelope & {each.name for each in dataclasses.fields(kind)}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_event_of_every_kind_is_read_as_it_was_written(
    kind: type[Event], tmp_path_factory: pytest.TempPathFactory
) -> None:
    @given(st.lists(events(kind), min_size=1, max_size=4))
    @settings(deadline=None, max_examples=15)
    def law(written: list[Event]) -> None:
        directory = tmp_path_factory.mktemp("run")
        RunDirectory(directory).create("")
        writer = RecordWriter(directory, attempt=3)
        for event in written:
            writer.write(event)
        writer.close()
        assert writer.lost_events == 0
        records = read_run(directory).records
        assert [repr(record.event) for record in records] == [repr(event) for event in written]
        assert {(record.rank, record.attempt) for record in records} == {(0, 3)}

    law()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_is_kept_in_strict_json(directory: Path, loss: float) -> None:
    writer = RecordWriter(directory)
    writer.write(StepsDone(1, 1, loss, loss, loss, 1, [loss], {"compute": loss}))
    writer.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads(event_file(directory, 0).read_text(), parse_constant=refuse)
    ((_, event),) = read_run(directory).of(StepsDone)
    expected = repr(loss)
    assert repr(event.loss) == repr(event.learning_rate) == expected
    assert repr(event.step_seconds) == f"[{expected}]"


def test_line_carries_the_envelope(directory: Path) -> None:
    RecordWriter(directory, rank=2, attempt=7).write(Warned("careful"))
    line = json.loads((directory / "events.rank2.jsonl").read_text())
    assert line.pop("time") > 1.7e9
    assert line.pop("monotonic") > 0
    assert line == {"v": 1, "kind": "warned", "rank": 2, "attempt": 7, "message": "careful"}


def test_event_is_on_file_when_write_returns(directory: Path) -> None:
    writer = RecordWriter(directory)
    writer.write(Warned("a"))
    assert messages(directory) == ["a"]
    writer.close()


def test_an_event_after_the_end_is_lost_and_in_no_other_file(directory: Path) -> None:
    writer = RecordWriter(directory)
    writer.close()
    # It gets the number that the event log had.
    with (directory / "other").open("w") as other:
        writer.write(Warned("late"))
        writer.close()
        assert not other.closed
    assert writer.lost_events == 1
    assert messages(directory) == []
    assert (directory / "other").read_text() == ""


def test_file_cut_at_any_byte_of_its_last_line_keeps_the_lines_before(directory: Path) -> None:
    writer = RecordWriter(directory)
    for message in ("one", "two\nlines", "three \u00fc\U0001f600"):
        writer.write(Warned(message))
    writer.close()
    path = event_file(directory, 0)
    whole = path.read_bytes()
    kept = whole[:-1].rindex(b"\n") + 1
    for length in range(kept, len(whole) + 1):
        path.write_bytes(whole[:length])
        before = messages(directory)
        assert before[:2] == ["one", "two\nlines"]
        assert len(before) == (3 if length >= len(whole) - 1 else 2)
        writer = RecordWriter(directory, attempt=2)
        writer.write(Warned("after"))
        writer.close()
        assert messages(directory) == [*before, "after"]


def test_damaged_lines_are_skipped(directory: Path) -> None:
    writer = RecordWriter(directory)
    writer.write(Warned("before"))
    path = event_file(directory, 0)
    good = path.read_bytes()
    damaged = [
        b"",
        b"\0" * 300,
        b"\xff\xfe",
        b"5",
        b"[]",
        b"null",
        b'"text"',
        good[:-1].replace(b'"rank": 0', b'"rank": Infinity'),
        good[:-1].replace(b'"time": ', b'"time": "x", "t": '),
        good[:-1].replace(b"message", b"massage"),
        good[:-1].replace(b'"warned"', b'"checkpoint_failed", "step": 1'),
        good[:-1].replace(b'"warned"', b'"ready", "step": 1, "seconds": "much", "parts": {}'),
    ]
    with path.open("ab") as file:
        file.write(b"\n".join(damaged) + b"\n")
    writer.write(Warned("after"))
    writer.close()
    assert messages(directory) == ["before", "after"]
    assert len(read_run(directory).records) == 2


def test_unknown_kinds_and_fields_are_ignored(directory: Path) -> None:
    writer = RecordWriter(directory)
    writer.write(Warned("known"))
    writer.close()
    path = event_file(directory, 0)
    line = json.loads(path.read_text())
    newer = [line | {"v": 2, "severity": 3}, line | {"kind": "teleported"}]
    with path.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in newer)
    assert messages(directory) == ["known", "known"]
    assert len(read_run(directory).records) == 2


def test_full_disk_loses_events_but_never_raises(directory: Path) -> None:
    # Every write to /dev/full fails with ENOSPC, and an fsync with EINVAL.
    event_file(directory, 0).symlink_to("/dev/full")
    writer = RecordWriter(directory)
    for step in range(3):
        writer.write(steps_done(step))
    assert writer.lost_events == 3
    writer.close()


def test_disk_that_fills_up_within_a_line_costs_that_line_alone(
    directory: Path, file_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    writer = RecordWriter(directory)
    writer.write(Warned("first"))
    size_bytes = event_file(directory, 0).stat().st_size
    with file_limit(size_bytes + 20):  # the next line is cut short, the one after it refused
        writer.write(Warned("cut"))
        writer.write(Warned("refused"))
    assert event_file(directory, 0).stat().st_size == size_bytes + 20
    assert writer.lost_events == 2
    writer.write(Warned("space again"))
    writer.close()
    assert messages(directory) == ["first", "space again"]


def test_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"events\.jsonl cannot be written: No such file"):
        RecordWriter(tmp_path / "absent")


def test_closing_twice_is_harmless(directory: Path) -> None:
    writer = RecordWriter(directory)
    writer.close()
    writer.close()


class Broken:
    """A sink that fails from the start."""

    def write(self, event: Event) -> None:
        raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise ConnectionError("the server is still gone")


class Listening:
    def __init__(self) -> None:
        self.heard: list[Event] = []
        self.closed = False

    def write(self, event: Event) -> None:
        self.heard.append(event)

    def close(self) -> None:
        self.closed = True


def test_sink_that_fails_is_left_out_with_a_warning(directory: Path) -> None:
    listening = Listening()
    writer = RecordWriter(directory, sinks=[Broken(), Broken(), listening])
    writer.write(Warned("a"))
    writer.write(Warned("b"))
    writer.close()
    dropped = "Broken failed and gets no more events: the server is gone"
    assert sorted(messages(directory)) == sorted(["a", "b", dropped, dropped])
    assert sorted(each.message for each in listening.heard) == sorted(messages(directory))
    assert listening.closed


def test_sink_that_cannot_close_keeps_no_other_from_closing(directory: Path) -> None:
    class BrokenAtTheEnd(Listening):
        def close(self) -> None:
            raise OSError("no space")

    listening = Listening()
    writer = RecordWriter(directory, sinks=[BrokenAtTheEnd(), listening])
    writer.close()
    assert listening.closed
    assert messages(directory) == ["BrokenAtTheEnd failed and gets no more events: no space"]
