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
    assert figures.FIGURES[name]() == (ROOT / f"assets/figures/{name}.svg").read_text(), "run tests/tools/figures.py"


def test_the_advantages_are_those_by_hand():
    svg = figures.advantage_figure(8)
    for k in range(1, 8):
        r = [1] * k + [0] * (8 - k)
        A = [(value - statistics.mean(r)) / statistics.stdev(r) for value in (1, 0)]
        assert figures.advantages(k, 8) == pytest.approx(tuple(A))
        assert f">{A[0]:+.2f}<" in svg and f">{A[1]:+.2f}<" in svg
    assert figures.advantages(0, 8) is None and figures.advantages(8, 8) is None and svg.count("all equal") == 2


def test_the_clip_ends_the_gradient_on_one_side_only():
    for A in (1.0, -1.0):
        for rho in (0.1, 0.79, 0.81, 1.0, 1.19, 1.21, 1.9):
            value, slope = figures.surrogate(rho, A, 0.2)
            ended = rho > 1.2 if A > 0 else rho < 0.8
            bound = 1.2 if A > 0 else 0.8
            assert value == pytest.approx((bound if ended else rho) * A)
            assert slope == pytest.approx(0.0 if ended else rho * A)


def test_the_norms_weigh_tokens_as_their_formulas_say():
    success, failure = figures.made_up(1.0, figures.SUCCESS), figures.made_up(0.0, figures.FAILURE)
    tokens = sum(figures.SUCCESS) + sum(figures.FAILURE)
    for norm, first, last in (("token", 1 / tokens, 1 / tokens), ("paper", 1 / (2 * 2 * 8), 1 / (2 * 8 * 20)),
                              ("constant", 1 / (2 * 16 * 24), 1 / (2 * 16 * 24))):
        rows = figures.weighed(norm, success, failure)
        assert [rows[0].weight, rows[-1].weight] == pytest.approx([first, last])
        assert [rows[0].advantage, rows[-1].advantage] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    svg = figures.loss_norms_figure()
    for name, lengths in (("success", figures.SUCCESS), ("failure", figures.FAILURE)):
        assert f">{name}, {sum(lengths)} tokens<" in svg and f">{len(lengths)} turns, A = " in svg


@pytest.mark.parametrize("name", ("compression", "cache"))
def test_a_figure_of_an_episode_says_whose_it_is(name):
    assert "The scripted expert's episode in assets/episode.jsonl, 7 turns." in figures.FIGURES[name]()


def test_the_contexts_are_those_that_the_engine_reads_and_keeps():
    """Contexts written out by hand; what stays in the cache is their common beginning with what it held."""
    model = load(ROOT / "worlds/base")
    for chat, whole in zip(figures.two_chats(), (False, True)):
        tau = figures.expert_episode(chat)
        held, expected, sizes = [], [], []
        for t in range(len(tau.turns)):
            ids = list(chat.system_ids())
            for k in range(t):
                page = tau.turns[k].observation if whole else PLACEHOLDER
                ids += chat.user_ids(tau.task, k, page) + tau.turns[k].action_ids + chat.encode("\n")
            ids += chat.user_ids(tau.task, t, tau.turns[t].observation)
            kept = 0
            while kept < min(len(held), len(ids) - 1) and held[kept] == ids[kept]:
                kept += 1
            expected.append((kept, len(ids) - 1 - kept))
            sizes.append(len(ids))
            held = ids + tau.turns[t].action_ids[:-1]
        assert figures.lengths(chat) == sizes
        assert figures.reuse(chat, model) == expected
