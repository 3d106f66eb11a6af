import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.coding.codes.byzantine.aspis import Aspis, AspisPlus, maximum_cliques
from outlast.coding.codes.byzantine.cyclic import DracoCyclic
from outlast.coding.codes.byzantine.shield import ByzShield
from outlast.coding.codes.byzantine.vote import Draco, agree, majority
from outlast.errors import CodingError, LostChunksError

ATTACKS = {
    "sign flip": lambda value, chunk: -3.0 * value,
    "constant": lambda value, chunk: np.full_like(value, 1e6),
    "colluding": lambda value, chunk: value + np.random.default_rng(chunk).normal(size=value.shape),
    "not a number": lambda value, chunk: np.full_like(value, np.nan),
    "small": lambda value, chunk: value * (1 + 1e-3),
}


def gradients_of(chunks, size=3, seed=0):
    return np.random.default_rng(seed).standard_normal((chunks, size))


def results(scheme, gradients, adversaries=(), attack="colluding", spared=lambda chunk: False):
    """What all workers send: adversaries attack the chunks that are not spared."""
    sent = {}
    for worker in range(scheme.workers):
        for chunk in scheme.assignment.chunks_of(worker).tolist():
            sent[worker, chunk] = gradients[chunk]
            if worker in adversaries and not spared(chunk):
                sent[worker, chunk] = ATTACKS[attack](gradients[chunk], chunk)
    return sent


def distorted(scheme, gradients, sent):
    """Chunks decided wrongly, by replacing the vote's aggregate with their sum in pieces."""
    found = 0
    for chunk in range(scheme.chunks):
        copies = {w: value for (w, c), value in sent.items() if c == chunk}
        found += not np.array_equal(majority(copies).value, gradients[chunk])
    return found


SCHEMES = {
    "draco": lambda: Draco(10, 2),
    "latin squares": lambda: ByzShield(5, 3, aggregate="sum"),
    "bigraph": lambda: ByzShield(3, 3, aggregate="sum"),
    "aspis": lambda: Aspis(6, 5, aggregate="sum"),
    "aspis plus": lambda: AspisPlus(9, aggregate="sum"),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", SCHEMES)
def test_exact_and_all_found_for_every_place_of_the_tolerated_adversaries(name, attack):
    scheme = SCHEMES[name]()
    gradients = gradients_of(scheme.chunks)
    for count in range(scheme.tolerated + 1):
        for adversaries in itertools.combinations(range(scheme.workers), count):
            outcome = scheme.vote(results(scheme, gradients, adversaries, attack))
            assert np.array_equal(outcome.gradient, gradients.sum(axis=0))
            assert outcome.suspects == set(adversaries)
            assert not outcome.undecided
            touched = {c for w in adversaries for c in scheme.assignment.chunks_of(w).tolist()}
            assert outcome.disputed == touched


@pytest.mark.parametrize("mask", ["consecutive", "spread"])
@pytest.mark.parametrize(("workers", "adversaries"), [(7, 2), (8, 3), (5, 1), (4, 0)])
def test_the_cyclic_code_finds_every_set_of_adversaries(workers, adversaries, mask):
    scheme = DracoCyclic(workers, adversaries, mask=mask)
    gradients = gradients_of(workers, 5)
    honest = {
        worker: scheme.encode(worker, gradients[scheme.assignment.chunks_of(worker)])
        for worker in range(workers)
    }
    generator = np.random.default_rng(1)
    attacks = [
        lambda message: -message,
        lambda message: message + 1e6 * (1 + 2j),
        lambda message: message + np.eye(5)[2],
        lambda message: message * np.nan,
        lambda message: message + 1e30,
        lambda message: generator.normal(size=message.shape).astype(complex),
    ]
    for count in range(adversaries + 1):
        for chosen in itertools.combinations(range(workers), count):
            attack = attacks[int(generator.integers(len(attacks)))]
            sent = {w: attack(m) if w in chosen else m for w, m in honest.items()}
            outcome = scheme.vote(sent, seed=2)
            assert np.allclose(outcome.gradient, gradients.sum(axis=0), atol=1e-6)
            assert outcome.suspects == set(chosen)


def test_the_cyclic_code_takes_missing_workers_for_adversaries_and_refuses_too_many():
    scheme = DracoCyclic(9, 3)
    gradients = gradients_of(9)
    sent = {w: scheme.encode(w, gradients[scheme.assignment.chunks_of(w)]) for w in range(9)}
    del sent[4]
    sent[0] = -sent[0]
    sent[1] = sent[1] + 1.0
    outcome = scheme.vote(sent)
    assert np.allclose(outcome.gradient, gradients.sum(axis=0), atol=1e-8)
    assert outcome.suspects == {0, 1, 4}
    sent[2] = sent[2] + 1.0
    with pytest.raises(CodingError, match="more than adversaries = 3"):
        scheme.vote(sent)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_random_cyclic_codes_recover_from_random_adversaries(data):
    workers = data.draw(st.integers(1, 14))
    adversaries = data.draw(st.integers(0, min((workers - 1) // 2, 4)))
    scheme = DracoCyclic(workers, adversaries)
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    gradients = generator.standard_normal((workers, 4))
    sent = {w: scheme.encode(w, gradients[scheme.assignment.chunks_of(w)]) for w in range(workers)}
    chosen = generator.choice(workers, adversaries, replace=False).tolist()
    for worker in chosen:
        sent[worker] = sent[worker] + generator.normal(size=4) * 10 ** generator.uniform(-2, 4)
    outcome = scheme.vote(sent)
    assert np.allclose(outcome.gradient, gradients.sum(axis=0), atol=1e-5)
    assert outcome.suspects == set(chosen)


def test_one_adversary_more_than_half_of_a_group_distorts_its_chunk():
    scheme = Draco(6, 1)
    gradients = gradients_of(2)
    outcome = scheme.vote(results(scheme, gradients, {0, 1}))
    assert not np.allclose(outcome.gradient, gradients.sum(axis=0))
    assert outcome.suspects == {2}  # the honest one is outvoted
    spread = scheme.vote(results(scheme, gradients, {0, 3}))
    assert np.array_equal(spread.gradient, gradients.sum(axis=0))


def test_fractions_of_distorted_chunks_are_those_of_the_paper_and_below_the_bound():
    scheme = ByzShield(5, 3)
    assert (scheme.workers, scheme.chunks) == (15, 25)
    # Konstantinidis and Ramamoorthy (2021), table for (K, f, l, r) = (15, 25, 5, 3).
    published = {2: 1, 3: 3, 4: 5, 5: 8, 6: 12, 7: 14}
    for adversaries, chunks in published.items():
        found = scheme.distorted_fraction(adversaries)
        assert found.kind == "exact"
        assert found.value * 25 == pytest.approx(chunks)
        assert found.value <= scheme.distortion_bound(adversaries).value + 1e-12


def test_grouped_workers_distort_more_than_spread_ones():
    grouped, spread = Draco(15, 1), ByzShield(5, 3)
    assert grouped.distorted_fraction(4).value == pytest.approx(2 / 5)
    assert spread.distorted_fraction(4).value == pytest.approx(5 / 25)


def test_the_worst_set_of_adversaries_really_distorts_that_share():
    scheme = ByzShield(3, 3, aggregate="sum")
    gradients = gradients_of(scheme.chunks)
    for count in range(5):
        worst = max(
            distorted(scheme, gradients, results(scheme, gradients, chosen))
            for chosen in itertools.combinations(range(9), count)
        )
        # A colluding majority is half of three copies, rounded up.
        assert scheme.distorted_fraction(count).value * scheme.chunks == pytest.approx(worst)


def test_the_local_search_stays_below_the_bound_and_finds_published_values():
    scheme = ByzShield(7, 5)
    assert (scheme.workers, scheme.chunks) == (35, 49)
    for adversaries in (7, 9):
        found = scheme.distorted_fraction(adversaries)
        assert found.kind == "lower"
        assert found.value <= scheme.distortion_bound(adversaries).value
        # More adversaries than in a set that was examined in full distort more.
        assert found.value > scheme.distorted_fraction(4).value


def test_the_median_of_chunks_holds_against_what_distorts_a_few():
    scheme = ByzShield(5, 3)
    gradients = 1.0 + 0.01 * gradients_of(scheme.chunks)
    sent = results(scheme, gradients, {0, 5, 10}, "constant")
    assert distorted(scheme, gradients, sent) > 0
    outcome = scheme.vote(sent)
    assert np.allclose(outcome.gradient, gradients.sum(axis=0), rtol=0.02)


@pytest.mark.parametrize("scheme", [ByzShield(7, 5), ByzShield(5, 5), AspisPlus(15, seed=4)])
def test_two_workers_share_at_most_one_chunk(scheme):
    shared = (scheme.assignment.incidence @ scheme.assignment.incidence.T).toarray()
    np.fill_diagonal(shared, 0)
    assert shared.max() == 1
    assert set(scheme.assignment.copies.tolist()) == {scheme.replication}
    assert len(set(scheme.assignment.loads.tolist())) == 1


def test_any_two_workers_of_a_triple_system_meet_exactly_once():
    shared = (AspisPlus(21).assignment.incidence @ AspisPlus(21).assignment.incidence.T).toarray()
    assert np.array_equal(shared, np.ones((21, 21)) + 9 * np.eye(21))


def test_aspis_detects_adversaries_that_outvote_chunks():
    scheme = Aspis(7, 3, aggregate="sum")
    gradients = gradients_of(scheme.chunks)
    for adversaries in itertools.combinations(range(7), 3):
        sent = results(scheme, gradients, adversaries)
        outcome = scheme.vote(sent)
        # Three that are wrong everywhere hold the majority of 13 of 35 chunks, but disagree with
        # all honest workers: only the chunk that is theirs alone is lost, and known to be.
        assert distorted(scheme, gradients, sent) == 13
        assert outcome.suspects == set(adversaries)
        assert len(outcome.undecided) == 1


def test_aspis_distorts_no_more_than_published_under_the_attack_of_the_paper():
    scheme = Aspis(7, 3, aggregate="sum")
    gradients = gradients_of(scheme.chunks)
    groups = list(itertools.combinations(range(7), 3))
    chosen, hated = {0, 1, 2}, {3, 4, 5}
    sent = results(
        scheme, gradients, chosen, "constant", spared=lambda c: not set(groups[c]) <= chosen | hated
    )
    outcome = scheme.vote(sent)
    wrong = 1e6 * np.ones(3)
    count = round(float(outcome.gradient[0] - gradients.sum(axis=0)[0]) / wrong[0])
    assert count == round(scheme.detected_fraction(3).value * scheme.chunks) == 10
    assert scheme.detected_fraction(1).value == 0.0


def test_a_triple_system_detects_what_disagrees_with_most():
    scheme = AspisPlus(15, aggregate="sum")
    gradients = gradients_of(scheme.chunks)
    adversaries = {0, 1, 5, 8}
    outcome = scheme.vote(results(scheme, gradients, adversaries))
    assert outcome.suspects == adversaries


def test_adversaries_that_only_outvote_are_found_over_several_steps():
    adversaries, agreement = {0, 4, 7, 9}, np.ones((15, 15), dtype=bool)
    suspects = []
    for step in range(25):
        scheme = AspisPlus(15, seed=step, aggregate="sum")
        holders = [set(scheme.assignment.holders_of(c).tolist()) for c in range(scheme.chunks)]
        gradients = gradients_of(scheme.chunks, seed=step)
        sent = results(
            scheme, gradients, adversaries, spared=lambda c, h=holders: len(h[c] & adversaries) < 2
        )
        outcome = scheme.vote(sent, agreement=agreement)
        suspects.append(outcome.suspects)
    # One step shows few disagreements, and these may blame the honest; in the end all are known,
    # and only a chunk that adversaries hold alone can still be wrong.
    assert suspects[0] != adversaries
    assert suspects[-1] == adversaries
    alone = sum(each <= adversaries for each in holders)
    assert len(outcome.undecided) == alone


def test_copies_of_another_shape_are_wrong_copies():
    scheme = Draco(3, 1)
    sent = results(scheme, gradients_of(1))
    sent[0, 0] = np.ones(7)
    assert scheme.vote(sent).suspects == {0}
    cyclic = DracoCyclic(3, 1)
    gradients = gradients_of(3)
    messages = {w: cyclic.encode(w, gradients) for w in range(3)}
    messages[1] = messages[1][:2]
    outcome = cyclic.vote(messages)
    assert outcome.suspects == {1}
    assert np.allclose(outcome.gradient, gradients.sum(axis=0))


def test_stragglers_are_not_suspected():
    scheme = Aspis(6, 5, aggregate="sum")
    gradients = gradients_of(scheme.chunks)
    sent = results(scheme, gradients, {2})
    sent = {(w, c): value for (w, c), value in sent.items() if w not in {0, 5}}
    outcome = scheme.vote(sent)
    assert outcome.suspects == {2}
    assert np.array_equal(outcome.gradient, gradients.sum(axis=0))
    with pytest.raises(LostChunksError) as caught:
        Draco(6, 1).vote({(3, 1): np.ones(2)})
    assert caught.value.chunks == (0,)


@settings(max_examples=50, deadline=None)
@given(vertices=st.integers(1, 9), seed=st.integers(0, 2**32), density=st.floats(0.1, 0.95))
def test_the_largest_cliques_are_those_found_by_trying_all(vertices, seed, density):
    generator = np.random.default_rng(seed)
    upper = np.triu(generator.random((vertices, vertices)) < density, 1)
    joined = upper | upper.T
    found = maximum_cliques(joined)
    for size in range(vertices, 0, -1):
        every = {
            frozenset(each)
            for each in itertools.combinations(range(vertices), size)
            if all(joined[a, b] for a, b in itertools.combinations(each, 2))
        }
        if every:
            break
    assert len(found) == len(every)
    assert set(found) == every


def test_copies_that_differ_by_rounding_agree_within_a_tolerance():
    value = np.array([1.0, -2.0, 3.0])
    near = value * (1 + 1e-7)
    assert not agree(value, near, 0.0)
    assert agree(value, near, 1e-6)
    assert not agree(value, value + 1e-3, 1e-6)
    assert not agree(np.array([np.inf]), np.array([np.inf]), 1e-6)
    vote = majority({4: value, 7: near, 9: -value}, 1e-6)
    assert vote.decided
    assert vote.dissenting == {9}
    assert not majority({0: value, 1: -value}).decided


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: Draco(10, 1), "9 or 12"),
        (lambda: Draco(5, 3), "2 would do"),
        (lambda: Draco(0, 0), "workers = 0"),
        (lambda: Draco(5, -1), "0 would do"),
        (lambda: DracoCyclic(4, 2), "1 would do"),
        (lambda: ByzShield(8, 3), "7 or 9"),
        (lambda: ByzShield(5, 4), "3 or 5"),
        (lambda: ByzShield(4, 9), "11 would do"),
        (lambda: Aspis(7, 4), "3 or 5"),
        (lambda: Aspis(7, 9), "7 would do"),
        (lambda: Aspis(2, 3), "workers = 2"),
        (lambda: Aspis(200, 5), "AspisPlus"),
        (lambda: Aspis(7, 3).detected_fraction(4), "at most 3"),
        (lambda: AspisPlus(10), "9 or 15"),
        (lambda: AspisPlus(3), "9 or 15"),
        (lambda: Draco(6, 1).vote({(0, 1): np.ones(1)}), "not one that worker 0 computes"),
        (lambda: Draco(6, 1).distorted_fraction(7), "0 to 6"),
        (lambda: DracoCyclic(3, 1).vote({3: np.ones(1)}), "0 to 2"),
        (
            lambda: Aspis(3, 3).vote(
                results(Aspis(3, 3), gradients_of(1)), agreement=np.ones((2, 2), dtype=bool)
            ),
            "3 workers",
        ),
    ],
)
def test_wrong_settings_are_refused_with_what_would_do(make, hint):
    with pytest.raises(CodingError) as caught:
        make()
    assert hint in str(caught.value)


def test_latin_squares_for_ten_thousand_workers_hold_cells_of_one_value():
    scheme = ByzShield(499, 21)
    assert scheme.workers == 10_479
    for square, value in ((1, 0), (7, 100), (21, 498)):
        row, column = np.divmod(scheme.assignment.chunks_of((square - 1) * 499 + value), 499)
        assert row.tolist() == list(range(499))
        assert set(((square * row + column) % 499).tolist()) == {value}


@pytest.mark.parametrize("scheme", [Draco(6, 1), ByzShield(5, 3)], ids=lambda each: each.name)
def test_schemes_show_their_sizes(scheme):
    assert f"workers={scheme.workers}" in repr(scheme)
    assert f"replication={scheme.replication}" in repr(scheme)
