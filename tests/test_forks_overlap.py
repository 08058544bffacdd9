"""forks/overlap.py: the loss against slow loops; who samples what, and when; resumed, in browsers, on two ranks."""
import gc
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import torch
from conftest import ROOT, tiny_model
from test_forks import (METHODS, column, episodes_of, float64, hard_and_easy, parse, play, pointing,  # noqa: F401 (fixtures)
                        timeless)
from test_forks_checklist import on_one_and_two_ranks
from test_forks_losses import (drifted, four_groups, gradient_of, nested, number_of_tokens, of_each_episode,
                               rewards_of, those_that_train, turns_of)
from test_mgrpo import TASKS, logprobs, method_of, trajectory
from test_scripts import ENV, METRICS, command, read, script

import evaluate
import mgrpo
import run as runs
import slow_sites  # tests/tools/slow_sites.py; conftest has set the path
from compress import Chat, context, trajectory_rows
from evaluate import Environment
from forks import overlap
from model import full_state, generate, load, load_tokenizer, shard, unsharded
from run import init_dist, rank

METHODS[overlap] = overlap.Overlap


def overlap_of(chat, model=None, optimizer=None, **changes):
    """A method in its only step, so that no batch is played ahead."""
    settings = {"steps": 1, "G": 4, "temperature": 1.0, "max_grad_norm": 1e9}
    settings.update(changes)
    cfg = overlap.Config(**settings)
    return method_of(chat, model, cfg, optimizer, Method=overlap.Overlap)


# ----------------------------------------------------------------------------------------------- the loss


def advantages_written_out(rewards):
    mean = sum(rewards) / len(rewards)
    squares = sum((r - mean) ** 2 for r in rewards)
    std = (squares / (len(rewards) - 1)) ** 0.5
    return [(r - mean) / std for r in rewards]


def term_written_out(new, start, old, ref, A, beta):
    """What one token adds to the sum. Only `new` is a tensor; the others are numbers."""
    w = min(2.0, math.exp(start - old))
    r = (new - start).exp()
    clipped = min(max(r.item(), 0.8), 1.2)
    if r.item() * A <= clipped * A:
        surrogate = w * r * A
    else:
        surrogate = torch.tensor(w * clipped * A)
    d = ref - new
    kl = d.exp() - d - 1
    return surrogate - beta * kl


def written_out(new, start, old, ref, rewards, beta):
    """The formula, one token at a time: new[k][i][j][t] is a scalar tensor, in the groups k that train."""
    n_tokens = number_of_tokens(new)
    total = 0.0
    for k, group in enumerate(new):
        A = advantages_written_out(rewards[k])
        for i, episode in enumerate(group):
            for j, response in enumerate(episode):
                for t, logp in enumerate(response):
                    term = term_written_out(
                        logp,
                        start[k][i][j][t].item(),
                        old[k][i][j][t].item(),
                        ref[k][i][j][t].item(),
                        A[i],
                        beta,
                    )
                    total = total + term / n_tokens
    return -total


def sampled_logps(rows):
    """(N,): the log-probs of all their tokens when they were sampled."""
    logps = []
    for row in rows:
        logps += row.logps
    return torch.tensor(logps)


def test_value_and_gradient_are_those_of_the_formula(chat, float64):  # noqa: F811
    """float64, 1e-10, in the first update, where r = 1, and in a later one. Some w are cut, some r clipped."""
    method = overlap_of(chat, beta=0.1)
    four = four_groups(chat)
    rows, metrics = method.training_rows(episodes_of(four), 0)
    assert metrics == {"groups_kept": 3, "lag": 0}

    kept = those_that_train(four)
    old = sampled_logps(rows)
    sizes = [row.n_action for row in rows]
    start = old + drifted(sizes, on_policy=False)
    ref = old + drifted(sizes, on_policy=False, seed=1)
    later = start + drifted(sizes, on_policy=False, seed=2)
    for logp in (start, later):
        new = logp.clone().requires_grad_()
        loss, metrics = method.loss(rows, new, ref, None)

        expected = written_out(
            nested(new, kept),
            nested(start, kept),
            nested(old, kept),
            nested(ref, kept),
            rewards_of(kept),
            0.1,
        )
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
        gradient = gradient_of(loss, new)
        torch.testing.assert_close(gradient, gradient_of(expected, new), atol=1e-10, rtol=0)

        log_w = start - old
        n_cut = (log_w > math.log(2)).sum().item()
        assert metrics["w_cut"] == n_cut
        assert 0.05 < n_cut / len(old) < 0.5
        drift = log_w.abs().sum().item()
        assert metrics["drift"] == pytest.approx(drift)
        first_update = torch.equal(new, start)
        if first_update:
            assert metrics["clip_frac"] == 0
        else:
            assert metrics["clip_frac"] > 0.1 * len(new)


def test_the_first_update_pushes_every_token_by_its_weight_times_its_advantage(chat, float64):  # noqa: F811
    """By hand: ten times likelier counts twice, half as likely half. mgrpo.py's clip would stop the first."""
    group = []
    for i, reward in enumerate([1.0, 0, 0, 0]):
        group.append(trajectory(chat, reward, [3], member=i))
    rows, _ = overlap_of(chat).training_rows(group, 0)
    rows = [row for row in rows if row.advantage > 0]
    old = torch.tensor(rows[0].logps)
    likelier = torch.tensor([10.0, 0.5, 1.0])
    new = (old + likelier.log()).requires_grad_()

    def pushes(method):
        loss, _ = method.loss(rows, new, new.detach(), None)
        gradient = gradient_of(loss, new)
        push = -gradient / rows[0].weight / rows[0].advantage
        return push.tolist()
    assert pushes(overlap_of(chat)) == pytest.approx([2, 0.5, 1])
    mgrpos = method_of(chat, None, mgrpo.Config())
    assert pushes(mgrpos) == pytest.approx([0, 0.5, 1])


def test_on_the_policy_that_sampled_the_loss_is_mgrpos(chat, float64):  # noqa: F811
    """Lag 0: its value and gradient, also in later updates."""
    ours = overlap_of(chat, beta=0.1)
    theirs = method_of(chat, None, mgrpo.Config(G=4, beta=0.1))
    rows, _ = ours.training_rows(episodes_of(four_groups(chat)), 0)
    old = sampled_logps(rows)
    sizes = [row.n_action for row in rows]
    ours.loss(rows, old, old, None)  # the first update

    new = (old + drifted(sizes, on_policy=False)).requires_grad_()
    loss, metrics = ours.loss(rows, new, old, None)
    its_loss, its_metrics = theirs.loss(rows, new, old, None)

    torch.testing.assert_close(loss, its_loss, atol=1e-12, rtol=0)
    gradient = gradient_of(loss, new)
    torch.testing.assert_close(gradient, gradient_of(its_loss, new), atol=1e-12, rtol=0)
    assert metrics == its_metrics | {"drift": 0, "w_cut": 0}
    assert metrics["clip_frac"] > 0


@pytest.mark.parametrize("budget", [1, 300, 10**6])
def test_an_update_is_that_of_each_response_alone(chat, budget):
    """Two updates through the model, packed, off-policy: float32, 1e-5. The second one remembers pi_start."""
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    four = four_groups(chat)
    episodes = episodes_of(four)
    turns = turns_of(four)
    alone = []
    for tau in episodes:
        alone += trajectory_rows(chat, tau)
    sizes = [len(turn.response_ids) for turn in turns]
    log_rho = drifted(sizes, on_policy=False).float()
    for turn, row, drift in zip(turns, alone, log_rho.split(sizes), strict=True):
        logps = logprobs(model, row) - drift
        turn.logps = logps.tolist()

    def when_sampled(tau):
        return [torch.tensor(turn.logps) for turn in tau.turns]

    def now(tau):
        return [logprobs(model, row) for row in trajectory_rows(chat, tau)]

    def without_gradient(episode):
        return [logp.detach() for logp in episode]
    kept = those_that_train(four)
    rewards = rewards_of(kept)
    old = of_each_episode(kept, when_sampled)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    method = overlap_of(chat, model, optimizer, max_tokens=budget)
    rows, _ = method.training_rows(episodes, 0)
    step = optimizer.step
    gradients = {}

    def recorded():
        for name, weight in model.named_parameters():
            gradients[name] = weight.grad.clone()
        step()
    optimizer.step = recorded

    start = None
    for clips in (False, True):
        new = of_each_episode(kept, now)
        start = start or of_each_episode(new, without_gradient)
        expected = written_out(new, start, old, start, rewards, 0.0)
        expected_gradients = torch.autograd.grad(expected, list(model.parameters()))
        metrics = method.update(rows)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
        assert metrics["w_cut"] > 0
        assert (metrics["clip_frac"] > 0) == clips
        for (name, _), gradient in zip(model.named_parameters(), expected_gradients):
            torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


# ------------------------------------------------------------------------------------- who samples, and when


def sampled(chat, before=runs.ignore, after=runs.ignore):
    """A stand-in for rollout whose responses the given model samples.

    before(seed, env), after(seed, model): called as a batch begins, and when it is played.
    """
    def episode(whole, number, i, temperature, seed):
        succeeds = (i + number) % 2
        n_turns = 1 + (i + number) % 3
        tau = trajectory(chat, float(succeeds), [1] * n_turns, seed=number, member=i)
        tau.task["task_id"] = number
        for t, turn in enumerate(tau.turns):
            h = context(chat, tau, t)
            turn_seed = f"{seed}/{number}/{i}/{t}"
            turn.response_ids, turn.logps = generate(whole, h, 6, temperature, seed=turn_seed)
        return tau

    async def rollout(model, chat_, tasks, *, env, settings, group_size, seed, temperature, **_):
        before(seed, env)
        played = []
        with unsharded(model) as whole:
            for task in tasks:
                for i in range(group_size):
                    tau = episode(whole, task["task_id"], i, temperature, seed)
                    played.append(tau)
        after(seed, model)
        return played
    return rollout


def weights_of(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def updates(monkeypatch):
    """The weights before each update of a run."""
    found = []
    update = mgrpo.MGRPO.update

    def recorded(method, rows):
        found.append(weights_of(method.model))
        return update(method, rows)
    monkeypatch.setattr(mgrpo.MGRPO, "update", recorded)
    return found


def step_of(seed):
    """The step of a batch, from the seed of its rollout, "0/STEP"."""
    _, _, step = seed.partition("/")
    return int(step)


def test_a_batch_is_played_by_the_weights_before_the_last_steps_updates(chat, play, updates, capsys):  # noqa: F811
    """While batch k + 1 is played, step k makes all of its updates: here the batch waits for them. And never more
    than one step behind: batch k + 1 begins after the last update of step k - 1.
    """
    seen = {}
    begun = {}
    trained = threading.Event()

    def before(seed, env):
        k = step_of(seed)
        begun[k] = len(updates)
        while k and len(updates) < 3 * k:  # the three updates of the step before
            assert not trained.wait(0.01)

    def after(seed, model):
        seen[step_of(seed)] = weights_of(model)

    lines = play(overlap, sampled(chat, before, after), "x")

    # 1) Who sampled.
    assert column(lines, "lag") == [0, 1, 1, 1, 1]
    assert len(updates) == 15
    assert same(seen[0], updates[0])
    assert same(seen[1], updates[0])
    for k in range(1, 5):
        updates_before = 3 * (k - 1)  # those of all steps before k - 1
        assert same(seen[k], updates[updates_before])
        assert not same(seen[k], updates[updates_before + 3])
        assert begun[k] >= updates_before

    # 2) What the metrics say of it.
    for line in lines:
        assert line["logp_gap"] < 1e-5  # rounding, although the policy that trains has moved
        assert line["groups_kept"]
        assert set(METRICS) <= set(line)
    assert lines[0]["drift"] < 1e-5
    assert lines[0]["w_cut"] == 0
    for line in lines[1:]:
        assert line["drift"] > 1e-2
    assert any(line["w_cut"] > 0 for line in lines[1:])
    assert "logp_gap is far above rounding" not in capsys.readouterr().out


def test_the_gap_is_that_of_training_to_the_weights_that_sampled(chat, play):  # noqa: F811
    """Log-probs that were recorded wrong by 0.3 show, whatever the lag; those of the later weights would not tell."""
    rollout = sampled(chat)

    async def wrong(*args, **kwargs):
        played = await rollout(*args, **kwargs)
        for tau in played:
            for turn in tau.turns:
                turn.logps = [logp - 0.3 for logp in turn.logps]
        return played

    lines = play(overlap, wrong, "x", steps=3, batch=4)
    assert column(lines, "logp_gap") == pytest.approx([0.3] * 3, abs=1e-5)


def test_adapters_are_copied_and_the_reference_takes_none_from_the_batch_in_flight(chat, play, updates):  # noqa: F811
    """The KL's reference is the policy itself with other adapters, for a moment: the copy must not share them."""
    seen = []

    def after(seed, model):
        seen.append(weights_of(model))

    rollout = sampled(chat, after=after)
    lines = play(overlap, rollout, "x", steps=3, batch=4, lora=4, beta=0.1)

    assert same(seen[1], updates[0])
    assert same(seen[2], updates[3])
    assert not same(seen[2], seen[1])
    for line in lines:
        assert line["logp_gap"] < 1e-5
        assert line["kl"] > 0
    assert lines[2]["drift"] > 1e-2


def test_a_step_in_which_no_group_trains_has_no_gap_and_the_next_batch_is_played_all_the_same(chat, play):  # noqa: F811
    rollout = sampled(chat)

    async def equal(*args, seed, **kwargs):
        played = await rollout(*args, seed=seed, **kwargs)
        if seed in ("0/0", "0/2"):
            for tau in played:
                tau.success = 1.0
                tau.reward = 1.0
        return played

    lines = play(overlap, equal, "x", steps=4, batch=4)

    without_gap = [line["logp_gap"] is None for line in lines]
    assert without_gap == [True, False, True, False]
    assert column(lines, "lag") == [0, 1, 1, 1]
    # The steps before have moved nothing.
    assert lines[1]["drift"] < 1e-5
    assert lines[3]["drift"] < 1e-5


def test_a_batch_in_flight_that_could_not_be_judged_is_played_again_by_the_policy_as_it_is(chat, play):  # noqa: F811
    rollout = sampled(chat)
    batches = []

    async def down_at_first(*args, seed, **kwargs):
        played = await rollout(*args, seed=seed, **kwargs)
        batches.append(step_of(seed))
        if batches == [0, 1]:
            for tau in played:
                tau.status = "env_error"
        return played

    lines = play(overlap, down_at_first, "x", steps=3, batch=4)

    assert batches == [0, 1, 1, 2]
    assert column(lines, "lag") == [0, 0, 1]
    assert column(lines, "env_errors") == [0, 0, 0]


def test_an_evaluation_plays_the_trained_weights_next_to_the_batch_in_flight(
        chat, play, updates, monkeypatch):  # noqa: F811
    """The batch has an environment of its own, so it keeps its pictures; the evaluation once would have reset it."""
    evaluated = []
    updates_before = []
    pictured = []
    done = threading.Event()

    async def greedy(model, chat_, tasks, **kwargs):
        evaluated.append(weights_of(model))
        updates_before.append(len(updates))
        done.set()
        return [trajectory(chat, 1.0, [3]) for _ in tasks]
    monkeypatch.setattr(evaluate, "rollout", greedy)

    def before(seed, env):
        if seed != "0/0":
            assert done.wait(600)  # the evaluation after the step before
            done.clear()
        names = list(env.pictured.values())
        pictured.append((seed, names))

    lines = play(
        overlap,
        sampled(chat, before),
        "x",
        steps=3,
        batch=4,
        held_out="theirs",
        held_out_every=1,
        screenshots=2,
    )

    assert column(lines, "held_out_success") == [1, 1, 1]
    assert updates_before == [3, 6, 9]
    assert same(evaluated[0], updates[3])
    assert same(evaluated[1], updates[6])
    assert [seed for seed, _ in pictured] == ["0/0", "0/1", "0/2"]
    for seed, names in pictured:
        assert len(names) == 2
        for name in names:
            assert name.startswith(f"{seed}-")


def test_nothing_is_played_after_the_last_step(chat, play, monkeypatch):  # noqa: F811
    """The process would end only once that batch is played."""
    ahead = []
    play_ahead = overlap.Overlap.play_ahead

    def recorded(method, step):
        ahead.append(step)
        play_ahead(method, step)
    monkeypatch.setattr(overlap.Overlap, "play_ahead", recorded)
    play(overlap, hard_and_easy(chat), "x", steps=3)
    assert ahead == [1, 2]


def test_what_breaks_in_the_batch_in_flight_ends_the_run(chat, play):  # noqa: F811
    rollout = sampled(chat)

    async def fails(*args, seed, **kwargs):
        if seed == "0/2":
            raise ValueError("Chromium failed: no such file")
        return await rollout(*args, seed=seed, **kwargs)

    with pytest.raises(ValueError, match="Chromium failed"):
        play(overlap, fails, "x")


def episodes_in_order():
    """(step, task, member) of each episode of five steps with six tasks each, played twice."""
    cfg = mgrpo.Config(batch=6)
    expected = []
    for step in range(5):
        for task in mgrpo.task_batch(TASKS, step, cfg):
            for member in (0, 1):
                expected.append((step, task["task_id"], member))
    return expected


@pytest.mark.parametrize("save_every, first", [(1, 3), (2, 2)])
def test_a_run_that_goes_on_plays_its_first_batch_by_the_weights_it_goes_on_from(
        chat, play, tmp_path, save_every, first):  # noqa: F811
    """Nothing that was saved is lost or comes twice; what was in flight is played again, with a lag of 0."""
    rollout = sampled(chat)
    seen = {}

    async def interrupted(*args, seed, **kwargs):
        if seed == "0/3":
            raise KeyboardInterrupt
        return await rollout(*args, seed=seed, **kwargs)

    def after(seed, model):
        seen[seed] = weights_of(model)

    # 1) A run without a break, one with a break, and its rest once more.
    whole = play(overlap, rollout, "whole")
    before = play(overlap, interrupted, "parts", save_every=save_every)
    assert len(before) == 3
    gc.collect()  # of the future and its exception, whose frames hold the directory's lock
    saved = load(tmp_path / "parts").state_dict()
    shutil.copytree(tmp_path / "parts", tmp_path / "again")
    watched = sampled(chat, after=after)
    parts = play(overlap, watched, "parts", save_every=save_every)
    again = play(overlap, watched, "again", save_every=save_every)

    # 2) What was saved stays; then the lag begins at 0.
    assert timeless(parts[:first]) == timeless(whole[:first])
    assert column(parts, "step") == [0, 1, 2, 3, 4]
    lags = [1, 1, 1, 1, 1]
    lags[0] = 0
    lags[first] = 0
    assert column(parts, "lag") == lags
    assert sorted(seen) == [f"0/{step}" for step in range(first, 5)]
    assert same(seen[f"0/{first}"], saved)
    assert same(seen[f"0/{first + 1}"], saved)
    assert timeless(again) == timeless(parts)  # bit for bit, when it is done once more

    # 3) Each step's own episodes, each once.
    for out in ("whole", "parts"):
        played = []
        for record in read(tmp_path / out / "trajectories.jsonl"):
            played.append((record["step"], record["task_id"], record["member"]))
        assert played == episodes_in_order()


# ----------------------------------------------------------------------------------------------- two ranks


def on_ranks(checkpoint, out):
    """Four steps of two updates, each batch but the first played while the one before it trains."""
    torch.set_num_threads(1)
    device = init_dist()
    chat = Chat(load_tokenizer(checkpoint), "You browse the web.")
    model = shard(tiny_model(vocab_size=chat.tokenizer.get_vocab_size()))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    cfg = overlap.Config(
        steps=4,
        batch=5,
        G=2,
        max_tokens=300,
        max_grad_norm=1e9,
        lr=1e-3,
    )
    method = overlap.Overlap(cfg, chat, model, None, optimizer, device)
    mgrpo.rollout = sampled(chat)

    lines = []
    played = []
    for step in range(cfg.steps):
        tasks = method.choose_tasks(TASKS, step)
        episodes = method.collect(tasks, Environment({}, "", cfg), step)
        rows, line = method.training_rows(episodes, step)
        passes = [method.update(rows) for _ in range(2)]
        lines.append(mgrpo.update_metrics(passes) | line)

        own = []
        for tau in episodes:
            responses = [turn.response_ids for turn in tau.turns]
            own.append((tau.task["task_id"], tau.member, responses))
        everyones = runs.gather(own)
        played.append(sorted(everyones))
    state = full_state(model)
    if rank() == 0:
        torch.save({"lines": lines, "played": played, "state": state}, out)


def test_two_ranks_make_the_steps_that_one_rank_makes(checkpoint, tmp_path, monkeypatch):
    """They sample the same responses, although each plays with a copy that it gathered from both."""
    done = script("tests/test_forks_overlap.py", "ranks", checkpoint, tmp_path / "2.pt", ranks=2)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(mgrpo, "rollout", None)  # on_ranks sets it; this takes it back
    on_ranks(checkpoint, tmp_path / "1.pt")

    one = torch.load(tmp_path / "1.pt", weights_only=True)
    two = torch.load(tmp_path / "2.pt", weights_only=True)
    assert one["played"] == two["played"]
    assert column(two["lines"], "lag") == [0, 1, 1, 1]
    for a, b in zip(one["lines"], two["lines"], strict=True):
        for line in (a, b):
            assert line["groups_kept"] == 5
            assert line["logp_gap"] < 1e-5
        for key in ("loss", "grad_norm", "entropy", "clip_frac", "drift", "w_cut"):
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), key
    for line in one["lines"][1:]:
        assert line["drift"] > 1e-3
    for name, weight in one["state"].items():
        torch.testing.assert_close(two["state"][name], weight, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_two_ranks_do_what_one_does_in_the_browser(pointing, sandbox_sites, monkeypatch, tmp_path):  # noqa: F811
    found = on_one_and_two_ranks(overlap, pointing, sandbox_sites, monkeypatch, tmp_path)
    for one, two in zip(*found, strict=True):
        assert one["lag"] == one["step"]
        assert two["lag"] == one["step"]
        if one["logp_gap"] is not None:
            assert one["logp_gap"] < 1e-5
            assert two["logp_gap"] < 1e-5


# ---------------------------------------------------------------------------------------------- the script

SMALL = [
    "--batch", 3,
    "--G", 3,
    "--max-turns", 2,
    "--max-new-tokens", 24,
    "--temperature", 1,
    "--lr", 1e-3,
]


def test_the_script_plays_ahead_in_real_browsers_and_evaluates_meanwhile(
        pointing, sandbox_sites, monkeypatch, tmp_path):  # noqa: F811
    """Two event loops and two Chromiums at once, in two threads of this process."""
    for variable, address in sandbox_sites.items():
        monkeypatch.setenv(variable, address)
    arguments = [
        "--model", ROOT / "worlds/base",
        "--tasks", pointing,
        "--out", tmp_path / "x",
        *SMALL,
        "--steps", 2,
        "--held-out", pointing,
        "--held-out-every", 1,
    ]
    cfg = parse(overlap, monkeypatch, *arguments)

    mgrpo.main(cfg, overlap.Overlap)

    lines = read(tmp_path / "x/metrics.jsonl")
    assert column(lines, "lag") == [0, 1]
    for line in lines:
        assert line["env_errors"] == 0
        assert line["groups_kept"]
        assert line["logp_gap"] < 1e-5
        assert 0 <= line["held_out_success"] <= 1
    assert lines[0]["drift"] < 1e-5
    assert lines[1]["drift"] > 1e-3
    assert load(tmp_path / "x")
    assert len(read(tmp_path / "x/trajectories.jsonl")) == 18


@pytest.mark.slow
def test_sigkill_costs_nothing_but_time(pointing, sandbox_sites, tmp_path):  # noqa: F811
    """Killed while step 2 is saved and batch 3 is played; then the same command."""
    out = tmp_path / "x"
    env = ENV | sandbox_sites
    arguments = [
        "--model", ROOT / "worlds/base",
        "--tasks", pointing,
        "--out", out,
        "--steps", 4,
        *SMALL,
    ]
    same_command = command("forks/overlap.py", *arguments)

    # 1) Killed.
    process = subprocess.Popen(same_command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE)
    line = process.stdout.readline()
    while "step 2/4  success" not in line:
        assert line
        line = process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    before = read(out / "metrics.jsonl")

    # 2) Once more.
    done = subprocess.run(same_command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first = int(re.search(r"from step (\d) on", done.stdout)[1]) - 1
    assert first in (1, 2)

    lines = read(out / "metrics.jsonl")
    assert lines[:first] == before[:first]
    assert column(lines, "step") == [0, 1, 2, 3]
    lags = [1, 1, 1, 1]
    lags[0] = 0
    lags[first] = 0
    assert column(lines, "lag") == lags
    assert len(read(out / "trajectories.jsonl")) == 36


@pytest.mark.parametrize("changes, says", [
    ({"cap": 0.5}, "--cap 0.5: w is 1 where"),
    ({"reset_url": "http://x"}, "--reset-url: a reset would disturb"),
])
def test_settings_that_cannot_work_are_one_sentence(chat, changes, says):
    with pytest.raises(ValueError, match=says) as refused:
        overlap_of(chat, **changes)
    assert "\n" not in str(refused.value)


def test_help_names_the_flag_and_the_formula(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse(overlap, monkeypatch, "--help")
    said = capsys.readouterr().out
    assert "--cap" in said
    assert "--updates-per-batch" in said
    assert "w = min(pi_start / pi_old, cap)" in said


# ------------------------------------------------------------------------------------------- what it saves


def ask(sites):
    """Twelve answers of a site, and the seconds they took."""
    pages = []
    began = time.monotonic()
    for _ in range(12):
        request = urllib.request.Request(sites["SHOPPING"], headers={"X-World": "7-a1"})
        pages.append(urllib.request.urlopen(request).read())
    return pages, time.monotonic() - began


def test_slow_sites_answer_as_the_sandbox_does_but_later():
    """tests/tools/slow_sites.py: twelve answers of 0 to 0.2 s more."""
    with slow_sites.slow_sites(0.2) as slow, slow_sites.slow_sites(0.0) as plain:
        late, seconds = ask(slow)
        soon, _ = ask(plain)
    assert late == soon
    assert seconds > 0.3


def test_seconds_a_step_are_those_from_one_batch_to_the_next():
    """What a step trains and the next one waits. Trainings differ, and the last hides no wait."""
    lines = [
        {"seconds_rollout": 90, "seconds_train": 2},
        {"seconds_rollout": 1, "seconds_train": 4},
        {"seconds_rollout": 3, "seconds_train": 90},
    ]
    assert slow_sites.seconds_a_step(lines) == {"trains": 3, "waits": 2}


if __name__ == "__main__":
    on_ranks(*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # as run.command_line ends a rank
