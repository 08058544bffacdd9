"""forks/losses.py: each loss against slow loops in float64, packed, on one and two ranks; and its figure."""
import math
import os
import statistics
import sys

import pytest
import torch
from conftest import ROOT, tiny_model
from test_forks import float64, hard_and_easy, pointing  # noqa: F401 (two fixtures)
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
REWARDS = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0]]


def four_groups(chat):
    """Episodes of 1 to 4 turns, with one to six tokens each. The third group teaches nothing."""
    return [[trajectory(chat, r, [1 + (3 * k + 2 * i + j) % 6 for j in range(1 + (i + k) % 4)], 10 * k + i, member=i)
             for i, r in enumerate(rewards)] for k, rewards in enumerate(REWARDS)]


def written_out(name, logp, logp_old, logp_ref, rewards, cfg):
    """A loss as its paper prints it, one token at a time: logp[k][i][j][t] is a scalar tensor.

    k: groups that train, i: episodes, j: responses, t: tokens. The numbers are the papers', not the code's.
    """
    n_tokens = sum(len(response) for group in logp for episode in group for response in episode)
    total = 0.0
    for k, group in enumerate(logp):
        r, G = rewards[k], len(group)
        mean = sum(r) / G
        for i, episode in enumerate(group):
            if name == "dr_grpo":
                A = r[i] - mean
            elif name == "maxrl":
                A = (r[i] - mean) / mean
            else:
                A = (r[i] - mean) / statistics.stdev(r)
            for j, response in enumerate(episode):
                log_ratios = [new - old for new, old in zip(response, logp_old[k][i][j], strict=True)]
                s = (sum(log_ratios) / len(response)).exp()
                drift = -sum(x.item() for x in log_ratios) / len(response)
                kl, J = [], []
                for t, new in enumerate(response):
                    d = logp_ref[k][i][j][t] - new
                    kl.append(d.exp() - d - 1)
                    rho = log_ratios[t].exp()
                    if name == "cispo":
                        J.append(min(rho.item(), 5.0) * A * new)
                    elif name == "masked" and A < 0 and drift > 0.5:
                        J.append(0 * new)
                    elif name != "gspo":
                        high = 1.28 if name == "dapo" else 1.2
                        J.append(min(rho * A, rho.clamp(0.8, high) * A))
                sum_of_J, sum_of_kl = sum(J), sum(kl)
                if name == "gspo":  # one term a response
                    sum_of_J = len(response) * min(s * A, s.clamp(1 - 3e-4, 1 + 4e-4) * A)
                if name == "dr_grpo":
                    weight = 1 / (len(logp) * G * cfg.max_turns * cfg.max_new_tokens)
                elif name == "gspo":
                    weight = 1 / (len(logp) * G * len(episode) * len(response))
                else:  # dapo's and cispo's own, and the default of the others
                    weight = 1 / n_tokens
                total = total + weight * (sum_of_J - cfg.beta * sum_of_kl)
    return -total


def nested(flat, kept):
    """(N,) -> [k][i][j][t], in the order of the rows."""
    parts = iter(flat.split([len(turn.action_ids) for group in kept for tau in group for turn in tau.turns]))
    return [[[next(parts).unbind() for _ in tau.turns] for tau in group] for group in kept]


def drifted(sizes, on_policy, seed=0):
    """(N,): log rho. Of five responses one hardly moved, one reached DAPO's bound, others fell, rose, or spread."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for number, n in enumerate(sizes):
        scale, shift = [(1e-4, 0.0), (0.06, 0.21), (1.5, -1.0), (0.6, 1.0), (0.4, 0.0)][number % 5]
        out.append(shift + scale * torch.randn(n, generator=g, dtype=torch.float64))
    return torch.cat(out) * (0.0 if on_policy else 1.0)


def pieces(chat, name, on_policy, **changes):
    """A method, its rows of four_groups, and log-probs: (method, groups that train, rows, new, old, ref), each (N,)."""
    cfg = losses.Config(loss=name, G=4, beta=0.1, **changes)
    method = method_of(chat, None, cfg, Method=losses.Losses)
    episodes = four_groups(chat)
    rows, metrics = method.learn_from([tau for group in episodes for tau in group], 0)
    assert metrics["groups_kept"] == 3
    kept = [group for group, rewards in zip(episodes, REWARDS) if len(set(rewards)) > 1]
    old = torch.tensor([logp for row in rows for logp in row.logps], dtype=torch.float64)
    new = old + drifted([row.n_action for row in rows], on_policy)
    ref = old + 0.3 * torch.randn(len(old), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return method, kept, rows, new.requires_grad_(), old, ref


@pytest.mark.parametrize("on_policy", [False, True], ids=["off-policy", "on-policy"])
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_are_those_of_the_formula(chat, float64, name, on_policy):  # noqa: F811
    """float64, 1e-10, groups of one and of three successes, responses within and beyond every clip range."""
    method, kept, rows, new, old, ref = pieces(chat, name, on_policy)
    loss, metrics = method.loss(rows, new, ref, None)
    rewards = [[tau.reward for tau in group] for group in kept]
    expected = written_out(name, *(nested(x, kept) for x in (new, old, ref)), rewards, method.cfg)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    found, wanted = (torch.autograd.grad(value, new)[0] for value in (loss, expected))
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)
    k3 = [math.exp(d) - d - 1 for d in (ref - new).tolist()]
    assert metrics["kl"] == pytest.approx(sum(k3), rel=1e-9)
    if on_policy or name == "cispo":
        assert metrics["clip_frac"] == 0
    else:
        assert 0.1 < metrics["clip_frac"] / len(new) < 0.9


def test_the_first_one_is_mgrpos_own(chat, float64):  # noqa: F811
    """--loss grpo: the same rows, loss, gradient and metrics to the last bit, under any --loss-norm and --eps."""
    for changes in ({}, {"loss_norm": "paper"}, {"eps": 0.05, "loss_norm": "constant"}):
        method, _, rows, new, _, ref = pieces(chat, "grpo", on_policy=False, **changes)
        plain = method_of(chat, None, mgrpo.Config(G=4, beta=0.1, **changes))
        its_rows, _ = plain.learn_from([tau for group in four_groups(chat) for tau in group], 0)
        assert [(row.advantage, row.weight) for row in rows] == [(row.advantage, row.weight) for row in its_rows]
        (loss, metrics), (its_loss, its_metrics) = (one.loss(rows, new, ref, None) for one in (method, plain))
        assert loss == its_loss and metrics == its_metrics and metrics["clip_frac"] > 0
        assert torch.equal(*(torch.autograd.grad(value, new)[0] for value in (loss, its_loss)))


@pytest.mark.parametrize("name", NAMES)
def test_on_the_policy_that_sampled_every_loss_pushes_by_the_advantage(chat, float64, name):  # noqa: F811
    method, _, rows, new, old, _ = pieces(chat, name, on_policy=True)
    A_N = mgrpo.per_token([row.advantage for row in rows], rows, "cpu")
    tokens = losses.Tokens(new, old, A_N, [row.n_action for row in rows])
    torch.testing.assert_close(losses.push(method.J, tokens, method.cfg), A_N, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["dapo", "cispo", "masked", "gspo"])
def test_with_one_update_a_batch_these_four_train_as_grpo_does(chat, float64, name):  # noqa: F811
    """Equal gradients at rho = 1, given GRPO's weights; off-policy they part."""
    for on_policy in (True, False):
        norm = {"gspo": "paper"}.get(name, "token")
        gradients = []
        for loss_name in (name, "grpo"):
            method, _, rows, new, _, ref = pieces(chat, loss_name, on_policy, loss_norm=norm)
            gradients.append(torch.autograd.grad(method.loss(rows, new, ref, None)[0], new)[0])
        assert torch.allclose(*gradients, atol=1e-12, rtol=0) == on_policy


def test_advantages_by_hand(chat):
    """One success of four: 1.5, 0.75 and 3. Three of four: what each failure pushes."""
    for name, success, failure in (("grpo", 1.5, -1.5), ("dr_grpo", 0.75, -0.75), ("maxrl", 3.0, -1.0)):
        method = method_of(chat, None, losses.Config(loss=name, G=4), Method=losses.Losses)
        one, three, equal, _ = four_groups(chat)
        assert [tau.advantage for tau in method.advantages(one)][:1] == pytest.approx([success])
        assert [tau.advantage for tau in method.advantages(three)][-1:] == pytest.approx([failure])
        assert method.advantages(equal) == []
        one[2].status = "env_error"  # 1 of 3 valid ones
        assert sum(tau.advantage for tau in method.advantages(one)) == pytest.approx(0)
        assert len(method.advantages(one)) == 3


def test_a_drifted_failure_stops_as_a_whole_and_nothing_else_does(chat, float64):  # noqa: F811
    """Its second token has become likelier, so GRPO's clip leaves it. A success that drifted as far goes on."""
    log_rho = torch.tensor([-3.0, 0.5, -3.0, 0.5, -0.1, 0.1])
    A = torch.tensor([-1.0, -1.0, 1.0, 1.0, -1.0, -1.0])
    tokens = losses.Tokens(log_rho, torch.zeros(6), A, [2, 2, 2])
    for name, stopped in (("grpo", [True, False, False, True, False, False]),
                          ("masked", [True, True, False, True, False, False])):
        cfg = losses.own_settings(losses.Config(loss=name))
        assert (losses.push(losses.LOSSES[name][1], tokens, cfg) == 0).tolist() == stopped
    gentle = losses.own_settings(losses.Config(loss="masked", delta=1.3))  # the drift is 1.25
    assert losses.push(losses.masked, tokens, gentle)[1] != 0


@pytest.mark.parametrize("name", NAMES)
def test_the_update_is_that_of_each_response_alone(chat, name):
    """A whole step through the model, packed under any budget, off-policy: float32, 1e-5."""
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    episodes = four_groups(chat)
    noise = drifted([len(turn.action_ids) for group in episodes for tau in group for turn in tau.turns], False).float()
    noise = iter(noise.split([len(turn.action_ids) for group in episodes for tau in group for turn in tau.turns]))
    for tau in (tau for group in episodes for tau in group):
        for turn, row in zip(tau.turns, trajectory_rows(chat, tau)):
            turn.logps = (logprobs(model, row) - next(noise)).tolist()
    cfg = losses.Config(loss=name, G=4, clip=1e9, temperature=1.0)
    kept = [group for group, rewards in zip(episodes, REWARDS) if len(set(rewards)) > 1]
    alone = [[[logprobs(model, row).unbind() for row in trajectory_rows(chat, tau)] for tau in group] for group in kept]
    old = [[[torch.tensor(turn.logps).unbind() for turn in tau.turns] for tau in group] for group in kept]
    ref = [[[[x.detach() for x in response] for response in tau] for tau in group] for group in alone]
    expected = written_out(name, alone, old, ref, [[tau.reward for tau in group] for group in kept], cfg)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    for budget in (1, 300, 10**6):
        grads = {}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer.step = lambda: grads.update({n: p.grad.clone() for n, p in model.named_parameters()})
        cfg = losses.Config(loss=name, G=4, clip=1e9, temperature=1.0, max_tokens=budget)
        method = method_of(chat, model, cfg, optimizer, Method=losses.Losses)
        rows, _ = method.learn_from([tau for group in episodes for tau in group], 0)
        metrics = mgrpo.update(method, rows)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
        assert metrics["logp_gap"] > 0.1 and (metrics["clip_frac"] > 0) == (name != "cispo")
        for (parameter, _), gradient in zip(model.named_parameters(), wanted):
            torch.testing.assert_close(grads[parameter], gradient, atol=1e-5, rtol=1e-3, msg=f"{parameter}, {budget}")


# ---------------------------------------------------------------------------------------- refilled groups


def chance(chat, teaches):
    """A stand-in for rollout: tasks for which teaches(task_id) holds earn mixed rewards; `played` lists all."""
    played = []

    async def rollout(model, chat_, tasks, *, group, seed, **_):
        played.extend(task["task_id"] for task in tasks)
        return [trajectory(chat, float(i == 0 or not teaches(task["task_id"])), [2 + i], seed=task["task_id"], member=i)
                for task in tasks for i in range(group)]
    return rollout, played


def refilled(chat, monkeypatch, teaches, **changes):
    """(groups that train, tasks in the order in which they were played) of a step on TASKS, six of ten a batch."""
    rollout, played = chance(chat, teaches)
    monkeypatch.setattr(mgrpo, "rollout", rollout)
    cfg = losses.Config(**dict(loss="dapo", batch=6, G=2) | changes)
    method = method_of(chat, None, cfg, Method=losses.Losses)
    episodes = method.collect(method.choose_tasks(TASKS, 0), Environment({}, "", cfg), 0)
    assert len(episodes) == 2 * len(played)
    return method.learn_from(episodes, 0)[1]["groups_kept"], played


def test_other_tasks_take_the_place_of_groups_that_teach_nothing(chat, monkeypatch):
    even = lambda i: i % 2 == 0
    before, first = refilled(chat, monkeypatch, even)
    assert len(first) == 6 and before == sum(map(even, first)) < 5
    once, played = refilled(chat, monkeypatch, even, refill=1)
    assert played[:6] == first and len(played) == 6 + (6 - before) and once == sum(map(even, played))
    many, played = refilled(chat, monkeypatch, even, refill=9)
    assert len(set(played)) == len(played) <= 10 and many == min(6, 5)  # there are but five such tasks
    assert sorted(played) == list(range(10))
    assert refilled(chat, monkeypatch, even, refill=9) == (many, played)  # the seed decides


def test_a_full_batch_is_not_refilled(chat, monkeypatch):
    kept, played = refilled(chat, monkeypatch, lambda i: True, refill=9)
    assert kept == len(played) == 6
    kept, played = refilled(chat, monkeypatch, lambda i: i < 8, refill=9)
    assert kept == 6 and len(played) <= 8  # never more groups than a batch has


# --------------------------------------------------------------------------------------------- two ranks


def on_ranks(checkpoint, out):
    """Three updates with every loss on ragged groups of unequal number; then a batch that is refilled."""
    torch.set_num_threads(1)
    device, chat = init_dist(), Chat(load_tokenizer(checkpoint), "You browse the web.")
    results = {}
    for name in NAMES:
        model = shard(tiny_model(vocab_size=chat.tokenizer.get_vocab_size()))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
        cfg = losses.Config(loss=name, G=3, max_tokens=300, clip=1e9)
        method = losses.Losses(cfg, chat, model, None, optimizer, device)
        episodes = [tau for group in groups(chat, 0)[rank()::world_size()] for tau in group]
        for tau in episodes:
            for turn in tau.turns:
                turn.logps = None  # the first update's own: it is on-policy
        rows, _ = method.learn_from(episodes, 0)
        metrics = [mgrpo.update(method, rows) for _ in range(3)]
        results[name] = {"metrics": metrics, "state": full_state(model)}
    mgrpo.rollout, _ = chance(chat, lambda i: i % 2 == 0)
    method = losses.Losses(losses.Config(loss="dapo", batch=6, G=2, refill=9), chat, None, None, None, device)
    episodes = method.collect(method.choose_tasks(TASKS, 0), Environment({}, "", method.cfg), 0)
    kept = method.learn_from(episodes, 0)[1]["groups_kept"]
    seeds = runs.gather([tau.turns[0].action_ids for tau in episodes])
    if rank() == 0:
        torch.save(results | {"refilled": (kept, sorted(seeds))}, out)


def test_two_ranks_make_the_steps_that_one_rank_makes(checkpoint, tmp_path, monkeypatch):
    """With every loss, on- and off-policy; a refilled batch holds the same episodes."""
    done = script("tests/test_forks_losses.py", "ranks", checkpoint, tmp_path / "2.pt", ranks=2)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(mgrpo, "rollout", None)  # on_ranks sets it; this takes it back
    on_ranks(checkpoint, tmp_path / "1.pt")
    one, two = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in (1, 2))
    assert one["refilled"] == two["refilled"] and one["refilled"][0] == 5
    for name in NAMES:
        for a, b in zip(one[name]["metrics"], two[name]["metrics"], strict=True):
            for key in ("loss", "grad_norm", "kl", "logp_gap", "entropy", "clip_frac"):
                assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-7), f"{name} {key}"
        for parameter, weight in one[name]["state"].items():
            torch.testing.assert_close(two[name]["state"][parameter], weight, atol=1e-6, rtol=1e-5, msg=name)
        last = one[name]["metrics"][-1]
        assert last["logp_gap"] > 1e-3 and (last["clip_frac"] > 0) == (name != "cispo"), name


# -------------------------------------------------------------------------------------------- the script


def parse(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["losses.py", *map(str, arguments)])
    return runs.parse_args(losses.Config, losses.__doc__, {"paper": mgrpo.PAPER | {"eps": None}}, "")


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
    for name, high in (("dapo", 0.28), ("gspo", 4e-4), ("cispo", 4.0)):  # a bound of its own stays
        assert settings("--loss", name, "--eps", "0.1")[:2] == (0.1, high)
    assert settings("--loss", "gspo", "--eps-high", "0.01") == (3e-4, 0.01, "paper")
    assert settings("--loss", "dr_grpo", "--loss-norm", "paper") == (0.2, 0.2, "constant")


def test_an_unknown_loss_is_one_sentence(chat):
    with pytest.raises(ValueError, match="--loss ppo: use one of grpo, dr_grpo") as refused:
        method_of(chat, None, losses.Config(loss="ppo"), Method=losses.Losses)
    assert "\n" not in str(refused.value)


def test_help_names_the_flags_and_the_formulas(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse(monkeypatch, "--help")
    said = capsys.readouterr().out
    for flag in ("--loss ", "--eps-high", "--delta", "--refill", "--updates-per-batch"):
        assert flag in said
    assert all(name in said for name in NAMES) and "min(s A, clip(s, 0.9997, 1.0004) A)" in said


@pytest.fixture
def play(checkpoint, monkeypatch, tmp_path):
    """play(rollout, out, **changes): the loop without a browser; the lines of metrics.jsonl."""
    without_browser(monkeypatch)

    def play(rollout, out, **changes):
        monkeypatch.setattr(mgrpo, "rollout", rollout)
        cfg = losses.Config(**dict(model=str(checkpoint), out=str(tmp_path / out), steps=4, batch=4, G=3, lr=1e-2,
                                   warmup=0.5, refill=1) | changes)
        try:
            mgrpo.main(cfg, losses.Losses)
        except KeyboardInterrupt:
            pass
        return read(tmp_path / out / "metrics.jsonl")
    return play


@pytest.mark.parametrize("name", ["cispo", "masked"])
def test_an_interrupted_run_continues_as_if_nothing_had_happened(chat, play, tmp_path, name):
    """Bit for bit, refilled groups included; its config.json says what was clipped."""
    async def interrupted(*args, seed, **kwargs):
        if seed == "0/2":
            raise KeyboardInterrupt
        return await hard_and_easy(chat)(*args, seed=seed, **kwargs)
    whole = play(hard_and_easy(chat), "whole", loss=name)
    assert len(play(interrupted, "parts", loss=name)) == 2
    parts = play(hard_and_easy(chat), "parts", loss=name)
    timeless = lambda lines: [{k: v for k, v in line.items() if "second" not in k} for line in lines]
    assert timeless(parts) == timeless(whole) and all(line["groups_kept"] for line in whole)
    a, b = (load(tmp_path / out).state_dict() for out in ("whole", "parts"))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert '"eps_high": %s' % {"cispo": 4.0, "masked": 0.2}[name] in (tmp_path / "parts/config.json").read_text()
    with pytest.raises(ValueError, match="holds a run with .*loss '"):
        play(hard_and_easy(chat), "parts", loss="grpo")


@pytest.mark.slow
def test_the_script_runs_logs_and_saves_and_two_ranks_do_what_one_does(pointing, sandbox_sites, monkeypatch,  # noqa: F811
                                                                       tmp_path):
    """Two steps in the browser: on one rank in this process, on two as a user starts them."""
    found = []
    for variable, address in sandbox_sites.items():
        monkeypatch.setenv(variable, address)
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        arguments = ["--loss", "gspo", "--model", ROOT / "worlds/base", "--tasks", pointing, "--out", out, "--steps", 2,
                     "--batch", 3, "--G", 2, "--max-turns", 2, "--max-new-tokens", 24, "--concurrency", 1, "--lr", 5e-5,
                     "--refill", 1]
        if ranks == 1:
            mgrpo.main(parse(monkeypatch, *arguments), losses.Losses)
        else:
            done = script("forks/losses.py", *arguments, ranks=2, env=ENV | sandbox_sites)
            assert done.returncode == 0, done.stderr
        found.append(read(out / "metrics.jsonl"))
        assert [line["step"] for line in found[-1]] == [0, 1]
        assert set(load(out).state_dict()) == set(load(ROOT / "worlds/base").state_dict())
        assert (out / "report.html").exists() and len(read(out / "trajectories.jsonl")) >= 12
    for one, two in zip(*found, strict=True):
        assert set(METRICS) <= set(one)
        for key in ("success_rate", "loss", "grad_norm", "entropy", "groups_kept"):
            # None in both where all groups of a step have equal rewards
            assert one[key] == two[key] or one[key] == pytest.approx(two[key], rel=1e-3, abs=1e-6), key
        # Each rank writes the system prompt, and what else its episodes share; on one rank, more of them share.
        assert one["tokens_trained"] <= two["tokens_trained"] <= 1.2 * one["tokens_trained"]
        assert (one["logp_gap"] or 0) < 1e-3
    assert any(line["grad_norm"] for line in found[0])


# -------------------------------------------------------------------------------------------- the figure


def test_the_figure_is_drawn_from_the_functions_of_the_page(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["losses_figure.py", "--out", str(tmp_path / "losses.svg")])
    losses_figure.main()
    assert (tmp_path / "losses.svg").read_text() == (ROOT / "assets/losses.svg").read_text()
    assert set(losses_figure.PANELS) == set(NAMES)


@pytest.mark.parametrize("loss, A, expected", [
    ("grpo", 2.0, {0.5: 1.0, 1.1: 2.2, 1.3: 0.0}), ("grpo", -2.0, {0.7: 0.0, 0.9: -1.8, 1.9: -3.8}),
    ("dapo", 2.0, {1.27: 2.54, 1.29: 0.0}), ("dapo", -2.0, {0.79: 0.0, 0.81: -1.62}),
    ("gspo", 2.0, {0.9: 1.8, 1.0003: 2.0006, 1.0005: 0.0}), ("gspo", -2.0, {0.9996: 0.0, 0.9998: -1.9996}),
    ("cispo", 2.0, {0.1: 0.2, 1.9: 3.8}), ("cispo", -2.0, {0.1: -0.2, 1.9: -3.8}),
    ("masked", -2.0, {0.9: -1.8, 1.9: -3.8})])
def test_what_the_figure_shows(loss, A, expected):
    found = {round(rho, 4): push for rho, push in losses_figure.pushes(loss, A)}
    for rho, push in expected.items():
        assert found[rho] == pytest.approx(push, abs=1e-9), rho


def test_in_the_figure_a_drifted_failure_pushes_nothing_and_corners_are_enough():
    assert {push for _, push in losses_figure.pushes("masked", -1.0, drifted=True)} == {0.0}
    points = losses_figure.pushes("grpo", 1.0)
    found = losses_figure.corners(points)
    assert len(found) == 4 and found[0] == points[0] and found[-1] == points[-1]
    assert [rho for rho, _ in found[1:3]] == pytest.approx([1.2, 1.2001])


if __name__ == "__main__":
    on_ranks(*sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # as run.command_line ends a rank
