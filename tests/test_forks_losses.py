"""forks/losses.py: each loss against slow loops in float64, packed, on one and two ranks; and its figure."""
import math
import os
import statistics
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import ROOT, tiny_model
from test_forks import column, episodes_of, float64, hard_and_easy, pointing, seeded, timeless  # noqa: F401 (fixtures)
from test_mgrpo import TASKS, logprobs, method_of, trajectory, without_browser
from test_scripts import ENV, METRICS, read, script
from two_ranks import groups

import losses_figure  # from tests/tools; conftest has set the path
import mgrpo
import run as runs
from compress import Chat, trajectory_rows
from evaluate import Environment
from forks import losses
from model import full_state, load, load_tokenizer, shard
from run import init_dist, rank, world_size

NAMES = list(losses.LOSSES)
REWARDS = [
    [1.0, 0.0, 0.0, 0.0],
    [1.0, 1.0, 1.0, 0.0],
    [1.0, 1.0, 1.0, 1.0],
    [0.0, 1.0, 1.0, 0.0],
]


def four_groups(chat):
    """Episodes of 1 to 4 turns, with one to six tokens each. The third group teaches nothing."""
    found = []
    for k, rewards in enumerate(REWARDS):
        group = []
        for i, reward in enumerate(rewards):
            n_turns = 1 + (i + k) % 4
            lengths = [1 + (3 * k + 2 * i + j) % 6 for j in range(n_turns)]
            tau = trajectory(chat, reward, lengths, seed=10 * k + i, member=i)
            group.append(tau)
        found.append(group)
    return found


def those_that_train(four):
    """Of four_groups, those whose rewards differ."""
    kept = []
    for group, rewards in zip(four, REWARDS):
        if len(set(rewards)) > 1:
            kept.append(group)
    return kept


def turns_of(groups):
    """All their turns, in order."""
    turns = []
    for tau in episodes_of(groups):
        turns += tau.turns
    return turns


def of_each_episode(groups, function):
    """[k][i]: what a function makes of episode i of group k."""
    found = []
    for group in groups:
        found.append([function(tau) for tau in group])
    return found


def rewards_of(groups):
    def reward_of(tau):
        return tau.reward
    return of_each_episode(groups, reward_of)


def gradient_of(loss, x):
    gradient, = torch.autograd.grad(loss, x)
    return gradient


def number_of_tokens(logp):
    """How many numbers logp[k][i][j] holds in all."""
    total = 0
    for group in logp:
        for episode in group:
            total += sum(map(len, episode))
    return total


def advantage_written_out(name, rewards, i):
    mean = sum(rewards) / len(rewards)
    if name == "dr_grpo":
        return rewards[i] - mean
    if name == "maxrl":
        return (rewards[i] - mean) / mean
    if name == "raft":
        return rewards[i]
    return (rewards[i] - mean) / statistics.stdev(rewards)


def J_written_out(name, new, old, A):
    """The sum of J over the tokens of one response."""
    log_ratios = [logp - logp_old for logp, logp_old in zip(new, old, strict=True)]
    if name == "gspo":  # one term a response
        s = (sum(log_ratios) / len(new)).exp()
        clipped = s.clamp(1 - 3e-4, 1 + 4e-4)
        return len(new) * min(s * A, clipped * A)

    drift = -sum(x.item() for x in log_ratios) / len(new)
    high = 1.2
    if name == "dapo":
        high = 1.28
    total = 0
    for logp, log_ratio in zip(new, log_ratios):
        rho = log_ratio.exp()
        if name == "cispo":
            J = min(rho.item(), 5.0) * A * logp
        elif name == "masked" and A < 0 and drift > 0.5:
            J = 0 * logp
        else:
            J = min(rho * A, rho.clamp(0.8, high) * A)
        total = total + J
    return total


def written_out(name, logp, logp_old, logp_ref, rewards, cfg):
    """A loss as its paper prints it, one token at a time: logp[k][i][j][t] is a scalar tensor.

    k: groups that train, i: episodes, j: responses, t: tokens. The numbers are the papers', not the code's.
    """
    n_groups = len(logp)
    n_tokens = number_of_tokens(logp)
    total = 0.0
    for k, group in enumerate(logp):
        G = len(group)
        for i, episode in enumerate(group):
            A = advantage_written_out(name, rewards[k], i)
            for j, response in enumerate(episode):
                sum_of_J = J_written_out(name, response, logp_old[k][i][j], A)
                sum_of_kl = 0
                for t, new in enumerate(response):
                    d = logp_ref[k][i][j][t] - new
                    kl = d.exp() - d - 1
                    sum_of_kl = sum_of_kl + kl
                if name == "dr_grpo":
                    weight = 1 / (n_groups * G * cfg.max_turns * cfg.max_new_tokens)
                elif name == "gspo":
                    weight = 1 / (n_groups * G * len(episode) * len(response))
                else:  # dapo's and cispo's own, and the default of the others
                    weight = 1 / n_tokens
                total = total + weight * (sum_of_J - cfg.beta * sum_of_kl)
    return -total


def nested(flat, kept):
    """(N,) -> [k][i][j][t], in the order of the rows."""
    sizes = [len(turn.response_ids) for turn in turns_of(kept)]
    parts = iter(flat.split(sizes))

    def of_episode(tau):
        return [next(parts).unbind() for _ in tau.turns]
    return of_each_episode(kept, of_episode)


# (scale, shift) of log rho in one response of five
DRIFTS = [
    (1e-4, 0.0),   # hardly moved
    (0.06, 0.21),  # reached DAPO's bound
    (1.5, -1.0),   # fell
    (0.6, 1.0),    # rose
    (0.4, 0.0),    # spread
]


def drifted(sizes, on_policy, seed=0):
    """(N,): log rho of responses of these sizes, which drifted as DRIFTS says; 0 on-policy."""
    generator = seeded(seed)
    parts = []
    for number, n in enumerate(sizes):
        scale, shift = DRIFTS[number % 5]
        noise = torch.randn(n, generator=generator, dtype=torch.float64)
        parts.append(shift + scale * noise)
    log_rho = torch.cat(parts)
    if on_policy:
        return torch.zeros_like(log_rho)
    return log_rho


@dataclass
class Case:
    """A method, its rows of four_groups, and their log-probs, each (N,)."""
    method: losses.Losses
    kept: list  # the groups that train
    rows: list
    new: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor


def case_of(chat, name, on_policy, **changes):
    cfg = losses.Config(loss=name, G=4, beta=0.1, **changes)
    method = method_of(chat, None, cfg, Method=losses.Losses)
    four = four_groups(chat)
    rows, metrics = method.training_rows(episodes_of(four), 0)
    assert metrics["groups_kept"] == 3

    logps = []
    for row in rows:
        logps += row.logps
    old = torch.tensor(logps, dtype=torch.float64)
    new = old + drifted([row.n_action for row in rows], on_policy)
    new.requires_grad_()
    noise = torch.randn(len(old), generator=seeded(1), dtype=torch.float64)
    ref = old + 0.3 * noise
    return Case(method, those_that_train(four), rows, new, old, ref)


@pytest.mark.parametrize("on_policy", [False, True], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_those_of_the_formula(chat, float64, name, on_policy):  # noqa: F811
    """float64, 1e-10, groups of one and of three successes, responses within and beyond every clip range."""
    case = case_of(chat, name, on_policy)
    new = case.new

    loss, metrics = case.method.loss(case.rows, new, case.ref, None)

    expected = written_out(
        name,
        nested(new, case.kept),
        nested(case.old, case.kept),
        nested(case.ref, case.kept),
        rewards_of(case.kept),
        case.method.cfg,
    )
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    gradient = gradient_of(loss, new)
    torch.testing.assert_close(gradient, gradient_of(expected, new), atol=1e-10, rtol=0)
    k3 = [math.exp(d) - d - 1 for d in (case.ref - new).tolist()]
    assert metrics["kl"] == pytest.approx(sum(k3), rel=1e-9)
    if on_policy or name == "cispo":
        assert metrics["clip_frac"] == 0
    else:
        assert 0.1 < metrics["clip_frac"] / len(new) < 0.9


def test_the_first_one_is_mgrpos_own(chat, float64):  # noqa: F811
    """--loss grpo: the same rows, loss, gradient and metrics to the last bit, under any --loss-norm and --eps."""
    several = [
        {},
        {"loss_norm": "paper"},
        {"eps": 0.05, "loss_norm": "constant"},
    ]
    for changes in several:
        case = case_of(chat, "grpo", on_policy=False, **changes)
        plain = method_of(chat, None, mgrpo.Config(G=4, beta=0.1, **changes))
        its_rows, _ = plain.training_rows(episodes_of(four_groups(chat)), 0)
        assert [row.advantage for row in case.rows] == [row.advantage for row in its_rows]
        assert [row.weight for row in case.rows] == [row.weight for row in its_rows]

        loss, metrics = case.method.loss(case.rows, case.new, case.ref, None)
        its_loss, its_metrics = plain.loss(case.rows, case.new, case.ref, None)
        assert loss == its_loss
        assert metrics == its_metrics
        assert metrics["clip_frac"] > 0
        assert torch.equal(gradient_of(loss, case.new), gradient_of(its_loss, case.new))


@pytest.mark.parametrize("name", NAMES)
def test_on_the_policy_that_sampled_every_loss_pushes_by_the_advantage(chat, float64, name):  # noqa: F811
    case = case_of(chat, name, on_policy=True)
    advantages = [row.advantage for row in case.rows]
    lengths = [row.n_action for row in case.rows]
    A_N = mgrpo.per_token(advantages, case.rows, "cpu")
    tokens = losses.Tokens(case.new, case.old, A_N, lengths)

    push_N = losses.push(case.method.surrogate, tokens, case.method.cfg)
    torch.testing.assert_close(push_N, A_N, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["dapo", "cispo", "masked", "gspo"])
def test_with_one_update_a_batch_these_four_train_as_grpo_does(chat, float64, name):  # noqa: F811
    """Equal gradients at rho = 1, given GRPO's weights; off-policy they part."""
    norm = "token"
    if name == "gspo":
        norm = "paper"

    def gradient(loss_name, on_policy):
        case = case_of(chat, loss_name, on_policy, loss_norm=norm)
        loss, _ = case.method.loss(case.rows, case.new, case.ref, None)
        return gradient_of(loss, case.new)

    for on_policy in (True, False):
        its_own = gradient(name, on_policy)
        grpos = gradient("grpo", on_policy)
        assert torch.allclose(its_own, grpos, atol=1e-12, rtol=0) == on_policy


def test_advantages_by_hand(chat):
    """One success of four: 1.5, 0.75, 3 and 1. Three of four: what each failure pushes."""
    # (loss, A of the only success, A of the only failure, sum of A over a group with one success)
    by_hand = [
        ("grpo", 1.5, -1.5, 0.0),
        ("dr_grpo", 0.75, -0.75, 0.0),
        ("maxrl", 3.0, -1.0, 0.0),
        ("raft", 1.0, 0.0, 1.0),
    ]
    for name, success, failure, total in by_hand:
        cfg = losses.Config(loss=name, G=4)
        method = method_of(chat, None, cfg, Method=losses.Losses)
        one, three, equal, _ = four_groups(chat)
        assert method.advantages(one)[0].advantage == pytest.approx(success)
        assert method.advantages(three)[-1].advantage == pytest.approx(failure)
        assert method.advantages(equal) == []

        one[2].status = "env_error"  # 1 of 3 valid ones
        valid = method.advantages(one)
        assert sum(tau.advantage for tau in valid) == pytest.approx(total)
        assert len(valid) == 3


def test_a_drifted_failure_stops_as_a_whole_and_nothing_else_does(chat, float64):  # noqa: F811
    """Its second token has become likelier, so GRPO's clip leaves it. A success that drifted as far goes on."""
    log_rho = torch.tensor([-3.0, 0.5, -3.0, 0.5, -0.1, 0.1])
    A = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    tokens = losses.Tokens(log_rho, torch.zeros(6), A, [2, 2, 2])
    stopped = {
        "grpo": [True, False, False, True, False, False],
        "masked": [True, True, False, True, False, False],
    }
    for name, expected in stopped.items():
        cfg = losses.own_settings(losses.Config(loss=name))
        _, J, *_ = losses.LOSSES[name]
        push_N = losses.push(J, tokens, cfg)
        assert (push_N == 0).tolist() == expected

    gentle = losses.own_settings(losses.Config(loss="masked", delta=1.3))  # the drift is 1.25
    push_N = losses.push(losses.masked, tokens, gentle)
    assert push_N[1] != 0


@pytest.mark.parametrize("name", NAMES)
def test_the_update_is_that_of_each_response_alone(chat, name):
    """A whole step through the model, packed under any budget, off-policy: float32, 1e-5."""
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    four = four_groups(chat)
    episodes = episodes_of(four)
    sizes = [len(turn.response_ids) for turn in turns_of(four)]
    log_rho = drifted(sizes, on_policy=False).float()
    drifts = iter(log_rho.split(sizes))
    for tau in episodes:
        for turn, row in zip(tau.turns, trajectory_rows(chat, tau)):
            logps = logprobs(model, row) - next(drifts)
            turn.logps = logps.tolist()

    # 1) The formula, one response at a time.
    def alone(tau):
        return [logprobs(model, row).unbind() for row in trajectory_rows(chat, tau)]

    def when_sampled(tau):
        return [torch.tensor(turn.logps).unbind() for turn in tau.turns]

    def without_gradient(episode):
        responses = []
        for response in episode:
            responses.append([logp.detach() for logp in response])
        return responses
    cfg = losses.Config(loss=name, G=4, max_grad_norm=1e9, temperature=1.0)
    kept = those_that_train(four)
    new = of_each_episode(kept, alone)
    old = of_each_episode(kept, when_sampled)
    ref = of_each_episode(new, without_gradient)
    expected = written_out(name, new, old, ref, rewards_of(kept), cfg)
    expected_gradients = torch.autograd.grad(expected, list(model.parameters()))

    # 2) An update.
    for budget in (1, 300, 10**6):
        gradients = {}

        def recorded():
            for parameter, weight in model.named_parameters():
                gradients[parameter] = weight.grad.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.step = recorded
        its_cfg = replace(cfg, max_tokens=budget)
        method = method_of(chat, model, its_cfg, optimizer, Method=losses.Losses)
        rows, _ = method.training_rows(episodes, 0)
        metrics = method.update(rows)

        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
        assert metrics["logp_gap"] > 0.1
        clips = metrics["clip_frac"] > 0
        assert clips == (name != "cispo")
        for (parameter, _), gradient in zip(model.named_parameters(), expected_gradients):
            where = f"{parameter}, {budget}"
            torch.testing.assert_close(gradients[parameter], gradient, atol=1e-5, rtol=1e-3, msg=where)


# ---------------------------------------------------------------------------------------- refilled groups


def chance(chat, teaches):
    """A stand-in for rollout: tasks for which teaches(task_id) holds earn mixed rewards; `played` lists all."""
    played = []

    async def rollout(model, chat_, tasks, *, group_size, seed, **_):
        episodes = []
        for task in tasks:
            number = task["task_id"]
            played.append(number)
            for i in range(group_size):
                succeeds = i == 0 or not teaches(number)
                tau = trajectory(chat, float(succeeds), [2 + i], seed=number, member=i)
                episodes.append(tau)
        return episodes
    return rollout, played


def even(number):
    return number % 2 == 0


def refilled(chat, monkeypatch, teaches, **changes):
    """(groups that train, tasks in the order in which they were played) of a step on TASKS, six of ten a batch."""
    rollout, played = chance(chat, teaches)
    monkeypatch.setattr(mgrpo, "rollout", rollout)
    cfg = losses.Config(loss="dapo", batch=6, G=2, **changes)
    method = method_of(chat, None, cfg, Method=losses.Losses)

    tasks = method.choose_tasks(TASKS, 0)
    episodes = method.collect(tasks, Environment({}, "", cfg), 0)
    assert len(episodes) == 2 * len(played)
    _, metrics = method.training_rows(episodes, 0)
    return metrics["groups_kept"], played


def test_other_tasks_take_the_place_of_groups_that_teach_nothing(chat, monkeypatch):
    # 1) No round, one round.
    before, first = refilled(chat, monkeypatch, even)
    assert len(first) == 6
    assert before == sum(map(even, first))
    assert before < 5
    once, played = refilled(chat, monkeypatch, even, refill=1)
    assert played[:6] == first
    assert len(played) == 6 + (6 - before)
    assert once == sum(map(even, played))

    # 2) As many as it takes.
    many, played = refilled(chat, monkeypatch, even, refill=9)
    assert len(set(played)) == len(played)
    assert len(played) <= 10
    assert many == 5  # not six: there are but five such tasks
    assert sorted(played) == list(range(10))
    again = refilled(chat, monkeypatch, even, refill=9)
    assert again == (many, played)  # the seed decides


def test_a_step_that_is_collected_again_is_refilled_with_the_same_tasks(chat, monkeypatch):
    """As after an outage. The first attempt once used up the spare tasks."""
    rollout, played = chance(chat, even)
    monkeypatch.setattr(mgrpo, "rollout", rollout)
    cfg = losses.Config(loss="dapo", batch=6, G=2, refill=9)
    method = method_of(chat, None, cfg, Method=losses.Losses)
    tasks = method.choose_tasks(TASKS, 0)
    for _ in range(2):
        method.collect(tasks, Environment({}, "", cfg), 0)
    assert played[:len(played) // 2] == played[len(played) // 2:]


def test_a_full_batch_is_not_refilled(chat, monkeypatch):
    def always(number):
        return True
    kept, played = refilled(chat, monkeypatch, always, refill=9)
    assert kept == 6
    assert len(played) == 6

    def mostly(number):
        return number < 8
    kept, played = refilled(chat, monkeypatch, mostly, refill=9)
    assert kept == 6  # never more groups than a batch has
    assert len(played) <= 8


# --------------------------------------------------------------------------------------------- two ranks


def updates_on_ranks(name, chat, device):
    """Three updates with one loss on ragged groups of unequal number."""
    model = shard(tiny_model(vocab_size=chat.tokenizer.get_vocab_size()))
    # Where a gradient is as small as its rounding, AdamW's default eps of 1e-8 would step by the rounding.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-5, weight_decay=0.0)
    cfg = losses.Config(loss=name, G=3, max_tokens=300, max_grad_norm=1e9)
    method = losses.Losses(cfg, chat, model, None, optimizer, device)

    own_groups = groups(chat, 0)[rank()::world_size()]
    for turn in turns_of(own_groups):
        turn.logps = None  # the first update's own: it is on-policy
    rows, _ = method.training_rows(episodes_of(own_groups), 0)
    metrics = [method.update(rows) for _ in range(3)]
    return {"metrics": metrics, "state": full_state(model)}


def refilled_on_ranks(chat, device):
    """(groups that train, all first responses) of a batch that is refilled."""
    mgrpo.rollout, _ = chance(chat, even)
    cfg = losses.Config(loss="dapo", batch=6, G=2, refill=9)
    method = losses.Losses(cfg, chat, None, None, None, device)
    tasks = method.choose_tasks(TASKS, 0)
    episodes = method.collect(tasks, Environment({}, "", cfg), 0)
    _, metrics = method.training_rows(episodes, 0)
    first_responses = runs.gather([tau.turns[0].response_ids for tau in episodes])
    return metrics["groups_kept"], sorted(first_responses)


def on_ranks(checkpoint, out):
    """Three updates with every loss on ragged groups of unequal number; then a batch that is refilled."""
    torch.set_num_threads(1)
    device = init_dist()
    chat = Chat(load_tokenizer(checkpoint), "You browse the web.")
    results = {}
    for name in NAMES:
        results[name] = updates_on_ranks(name, chat, device)
    results["refilled"] = refilled_on_ranks(chat, device)
    if rank() == 0:
        torch.save(results, out)


def test_two_ranks_make_the_steps_that_one_rank_makes(checkpoint, tmp_path, monkeypatch):
    """With every loss, on- and off-policy; a refilled batch holds the same episodes."""
    done = script("tests/test_forks_losses.py", "ranks", checkpoint, tmp_path / "2.pt", ranks=2)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(mgrpo, "rollout", None)  # on_ranks sets it; this takes it back
    on_ranks(checkpoint, tmp_path / "1.pt")

    one = torch.load(tmp_path / "1.pt", weights_only=True)
    two = torch.load(tmp_path / "2.pt", weights_only=True)
    assert one["refilled"] == two["refilled"]
    kept, _ = one["refilled"]
    assert kept == 5
    for name in NAMES:
        for a, b in zip(one[name]["metrics"], two[name]["metrics"], strict=True):
            for key in ("loss", "grad_norm", "kl", "logp_gap", "entropy", "clip_frac"):
                assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-7), f"{name} {key}"
        for parameter, weight in one[name]["state"].items():
            its_weight = two[name]["state"][parameter]
            torch.testing.assert_close(its_weight, weight, atol=1e-6, rtol=1e-5, msg=name)
        last = one[name]["metrics"][-1]
        assert last["logp_gap"] > 1e-3, name
        clips = last["clip_frac"] > 0
        assert clips == (name != "cispo"), name


# -------------------------------------------------------------------------------------------- the script


def parse(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["losses.py", *map(str, arguments)])
    paper = mgrpo.PAPER | {"eps": None}
    return runs.parse_args(losses.Config, losses.__doc__, {"paper": paper}, "")


def test_a_loss_brings_its_own_clip_range_and_weights_and_flags_change_the_range(monkeypatch):
    def settings(*arguments):
        cfg = losses.own_settings(parse(monkeypatch, *arguments))
        return cfg.eps, cfg.eps_high, cfg.loss_norm
    assert settings() == (0.2, 0.2, "token")
    assert settings("--loss", "dapo") == (0.2, 0.28, "token")
    assert settings("--loss", "dapo", "--paper") == (0.2, 0.28, "token")
    assert settings("--loss", "maxrl", "--paper") == (0.2, 0.2, "paper")
    assert settings("--loss", "gspo") == (3e-4, 4e-4, "paper")
    assert settings("--loss", "grpo", "--eps", "0.1") == (0.1, 0.1, "token")
    assert settings("--loss", "masked", "--eps", "0.1", "--eps-high", "0.3") == (0.1, 0.3, "token")
    assert settings("--loss", "gspo", "--eps-high", "0.01") == (3e-4, 0.01, "paper")
    assert settings("--loss", "dr_grpo", "--loss-norm", "paper") == (0.2, 0.2, "constant")

    # A bound of its own stays.
    own = {"dapo": 0.28, "gspo": 4e-4, "cispo": 4.0}
    for name, own_high in own.items():
        eps, eps_high, _ = settings("--loss", name, "--eps", "0.1")
        assert eps == 0.1
        assert eps_high == own_high


def test_an_unknown_loss_is_one_sentence(chat):
    cfg = losses.Config(loss="ppo")
    with pytest.raises(ValueError, match="--loss ppo: use one of grpo, dr_grpo") as refused:
        method_of(chat, None, cfg, Method=losses.Losses)
    assert "\n" not in str(refused.value)


def test_help_names_the_flags_and_the_formulas(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--help")
    said = capsys.readouterr().out
    for flag in ("--loss ", "--eps-high", "--delta", "--refill", "--updates-per-batch"):
        assert flag in said
    for name in NAMES:
        assert name in said
    assert "min(s A, clip(s, 0.9997, 1.0004) A)" in said


@pytest.fixture
def play(checkpoint, monkeypatch, tmp_path):
    """play(rollout, out, **changes): the loop without a browser; the lines of metrics.jsonl."""
    without_browser(monkeypatch)

    def play(rollout, out, **changes):
        monkeypatch.setattr(mgrpo, "rollout", rollout)
        cfg = losses.Config(
            model=str(checkpoint),
            out=str(tmp_path / out),
            steps=4,
            batch=4,
            G=3,
            lr=1e-2,
            warmup=0.5,
            refill=1,
            **changes,
        )
        try:
            mgrpo.main(cfg, losses.Losses)
        except KeyboardInterrupt:
            pass
        return read(tmp_path / out / "metrics.jsonl")
    return play


@pytest.mark.parametrize("name", ["cispo", "masked"])
def test_an_interrupted_run_continues_as_if_nothing_had_happened(chat, play, tmp_path, name):
    """Bit for bit, refilled groups included; its config.json says what was clipped."""
    rollout = hard_and_easy(chat)

    async def interrupted(*args, seed, **kwargs):
        if seed == "0/2":
            raise KeyboardInterrupt
        return await rollout(*args, seed=seed, **kwargs)

    whole = play(rollout, "whole", loss=name)
    before = play(interrupted, "parts", loss=name)
    assert len(before) == 2
    parts = play(rollout, "parts", loss=name)

    assert timeless(parts) == timeless(whole)
    for line in whole:
        assert line["groups_kept"]
    its_weights = load(tmp_path / "parts").state_dict()
    for key, weight in load(tmp_path / "whole").state_dict().items():
        assert torch.equal(its_weights[key], weight)

    eps_high = {"cispo": 4.0, "masked": 0.2}
    config = (tmp_path / "parts/config.json").read_text()
    assert f'"eps_high": {eps_high[name]}' in config
    with pytest.raises(ValueError, match="holds a run with .*loss '"):
        play(rollout, "parts", loss="grpo")


@pytest.mark.slow
def test_the_script_runs_logs_and_saves_and_two_ranks_do_what_one_does(
        pointing, sandbox_sites, monkeypatch, tmp_path):  # noqa: F811
    """Two steps in the browser: on one rank in this process, on two as a user starts them."""
    for variable, address in sandbox_sites.items():
        monkeypatch.setenv(variable, address)

    found = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        arguments = [
            "--loss", "gspo",
            "--model", ROOT / "worlds/base",
            "--tasks", pointing,
            "--out", out,
            "--steps", 2,
            "--batch", 3,
            "--G", 2,
            "--max-turns", 2,
            "--max-new-tokens", 24,
            "--concurrency", 1,
            "--lr", 5e-5,
            "--refill", 1,
        ]
        if ranks == 1:
            mgrpo.main(parse(monkeypatch, *arguments), losses.Losses)
        else:
            env = ENV | sandbox_sites
            done = script("forks/losses.py", *arguments, ranks=2, env=env)
            assert done.returncode == 0, done.stderr

        lines = read(out / "metrics.jsonl")
        assert column(lines, "step") == [0, 1]
        found.append(lines)
        assert set(load(out).state_dict()) == set(load(ROOT / "worlds/base").state_dict())
        assert (out / "report.html").exists()
        assert len(read(out / "trajectories.jsonl")) >= 12

    for one, two in zip(*found, strict=True):
        assert set(METRICS) <= set(one)
        for key in ("success_rate", "loss", "grad_norm", "entropy", "groups_kept"):
            if one[key] is None:  # all groups of the step have equal rewards
                assert two[key] is None, key
            else:
                assert one[key] == pytest.approx(two[key], rel=1e-3, abs=1e-6), key
        # Each rank writes the system prompt, and what else its episodes share; on one rank, more of them share.
        assert one["tokens_packed"] <= two["tokens_packed"] <= 1.2 * one["tokens_packed"]
        gap = one["logp_gap"] or 0
        assert gap < 1e-3
    assert any(line["grad_norm"] for line in found[0])


# -------------------------------------------------------------------------------------------- the figure


def test_the_figure_is_drawn_from_the_functions_of_the_page(monkeypatch, tmp_path):
    drawn = tmp_path / "losses.svg"
    monkeypatch.setattr(sys, "argv", ["losses_figure.py", "--out", str(drawn)])
    losses_figure.main()
    assert drawn.read_text() == (ROOT / "assets/losses.svg").read_text()
    assert set(losses_figure.PANELS) == set(NAMES)


@pytest.mark.parametrize("loss, A, expected", [
    ("grpo", 2.0, {0.5: 1.0, 1.1: 2.2, 1.3: 0.0}),
    ("grpo", -2.0, {0.7: 0.0, 0.9: -1.8, 1.9: -3.8}),
    ("dapo", 2.0, {1.27: 2.54, 1.29: 0.0}),
    ("dapo", -2.0, {0.79: 0.0, 0.81: -1.62}),
    ("gspo", 2.0, {0.9: 1.8, 1.0003: 2.0006, 1.0005: 0.0}),
    ("gspo", -2.0, {0.9996: 0.0, 0.9998: -1.9996}),
    ("cispo", 2.0, {0.1: 0.2, 1.9: 3.8}),
    ("cispo", -2.0, {0.1: -0.2, 1.9: -3.8}),
    ("masked", -2.0, {0.9: -1.8, 1.9: -3.8}),
])
def test_what_the_figure_shows(loss, A, expected):
    found = {}
    for rho, push in losses_figure.pushes(loss, A):
        found[round(rho, 4)] = push
    for rho, push in expected.items():
        assert found[rho] == pytest.approx(push, abs=1e-9), rho


def test_in_the_figure_a_drifted_failure_pushes_nothing_and_corners_are_enough():
    drifted_far = losses_figure.pushes("masked", -1.0, drifted=True)
    assert {push for _, push in drifted_far} == {0.0}

    points = losses_figure.pushes("grpo", 1.0)
    found = losses_figure.corners(points)
    assert len(found) == 4
    assert found[0] == points[0]
    assert found[-1] == points[-1]
    assert [rho for rho, _ in found[1:3]] == pytest.approx([1.2, 1.2001])


if __name__ == "__main__":
    on_ranks(*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # as run.command_line ends a rank


def test_each_step_is_refilled_with_tasks_in_an_order_of_its_own(chat, monkeypatch):
    """Else a few tasks would be played again and again."""
    monkeypatch.setattr(mgrpo, "task_batch", lambda tasks, step, cfg: tasks[:2])
    cfg = losses.Config(batch=2, G=2, refill=1)
    method = method_of(chat, None, cfg, Method=losses.Losses)
    orders = set()
    for step in range(6):
        assert method.choose_tasks(TASKS, step) == TASKS[:2]
        orders.add(tuple(task["task_id"] for task in method.spare))
    assert len(orders) > 3
