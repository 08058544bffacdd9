"""The algorithm against slow, obvious versions written from the paper's equation."""
import asyncio
import contextlib
import copy
import json
import os
import signal
import statistics
import subprocess
import sys
import threading

import pytest
import torch
from conftest import ROOT, tiny_model

import mgrpo
import rollout
from compress import Chat, Trajectory, Turn, context, pad, rows
from evaluate import World
from flat_sequence import compare
from mgrpo import (Config, Stop, alarms, collect, group_advantages, learning_rate, mgrpo_loss, rollout_metrics, task_batch,
                   update, weigh)
from model import gather, generate, init_dist, leave, load, load_tokenizer, rank, shard, token_logprobs
from rollout import Engine, Settings


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(tokenizer, "You browse the web.")


def trajectory(chat, reward, lengths, seed=0, status="ok", member=0):
    """An episode with one response of each of the given lengths, plausible sampling log-probs included."""
    g = torch.Generator().manual_seed(seed)
    tau = Trajectory({"intent": "do it", "task_id": 0, "sites": ["x"]}, member, reward=reward, status=status)
    for k, n in enumerate(lengths):
        ids = torch.randint(3, 300, (n,), generator=g).tolist()
        logps = (-4 - torch.rand(n, generator=g)).tolist()
        tau.turns.append(Turn("", f"page {k}", chat.observation(tau.task, k, f"<a>lamp {k}</a>"), ids, logps, ""))
    return tau


def equation(logp, logp_old, logp_ref, rewards, eps, beta):
    """M-GRPO as printed, for one group, one token at a time: logp[i][j][t] is a number or a scalar tensor."""
    G = len(rewards)
    mean, std = sum(rewards) / G, statistics.stdev(rewards)
    total = 0.0
    for i in range(G):
        A = (rewards[i] - mean) / std
        episode = 0.0
        for j in range(len(logp[i])):
            turn = 0.0
            for t in range(len(logp[i][j])):
                rho = (logp[i][j][t] - logp_old[i][j][t]).exp()
                d = logp_ref[i][j][t] - logp[i][j][t]
                turn = turn + min(rho * A, rho.clamp(1 - eps, 1 + eps) * A) - beta * (d.exp() - d - 1)
            episode = episode + turn / len(logp[i][j])
        total = total + episode / len(logp[i])
    return -total / G


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_loss_and_gradient_are_those_of_the_papers_triple_mean(beta):
    """float64, 1e-10, on a ragged group of 1 to 15 turns whose ratios leave the clip range on both sides."""
    g = torch.Generator().manual_seed(0)
    shape = [torch.randint(1, 9, (n,), generator=g).tolist() for n in (1, 2, 15, 7)]  # tokens of each turn of each episode
    rewards, sizes = [1.0, 0.0, 0.0, 1.0], [n for turns in shape for n in turns]
    new, old, ref = (-2 * torch.rand(sum(sizes), generator=g, dtype=torch.float64) for _ in range(3))
    new.requires_grad_()

    def nested(flat):
        parts = iter(flat.split(sizes))
        return [[next(parts).unbind() for _ in turns] for turns in shape]

    std, tokens = statistics.stdev(rewards), [(r, turns, n) for r, turns in zip(rewards, shape) for n in turns for _ in range(n)]
    A = torch.tensor([(r - 0.5) / std for r, _, _ in tokens], dtype=torch.float64)
    weight = torch.tensor([1 / (4 * len(turns) * n) for _, turns, n in tokens], dtype=torch.float64)
    loss, metrics = mgrpo_loss(new, old, ref, A, weight, 0.2, beta)
    expected = equation(nested(new), nested(old), nested(ref), rewards, 0.2, beta)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    gradient, expected_gradient = (torch.autograd.grad(value, new)[0] for value in (loss, expected))
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-10, rtol=0)
    assert 0 < metrics["clip_frac"] < len(new)


def test_clipping_stops_the_gradient_only_where_it_would_go_too_far():
    logp = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)  # ratios 1.65, 1.65, 0.61, 0.61
    A = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, metrics = mgrpo_loss(logp, torch.zeros(4), logp.detach(), A, torch.ones(4), 0.2, 0.0)
    loss.backward()
    assert (logp.grad != 0).tolist() == [False, True, True, False] and metrics["clip_frac"] == 2


def test_kl_is_never_negative_and_zero_at_the_start():
    """Token by token, on whichever side of the reference the policy lies."""
    zero, one = torch.zeros(1), torch.ones(1)
    for distance in (-2.0, -0.1, 0.1, 2.0):
        assert mgrpo_loss(zero, zero, zero + distance, zero, one, 0.2, 1.0)[1]["kl"] > 0
    assert mgrpo_loss(zero, zero, zero, zero, one, 0.2, 1.0)[1]["kl"] == 0


def test_advantages_are_over_trajectories_not_turns(chat):
    group = [trajectory(chat, 1.0, [3]), trajectory(chat, 0.0, [3]), trajectory(chat, 0.0, [3])]
    longer = [trajectory(chat, 1.0, [3] * 12), trajectory(chat, 0.0, [3]), trajectory(chat, 0.0, [3])]
    assert [t.advantage for t in group_advantages(group)] == [t.advantage for t in group_advantages(longer)]
    assert sum(t.advantage for t in group) == pytest.approx(0)
    assert statistics.stdev(t.advantage for t in group) == pytest.approx(1)


def test_a_broken_environment_leaves_the_group_as_if_it_had_never_been(chat):
    valid = [trajectory(chat, 1.0, [3]), trajectory(chat, 0.0, [3]), trajectory(chat, 0.0, [3])]
    broken = trajectory(chat, 0.0, [3], status="env_error")
    assert broken not in group_advantages(valid + [broken])
    with_broken = [t.advantage for t in valid]
    group_advantages(valid)
    assert with_broken == [t.advantage for t in valid]


@pytest.mark.parametrize("rewards, statuses", [([1, 1, 1], "ok ok ok"), ([0, 0, 0], "ok ok ok"),
                                               ([1, 0, 0], "ok env_error env_error"),
                                               ([0.1, 0.1, 0.1], "ok ok ok")])
def test_groups_that_teach_nothing_go_whole(chat, rewards, statuses):
    group = [trajectory(chat, float(r), [3], status=s) for r, s in zip(rewards, statuses.split())]
    assert group_advantages(group) == []


def make_groups(chat):
    return [[trajectory(chat, float(i % 2), [3 + i + k, 2, 5][:1 + (i + k) % 3], seed=10 * k + i, member=i)
             for i in range(4)] for k in range(2)]


def test_weights_are_the_means_of_the_paper_and_of_the_alternatives(chat):
    kept = [group_advantages(group) for group in make_groups(chat)]
    tokens = sum(len(t.action_ids) for group in kept for tau in group for t in tau.turns)
    total = lambda norm: sum(row.weight * row.n_action for row in weigh(kept, chat, Config(loss_norm=norm)))
    assert total("paper") == pytest.approx(1) and total("token") == pytest.approx(1)
    assert total("constant") == pytest.approx(tokens / (2 * 4 * Config.max_turns * Config.max_new_tokens))
    for row in weigh(kept, chat, Config(loss_norm="paper")):
        response = row.ids[-row.n_action:]
        tau = next(tau for group in kept for tau in group if any(t.action_ids == response for t in tau.turns))
        assert row.weight == pytest.approx(1 / (2 * 4 * len(tau.turns) * row.n_action)) and row.advantage == tau.advantage


def ragged_groups(chat):
    """Two groups whose episodes have from 1 to 15 turns."""
    return [[trajectory(chat, float(i % 2), [1 + (k * j + i) % 6 for j in range(n)], seed=10 * k + i, member=i)
             for i, n in enumerate(lengths)] for k, lengths in enumerate([(1, 15, 4), (2, 7, 11, 3)])]


def gradient_of(chat, kept, cfg, reference=None, model=None):
    model = model or tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    grads = {}
    optimizer.step = lambda: grads.update({k: p.grad.clone() for k, p in model.named_parameters()})
    metrics = update(model, reference, optimizer, kept, chat, cfg, "cpu")
    return grads, metrics


def obvious_gradient(chat, kept, model, reference=None, beta=0.0):
    """Autograd through the printed formula, each response alone under its own context."""
    loss = 0
    for group in kept:
        logp, old, ref = [], [], []
        for tau in group:
            logp.append([token_logprobs(model, *pad([row]))[0] for row in rows(chat, tau)])
            old.append([torch.tensor(turn.logps) for turn in tau.turns])
            ref.append([token_logprobs(reference, *pad([row]))[0].detach() if reference else logp[-1][j].detach()
                        for j, row in enumerate(rows(chat, tau))])
        loss = loss + equation(logp, old, ref, [tau.reward for tau in group], 0.2, beta) / len(kept)
    model.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss.item()


def test_the_update_is_the_gradient_of_the_equation(chat):
    """A whole step, packed, against one response at a time: float32, 1e-5, under any micro-batch budget."""
    kept = [group_advantages(group) for group in ragged_groups(chat)]
    model, reference = (tiny_model(seed=seed, vocab_size=chat.tokenizer.get_vocab_size()) for seed in (0, 1))
    expected, loss = obvious_gradient(chat, kept, model, reference, beta=0.1)
    for budget in (1, 200, 700, 10**6):
        grads, metrics = gradient_of(chat, kept, Config(loss_norm="paper", beta=0.1, clip=1e9, max_tokens=budget, temperature=1.0),
                                     reference)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
        for name in expected:
            torch.testing.assert_close(grads[name], expected[name], atol=1e-5, rtol=1e-4, msg=f"{name}, budget {budget}")


def test_from_the_second_update_on_the_ratio_and_the_clip_do_work(chat):
    """--updates-per-batch: the old log-probs stay those of the rollout while the policy moves."""
    kept = [group_advantages(group) for group in ragged_groups(chat)]
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    for tau in (tau for group in kept for tau in group):
        for turn, row in zip(tau.turns, rows(chat, tau)):
            turn.logps = token_logprobs(model, *pad([row]))[0].tolist()
    cfg, optimizer = Config(loss_norm="paper", clip=1e9, temperature=1.0), torch.optim.SGD(model.parameters(), lr=0.05)
    passes = [update(model, None, optimizer, kept, chat, cfg, "cpu") for _ in range(3)]
    assert passes[0]["clip_frac"] == 0 and passes[0]["logp_gap"] < 1e-5 and passes[0]["loss"] == pytest.approx(0, abs=1e-5)
    assert passes[1]["clip_frac"] > 0 and passes[1]["logp_gap"] > 1e-3 and passes[1]["loss"] < passes[0]["loss"]
    expected, _ = obvious_gradient(chat, kept, model)
    grads, _ = gradient_of(chat, kept, cfg, model=model)
    for name in expected:
        torch.testing.assert_close(grads[name], expected[name], atol=1e-5, rtol=1e-4)


def test_one_flat_sequence_is_not_what_was_sampled(chat):
    """tests/flat_sequence.py on a random model: only trunk and leaves give back the log-probs of the rollout."""
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    episodes = [trajectory(chat, 0.0, [4, 6, 5], seed=seed) for seed in range(3)]
    for tau in episodes:
        for t, turn in enumerate(tau.turns):
            turn.action_ids, turn.logps = generate(model, context(chat, tau, t), 8, temperature=1.0, seed=t)
    result = compare(model, chat, episodes)
    assert result["ours"]["mean"] < 1e-5 and result["flat"]["mean"] > 0.1 and result["masked"]["mean"] > 0.1
    assert result["ours"]["outside_clip"] == 0 < result["flat"]["outside_clip"]


def test_training_uses_the_sampling_temperature(chat):
    kept = [group_advantages(group) for group in make_groups(chat)]
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    for tau in (tau for group in kept for tau in group):
        for turn, row in zip(tau.turns, rows(chat, tau)):
            turn.logps = token_logprobs(model, *pad([row]), temperature=0.7)[0].tolist()
    assert gradient_of(chat, kept, Config(temperature=0.7))[1]["logp_gap"] < 1e-5
    assert gradient_of(chat, kept, Config(temperature=1.0))[1]["logp_gap"] > 1e-2


def test_a_group_without_variance_pulls_nowhere_not_even_to_the_reference(chat):
    groups = make_groups(chat)
    even = [trajectory(chat, 1.0, [3, 2], seed=50 + i) for i in range(4)]
    reference = tiny_model(seed=1, vocab_size=chat.tokenizer.get_vocab_size())
    cfg, grads = Config(loss_norm="paper", beta=0.5, clip=1e9, temperature=1.0), []
    for collected in (groups, [*groups, even]):
        grads.append(gradient_of(chat, [g for g in map(group_advantages, collected) if g], cfg, reference)[0])
    for name in grads[0]:
        assert torch.equal(grads[0][name], grads[1][name])


def even_tasks_teach(chat):
    """A stand-in for rollout: tasks of an even number earn mixed rewards."""
    async def rollout(model, chat_, tasks, score, cfg, *, group, seed, temperature, enter, log=None):  # no top_p: training knows none
        assert temperature == cfg.temperature
        return [trajectory(chat, float(i == 0 or task["task_id"] % 2), [2 + i], seed=task["task_id"], member=i)
                for task in tasks for i in range(group)]
    return rollout


TASKS, WORLD = [{"task_id": i} for i in range(10)], World(Config(), {}, "")


@pytest.fixture
def play(chat, checkpoint, monkeypatch, tmp_path):
    """The script's own loop on given rollouts, without a browser; returns the lines of metrics.jsonl."""
    monkeypatch.setattr(mgrpo, "open_sites", lambda spec: contextlib.nullcontext({}))
    monkeypatch.setattr(mgrpo, "load_tasks", lambda spec, sites, judge: TASKS)
    monkeypatch.setattr(mgrpo, "report", lambda out: None)

    def run(rollout, out, **changes):
        monkeypatch.setattr(mgrpo, "rollout", rollout)
        try:
            mgrpo.main(Config(**dict(model=str(checkpoint), out=str(tmp_path / out), steps=6, batch=6, G=2, lr=1e-2,
                                     save_every=2) | changes))
        except SystemExit as left:  # caught here, where its frames end: they hold the directory's lock
            run.status = left.code
        finally:
            run.lines = [json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        return run.lines
    return run


def test_beta_0_loads_no_reference_model_and_kl_starts_at_0(chat, play, monkeypatch):
    loaded = []
    monkeypatch.setattr(mgrpo, "load", lambda *a, **k: loaded.append(a) or load(*a, **k))
    for beta, models in ((0.0, 1), (0.1, 2)):
        loaded.clear()
        first, second = play(even_tasks_teach(chat), f"{beta}", steps=2, beta=beta, updates_per_batch=1)
        assert len(loaded) == models and first["groups_kept"] > 0 and first["kl"] == 0
        assert second["kl"] > 0 if beta else second["kl"] == 0


def test_a_loss_or_gradient_that_is_not_finite_makes_no_step_and_names_its_tasks(chat):
    kept = [group_advantages(group) for group in make_groups(chat)]
    for tau in kept[1]:
        tau.task = tau.task | {"task_id": 7}
    spoiled = copy.deepcopy(kept)
    spoiled[1][2].turns[0].logps[0] = float("nan")
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    before = copy.deepcopy(model.state_dict())
    same = lambda: all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert update(model, None, optimizer, spoiled, chat, Config(max_tokens=1), "cpu")["skipped"] == ["7"]
    assert same() and not optimizer.state and all(p.grad is None for p in model.parameters())
    overflow = model.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    assert update(model, None, optimizer, kept, chat, Config(), "cpu")["skipped"] == ["0", "7"] and same()
    overflow.remove()
    assert update(model, None, optimizer, kept, chat, Config(), "cpu")["skipped"] == [] and not same()


def test_three_steps_without_a_finite_loss_end_the_run(chat, play, tmp_path):
    async def spoiled(*args, **kwargs):
        trajectories = await even_tasks_teach(chat)(*args, **kwargs)
        for tau in trajectories:
            tau.turns[0].logps[0] = float("nan")
        return trajectories
    with pytest.raises(ValueError, match="three steps in a row"):
        play(spoiled, "x", save_every=1)
    assert [(line["step"], line["loss"], bool(line["skipped"])) for line in play.lines] == [(i, None, True) for i in range(3)]


def test_alarms_sound_beyond_their_thresholds_alone():
    calm = {"logp_gap": 5e-4, "entropy": 0.03, "kl": 0.9, "groups_kept": 3, "skipped": []}
    sounds = lambda device="cpu", **changes: [sign.split()[0] for sign in alarms(calm | changes, torch.device(device))]
    assert sounds() == [] and sounds("cuda", logp_gap=5e-3) == []
    assert sounds(logp_gap=5e-3) == ["logp_gap"] == sounds("cuda", logp_gap=2e-2)
    assert sounds(entropy=0.01, kl=2.0) == ["entropy", "kl"] and sounds(entropy=0.0, groups_kept=0) == []
    assert "7, 12" in alarms(calm | {"skipped": ["7", "12"]}, torch.device("cpu"))[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drops_the_rollout_saves_and_the_next_command_goes_on(chat, play, tmp_path, number):
    """Bit for bit as if there had been none, although the step had not been saved on its own."""
    async def interrupted(*args, seed, **kwargs):
        if seed == "0/3":
            signal.raise_signal(number)
            await asyncio.Event().wait()  # forever, were it not for the signal
        return await even_tasks_teach(chat)(*args, seed=seed, **kwargs)
    handler = signal.getsignal(number)
    whole = play(even_tasks_teach(chat), "whole")
    assert len(play(interrupted, "parts")) == 3
    assert play.status == 128 + number and signal.getsignal(number) is handler
    parts = play(even_tasks_teach(chat), "parts")
    timeless = lambda lines: [{k: v for k, v in line.items() if "second" not in k} for line in lines]
    assert timeless(parts) == timeless(whole) and all(line["groups_kept"] for line in whole)
    a, b = (load(tmp_path / out).state_dict() for out in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_after_a_signal_the_browsers_complaints_are_not_passed_on(caplog):
    async def complain():
        asyncio.get_running_loop().call_exception_handler({"message": "the driver is gone"})

    async def complain_when_stopped():
        signal.raise_signal(signal.SIGTERM)
        await complain()
    with Stop() as stop:
        stop.run(complain())
        assert "the driver is gone" in caplog.text
        caplog.clear()
        stop.run(complain_when_stopped())
        assert stop.asked and not caplog.text


def test_the_newest_checkpoints_stay_and_the_best_one_held_out(chat, play, tmp_path):
    """Successes of 3, 7 and 5 of ten tasks at the three checkpoints: the second is the best. A run begun anew forgets it."""
    def rollout_of(*successes):
        successes = iter(successes)

        async def rollout(model, chat_, tasks, score, cfg, **kwargs):
            if kwargs["temperature"] > 0:
                return await even_tasks_teach(chat)(model, chat_, tasks, score, cfg, **kwargs)
            n = next(successes)
            return [trajectory(chat, float(i < n), [1]) for i in range(len(tasks))]
        return rollout

    lines = play(rollout_of(3, 7, 5), "x", keep=2, held_out="theirs")
    assert [line.get("held_out_success") for line in lines] == [None, 0.3, None, 0.7, None, 0.5]
    kept = lambda: sorted(path.name for path in (tmp_path / "x").iterdir() if path.is_dir())
    assert kept() == ["best", "state", "step-00004", "step-00006"]
    weights = lambda name: load(tmp_path / "x" / name).state_dict()
    same = lambda a, b: all(torch.equal(weights(a)[name], weights(b)[name]) for name in weights(a))
    assert same("best", "step-00004") and same(".", "step-00006") and not same("best", ".")
    best = json.loads((tmp_path / "x/best/config.json").read_text())["run"]
    assert best["step"] == 4 and best["held_out_success"] == 0.7 and load_tokenizer(tmp_path / "x/best")
    (tmp_path / "x/step-notes").mkdir()  # not ours
    play(rollout_of(1), "x", keep=2, held_out="theirs", steps=2, resume=False)
    assert kept() == ["best", "state", "step-00002", "step-notes"] and same("best", "step-00002")


def test_a_rollout_that_is_cancelled_lets_its_forward_pass_end_first(chat, monkeypatch):
    """Behind it the weights are resharded: a pass that still runs would read memory that was given back."""
    began, end, ended = threading.Event(), threading.Event(), []

    class Slow(Engine):
        def prefill(self, request):
            began.set()
            end.wait()
            ended.append(True)

    async def plays(tasks, act, *_):
        await act(trajectory(chat, 0.0, [1]), 0)

    async def cancelled():
        playing = asyncio.ensure_future(rollout.rollout(model, chat, [], None, Settings(max_context=64, max_new_tokens=8), seed=0))
        await asyncio.get_running_loop().run_in_executor(None, began.wait)
        playing.cancel()
        asyncio.get_running_loop().call_later(0.2, end.set)
        await asyncio.wait([playing])
        return playing.cancelled() and ended == [True]

    monkeypatch.setattr(rollout, "Engine", Slow)
    monkeypatch.setattr(rollout, "play", plays)
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    assert asyncio.run(cancelled())


def test_a_second_signal_ends_at_once():
    script = "import signal, mgrpo\nwith mgrpo.Stop():\n    [signal.raise_signal(15) for _ in range(2)]\n    print('still here')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 143 and done.stdout == "" and "a second signal" in done.stderr


def test_another_configuration_is_refused_unless_forced(chat, play, tmp_path):
    play(even_tasks_teach(chat), "x", steps=2)
    with pytest.raises(ValueError, match="eps 0.2, not 0.3; decay True, not False.*--force"):
        play(even_tasks_teach(chat), "x", steps=2, eps=0.3, decay=False)
    assert len(play(even_tasks_teach(chat), "x", steps=3, eps=0.3, decay=False, force=True)) == 3
    assert len(play(even_tasks_teach(chat), "x", steps=1, resume=False)) == 1


@pytest.mark.parametrize("batch, rounds, kept", [(4, 20, 4), (8, 20, 5)])
def test_dynamic_sampling_refills_the_groups_that_teach_nothing(chat, monkeypatch, batch, rounds, kept):
    """Until the batch is full, or every task was played once."""
    monkeypatch.setattr(mgrpo, "rollout", even_tasks_teach(chat))
    trajectories, groups = collect(None, chat, TASKS, 0, Config(batch=batch, G=2, dynamic_sampling=rounds), WORLD)
    metrics = rollout_metrics(trajectories, groups)
    assert metrics["groups_kept"] == len(groups) == kept and batch < metrics["groups_played"] <= 10
    assert len({id(group[0]) for group in groups}) == kept and (kept == 4 or metrics["groups_played"] == 10)


@pytest.mark.parametrize("rounds", [0, 1])
def test_dynamic_sampling_keeps_to_its_rounds(chat, monkeypatch, rounds):
    monkeypatch.setattr(mgrpo, "rollout", even_tasks_teach(chat))
    taught = sum(task["task_id"] % 2 == 0 for task in task_batch(TASKS, 0, Config(batch=6)))
    trajectories, groups = collect(None, chat, TASKS, 0, Config(batch=6, G=2, dynamic_sampling=rounds), WORLD)
    assert rollout_metrics(trajectories, groups)["groups_played"] == 6 + rounds * min(6 - taught, 4)
    assert rounds or len(groups) == taught


def on_two_ranks(checkpoint, out):
    """What torchrun runs of this file: ranks with unequal work, down to none, in collect and in update."""
    torch.set_num_threads(1)
    device, chat, forwards = init_dist(), Chat(load_tokenizer(checkpoint), "You browse the web."), []
    mgrpo.rollout = even_tasks_teach(chat)
    model = shard(tiny_model(vocab_size=chat.tokenizer.get_vocab_size()))
    model.register_forward_hook(lambda *_: forwards.append(0))
    optimizer, lines = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch, seed, rounds in ((5, 0, 0), (1, 1, 0), (4, 0, 20)):
        cfg = Config(batch=batch, G=2, seed=seed, dynamic_sampling=rounds, max_tokens=60)
        trajectories, kept = collect(model, chat, TASKS, 0, cfg, WORLD)
        forwards.clear()
        metrics = rollout_metrics(trajectories, kept) | update(model, None, optimizer, kept, chat, cfg, device)
        lines.append({"mine": len(kept), "forwards": len(forwards), **metrics})
    everyone = gather([lines])
    if rank() == 0:
        with open(out, "w") as file:
            json.dump(everyone, file)


def test_ranks_with_unequal_work_run_equally_many_forwards_and_agree(checkpoint, tmp_path):
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", __file__, str(checkpoint),
                           str(tmp_path / "out.json")], capture_output=True, text=True, timeout=300, cwd=ROOT,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    first, second = json.loads((tmp_path / "out.json").read_text())
    for a, b in zip(first, second, strict=True):
        assert a["forwards"] == b["forwards"] > 0 and a["groups_kept"] == b["groups_kept"] == a["mine"] + b["mine"]
        assert a["loss"] == b["loss"] and a["groups_played"] == b["groups_played"]
    assert (first[1]["mine"], second[1]["mine"]) == (1, 0) and first[2]["groups_kept"] == 4


def test_no_group_left_means_no_step(chat):
    grads, metrics = gradient_of(chat, [], Config())
    assert grads == {} and metrics["grad_norm"] == 0


def test_every_pass_plays_every_task_once_in_an_order_of_its_own():
    tasks, cfg = [{"task_id": i} for i in range(10)], Config(batch=4)
    played = [t["task_id"] for step in range(5) for t in task_batch(tasks, step, cfg)]
    assert sorted(played[:10]) == sorted(played[10:]) == list(range(10)) and played[:10] != played[10:]
    assert task_batch(tasks, 3, cfg) == task_batch(tasks, 3, cfg)  # a function of the step: nothing to save for a resume


@pytest.mark.parametrize("n, batch", [(10, 4), (30, 24), (5, 3), (7, 7), (5, 4), (9, 1)])
def test_no_step_holds_a_task_twice_where_a_pass_ends_within_it(n, batch):
    """Twice would be the same episodes twice: their random numbers hang on seed, step, task and member."""
    for seed in range(5):
        steps = [[t["task_id"] for t in task_batch([{"task_id": i} for i in range(n)], step, Config(batch=batch, seed=seed))]
                 for step in range(3 * n)]
        assert all(len(set(step)) == batch for step in steps)
        played = sum(steps, [])
        assert all(sorted(played[k:k + n]) == list(range(n)) for k in range(0, len(played) - n + 1, n))


def test_the_papers_preset_gives_way_to_the_command_line(monkeypatch):
    import mgrpo
    monkeypatch.setattr("sys.argv", ["mgrpo.py", "--paper", "--lr", "3e-6", "--no-recompute"])
    cfg = mgrpo.parse_args()
    assert (cfg.lr, cfg.recompute, cfg.beta, cfg.eps) == (3e-6, False, 0.001, 0.2)
    assert (cfg.G, cfg.batch, cfg.max_context) == (4, 16, 16384)
    json.dumps(cfg.__dict__)


if __name__ == "__main__":
    on_two_ranks(*sys.argv[1:])
    leave()


def test_the_learning_rate_rises_then_falls_to_zero_or_stays():
    rates = [learning_rate(step, Config(lr=1.0, steps=7, warmup=3)) for step in range(8)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0])
    assert [learning_rate(step, Config(lr=2.0, steps=3, warmup=0, decay=False)) for step in range(5)] == [2.0] * 5
