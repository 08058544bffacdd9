"""The algorithm against slow, obvious versions written from the paper's equation."""
import asyncio
import contextlib
import copy
import json
import os
import shutil
import statistics
import threading

import pytest
import torch
from conftest import GOOD, pad, tiny_model
from flat_sequence import compare

import bc
import evaluate
import mgrpo
import rollout
import run as runs
import worlds
from compress import Trajectory, Turn, context, trajectory_rows
from mgrpo import (MGRPO, Config, group_advantages, mgrpo_loss, per_token, task_batch, update,
                   update_metrics, warmup_linear, weigh)
from model import generate, load, load_tokenizer, save, token_logprobs
from rollout import Engine, Settings


def trajectory(chat, reward, lengths, seed=0, status="ok", member=0):
    """An episode with one response of each of the given lengths, plausible sampling log-probs included."""
    g = torch.Generator().manual_seed(seed)
    tau = Trajectory({"intent": "do it", "task_id": 0, "sites": ["x"]}, member, success=reward, reward=reward,
                     status=status)
    for k, n in enumerate(lengths):
        ids = torch.randint(3, 300, (n,), generator=g).tolist()
        logps = (-4 - torch.rand(n, generator=g)).tolist()
        observation_ids = chat.user_ids(tau.task, k, f"<a>lamp <{k}></a>")
        tau.turns.append(Turn("", f"page {k}", observation_ids, ids, logps, ""))
    return tau


def logprobs(model, row, temperature=1.0):
    """Log-probs of a row's action tokens, the row alone."""
    return token_logprobs(model, *pad([row]), temperature=temperature)[0]


def method_of(chat, model, cfg, optimizer=None, reference=None, Method=MGRPO):
    return Method(cfg, chat, model, reference, optimizer, "cpu")


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
    """float64, 1e-10, on a ragged group of 1 to 15 turns. The ratios leave the clip range on both sides."""
    g = torch.Generator().manual_seed(0)
    shape = [torch.randint(1, 9, (n,), generator=g).tolist() for n in (1, 2, 15, 7)]  # tokens of each turn
    rewards, sizes = [1.0, 0.0, 0.0, 1.0], [n for turns in shape for n in turns]
    new, old, ref = (-2 * torch.rand(sum(sizes), generator=g, dtype=torch.float64) for _ in range(3))
    new.requires_grad_()

    def nested(flat):
        parts = iter(flat.split(sizes))
        return [[next(parts).unbind() for _ in turns] for turns in shape]

    std = statistics.stdev(rewards)
    tokens = [(r, turns, n) for r, turns in zip(rewards, shape) for n in turns for _ in range(n)]
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
    """Token by token, on both sides of the reference."""
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


def test_an_episode_that_the_environment_broke_does_not_change_the_group(chat):
    valid = [trajectory(chat, 1.0, [3]), trajectory(chat, 0.0, [3]), trajectory(chat, 0.0, [3])]
    broken = trajectory(chat, 0.0, [3], status="env_error")
    assert broken not in group_advantages(valid + [broken])
    with_broken = [t.advantage for t in valid]
    group_advantages(valid)
    assert with_broken == [t.advantage for t in valid]


@pytest.mark.parametrize("rewards, statuses", [([1, 1, 1], "ok ok ok"), ([0, 0, 0], "ok ok ok"),
                                               ([1, 0, 0], "ok env_error env_error"),
                                               ([0.1, 0.1, 0.1], "ok ok ok")])
def test_groups_that_teach_nothing_are_dropped(chat, rewards, statuses):
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
        assert row.weight == pytest.approx(1 / (2 * 4 * len(tau.turns) * row.n_action))
        assert row.advantage == tau.advantage


def ragged_groups(chat):
    """Two groups whose episodes have from 1 to 15 turns."""
    def group(k, lengths):
        return [trajectory(chat, float(i % 2), [1 + (k * j + i) % 6 for j in range(n)], 10 * k + i, member=i)
                for i, n in enumerate(lengths)]
    return [group(0, (1, 15, 4)), group(1, (2, 7, 11, 3))]


def gradient_of(chat, kept, cfg, reference=None, model=None):
    model = model or tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    grads = {}
    optimizer.step = lambda: grads.update({k: p.grad.clone() for k, p in model.named_parameters()})
    metrics = update(method_of(chat, model, cfg, optimizer, reference), weigh(kept, chat, cfg))
    return grads, metrics


def obvious_gradient(chat, kept, model, reference=None, beta=0.0):
    """Autograd through the printed formula, each response alone under its own context."""
    loss = 0
    for group in kept:
        logp, old, ref = [], [], []
        for tau in group:
            logp.append([logprobs(model, row) for row in trajectory_rows(chat, tau)])
            old.append([torch.tensor(turn.logps) for turn in tau.turns])
            ref.append([logprobs(reference or model, row).detach() for row in trajectory_rows(chat, tau)])
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
        cfg = Config(loss_norm="paper", beta=0.1, clip=1e9, max_tokens=budget, temperature=1.0)
        grads, metrics = gradient_of(chat, kept, cfg, reference)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
        for name in expected:
            torch.testing.assert_close(grads[name], expected[name], atol=1e-5, rtol=1e-4,
                                       msg=f"{name}, budget {budget}")


def test_ratio_and_clip_act_from_the_second_update_on(chat):
    """--updates-per-batch: the old log-probs stay those of the rollout while the policy moves."""
    kept = [group_advantages(group) for group in ragged_groups(chat)]
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    for tau in (tau for group in kept for tau in group):
        for turn, row in zip(tau.turns, trajectory_rows(chat, tau)):
            turn.logps = logprobs(model, row).tolist()
    cfg = Config(loss_norm="paper", clip=1e9, temperature=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    method = method_of(chat, model, cfg, optimizer)
    first, second, _ = (update(method, weigh(kept, chat, cfg)) for _ in range(3))
    assert first["clip_frac"] == 0 and first["logp_gap"] < 1e-5
    assert first["loss"] == pytest.approx(0, abs=1e-5) and second["loss"] < first["loss"]
    assert second["clip_frac"] > 0 and second["logp_gap"] > 1e-3
    expected, _ = obvious_gradient(chat, kept, model)
    grads, _ = gradient_of(chat, kept, cfg, model=model)
    for name in expected:
        torch.testing.assert_close(grads[name], expected[name], atol=1e-5, rtol=1e-4)


def sampled_groups(chat, model):
    """Groups whose log-probs are the model's own."""
    kept = [group_advantages(group) for group in ragged_groups(chat)]
    for tau in (tau for group in kept for tau in group):
        for turn, row in zip(tau.turns, trajectory_rows(chat, tau)):
            turn.logps = logprobs(model, row).tolist()
    return kept


def test_each_pass_measures_what_the_updates_before_it_have_changed(chat):
    """The mean |log rho|, against one response at a time; the rest is the first pass's or the sum of all."""
    cfg = Config(temperature=1.0, max_tokens=700)
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    kept = sampled_groups(chat, model)
    method = method_of(chat, model, cfg, torch.optim.AdamW(model.parameters(), 3e-4, weight_decay=0.0))
    rows, passes, measured = weigh(kept, chat, cfg), [], []
    for _ in range(3):
        changes = [abs(now - then) for row in rows
                   for now, then in zip(logprobs(model, row).tolist(), row.logps, strict=True)]
        measured.append(statistics.mean(changes))
        passes.append(update(method, rows))
    metrics = update_metrics(passes)
    assert metrics["change"] == pytest.approx(measured[1:], rel=1e-3) and 0 < metrics["change"][0] < metrics["change"][1]
    assert metrics["logp_gap"] == passes[0]["logp_gap"] == pytest.approx(measured[0], abs=1e-6)
    assert metrics["tokens_trained"] == sum(one["tokens"] for one in passes) > passes[0]["tokens"]
    for key, of_pass in (("loss", 0), ("entropy", 0), ("grad_norm", 0), ("kl", 2), ("clip_frac", 2)):
        assert metrics[key] == passes[of_pass][key]
    assert all(weight.grad is None for weight in model.parameters())


def test_one_flat_sequence_is_not_what_was_sampled(chat):
    """tests/tools/flat_sequence.py on a random model: only rows in their own contexts have the rollout's log-probs."""
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
        for turn, row in zip(tau.turns, trajectory_rows(chat, tau)):
            turn.logps = logprobs(model, row, temperature=0.7).tolist()
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
    async def rollout(model, chat_, tasks, *, env, settings, group, seed, temperature, tick=None):
        assert temperature == settings.temperature  # and there is no top_p in training
        reward = lambda task, i: float(i == 0 or task["task_id"] % 2)
        return [trajectory(chat, reward(task, i), [2 + i], seed=task["task_id"], member=i)
                for task in tasks for i in range(group)]
    return rollout


TASKS = [{"task_id": i} for i in range(10)]


def without_browser(monkeypatch):
    """What mgrpo.main opens besides the model, replaced. The report is an empty file."""
    monkeypatch.setattr(worlds, "open_sites", lambda *specs: contextlib.nullcontext({}))
    monkeypatch.setattr(worlds, "load_tasks", lambda spec, sites, **more: TASKS)
    monkeypatch.setattr(runs, "report", lambda out: (out / "report.html").touch())


@pytest.fixture
def play(checkpoint, monkeypatch, tmp_path):
    """play(rollout, out, **changes): mgrpo.main without a browser; the lines of metrics.jsonl."""
    without_browser(monkeypatch)

    def play(rollout, out, Method=MGRPO, **changes):
        monkeypatch.setattr(mgrpo, "rollout", rollout)
        monkeypatch.setattr(evaluate, "rollout", rollout)
        cfg = Config(**dict(model=str(checkpoint), out=str(tmp_path / out), steps=6, batch=6, G=2, lr=1e-2,
                            warmup=0.5, save_every=2) | changes)
        try:
            mgrpo.main(cfg, Method)
        except KeyboardInterrupt:  # caught here, where its frames end: they hold the directory's lock
            pass
        finally:
            text = (tmp_path / out / "metrics.jsonl").read_text() if (tmp_path / out / "metrics.jsonl").exists() else ""
            play.lines = [json.loads(line) for line in text.splitlines()]
        return play.lines
    return play


def test_beta_0_loads_no_reference_model_and_kl_starts_at_0(chat, play, monkeypatch, tmp_path):
    loaded = []
    load = mgrpo.load_for_training
    monkeypatch.setattr(mgrpo, "load_for_training", lambda *a, **k: loaded.append(a) or load(*a, **k))
    for beta, lora, models in ((0.0, 0, 1), (0.1, 0, 2), (0.1, 4, 1)):  # LoRA's is the policy itself
        loaded.clear()
        first, second = play(even_tasks_teach(chat), f"{beta}-{lora}", steps=2, beta=beta, lora=lora,
                             updates_per_batch=1)
        assert len(loaded) == models and first["groups_kept"] > 0 and first["kl"] == 0
        assert second["kl"] > 0 if beta else second["kl"] == 0
    # What goes on from a LoRA checkpoint begins with its policy, which is then the reference.
    loaded.clear()
    first, second = play(even_tasks_teach(chat), "next", model=str(tmp_path / "0.1-4"), steps=2, beta=0.1, lora=4,
                         updates_per_batch=1)
    assert len(loaded) == 1 and first["kl"] == 0 and second["kl"] > 0


def test_a_loss_or_gradient_that_is_not_finite_makes_no_step(chat):
    kept = [group_advantages(group) for group in make_groups(chat)]
    spoiled = copy.deepcopy(kept)
    spoiled[1][2].turns[0].logps[0] = float("nan")
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    before = copy.deepcopy(model.state_dict())
    same = lambda: all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    one_by_one = method_of(chat, model, Config(max_tokens=1), optimizer)
    assert update(one_by_one, weigh(spoiled, chat, Config()))["skipped"] == 1
    assert same() and not optimizer.state and all(p.grad is None for p in model.parameters())
    overflow = model.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    sound, method = weigh(kept, chat, Config()), method_of(chat, model, Config(), optimizer)
    assert update(method, sound)["skipped"] == 1 and same()
    overflow.remove()
    assert update(method, sound)["skipped"] == 0 and not same()


def test_a_response_without_its_log_probs_is_an_error_and_not_taken_for_on_policy(chat):
    """Were they filled in, the gap between rollout and training would read 0."""
    kept = [group_advantages(group) for group in make_groups(chat)]
    kept[1][2].turns[0].logps = []
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(RuntimeError):
        update(method_of(chat, model, Config(), optimizer), weigh(kept, chat, Config()))


def test_a_skipped_update_is_reported_whichever_pass_it_was(chat, play, monkeypatch, capsys):
    """It once was reported of a batch's last pass alone."""
    calls = []

    def counted(*args):
        calls.append(0)
        if len(calls) not in (2, 7, 8, 9):
            return update(*args)
        hook = args[0].model.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
        metrics = update(*args)
        hook.remove()
        return metrics
    monkeypatch.setattr(mgrpo, "update", counted)
    assert [line["skipped"] for line in play(even_tasks_teach(chat), "x")] == [1, 0, 3, 0, 0, 0]
    out = capsys.readouterr().out
    assert out.count("! no update") == 4 and out.count("  updates (100%)\n") == 6 and len(calls) == 18


def test_steps_without_a_finite_loss_change_nothing_and_are_on_record(chat, play, checkpoint, tmp_path):
    async def spoiled(*args, **kwargs):
        trajectories = await even_tasks_teach(chat)(*args, **kwargs)
        for tau in trajectories:
            tau.turns[0].logps[0] = float("nan")
        return trajectories
    found = [(line["step"], line["loss"], line["skipped"]) for line in play(spoiled, "x", steps=3)]
    assert found == [(0, None, 3), (1, None, 3), (2, None, 3)]
    a, b = (load(path).state_dict() for path in (checkpoint, tmp_path / "x"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("off, precision, warns", [
    (0.0, None, False), (5e-4, None, False), (2e-3, None, True), (2e-3, "bfloat16", False), (0.2, "bfloat16", True)])
def test_a_gap_between_rollout_and_training_is_reported(chat, play, capsys, monkeypatch, off, precision, warns):
    monkeypatch.setattr(mgrpo.run, "init_dist", lambda precision: torch.device("cpu"))  # no group: float32 all the same

    async def measured(model, *args, **kwargs):
        trajectories = await even_tasks_teach(chat)(model, *args, **kwargs)
        for tau in trajectories:
            for turn, row in zip(tau.turns, trajectory_rows(chat, tau)):
                turn.logps = (logprobs(model, row, temperature=0.7) + off).tolist()
        return trajectories
    line, = play(measured, "x", steps=1, precision=precision)
    assert line["logp_gap"] == pytest.approx(off, abs=1e-5) and line["groups_kept"]
    assert ("logp_gap is far above rounding" in capsys.readouterr().out) == warns


def test_an_interrupted_run_continues_as_if_nothing_had_happened(chat, play, tmp_path):
    """Bit for bit, from the last saved step on."""
    async def interrupted(*args, seed, **kwargs):
        if seed == "0/3":
            raise KeyboardInterrupt
        return await even_tasks_teach(chat)(*args, seed=seed, **kwargs)
    whole = play(even_tasks_teach(chat), "whole")
    assert len(play(interrupted, "parts")) == 3
    parts = play(even_tasks_teach(chat), "parts")
    timeless = lambda lines: [{k: v for k, v in line.items() if "second" not in k} for line in lines]
    assert timeless(parts) == timeless(whole) and all(line["groups_kept"] for line in whole)
    a, b = (load(tmp_path / out).state_dict() for out in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def held_out_successes(chat, *successes):
    """A stand-in for rollout: `even_tasks_teach`, and so many of ten held-out tasks in each evaluation."""
    successes = iter(successes)

    async def rollout(model, chat_, tasks, **kwargs):
        if kwargs["temperature"] > 0:
            return await even_tasks_teach(chat)(model, chat_, tasks, **kwargs)
        n = next(successes)
        return [trajectory(chat, float(i < n), [1]) for i in range(len(tasks))]
    return rollout


def test_checkpoints_that_stay_and_the_best_one_held_out(chat, play, tmp_path):
    """Of ten held-out tasks 3, 7, 5 and 5 succeed, after steps 2, 4, 6 and 7: step 4 is the best."""
    rollout_of = lambda *successes: held_out_successes(chat, *successes)
    lines = play(rollout_of(3, 7, 5, 5), "x", steps=7, keep_every=4, held_out="theirs", held_out_every=2,
                 save_every=1)
    assert [line.get("held_out_success") for line in lines] == [None, 0.3, None, 0.7, None, 0.5, 0.5]
    kept = lambda: sorted(path.name for path in (tmp_path / "x").iterdir() if path.is_dir())
    assert kept() == ["best", "state", "step-00004"]
    weights = lambda name: load(tmp_path / "x" / name).state_dict()
    same = lambda a, b: all(torch.equal(weights(a)[name], weights(b)[name]) for name in weights(a))
    assert same("best", "step-00004") and not same("best", ".")
    best = json.loads((tmp_path / "x/best/config.json").read_text())["run"]
    assert best["step"] == 4 and best["held_out_success"] == 0.7 and load_tokenizer(tmp_path / "x/best")
    play(rollout_of(1), "x", held_out="theirs", steps=2, resume=False)  # a new run forgets the old one's
    assert same("best", ".")


def test_the_best_checkpoint_is_compared_with_steps_of_the_same_held_out_tasks(chat, play, tmp_path):
    """--held-out may change when a run goes on. 3 of 10 hard tasks once counted as worse than 7 of 10 easy ones."""
    best = lambda: json.loads((tmp_path / "x/best/config.json").read_text())["run"]["step"]
    more = {"held_out_every": 1, "save_every": 1, "decay": False, "warmup": 0.0}
    play(held_out_successes(chat, 7, 5), "x", steps=2, held_out="easy", **more)
    assert best() == 1
    play(held_out_successes(chat, 3, 2), "x", steps=4, held_out="hard", **more)
    assert best() == 3
    play(held_out_successes(chat, 6), "x", steps=5, held_out="easy", **more)
    assert best() == 3
    lines = play(held_out_successes(chat, 9), "x", steps=6, held_out="easy", **more)
    assert best() == 6 and [line["held_out"] for line in lines] == ["easy"] * 2 + ["hard"] * 2 + ["easy"] * 2


def files(directory):
    """{path: (content, time of the last change)} of all files in a directory."""
    return {str(path.relative_to(directory)): (path.read_bytes(), path.stat().st_mtime_ns)
            for path in directory.rglob("*") if path.is_file()}


def test_a_refused_batch_leaves_an_earlier_run_as_it_was(chat, play, tmp_path):
    """--no-resume once cleared the old run's folder before the tasks were counted."""
    play(even_tasks_teach(chat), "x", steps=1)
    before = files(tmp_path / "x")
    with pytest.raises(ValueError, match="holds only 10 tasks"):
        play(even_tasks_teach(chat), "x", batch=11, resume=False)
    assert files(tmp_path / "x") == before


def test_sites_that_stay_down_stop_the_run(chat, play, tmp_path):
    """It once trained on nothing, step after step, and called itself finished."""
    teach = even_tasks_teach(chat)
    steps = []

    async def broken_but_for_the_second_step(*given, **more):
        played = await teach(*given, **more)
        steps.append(len(steps))
        if steps[-1] != 1:
            for tau in played:
                tau.status, tau.checks = "env_error", [["environment", False, "the start page answered 503"]]
        return played

    with pytest.raises(ValueError, match="none of the 12 episodes.*answered 503; open the site in a browser"):
        play(broken_but_for_the_second_step, "x", save_every=1)
    assert [line["success_rate"] is None for line in play.lines] == [True, False, True, True]  # the fifth step stopped
    assert len(play(teach, "x", save_every=1)) == 6  # nothing is lost


def test_a_finished_run_says_so_and_touches_nothing(chat, play, tmp_path, monkeypatch, capsys):
    """It once said "saved" and stamped the commit of newer code into the config.json of the old weights."""
    play(even_tasks_teach(chat), "x", steps=2)
    assert "saved" in capsys.readouterr().out
    before, describe = files(tmp_path / "x"), runs.describe_run
    monkeypatch.setattr(runs, "describe_run", lambda *given: describe(*given) | {"commit": "newer"})
    monkeypatch.setattr(worlds, "open_sites", None)  # nor does it start the sandbox
    play(None, "x", steps=2)
    said = capsys.readouterr().out
    assert "is finished: all 2 steps are done" in said and "saved" not in said and "--no-resume" in said
    assert files(tmp_path / "x") == before and "state/00001/state.json" in before


def test_a_run_that_starts_over_forgets_everything_that_the_old_one_left(chat, play, tmp_path):
    """best/, summaries, pictures and the report of old weights once stayed, as if they were the new run's."""
    out, left = tmp_path / "x", []
    play(held_out_successes(chat, 1, 1), "x", steps=2, keep_every=1, held_out="theirs", held_out_every=1, save_every=1)
    for path in ("screenshots/0.jpeg", "summary.json", "summary-sandbox_test.json"):
        (out / path).parent.mkdir(exist_ok=True)
        (out / path).write_text("{}")
    old = {"best", "step-00001", "step-00002", "state", "screenshots", "summary.json", "summary-sandbox_test.json",
           "report.html", "metrics.jsonl", "trajectories.jsonl"}
    names = lambda: {path.name for path in out.iterdir()}
    assert old < names()

    async def look(*args, **kwargs):
        left.append(names())
        return await even_tasks_teach(chat)(*args, **kwargs)
    lines = play(look, "x", steps=1, resume=False)
    assert len(lines) == 1 and not left[0] & old and "config.json" in left[0]
    assert not names() & {"best", "step-00001", "step-00002", "summary.json", "screenshots"}


def test_a_run_in_a_relative_directory_is_forgotten_as_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("x/best/a", "x/step-00005/a", "x/state/00001/a", "x/screenshots/a", "x/judge.jsonl/a"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    runs.Run("x", {}).clear()
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["judge.jsonl"]


def test_a_checkpoint_that_was_rewritten_since_the_start_is_refused_unless_forced(chat, play, checkpoint, tmp_path):
    """It is the KL's reference and WebRL's frozen clone, which both once changed in silence."""
    async def interrupted(*args, seed, **kwargs):
        if seed == "0/2":
            raise KeyboardInterrupt
        return await even_tasks_teach(chat)(*args, seed=seed, **kwargs)
    start = tmp_path / "start"
    shutil.copytree(checkpoint, start)
    again = lambda rollout, **more: play(rollout, "x", model=str(start), beta=0.1, save_every=1, **more)
    assert len(again(interrupted, steps=3)) == 2
    weights = (start / "model.safetensors").read_bytes()
    save(tiny_model(seed=5, vocab_size=chat.tokenizer.get_vocab_size()), start)
    assert len((start / "model.safetensors").read_bytes()) == len(weights)
    with pytest.raises(ValueError, match=f"other weights in {start}, which have been rewritten.*--force"):
        again(even_tasks_teach(chat), steps=3)
    (start / "model.safetensors").write_bytes(weights)  # the same bytes are the same weights, whatever their date
    os.utime(start / "model.safetensors", (0, 0))
    assert len(again(even_tasks_teach(chat), steps=3)) == 3
    (start / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(ValueError, match="steps 3, not 4; other weights"):
        again(even_tasks_teach(chat), steps=4)
    assert len(again(even_tasks_teach(chat), steps=4, force=True)) == 4


def test_a_checkpoint_that_was_rewritten_while_the_run_went_on_is_refused_as_well(chat, play, checkpoint, tmp_path):
    """Such a run trained against the old weights until it was interrupted: what counts is what it had opened."""
    async def rewrites(*args, seed, **kwargs):
        if seed == "0/1":
            save(tiny_model(seed=5, vocab_size=chat.tokenizer.get_vocab_size()), start)
        if seed == "0/2":
            raise KeyboardInterrupt
        return await even_tasks_teach(chat)(*args, seed=seed, **kwargs)
    start = tmp_path / "start"
    shutil.copytree(checkpoint, start)
    assert len(play(rewrites, "x", model=str(start), beta=0.1, save_every=1)) == 2
    with pytest.raises(ValueError, match="other weights in"):
        play(even_tasks_teach(chat), "x", model=str(start), beta=0.1, save_every=1)


def test_config_json_names_the_precision_of_the_weights_next_to_it(chat, play, checkpoint, tmp_path):
    """Float32 weights whose config.json says bfloat16: after a save it said float32, after a new start bfloat16."""
    start, seen = tmp_path / "start", []
    shutil.copytree(checkpoint, start)
    config = json.loads((start / "config.json").read_text())
    precision = lambda config: {config[key] for key in ("dtype", "torch_dtype") if key in config}
    assert precision(config) == {"float32"}
    (start / "config.json").write_text(json.dumps(config | {key: "bfloat16" for key in ("dtype", "torch_dtype")
                                                            if key in config}))

    async def look(*args, **kwargs):
        seen.append(precision(json.loads((tmp_path / "x/config.json").read_text())))
        return await even_tasks_teach(chat)(*args, **kwargs)
    for resume in (True, True, False):  # two steps; the third; two from the start
        play(look, "x", model=str(start), steps=3 - (not seen), resume=resume, save_every=1, decay=False, warmup=0.0)
        seen.append(precision(json.loads((tmp_path / "x/config.json").read_text())))
    assert seen == [{"float32"}] * (2 + 1 + 1 + 1 + 3 + 1)
    assert load(tmp_path / "x").model.norm.weight.dtype == torch.float32


class Priced(MGRPO):
    """A success is worth 0.4, and every turn costs 0.1."""

    def reward(self, tau):
        return 0.4 * tau.success - 0.1 * len(tau.turns)


def priced(chat):
    """A stand-in for rollout: one to three turns; the first two of a group succeed, of an odd task all."""
    async def rollout(model, chat_, tasks, *, group, **_):
        played = []
        for task in tasks:
            for i in range(group):
                success = float(i < 2 or task["task_id"] % 2)
                tau = trajectory(chat, success, [2] * (1 + (i + task["task_id"]) % 3), seed=i, member=i)
                tau.task = tau.task | task | {"eval": GOOD["eval"]}
                played.append(tau)
        return played
    return rollout


def test_a_reward_that_is_not_the_success_trains_and_statistics_still_count_successes(chat, play, tmp_path):
    """A reward of 0.4 once halved pass@1; a negative one was a "math domain error"."""
    line, = play(priced(chat), "x", Priced, steps=1, G=4, batch=10, held_out="theirs")
    records = [json.loads(text) for text in (tmp_path / "x/trajectories.jsonl").read_text().splitlines()]
    groups = [records[i:i + 4] for i in range(0, 40, 4)]
    for group in groups:
        rewards = [0.4 * record["success"] - 0.1 * len(record["turns"]) for record in group]
        assert [record["reward"] for record in group] == pytest.approx(rewards)
        A = [(r - statistics.mean(rewards)) / statistics.stdev(rewards) for r in rewards]
        assert [record["advantage"] for record in group] == pytest.approx(A)
        odd = group[0]["task_id"] % 2
        assert [record["success"] for record in group] == ([1.0] * 4 if odd else [1.0, 1.0, 0.0, 0.0])
    assert line["groups_kept"] == 10 and line["success_rate"] == pytest.approx(0.75) and line["held_out_success"] == 1
    assert line["reward"] == pytest.approx(statistics.mean(record["reward"] for record in records))
    kept = bc.read_demonstrations(tmp_path / "x/trajectories.jsonl", chat)
    assert len(kept) == 30 and all(tau.success == 1 for tau in kept)


@pytest.mark.parametrize("reward", [lambda tau: tau.success, lambda tau: 0.4 * tau.success, lambda tau: -5.0])
def test_figures_do_not_depend_on_the_reward(chat, reward):
    """Two runs of each of five tasks: pass@1, pass@2, success and interval."""
    played = asyncio.run(priced(chat)(None, chat, TASKS[:5], group=4))
    for tau in played:
        tau.reward = reward(tau)
    found = evaluate.summarize(played)
    assert found["success_rate"] == pytest.approx((3 * 0.5 + 2) / 5)
    one_fails = [1.0, 1.0, 0.0, 0.0]
    chance = statistics.mean(max(a, b) for i, a in enumerate(one_fails) for j, b in enumerate(one_fails) if i != j)
    pass_at = {int(k): value for k, value in found["pass_at"].items()}
    assert pass_at[1] == pytest.approx(found["success_rate"]) and pass_at[2] == pytest.approx((3 * chance + 2) / 5)
    low, high = found["ci95"]
    assert 0 <= low < found["success_rate"] < high <= 1


def test_a_rollout_that_is_cancelled_lets_its_forward_pass_end_first(chat, monkeypatch):
    """The weights are resharded next: a pass that still runs would read freed memory."""
    began, end, ended = threading.Event(), threading.Event(), []

    class Slow(Engine):
        def prefill(self, request):
            began.set()
            end.wait()
            ended.append(True)

    async def plays(act, *_, **__):
        await act(trajectory(chat, 0.0, [1]), 0)

    async def cancelled():
        settings = Settings(max_context=64, max_new_tokens=8)
        playing = asyncio.ensure_future(rollout.rollout(model, chat, [], None, settings, seed=0))
        await asyncio.get_running_loop().run_in_executor(None, began.wait, 10)
        playing.cancel()
        threading.Timer(0.2, end.set).start()
        await asyncio.wait([playing])
        return playing.cancelled() and ended == [True]

    monkeypatch.setattr(rollout, "Engine", Slow)
    monkeypatch.setattr(rollout, "play", plays)
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    assert asyncio.run(cancelled())


def test_another_configuration_is_refused_unless_forced(chat, play, tmp_path):
    play(even_tasks_teach(chat), "x", steps=2)
    with pytest.raises(ValueError, match="eps 0.2, not 0.3; decay True, not False.*--force"):
        play(even_tasks_teach(chat), "x", steps=2, eps=0.3, decay=False)
    assert len(play(even_tasks_teach(chat), "x", steps=3, eps=0.3, decay=False, force=True)) == 3
    assert len(play(even_tasks_teach(chat), "x", steps=1, resume=False)) == 1


@pytest.mark.parametrize("schedule, may_grow", [
    ({"decay": True, "warmup": 0.0}, False), ({"decay": False}, False),
    ({"decay": False, "warmup": 0.0}, True)])
def test_a_run_can_be_prolonged_if_its_learning_rate_does_not_depend_on_steps(chat, play, schedule, may_grow):
    play(even_tasks_teach(chat), "x", steps=2, **schedule)
    with contextlib.nullcontext() if may_grow else pytest.raises(ValueError, match="steps 2, not 3"):
        assert len(play(even_tasks_teach(chat), "x", steps=3, **schedule)) == 3


def test_responses_without_an_action_and_actions_that_fail_are_counted_apart(chat):
    tau = trajectory(chat, 0.0, [3] * 4)
    left = [("", "no action found"), ("do(...)", "no element 5"), ("do(...)", "")]
    for turn, found in zip(tau.turns, left):
        turn.action, turn.error = found
    broken = trajectory(chat, 0.0, [3], status="env_error")
    metrics = evaluate.figures([tau, broken])
    assert (metrics["invalid_actions"], metrics["failed_actions"], metrics["env_errors"]) == (1, 1, 1)


@pytest.mark.parametrize("credit_errors", [False, True])
def test_a_success_makes_none_of_its_failed_responses_likelier(chat, credit_errors):
    """Unless --credit-errors asks for it. A failure makes all of its responses less likely either way."""
    success, failure = trajectory(chat, 1.0, [3, 9, 4]), trajectory(chat, 0.0, [5, 9, 3])
    for tau in (success, failure):
        tau.turns[1].error = "no action found"
    method = method_of(chat, None, Config(G=2, credit_errors=credit_errors))
    rows, _ = method.learn_from([success, failure], step=0)
    A = 0.5 ** 0.5  # (1 - 1/2) / std, and the sample standard deviation of 0 and 1 is 1/sqrt(2)
    of_the_error = A if credit_errors else 0.0
    assert [row.advantage for row in rows] == pytest.approx([A, of_the_error, A, -A, -A, -A], abs=1e-12)
    assert {row.weight for row in rows} == {1 / 33}  # it still counts among the batch's tokens


@pytest.mark.parametrize("status, success", [("ok", 1.0), ("env_error", None)])
def test_a_step_without_a_group_that_trains_logs_null_and_moves_nothing(chat, play, checkpoint, tmp_path, monkeypatch,
                                                                        capsys, status, success):
    """Zeros looked like a collapse in the report's curves, a broken environment like a policy that fails."""
    async def rollout(model, chat_, tasks, *, group, **_):
        played = [trajectory(chat, 1.0, [3], seed=i, member=i) for _ in tasks for i in range(group)]
        for tau in played:
            tau.status = status
            tau.checks = [["environment", False, "the site is down"]] if success is None else []
        return played
    monkeypatch.setattr(mgrpo, "update", None)
    for line in play(rollout, "x", steps=2):
        assert [line[key] for key in ("loss", "grad_norm", "kl", "clip_frac", "entropy", "logp_gap")] == [None] * 6
        assert (line["success_rate"], line["groups_kept"], line["change"], line["skipped"]) == (success, 0, [], 0)
        assert line["tokens_trained"] == 0 and line["env_errors"] == (0 if success else 12) and line["reward"] == success
        means = [line[key] for key in ("turns", "response_tokens", "trajectory_tokens")]
        assert all(means) if success else means == [None] * 3
    said = capsys.readouterr().out
    assert "entropy" not in said.partition("step 1/2")[2] and ("success 100.0%" if success else "success -") in said
    a, b = (load(path).state_dict() for path in (checkpoint, tmp_path / "x"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("n, batch", [(10, 4), (30, 24), (5, 3), (7, 7), (5, 4), (9, 1)])
def test_a_pass_holds_no_task_twice_and_each_has_its_own_order(n, batch):
    """A task twice in a step would play the same episodes twice: (seed, step, task, member) seed them."""
    tasks, cfg = [{"task_id": i} for i in range(n)], Config(batch=batch)
    a_pass = n // batch  # steps
    steps = [[task["task_id"] for task in task_batch(tasks, step, cfg)] for step in range(20 * a_pass)]
    passes = [sum(steps[k:k + a_pass], []) for k in range(0, len(steps), a_pass)]
    assert all(len(played) == len(set(played)) == a_pass * batch for played in passes)
    assert len(set(map(tuple, passes))) > 10 and set(sum(passes, [])) == set(range(n))
    assert task_batch(tasks, 3, cfg) == task_batch(tasks, 3, cfg)  # a function of the step, for a resume


@pytest.mark.parametrize("sizes, batch", [([5] * 19, 19), ([32] * 11 + [31] * 8, 24), ([7] * 4, 2),
                                          ([9, 3, 1], 5)])
def test_every_step_has_its_share_of_each_template(sizes, batch):
    """Whatever the pass: rounded up or down, so that the success of two steps can be compared."""
    tasks = [{"task_id": f"{t}/{i}", "intent_template_id": t} for t, n in enumerate(sizes) for i in range(n)]
    for step in range(3 * (len(tasks) // batch)):
        drawn = [task["intent_template_id"] for task in task_batch(tasks, step, Config(batch=batch))]
        for template, n in enumerate(sizes):
            assert abs(drawn.count(template) - n * batch / len(tasks)) < 1, (step, template)


@pytest.fixture
def parse(monkeypatch):
    """parse(*arguments): mgrpo.py's Config."""
    def parse(*arguments):
        monkeypatch.setattr("sys.argv", ["mgrpo.py", *map(str, arguments)])
        return runs.parse_args(Config, mgrpo.__doc__, {"paper": mgrpo.PAPER}, "")
    return parse


def test_the_command_line_overrides_the_papers_preset(parse):
    cfg = parse("--paper", "--lr", "3e-6", "--no-recompute")
    assert (cfg.lr, cfg.recompute, cfg.beta, cfg.eps) == (3e-6, False, 0.001, 0.2)
    assert (cfg.G, cfg.batch, cfg.max_context) == (4, 16, 16384)
    json.dumps(cfg.__dict__)


def test_pages_and_sizes_are_those_that_the_checkpoint_was_trained_with(parse, checkpoint, tmp_path):
    """`bc.py --viewport-only`, then mgrpo.py, once changed the pages in silence."""
    config = json.loads((checkpoint / "config.json").read_text())
    trained = {"viewport_only": True, "text_only": True, "max_page_chars": 999, "max_turns": 7,
               "max_new_tokens": 33, "max_context": 2222, "lr": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config | {"run": trained}))
    shown = lambda cfg: {name: getattr(cfg, name) for name in trained}
    assert shown(parse("--model", tmp_path)) == trained | {"lr": Config.lr}
    assert shown(parse("--model", tmp_path, "--no-viewport-only", "--max-turns", 3))["max_turns"] == 3
    assert not parse("--model", tmp_path, "--no-viewport-only").viewport_only
    preset = parse("--model", tmp_path, "--paper")
    assert preset.max_turns == 15 and preset.text_only
    assert shown(parse("--model", checkpoint)) == shown(Config())


def test_the_learning_rate_rises_for_a_share_of_the_steps_then_falls_to_zero_or_stays():
    rates = [warmup_linear(step, Config(lr=1.0, steps=7, warmup=0.4)) for step in range(8)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0])
    constant = Config(lr=2.0, steps=3, warmup=0.0, decay=False)
    assert [warmup_linear(step, constant) for step in range(5)] == [2.0] * 5
    published = [min(1.0, (step + 1) / 4, (18 - step) / 14) * 3e-4 for step in range(18)]  # of the results
    assert [warmup_linear(step, Config(lr=3e-4, steps=18)) for step in range(18)] == published


def test_a_warmup_in_steps_is_refused(play):
    with pytest.raises(ValueError, match="--warmup 3: it is a share of the steps"):
        mgrpo.main(Config(warmup=3))


@pytest.mark.parametrize("Method, G", [(MGRPO, 1), (Priced, 1), (MGRPO, 0)])
def test_a_group_of_one_is_refused(Method, G):
    """It has nobody to compare with: all such runs trained nothing, and said nothing."""
    with pytest.raises(ValueError, match=f"^--G {G}: [^\n]*at least 2") as refused:
        mgrpo.main(Config(G=G, model="/no/such/checkpoint"), Method)
    assert "\n" not in str(refused.value)


def test_without_a_checkpoint_behavior_cloning_runs_first_on_the_same_pages(monkeypatch, tmp_path):
    cloned = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mgrpo.bc, "main", cloned.append)
    assert mgrpo.warm_start(Config(seed=3, viewport_only=True, max_page_chars=99)) == "runs/bc"
    assert (cloned[0].seed, cloned[0].viewport_only, cloned[0].max_page_chars) == (3, True, 99)
    (tmp_path / "runs/bc").mkdir(parents=True)
    (tmp_path / "runs/bc/model.safetensors").touch()
    assert mgrpo.warm_start(Config()) == "runs/bc"
    assert mgrpo.warm_start(Config(model="x")) == "x" and len(cloned) == 1
