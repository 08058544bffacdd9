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
from itertools import product

import pytest
import torch
from conftest import ROOT, tiny_model
from test_forks import METHODS, float64, parse, play, pointing  # noqa: F401 (three fixtures)
from test_forks_checklist import on_one_and_two_ranks
from test_forks_losses import REWARDS, drifted, four_groups, nested
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
    cfg = overlap.Config(**dict(steps=1, G=4, temperature=1.0, clip=1e9) | changes)
    return method_of(chat, model, cfg, optimizer, Method=overlap.Overlap)


# ----------------------------------------------------------------------------------------------- the loss


def written_out(new, start, old, ref, rewards, beta):
    """The formula, one token at a time: new[k][i][j][t] is a scalar tensor, in the groups k that train."""
    n_tokens = sum(len(response) for group in new for episode in group for response in episode)
    total = 0.0
    for k, group in enumerate(new):
        mean = sum(rewards[k]) / len(group)
        std = (sum((r - mean) ** 2 for r in rewards[k]) / (len(group) - 1)) ** 0.5
        for i, episode in enumerate(group):
            A = (rewards[k][i] - mean) / std
            for j, response in enumerate(episode):
                for t, logp in enumerate(response):
                    w = min(2.0, math.exp(start[k][i][j][t].item() - old[k][i][j][t].item()))
                    r = (logp - start[k][i][j][t].item()).exp()
                    d = ref[k][i][j][t].item() - logp
                    clipped = min(max(r.item(), 0.8), 1.2)
                    surrogate = w * r * A if r.item() * A <= clipped * A else torch.tensor(w * clipped * A)
                    total = total + (surrogate - beta * (d.exp() - d - 1)) / n_tokens
    return -total


def test_value_and_gradient_are_those_of_the_formula(chat, float64):  # noqa: F811
    """float64, 1e-10, in the first update, where r = 1, and in a later one. Some w are cut, some r clipped."""
    method = overlap_of(chat, beta=0.1)
    episodes = four_groups(chat)
    rows, metrics = method.learn_from([tau for group in episodes for tau in group], 0)
    assert metrics == {"groups_kept": 3, "lag": 0}
    kept = [group for group, rewards in zip(episodes, REWARDS) if len(set(rewards)) > 1]
    rewards = [[tau.reward for tau in group] for group in kept]
    old = torch.tensor([logp for row in rows for logp in row.logps])
    sizes = [row.n_action for row in rows]
    start, ref = old + drifted(sizes, False), old + drifted(sizes, False, seed=1)
    for new in (start, start + drifted(sizes, False, seed=2)):
        new = new.clone().requires_grad_()
        loss, metrics = method.loss(rows, new, ref, None)
        expected = written_out(*(nested(x, kept) for x in (new, start, old, ref)), rewards, 0.1)
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
        found, wanted = (torch.autograd.grad(value, new)[0] for value in (loss, expected))
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)
        cut = [b - a > math.log(2) for a, b in zip(old.tolist(), start.tolist())]
        assert metrics["truncated"] == sum(cut) and 0.05 < sum(cut) / len(cut) < 0.5
        assert metrics["drift"] == pytest.approx((start - old).abs().sum().item())
        first_update = torch.equal(new, start)
        assert metrics["clip_frac"] == 0 if first_update else metrics["clip_frac"] > 0.1 * len(new)


def test_the_first_update_pushes_every_token_by_its_weight_times_its_advantage(chat, float64):  # noqa: F811
    """By hand: ten times likelier counts twice, half as likely half. mgrpo.py's clip would stop the first."""
    rows, _ = overlap_of(chat).learn_from([trajectory(chat, r, [3], member=i) for i, r in enumerate([1.0, 0, 0, 0])], 0)
    rows = [row for row in rows if row.advantage > 0]
    old = torch.tensor(rows[0].logps)
    new = (old + torch.tensor([10.0, 0.5, 1.0]).log()).requires_grad_()
    pushes = []
    for method in (overlap_of(chat), method_of(chat, None, mgrpo.Config())):
        loss, _ = method.loss(rows, new, new.detach(), None)
        gradient, = torch.autograd.grad(loss, new)
        pushes.append((-gradient / rows[0].weight / rows[0].advantage).tolist())
    assert pushes[0] == pytest.approx([2, 0.5, 1]) and pushes[1] == pytest.approx([0, 0.5, 1])


def test_on_the_policy_that_sampled_the_loss_is_mgrpos(chat, float64):  # noqa: F811
    """Lag 0: its value and gradient, also in later updates."""
    episodes = [tau for group in four_groups(chat) for tau in group]
    ours, theirs = overlap_of(chat, beta=0.1), method_of(chat, None, mgrpo.Config(G=4, beta=0.1))
    rows, _ = ours.learn_from(episodes, 0)
    old = torch.tensor([logp for row in rows for logp in row.logps])
    ours.loss(rows, old, old, None)  # the first update
    new = (old + drifted([row.n_action for row in rows], False)).requires_grad_()
    (loss, metrics), (its_loss, its_metrics) = (method.loss(rows, new, old, None) for method in (ours, theirs))
    torch.testing.assert_close(loss, its_loss, atol=1e-12, rtol=0)
    torch.testing.assert_close(*(torch.autograd.grad(x, new)[0] for x in (loss, its_loss)), atol=1e-12, rtol=0)
    assert metrics == its_metrics | {"drift": 0, "truncated": 0} and metrics["clip_frac"] > 0


@pytest.mark.parametrize("budget", [1, 300, 10**6])
def test_an_update_is_that_of_each_response_alone(chat, budget):
    """Two updates through the model, packed, off-policy: float32, 1e-5. The second one remembers pi_start."""
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    episodes = four_groups(chat)
    turns = [turn for group in episodes for tau in group for turn in tau.turns]
    alone = [row for group in episodes for tau in group for row in trajectory_rows(chat, tau)]
    drifts = drifted([len(turn.action_ids) for turn in turns], False).float().split([len(t.action_ids) for t in turns])
    for turn, row, drift in zip(turns, alone, drifts, strict=True):
        turn.logps = (logprobs(model, row) - drift).tolist()
    kept = [group for group, rewards in zip(episodes, REWARDS) if len(set(rewards)) > 1]
    rewards = [[tau.reward for tau in group] for group in kept]
    old = [[[torch.tensor(turn.logps) for turn in tau.turns] for tau in group] for group in kept]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    method = overlap_of(chat, model, optimizer, max_tokens=budget)
    rows, _ = method.learn_from([tau for group in episodes for tau in group], 0)
    step, grads, start = optimizer.step, {}, None

    def recorded():
        grads.update({name: p.grad.clone() for name, p in model.named_parameters()})
        step()
    optimizer.step = recorded
    for clips in (False, True):
        new = [[[logprobs(model, row) for row in trajectory_rows(chat, tau)] for tau in group] for group in kept]
        start = start or [[[x.detach() for x in tau] for tau in group] for group in new]
        expected = written_out(new, start, old, start, rewards, 0.0)
        wanted = torch.autograd.grad(expected, list(model.parameters()))
        metrics = mgrpo.update(method, rows)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
        assert metrics["truncated"] > 0 and (metrics["clip_frac"] > 0) == clips
        for (name, _), gradient in zip(model.named_parameters(), wanted):
            torch.testing.assert_close(grads[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


# ------------------------------------------------------------------------------------- who samples, and when


def sampled(chat, before=runs.ignore, after=runs.ignore):
    """A stand-in for rollout whose responses the given model samples.

    before(seed, env), after(seed, model): called as a batch begins, and when it is played.
    """
    async def rollout(model, chat_, tasks, *, env, settings, group, seed, temperature, tick=None):
        before(seed, env)
        played = []
        with unsharded(model) as whole:
            for number, i in product([task["task_id"] for task in tasks], range(group)):
                tau = trajectory(chat, float((i + number) % 2), [1] * (1 + (i + number) % 3), seed=number, member=i)
                tau.task["task_id"] = number
                for t, turn in enumerate(tau.turns):
                    turn.action_ids, turn.logps = generate(whole, context(chat, tau, t), 6, temperature,
                                                           seed=f"{seed}/{number}/{i}/{t}")
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
    update = mgrpo.update

    def recorded(method, *args):
        found.append(weights_of(method.model))
        return update(method, *args)
    monkeypatch.setattr(mgrpo, "update", recorded)
    return found


def test_a_batch_is_played_by_the_weights_before_the_last_steps_updates(chat, play, updates, capsys):  # noqa: F811
    """While batch k + 1 is played, step k makes all of its updates: here the batch waits for them. And never more
    than one step behind: batch k + 1 begins after the last update of step k - 1.
    """
    seen, begun, trained = {}, {}, threading.Event()

    def before(seed, env):
        k = int(seed.partition("/")[2])
        begun[k] = len(updates)
        while k and len(updates) < 3 * k:  # the three updates of the step before
            assert not trained.wait(0.01)

    def after(seed, model):
        seen[int(seed.partition("/")[2])] = weights_of(model)
    lines = play(overlap, sampled(chat, before, after), "x")
    assert [line["lag"] for line in lines] == [0, 1, 1, 1, 1] and len(updates) == 15
    assert same(seen[0], updates[0]) and same(seen[1], updates[0])
    for k in range(1, 5):
        assert same(seen[k], updates[3 * (k - 1)]) and not same(seen[k], updates[3 * k])
        assert begun[k] >= 3 * (k - 1)
    # logp_gap is rounding, although the policy that trains has moved.
    assert all(line["logp_gap"] < 1e-5 and line["groups_kept"] for line in lines)
    assert lines[0]["drift"] < 1e-5 and all(line["drift"] > 1e-2 for line in lines[1:])
    assert lines[0]["truncated"] == 0 and any(line["truncated"] > 0 for line in lines[1:])
    assert all(set(METRICS) <= set(line) for line in lines)
    assert "logp_gap is far above rounding" not in capsys.readouterr().out


def test_the_gap_is_that_of_training_to_the_weights_that_sampled(chat, play):  # noqa: F811
    """Log-probs that were recorded wrong by 0.3 show, whatever the lag; those of the later weights would not tell."""
    async def wrong(*args, **kwargs):
        played = await sampled(chat)(*args, **kwargs)
        for tau in played:
            for turn in tau.turns:
                turn.logps = [logp - 0.3 for logp in turn.logps]
        return played
    lines = play(overlap, wrong, "x", steps=3, batch=4)
    assert [line["logp_gap"] for line in lines] == pytest.approx([0.3] * 3, abs=1e-5)


def test_adapters_are_copied_and_the_reference_takes_none_from_the_batch_in_flight(chat, play, updates):  # noqa: F811
    """The KL's reference is the policy itself with other adapters, for a moment: the copy must not share them."""
    seen = []
    rollout = sampled(chat, after=lambda seed, model: seen.append(weights_of(model)))
    lines = play(overlap, rollout, "x", steps=3, batch=4, lora=4, beta=0.1)
    assert same(seen[1], updates[0]) and same(seen[2], updates[3]) and not same(seen[2], seen[1])
    assert all(line["logp_gap"] < 1e-5 and line["kl"] > 0 for line in lines) and lines[2]["drift"] > 1e-2


def test_a_step_in_which_no_group_trains_has_no_gap_and_the_next_batch_is_played_all_the_same(chat, play):  # noqa: F811
    async def equal(*args, seed, **kwargs):
        played = await sampled(chat)(*args, seed=seed, **kwargs)
        for tau in played if seed in ("0/0", "0/2") else []:
            tau.success = tau.reward = 1.0
        return played
    lines = play(overlap, equal, "x", steps=4, batch=4)
    assert [line["logp_gap"] is None for line in lines] == [True, False, True, False]
    assert [line["lag"] for line in lines] == [0, 1, 1, 1]
    assert lines[1]["drift"] < 1e-5 and lines[3]["drift"] < 1e-5  # the steps before have moved nothing


def test_an_evaluation_plays_the_trained_weights_next_to_the_batch_in_flight(chat, play, updates,  # noqa: F811
                                                                           monkeypatch):
    """The batch has an environment of its own, so it keeps its pictures; the evaluation once would have reset it."""
    evaluated, pictured, done = [], [], threading.Event()

    async def greedy(model, chat_, tasks, **kwargs):
        evaluated.append((weights_of(model), len(updates)))
        done.set()
        return [trajectory(chat, 1.0, [3]) for _ in tasks]
    monkeypatch.setattr(evaluate, "rollout", greedy)

    def before(seed, env):
        if seed != "0/0":
            assert done.wait(60)  # the evaluation after the step before
            done.clear()
        pictured.append((seed, sorted(env.pictured.values())))
    lines = play(overlap, sampled(chat, before), "x", steps=3, batch=4, held_out="theirs",
                 held_out_every=1, screenshots=2)
    assert [line["held_out_success"] for line in lines] == [1, 1, 1]
    assert [n for _, n in evaluated] == [3, 6, 9]
    assert same(evaluated[0][0], updates[3]) and same(evaluated[1][0], updates[6])
    assert [seed for seed, _ in pictured] == ["0/0", "0/1", "0/2"]
    assert all(len(names) == 2 and all(name.startswith(f"{seed}-") for name in names) for seed, names in pictured)


def test_what_breaks_in_the_batch_in_flight_ends_the_run(chat, play):  # noqa: F811
    async def fails(*args, seed, **kwargs):
        if seed == "0/2":
            raise ValueError("Chromium failed: no such file")
        return await sampled(chat)(*args, seed=seed, **kwargs)
    with pytest.raises(ValueError, match="Chromium failed"):
        play(overlap, fails, "x")


@pytest.mark.parametrize("save_every, first", [(1, 3), (2, 2)])
def test_a_run_that_goes_on_plays_its_first_batch_by_the_weights_it_goes_on_from(chat, play, tmp_path,  # noqa: F811
                                                                                save_every, first):
    """Nothing that was saved is lost or comes twice; what was in flight is played again, with a lag of 0."""
    async def interrupted(*args, seed, **kwargs):
        if seed == "0/3":
            raise KeyboardInterrupt
        return await sampled(chat)(*args, seed=seed, **kwargs)
    seen = {}

    def after(seed, model):
        seen[seed] = weights_of(model)
    whole = play(overlap, sampled(chat), "whole")
    assert len(play(overlap, interrupted, "parts", save_every=save_every)) == 3
    gc.collect()  # of the future and its exception, whose frames hold the directory's lock
    saved = load(tmp_path / "parts").state_dict()
    shutil.copytree(tmp_path / "parts", tmp_path / "again")
    parts, again = (play(overlap, sampled(chat, after=after), out, save_every=save_every) for out in ("parts", "again"))
    timeless = lambda lines: [{k: v for k, v in line.items() if "second" not in k} for line in lines]
    assert timeless(parts[:first]) == timeless(whole[:first]) and [line["step"] for line in parts] == [*range(5)]
    assert [line["lag"] for line in parts] == [0] + [1] * (first - 1) + [0] + [1] * (4 - first)
    assert sorted(seen) == [f"0/{step}" for step in range(first, 5)]
    assert same(seen[f"0/{first}"], saved) and same(seen[f"0/{first + 1}"], saved)
    assert timeless(again) == timeless(parts)  # bit for bit, when it is done once more
    for out in ("whole", "parts"):
        records = read(tmp_path / out / "trajectories.jsonl")
        tasks = [task["task_id"] for step in range(5) for task in mgrpo.task_batch(TASKS, step, mgrpo.Config(batch=6))]
        played = [(record["step"], record["task_id"], record["member"]) for record in records]
        assert played == [(k // 12, tasks[k // 2], k % 2) for k in range(60)]  # each step's own, each episode once


# ----------------------------------------------------------------------------------------------- two ranks


def on_ranks(checkpoint, out):
    """Four steps of two updates, each batch but the first played while the one before it trains."""
    torch.set_num_threads(1)
    device, chat = init_dist(), Chat(load_tokenizer(checkpoint), "You browse the web.")
    model = shard(tiny_model(vocab_size=chat.tokenizer.get_vocab_size()))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    cfg = overlap.Config(steps=4, batch=5, G=2, max_tokens=300, clip=1e9, lr=1e-3)
    method = overlap.Overlap(cfg, chat, model, None, optimizer, device)
    mgrpo.rollout = sampled(chat)
    lines, played = [], []
    for step in range(cfg.steps):
        episodes = method.collect(method.choose_tasks(TASKS, step), Environment({}, "", cfg), step)
        rows, line = method.learn_from(episodes, step)
        passes = [mgrpo.update(method, rows) for _ in range(2)]
        lines.append(mgrpo.update_metrics(passes) | line)
        everyones = runs.gather([(tau.task["task_id"], tau.member, [turn.action_ids for turn in tau.turns])
                                 for tau in episodes])
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
    one, two = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in (1, 2))
    assert one["played"] == two["played"] and [line["lag"] for line in two["lines"]] == [0, 1, 1, 1]
    for a, b in zip(one["lines"], two["lines"], strict=True):
        assert a["groups_kept"] == b["groups_kept"] == 5 and max(a["logp_gap"], b["logp_gap"]) < 1e-5
        for key in ("loss", "grad_norm", "entropy", "clip_frac", "drift", "truncated"):
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), key
    assert all(line["drift"] > 1e-3 for line in one["lines"][1:])
    for name, weight in one["state"].items():
        torch.testing.assert_close(two["state"][name], weight, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_two_ranks_do_what_one_does_in_the_browser(pointing, sandbox_sites, monkeypatch, tmp_path):  # noqa: F811
    found = on_one_and_two_ranks(overlap, pointing, sandbox_sites, monkeypatch, tmp_path)
    for one, two in zip(*found, strict=True):
        assert one["lag"] == two["lag"] == one["step"]
        assert one["logp_gap"] is None or max(one["logp_gap"], two["logp_gap"]) < 1e-5


# ---------------------------------------------------------------------------------------------- the script

SMALL = ["--batch", 3, "--G", 3, "--max-turns", 2, "--max-new-tokens", 24, "--temperature", 1, "--lr", 1e-3]


def test_the_script_plays_ahead_in_real_browsers_and_evaluates_meanwhile(pointing, sandbox_sites,  # noqa: F811
                                                                        monkeypatch, tmp_path):
    """Two event loops and two Chromiums at once, in two threads of this process."""
    for variable, address in sandbox_sites.items():
        monkeypatch.setenv(variable, address)
    main = lambda *more: mgrpo.main(parse(overlap, monkeypatch, "--model", ROOT / "worlds/base", "--tasks", pointing,
                                          "--out", tmp_path / "x", *SMALL, *more), overlap.Overlap)
    main("--steps", 2, "--held-out", pointing, "--held-out-every", 1)
    lines = read(tmp_path / "x/metrics.jsonl")
    assert [line["lag"] for line in lines] == [0, 1] and all(line["env_errors"] == 0 for line in lines)
    assert all(line["groups_kept"] and line["logp_gap"] < 1e-5 for line in lines)
    assert lines[0]["drift"] < 1e-5 and lines[1]["drift"] > 1e-3
    assert all(0 <= line["held_out_success"] <= 1 for line in lines)
    assert load(tmp_path / "x") and len(read(tmp_path / "x/trajectories.jsonl")) == 18


@pytest.mark.slow
def test_sigkill_costs_nothing_but_time(pointing, sandbox_sites, tmp_path):  # noqa: F811
    """Killed while step 2 is saved and batch 3 is played; then the same command."""
    out, env = tmp_path / "x", ENV | sandbox_sites
    same_command = command("forks/overlap.py", "--model", ROOT / "worlds/base", "--tasks", pointing, "--out", out,
                           "--steps", 4, *SMALL)
    process = subprocess.Popen(same_command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE)
    while "step 2/4  success" not in (line := process.stdout.readline()):
        assert line
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    before = read(out / "metrics.jsonl")
    done = subprocess.run(same_command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first = int(re.search(r"from step (\d) on", done.stdout)[1]) - 1
    lines = read(out / "metrics.jsonl")
    assert first in (1, 2) and lines[:first] == before[:first] and [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["lag"] for line in lines] == [int(step not in (0, first)) for step in range(4)]
    assert len(read(out / "trajectories.jsonl")) == 36


@pytest.mark.parametrize("changes, says", [({"cap": 0.5}, "--cap 0.5: w is 1 where"),
                                           ({"reset_url": "http://x"}, "--reset-url: a reset would disturb")])
def test_settings_that_cannot_work_are_one_sentence(chat, changes, says):
    with pytest.raises(ValueError, match=says) as refused:
        overlap_of(chat, **changes)
    assert "\n" not in str(refused.value)


def test_help_names_the_flag_and_the_formula(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse(overlap, monkeypatch, "--help")
    said = capsys.readouterr().out
    assert "--cap" in said and "--updates-per-batch" in said and "w = min(pi_start / pi_old, cap)" in said


# ------------------------------------------------------------------------------------------- what it saves


def test_slow_sites_answer_as_the_sandbox_does_but_later():
    """tests/tools/slow_sites.py: twelve answers of 0 to 0.2 s more."""
    def ask(sites):
        began, pages = time.monotonic(), []
        for _ in range(12):
            request = urllib.request.Request(sites["SHOPPING"], headers={"X-World": "7-a1"})
            pages.append(urllib.request.urlopen(request).read())
        return pages, time.monotonic() - began
    with slow_sites.slow_sites(0.2) as slow, slow_sites.slow_sites(0.0) as plain:
        (late, seconds), (soon, _) = ask(slow), ask(plain)
    assert late == soon and seconds > 0.3


def test_seconds_a_step_are_those_from_one_batch_to_the_next():
    """What a step trains and the next one waits. Trainings differ, and the last hides no wait."""
    lines = [{"seconds_rollout": waits, "seconds_train": trains} for waits, trains in [(90, 2), (1, 4), (3, 90)]]
    assert slow_sites.seconds_a_step(lines) == {"trains": 3, "waits": 2}


if __name__ == "__main__":
    on_ranks(*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # as run.command_line ends a rank
