"""forks/klong.py: the window against a list that grows and is cut; rollout and training under one history."""
import os

import pytest
import torch
from conftest import PAGE, Env, task_at, tiny_model
from test_forks import METHODS, hard_and_easy, play, pointing  # noqa: F401 (fixtures)
from test_forks_checklist import on_one_and_two_ranks
from test_mgrpo import logprobs, method_of, trajectory

import evaluate
import mgrpo
import rollout
from compress import context, messages, trajectory_rows, trunk
from forks import klong
from model import load

METHODS[klong] = klong.KLong
SMALL = {"window": 4, "overlap": 2, "pinned": 1}


def klong_of(chat, model=None, optimizer=None, **changes):
    return method_of(chat, model, klong.Config(**SMALL | changes), optimizer, Method=klong.KLong)


@pytest.fixture
def windowed(tokenizer):
    """A chat of its own, since a window stays on it."""
    from compress import Chat
    return Chat(tokenizer, "You browse the web.")


@pytest.fixture
def model(tokenizer):
    return tiny_model(vocab_size=tokenizer.get_vocab_size())


# ------------------------------------------------------------------------------------------- the window


def visible(t, W, O, P):
    """The turns that turn t sees, itself included: a list that is cut to its newest O + 1 when it exceeds W."""
    window = []
    for k in range(t + 1):
        window.append(k)
        if len(window) > W:
            window = window[-(O + 1):]
    return sorted({*range(min(P, t)), *window})


@pytest.mark.parametrize("W, O, P", [(6, 3, 1), (4, 2, 1), (4, 0, 1), (1, 0, 1), (5, 4, 2), (3, 1, 7), (9, 2, 3)])
def test_the_window_is_a_list_that_is_cut_when_it_is_full(W, O, P):
    for t in range(40):
        gone = klong.dropped(t, window=W, overlap=O, pinned=P)
        assert [k for k in range(t + 1) if k not in gone] == visible(t, W, O, P)


def test_the_example_in_the_docstring():
    sees = lambda t: [k for k in range(t) if k not in klong.dropped(t, window=6, overlap=3, pinned=1)]
    assert [sees(t) for t in (5, 6, 8, 9)] == [[0, 1, 2, 3, 4], [0, 3, 4, 5], [0, 3, 4, 5, 6, 7], [0, 6, 7, 8]]


def obvious_context(chat, tau, t, W, O, P):
    """h_t, message by message, from the turns that turn t sees."""
    ids = chat.system_ids()
    for k in visible(t, W, O, P)[:-1]:
        ids += chat.user_ids(tau.task, k, "** Simplified html **") + chat.past_response(tau.turns[k].action_ids)
    return ids + tau.turns[t].observation_ids


def test_rows_are_the_contexts_under_the_window(windowed):
    klong_of(windowed)
    tau = trajectory(windowed, 1.0, [3] * 11)
    rows = trajectory_rows(windowed, tau)
    for t, row in enumerate(rows):
        h_t = obvious_context(windowed, tau, t, 4, 2, 1)
        assert context(windowed, tau, t) == h_t and row.ids == h_t + tau.turns[t].action_ids
        assert row.n_action == 3
    said = messages(windowed, tau)
    rounds = [message["content"].split("Round ")[1].split("\n")[0] for message in said if message["role"] == "user"]
    assert list(map(int, rounds)) == visible(10, 4, 2, 1) and said[1]["content"].startswith("Task: do it")


def test_an_episode_within_one_window_has_the_rows_of_mgrpo(chat, windowed):
    klong_of(windowed)
    tau = trajectory(chat, 1.0, [3, 5, 2, 4])
    ours, theirs = trajectory_rows(windowed, tau), trajectory_rows(chat, tau)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.ids, one.n_action) == (other.ids, other.n_action)
        assert one.after == other.after == []
    for t in range(50):
        assert len(chat.dropped(t)) == 0  # a window is on the method's own chat alone


# ---------------------------------------------------------------------------------- rollout and training


@pytest.fixture
def played(run, site, windowed, model, monkeypatch):
    """Two episodes of ten turns on real pages, and what the engine could keep of its cache at each turn."""
    kept = {}
    prefill = rollout.Engine.prefill

    def counted(engine, request, *args):
        kept.setdefault(request.slot, []).append(len(os.path.commonprefix([engine.held[request.slot], request.ids])))
        return prefill(engine, request, *args)
    monkeypatch.setattr(rollout.Engine, "prefill", counted)
    klong_of(windowed)
    settings = rollout.Settings(max_turns=10, max_new_tokens=6, max_context=900, concurrency=2, timeout=10)
    task = task_at(site({"/": PAGE}))
    episodes = run(rollout.rollout(model, windowed, [task], Env(), settings, group=2, seed=3, temperature=0.7))
    assert [len(tau.turns) for tau in episodes] == [10, 10]
    for tau in episodes:
        tau.reward = tau.success = float(tau.member)
    return episodes, kept


def test_log_probs_of_training_are_those_of_sampling_where_the_window_moves(played, windowed, chat, model):
    episodes, _ = played
    for max_tokens in (1, 700, 10**6):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        method = klong_of(windowed, model, optimizer, G=2, max_tokens=max_tokens, temperature=0.7)
        rows, metrics = method.learn_from(episodes, 0)
        assert metrics["windows"] == 4 and len(rows) == 20
        assert mgrpo.update(method, rows)["logp_gap"] < 1e-5
    for row in rows:  # and one by one
        torch.testing.assert_close(logprobs(model, row, 0.7), torch.tensor(row.logps), atol=1e-4, rtol=0)
    whole = method_of(chat, model, mgrpo.Config(G=2, temperature=0.7), optimizer)  # what it would be without the hook
    rows, _ = whole.learn_from(episodes, 0)
    assert mgrpo.update(whole, rows)["logp_gap"] > 1e-2


def test_the_cache_restarts_only_where_the_window_moves(played, windowed):
    episodes, kept = played
    for tau, common in zip(episodes, (kept[0], kept[1])):
        assert len(common) == 10
        pinned = len(trunk(windowed, tau, 1))
        for t in range(1, 10):
            moved = windowed.dropped(t) != windowed.dropped(t - 1)
            assert moved == (t in (4, 6, 8))
            before = len(trunk(windowed, tau, t - 1))
            if moved:
                assert pinned <= common[t] < before
            else:
                assert common[t] >= before
        longest = max(len(context(windowed, tau, t)) for t in range(10))
        assert longest < len(context_without_window(windowed, tau, 9))


def context_without_window(chat, tau, t):
    return obvious_context(chat, tau, t, W=99, O=0, P=1)


def test_the_gradient_is_that_of_one_row_a_turn(windowed, model):
    """Sub-trajectories share the episode's advantage; every response counts once."""
    cfg = dict(G=3, temperature=1.0, clip=1e9, loss_norm="token")
    group = [trajectory(windowed, float(i == 0), [2 + i] * (5 + 3 * i), seed=i, member=i) for i in range(3)]
    method = klong_of(windowed, model, **cfg)
    rows, _ = method.learn_from(group, 0)
    tokens = sum(len(turn.action_ids) for tau in group for turn in tau.turns)
    expected = 0
    for tau in group:
        A = {1.0: 2 / 3, 0.0: -1 / 3}[tau.reward] / (1 / 3) ** 0.5
        for t, turn in enumerate(tau.turns):
            h_t = obvious_context(windowed, tau, t, 4, 2, 1)
            ids = torch.tensor([h_t + turn.action_ids])
            logp_TV = model(ids)[0].log_softmax(-1)
            for k, token in enumerate(turn.action_ids):
                rho = (logp_TV[len(h_t) + k - 1, token] - turn.logps[k]).exp()
                expected = expected - min(rho * A, rho.clamp(0.8, 1.2) * A) / tokens
    expected_grads = dict(zip([name for name, _ in model.named_parameters()],
                              torch.autograd.grad(expected, list(model.parameters()))))
    for max_tokens in (1, 400, 10**6):
        grads = {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.step = lambda: grads.update({name: p.grad.clone() for name, p in model.named_parameters()})
        method = klong_of(windowed, model, optimizer, max_tokens=max_tokens, **cfg)
        assert mgrpo.update(method, rows)["loss"] == pytest.approx(expected.item(), abs=1e-5)
        for name, gradient in expected_grads.items():
            torch.testing.assert_close(grads[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


# -------------------------------------------------------------------------------- stages, and the script


def test_stages_raise_max_turns_in_equal_shares_of_the_steps():
    allowed = lambda **given: [klong.turns_allowed(step, klong.Config(**given)) for step in range(given["steps"])]
    assert allowed(steps=6, stages=3, max_turns=9) == [3, 3, 6, 6, 9, 9]
    assert allowed(steps=5, stages=2, max_turns=7) == [3, 3, 3, 7, 7]
    assert allowed(steps=3, stages=1, max_turns=7) == [7, 7, 7]
    assert allowed(steps=3, stages=3, max_turns=2) == [1, 1, 2]  # never none


def test_episodes_are_played_by_stages_and_evaluated_in_full(chat, play, monkeypatch, capsys):  # noqa: F811
    """The last line once proposed evaluate.py, which plays without the window."""
    seen, greedy = [], []

    async def watched(*args, settings, **kwargs):
        seen.append(settings.max_turns)
        return await hard_and_easy(chat)(*args, settings=settings, **kwargs)

    async def evaluated(model, chat_, tasks, *, env, settings, **kwargs):
        greedy.append((settings.max_turns, len(chat_.dropped(9))))
        return [trajectory(chat, 1.0, [3]) for _ in tasks]
    monkeypatch.setattr(evaluate, "rollout", evaluated)
    lines = play(klong, watched, "x", steps=4, stages=2, max_turns=8, held_out="x", held_out_every=1, **SMALL)
    assert seen == [line["turns_allowed"] for line in lines] == [4, 4, 8, 8]
    assert greedy == [(8, 5)] * 4 and all(line["windows"] == 1 for line in lines)
    assert "/x; evaluate.py would play it without the window; --held-out plays" in capsys.readouterr().out


def test_an_interrupted_run_continues_as_if_nothing_had_happened(chat, play, tmp_path):  # noqa: F811
    """Bit for bit, the stage included."""
    limits = []

    async def long(*args, settings, seed, **kwargs):
        limits.append(settings.max_turns)
        played = await hard_and_easy(chat)(*args, settings=settings, seed=seed, **kwargs)
        for tau in played:  # as long as the stage allows
            more = trajectory(chat, 0.0, [3] * settings.max_turns, seed=tau.member)
            tau.turns = [*tau.turns, *more.turns][:settings.max_turns]
        return played

    async def interrupted(*args, seed, **kwargs):
        if seed == "0/3":
            raise KeyboardInterrupt
        return await long(*args, seed=seed, **kwargs)
    more = {"stages": 2, "max_turns": 9, "save_every": 2, **SMALL}
    whole = play(klong, long, "whole", **more)
    assert len(play(klong, interrupted, "parts", **more)) == 3
    limits.clear()
    parts = play(klong, long, "parts", **more)
    assert limits == [4, 9, 9] and max(line["windows"] for line in whole) > 2  # from step 2 on
    timeless = lambda lines: [{k: v for k, v in line.items() if "second" not in k} for line in lines]
    assert timeless(parts) == timeless(whole)
    a, b = (load(tmp_path / out).state_dict() for out in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("changes, says", [
    ({"pinned": 0}, "--pinned 0.*states the task"), ({"overlap": 4, "window": 4}, "--overlap 4.*--window 4"),
    ({"overlap": -1}, "--overlap -1: give at least 0"), ({"stages": 0}, "--stages 0"), ({"stages": 19, "steps": 18}, "--stages 19")])
def test_a_window_that_drops_the_task_or_never_moves_is_refused(windowed, changes, says):
    with pytest.raises(ValueError, match=says):
        klong_of(windowed, **changes)


@pytest.mark.slow
def test_two_ranks_do_what_one_does(pointing, sandbox_sites, monkeypatch, tmp_path):  # noqa: F811
    found = on_one_and_two_ranks(klong, pointing, sandbox_sites, monkeypatch, tmp_path, "--max-turns", 4,
                                 "--window", 2, "--overlap", 0, "--stages", 2)
    for one, two in zip(*found, strict=True):
        assert one["windows"] == pytest.approx(two["windows"]) and one["turns_allowed"] == two["turns_allowed"]
        assert one["logp_gap"] is None or max(one["logp_gap"], two["logp_gap"]) < 1e-5
    assert [line["turns_allowed"] for line in found[0]] == [2, 4] and found[0][1]["windows"] > 1
