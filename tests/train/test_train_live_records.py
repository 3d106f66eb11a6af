"""What live groups record: every step once, whoever of them has died when."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.records import RecordWriter, RunDirectory, StepsDone, Warned, read_run
from outlast.train.live import GroupRecords, Post


class Groups:
    """The others, as far as a log wants to know of them."""

    met = True
    writes = False


def done(step: int) -> StepsDone:
    return StepsDone(step, 1, 1.0, 1.0, 1.0, 0, [0.1], {})


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path / "run")
    found.create("")
    found.next_attempt()
    return found


@pytest.fixture
def log(directory: RunDirectory) -> Iterator[GroupRecords]:
    records = GroupRecords(directory, Post(1, 2, "", 1), list)
    records.groups = Groups()  # type: ignore[assignment]
    yield records
    records.close()


def recorded(directory: RunDirectory) -> list[int]:
    return [event.step for _, event in read_run(directory.path).of(StepsDone)]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_next_writer_records_the_steps_that_the_last_one_has_not(
    lost: int, directory: RunDirectory, log: GroupRecords
) -> None:
    first = RecordWriter(directory.path)
    for step in range(1, 13):
        log.write(done(step))
        if step <= 12 - lost:
            first.write(done(step))
    first.close()
    log.groups.writes = True  # type: ignore[union-attr,misc]
    log.write(Warned("the other group is gone"))
    assert recorded(directory) == list(range(1, 13))
    log.write(done(13))
    assert recorded(directory) == list(range(1, 14))


def test_who_does_not_write_leaves_no_line(directory: RunDirectory, log: GroupRecords) -> None:
    log.write(done(1))
    log.write(Warned("nobody hears this"))
    log.close()
    assert read_run(directory.path).records == []
