"""The algorithm against slow, obvious versions written from the paper's equation."""
import json
import math
import statistics

import pytest
import torch
from conftest import tiny_model

from compress import Chat, Trajectory, Turn, pad, rows
from mgrpo import Config, group_advantages, mgrpo_loss, task_batch, update, weigh
from model import token_logprobs


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
    """M-GRPO as printed, for one group: logp[i][j][t], plain Python floats."""
    G = len(rewards)
    mean, std = sum(rewards) / G, statistics.stdev(rewards)
    total = 0.0
    for i in range(G):
        A = (rewards[i] - mean) / std
        episode = 0.0
        for j in range(len(logp[i])):
            turn = 0.0
            for t in range(len(logp[i][j])):
                ratio = math.exp(logp[i][j][t] - logp_old[i][j][t])
                clipped = min(max(ratio, 1 - eps), 1 + eps)
                d = logp_ref[i][j][t] - logp[i][j][t]
                turn += min(ratio * A, clipped * A) - beta * (math.exp(d) - d - 1)
            episode += turn / len(logp[i][j])
        total += episode / len(logp[i])
    return -total / G


def test_the_loss_is_the_papers_triple_mean():
    g = torch.Generator().manual_seed(0)
    shape = [[3, 1], [2], [4, 4, 1, 2]]  # tokens of each turn of each episode
    draw = lambda: [[(-2 * torch.rand(n, generator=g, dtype=torch.float64)).tolist() for n in turns] for turns in shape]
    new, old, ref, rewards = draw(), draw(), draw(), [1.0, 0.0, 1.0]
    flat = lambda x: torch.tensor([v for turns in x for turn in turns for v in turn], dtype=torch.float64)
    mean, std = sum(rewards) / 3, statistics.stdev(rewards)
    A = torch.tensor([(rewards[i] - mean) / std for i, turns in enumerate(shape) for n in turns for _ in range(n)], dtype=torch.float64)
    weight = torch.tensor([1 / (3 * len(turns) * n) for turns in shape for n in turns for _ in range(n)], dtype=torch.float64)
    loss, _ = mgrpo_loss(flat(new), flat(old), flat(ref), A, weight, 0.2, 0.3)
    assert float(loss) == pytest.approx(equation(new, old, ref, rewards, 0.2, 0.3), abs=1e-12)


def test_clipping_stops_the_gradient_only_where_it_would_go_too_far():
    logp = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)  # ratios 1.65, 1.65, 0.61, 0.61
    A = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, metrics = mgrpo_loss(logp, torch.zeros(4), logp.detach(), A, torch.ones(4), 0.2, 0.0)
    loss.backward()
    assert (logp.grad != 0).tolist() == [False, True, True, False] and metrics["clip_frac"] == 2


def test_kl_is_never_negative_and_zero_at_the_start():
    a, b = torch.randn(100), torch.randn(100)
    zeros, ones = torch.zeros(100), torch.ones(100)
    assert mgrpo_loss(a, a, b, zeros, ones, 0.2, 1.0)[1]["kl"] > 0
    assert mgrpo_loss(a, a, a, zeros, ones, 0.2, 1.0)[1]["kl"] == 0


def test_advantages_are_over_trajectories_not_turns(chat):
    group = [trajectory(chat, 1.0, [3]), trajectory(chat, 0.0, [3]), trajectory(chat, 0.0, [3])]
    longer = [trajectory(chat, 1.0, [3] * 12), trajectory(chat, 0.0, [3]), trajectory(chat, 0.0, [3])]
    assert [t.advantage for t in group_advantages(group)] == [t.advantage for t in group_advantages(longer)]
    assert sum(t.advantage for t in group) == pytest.approx(0) and statistics.stdev(t.advantage for t in group) == pytest.approx(1)


def test_a_broken_environment_leaves_the_group_as_if_it_had_never_been(chat):
    valid = [trajectory(chat, 1.0, [3]), trajectory(chat, 0.0, [3]), trajectory(chat, 0.0, [3])]
    broken = trajectory(chat, 0.0, [3], status="env_error")
    assert broken not in group_advantages(valid + [broken])
    with_broken = [t.advantage for t in valid]
    group_advantages(valid)
    assert with_broken == [t.advantage for t in valid]


@pytest.mark.parametrize("rewards, statuses", [([1, 1, 1], "ok ok ok"), ([0, 0, 0], "ok ok ok"), ([1, 0, 0], "ok env_error env_error")])
def test_groups_that_teach_nothing_go_whole(chat, rewards, statuses):
    group = [trajectory(chat, float(r), [3], status=s) for r, s in zip(rewards, statuses.split())]
    assert group_advantages(group) == []


def make_groups(chat):
    return [[trajectory(chat, float(i % 2), [3 + i + k, 2, 5][:1 + (i + k) % 3], seed=10 * k + i, member=i) for i in range(4)]
            for k in range(2)]


def test_weights_are_the_means_of_the_paper_and_of_the_alternatives(chat):
    kept = [group_advantages(group) for group in make_groups(chat)]
    tokens = sum(len(t.action_ids) for group in kept for tau in group for t in tau.turns)
    total = lambda norm: sum(row.weight * row.n_action for row in weigh(kept, chat, Config(loss_norm=norm)))
    assert total("paper") == pytest.approx(1) and total("token") == pytest.approx(1)
    assert total("constant") == pytest.approx(tokens / (2 * 4 * Config.max_turns * Config.max_new_tokens))
    for row in weigh(kept, chat, Config()):
        tau = next(tau for group in kept for tau in group if any(t.action_ids == row.ids[-row.n_action:] for t in tau.turns))
        assert row.weight == pytest.approx(1 / (2 * 4 * len(tau.turns) * row.n_action)) and row.advantage == tau.advantage


def gradient_of(chat, kept, cfg, reference=None):
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    grads = {}
    optimizer.step = lambda: grads.update({k: p.grad.clone() for k, p in model.named_parameters()})
    metrics = update(model, reference, optimizer, kept, chat, cfg, "cpu")
    return grads, metrics


def test_the_update_is_the_gradient_of_the_equation(chat):
    """Loss and gradient of a whole step against autograd through the printed formula, one response at a time."""
    kept = [group_advantages(group) for group in make_groups(chat)]
    cfg = Config(beta=0.1, clip=1e9)
    reference = tiny_model(seed=1, vocab_size=chat.tokenizer.get_vocab_size())
    grads, metrics = gradient_of(chat, kept, cfg, reference)
    model, loss = tiny_model(vocab_size=chat.tokenizer.get_vocab_size()), 0
    for group in kept:
        for tau in group:
            for row, turn in zip(rows(chat, tau), tau.turns):
                logp, ref = (token_logprobs(m, *pad([row]))[0] for m in (model, reference))
                ratio, delta = (logp - torch.tensor(turn.logps)).exp(), ref.detach() - logp
                gain = torch.minimum(ratio * tau.advantage, ratio.clamp(0.8, 1.2) * tau.advantage) - 0.1 * (delta.exp() - delta - 1)
                loss = loss - gain.mean() / len(tau.turns) / len(group) / len(kept)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, atol=1e-5, rtol=1e-4)


def test_the_gradient_does_not_depend_on_the_micro_batch_budget(chat):
    kept = [group_advantages(group) for group in make_groups(chat)]
    reference, _ = gradient_of(chat, kept, Config(clip=1e9))
    for budget in (1, 150, 400):
        grads, _ = gradient_of(chat, kept, Config(clip=1e9, max_tokens=budget))
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, reference[name], atol=1e-5, rtol=1e-4)


def test_no_group_left_means_no_step(chat):
    grads, metrics = gradient_of(chat, [], Config())
    assert grads == {} and metrics["grad_norm"] == 0


def test_every_pass_plays_every_task_once_in_an_order_of_its_own():
    tasks, cfg = [{"task_id": i} for i in range(10)], Config(batch=4)
    played = [t["task_id"] for step in range(5) for t in task_batch(tasks, step, cfg)]
    assert sorted(played[:10]) == sorted(played[10:]) == list(range(10)) and played[:10] != played[10:]
    assert task_batch(tasks, 3, cfg) == task_batch(tasks, 3, cfg)  # a function of the step: nothing to save for a resume


def test_the_papers_preset_gives_way_to_the_command_line(monkeypatch):
    import mgrpo
    monkeypatch.setattr("sys.argv", ["mgrpo.py", "--paper", "--lr", "3e-6", "--no-recompute"])
    cfg = mgrpo.parse_args()
    assert (cfg.lr, cfg.recompute, cfg.beta, cfg.eps, cfg.G, cfg.batch, cfg.max_context) == (3e-6, False, 0.001, 0.2, 4, 16, 16384)
    json.dumps(cfg.__dict__)
