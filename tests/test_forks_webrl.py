"""forks/webrl.py and forks/tsr.py against slow, obvious versions; tests/tools/table.py on made-up figures."""
import asyncio
import contextlib
import itertools
import json
import math
import random
import re
import subprocess
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import table
import torch
from conftest import ROOT, tiny_model
from test_mgrpo import (even_tasks_teach, logprobs, method_of, ragged_groups, trajectory,
                        without_browser)
from test_scripts import ENV, SMALL, one_by_one, outcome, read, script  # noqa: F401 (a fixture)

import mgrpo
from compress import open_chat, trajectory_rows
from evaluate import Environment
from forks import digirl, shared, tsr, webrl
from model import generate, load
from worlds import load_tasks


# ------------------------------------------------------------------------------------------ WebRL


def webrl_of(chat, model, cfg, optimizer=None):
    """WebRL whose frozen clone is the model itself; no heads without an optimizer."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    return method_of(chat, model, cfg, optimizer, model, webrl.WebRL)


def square(logp, logp_ref, A, weight, beta):
    """WebRL's loss as printed, one response and one token at a time: logp[j][t] is a scalar."""
    total = 0.0
    for new, old, A_j, weight_j in zip(logp, logp_ref, A, weight):
        ratio = 0.0
        for one, other in zip(new, old):
            ratio = ratio + one - other
        total = total + weight_j * (beta * ratio - A_j) * (beta * ratio - A_j)
    return total


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_the_loss_is_the_papers_square(beta):
    """float64, 1e-10, value and gradient, on responses of 1 to 8 tokens."""
    g = torch.Generator().manual_seed(0)
    sizes = [1, 8, 3, 5]
    new = -2 * torch.rand(sum(sizes), generator=g, dtype=torch.float64)
    old = -2 * torch.rand(sum(sizes), generator=g).double()  # rows hold float32
    new.requires_grad_()
    A, weight = [0.7, -1.0, 0.2, -0.4], [0.1, 0.4, 0.3, 0.2]
    batch = [webrl.Row([], n, w, a, logps.tolist())
             for n, w, a, logps in zip(sizes, weight, A, old.split(sizes))]
    nested = lambda flat: [part.unbind() for part in flat.split(sizes)]
    loss, metrics = webrl.squared_loss(batch, new, beta)
    expected = square(nested(new), nested(old), A, weight, beta)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    gradient, expected_gradient = (torch.autograd.grad(value, new)[0] for value in (loss, expected))
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-10, rtol=0)
    kl = sum(math.exp(b - a) - (b - a) - 1 for a, b in zip(new.tolist(), old.tolist()))
    assert metrics["kl"] == pytest.approx(kl)


def test_an_update_has_the_gradient_of_the_square(chat):
    """Packed, under any micro-batch budget, against one response at a time: float32, 1e-5."""
    episodes = [tau for group in ragged_groups(chat) for tau in group]
    rows = shared.response_rows(chat, episodes)
    g = torch.Generator().manual_seed(1)
    for row in rows:
        row.advantage, row.weight = torch.rand(1, generator=g).item() * 2 - 1, 1 / len(rows)
    make = lambda: tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    model, cfg = make(), webrl.Config(beta=0.3, clip=1e9, temperature=1.0)
    logp = [logprobs(model, row) for row in rows]
    expected = square(logp, [torch.tensor(row.turn.logps) for row in rows],
                      [row.advantage for row in rows], [row.weight for row in rows], 0.3)
    expected.backward()
    for budget in (1, 700, 10**6):
        other, grads = make(), {}
        optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
        optimizer.step = lambda: grads.update({k: p.grad.clone() for k, p in other.named_parameters()})
        cfg.max_tokens = budget
        metrics = mgrpo.update(webrl_of(chat, other, cfg, optimizer), rows)
        assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, atol=1e-4, rtol=1e-4)


def test_the_advantage_mixes_the_outcome_and_the_change_in_v():
    """Three episodes of 3, 1 and 2 turns, one after the other."""
    V, lengths, r = [0.2, 0.5, 0.6, 0.9, 0.3, 0.1], [3, 1, 2], [1.0, 0.0, 1.0]
    expected, start = [], 0
    for n, r_i in zip(lengths, r):
        own = V[start:start + n]
        for j in range(n):
            later = own[j + 1] if j + 1 < n else r_i
            expected.append(0.3 * (later - own[j]) + 0.7 * (r_i - own[j]))
        start += n
    last = torch.tensor([False, False, True, True, False, True])
    found = webrl.advantages(torch.tensor([1.0, 1, 1, 0, 1, 1]), torch.tensor(V), last, 0.3)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def cross_entropy(p, r):
    """Of chances p for outcomes r, one episode at a time."""
    total = 0.0
    for p_i, r_i in zip(p, r):
        total -= r_i * math.log(p_i) + (1 - r_i) * math.log(1 - p_i)
    return total / len(r)


def test_the_outcome_model_minimizes_the_cross_entropy_of_the_judges_rewards(chat):
    """Its loss against a loop, and its step against finite differences, both in float64."""
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    method = webrl_of(chat, model, webrl.Config(head_lr=0.1), optimizer)
    episodes = [tau for group in ragged_groups(chat) for tau in group]
    x = method.last_states(episodes)
    r = torch.tensor([tau.reward for tau in episodes])
    shared.fit(model, optimizer, "outcome", x, r, 3)  # away from a chance of 0.5
    head = model.heads["outcome"]
    before = [p.detach().clone().double() for p in head.parameters()]

    def loss(parameters):
        first, bias, last, offset = parameters
        hidden = torch.nn.functional.gelu(x.double() @ first.T + bias)
        return cross_entropy((hidden @ last.T + offset)[:, 0].sigmoid().tolist(), r.tolist())

    now, _ = shared.fit(model, optimizer, "outcome", x, r, 1)
    assert now == pytest.approx(loss(before), abs=1e-6)
    for k, (parameter, index) in enumerate(zip(head.parameters(), ((2, 3), (4,), (0, 5), (0,)))):
        moved = [[p.clone() for p in before] for _ in range(2)]
        moved[0][k][index] += 1e-5
        moved[1][k][index] -= 1e-5
        slope = (loss(moved[0]) - loss(moved[1])) / 2e-5
        step = (parameter[index] - before[k][index]).item()
        assert step == pytest.approx(-0.1 * slope, abs=1e-6)


def test_the_outcome_model_reads_the_end_of_an_episode_and_the_metrics_keep_the_judge(chat):
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    method = webrl_of(chat, model, webrl.Config())
    torch.nn.init.constant_(model.heads["outcome"][2].bias, 3.0)  # says yes to everything
    tau = trajectory(chat, 0.0, [3, 5])
    last = trajectory_rows(chat, tau)[-1]
    hidden = model(torch.tensor([last.ids]), head=lambda x_BTD: x_BTD)[0, -1]
    found = method.last_states([tau])
    torch.testing.assert_close(found[0], hidden, atol=1e-5, rtol=1e-5)
    copy, = method.rewarded([tau])
    assert (copy.reward, tau.reward, tau.success) == (1.0, 0.0, 0.0) and copy.turns is tau.turns
    assert webrl.verdict(tau.to_json(chat)) == 1.0
    assert tau.to_json(chat)["reward"] == tau.to_json(chat)["success"] == 0.0
    assert webrl.verdict(trajectory(chat, 1.0, [3]).to_json(chat)) == 1.0  # only judged


def test_a_rank_whose_episodes_all_broke_trains_on_nothing(chat, tmp_path):
    model = tiny_model(vocab_size=chat.tokenizer.get_vocab_size())
    method = webrl_of(chat, model, webrl.Config(out=str(tmp_path)), torch.optim.SGD(model.parameters(), lr=0.1))
    broken = [trajectory(chat, 0.0, lengths, status="env_error") for lengths in ([3, 2], [])]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    for step in (0, 3, 5):  # with the judge, when the outcome model takes its place, and after that
        rows, metrics = method.learn_from(broken, step)
        assert rows == [] and metrics["replayed"] == metrics["episodes_trained"] == 0
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_old_responses_train_if_they_are_neither_sure_nor_foreign(chat):
    """Against one response at a time. They are the model's likeliest, with all kinds of perplexities."""
    model, cfg = tiny_model(vocab_size=chat.tokenizer.get_vocab_size()), webrl.Config(max_tokens=700)
    with torch.no_grad():
        model.model.norm.weight.mul_(5)
    old = [row for group in ragged_groups(chat) for tau in group for row in trajectory_rows(chat, tau)]
    expected = []
    for row in old:
        context, n = row.ids[:-row.n_action], row.n_action
        row.ids = context + generate(model, context, n)[0]
        logp = logprobs(model, row, temperature=0.7).tolist()
        row.logps, likely = [], 1.0
        for one in logp:
            likely *= math.exp(one)
        if 1 / 0.99 < (1 / likely) ** (1 / n) < 2:
            expected.append((id(row), logp))
    kept = webrl_of(chat, model, cfg).familiar(old)
    assert [id(row) for row in kept] == [key for key, _ in expected]
    assert 5 < len(kept) < len(old) - 5 and cfg.sure == 0.99
    for row, (_, logp) in zip(kept, expected):
        assert row.logps == pytest.approx(logp, abs=1e-4)


def test_the_curriculum_draws_templates_that_fail_but_not_those_that_always_do(tmp_path):
    """Success of templates 0 to 3: never, a quarter, nine in ten, a quarter but by the judge alone."""
    tasks = [{"task_id": i, "intent_template_id": i % 4} for i in range(400)]
    cfg = webrl.Config(out=str(tmp_path), batch=40)
    passes = [lambda i: False, lambda i: i % 4 == 0, lambda i: i % 10 > 0, lambda i: i % 4 == 0]
    records = [{"split": "train", "status": "ok", "template": t, "success": float(passes[t](i)),
                "reward": float(passes[t](i)), "checks": [["x", True, ""]]} for t in range(4) for i in range(40)]
    for record in records[120:]:  # of template 3 the outcome model says that it always succeeds
        record["checks"].append([webrl.VERDICT, True, ""])
    records += [{"split": "train", "status": "env_error", "template": 0, "success": 0.0, "reward": 0.0, "checks": []}]
    # An evaluation into the same directory says the opposite of every template; it must not steer training.
    records += [{"split": "sandbox:test", "status": "ok", "template": t, "success": float(t == 0), "reward": float(t == 0),
                 "checks": []} for t in range(4) for _ in range(40)]
    (tmp_path / "trajectories.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    drawn = Counter()
    for step in range(20):
        batch = webrl.curriculum(tasks, step, cfg)
        assert len({task["task_id"] for task in batch}) == 40
        assert batch == webrl.curriculum(tasks, step, cfg)  # a function of step and records
        drawn.update(task["intent_template_id"] for task in batch)
    share = [drawn[t] / 800 for t in range(4)]
    weights = [0.1 * 21 / 22, 16 / 22, 0.1 * 3 / 22, 0.1 / 22]
    assert share == pytest.approx([w / sum(weights) for w in weights], abs=0.06)


def test_an_interrupted_run_continues_as_if_nothing_had_happened(chat, checkpoint, tmp_path, monkeypatch):
    """Bit for bit: the heads, what is replayed, and the curriculum, which the records decide."""
    without_browser(monkeypatch)
    monkeypatch.setattr(webrl, "FOREIGN", 0.0)  # to a random model everything is foreign

    def run(out, stop=None):
        async def rollout(*args, seed, **kwargs):
            if seed == stop:
                raise KeyboardInterrupt
            return await even_tasks_teach(chat)(*args, seed=seed, **kwargs)
        monkeypatch.setattr(mgrpo, "rollout", rollout)
        cfg = webrl.Config(model=str(checkpoint), out=str(tmp_path / out), steps=5, batch=6, G=2, lr=1e-2,
                           judged=2, past=8, save_every=2, sure=9.0)
        with contextlib.suppress(KeyboardInterrupt):
            mgrpo.main(cfg, webrl.WebRL)
        lines = read(tmp_path / out / "metrics.jsonl")
        return [{k: v for k, v in line.items() if "second" not in k} for line in lines]

    whole = run("whole")
    assert len(run("parts", "0/3")) == 3
    with open(tmp_path / "parts/trajectories.jsonl", "a") as file:  # an evaluation into the same directory
        for i in range(20):
            tested = trajectory(chat, 1.0, [4, 2], seed=99 + i, member=i)
            file.write(json.dumps(tested.to_json(chat, step=None, split="sandbox:test")) + "\n")
    assert run("parts") == whole and len(whole) == 5
    assert [("outcome_accuracy" in line, line["replayed"] > 0) for line in whole] == [
        (False, False), (False, True), *[(True, True)] * 3]
    a, b = (load(tmp_path / out).state_dict() for out in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_one_episode_a_task_is_enough(chat, checkpoint, tmp_path, monkeypatch):
    """mgrpo.py refuses --G 1, because there an episode is compared with its group."""
    without_browser(monkeypatch)
    monkeypatch.setattr(mgrpo, "rollout", even_tasks_teach(chat))
    mgrpo.main(webrl.Config(model=str(checkpoint), out=str(tmp_path / "x"), steps=1, batch=6, lr=1e-2), webrl.WebRL)
    line, = read(tmp_path / "x/metrics.jsonl")
    assert webrl.Config.G == 1 and line["episodes_trained"] == 6 and line["tokens_trained"] > 0 and line["grad_norm"] > 0


# -------------------------------------------------------------------------------------------- TSR

PAGE = "title: x\n<a>red lamp <5></a>\n<input>city <8> = rome</input>\n<select>size <7> = s (s | m)</select> 9"


def turn(observation=PAGE, action=""):
    return SimpleNamespace(observation=observation, action=action)


def click(element, name=""):
    named = f"# Element: {name}\n" if name else ""
    return f'<think>x</think><answer>{named}do(action="Click", element="{element}")</answer>'


def test_a_response_is_rated_by_whether_it_can_be_read_aims_at_something_and_is_new():
    clicked = "do(action='Click', element='5')"
    rate = lambda response, *earlier: tsr.rating(response, SimpleNamespace(turns=[*earlier, turn()]))
    for response in (click(5), click(5, "red lamp <5>"), click(8, "city <8>"), click(7), 'exit(message="x")',
                     "go_backward()", click(5, "red lamp")):
        assert rate(response) == rate(response, turn("another page", clicked)) == tsr.BEST, response
    for response in (click(4), click(9), click(5, "blue lamp <5>"), click(1), click(85)):
        assert rate(response) == tsr.BEST - 1, response
    assert rate(click(5), turn(action=clicked)) == tsr.BEST - 1
    for message in ("error: no effect", "note: the page showed an alert: hi", "error: x\nnote: y"):
        assert rate(click(5), turn(f"{message}\n{PAGE}", clicked)) == tsr.BEST - 1
    assert rate(click(5), turn(action="do(action='Click', element='8')")) == tsr.BEST
    assert rate("<answer>lamp</answer>") == rate(click(5)[:-9]) == 0


class Scripted:
    """`draw` that hands out responses (ids, logps, ended) one after the other."""

    def __init__(self, responses):
        self.left = list(responses)

    async def __call__(self):
        return self.left.pop(0)


def chosen(monkeypatch, ratings, likely=(), **config):
    """best_of on responses 0, 1, ...: (the one it chose, how many it drew)."""
    monkeypatch.setattr(tsr, "rating", lambda response, trajectory: ratings[int(response)])
    decode = SimpleNamespace(decode=lambda ids: str(ids[0]))
    draw = Scripted(([i], [likely[i] if likely else -1.0, -1.0], True) for i in range(len(ratings)))
    drawn = []
    found = asyncio.run(tsr.best_of(decode, tsr.Config(candidates=len(ratings), **config), drawn, None, draw))
    return found[0][0], drawn[0]


def test_the_best_rated_response_goes_on_and_the_first_among_equals(monkeypatch):
    choose = partial(chosen, monkeypatch)
    for ratings in itertools.product(range(4), repeat=4):
        best = max(ratings)
        drawn = ratings.index(3) + 1 if best == 3 else 4  # nothing beats 3, so the search ends there
        assert choose(ratings) == (ratings.index(best), drawn)
    assert choose([2, 3, 1, 3], [-1.0, -3.0, -0.1, -2.0], likeliest=True) == (3, 4)
    assert choose([0]) == (0, 1)


def test_search_draws_from_the_distribution_that_the_docstring_states(monkeypatch):
    """q = pi w, exactly: over all ways to draw three of five responses whose ratings are given."""
    pi, ratings, N = [0.3, 0.25, 0.2, 0.15, 0.1], [2, 3, 0, 2, 1], 3
    q = [0.0] * 5
    for draws in itertools.product(range(5), repeat=N):
        found, _ = chosen(monkeypatch, [ratings[i] for i in draws])
        q[draws[found]] += math.prod(pi[i] for i in draws)
    P = lambda test: sum(p for p, k in zip(pi, ratings) if test(k))
    for i, k in enumerate(ratings):
        w = (P(lambda s: s <= k) ** N - P(lambda s: s < k) ** N) / P(lambda s: s == k)
        assert q[i] == pytest.approx(pi[i] * w)


def test_what_trains_is_what_was_chosen_with_the_policys_log_probs(checkpoint, sandbox_sites, tmp_path,
                                                                   monkeypatch):
    """Real browser, engine and tiny model. Ratings are arbitrary, so later draws often win; float32, 1e-4."""
    rated = []

    def rating(response, trajectory):
        rated.append((id(trajectory), len(trajectory.turns), response,
                      random.Random(response).randrange(3)))
        return rated[-1][-1]

    monkeypatch.setattr(tsr, "rating", rating)
    cfg = tsr.Config(out=str(tmp_path), batch=2, G=2, max_turns=3, max_new_tokens=8, max_context=1200,
                     concurrency=4, candidates=3, timeout=20)
    sites = {"sandbox": sandbox_sites}
    tasks, model = load_tasks("sandbox:train:2", sites), load(checkpoint)
    policy = open_chat(checkpoint, mgrpo.actions_help())
    method = method_of(policy, model, cfg, Method=tsr.TSR)
    played = method.collect(tasks, Environment(sites, tmp_path, cfg), 0)
    later = 0
    for tau in played:
        for t, (turn, row) in enumerate(zip(tau.turns, trajectory_rows(policy, tau)), 1):
            of_turn = [entry for entry in rated if entry[:2] == (id(tau), t)]
            best = max(score for *_, score in of_turn)
            first = next(response for *_, response, score in of_turn if score == best)
            assert len(of_turn) == 3 and turn.response == first
            later += turn.response != of_turn[0][2]
            logp = logprobs(model, row, cfg.temperature)
            torch.testing.assert_close(logp, torch.tensor(turn.logps), atol=1e-4, rtol=0)
    assert len(played) == 4 and later >= 2
    _, metrics = method.learn_from(played, 0)  # no rating was the best, so every turn drew all it may
    assert (metrics["draws_per_turn"], metrics["turns_searched"]) == (3, 1)
    method.draws_per_turn = [1, 3, 2, 1]
    _, metrics = method.learn_from(played, 0)
    assert (metrics["draws_per_turn"], metrics["turns_searched"]) == (7 / 4, 1 / 2)


# ------------------------------------------------------------------------------------ the scripts


@pytest.mark.parametrize("fork, more", [("tsr", []), ("webrl", ["--judged", 1, "--past", 8])])
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_fork_runs_logs_saves_and_resumes(checkpoint, tmp_path, fork, more, ranks):
    run = lambda steps: script(f"forks/{fork}.py", "--model", checkpoint, "--out", tmp_path, "--steps",
                               steps, "--batch", 2, "--no-decay", "--warmup", 0, *SMALL, *more,
                               "--tasks", "sandbox:train:12", "--G", 2, ranks=ranks)
    for steps in (1, 2) if ranks else (2,):
        done = run(steps)
        assert done.returncode == 0, done.stderr
    assert f"from step {2 if ranks else 1} on" in done.stdout
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1] and load(tmp_path)
    assert len(read(tmp_path / "trajectories.jsonl")) == 8 and (tmp_path / "report.html").exists()
    if fork == "webrl":
        assert all(line["tokens_trained"] > 0 and line["logp_gap"] < 1e-4 for line in lines)
        assert "outcome_accuracy" in lines[1] and "outcome_accuracy" not in lines[0]
        assert "outcome model" in (tmp_path / "trajectories.jsonl").read_text()
    else:
        assert all(1 < line["draws_per_turn"] <= 8 and 0 < line["turns_searched"] <= 1 for line in lines)


@pytest.mark.slow
def test_a_search_continues_bit_for_bit(one_by_one, sandbox_sites, tmp_path):  # noqa: F811
    """More draws of one episode leave the others' random numbers as they were."""
    run = lambda out, steps: script("forks/tsr.py", *one_by_one, "--out", tmp_path / out, "--steps", steps,
                                    "--no-decay", "--warmup", 0, env=ENV | sandbox_sites)
    done = [run("whole", 4), run("parts", 1), run("parts", 4)]
    assert all(one.returncode == 0 for one in done), done[0].stderr
    assert "from step 2 on" in done[2].stdout and outcome(tmp_path / "whole") == outcome(tmp_path / "parts")
    lines = read(tmp_path / "whole/metrics.jsonl")
    assert all(line["draws_per_turn"] > 1 for line in lines)
    assert any(line["groups_kept"] for line in lines[1:])  # it went on learning


# ---------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("refused, culprit", [
    (lambda: method_of(None, None, tsr.Config(candidates=0), Method=tsr.TSR), "--candidates 0"),
    (lambda: method_of(None, None, digirl.Config(offline=4, steps=3), Method=digirl.DigiRL), "--offline 4"),
    (lambda: method_of(None, None, webrl.Config(beta=-1.0), Method=webrl.WebRL), "--beta")])
def test_settings_that_teach_nothing_are_refused(refused, culprit):
    with pytest.raises(ValueError, match=culprit):
        refused()


def test_the_table_shows_what_was_run_and_stays_empty_elsewhere(tmp_path, capsys, monkeypatch):
    figures = lambda rate: {"success_rate": rate, "ci95": [rate - 0.05, rate + 0.05]}
    for seed, methods in (("1", {"bc": 0.4, "r1": 0.5}), ("2", {"bc": 0.44})):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        for name, rate in methods.items():
            splits = {split: figures(rate) for split in table.SPLITS}
            (folder / f"{name}.json").write_text(json.dumps({"splits": splits}))
            (folder / f"{name}-cost.json").write_text('{"episodes": 2880, "minutes": 14.6}')
    monkeypatch.setattr("sys.argv", ["table.py", str(tmp_path)])
    table.main()
    shown = capsys.readouterr().out
    heads = shown.count("| method | seeds | unseen instances | unseen templates | log-out trap | ")
    assert heads == len(table.METHODS)
    both = "42.0 [16.6, 67.4]"  # t with one degree of freedom: 12.7 times 2.0
    assert f"| behavior cloning | 1, 2 | {both} | {both} | {both} | 14.6 | 2880 | 20.6 |" in shown
    one = "50.0 [45.0, 55.0]"
    assert f"| M-GRPO | 1 | {one} | {one} | {one} | 14.6 | 2880 | 44.8 |" in shown
    assert "| AWR |  |  |  |  |  |  | 28.5 |" in shown


def test_paired_differences_are_taken_within_a_seed(tmp_path, capsys, monkeypatch):
    """Three seeds whose levels differ by much and whose differences by little; two templates, one of which ties."""
    def figures(one, two):
        per_template = {f"{i} name": {"template": name, "success_rate": rate}
                        for i, (name, rate) in enumerate((("one", one), ("two", two)))}
        return {"success_rate": (one + two) / 2, "ci95": [0, 1], "per_template": per_template}

    for seed, level in (("1", 0.2), ("2", 0.5), ("3", 0.8)):
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        for name, less in (("r1", 0.0), ("bc", 0.1 + 0.02 * int(seed)), ("awr", 0.1)):
            if (name, seed) == ("awr", "3"):
                continue  # compared over the seeds that it has
            splits = {split: figures(level, level - less) for split in table.SPLITS}
            (folder / f"{name}.json").write_text(json.dumps({"splits": splits}))
            (folder / f"{name}-cost.json").write_text('{"episodes": 1, "minutes": 1}')
    monkeypatch.setattr("sys.argv", ["table.py", str(tmp_path), "--paired"])
    table.main()
    shown = capsys.readouterr().out
    # bc: -6, -7, -8 points in the seeds (t 4.303, s 1): 4.303 / sqrt(3) = 2.5 to each side; templates: 0 and -14.
    assert "| behavior cloning | 1, 2, 3 | -7.0 [-9.5, -4.5]; -7.0 [-95.9, 81.9] |" in shown
    assert "| AWR | 1, 2 | -5.0 [-5.0, -5.0]; -5.0 [-68.5, 58.5] |" in shown
    assert "| M-GRPO |" not in shown and "TSR" not in shown


def test_the_cost_of_a_run_counts_the_folders_in_it(tmp_path):
    run, sampled = tmp_path / "filtered", tmp_path / "filtered/sampled"
    sampled.mkdir(parents=True)
    (sampled / "trajectories.jsonl").write_text("{}\n" * 5)
    (sampled / "seconds").write_text("60\n")
    (run / "seconds").write_text("30\n")
    (run / "metrics.jsonl").write_text('{"loss": 1}\n' + '{"seconds_rollout": 20, "seconds_train": 10}\n' * 2)
    assert table.cost(run) == {"episodes": 5, "minutes": 2.5}


@pytest.mark.parametrize("target, shown", list(zip(["table", "experiments", "forks"], table.METHODS.values())))
def test_make_runs_everything_that_the_tables_show(target, shown):
    planned = subprocess.run(["make", "-n", target, "SEED=7"], capture_output=True, text=True, cwd=ROOT).stdout
    tested = dict(re.findall(r"--out runs/experiments/seed7/tests/([\w-]+) --tasks (\S+)", planned))
    assert tested.keys() >= shown.keys()
    for tasks in tested.values():
        assert set(tasks.split(",")) >= table.SPLITS.keys()
    for fork in re.findall(r"forks/\w+\.py", planned):
        assert (ROOT / fork).exists()
