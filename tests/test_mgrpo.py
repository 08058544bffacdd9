"""The algorithm against slow, obvious versions written from the paper's equation."""
import asyncio
import contextlib
import copy
import itertools
import json
import os
import shutil
import statistics
import threading
from pathlib import Path

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
from compress import Trajectory, Turn, context, pack, trajectory_rows
from mgrpo import (MGRPO, Config, group_advantages, mgrpo_loss, task_batch,
                   update_metrics, warmup_linear, weighted_rows)
from model import generate, load, load_tokenizer, save, token_logprobs
from rollout import Engine, Settings


def trajectory(chat, reward, lengths, seed=0, status="ok", member=0):
    """An episode with one response of each of the given lengths, plausible sampling log-probs included."""
    g = torch.Generator().manual_seed(seed)
    task = {"intent": "do it", "task_id": 0, "sites": ["x"]}
    tau = Trajectory(task, member, success=reward, reward=reward, status=status)
    for k, n in enumerate(lengths):
        ids = torch.randint(3, 300, (n,), generator=g)
        logps = -4 - torch.rand(n, generator=g)
        message_ids = chat.user_ids(task, k, f"<a>lamp <{k}></a>")
        turn = Turn(
            url="",
            observation=f"page {k}",
            message_ids=message_ids,
            response_ids=ids.tolist(),
            logps=logps.tolist(),
            response="",
        )
        tau.turns.append(turn)
    return tau


def logprobs(model, row, temperature=1.0):
    """Log-probs of a row's action tokens, the row alone."""
    tokens_BT, action_BT = pad([row])
    logp_N, _, _ = token_logprobs(model, tokens_BT, action_BT, temperature=temperature)
    return logp_N


def method_of(chat, model, cfg, optimizer=None, reference=None, Method=MGRPO):
    Method.check(cfg)
    return Method(cfg, chat, model, reference, optimizer, "cpu")


def random_policy(chat, seed=0):
    """A tiny model for the chat's tokenizer."""
    vocab_size = chat.tokenizer.get_vocab_size()
    return tiny_model(seed=seed, vocab_size=vocab_size)


def same_weights(a, b):
    """Whether two state dicts are equal bit for bit."""
    return all(torch.equal(a[name], b[name]) for name in a)


def config_of(checkpoint):
    text = (checkpoint / "config.json").read_text()
    return json.loads(text)


# --------------------------------------------------------------------------- the loss of given numbers


def equation(logp, logp_old, logp_ref, rewards, eps, beta):
    """M-GRPO as printed, for one group, one token at a time: logp[i][j][t] is a number or a scalar tensor."""
    G = len(rewards)
    mean = sum(rewards) / G
    std = statistics.stdev(rewards)
    total = 0.0
    for i in range(G):
        A = (rewards[i] - mean) / std
        episode = 0.0
        for j in range(len(logp[i])):
            turn = 0.0
            for t in range(len(logp[i][j])):
                new = logp[i][j][t]
                old = logp_old[i][j][t]
                ref = logp_ref[i][j][t]
                rho = (new - old).exp()
                clipped = rho.clamp(1 - eps, 1 + eps)
                surrogate = min(rho * A, clipped * A)
                d = ref - new
                kl = d.exp() - d - 1
                turn = turn + surrogate - beta * kl
            episode = episode + turn / len(logp[i][j])
        total = total + episode / len(logp[i])
    return -total / G


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_loss_and_gradient_are_those_of_the_papers_triple_mean(beta):
    """float64, 1e-10, on a ragged group of 1 to 15 turns. The ratios leave the clip range on both sides."""
    g = torch.Generator().manual_seed(0)
    rewards = [1.0, 0.0, 0.0, 1.0]
    shape = []  # of each episode, the tokens of each turn
    for turns in (1, 2, 15, 7):
        lengths = torch.randint(1, 9, (turns,), generator=g)
        shape.append(lengths.tolist())
    sizes = sum(shape, [])

    def draw():
        return -2 * torch.rand(sum(sizes), generator=g, dtype=torch.float64)

    new = draw()
    old = draw()
    ref = draw()
    new.requires_grad_()

    def nested(flat):
        """One number per token -> [i][j][t], as `equation` takes them."""
        parts = iter(flat.split(sizes))
        episodes = []
        for lengths in shape:
            episodes.append([next(parts).unbind() for _ in lengths])
        return episodes

    # Each token's advantage, and its share of the three means.
    std = statistics.stdev(rewards)
    A = []
    weight = []
    for reward, lengths in zip(rewards, shape):
        for n in lengths:
            A += [(reward - 0.5) / std] * n
            weight += [1 / (4 * len(lengths) * n)] * n

    loss, metrics = mgrpo_loss(
        logp_N=new,
        logp_old_N=old,
        logp_ref_N=ref,
        A_N=torch.tensor(A, dtype=torch.float64),
        weight_N=torch.tensor(weight, dtype=torch.float64),
        eps=0.2,
        beta=beta,
    )
    expected = equation(
        logp=nested(new),
        logp_old=nested(old),
        logp_ref=nested(ref),
        rewards=rewards,
        eps=0.2,
        beta=beta,
    )

    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    [gradient] = torch.autograd.grad(loss, new)
    [expected_gradient] = torch.autograd.grad(expected, new)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-10, rtol=0)
    assert 0 < metrics["clip_frac"] < len(new)


def test_clipping_stops_the_gradient_only_where_it_would_go_too_far():
    logp = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)  # ratios 1.65, 1.65, 0.61, 0.61
    A = torch.tensor([1.0, -1.0, 1.0, -1.0])

    loss, metrics = mgrpo_loss(
        logp_N=logp,
        logp_old_N=torch.zeros(4),
        logp_ref_N=logp.detach(),
        A_N=A,
        weight_N=torch.ones(4),
        eps=0.2,
        beta=0.0,
    )
    loss.backward()

    moved = logp.grad != 0
    assert moved.tolist() == [False, True, True, False]
    assert metrics["clip_frac"] == 2


def kl_at(distance):
    """The KL of one token whose log-prob is that much higher under the reference than under the policy."""
    zero = torch.zeros(1)
    _, metrics = mgrpo_loss(
        logp_N=zero,
        logp_old_N=zero,
        logp_ref_N=zero + distance,
        A_N=zero,
        weight_N=torch.ones(1),
        eps=0.2,
        beta=1.0,
    )
    return metrics["kl"]


def test_kl_is_never_negative_and_zero_at_the_start():
    """Token by token, on both sides of the reference."""
    for distance in (-2.0, -0.1, 0.1, 2.0):
        assert kl_at(distance) > 0
    assert kl_at(0.0) == 0


# ------------------------------------------------------------------------------ advantages and weights


def one_success_of_three(chat, lengths=(3,)):
    """A group. The first episode succeeds, with responses of these lengths."""
    return [
        trajectory(chat, 1.0, lengths),
        trajectory(chat, 0.0, [3]),
        trajectory(chat, 0.0, [3]),
    ]


def advantages_of(group):
    return [tau.advantage for tau in group]


def test_advantages_are_over_trajectories_not_turns(chat):
    group = one_success_of_three(chat)
    longer = one_success_of_three(chat, lengths=[3] * 12)

    trained = group_advantages(group)
    longer_trained = group_advantages(longer)

    assert advantages_of(trained) == advantages_of(longer_trained)
    assert sum(advantages_of(group)) == pytest.approx(0)
    assert statistics.stdev(advantages_of(group)) == pytest.approx(1)


def test_an_episode_that_the_environment_broke_does_not_change_the_group(chat):
    valid = one_success_of_three(chat)
    broken = trajectory(chat, 0.0, [3], status="env_error")

    assert broken not in group_advantages(valid + [broken])

    with_broken = advantages_of(valid)
    group_advantages(valid)
    assert with_broken == advantages_of(valid)


@pytest.mark.parametrize("rewards, statuses", [
    ([1, 1, 1], "ok ok ok"),
    ([0, 0, 0], "ok ok ok"),
    ([1, 0, 0], "ok env_error env_error"),
    ([0.1, 0.1, 0.1], "ok ok ok"),
    ([0.1 + 0.2, 0.3, 0.3], "ok ok ok"),  # they differ in the last bit
])
def test_groups_that_teach_nothing_are_dropped(chat, rewards, statuses):
    group = []
    for reward, status in zip(rewards, statuses.split()):
        group.append(trajectory(chat, float(reward), [3], status=status))
    assert group_advantages(group) == []


def make_groups(chat):
    """Two groups of four episodes with one to three turns; every other episode succeeds."""
    groups = []
    for k in range(2):
        group = []
        for i in range(4):
            turns = 1 + (i + k) % 3
            lengths = [3 + i + k, 2, 5]
            reward = float(i % 2)
            tau = trajectory(chat, reward, lengths[:turns], seed=10 * k + i, member=i)
            group.append(tau)
        groups.append(group)
    return groups


def ragged_groups(chat):
    """Two groups whose episodes have from 1 to 15 turns."""
    def group(k, turns):
        episodes = []
        for i, n in enumerate(turns):
            lengths = [1 + (k * j + i) % 6 for j in range(n)]
            reward = float(i % 2)
            tau = trajectory(chat, reward, lengths, seed=10 * k + i, member=i)
            episodes.append(tau)
        return episodes

    return [group(0, (1, 15, 4)), group(1, (2, 7, 11, 3))]


def with_advantages(groups):
    """The groups with their advantages, as `weighted_rows` takes them."""
    return [group_advantages(group) for group in groups]


def episodes_of(groups):
    return list(itertools.chain(*groups))


def test_weights_are_the_means_of_the_paper_and_of_the_alternatives(chat):
    kept = with_advantages(make_groups(chat))
    tokens = 0
    for tau in episodes_of(kept):
        tokens += sum(len(turn.response_ids) for turn in tau.turns)

    def total(norm):
        rows = weighted_rows(kept, chat, Config(loss_norm=norm))
        return sum(row.weight * row.n_action for row in rows)

    def episode_with(response):
        for tau in episodes_of(kept):
            if any(turn.response_ids == response for turn in tau.turns):
                return tau

    assert total("paper") == pytest.approx(1)
    assert total("token") == pytest.approx(1)
    longest = Config.max_turns * Config.max_new_tokens
    assert total("constant") == pytest.approx(tokens / (2 * 4 * longest))

    for row in weighted_rows(kept, chat, Config(loss_norm="paper")):
        response = row.ids[-row.n_action:]
        tau = episode_with(response)
        assert row.weight == pytest.approx(1 / (2 * 4 * len(tau.turns) * row.n_action))
        assert row.advantage == tau.advantage


# ------------------------------------------------------------------------------------------ the update


def gradient_of(chat, kept, cfg, reference=None, model=None):
    """(gradients by name, metrics) of one update that moves nothing."""
    if model is None:
        model = random_policy(chat)
    grads = {}

    def remember():
        for name, p in model.named_parameters():
            grads[name] = p.grad.clone()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.step = remember
    method = method_of(chat, model, cfg, optimizer, reference)
    metrics = method.update(weighted_rows(kept, chat, cfg))
    return grads, metrics


def obvious_gradient(chat, kept, model, reference=None, beta=0.0):
    """Autograd through the printed formula, each response alone under its own context."""
    if reference is None:
        reference = model
    loss = 0
    for group in kept:
        logp = []
        old = []
        ref = []
        for tau in group:
            rows = trajectory_rows(chat, tau)
            logp.append([logprobs(model, row) for row in rows])
            old.append([torch.tensor(turn.logps) for turn in tau.turns])
            ref.append([logprobs(reference, row).detach() for row in rows])
        rewards = [tau.reward for tau in group]
        loss_of_group = equation(logp, old, ref, rewards, eps=0.2, beta=beta)
        loss = loss + loss_of_group / len(kept)

    model.zero_grad()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return grads, loss.item()


def test_the_update_is_the_gradient_of_the_equation(chat):
    """A whole step, packed, against one response at a time: float32, 1e-5, under any micro-batch budget."""
    kept = with_advantages(ragged_groups(chat))
    model = random_policy(chat)
    reference = random_policy(chat, seed=1)
    expected, loss = obvious_gradient(chat, kept, model, reference, beta=0.1)

    for budget in (1, 200, 700, 10**6):
        cfg = Config(
            loss_norm="paper",
            beta=0.1,
            max_grad_norm=1e9,
            max_tokens=budget,
            temperature=1.0,
        )
        grads, metrics = gradient_of(chat, kept, cfg, reference)
        assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
        for name in expected:
            where = f"{name}, budget {budget}"
            torch.testing.assert_close(grads[name], expected[name], atol=1e-5, rtol=1e-4, msg=where)


def take_logprobs(chat, model, episodes, temperature=1.0, off=0.0):
    """Gives all responses the model's log-probs, as if it had sampled them; `off` is added to each."""
    for tau in episodes:
        rows = trajectory_rows(chat, tau)
        for turn, row in zip(tau.turns, rows):
            logp_N = logprobs(model, row, temperature)
            turn.logps = (logp_N + off).tolist()


def sampled_groups(chat, model):
    """Groups whose log-probs are the model's own."""
    kept = with_advantages(ragged_groups(chat))
    take_logprobs(chat, model, episodes_of(kept))
    return kept


def test_ratio_and_clip_act_from_the_second_update_on(chat):
    """--updates-per-batch: the old log-probs stay those of the rollout while the policy moves."""
    model = random_policy(chat)
    kept = sampled_groups(chat, model)
    cfg = Config(loss_norm="paper", max_grad_norm=1e9, temperature=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    method = method_of(chat, model, cfg, optimizer)

    passes = []
    for _ in range(3):
        passes.append(method.update(weighted_rows(kept, chat, cfg)))

    first, second, _ = passes
    assert first["clip_frac"] == 0
    assert first["logp_gap"] < 1e-5
    assert first["loss"] == pytest.approx(0, abs=1e-5)
    assert second["loss"] < first["loss"]
    assert second["clip_frac"] > 0
    assert second["logp_gap"] > 1e-3

    expected, _ = obvious_gradient(chat, kept, model)
    grads, _ = gradient_of(chat, kept, cfg, model=model)
    for name in expected:
        torch.testing.assert_close(grads[name], expected[name], atol=1e-5, rtol=1e-4)


def test_each_pass_measures_what_the_updates_before_it_have_changed(chat):
    """The mean |log rho|, against one response at a time; the rest is the first pass's or the sum of all."""
    cfg = Config(temperature=1.0, max_tokens=700, beta=0.01)
    model = random_policy(chat)
    kept = sampled_groups(chat, model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, weight_decay=0.0)
    method = method_of(chat, model, cfg, optimizer, reference=random_policy(chat, seed=1))
    rows = weighted_rows(kept, chat, cfg)

    def mean_change():
        changes = []
        for row in rows:
            scored = logprobs(model, row).tolist()
            for now, then in zip(scored, row.logps, strict=True):
                changes.append(abs(now - then))
        return statistics.mean(changes)

    passes = []
    measured = []
    for _ in range(3):
        measured.append(mean_change())
        passes.append(method.update(rows))
    metrics = update_metrics(passes)

    assert metrics["change"] == pytest.approx(measured[1:], rel=1e-3)
    before_second, before_third = metrics["change"]
    assert 0 < before_second < before_third
    assert metrics["logp_gap"] == passes[0]["logp_gap"]
    assert metrics["logp_gap"] == pytest.approx(measured[0], abs=1e-6)
    assert metrics["tokens_packed"] == sum(one["packed_tokens"] for one in passes)
    assert metrics["tokens_packed"] > passes[0]["packed_tokens"]
    for key in ("loss", "entropy", "grad_norm"):
        assert metrics[key] == passes[0][key]
    for key in ("kl", "clip_frac"):
        assert metrics[key] == passes[2][key]
        assert metrics[key] != passes[0][key]
    assert all(weight.grad is None for weight in model.parameters())


def test_the_clip_range_is_that_of_the_flag(chat):
    model = random_policy(chat)
    kept = with_advantages(make_groups(chat))
    take_logprobs(chat, model, episodes_of(kept), off=-0.3)  # every ratio is 1.35
    for eps, clips in ((0.2, True), (0.5, False)):
        _, metrics = gradient_of(chat, kept, Config(eps=eps, temperature=1.0), model=model)
        assert (metrics["clip_frac"] > 0) == clips


def test_kl_entropy_and_clipping_are_means_over_the_action_tokens(chat):
    model = random_policy(chat)
    reference = random_policy(chat, seed=1)
    kept = with_advantages(make_groups(chat))
    take_logprobs(chat, model, episodes_of(kept), off=-0.3)  # every ratio is 1.35: those with A > 0 are clipped
    cfg = Config(beta=0.1, temperature=1.0, max_tokens=200)
    rows = weighted_rows(kept, chat, cfg)
    kls = []
    entropies = []
    clipped = []
    for row in rows:
        tokens_BT = torch.tensor([row.ids])
        action_BT = torch.arange(len(row.ids))[None] >= row.n_context
        logp_N, entropy_N, _ = token_logprobs(model, tokens_BT, action_BT)
        delta_N = logprobs(reference, row) - logp_N
        kls += (delta_N.exp() - delta_N - 1).tolist()
        entropies += entropy_N.tolist()
        clipped += [row.advantage > 0] * row.n_action

    _, metrics = gradient_of(chat, kept, cfg, reference, model)

    assert metrics["kl"] == pytest.approx(statistics.mean(kls), rel=1e-4)
    assert metrics["entropy"] == pytest.approx(statistics.mean(entropies), rel=1e-4)
    assert metrics["clip_frac"] == pytest.approx(statistics.mean(clipped))


def test_tokens_packed_counts_contexts_as_well(chat):
    kept = with_advantages(make_groups(chat))
    cfg = Config(temperature=1.0, max_tokens=10**6)
    _, metrics = gradient_of(chat, kept, cfg)
    packed = pack(sorted(weighted_rows(kept, chat, cfg), key=lambda row: row.ids))
    assert metrics["packed_tokens"] == packed["tokens_BT"].numel()


def test_one_flat_sequence_is_not_what_was_sampled(chat):
    """tests/tools/flat_sequence.py on a random model: only rows in their own contexts have the rollout's log-probs."""
    model = random_policy(chat)
    episodes = [trajectory(chat, 0.0, [4, 6, 5], seed=seed) for seed in range(3)]
    for tau in episodes:
        for t, turn in enumerate(tau.turns):
            ids = context(chat, tau, t)
            turn.response_ids, turn.logps = generate(model, ids, 8, temperature=1.0, seed=t)

    result = compare(model, chat, episodes)

    ours = result["ours"]
    flat = result["flat"]
    assert ours["mean"] < 1e-5
    assert flat["mean"] > 0.1
    assert result["masked"]["mean"] > 0.1
    assert ours["outside_clip"] == 0
    assert flat["outside_clip"] > 0


def test_training_uses_the_sampling_temperature(chat):
    kept = with_advantages(make_groups(chat))
    model = random_policy(chat)
    take_logprobs(chat, model, episodes_of(kept), temperature=0.7)

    _, same = gradient_of(chat, kept, Config(temperature=0.7))
    _, other = gradient_of(chat, kept, Config(temperature=1.0))

    assert same["logp_gap"] < 1e-5
    assert other["logp_gap"] > 1e-2


def test_a_group_without_variance_pulls_nowhere_not_even_to_the_reference(chat):
    groups = make_groups(chat)
    even = [trajectory(chat, 1.0, [3, 2], seed=50 + i) for i in range(4)]
    reference = random_policy(chat, seed=1)
    cfg = Config(loss_norm="paper", beta=0.5, max_grad_norm=1e9, temperature=1.0)

    def gradient(collected):
        kept = [group for group in with_advantages(collected) if group]
        grads, _ = gradient_of(chat, kept, cfg, reference)
        return grads

    without_even = gradient(groups)
    with_even = gradient([*groups, even])

    for name in without_even:
        assert torch.equal(without_even[name], with_even[name])


# --------------------------------------------------------------------- the script, but for the browser


def even_tasks_teach(chat):
    """A stand-in for rollout: tasks of an even number earn mixed rewards."""
    async def rollout(model, chat_, tasks, *, env, settings, group_size, seed, temperature, **_):
        assert temperature == settings.temperature  # and there is no top_p in training
        played = []
        for task in tasks:
            odd = task["task_id"] % 2
            for i in range(group_size):
                reward = float(i == 0 or odd)
                tau = trajectory(chat, reward, [2 + i], seed=task["task_id"], member=i)
                played.append(tau)
        return played

    return rollout


TASKS = [{"task_id": i, "intent": f"task {i}"} for i in range(10)]


def without_browser(monkeypatch):
    """What mgrpo.main opens besides the model, replaced. The report is an empty file."""
    def open_sites(*specs):
        return contextlib.nullcontext({})

    def load_tasks(spec, sites, **more):
        return TASKS

    def report(out):
        (out / "report.html").touch()

    monkeypatch.setattr(worlds, "open_sites", open_sites)
    monkeypatch.setattr(worlds, "load_tasks", load_tasks)
    monkeypatch.setattr(worlds, "check_files", runs.ignore)
    monkeypatch.setattr(runs, "report", report)


@pytest.fixture
def play(checkpoint, monkeypatch, tmp_path):
    """play(rollout, out, **changes): mgrpo.main without a browser; the lines of metrics.jsonl."""
    without_browser(monkeypatch)

    def play(rollout, out, Method=MGRPO, **changes):
        monkeypatch.setattr(mgrpo, "rollout", rollout)
        monkeypatch.setattr(evaluate, "rollout", rollout)
        settings = dict(
            model=str(checkpoint),
            out=str(tmp_path / out),
            steps=6,
            batch=6,
            G=2,
            lr=1e-2,
            warmup=0.5,
            save_every=2,
        )
        settings.update(changes)
        try:
            mgrpo.main(Config(**settings), Method)
        except KeyboardInterrupt:  # caught here, where its frames end: they hold the directory's lock
            pass
        finally:
            metrics = tmp_path / out / "metrics.jsonl"
            text = ""
            if metrics.exists():
                text = metrics.read_text()
            play.lines = [json.loads(line) for line in text.splitlines()]
        return play.lines

    return play


def test_beta_0_loads_no_reference_model_and_kl_starts_at_0(chat, play, monkeypatch, tmp_path):
    loaded = []
    load_for_training = mgrpo.load_for_training

    def counted(*args, **more):
        loaded.append(args)
        return load_for_training(*args, **more)

    monkeypatch.setattr(bc, "load_for_training", counted)
    monkeypatch.setattr(mgrpo, "load_for_training", counted)

    def two_steps(out, **changes):
        loaded.clear()
        return play(even_tasks_teach(chat), out, steps=2, updates_per_batch=1, **changes)

    first, second = two_steps("no-reference", beta=0.0, lora=0)
    assert len(loaded) == 1
    assert first["groups_kept"] > 0
    assert first["kl"] == 0
    assert second["kl"] == 0

    first, second = two_steps("reference", beta=0.1, lora=0)
    assert len(loaded) == 2
    assert first["groups_kept"] > 0
    assert first["kl"] == 0
    assert second["kl"] > 0

    first, second = two_steps("lora", beta=0.1, lora=4)
    assert len(loaded) == 1  # LoRA's reference is the policy itself
    assert first["groups_kept"] > 0
    assert first["kl"] == 0
    assert second["kl"] > 0

    # What goes on from a LoRA checkpoint begins with its policy, which is then the reference.
    first, second = two_steps("next", model=str(tmp_path / "lora"), beta=0.1, lora=4)
    assert len(loaded) == 1
    assert first["kl"] == 0
    assert second["kl"] > 0


def test_a_loss_or_gradient_that_is_not_finite_makes_no_step(chat):
    kept = with_advantages(make_groups(chat))
    spoiled = copy.deepcopy(kept)
    spoiled[1][2].turns[0].logps[0] = float("nan")
    model = random_policy(chat)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    before = copy.deepcopy(model.state_dict())

    def unchanged():
        return same_weights(before, model.state_dict())

    # 1) The loss is NaN.
    one_by_one = method_of(chat, model, Config(max_tokens=1), optimizer)
    metrics = one_by_one.update(weighted_rows(spoiled, chat, Config()))
    assert metrics["skipped"] == 1
    assert unchanged()
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())

    # 2) The loss is finite, a gradient is not.
    def overflows(gradient):
        return gradient * float("inf")

    hook = model.model.norm.weight.register_hook(overflows)
    sound = weighted_rows(kept, chat, Config())
    method = method_of(chat, model, Config(), optimizer)
    metrics = method.update(sound)
    assert metrics["skipped"] == 1
    assert unchanged()

    # 3) Both are finite.
    hook.remove()
    metrics = method.update(sound)
    assert metrics["skipped"] == 0
    assert not unchanged()


def test_a_response_without_its_log_probs_is_an_error_and_not_taken_for_on_policy(chat):
    """Were they filled in, the gap between rollout and training would read 0."""
    kept = with_advantages(make_groups(chat))
    kept[1][2].turns[0].logps = []
    model = random_policy(chat)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(RuntimeError):
        method_of(chat, model, Config(), optimizer).update(weighted_rows(kept, chat, Config()))


def test_a_skipped_update_is_reported_whichever_pass_it_was(chat, play, capsys):
    """It once was reported of a batch's last pass alone."""
    bad = {2, 7, 8, 9}
    calls = []

    def spoil(gradient):
        return gradient * float("nan")

    class Counted(MGRPO):
        def update(self, rows):
            calls.append(0)
            if len(calls) not in bad:
                return super().update(rows)
            hook = self.model.model.norm.weight.register_hook(spoil)
            metrics = super().update(rows)
            hook.remove()
            return metrics

    lines = play(even_tasks_teach(chat), "x", Counted)

    assert [line["skipped"] for line in lines] == [1, 0, 3, 0, 0, 0]
    out = capsys.readouterr().out
    assert out.count("! no update") == 4
    assert out.count("  updates 3/3\n") == 6
    assert len(calls) == 18


def test_every_update_is_made_at_the_learning_rate_of_its_step(chat, play):
    """Without it Adam goes on at its own 1e-3, whatever --lr, --warmup and --decay say."""
    rates = []

    class Looking(MGRPO):
        def update(self, rows):
            rates.append(self.optimizer.param_groups[0]["lr"])
            return super().update(rows)

    play(even_tasks_teach(chat), "x", Looking, steps=3, updates_per_batch=1, lr=0.03, warmup=0.0)
    assert rates == pytest.approx([0.03, 0.02, 0.01])


def test_without_lr_a_small_model_gets_its_own(chat, play, tmp_path):
    play(even_tasks_teach(chat), "x", steps=1, updates_per_batch=1, lr=None)
    assert config_of(tmp_path / "x")["run"]["lr"] == 3e-4


@pytest.mark.parametrize("optimizer_of", [mgrpo.adamw, lambda model: bc.adamw(model, 1e-2)])
def test_weights_without_a_gradient_stay(optimizer_of):
    """torch's AdamW decays weights unless it is told not to."""
    model = tiny_model()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer_of(model).step()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_steps_without_a_finite_loss_change_nothing_and_are_on_record(chat, play, checkpoint, tmp_path):
    teach = even_tasks_teach(chat)

    async def spoiled(*args, **kwargs):
        trajectories = await teach(*args, **kwargs)
        for tau in trajectories:
            tau.turns[0].logps[0] = float("nan")
        return trajectories

    lines = play(spoiled, "x", steps=3)

    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["loss"] for line in lines] == [None] * 3
    assert [line["skipped"] for line in lines] == [3] * 3
    before = load(checkpoint).state_dict()
    after = load(tmp_path / "x").state_dict()
    assert same_weights(before, after)


@pytest.mark.parametrize("off, precision, warns", [
    (0.0, None, False),
    (5e-4, None, False),
    (2e-3, None, True),
    (2e-3, "bfloat16", False),
    (0.2, "bfloat16", True),
])
def test_a_gap_between_rollout_and_training_is_reported(chat, play, capsys, monkeypatch, off, precision, warns):
    def init_dist(precision):
        return torch.device("cpu")  # no group: float32 all the same

    monkeypatch.setattr(mgrpo.run, "init_dist", init_dist)
    teach = even_tasks_teach(chat)

    async def measured(model, *args, **kwargs):
        trajectories = await teach(model, *args, **kwargs)
        take_logprobs(chat, model, trajectories, temperature=0.7, off=off)
        return trajectories

    [line] = play(measured, "x", steps=1, precision=precision)

    assert line["logp_gap"] == pytest.approx(off, abs=1e-5)
    assert line["groups_kept"]
    warned = "logp_gap is far above rounding" in capsys.readouterr().out
    assert warned == warns


def timeless(lines):
    """Lines of metrics.jsonl without what a clock has measured."""
    found = []
    for line in lines:
        kept = {key: value for key, value in line.items() if "second" not in key}
        found.append(kept)
    return found


def test_an_interrupted_run_continues_as_if_nothing_had_happened(chat, play, tmp_path):
    """Bit for bit, from the last saved step on."""
    teach = even_tasks_teach(chat)

    async def interrupted(*args, seed, **kwargs):
        if seed == "0/3":
            raise KeyboardInterrupt
        return await teach(*args, seed=seed, **kwargs)

    whole = play(teach, "whole")
    assert len(play(interrupted, "parts")) == 3
    parts = play(teach, "parts")

    assert timeless(parts) == timeless(whole)
    assert all(line["groups_kept"] for line in whole)
    a = load(tmp_path / "whole").state_dict()
    b = load(tmp_path / "parts").state_dict()
    assert same_weights(a, b)


def test_an_episode_is_on_record_with_the_step_that_played_it(chat, play, tmp_path):
    play(even_tasks_teach(chat), "x", steps=2, updates_per_batch=1)
    lines = (tmp_path / "x/trajectories.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [0] * 12 + [1] * 12


def test_sites_are_reset_before_every_batch_that_is_played(chat, play, monkeypatch):
    """--reset-url and --screenshots hang on it."""
    begun = []
    begin_batch = evaluate.Environment.begin_batch

    def look(env, tasks, group_size=1, name=""):
        begun.append((len(tasks), group_size, name))
        begin_batch(env, tasks, group_size, name)

    monkeypatch.setattr(evaluate.Environment, "begin_batch", look)
    play(held_out_successes(chat, 5), "x", steps=1, held_out="theirs", seed=3)
    assert begun == [(6, 2, "3/0"), (10, 1, "")]


def test_another_seed_samples_other_episodes(chat, play):
    """Else the seeds of an experiment would differ in the order of the tasks alone."""
    teach = even_tasks_teach(chat)
    sampled_with = []

    async def look(*given, seed, **more):
        sampled_with.append(seed)
        return await teach(*given, seed=seed, **more)

    play(look, "x", steps=2, updates_per_batch=1)
    play(look, "y", steps=2, updates_per_batch=1, seed=1)
    assert len(set(sampled_with)) == 4


def held_out_successes(chat, *successes):
    """A stand-in for rollout: `even_tasks_teach`, and so many of ten held-out tasks in each evaluation.

    None: the sites are down, and no episode is judged.
    """
    teach = even_tasks_teach(chat)
    successes = iter(successes)

    async def rollout(model, chat_, tasks, **kwargs):
        if kwargs["temperature"] > 0:
            return await teach(model, chat_, tasks, **kwargs)
        n = next(successes)
        episodes = [trajectory(chat, float(i < (n or 0)), [1]) for i in range(len(tasks))]
        if n is None:
            for tau in episodes:
                tau.status = "env_error"
        return episodes

    return rollout


def test_checkpoints_that_stay_and_the_best_one_held_out(chat, play, tmp_path):
    """Of ten held-out tasks 3, 7, 5 and 5 succeed, after steps 2, 4, 6 and 7: step 4 is the best."""
    out = tmp_path / "x"

    def same(a, b):
        weights_a = load(out / a).state_dict()
        weights_b = load(out / b).state_dict()
        return same_weights(weights_a, weights_b)

    lines = play(
        held_out_successes(chat, 3, 7, 5, 5),
        "x",
        steps=7,
        keep_every=4,
        held_out="theirs",
        held_out_every=2,
        save_every=1,
    )

    found = [line.get("held_out_success") for line in lines]
    assert found == [None, 0.3, None, 0.7, None, 0.5, 0.5]
    folders = [path.name for path in out.iterdir() if path.is_dir()]
    assert sorted(folders) == ["best", "state", "step-00004"]
    assert same("best", "step-00004")
    assert not same("best", ".")
    best = config_of(out / "best")["run"]
    assert best["step"] == 4
    assert best["held_out_success"] == 0.7
    assert load_tokenizer(out / "best")

    # A new run forgets the old one's best.
    play(held_out_successes(chat, 1), "x", held_out="theirs", steps=2, resume=False)
    assert same("best", ".")


def test_the_best_checkpoint_is_compared_with_steps_of_the_same_held_out_tasks(chat, play, tmp_path):
    """--held-out may change when a run goes on. 3 of 10 hard tasks once counted as worse than 7 of 10 easy ones."""
    def go_on(steps, held_out, *successes):
        return play(
            held_out_successes(chat, *successes),
            "x",
            steps=steps,
            held_out=held_out,
            held_out_every=1,
            save_every=1,
            decay=False,
            warmup=0.0,
        )

    def best_step():
        return config_of(tmp_path / "x/best")["run"]["step"]

    go_on(2, "easy", 7, 5)
    assert best_step() == 1
    go_on(4, "hard", 3, 2)
    assert best_step() == 3
    go_on(5, "easy", 6)
    assert best_step() == 3
    lines = go_on(6, "easy", 9)
    assert best_step() == 6

    held_out = [line["held_out"] for line in lines]
    assert held_out == ["easy"] * 2 + ["hard"] * 2 + ["easy"] * 2


def test_a_success_rate_of_0_is_the_best_after_one_that_nobody_knows(chat, play, tmp_path):
    lines = play(held_out_successes(chat, None, 0, 0), "x", steps=3, held_out="theirs", held_out_every=1)
    assert [line["held_out_success"] for line in lines] == [None, 0, 0]
    assert config_of(tmp_path / "x/best")["run"]["step"] == 2


def test_a_held_out_test_that_the_site_broke_off_is_not_the_best(chat, play, tmp_path):
    """Of ten episodes one was judged, a success. This 100% became the best, and no later step could beat it."""
    successes = held_out_successes(chat, 1, 6)
    n_tests = 0

    async def rollout(model, chat_, tasks, **kwargs):
        nonlocal n_tests
        episodes = await successes(model, chat_, tasks, **kwargs)
        if kwargs["temperature"] == 0:
            n_tests += 1
            if n_tests == 1:
                for tau in episodes[1:]:
                    tau.status = "env_error"
        return episodes

    lines = play(rollout, "x", steps=2, held_out="theirs", held_out_every=1)
    assert [line["held_out_success"] for line in lines] == [0.1, 0.6]
    assert config_of(tmp_path / "x/best")["run"]["step"] == 2


def test_a_run_that_repeats_steps_keeps_the_best_policy_of_the_first_time(chat, play, tmp_path):
    """Killed after step 3 and its 9 of 10, a run goes on from its save after step 2, and the same steps play otherwise."""
    def go_on(steps, *successes):
        play(
            held_out_successes(chat, *successes),
            "x",
            steps=steps,
            held_out="theirs",
            held_out_every=1,
            save_every=2,
            decay=False,
            warmup=0.0,
        )

    go_on(2, 4, 7)
    state = tmp_path / "x" / "state"
    saved = tmp_path / "saved"
    shutil.copytree(state, saved)
    go_on(3, 9)
    shutil.rmtree(state)
    shutil.copytree(saved, state)

    go_on(4, 6, 8)
    assert config_of(tmp_path / "x/best")["run"]["held_out_success"] == 0.9


def test_a_damaged_best_policy_is_named_before_a_step_is_played(chat, play, tmp_path):
    def go_on(steps, *successes):
        return play(held_out_successes(chat, *successes), "x", steps=steps, held_out="theirs", held_out_every=1,
                    save_every=1, decay=False, warmup=0.0)

    go_on(1, 5)
    config = tmp_path / "x/best/config.json"
    config.write_text("{}")
    with pytest.raises(ValueError, match=f"cannot use {config}: KeyError: 'run'"):
        go_on(2)  # no success is left, so playing would fail otherwise


def test_a_run_that_is_killed_in_its_first_save_goes_on(chat, play, monkeypatch, tmp_path):
    """Its weights were in place, but no state yet, so it was refused like a finished run that has lost its state."""
    report = runs.report

    def killed(path):
        raise KeyboardInterrupt

    def go_on(out):
        return play(even_tasks_teach(chat), out, steps=3, save_every=1)

    monkeypatch.setattr(runs, "report", killed)
    assert len(go_on("x")) == 1
    assert (tmp_path / "x/model.safetensors").exists()
    monkeypatch.setattr(runs, "report", report)

    assert len(go_on("x")) == 3
    go_on("uninterrupted")
    assert same_weights(load(tmp_path / "x").state_dict(), load(tmp_path / "uninterrupted").state_dict())


@pytest.mark.parametrize("lora", [0, 2])
def test_a_run_that_is_killed_while_it_saves_its_best_policy_keeps_the_one_before(lora, chat, play, monkeypatch, tmp_path):
    """config.json moved first: OUT/best held the old weights under the new score, and no resume repaired it."""
    def go_on(*successes):
        return play(held_out_successes(chat, *successes), "x", steps=2, held_out="theirs", held_out_every=1,
                    save_every=1, keep_every=1, lora=lora)

    replace = Path.replace
    n_best = 0

    def killed(path, target):
        nonlocal n_best
        in_best = any(part.startswith("best") for part in path.parts)
        if in_best and path.name == "model.safetensors":
            n_best += 1
            if n_best == 2:
                raise KeyboardInterrupt
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    go_on(5, 7)
    assert config_of(tmp_path / "x/best")["run"]["step"] == 1
    assert same_weights(load(tmp_path / "x/best").state_dict(), load(tmp_path / "x/step-00001").state_dict())

    go_on(7)
    assert config_of(tmp_path / "x/best")["run"]["held_out_success"] == 0.7
    assert same_weights(load(tmp_path / "x/best").state_dict(), load(tmp_path / "x/step-00002").state_dict())
    folders = {path.name for path in (tmp_path / "x").iterdir() if path.is_dir()}
    assert folders - {"adapter"} == {"best", "state", "step-00001", "step-00002"}


def test_a_fork_may_do_more_before_and_after_an_update(chat, play):
    done = []

    class Averaged(MGRPO):
        def update(self, rows):
            done.append(len(rows))
            metrics = super().update(rows)
            done.append(metrics["loss"])
            return metrics

    lines = play(even_tasks_teach(chat), "x", Averaged, steps=1, updates_per_batch=2)
    assert done[1] == lines[0]["loss"]
    assert done[0] == done[2] > 0


@pytest.mark.parametrize("long", [3, 9])
def test_a_task_that_leaves_no_room_for_a_page_is_refused_before_a_step_is_played(long, chat, play, monkeypatch):
    """--tasks holds the first six here, --held-out the others. Its episodes had no turns and counted as failures."""
    tasks = [dict(task) for task in TASKS]
    tasks[long]["intent"] = "lamp " * 2000

    def load_tasks(spec, sites, **more):
        return tasks[6:] if spec == "theirs" else tasks[:6]

    monkeypatch.setattr(worlds, "load_tasks", load_tasks)
    with pytest.raises(ValueError, match=f"the sentence of task {long} is too long"):
        play(None, "x", steps=1, held_out="theirs")


def test_a_report_that_cannot_be_drawn_costs_no_step(chat, play, monkeypatch, tmp_path):
    """It was drawn before the state was saved: each resume trained the same step again, and failed again."""
    report = runs.report

    def failing(out):
        raise ValueError("cannot use trajectories.jsonl")

    play(even_tasks_teach(chat), "x", steps=1, save_every=1, warmup=0.0, decay=False)
    monkeypatch.setattr(runs, "report", failing)
    with pytest.raises(ValueError, match="cannot use trajectories.jsonl"):
        play(even_tasks_teach(chat), "x", steps=3, save_every=1, warmup=0.0, decay=False)
    assert [path.name for path in runs.saved_states(tmp_path / "x/state")] == ["00002"]  # the second step's
    monkeypatch.setattr(runs, "report", report)
    lines = play(even_tasks_teach(chat), "x", steps=3, save_every=1, warmup=0.0, decay=False)
    assert [line["step"] for line in lines] == [0, 1, 2]


def test_a_run_whose_only_save_was_cut_short_is_whole_afterwards(chat, play, monkeypatch, tmp_path):
    """Its policy came before its state, so it was refused, and the remedy in the message would have deleted it."""
    def killed(*given, **more):
        raise KeyboardInterrupt

    save = mgrpo.save
    monkeypatch.setattr(mgrpo, "save", killed)
    play(even_tasks_teach(chat), "x", steps=1)
    assert not (tmp_path / "x/model.safetensors").exists()

    monkeypatch.setattr(mgrpo, "save", save)
    play(None, "x", steps=1)
    assert (tmp_path / "x/report.html").exists()
    play(even_tasks_teach(chat), "uninterrupted", steps=1)
    assert same_weights(load(tmp_path / "x").state_dict(), load(tmp_path / "uninterrupted").state_dict())


def test_a_run_that_is_killed_while_it_swaps_its_best_policy_keeps_the_one_before(chat, play, monkeypatch, tmp_path):
    """The old one had been moved away, and no later step with a lower score brought it back."""
    def go_on(*successes):
        return play(held_out_successes(chat, *successes), "x", steps=2, held_out="theirs", held_out_every=1, save_every=1)

    rename = Path.rename

    def killed(path, target):
        if path.name == "best.new" and (tmp_path / "x/best.old").exists():
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    go_on(5, 7)
    assert not (tmp_path / "x/best").exists()

    monkeypatch.setattr(Path, "rename", rename)
    go_on(4)
    assert config_of(tmp_path / "x/best")["run"]["held_out_success"] == 0.5
    (tmp_path / "x/best.old").mkdir()
    play(held_out_successes(chat, 3), "x", steps=1, resume=False)
    assert not list((tmp_path / "x").glob("best*"))


def test_a_second_process_leaves_a_running_ones_swap_alone(chat, play, monkeypatch, tmp_path):
    """It once moved best.old back before it saw that the directory was in use; then the first process failed."""
    def train(steps):
        return play(held_out_successes(chat, 5), "x", steps=steps, held_out="theirs", held_out_every=1,
                    save_every=1, decay=False, warmup=0.0)

    train(steps=1)
    running = runs.RunDirectory(tmp_path / "x", {})
    running.claim()
    (tmp_path / "x/best").rename(tmp_path / "x/best.old")
    with pytest.raises(ValueError, match="is in use by process"):
        train(steps=2)
    assert (tmp_path / "x/best.old").exists()


def test_a_finished_run_without_its_state_is_not_replaced_without_a_word(chat, play, tmp_path):
    def again(**changes):
        return play(held_out_successes(chat, 5), "x", steps=1, held_out="theirs", **changes)

    again()
    state = tmp_path / "x/state"
    for left in ("an empty state/", "no state/"):
        shutil.rmtree(state)
        if left == "an empty state/":  # as when the disk was full
            (state / "tmp").mkdir(parents=True)
        with pytest.raises(ValueError, match="x holds a trained policy, but no state/ to go on from. Give --no-resume"):
            again()
    assert len(again(resume=False)) == 1


def files(directory):
    """{path: (content, time of the last change)} of all files in a directory."""
    found = {}
    for path in directory.rglob("*"):
        if path.is_file():
            name = str(path.relative_to(directory))
            found[name] = (path.read_bytes(), path.stat().st_mtime_ns)
    return found


def test_a_refused_batch_leaves_an_earlier_run_as_it_was(chat, play, tmp_path):
    """--no-resume once cleared the old run's folder before the tasks were counted."""
    play(even_tasks_teach(chat), "x", steps=1)
    before = files(tmp_path / "x")
    with pytest.raises(ValueError, match="holds only 10 tasks"):
        play(even_tasks_teach(chat), "x", batch=11, resume=False)
    assert files(tmp_path / "x") == before


@pytest.mark.parametrize("save_every", [1, 100])
def test_sites_that_stay_down_stop_the_run(chat, play, save_every):
    """It once trained on nothing, step after step, and called itself finished."""
    teach = even_tasks_teach(chat)
    batches = 0

    async def broken_but_for_the_second_batch(*given, **more):
        nonlocal batches
        played = await teach(*given, **more)
        batches += 1
        if batches != 2:
            for tau in played:
                tau.status = "env_error"
                tau.checks = [["environment", False, "the start page answered 503"]]
        return played

    with pytest.raises(ValueError, match="none of the 12 episodes.*answered 503; open the site in a browser"):
        play(broken_but_for_the_second_batch, "x", save_every=save_every)
    assert batches == 5  # the first step was played twice, the second three times
    assert [line["step"] for line in play.lines] == [0]

    resumed = []

    async def counted(*given, seed, **more):
        resumed.append(seed)
        return await teach(*given, seed=seed, **more)

    lines = play(counted, "x", save_every=save_every)
    assert len(resumed) == 5  # the first of six steps is not lost
    expected = play(teach, "uninterrupted", save_every=save_every)
    for line in [*lines, *expected]:
        for key in ("seconds_rollout", "seconds_train", "tokens_per_second"):
            del line[key]
    assert lines == expected


def test_a_task_that_a_fork_chooses_twice_is_refused(chat, play):
    """Both of its groups would be the same episodes, whose random numbers depend on the task."""
    class Twice(MGRPO):
        def choose_tasks(self, tasks, step):
            return [tasks[3], tasks[3]]

    with pytest.raises(ValueError, match="Twice.choose_tasks chose a task twice"):
        play(even_tasks_teach(chat), "x", Method=Twice)


def test_a_finished_run_says_so_and_touches_nothing_but_its_report(chat, play, tmp_path, monkeypatch, capsys):
    """It once said "saved" and stamped the commit of newer code into the config.json of the old weights."""
    play(even_tasks_teach(chat), "x", steps=2)
    assert "saved" in capsys.readouterr().out
    before = files(tmp_path / "x")
    assert "state/00001/state.json" in before
    describe = runs.describe_run

    def describe_newer(*given):
        return describe(*given) | {"commit": "newer"}

    monkeypatch.setattr(runs, "describe_run", describe_newer)
    monkeypatch.setattr(worlds, "open_sites", None)  # nor does it start the sandbox
    play(None, "x", steps=2)

    said = capsys.readouterr().out
    assert "is finished: all 2 steps are done" in said
    assert "saved" not in said
    assert "--no-resume" in said
    after = files(tmp_path / "x")
    assert after.pop("report.html")  # drawn again: the run may have been killed before its last step was in it
    del before["report.html"]
    assert after == before


@pytest.mark.parametrize("tasks, ends", [("sandbox:train", "x"), ("sandbox:long-train", "--tasks TASKS")])
def test_a_run_ends_with_the_command_that_evaluates_it(chat, play, tmp_path, capsys, tasks, ends):
    play(even_tasks_teach(chat), "x", steps=1, tasks=tasks)
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("saved") and "next: python evaluate.py --model" in last and last.endswith(ends)


def test_a_run_that_starts_over_forgets_everything_that_the_old_one_left(chat, play, tmp_path):
    """best/, summaries, pictures and the report of old weights once stayed, as if they were the new run's."""
    out = tmp_path / "x"
    play(
        held_out_successes(chat, 1, 1),
        "x",
        steps=2,
        keep_every=1,
        held_out="theirs",
        held_out_every=1,
        save_every=1,
    )
    # Evaluations leave these.
    (out / "screenshots").mkdir(exist_ok=True)
    for path in ("screenshots/0.jpeg", "summary.json", "summary-sandbox_test.json"):
        (out / path).write_text("{}")

    def names():
        return {path.name for path in out.iterdir()}

    old_weights = {"best", "step-00001", "step-00002"}
    old = old_weights | {
        "model.safetensors",  # an interrupted run would leave it under the new run's config.json
        "state",
        "screenshots",
        "summary.json",
        "summary-sandbox_test.json",
        "report.html",
        "metrics.jsonl",
        "trajectories.jsonl",
    }
    assert old < names()

    teach = even_tasks_teach(chat)
    left = []

    async def look(*args, **kwargs):
        left.append(names())
        return await teach(*args, **kwargs)

    lines = play(look, "x", steps=1, resume=False)

    assert len(lines) == 1
    assert not left[0] & old
    assert "config.json" in left[0]
    assert not names() & (old_weights | {"summary.json", "screenshots"})


def test_a_run_in_a_relative_directory_is_forgotten_as_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("best", "step-00005", "state/00001", "screenshots", "judge.jsonl"):
        path = tmp_path / "x" / folder
        path.mkdir(parents=True)
        (path / "a").touch()

    runs.RunDirectory("x", {}).clear()

    left = [path.name for path in (tmp_path / "x").iterdir()]
    assert left == ["judge.jsonl"]


def test_a_checkpoint_that_was_rewritten_since_the_start_is_refused_unless_forced(chat, play, checkpoint, tmp_path):
    """It is the KL's reference and WebRL's frozen clone, which both once changed in silence."""
    teach = even_tasks_teach(chat)

    async def interrupted(*args, seed, **kwargs):
        if seed == "0/2":
            raise KeyboardInterrupt
        return await teach(*args, seed=seed, **kwargs)

    start = tmp_path / "start"
    shutil.copytree(checkpoint, start)
    safetensors = start / "model.safetensors"

    def again(rollout, **more):
        return play(rollout, "x", model=str(start), beta=0.1, save_every=1, **more)

    assert len(again(interrupted, steps=3)) == 2

    # 1) Other weights of the same size.
    weights = safetensors.read_bytes()
    save(random_policy(chat, seed=5), start)
    assert len(safetensors.read_bytes()) == len(weights)
    with pytest.raises(ValueError, match=f"other weights, adapters or agent.json in {start}, which have been rewritten or removed.*--force"):
        again(teach, steps=3)

    # 2) The same bytes are the same weights, whatever their date.
    safetensors.write_bytes(weights)
    os.utime(safetensors, (0, 0))
    assert len(again(teach, steps=3)) == 3

    # 3) One bit differs.
    last_byte = bytes([weights[-1] ^ 1])
    safetensors.write_bytes(weights[:-1] + last_byte)
    with pytest.raises(ValueError, match="steps 3, not 4; other weights"):
        again(teach, steps=4)
    assert len(again(teach, steps=4, force=True)) == 4


def test_a_checkpoint_that_was_rewritten_while_the_run_went_on_is_refused_as_well(chat, play, checkpoint, tmp_path):
    """Such a run trained against the old weights until it was interrupted: what counts is what it had opened."""
    teach = even_tasks_teach(chat)
    start = tmp_path / "start"
    shutil.copytree(checkpoint, start)

    async def rewrites(*args, seed, **kwargs):
        if seed == "0/1":
            save(random_policy(chat, seed=5), start)
        if seed == "0/2":
            raise KeyboardInterrupt
        return await teach(*args, seed=seed, **kwargs)

    lines = play(rewrites, "x", model=str(start), beta=0.1, save_every=1)
    assert len(lines) == 2
    with pytest.raises(ValueError, match="other weights, adapters or agent.json in"):
        play(teach, "x", model=str(start), beta=0.1, save_every=1)


def test_config_json_names_the_precision_of_the_weights_next_to_it(chat, play, checkpoint, tmp_path):
    """Float32 weights whose config.json says bfloat16: after a save it said float32, after a new start bfloat16."""
    start = tmp_path / "start"
    shutil.copytree(checkpoint, start)
    config = config_of(start)
    names = [key for key in ("dtype", "torch_dtype") if key in config]

    def precision(path):
        found = config_of(path)
        return {found[key] for key in ("dtype", "torch_dtype") if key in found}

    assert precision(start) == {"float32"}
    config.update(dict.fromkeys(names, "bfloat16"))
    (start / "config.json").write_text(json.dumps(config))

    teach = even_tasks_teach(chat)
    seen = []

    async def look(*args, **kwargs):
        seen.append(precision(tmp_path / "x"))
        return await teach(*args, **kwargs)

    def go_on(steps, resume):
        play(
            look,
            "x",
            model=str(start),
            steps=steps,
            resume=resume,
            save_every=1,
            decay=False,
            warmup=0.0,
        )
        seen.append(precision(tmp_path / "x"))

    go_on(steps=2, resume=True)
    go_on(steps=3, resume=True)  # the third step
    go_on(steps=3, resume=False)

    assert seen == [{"float32"}] * (2 + 1 + 1 + 1 + 3 + 1)
    assert load(tmp_path / "x").model.norm.weight.dtype == torch.float32


# ----------------------------------------------------------------- rewards that are not the success


class Priced(MGRPO):
    """A success is worth 0.4, and every turn costs 0.1."""

    def reward(self, tau):
        return 0.4 * tau.success - 0.1 * len(tau.turns)


def priced(chat):
    """A stand-in for rollout: one to three turns; the first two of a group succeed, of an odd task all."""
    async def rollout(model, chat_, tasks, *, group_size, **_):
        played = []
        for task in tasks:
            for i in range(group_size):
                odd = task["task_id"] % 2
                success = float(i < 2 or odd)
                turns = 1 + (i + task["task_id"]) % 3
                tau = trajectory(chat, success, [2] * turns, seed=i, member=i)
                tau.task = tau.task | task | {"eval": GOOD["eval"]}
                played.append(tau)
        return played

    return rollout


def test_a_reward_that_is_not_the_success_trains_and_statistics_still_count_successes(chat, play, tmp_path):
    """A reward of 0.4 once halved pass@1; a negative one was a "math domain error"."""
    [line] = play(priced(chat), "x", Priced, steps=1, G=4, batch=10, held_out="theirs")

    path = tmp_path / "x/trajectories.jsonl"
    records = [json.loads(text) for text in path.read_text().splitlines()]
    for start in range(0, 40, 4):
        group = records[start:start + 4]
        rewards = [0.4 * record["success"] - 0.1 * len(record["turns"]) for record in group]
        assert [record["reward"] for record in group] == pytest.approx(rewards)

        mean = statistics.mean(rewards)
        std = statistics.stdev(rewards)
        A = [(r - mean) / std for r in rewards]
        assert [record["advantage"] for record in group] == pytest.approx(A)

        successes = [1.0, 1.0, 0.0, 0.0]
        if group[0]["task_id"] % 2:
            successes = [1.0] * 4
        assert [record["success"] for record in group] == successes

    assert line["groups_kept"] == 10
    assert line["success_rate"] == pytest.approx(0.75)
    assert line["held_out_success"] == 1
    assert line["reward"] == pytest.approx(statistics.mean(record["reward"] for record in records))

    kept = bc.read_demonstrations(path, chat)
    assert len(kept) == 30
    assert all(tau.success == 1 for tau in kept)


class LastWord(MGRPO):
    """Reads the last response, which an episode that broke at once does not have."""

    def reward(self, tau):
        return float(len(tau.turns[-1].response) > 0)


def test_only_episodes_that_were_judged_have_a_reward(chat, play):
    async def rollout(model, chat_, tasks, *, group_size, **_):
        played = []
        for task in tasks:
            for i in range(group_size):
                tau = trajectory(chat, 1.0, [2], member=i)
                if i == 0:
                    tau = trajectory(chat, 0.0, [], member=i, status="env_error")
                tau.task = tau.task | task
                played.append(tau)
        return played

    [line] = play(rollout, "x", LastWord, steps=1, G=4, batch=10)
    assert line["env_errors"] == 10


@pytest.mark.parametrize("reward", [
    lambda tau: tau.success,
    lambda tau: 0.4 * tau.success,
    lambda tau: -5.0,
])
def test_figures_do_not_depend_on_the_reward(chat, reward):
    """Two runs of each of five tasks: pass@1, pass@2, success and interval."""
    rollout = priced(chat)
    played = asyncio.run(rollout(None, chat, TASKS[:5], group_size=4))
    for tau in played:
        tau.reward = reward(tau)

    found = evaluate.summarize(played)

    # Three tasks succeed in two of four episodes, two in all. Of the three: the chance that two succeed.
    pairs = itertools.permutations([1.0, 1.0, 0.0, 0.0], 2)
    chance = statistics.mean(max(pair) for pair in pairs)
    assert found["success_rate"] == pytest.approx((3 * 0.5 + 2) / 5)
    pass_at = {int(k): value for k, value in found["pass_at"].items()}
    assert pass_at[1] == pytest.approx(found["success_rate"])
    assert pass_at[2] == pytest.approx((3 * chance + 2) / 5)
    low, high = found["ci95"]
    assert 0 <= low < found["success_rate"] < high <= 1


# ----------------------------------------------------------------------------------- what may go wrong


def test_a_rollout_that_is_cancelled_lets_its_forward_pass_end_first(chat, monkeypatch):
    """The weights are resharded next: a pass that still runs would read freed memory."""
    began = threading.Event()
    end = threading.Event()
    ended = []

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
        assert playing.cancelled()
        assert ended == [True]

    monkeypatch.setattr(rollout, "Engine", Slow)
    monkeypatch.setattr(rollout, "play", plays)
    model = random_policy(chat)
    asyncio.run(cancelled())


def test_a_task_file_that_is_not_there_is_told_before_anything_is_cloned_or_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(mgrpo, "warm_start", None)  # would raise another error
    for flag in ("tasks", "held_out"):
        cfg = Config(out=str(tmp_path / "x"), **{flag: "sandbox:dev,/no/such.json"})
        with pytest.raises(ValueError, match="cannot read the task file /no/such.json"):
            mgrpo.main(cfg)


def test_the_held_out_tasks_are_those_of_their_flag(monkeypatch, tmp_path):
    def load_tasks(spec, sites, judge):
        return [{"task_id": spec}]

    monkeypatch.setattr(worlds, "load_tasks", load_tasks)
    tasks, held_out = mgrpo.open_tasks(Config(tasks="a", held_out="b", batch=1), evaluate.Environment({}, tmp_path))
    assert tasks == [{"task_id": "a"}]
    assert held_out == [{"task_id": "b"}]


def test_a_context_beyond_the_models_positions_is_refused(chat, play, tmp_path):
    with pytest.raises(ValueError, match="--max-context 5000: the model knows 4096 positions"):
        play(even_tasks_teach(chat), "x", steps=1, max_context=5000)
    assert not (tmp_path / "x").exists()


def test_a_fork_does_not_go_on_with_a_run_of_mgrpo(chat, play):
    """Not even one without settings of its own, such as README's."""
    class Short(MGRPO):
        pass

    play(even_tasks_teach(chat), "x", steps=2)
    with pytest.raises(ValueError, match="x holds a run with the method MGRPO, not Short"):
        play(even_tasks_teach(chat), "x", Short, steps=2)


def test_another_configuration_is_refused_unless_forced(chat, play, tmp_path):
    teach = even_tasks_teach(chat)
    play(teach, "x", steps=2)
    with pytest.raises(ValueError, match="eps 0.2, not 0.3; decay True, not False.*--force"):
        play(teach, "x", steps=2, eps=0.3, decay=False)

    forced = play(teach, "x", steps=3, eps=0.3, decay=False, force=True)
    assert len(forced) == 3

    anew = play(teach, "x", steps=1, resume=False)
    assert len(anew) == 1


@pytest.mark.parametrize("schedule, may_grow", [
    ({"decay": True, "warmup": 0.0}, False),
    ({"decay": False}, False),
    ({"decay": False, "warmup": 0.0}, True),
])
def test_a_run_can_be_prolonged_if_its_learning_rate_does_not_depend_on_steps(chat, play, schedule, may_grow):
    play(even_tasks_teach(chat), "x", steps=2, **schedule)
    expected = contextlib.nullcontext()
    if not may_grow:
        expected = pytest.raises(ValueError, match="steps 2, not 3")
    with expected:
        lines = play(even_tasks_teach(chat), "x", steps=3, **schedule)
        assert len(lines) == 3


def test_responses_without_an_action_and_actions_that_fail_are_counted_apart(chat):
    tau = trajectory(chat, 0.0, [3] * 4)
    unread, failed, done, _ = tau.turns
    unread.error = "no action found"
    failed.action = "do(...)"
    failed.error = "no element 5"
    done.action = "do(...)"
    broken = trajectory(chat, 0.0, [3], status="env_error")

    metrics = evaluate.episode_metrics([tau, broken])

    assert metrics["invalid_actions"] == 1
    assert metrics["failed_actions"] == 1
    assert metrics["env_errors"] == 1


def test_a_steps_mean_reward_leaves_out_what_the_environment_broke(chat):
    played = [trajectory(chat, 1.0, [2]), trajectory(chat, 0.0, [2], status="env_error")]
    assert mgrpo.step_metrics(0, played, updates=[])["reward"] == 1.0


@pytest.mark.parametrize("credit_errors", [False, True])
def test_a_success_makes_none_of_its_failed_responses_likelier(chat, credit_errors):
    """Unless --credit-errors asks for it. A failure makes all of its responses less likely either way."""
    success = trajectory(chat, 1.0, [3, 9, 4])
    failure = trajectory(chat, 0.0, [5, 9, 3])
    success.turns[1].error = "no action found"
    failure.turns[1].error = "no action found"
    method = method_of(chat, None, Config(G=2, credit_errors=credit_errors))

    rows, _ = method.training_rows([success, failure], step=0)

    A = 0.5 ** 0.5  # (1 - 1/2) / std, and the sample standard deviation of 0 and 1 is 1/sqrt(2)
    of_the_error = 0.0
    if credit_errors:
        of_the_error = A
    expected = [A, of_the_error, A, -A, -A, -A]
    assert [row.advantage for row in rows] == pytest.approx(expected, abs=1e-12)
    assert {row.weight for row in rows} == {1 / 33}  # it still counts among the batch's tokens


def test_a_step_without_a_group_that_trains_logs_null_and_moves_nothing(chat, play, checkpoint, tmp_path, monkeypatch,
                                                                        capsys):
    """Zeros looked like a collapse in the report's curves."""
    async def rollout(model, chat_, tasks, *, group_size, **_):
        played = []
        for _ in tasks:
            for i in range(group_size):
                tau = trajectory(chat, 1.0, [3], seed=i, member=i)
                played.append(tau)
        return played

    monkeypatch.setattr(MGRPO, "update", None)
    lines = play(rollout, "x", steps=2)

    for line in lines:
        for key in ("loss", "grad_norm", "kl", "clip_frac", "entropy", "logp_gap"):
            assert line[key] is None
        assert line["success_rate"] == 1.0
        assert line["reward"] == 1.0
        assert line["groups_kept"] == 0
        assert line["change"] == []
        assert line["skipped"] == 0
        assert line["tokens_packed"] == 0
        assert line["env_errors"] == 0
        assert all([line["turns"], line["response_tokens"], line["trajectory_tokens"]])

    said = capsys.readouterr().out
    _, _, from_the_first_step_on = said.partition("step 1/2")
    assert "entropy" not in from_the_first_step_on
    assert "success 100.0%" in said
    before = load(checkpoint).state_dict()
    after = load(tmp_path / "x").state_dict()
    assert same_weights(before, after)


# ------------------------------------------------------------------------- tasks, flags, learning rate


@pytest.mark.parametrize("n, batch", [(10, 4), (30, 24), (5, 3), (7, 7), (5, 4), (9, 1)])
def test_a_pass_holds_no_task_twice_and_each_has_its_own_order(n, batch):
    """A task twice in a step would play the same episodes twice: (seed, step, task, member) seed them."""
    tasks = [{"task_id": i} for i in range(n)]
    cfg = Config(batch=batch)
    steps_a_pass = n // batch
    passes = []
    for first in range(0, 20 * steps_a_pass, steps_a_pass):
        played = []
        for step in range(first, first + steps_a_pass):
            played += [task["task_id"] for task in task_batch(tasks, step, cfg)]
        passes.append(played)

    for played in passes:
        assert len(played) == steps_a_pass * batch
        assert len(set(played)) == len(played)
    orders = {tuple(played) for played in passes}
    assert len(orders) > 10
    assert set().union(*passes) == set(range(n))

    # It is a function of the step, so that a run can go on.
    once = task_batch(tasks, 3, cfg)
    again = task_batch(tasks, 3, cfg)
    assert once == again


def test_another_seed_takes_the_tasks_in_another_order():
    tasks = [{"task_id": number} for number in range(30)]
    orders = []
    for seed in (0, 1):
        played = task_batch(tasks, 0, Config(batch=24, seed=seed))
        orders.append([task["task_id"] for task in played])
    assert orders[0] != orders[1]


@pytest.mark.parametrize("sizes, batch", [
    ([5] * 19, 19),
    ([32] * 11 + [31] * 8, 24),
    ([7] * 4, 2),
    ([9, 3, 1], 5),
])
def test_every_step_has_its_share_of_each_template(sizes, batch):
    """Whatever the pass: rounded up or down, so that the success of two steps can be compared."""
    tasks = []
    for template, n in enumerate(sizes):
        for i in range(n):
            tasks.append({"task_id": f"{template}/{i}", "intent_template_id": template})

    for step in range(3 * (len(tasks) // batch)):
        played = task_batch(tasks, step, Config(batch=batch))
        drawn = [task["intent_template_id"] for task in played]
        for template, n in enumerate(sizes):
            share = n * batch / len(tasks)
            assert abs(drawn.count(template) - share) < 1, (step, template)


def test_templates_of_two_sources_with_one_number_are_two():
    """One of them once had one task in a step and four in another."""
    tasks = []
    for number in range(12):
        tasks.append({"task_id": number, "intent_template_id": 1})
        tasks.append({"task_id": number, "intent_template_id": 1, "source": 1})
    tasks.sort(key=lambda task: "source" in task)

    for step in range(6):
        played = task_batch(tasks, step, Config(batch=4))
        assert sum("source" in task for task in played) == 2


@pytest.fixture
def parse(monkeypatch):
    """parse(*arguments): mgrpo.py's Config."""
    def parse(*arguments):
        words = [str(argument) for argument in arguments]
        monkeypatch.setattr("sys.argv", ["mgrpo.py", *words])
        return runs.parse_args(Config, mgrpo.__doc__, {"paper": mgrpo.PAPER}, "")

    return parse


def test_the_command_line_overrides_the_papers_preset(parse):
    cfg = parse("--paper", "--lr", "3e-6", "--no-recompute")
    # given
    assert cfg.lr == 3e-6
    assert cfg.recompute is False
    # the paper's
    assert cfg.beta == 0.001
    assert cfg.eps == 0.2
    assert cfg.G == 4
    assert cfg.batch == 16
    assert cfg.max_context == 16384
    json.dumps(cfg.__dict__)


def test_pages_and_sizes_are_those_that_the_checkpoint_was_trained_with(parse, checkpoint, tmp_path):
    """`bc.py --viewport-only`, then mgrpo.py, once changed the pages in silence."""
    trained = {
        "viewport_only": True,
        "text_only": True,
        "max_page_chars": 999,
        "max_turns": 7,
        "max_new_tokens": 33,
        "max_context": 2222,
        "lr": 0.5,
    }
    config = config_of(checkpoint) | {"run": trained}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def shown(cfg):
        return {name: getattr(cfg, name) for name in trained}

    assert shown(parse("--model", tmp_path)) == trained | {"lr": Config.lr}

    given = parse("--model", tmp_path, "--no-viewport-only", "--max-turns", 3)
    assert given.max_turns == 3
    given = parse("--model", tmp_path, "--no-viewport-only")
    assert not given.viewport_only

    preset = parse("--model", tmp_path, "--paper")
    assert preset.max_turns == 15
    assert preset.text_only

    # A checkpoint that no run has trained.
    assert shown(parse("--model", checkpoint)) == shown(Config())


def test_the_learning_rate_rises_for_a_share_of_the_steps_then_falls_to_zero_or_stays():
    cfg = Config(lr=1.0, steps=7, warmup=0.4)
    rates = [warmup_linear(step, cfg) for step in range(8)]
    rise = [1 / 3, 2 / 3, 1]
    fall = [1, 3 / 4, 2 / 4, 1 / 4, 0]
    assert rates == pytest.approx(rise + fall)

    constant = Config(lr=2.0, steps=3, warmup=0.0, decay=False)
    rates = [warmup_linear(step, constant) for step in range(5)]
    assert rates == [2.0] * 5

    # The rates of the published results.
    cfg = Config(lr=3e-4, steps=18)
    for step in range(18):
        rise = (step + 1) / 4
        fall = (18 - step) / 14
        assert warmup_linear(step, cfg) == min(1.0, rise, fall) * 3e-4


@pytest.mark.parametrize("Method, G", [(MGRPO, 1), (Priced, 1), (MGRPO, 0)])
def test_a_group_of_one_is_refused(Method, G):
    """It has nobody to compare with: all such runs trained nothing, and said nothing."""
    with pytest.raises(ValueError, match=f"^--G {G}: [^\n]*at least 2") as refused:
        mgrpo.main(Config(G=G, model="/no/such/checkpoint"), Method)
    assert "\n" not in str(refused.value)


def test_a_temperature_of_0_is_refused():
    with pytest.raises(ValueError, match="--temperature 0: all episodes of a group would be the same"):
        mgrpo.main(Config(temperature=0.0, model="/no/such/checkpoint"))


def test_without_a_checkpoint_behavior_cloning_runs_first_on_the_same_pages(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    cloned = []
    monkeypatch.setattr(mgrpo.bc, "main", cloned.append)

    cfg = Config(seed=3, viewport_only=True, max_page_chars=99, browser="ws://there:1", concurrency=2, resume=False,
                 force=True)
    assert mgrpo.warm_start(cfg) == "runs/bc"
    assert cloned[0].seed == 3
    assert cloned[0].viewport_only is True
    assert cloned[0].max_page_chars == 99
    assert cloned[0].browser == "ws://there:1"
    assert cloned[0].concurrency == 2
    assert cloned[0].resume is False  # what bc.py advises when it finds another run has to work from here, too
    assert cloned[0].force is True

    # A clone that is there, and another checkpoint: nothing is cloned.
    clone = tmp_path / "runs/bc"
    clone.mkdir(parents=True)
    (clone / "model.safetensors").touch()
    assert mgrpo.warm_start(Config()) == "runs/bc"
    assert mgrpo.warm_start(Config(model="x")) == "x"
    assert len(cloned) == 1


def test_templates_with_one_task_are_spread_over_the_steps():
    """They would all have one place, so that one step would hold nothing else."""
    tasks = []
    for template in range(13):
        for i in range(1 if template < 10 else 10):
            tasks.append({"task_id": f"{template}/{i}", "intent_template_id": template})

    for step in range(50):
        played = task_batch(tasks, step, Config(batch=8))
        alone = sum(task["intent_template_id"] < 10 for task in played)
        assert alone <= 3, step  # of ten in five steps
