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
    cfg = klong.Config(**SMALL | changes)
    return method_of(chat, model, cfg, optimizer, Method=klong.KLong)


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
    pinned = range(min(P, t))
    return sorted({*pinned, *window})


@pytest.mark.parametrize("W, O, P", [
    (6, 3, 1),
    (4, 2, 1),
    (4, 0, 1),
    (1, 0, 1),
    (5, 4, 2),
    (3, 1, 7),
    (9, 2, 3),
])
def test_the_window_is_a_list_that_is_cut_when_it_is_full(W, O, P):
    for t in range(40):
        gone = klong.dropped(t, window=W, overlap=O, pinned=P)
        kept = [k for k in range(t + 1) if k not in gone]
        assert kept == visible(t, W, O, P)


def test_the_example_in_the_docstring():
    def sees(t):
        gone = klong.dropped(t, window=6, overlap=3, pinned=1)
        return [k for k in range(t) if k not in gone]

    assert sees(5) == [0, 1, 2, 3, 4]
    assert sees(6) == [0, 3, 4, 5]
    assert sees(8) == [0, 3, 4, 5, 6, 7]
    assert sees(9) == [0, 6, 7, 8]


def obvious_context(chat, tau, t, W, O, P):
    """h_j, message by message, from the turns that turn t sees."""
    *earlier, now = visible(t, W, O, P)
    ids = chat.system_ids()
    for k in earlier:
        ids += chat.user_ids(tau.task, k, "** Simplified html **")
        ids += chat.past_response(tau.turns[k].response_ids)
    return ids + tau.turns[now].message_ids


def test_rows_are_the_contexts_under_the_window(windowed):
    klong_of(windowed)
    tau = trajectory(windowed, 1.0, [3] * 11)

    rows = trajectory_rows(windowed, tau)
    for t, row in enumerate(rows):
        h_j = obvious_context(windowed, tau, t, 4, 2, 1)
        assert context(windowed, tau, t) == h_j
        assert row.ids == h_j + tau.turns[t].response_ids
        assert row.n_action == 3

    said = messages(windowed, tau)
    rounds = []
    for message in said:
        if message["role"] == "user":
            _, _, behind = message["content"].partition("Round ")
            number, _, _ = behind.partition("\n")
            rounds.append(int(number))
    assert rounds == visible(10, 4, 2, 1)
    assert said[1]["content"].startswith("Task: do it")


def test_an_episode_within_one_window_has_the_rows_of_mgrpo(chat, windowed):
    klong_of(windowed)
    tau = trajectory(chat, 1.0, [3, 5, 2, 4])
    ours = trajectory_rows(windowed, tau)
    theirs = trajectory_rows(chat, tau)
    for one, other in zip(ours, theirs, strict=True):
        assert one.ids == other.ids
        assert one.n_action == other.n_action
        assert one.after == []
        assert other.after == []

    for t in range(50):
        assert len(chat.dropped(t)) == 0  # a window is on the method's own chat alone


# ---------------------------------------------------------------------------------- rollout and training


@pytest.fixture
def played(run, site, windowed, model, monkeypatch):
    """Two episodes of ten turns on real pages, and what the engine could keep of its cache at each turn."""
    kept = {}
    prefill = rollout.Engine.prefill

    def counted(engine, request, *args):
        held = engine.held[request.slot]
        common = os.path.commonprefix([held, request.context_ids])
        kept.setdefault(request.slot, []).append(len(common))
        return prefill(engine, request, *args)
    monkeypatch.setattr(rollout.Engine, "prefill", counted)

    klong_of(windowed)
    settings = rollout.Settings(
        max_turns=10,
        max_new_tokens=6,
        max_context=900,
        concurrency=2,
        timeout=10,
    )
    task = task_at(site({"/": PAGE}))
    playing = rollout.rollout(
        model,
        windowed,
        [task],
        Env(),
        settings,
        group_size=2,
        seed=3,
        temperature=0.7,
    )
    episodes = run(playing)

    assert [len(tau.turns) for tau in episodes] == [10, 10]
    for tau in episodes:
        tau.success = float(tau.member)
        tau.reward = tau.success
    return episodes, kept


def test_log_probs_of_training_are_those_of_sampling_where_the_window_moves(played, windowed, chat, model):
    episodes, _ = played
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for max_tokens in (1, 700, 10**6):
        method = klong_of(windowed, model, optimizer, G=2, max_tokens=max_tokens, temperature=0.7)
        rows, metrics = method.training_rows(episodes, 0)
        assert metrics["windows"] == 4
        assert len(rows) == 20
        assert method.update(rows)["logp_gap"] < 1e-5

    for row in rows:  # and one by one
        logp = logprobs(model, row, 0.7)
        torch.testing.assert_close(logp, torch.tensor(row.logps), atol=1e-4, rtol=0)

    # What it would be without the hook.
    whole = method_of(chat, model, mgrpo.Config(G=2, temperature=0.7), optimizer)
    rows, _ = whole.training_rows(episodes, 0)
    assert whole.update(rows)["logp_gap"] > 1e-2


def test_the_cache_restarts_only_where_the_window_moves(played, windowed):
    episodes, kept = played
    for slot, tau in enumerate(episodes):
        common = kept[slot]
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
        without_window = obvious_context(windowed, tau, 9, W=99, O=0, P=1)
        assert longest < len(without_window)


def test_the_gradient_is_that_of_one_row_a_turn(windowed, model):
    """Sub-trajectories share the episode's advantage; every response counts once."""
    cfg = dict(G=3, temperature=1.0, max_grad_norm=1e9, loss_norm="token")
    group = []
    for i in range(3):
        success = float(i == 0)
        lengths = [2 + i] * (5 + 3 * i)
        group.append(trajectory(windowed, success, lengths, seed=i, member=i))
    method = klong_of(windowed, model, **cfg)
    rows, _ = method.training_rows(group, 0)

    # One turn and one token at a time. The mean reward is 1/3, its variance too.
    tokens = 0
    for tau in group:
        tokens += sum(len(turn.response_ids) for turn in tau.turns)
    expected = 0
    for tau in group:
        A = (tau.reward - 1 / 3) / (1 / 3) ** 0.5
        for t, turn in enumerate(tau.turns):
            h_j = obvious_context(windowed, tau, t, 4, 2, 1)
            ids = torch.tensor([h_j + turn.response_ids])
            logp_TV = model(ids)[0].log_softmax(-1)
            for k, token in enumerate(turn.response_ids):
                logp = logp_TV[len(h_j) + k - 1, token]
                rho = (logp - turn.logps[k]).exp()
                clipped = rho.clamp(0.8, 1.2)
                expected = expected - min(rho * A, clipped * A) / tokens
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(expected, list(model.parameters()))

    for max_tokens in (1, 400, 10**6):
        grads = {}

        def keep_gradients():
            for name, parameter in model.named_parameters():
                grads[name] = parameter.grad.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.step = keep_gradients

        method = klong_of(windowed, model, optimizer, max_tokens=max_tokens, **cfg)
        metrics = method.update(rows)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
        for name, gradient in zip(names, gradients):
            torch.testing.assert_close(grads[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


# -------------------------------------------------------------------------------- stages, and the script


def test_stages_raise_max_turns_every_few_steps():
    def allowed(**given):
        cfg = klong.Config(**given)
        return [klong.turns_allowed(step, cfg) for step in range(cfg.steps)]

    assert allowed(steps=9, stages=3, max_turns=9) == [3, 3, 3, 6, 6, 6, 9, 9, 9]
    assert allowed(steps=6, stages=3, stage_steps=2, max_turns=9) == [3, 3, 6, 6, 9, 9]
    assert allowed(steps=5, stages=2, max_turns=7) == [3, 3, 3, 7, 7]
    assert allowed(steps=8, stages=2, max_turns=7)[:5] == [3, 3, 3, 7, 7]  # a longer run begins alike
    assert allowed(steps=3, stages=1, max_turns=7) == [7, 7, 7]
    assert allowed(steps=3, stages=3, stage_steps=1, max_turns=2) == [1, 1, 2]  # never none


def test_episodes_are_played_by_stages_and_evaluated_in_full(chat, play, monkeypatch, capsys):  # noqa: F811
    """The last line once proposed evaluate.py, which plays without the window."""
    limits = []
    evaluations = []

    async def watched(*args, settings, **kwargs):
        limits.append(settings.max_turns)
        return await hard_and_easy(chat)(*args, settings=settings, **kwargs)

    async def evaluated(model, chat_, tasks, *, env, settings, **kwargs):
        n_dropped = len(chat_.dropped(9))
        evaluations.append((settings.max_turns, n_dropped))
        return [trajectory(chat, 1.0, [3]) for _ in tasks]
    monkeypatch.setattr(evaluate, "rollout", evaluated)

    changes = {
        "steps": 4,
        "stages": 2,
        "stage_steps": 2,
        "max_turns": 8,
        "held_out": "x",
        "held_out_every": 1,
        **SMALL,
    }
    lines = play(klong, watched, "x", **changes)

    assert limits == [4, 4, 8, 8]
    assert [line["turns_allowed"] for line in lines] == limits
    assert evaluations == [(8, 5)] * 4
    for line in lines:
        assert line["windows"] == 1
    shown = capsys.readouterr().out
    assert "/x; evaluate.py would play it without the window; --held-out plays" in shown


def test_an_interrupted_run_continues_as_if_nothing_had_happened(chat, play, tmp_path):  # noqa: F811
    """Bit for bit, the stage included."""
    limits = []

    async def long(*args, settings, seed, **kwargs):
        allowed = settings.max_turns
        limits.append(allowed)
        played = await hard_and_easy(chat)(*args, settings=settings, seed=seed, **kwargs)
        for tau in played:  # as long as the stage allows
            more = trajectory(chat, 0.0, [3] * allowed, seed=tau.member)
            turns = [*tau.turns, *more.turns]
            tau.turns = turns[:allowed]
        return played

    async def interrupted(*args, seed, **kwargs):
        if seed == "0/3":
            raise KeyboardInterrupt
        return await long(*args, seed=seed, **kwargs)

    changes = {
        "stages": 2,
        "max_turns": 9,
        "save_every": 2,
        **SMALL,
    }
    whole = play(klong, long, "whole", **changes)
    assert len(play(klong, interrupted, "parts", **changes)) == 3
    limits.clear()
    parts = play(klong, long, "parts", **changes)

    assert limits == [4, 9, 9]  # from step 2 on
    assert max(line["windows"] for line in whole) > 2

    def timeless(lines):
        found = []
        for line in lines:
            found.append({k: v for k, v in line.items() if "second" not in k})
        return found

    assert timeless(parts) == timeless(whole)
    weights = load(tmp_path / "whole").state_dict()
    continued = load(tmp_path / "parts").state_dict()
    for name, weight in weights.items():
        assert torch.equal(weight, continued[name])


@pytest.mark.parametrize("changes, says", [
    ({"pinned": 0}, "--pinned 0.*states the task"),
    ({"overlap": 4, "window": 4}, "--overlap 4.*--window 4"),
    ({"overlap": -1}, "--overlap -1: give at least 0"),
    ({"stages": 0}, "--stages 0"),
    ({"stage_steps": 0}, "--stage-steps 0"),
    ({"stages": 3, "stage_steps": 3, "steps": 6}, "in 6 steps the last stage never begins"),
])
def test_a_window_that_drops_the_task_or_never_moves_is_refused(windowed, changes, says):
    with pytest.raises(ValueError, match=says):
        klong_of(windowed, **changes)


@pytest.mark.slow
def test_two_ranks_do_what_one_does(pointing, sandbox_sites, monkeypatch, tmp_path):  # noqa: F811
    more = [
        "--max-turns", 4,
        "--window", 2,
        "--overlap", 0,
        "--stages", 2,
        "--stage-steps", 1,
    ]
    found = on_one_and_two_ranks(klong, pointing, sandbox_sites, monkeypatch, tmp_path, *more)

    for one, two in zip(*found, strict=True):
        assert one["windows"] == pytest.approx(two["windows"])
        assert one["turns_allowed"] == two["turns_allowed"]
        if one["logp_gap"] is not None:
            assert one["logp_gap"] < 1e-5
            assert two["logp_gap"] < 1e-5
    first, second = found[0]
    assert first["turns_allowed"] == 2
    assert second["turns_allowed"] == 4
    assert second["windows"] > 1
