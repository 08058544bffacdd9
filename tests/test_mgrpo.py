"""The algorithm against slow, obvious versions written from the paper's equation."""
import asyncio
import contextlib
import copy
import json
import statistics
import threading
from dataclasses import replace

import pytest
import torch
from conftest import pad, tiny_model

import evaluate
import mgrpo
import rollout
from compress import Chat, Trajectory, Turn, context, rows
from flat_sequence import compare
from mgrpo import (Config, group_advantages, learning_rate, mgrpo_loss, rollout_metrics, task_batch, train,
                   update, weigh)
from model import generate, load, load_tokenizer, token_logprobs
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
        observation_ids = chat.observation(tau.task, k, f"<a>lamp {k}</a>")
        tau.turns.append(Turn("", f"page {k}", observation_ids, ids, logps, ""))
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


def obvious_turn_advantage(group, tau, t, gamma):
    """GiGPO's A of one turn, by its definition, in plain numbers."""
    earned = lambda tau, t: tau.reward * gamma ** (len(tau.turns) - 1 - t)
    same = [earned(other, k) for other in group for k, turn in enumerate(other.turns)
            if turn.observation == tau.turns[t].observation]
    if len(set(same)) < 2:
        return 0.0
    return (earned(tau, t) - statistics.mean(same)) / statistics.stdev(same)


def test_turns_on_the_same_page_compare_what_they_earned_in_the_end(chat):
    """Against the definition: pages that several episodes share, that one visits again, and its own."""
    pages = [["home", "shop", "cart"], ["home", "shop", "shop", "shop", "cart"],
             ["home", "forum"], ["home", "lost"]]
    group = []
    for i, (visited, reward) in enumerate(zip(pages, (1.0, 1.0, 0.0, 0.0))):
        tau = trajectory(chat, reward, [3] * len(visited), seed=i, member=i)
        for turn, page in zip(tau.turns, visited):
            turn.observation = page
        group.append(tau)
    for weight in (0.0, 0.5):
        plain = group_advantages(copy.deepcopy(group))
        kept = group_advantages(copy.deepcopy(group), weight)
        for tau, alone in zip(kept, plain):
            assert tau.advantage == alone.advantage
            for t, (turn, row) in enumerate(zip(tau.turns, rows(chat, tau))):
                extra = weight * obvious_turn_advantage(kept, tau, t, 0.95)
                assert turn.advantage == pytest.approx(extra, abs=1e-12)
                assert row.advantage == pytest.approx(tau.advantage + extra, abs=1e-12)
    stay, leave = (kept[1].turns[t].advantage for t in (1, 3))
    assert stay < 0 < leave  # of the one episode, both on the shop's page: only the last click helped
    assert kept[2].turns[1].advantage == kept[3].turns[1].advantage == 0  # nobody else saw these pages


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
    metrics = update(model, reference, optimizer, weigh(kept, chat, cfg), cfg, "cpu")
    return grads, metrics


def obvious_gradient(chat, kept, model, reference=None, beta=0.0):
    """Autograd through the printed formula, each response alone under its own context."""
    loss = 0
    for group in kept:
        logp, old, ref = [], [], []
        for tau in group:
            logp.append([token_logprobs(model, *pad([row]))[0] for row in rows(chat, tau)])
            old.append([torch.tensor(turn.logps) for turn in tau.turns])
            ref.append([token_logprobs(reference or model, *pad([row]))[0].detach()
                        for row in rows(chat, tau)])
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
        for turn, row in zip(tau.turns, rows(chat, tau)):
            turn.logps = token_logprobs(model, *pad([row]))[0].tolist()
    cfg = Config(loss_norm="paper", clip=1e9, temperature=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first, second, _ = (update(model, None, optimizer, weigh(kept, chat, cfg), cfg, "cpu") for _ in range(3))
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
        for turn, row in zip(tau.turns, rows(chat, tau)):
            turn.logps = token_logprobs(model, *pad([row]))[0].tolist()
    return kept


def mean_change(chat, model, kept):
    """Mean and largest |log rho|, one response at a time."""
    pairs = [(row, turn.logps) for group in kept for tau in group
             for turn, row in zip(tau.turns, rows(chat, tau))]
    changes = [abs(now - then) for row, logps in pairs
               for now, then in zip(token_logprobs(model, *pad([row]))[0].tolist(), logps)]
    return statistics.mean(changes), max(changes)


@pytest.mark.parametrize("lr", [1e-5, 3e-3])
def test_a_batch_changes_the_policy_by_no_more_than_it_may(chat, lr):
    """Adam's first steps move every weight by lr, whatever the gradient; here 3e-3 is a leap."""
    cfg = Config(temperature=1.0, max_tokens=700, max_change=0.01)
    free, kept_in = (tiny_model(vocab_size=chat.tokenizer.get_vocab_size()) for _ in range(2))
    kept = sampled_groups(chat, free)
    start = {name: weight.clone() for name, weight in free.state_dict().items()}
    optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    without = train(free, None, optimizer(free), kept, chat, replace(cfg, max_change=0.0), "cpu")
    metrics = train(kept_in, None, optimizer(kept_in), kept, chat, cfg, "cpu")
    mean, largest = mean_change(chat, free, kept)  # what the updates did before they were shortened
    assert metrics["change"][-1] == pytest.approx(mean, rel=1e-3)
    assert metrics["largest_change"][-1] == pytest.approx(largest, rel=1e-3)
    assert len(metrics["change"]) == 3 and without["change"] == metrics["change"][:2]
    assert without["share"] == 1
    share = metrics["share"]
    assert share == pytest.approx(min(1, 0.01 / mean), rel=1e-3) and (share < 0.5) == (lr > 1e-3)
    assert mean_change(chat, kept_in, kept)[0] < 0.015 < 2 * mean or share == 1  # log rho is not quite linear
    for name, weight in kept_in.state_dict().items():
        torch.testing.assert_close(weight, start[name].lerp(free.state_dict()[name], share))
    assert all(weight.grad is None for weight in kept_in.parameters())


def test_one_flat_sequence_is_not_what_was_sampled(chat):
    """tests/flat_sequence.py on a random model: only trunk and leaves reproduce the rollout's log-probs."""
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
    async def rollout(model, chat_, tasks, score, cfg, *, group, seed, temperature, enter, log=None):
        assert temperature == cfg.temperature  # and there is no top_p in training
        reward = lambda task, i: float(i == 0 or task["task_id"] % 2)
        return [trajectory(chat, reward(task, i), [2 + i], seed=task["task_id"], member=i)
                for task in tasks for i in range(group)]
    return rollout


TASKS = [{"task_id": i} for i in range(10)]


@pytest.fixture
def play(chat, checkpoint, monkeypatch, tmp_path):
    """play(rollout, out, **changes): the script's own loop without a browser; the lines of metrics.jsonl."""
    monkeypatch.setattr(mgrpo, "open_sites", lambda spec: contextlib.nullcontext({}))
    monkeypatch.setattr(mgrpo, "load_tasks", lambda spec, sites, **more: TASKS)
    monkeypatch.setattr(mgrpo, "report", lambda out: None)

    def run(rollout, out, **changes):
        monkeypatch.setattr(mgrpo, "rollout", rollout)
        monkeypatch.setattr(evaluate, "rollout", rollout)
        cfg = Config(**dict(model=str(checkpoint), out=str(tmp_path / out), steps=6, batch=6, G=2, lr=1e-2,
                            warmup=0.5, save_every=2) | changes)
        try:
            mgrpo.main(cfg)
        except KeyboardInterrupt:  # caught here, where its frames end: they hold the directory's lock
            pass
        finally:
            text = (tmp_path / out / "metrics.jsonl").read_text()
            run.lines = [json.loads(line) for line in text.splitlines()]
        return run.lines
    return run


def test_beta_0_loads_no_reference_model_and_kl_starts_at_0(chat, play, monkeypatch):
    loaded = []
    monkeypatch.setattr(mgrpo, "load", lambda *a, **k: loaded.append(a) or load(*a, **k))
    for beta, lora, models in ((0.0, 0, 1), (0.1, 0, 2), (0.1, 4, 1)):  # LoRA's is the policy itself
        loaded.clear()
        first, second = play(even_tasks_teach(chat), f"{beta}-{lora}", steps=2, beta=beta, lora=lora,
                             updates_per_batch=1)
        assert len(loaded) == models and first["groups_kept"] > 0 and first["kl"] == 0
        assert second["kl"] > 0 if beta else second["kl"] == 0


def test_a_loss_or_gradient_that_is_not_finite_makes_no_step(chat):
    kept = [group_advantages(group) for group in make_groups(chat)]
    spoiled = copy.deepcopy(kept)
    spoiled[1][2].turns[0].logps[0] = float("nan")
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    before = copy.deepcopy(model.state_dict())
    same = lambda: all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert update(model, None, optimizer, weigh(spoiled, chat, Config()), Config(max_tokens=1), "cpu")["skipped"] == 1
    assert same() and not optimizer.state and all(p.grad is None for p in model.parameters())
    overflow = model.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    sound = weigh(kept, chat, Config())
    assert update(model, None, optimizer, sound, Config(), "cpu")["skipped"] == 1 and same()
    overflow.remove()
    assert update(model, None, optimizer, sound, Config(), "cpu")["skipped"] == 0 and not same()


def test_a_response_without_its_log_probs_is_an_error_and_not_taken_for_on_policy(chat):
    """Were they filled in, the gap between rollout and training would read 0."""
    kept = [group_advantages(group) for group in make_groups(chat)]
    kept[1][2].turns[0].logps = []
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    with pytest.raises(RuntimeError):
        update(model, None, None, weigh(kept, chat, Config()), Config(), "cpu")


def test_a_skipped_update_is_reported_whichever_pass_it_was(chat, play, monkeypatch, capsys):
    """It once was reported of a batch's last pass alone."""
    calls = []

    def counted(*args):
        calls.extend([0] * bool(args[2]))  # without an optimizer it only measures
        return update(*args) | {"skipped": int(len(calls) in (2, 7, 8, 9) and bool(args[2]))}
    monkeypatch.setattr(mgrpo, "update", counted)
    assert [line["skipped"] for line in play(even_tasks_teach(chat), "x")] == [1, 0, 3, 0, 0, 0]
    out = capsys.readouterr().out
    assert out.count("! no update") == 2 and out.count("  updates (100%)\n") == 6


def test_a_step_that_the_bound_held_back_says_so(chat, play, capsys):
    assert play(even_tasks_teach(chat), "x", steps=1, max_change=1e-6)[0]["share"] < 1
    assert "! --max-change 1e-06: the weights moved 0% of the way" in capsys.readouterr().out


def test_three_steps_without_a_finite_loss_end_the_run(chat, play):
    async def spoiled(*args, **kwargs):
        trajectories = await even_tasks_teach(chat)(*args, **kwargs)
        for tau in trajectories:
            tau.turns[0].logps[0] = float("nan")
        return trajectories
    with pytest.raises(ValueError, match="three steps in a row"):
        play(spoiled, "x", save_every=1)
    found = [(line["step"], line["loss"], line["skipped"]) for line in play.lines]
    assert found == [(0, None, 3), (1, None, 3), (2, None, 3)]


@pytest.mark.parametrize("off, warns", [(0.0, False), (5e-4, False), (2e-3, True)])
def test_a_gap_between_rollout_and_training_is_reported(chat, play, capsys, off, warns):
    async def measured(model, *args, **kwargs):
        trajectories = await even_tasks_teach(chat)(model, *args, **kwargs)
        for tau in trajectories:
            for turn, row in zip(tau.turns, rows(chat, tau)):
                turn.logps = (token_logprobs(model, *pad([row]), temperature=0.7)[0] + off).tolist()
        return trajectories
    line, = play(measured, "x", steps=1)
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


def test_checkpoints_that_stay_and_the_best_one_held_out(chat, play, tmp_path):
    """Of ten held-out tasks 3, 7, 5 and 5 succeed, after steps 2, 4, 6 and 7: step 4 is the best."""
    def rollout_of(*successes):
        successes = iter(successes)

        async def rollout(model, chat_, tasks, score, cfg, **kwargs):
            if kwargs["temperature"] > 0:
                return await even_tasks_teach(chat)(model, chat_, tasks, score, cfg, **kwargs)
            n = next(successes)
            return [trajectory(chat, float(i < n), [1]) for i in range(len(tasks))]
        return rollout

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


def test_a_rollout_that_is_cancelled_lets_its_forward_pass_end_first(chat, monkeypatch):
    """The weights are resharded next: a pass that still runs would read freed memory."""
    began, end, ended = threading.Event(), threading.Event(), []

    class Slow(Engine):
        def prefill(self, request):
            began.set()
            end.wait()
            ended.append(True)

    async def plays(tasks, act, *_):
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
    metrics = rollout_metrics([tau, broken], [])
    assert (metrics["invalid_actions"], metrics["failed_actions"], metrics["env_errors"]) == (1, 1, 1)


def test_no_group_left_means_no_step(chat):
    grads, metrics = gradient_of(chat, [], Config())
    assert grads == {} and metrics["grad_norm"] == 0


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
        return evaluate.parse_args(Config, mgrpo.__doc__, {"paper": mgrpo.PAPER}, "")
    return parse


def test_the_command_line_overrides_the_papers_preset(parse):
    cfg = parse("--paper", "--lr", "3e-6", "--no-recompute")
    assert (cfg.lr, cfg.recompute, cfg.beta, cfg.eps) == (3e-6, False, 0.001, 0.2)
    assert (cfg.G, cfg.batch, cfg.max_context) == (4, 16, 16384)
    assert (cfg.max_change, cfg.turn_credit) == (0, 0)  # not in the paper
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
    rates = [learning_rate(step, Config(lr=1.0, steps=7, warmup=0.4)) for step in range(8)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 3 / 4, 2 / 4, 1 / 4, 0])
    constant = Config(lr=2.0, steps=3, warmup=0.0, decay=False)
    assert [learning_rate(step, constant) for step in range(5)] == [2.0] * 5
    published = [min(1.0, (step + 1) / 4, (18 - step) / 14) * 3e-4 for step in range(18)]  # of the results
    assert [learning_rate(step, Config(lr=3e-4)) for step in range(18)] == published


def test_a_warmup_in_steps_is_refused(play):
    with pytest.raises(ValueError, match="--warmup 3: it is a share of the steps"):
        mgrpo.main(Config(warmup=3))


def test_without_a_checkpoint_behavior_cloning_runs_first_on_the_same_pages(monkeypatch, tmp_path):
    cloned = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mgrpo.bc, "main", cloned.append)
    assert mgrpo.warm_start(Config(seed=3, viewport_only=True, max_page_chars=99), print) == "runs/bc"
    assert (cloned[0].seed, cloned[0].viewport_only, cloned[0].max_page_chars) == (3, True, 99)
    (tmp_path / "runs/bc").mkdir(parents=True)
    (tmp_path / "runs/bc/model.safetensors").touch()
    assert mgrpo.warm_start(Config(), print) == "runs/bc"
    assert mgrpo.warm_start(Config(model="x"), print) == "x" and len(cloned) == 1
