"""The figures of the equations show what the method computes, and the committed ones are up to date."""
import math
import statistics

import figures
import pytest
from conftest import ROOT

from compress import PLACEHOLDER
from model import load


@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_committed_figure_is_what_the_script_draws(name):
    drawn = figures.FIGURES[name]()
    committed = (ROOT / f"assets/figures/{name}.svg").read_text()
    assert drawn == committed, "run tests/tools/figures.py"


def test_the_advantages_are_those_by_hand():
    svg = figures.advantage_figure(8)
    for k in range(1, 8):
        successes = [1] * k
        failures = [0] * (8 - k)
        r = successes + failures
        mean = statistics.mean(r)
        deviation = statistics.stdev(r)
        of_success = (1 - mean) / deviation
        of_failure = (0 - mean) / deviation
        assert figures.advantages(k, 8) == pytest.approx((of_success, of_failure))
        assert f">{of_success:+.2f}<" in svg
        assert f">{of_failure:+.2f}<" in svg

    assert figures.advantages(0, 8) is None
    assert figures.advantages(8, 8) is None
    assert svg.count("all equal") == 2


def test_the_clip_ends_the_gradient_on_one_side_only():
    for A in (1.0, -1.0):
        for rho in (0.1, 0.79, 0.81, 1.0, 1.19, 1.21, 1.9):
            if A > 0:
                bound = 1.2
                ended = rho > bound
            else:
                bound = 0.8
                ended = rho < bound
            value, slope = figures.surrogate(rho, A, 0.2)
            if ended:
                assert value == pytest.approx(bound * A)
                assert slope == pytest.approx(0.0)
            else:
                assert value == pytest.approx(rho * A)
                assert slope == pytest.approx(rho * A)


def test_the_norms_weigh_tokens_as_their_formulas_say():
    success = figures.made_up(1.0, figures.SUCCESS)
    failure = figures.made_up(0.0, figures.FAILURE)
    tokens = sum(figures.SUCCESS) + sum(figures.FAILURE)

    # {norm: (weight of a token in the first response, in the last one)}. Two episodes; the first response
    # has 8 tokens and is one of 2, the last has 20 and is one of 8. At most 16 responses of 24 tokens.
    by_hand = {
        "token": (1 / tokens, 1 / tokens),
        "paper": (1 / (2 * 2 * 8), 1 / (2 * 8 * 20)),
        "constant": (1 / (2 * 16 * 24), 1 / (2 * 16 * 24)),
    }
    for norm, weights in by_hand.items():
        first, *_, last = figures.weighed(norm, success, failure)
        assert (first.weight, last.weight) == pytest.approx(weights)
        advantages = (first.advantage, last.advantage)
        assert advantages == pytest.approx((math.sqrt(0.5), -math.sqrt(0.5)))

    svg = figures.loss_norms_figure()
    for name, lengths in (("success", figures.SUCCESS), ("failure", figures.FAILURE)):
        assert f">{name}, {sum(lengths)} tokens<" in svg
        assert f">{len(lengths)} turns, A = " in svg


@pytest.mark.parametrize("name", ("compression", "cache"))
def test_a_figure_of_an_episode_says_whose_it_is(name):
    svg = figures.FIGURES[name]()
    assert "The scripted expert's episode in assets/episode.jsonl, 7 turns." in svg


def context_by_hand(chat, tau, t, whole) -> list[int]:
    """The ids before response t; with `whole`, earlier pages stay as they were."""
    ids = list(chat.system_ids())
    for k in range(t):
        turn = tau.turns[k]
        page = PLACEHOLDER
        if whole:
            page = turn.observation
        ids += chat.user_ids(tau.task, k, page)
        ids += turn.response_ids
        ids += chat.encode("\n")
    return ids + chat.user_ids(tau.task, t, tau.turns[t].observation)


def common_beginning(held, ids) -> int:
    """How many of the first ids are equal."""
    common = 0
    for a, b in zip(held, ids):
        if a != b:
            break
        common += 1
    return common


def test_the_contexts_are_those_that_the_engine_reads_and_keeps():
    """Contexts written out by hand; what stays in the cache is their common beginning with what it held."""
    model = load(ROOT / "worlds/base")
    compressing, keeping = figures.two_chats()
    for chat, whole in ((compressing, False), (keeping, True)):
        tau = figures.expert_episode(chat)
        held = []
        expected = []
        sizes = []
        for t, turn in enumerate(tau.turns):
            ids = context_by_hand(chat, tau, t, whole)
            sizes.append(len(ids))
            read = ids[:-1]  # the last id is left to the first step of decoding
            kept = common_beginning(held, read)
            expected.append((kept, len(read) - kept))
            held = ids + turn.response_ids[:-1]
        assert figures.lengths(chat) == sizes
        assert figures.reuse(chat, model) == expected
