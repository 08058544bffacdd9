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
from test_mgrpo import (
    even_tasks_teach,
    logprobs,
    method_of,
    ragged_groups,
    trajectory,
    without_browser,
)
from test_scripts import ENV, SMALL, one_by_one, outcome, read, script  # noqa: F401 (a fixture)

import mgrpo
from compress import open_chat, to_record, trajectory_rows
from evaluate import Environment
from forks import digirl, shared, tsr, webrl
from model import generate, load
from rollout import actions_help, parse
from worlds import load_tasks


# ------------------------------------------------------------------------------------------ WebRL


def webrl_of(chat, model, cfg, optimizer=None):
    """WebRL whose frozen clone is the model itself. Its heads need an optimizer, so there always is one."""
    if optimizer is None:
        optimizer = still(model)
    return method_of(chat, model, cfg, optimizer, reference=model, Method=webrl.WebRL)


def still(model):
    """An optimizer that leaves the policy where it is."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def model_of(chat):
    return tiny_model(vocab_size=chat.tokenizer.get_vocab_size())


def ragged_episodes(chat):
    """The episodes of ragged_groups, group after group."""
    episodes = []
    for group in ragged_groups(chat):
        episodes += group
    return episodes


def square(logp, logp_ref, A, weight, beta):
    """WebRL's loss as printed, one response and one token at a time: logp[j][t] is a scalar."""
    total = 0.0
    for new, old, A_j, weight_j in zip(logp, logp_ref, A, weight):
        ratio = 0.0
        for one, other in zip(new, old):
            ratio = ratio + one - other
        error = beta * ratio - A_j
        total = total + weight_j * error * error
    return total


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_the_loss_is_the_papers_square(beta):
    """float64, 1e-10, value and gradient, on responses of 1 to 8 tokens."""
    g = torch.Generator().manual_seed(0)
    sizes = [1, 8, 3, 5]
    n_tokens = sum(sizes)
    new = -2 * torch.rand(n_tokens, generator=g, dtype=torch.float64)
    old = -2 * torch.rand(n_tokens, generator=g).double()  # rows hold float32
    new.requires_grad_()
    A = [0.7, -1.0, 0.2, -0.4]
    weight = [0.1, 0.4, 0.3, 0.2]

    batch = []
    for n, w, a, logps in zip(sizes, weight, A, old.split(sizes)):
        row = webrl.Row([], n, w, a, logps.tolist())
        batch.append(row)

    def by_response(flat):
        return [part.unbind() for part in flat.split(sizes)]

    loss, metrics = webrl.squared_loss(batch, new, beta)
    expected = square(by_response(new), by_response(old), A, weight, beta)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)

    gradient, = torch.autograd.grad(loss, new)
    expected_gradient, = torch.autograd.grad(expected, new)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-10, rtol=0)

    kl = 0.0
    for a, b in zip(new.tolist(), old.tolist()):
        kl += math.exp(b - a) - (b - a) - 1
    assert metrics["kl"] == pytest.approx(kl)


def test_an_update_has_the_gradient_of_the_square(chat):
    """Packed, under any micro-batch budget, against one response at a time: float32, 1e-5."""
    rows = shared.response_rows(chat, ragged_episodes(chat))
    g = torch.Generator().manual_seed(1)
    for row in rows:
        row.advantage = torch.rand(1, generator=g).item() * 2 - 1
        row.weight = 1 / len(rows)

    # One response at a time.
    model = model_of(chat)
    cfg = webrl.Config(beta=0.3, max_grad_norm=1e9, temperature=1.0)
    logp = [logprobs(model, row) for row in rows]
    logp_ref = [torch.tensor(row.turn.logps) for row in rows]
    A = [row.advantage for row in rows]
    weight = [row.weight for row in rows]
    expected = square(logp, logp_ref, A, weight, 0.3)
    expected.backward()

    for budget in (1, 700, 10**6):
        other = model_of(chat)
        optimizer = still(other)
        grads = {}

        def keep_gradients():
            for name, parameter in other.named_parameters():
                grads[name] = parameter.grad.clone()
        optimizer.step = keep_gradients

        cfg.max_tokens = budget
        metrics = webrl_of(chat, other, cfg, optimizer).update(rows)

        assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, atol=1e-4, rtol=1e-4)


def test_the_advantage_mixes_the_outcome_and_the_change_in_v():
    """Three episodes of 3, 1 and 2 turns, one after the other."""
    V = [0.2, 0.5, 0.6, 0.9, 0.3, 0.1]
    lengths = [3, 1, 2]
    r = [1.0, 0.0, 1.0]

    expected = []
    start = 0
    for n, r_i in zip(lengths, r):
        own = V[start:start + n]
        start += n
        later = [*own[1:], r_i]  # V of the turn after
        for V_j, next_V in zip(own, later):
            A = 0.3 * (next_V - V_j) + 0.7 * (r_i - V_j)
            expected.append(A)

    r_R = torch.tensor([1.0, 1, 1, 0, 1, 1])
    last_R = torch.tensor([False, False, True, True, False, True])
    found = webrl.turn_advantages(r_R, torch.tensor(V), last_R, 0.3)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def cross_entropy(p, r):
    """Of chances p for outcomes r, one episode at a time."""
    total = 0.0
    for p_i, r_i in zip(p, r):
        total -= r_i * math.log(p_i) + (1 - r_i) * math.log(1 - p_i)
    return total / len(r)


def test_the_outcome_model_minimizes_the_cross_entropy_of_the_judges_rewards(chat):
    """Its loss against a loop, and its step against finite differences, both in float64."""
    model = model_of(chat)
    optimizer = still(model)
    method = webrl_of(chat, model, webrl.Config(head_lr=0.1), optimizer)
    episodes = ragged_episodes(chat)
    x = method.last_states(episodes)
    r = torch.tensor([tau.reward for tau in episodes])
    shared.fit(model, optimizer, "outcome", x, r, 3)  # away from a chance of 0.5
    head = model.fork_heads["outcome"]
    before = [p.detach().clone().double() for p in head.parameters()]

    def loss(parameters):
        first, bias, last, offset = parameters
        hidden = torch.nn.functional.gelu(x.double() @ first.T + bias)
        logits = (hidden @ last.T + offset)[:, 0]
        return cross_entropy(logits.sigmoid().tolist(), r.tolist())

    def loss_moved(k, index, distance):
        moved = [p.clone() for p in before]
        moved[k][index] += distance
        return loss(moved)

    now, _ = shared.fit(model, optimizer, "outcome", x, r, 1)
    assert now == pytest.approx(loss(before), abs=1e-6)

    # One entry of each parameter.
    entries = [(2, 3), (4,), (0, 5), (0,)]
    for k, parameter in enumerate(head.parameters()):
        index = entries[k]
        slope = (loss_moved(k, index, 1e-5) - loss_moved(k, index, -1e-5)) / 2e-5
        step = (parameter[index] - before[k][index]).item()
        assert step == pytest.approx(-0.1 * slope, abs=1e-6)


def test_the_outcome_model_reads_the_end_of_an_episode_and_the_metrics_keep_the_judge(chat):
    model = model_of(chat)
    method = webrl_of(chat, model, webrl.Config())
    torch.nn.init.constant_(model.fork_heads["outcome"][2].bias, 3.0)  # says yes to everything
    tau = trajectory(chat, 0.0, [3, 5])

    def identity(x_BTD):
        return x_BTD

    # The state after the last token of the last response.
    last = trajectory_rows(chat, tau)[-1]
    x_BTD = model(torch.tensor([last.ids]), head=identity)
    found = method.last_states([tau])
    torch.testing.assert_close(found[0], x_BTD[0, -1], atol=1e-5, rtol=1e-5)

    # The copy trains; the original keeps what the judge said.
    copy, = method.rewarded([tau])
    assert copy.reward == 1.0
    assert tau.reward == 0.0
    assert tau.success == 0.0
    assert copy.turns is tau.turns

    # The record holds both verdicts.
    record = to_record(tau, chat)
    assert webrl.verdict(record) == 1.0
    assert record["reward"] == 0.0
    assert record["success"] == 0.0
    only_judged = trajectory(chat, 1.0, [3])
    assert webrl.verdict(to_record(only_judged, chat)) == 1.0


def test_a_rank_whose_episodes_all_broke_trains_on_nothing(chat, tmp_path):
    model = model_of(chat)
    cfg = webrl.Config(out=str(tmp_path))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = webrl_of(chat, model, cfg, optimizer)
    broken = [
        trajectory(chat, 0.0, [3, 2], status="env_error"),
        trajectory(chat, 0.0, [], status="env_error"),
    ]
    judged = to_record(trajectory(chat, 0.0, [4, 2]), chat, step=0, split="train")  # of another rank
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(judged) + "\n")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}

    for step in (0, 3, 5):  # with the judge, when the outcome model takes its place, and after that
        rows, metrics = method.training_rows(broken, step)
        assert rows == []
        assert metrics["replayed"] == 0
        assert metrics["episodes_trained"] == 0

    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_old_responses_train_if_they_are_neither_sure_nor_foreign(chat):
    """Against one response at a time. They are the model's likeliest, with all kinds of perplexities."""
    model = model_of(chat)
    cfg = webrl.Config(max_tokens=700)
    with torch.no_grad():
        model.model.norm.weight.mul_(5)
    old = []
    for tau in ragged_episodes(chat):
        old += trajectory_rows(chat, tau)

    expected = []
    for row in old:
        n = row.n_action
        context = row.ids[:-n]
        likeliest = generate(model, context, n)[0]
        row.ids = context + likeliest
        row.logps = []  # `familiar` has to fill them in
        logp = logprobs(model, row, temperature=0.7).tolist()
        likely = 1.0
        for one in logp:
            likely *= math.exp(one)
        perplexity = (1 / likely) ** (1 / n)
        if 1 / 0.99 < perplexity < 2:
            expected.append((row, logp))
    kept = webrl_of(chat, model, cfg).familiar(old)

    assert [id(row) for row in kept] == [id(row) for row, _ in expected]
    assert 5 < len(kept) < len(old) - 5
    assert cfg.sure == 0.99
    for row, (_, logp) in zip(kept, expected):
        assert row.logps == pytest.approx(logp, abs=1e-4)


def passes(template, i):
    """What the judge says of episode i: of templates 0 to 3 never, a quarter, nine in ten, a quarter."""
    if template == 0:
        return False
    if template == 2:
        return i % 10 > 0
    return i % 4 == 0


def recorded(template, success, split="train", status="ok", checks=()):
    """A line of trajectories.jsonl, as far as the curriculum reads it."""
    return {
        "split": split,
        "status": status,
        "template": template,
        "success": float(success),
        "reward": float(success),
        "checks": list(checks),
    }


def test_the_curriculum_draws_templates_that_fail_but_not_those_that_always_do(tmp_path):
    """Success of templates 0 to 3: never, a quarter, nine in ten, a quarter but by the judge alone."""
    tasks = [{"task_id": i, "intent_template_id": i % 4} for i in range(400)]
    cfg = webrl.Config(out=str(tmp_path), batch=40)

    records = []
    for template in range(4):
        checks = [["x", True, ""]]
        if template == 3:  # the outcome model says that it always succeeds
            checks.append([webrl.VERDICT, True, ""])
        for i in range(40):
            records.append(recorded(template, passes(template, i), checks=checks))
    records.append(recorded(0, False, status="env_error"))
    # An evaluation into the same directory says the opposite of every template; it must not steer training.
    for template in range(4):
        tested = recorded(template, template == 0, split="sandbox:test")
        records += [tested] * 40
    lines = [json.dumps(record) + "\n" for record in records]
    (tmp_path / "trajectories.jsonl").write_text("".join(lines))

    drawn = Counter()
    for step in range(20):
        batch = webrl.curriculum(tasks, step, cfg)
        ids = {task["task_id"] for task in batch}
        assert len(ids) == 40
        assert batch == webrl.curriculum(tasks, step, cfg)  # a function of step and records
        drawn.update(task["intent_template_id"] for task in batch)

    # (failures of the last 20, plus 1) / 22; a tenth of that where nothing or nearly everything succeeds
    weights = [
        0.1 * 21 / 22,
        16 / 22,
        0.1 * 3 / 22,
        0.1 / 22,
    ]
    share = [drawn[template] / 800 for template in range(4)]
    expected = [weight / sum(weights) for weight in weights]
    assert share == pytest.approx(expected, abs=0.06)


def test_the_curriculum_tells_the_templates_of_two_sources_apart(tmp_path):
    """Two sources may number their templates alike. Template 0 always succeeds in the first and was never played in
    the second."""
    tasks = []
    for source in (None, 1):
        for i in range(100):
            tasks.append({"task_id": i, "intent_template_id": 0, "source": source})
    cfg = webrl.Config(out=str(tmp_path), batch=20)
    record = {**recorded(0, True), "source": None}
    (tmp_path / "trajectories.jsonl").write_text((json.dumps(record) + "\n") * 20)

    drawn = Counter()
    for step in range(20):
        drawn.update(task["source"] for task in webrl.curriculum(tasks, step, cfg))
    assert drawn[1] > 3 * drawn[None]  # the weights are 0.5 and 0.1 / 22


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

        cfg = webrl.Config(
            model=str(checkpoint),
            out=str(tmp_path / out),
            steps=5,
            batch=6,
            G=2,
            lr=1e-2,
            judged=2,
            past=8,
            save_every=2,
            sure=9.0,
        )
        with contextlib.suppress(KeyboardInterrupt):
            mgrpo.main(cfg, webrl.WebRL)

        timeless = []
        for line in read(tmp_path / out / "metrics.jsonl"):
            timeless.append({k: v for k, v in line.items() if "second" not in k})
        return timeless

    whole = run("whole")
    assert len(run("parts", stop="0/3")) == 3
    with open(tmp_path / "parts/trajectories.jsonl", "a") as file:  # an evaluation into the same directory
        for i in range(20):
            tested = trajectory(chat, 1.0, [4, 2], seed=99 + i, member=i)
            record = to_record(tested, chat, step=None, split="sandbox:test")
            file.write(json.dumps(record) + "\n")
    assert run("parts") == whole
    assert len(whole) == 5

    # The outcome model takes over in step 2; the first step has nothing to replay.
    modelled = ["outcome_accuracy" in line for line in whole]
    replays = [line["replayed"] > 0 for line in whole]
    assert modelled == [False, False, True, True, True]
    assert replays == [False, True, True, True, True]

    weights = load(tmp_path / "whole").state_dict()
    continued = load(tmp_path / "parts").state_dict()
    for name, weight in weights.items():
        assert torch.equal(weight, continued[name])


def test_one_episode_a_task_is_enough(chat, checkpoint, tmp_path, monkeypatch):
    """mgrpo.py refuses --G 1, because there an episode is compared with its group."""
    without_browser(monkeypatch)
    monkeypatch.setattr(mgrpo, "rollout", even_tasks_teach(chat))
    out = tmp_path / "x"
    cfg = webrl.Config(model=str(checkpoint), out=str(out), steps=1, batch=6, lr=1e-2)

    mgrpo.main(cfg, webrl.WebRL)

    line, = read(out / "metrics.jsonl")
    assert webrl.Config.G == 1
    assert line["episodes_trained"] == 6
    assert line["tokens_packed"] > 0
    assert line["grad_norm"] > 0


# -------------------------------------------------------------------------------------------- TSR

PAGE = "title: x\n<a>red lamp <5></a>\n<input>city <8> = rome</input>\n<select>size <7> = s (s | m)</select> 9"


def turn(observation=PAGE, action=""):
    return SimpleNamespace(observation=observation, action=action)


def click(element, name=""):
    named = ""
    if name:
        named = f"# Element: {name}\n"
    return f'<think>x</think><answer>{named}do(action="Click", element="{element}")</answer>'


def test_a_response_is_rated_by_whether_it_can_be_read_aims_at_something_and_is_new():
    def rate(response, *earlier):
        tau = SimpleNamespace(task={"hosts": {"shop.com": "http://127.0.0.1:7770"}}, turns=[*earlier, turn()])
        return tsr.rating(response, tau)

    # Nothing is wrong with these; what was clicked on another page does not matter.
    clicked = "do(action='Click', element='5')"
    elsewhere = turn("another page", clicked)
    usable = [
        click(5),
        click(5, "red lamp <5>"),
        click(8, "city <8>"),
        click(7),
        'exit(message="x")',
        "go_backward()",
        click(5, "red lamp"),
    ]
    for response in usable:
        assert rate(response) == tsr.BEST, response
        assert rate(response, elsewhere) == tsr.BEST, response

    # The page does not show these elements.
    aimless = [
        click(4),
        click(9),
        click(5, "blue lamp <5>"),
        click(1),
        click(85),
    ]
    for response in aimless:
        assert rate(response) == tsr.BEST - 1, response

    # It was tried on this page, whatever message came with the page.
    assert rate(click(5), turn(action=clicked)) == tsr.BEST - 1
    for message in ("error: no effect", "note: the page showed an alert: hi", "error: x\nnote: y"):
        tried = turn(f"{message}\n{PAGE}", clicked)
        assert rate(click(5), tried) == tsr.BEST - 1
    typed = '<think>x</think><answer>do(action="Type", argument="http://{}/a", element="8")</answer>'
    action = str(parse(typed.format("127.0.0.1:7770")))  # as the rollout records it
    assert rate(typed.format("shop.com"), turn(action=action)) == tsr.BEST - 1
    other = turn(action="do(action='Click', element='8')")
    assert rate(click(5), other) == tsr.BEST

    # No action can be read.
    assert rate("<answer>lamp</answer>") == 0
    unfinished = click(5).removesuffix("</answer>")
    assert rate(unfinished) == 0


class Scripted:
    """`draw` that hands out responses (ids, logps, ended) one after the other."""

    def __init__(self, responses):
        self.left = list(responses)

    async def __call__(self):
        return self.left.pop(0)


def chosen(monkeypatch, ratings):
    """best_of on responses 0, 1, ...: (the one it chose, how many it drew)."""
    def rating(response, trajectory):
        return ratings[int(response)]

    def decode(ids):
        return str(ids[0])

    monkeypatch.setattr(tsr, "rating", rating)
    chat = SimpleNamespace(decode=decode)
    cfg = tsr.Config(candidates=len(ratings))
    responses = [([i], [-1.0, -1.0], True) for i in range(len(ratings))]

    drawn = []
    search = tsr.best_of(chat, cfg, drawn, None, Scripted(responses))
    ids, _, _ = asyncio.run(search)
    return ids[0], drawn[0]


def test_the_best_rated_response_goes_on_and_the_first_among_equals(monkeypatch):
    choose = partial(chosen, monkeypatch)
    for ratings in itertools.product(range(4), repeat=4):
        best = max(ratings)
        drawn = 4
        if best == 3:  # nothing beats 3, so the search ends there
            drawn = ratings.index(3) + 1
        assert choose(ratings) == (ratings.index(best), drawn)

    assert choose([0]) == (0, 1)


def test_search_draws_from_the_distribution_that_the_docstring_states(monkeypatch):
    """q = pi w, exactly: over all ways to draw three of five responses whose ratings are given."""
    pi = [0.3, 0.25, 0.2, 0.15, 0.1]
    ratings = [2, 3, 0, 2, 1]
    N = 3

    q = [0.0] * 5
    for draws in itertools.product(range(5), repeat=N):
        found, _ = chosen(monkeypatch, [ratings[i] for i in draws])
        q[draws[found]] += math.prod(pi[i] for i in draws)

    for i, k in enumerate(ratings):
        at_most_k = sum(p for p, s in zip(pi, ratings) if s <= k)
        below_k = sum(p for p, s in zip(pi, ratings) if s < k)
        exactly_k = sum(p for p, s in zip(pi, ratings) if s == k)
        w = (at_most_k ** N - below_k ** N) / exactly_k
        assert q[i] == pytest.approx(pi[i] * w)


def test_what_trains_is_what_was_chosen_with_the_policys_log_probs(checkpoint, sandbox_sites, tmp_path,
                                                                   monkeypatch):
    """Real browser, engine and tiny model. Ratings are arbitrary, so later draws often win; float32, 1e-4."""
    rated = {}  # (episode, turn): the responses drawn and their ratings, in order

    def rating(response, trajectory):
        key = (id(trajectory), len(trajectory.turns))
        score = random.Random(response).randrange(3)
        rated.setdefault(key, []).append((response, score))
        return score
    monkeypatch.setattr(tsr, "rating", rating)

    cfg = tsr.Config(
        out=str(tmp_path),
        batch=2,
        G=2,
        max_turns=3,
        max_new_tokens=8,
        max_context=1200,
        concurrency=4,
        candidates=3,
        timeout=20,
    )
    sites = {"sandbox": sandbox_sites}
    tasks = load_tasks("sandbox:train:2", sites)
    model = load(checkpoint)
    policy = open_chat(checkpoint, actions_help())
    method = method_of(policy, model, cfg, Method=tsr.TSR)
    played = method.collect(tasks, Environment(sites, tmp_path, cfg), 0)

    later_won = 0
    for tau in played:
        rows = trajectory_rows(policy, tau)
        for t, (turn, row) in enumerate(zip(tau.turns, rows), 1):
            drawn = rated[id(tau), t]
            assert len(drawn) == 3
            responses = [response for response, _ in drawn]
            scores = [score for _, score in drawn]
            first_of_the_best = scores.index(max(scores))
            assert turn.response == responses[first_of_the_best]
            if turn.response != responses[0]:
                later_won += 1
            logp = logprobs(model, row, cfg.temperature)
            torch.testing.assert_close(logp, torch.tensor(turn.logps), atol=1e-4, rtol=0)
    assert len(played) == 4
    assert later_won >= 2

    _, metrics = method.training_rows(played, 0)  # no rating was the best, so every turn drew all it may
    assert metrics["draws_per_turn"] == 3
    assert metrics["turns_searched"] == 1
    method.draws_per_turn = [1, 3, 2, 1]
    _, metrics = method.training_rows(played, 0)
    assert metrics["draws_per_turn"] == 7 / 4
    assert metrics["turns_searched"] == 1 / 2


# ------------------------------------------------------------------------------------ the scripts


@pytest.mark.parametrize("fork, more", [
    ("tsr", []),
    ("webrl", ["--judged", 1, "--past", 8]),
])
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_fork_runs_logs_saves_and_resumes(checkpoint, tmp_path, fork, more, ranks):
    def run(steps):
        arguments = [
            "--model", checkpoint,
            "--out", tmp_path,
            "--steps", steps,
            "--batch", 2,
            "--no-decay",
            "--warmup", 0,
            *SMALL,
            *more,
            "--tasks", "sandbox:train:12",
            "--G", 2,
        ]
        done = script(f"forks/{fork}.py", *arguments, ranks=ranks)
        assert done.returncode == 0, done.stderr
        return done

    next_step = 1
    if ranks:  # in two parts
        run(1)
        next_step = 2
    done = run(2)

    assert f"from step {next_step} on" in done.stdout
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1]
    assert load(tmp_path)
    assert len(read(tmp_path / "trajectories.jsonl")) == 8
    assert (tmp_path / "report.html").exists()
    if fork == "webrl":
        for line in lines:
            assert line["tokens_packed"] > 0
            assert line["logp_gap"] < 1e-4
        assert "outcome_accuracy" in lines[1]
        assert "outcome_accuracy" not in lines[0]
        assert "outcome model" in (tmp_path / "trajectories.jsonl").read_text()
    else:
        for line in lines:
            assert 1 < line["draws_per_turn"] <= 8
            assert 0 < line["turns_searched"] <= 1


@pytest.mark.slow
def test_a_search_continues_bit_for_bit(one_by_one, sandbox_sites, tmp_path):  # noqa: F811
    """More draws of one episode leave the others' random numbers as they were."""
    def run(out, steps):
        arguments = [
            *one_by_one,
            "--out", tmp_path / out,
            "--steps", steps,
            "--no-decay",
            "--warmup", 0,
        ]
        return script("forks/tsr.py", *arguments, env=ENV | sandbox_sites)

    whole = run("whole", 4)
    begun = run("parts", 1)
    continued = run("parts", 4)
    for done in (whole, begun, continued):
        assert done.returncode == 0, done.stderr
    assert "from step 2 on" in continued.stdout
    assert outcome(tmp_path / "whole") == outcome(tmp_path / "parts")

    lines = read(tmp_path / "whole/metrics.jsonl")
    for line in lines:
        assert line["draws_per_turn"] > 1
    assert any(line["groups_kept"] for line in lines[1:])  # it went on learning


# ---------------------------------------------------------------------------------------- the table


def made(Method, cfg):
    """A method without a model."""
    return method_of(None, None, cfg, Method=Method)


@pytest.mark.parametrize("refused, culprit", [
    (lambda: made(tsr.TSR, tsr.Config(candidates=0)), "--candidates 0"),
    (lambda: made(digirl.DigiRL, digirl.Config(offline=4, steps=3)), "--offline 4"),
    (lambda: made(digirl.DigiRL, digirl.Config(offline=-1)), "--offline -1"),
    (lambda: made(webrl.WebRL, webrl.Config(beta=-1.0)), "--beta"),
    (lambda: made(webrl.WebRL, webrl.Config(past=-1)), "--past -1"),
    (lambda: made(webrl.WebRL, webrl.Config(sure=0.5)), "--sure 0.5"),
])
def test_settings_that_teach_nothing_are_refused(refused, culprit):
    with pytest.raises(ValueError, match=culprit):
        refused()


def write_results(folder, name, figures, cost):
    """What a seed's folder holds of one method: the same figures on all splits, and what the run took."""
    splits = {split: figures for split in table.SPLITS}
    (folder / f"{name}.json").write_text(json.dumps({"splits": splits}))
    (folder / f"{name}-cost.json").write_text(json.dumps(cost))


def test_the_table_shows_what_was_run_and_stays_empty_elsewhere(tmp_path, capsys, monkeypatch):
    success_rates = {
        "seed1": {"bc": 0.4, "r1": 0.5},
        "seed2": {"bc": 0.44},
    }
    cost = {"episodes": 2880, "minutes": 14.6}
    for seed, methods in success_rates.items():
        folder = tmp_path / seed
        folder.mkdir()
        for name, rate in methods.items():
            figures = {"success_rate": rate, "ci95": [rate - 0.05, rate + 0.05]}
            write_results(folder, name, figures, cost)

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
        per_template = {
            "0 name": {"template": "one", "success_rate": one},
            "1 name": {"template": "two", "success_rate": two},
        }
        return {"success_rate": (one + two) / 2, "ci95": [0, 1], "per_template": per_template}

    levels = {1: 0.2, 2: 0.5, 3: 0.8}
    for seed, level in levels.items():
        folder = tmp_path / f"seed{seed}"
        folder.mkdir()
        # How much less than its level a method has on the second template.
        behind = {"r1": 0.0, "bc": 0.1 + 0.02 * seed}
        if seed < 3:  # compared over the seeds that it has
            behind["awr"] = 0.1
        for name, less in behind.items():
            write_results(folder, name, figures(level, level - less), {"episodes": 1, "minutes": 1})

    monkeypatch.setattr("sys.argv", ["table.py", str(tmp_path), "--paired"])
    table.main()
    shown = capsys.readouterr().out

    # bc: -6, -7, -8 points in the seeds (t 4.303, s 1): 4.303 / sqrt(3) = 2.5 to each side; templates: 0 and -14.
    assert "| behavior cloning | 1, 2, 3 | -7.0 [-9.5, -4.5]; -7.0 [-95.9, 81.9] |" in shown
    assert "| AWR | 1, 2 | -5.0 [-5.0, -5.0]; -5.0 [-68.5, 58.5] |" in shown
    assert "| M-GRPO |" not in shown
    assert "TSR" not in shown


def test_the_cost_of_a_run_counts_the_folders_in_it(tmp_path):
    run = tmp_path / "filtered"
    sampled = run / "sampled"
    sampled.mkdir(parents=True)
    (sampled / "trajectories.jsonl").write_text("{}\n" * 5)
    (sampled / "seconds").write_text("60\n")
    (run / "seconds").write_text("30\n")
    step = '{"seconds_rollout": 20, "seconds_train": 10}\n'
    (run / "metrics.jsonl").write_text('{"loss": 1}\n' + step * 2)
    assert table.cost(run) == {"episodes": 5, "minutes": 2.5}


TARGETS = list(zip(["table", "experiments", "forks"], table.METHODS.values()))


@pytest.mark.parametrize("target, shown", TARGETS)
def test_make_runs_everything_that_the_tables_show(target, shown):
    command = ["make", "-n", target, "SEED=7"]
    planned = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout

    evaluations = re.findall(r"--out runs/experiments/seed7/tests/([\w-]+) --tasks (\S+)", planned)
    tested = dict(evaluations)
    assert tested.keys() >= shown.keys()
    for tasks in tested.values():
        assert set(tasks.split(",")) >= table.SPLITS.keys()
    for fork in re.findall(r"forks/\w+\.py", planned):
        assert (ROOT / fork).exists()


def test_a_template_is_weighed_by_its_newest_verdicts():
    """One that has become easy is not drawn as one that fails."""
    failed_first = 20 * [0.0] + 20 * [1.0]
    assert webrl.weight_of(failed_first) == pytest.approx(0.1 * 1 / 22)
    assert webrl.weight_of(failed_first[::-1]) == pytest.approx(0.1 * 21 / 22)


def test_a_step_trains_as_the_docstring_says(chat, tmp_path, monkeypatch):
    """Rewards, advantages and weights of new and replayed responses: by the judge, then by an outcome model that
    says the opposite of the judge."""
    fresh = [trajectory(chat, 1.0, [3, 2, 4]), trajectory(chat, 0.0, [2, 3], seed=1, member=1)]
    past = [trajectory(chat, 1.0, [4, 2], seed=2, member=2), trajectory(chat, 0.0, [3], seed=3, member=3)]
    lines = [json.dumps(to_record(tau, chat, step=0, split="train")) + "\n" for tau in past]
    (tmp_path / "trajectories.jsonl").write_text("".join(lines))
    model = model_of(chat)
    cfg = webrl.Config(out=str(tmp_path), lam=0.3, judged=2, past=9, sure=9.0, head_updates=5, outcome_updates=7)
    method = webrl_of(chat, model, cfg)
    fits = []

    def fit(model, optimizer, name, x_RD, r_R, updates):
        fits.append((name, sorted(r_R.tolist()), updates))
        return None, None

    def predict(model, name, x_RD):
        if name == "outcome":
            return 0.6 - 0.2 * x_RD  # 0.4 for a success of the judge's, 0.6 for a failure
        return torch.arange(len(x_RD)) / 10
    monkeypatch.setattr(webrl, "fit", fit)
    monkeypatch.setattr(webrl, "predict", predict)
    monkeypatch.setattr(webrl, "FOREIGN", 0.0)
    monkeypatch.setattr(method, "last_states", lambda episodes: torch.tensor([tau.success for tau in episodes]))

    def trained(step):
        """What a step fits, and (member, reward) and turns of the episodes that it trains on."""
        fits.clear()
        rows, metrics = method.training_rows(fresh, step)
        episodes = list({id(row.tau): row.tau for row in rows}.values())
        V = [i / 10 for i in range(len(rows))]
        expected = []
        for tau in episodes:
            own = V[len(expected):len(expected) + len(tau.turns)]
            for V_j, later in zip(own, [*own[1:], tau.reward]):
                expected.append(0.3 * (later - V_j) + 0.7 * (tau.reward - V_j))
        assert [row.advantage for row in rows] == pytest.approx(expected, abs=1e-6)
        assert [row.weight for row in rows] == [1 / len(rows)] * len(rows)
        return fits[:], [(tau.member, tau.reward) for tau in episodes], metrics.get("outcome_accuracy")

    by_judge = ("value", [0, 0, 1, 1, 1], 5)
    assert trained(1) == ([by_judge], [(0, 1.0), (1, 0.0), (2, 1.0)], None)  # a replayed failure does not train

    opposite = ("value", [0, 0, 0, 1, 1], 5)
    cfg.past = 0  # the outcome model learns from all of them
    assert trained(2)[0] == [("outcome", [0, 1], 7), opposite]
    cfg.past = 9
    assert trained(3) == ([opposite], [(0, 0.0), (1, 1.0), (3, 1.0)], 0.0)


def test_the_outcome_model_reads_the_frozen_clone(chat):
    clone = tiny_model(seed=1, vocab_size=chat.tokenizer.get_vocab_size())
    policy = model_of(chat)
    method = method_of(chat, policy, webrl.Config(), still(policy), reference=clone, Method=webrl.WebRL)
    tau = trajectory(chat, 0.0, [3, 5])

    def at_the_end(x_BTD):
        return x_BTD[0, -1]
    last = trajectory_rows(chat, tau)[-1]
    expected = clone(torch.tensor([last.ids]), head=at_the_end)
    torch.testing.assert_close(method.last_states([tau])[0], expected, atol=1e-5, rtol=1e-5)
