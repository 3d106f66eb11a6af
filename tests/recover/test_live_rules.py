"""Who takes part in a step, who is ahead and who heals, as pure functions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.errors import RecoverError
from outlast.recover.quorum import (
    Member,
    committed_lineage,
    initial_lineage,
    membership,
    must_restore,
)


def member(number: int, step: int = 0, lineage: str = "0-a", **other: object) -> Member:
    found = Member(f"{number}:life", number, step, lineage, "job", f"m{number}", "s", "h")
    return replace(found, **other)  # type: ignore[arg-type]


def test_members_are_ordered_by_number_and_share_the_batch() -> None:
    found = membership("r", [member(2), member(0), member(1)], "1:life")
    assert [each.number for each in found.members] == [0, 1, 2]
    assert (found.index, found.count) == (1, 3)
    assert found.source is None
    assert found.heals == ()


def test_those_behind_are_spread_over_those_ahead() -> None:
    ahead = committed_lineage("r1")
    present = [member(0, 5, ahead), member(1, 5, ahead), member(2), member(3, 4, ahead)]
    views = [membership("r2", present, each.life) for each in present]
    assert [view.source and view.source.number for view in views] == [None, None, 0, 1]
    assert [view.heals for view in views] == [(2,), (3,), (), ()]
    assert {view.step for view in views} == {5}
    # Those that heal leave this step's batch to the others.
    assert [view.share for view in views] == [(0, 2), (1, 2), (0, 2), (0, 2)]


def test_of_two_versions_of_one_step_the_one_committed_later_is_kept() -> None:
    present = [member(0, 5, committed_lineage("000.1")), member(1, 5, committed_lineage("000.2"))]
    assert membership("r", present, "0:life").source == present[1]
    assert membership("r", present, "1:life").source is None


def test_a_committed_state_wins_over_one_that_was_only_loaded() -> None:
    present = [member(0, 5, initial_lineage("ff")), member(1, 5, committed_lineage("000.1"))]
    assert membership("r", present, "0:life").source == present[1]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["0-a", "0-b", "1-r1", "1-r2"])),
        min_size=1,
        max_size=6,
    )
)
def test_all_members_come_to_one_decision(states: list[tuple[int, str]]) -> None:
    present = [member(number, *state) for number, state in enumerate(states)]
    views = [membership("r", present, each.life) for each in present]
    assert len({(view.members, view.step, view.lineage) for view in views}) == 1
    assert sorted(view.index for view in views) == list(range(len(present)))
    assert (views[0].step, views[0].lineage) == max(states)
    for view, state in zip(views, states, strict=True):
        assert (view.source is None) == (state == max(states))
    healed = [number for view in views for number in view.heals]
    behind = [number for number, state in enumerate(states) if state != max(states)]
    assert sorted(healed) == behind


def test_the_group_that_has_trained_longest_writes() -> None:
    ahead = committed_lineage("r5")
    present = [member(0), member(1, 5, ahead, since="r3"), member(2, 5, ahead, since="r1")]
    views = [membership("r6", present, each.life) for each in present]
    assert {view.writer for view in views} == {"2:life"}
    # One that was stopped has trained for longer, but has to heal.
    present.append(member(3, 4, committed_lineage("r4"), since="r0"))
    assert membership("r6", present, "0:life").writer == "2:life"


def test_at_the_start_the_lowest_group_writes() -> None:
    assert membership("r", [member(2), member(1)], "2:life").writer == "1:life"


def test_another_job_is_refused_by_itself_and_left_out_by_the_others() -> None:
    trained = member(0, 3, committed_lineage("r1"))
    others = [member(1, identity="other"), member(2, identity="other")]
    with pytest.raises(RecoverError, match=r"group 1 is of another job or version \(other\)"):
        membership("r2", [trained, *others], "1:life")
    assert membership("r2", [trained, *others], "0:life").members == (trained,)


def test_the_groups_wait_until_as_many_are_there_as_all_await() -> None:
    assert not membership("r", [member(0, awaits=2)], "0:life").complete
    assert membership("r", [member(0, awaits=2), member(1, awaits=2)], "0:life").complete
    # One that has trained already waits for nobody.
    assert membership("r", [member(0, awaits=3), member(1)], "0:life").complete


@pytest.mark.parametrize(
    ("lineage", "newest", "known", "returning", "why"),
    [
        ("0-a", None, 0, False, None),
        ("0-a", 0, 0, True, None),
        ("0-a", 4, 9, True, None),
        ("1-r", None, 9, True, None),
        ("1-r", 9, 9, False, "one of step 9 is saved"),
        ("0-a", 9, 9, False, "one of step 9 is saved"),
        ("0-a", None, 9, False, "the run has reached step 9"),
        ("0-a", 0, 9, False, "the run has reached step 9"),
        ("0-a", None, 0, True, "it was started again"),
    ],
)
def test_training_goes_on_only_from_the_newest_state_that_is_known(
    lineage: str, newest: int | None, known: int, returning: bool, why: str | None
) -> None:
    found = membership("r", [member(0, 4, lineage)], "0:life")
    said = must_restore(
        found.step, committed=found.committed, newest=newest, known=known, returning=returning
    )
    assert (said is None) if why is None else (why in (said or ""))
