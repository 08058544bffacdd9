"""AWR and DigiRL: their losses against slow loops in float64, their scripts on one and two ranks."""
import contextlib
import json
import math
from functools import partial
from itertools import permutations

import pytest
import torch
from conftest import ROOT, tiny_model
from test_mgrpo import TASKS, ragged_groups, trajectory
from test_scripts import ENV, METRICS, read, script

import evaluate
import mgrpo
from compress import Chat, context, rows
from forks import awr, digirl, shared
from model import full_state, load, load_training, training_tensors


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(tokenizer, "You browse the web.")


@pytest.fixture
def model(chat):
    return tiny_model(vocab_size=chat.tokenizer.get_vocab_size())


def optimizer_of(model, lr=1e-3):
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# ----------------------------------------------------------------------------------------- what they share


def test_states_are_those_of_each_context_alone(chat, model):
    """Packed rows, any micro-batch: the last token of h_t, of h_t + a_t, or of the task."""
    episodes = [tau for group in ragged_groups(chat) for tau in group]
    last = lambda ids: model(torch.tensor([ids]), head=lambda x_BTD: x_BTD[0, -1])
    turns = shared.samples(chat, episodes)
    assert len(turns) == sum(len(tau.turns) for tau in episodes)
    before = torch.stack([last(context(chat, tau, tau.turns.index(turn))) for tau, turn, _ in turns])
    after = torch.stack([last(context(chat, tau, tau.turns.index(turn)) + turn.action_ids) for tau, turn, _ in turns])
    tasks = [shared.instruction(chat, {"intent": intent}) for intent in ("find the lamp", "buy it", "buy it")]
    alone = torch.stack([last(row.trunk) for row in tasks])
    for budget in (1, 300, 10**6):
        cfg = mgrpo.Config(max_tokens=budget)
        found = partial(shared.states, model, cfg=cfg, device="cpu")
        torch.testing.assert_close(found([row for *_, row in turns]), before, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found([row for *_, row in turns], end=True), after, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found(tasks), alone, atol=1e-5, rtol=1e-4)
    assert found([]).shape == (0, 32)
    task = chat.decode(tasks[0].trunk)
    assert task.endswith("Task: find the lamp")


def test_a_head_minimizes_the_cross_entropy_on_success(chat, model):
    """float64 loops over the definition; then it tells apart what can be told apart. The policy stays as it was."""
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    shared.add_heads(model, optimizer := optimizer_of(model), "value", lr=1e-2)
    x_RD = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    y_R = (x_RD[:, 0] > 0).float()
    assert shared.predict(model, "value", x_RD).tolist() == [0.5] * 40
    for updates in (7, 60):
        p = shared.predict(model, "value", x_RD).double().tolist()
        expected = -sum(math.log(p_i if y_i else 1 - p_i) for p_i, y_i in zip(p, y_R.tolist())) / 40
        assert shared.fit(model, optimizer, "value", x_RD, y_R, updates) == pytest.approx(expected, rel=1e-5)
    assert ((shared.predict(model, "value", x_RD) > 0.5) == (y_R > 0)).all()
    for name, weight in model.state_dict().items():  # no head among them
        assert torch.equal(weight, before.pop(name))
    assert not before and set(full_state(model)) == set(model.state_dict())
    assert shared.fit(model, optimizer, "value", x_RD[:0], y_R[:0], 5) == 0


def test_past_episodes_are_drawn_from_the_record_without_repeats(chat, tmp_path):
    played = [trajectory(chat, float(i % 2), [3, 4], seed=i, member=i) for i in range(9)]
    played[4].status = "env_error"
    played[0].turns[0].action_ids = [i for letter in "red lamp" for i in chat.encode(letter)]
    played[0].turns[0].logps = [-1.0] * 8
    for tau in played:
        for turn in tau.turns:
            turn.response = chat.decode(turn.action_ids)
    lines = [json.dumps(tau.to_json(chat, step=0, split="train")) for tau in played]
    (tmp_path / "trajectories.jsonl").write_text("\n".join(lines) + "\n")
    cfg = mgrpo.Config(out=str(tmp_path))
    drawn = [[tau.member for tau in shared.recall(chat, cfg, 5, seed)] for seed in ("0/1", "0/1", "0/2")]
    assert drawn[0] == drawn[1] != drawn[2] and all(len(set(one)) == 5 for one in drawn)
    assert sorted(tau.member for tau in shared.recall(chat, cfg, 99, "0")) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert {tau.member for tau in shared.recall(chat, cfg, 99, "0", among=3)} == {6, 7, 8}
    exact = []
    for tau in shared.recall(chat, cfg, 99, "0"):
        then = played[tau.member]
        assert tau.reward == then.reward
        for turn, was in zip(tau.turns, then.turns, strict=True):
            whole = all("\ufffd" not in chat.decode([i]) for i in was.action_ids)
            assert turn.response == was.response and (turn.action_ids == was.action_ids or not whole)
            exact.append(whole and chat.encode(was.response) != was.action_ids)
    assert any(exact)  # ids as sampled, which encoding the text again would not give
    assert shared.recall(chat, mgrpo.Config(out=str(tmp_path / "none")), 5, "0") == []


# ------------------------------------------------------------------------------------------------- the losses


def some_values(n, seed=0):
    return torch.rand(n, generator=torch.Generator().manual_seed(seed)).double().tolist()


def test_awr_clones_each_response_by_the_exponential_of_its_advantage(chat, float64):
    """Loss and gradient against the paper's equation: one token at a time, weights clipped and not."""
    episodes, cfg = [tau for group in ragged_groups(chat) for tau in group], awr.Config(awr_beta=0.2, limit=9.0)
    V = iter(some_values(sum(len(tau.turns) for tau in episodes)))
    values = [[next(V) for _ in tau.turns] for tau in episodes]
    for tau, V_tau in zip(episodes, values):
        tau.advantage = 0.25  # a row's advantage is the sum of both
        for turn, V_j in zip(tau.turns, V_tau):
            turn.advantage = tau.reward - V_j - 0.25
    batch = awr.weigh([[tau] for tau in episodes], chat, cfg)
    sizes = [row.n_action for row in batch]
    logp = (-3 * torch.rand(sum(sizes), generator=torch.Generator().manual_seed(1))).requires_grad_()
    tokens, total, parts, weights = sum(sizes), 0.0, iter(logp.split(sizes)), []
    for tau, V_tau in zip(episodes, values):
        for V_j, logp_j in zip(V_tau, parts):
            weights.append(min(math.exp((tau.reward - V_j) / 0.2), 9.0))
            for logp_t in logp_j.unbind():
                total = total - weights[-1] * logp_t / tokens
    assert 9.0 in weights and min(weights) < 0.1 and len(weights) == len(sizes)
    loss, _ = shared.likelihood(batch, logp, None, cfg)
    torch.testing.assert_close(loss, total, atol=1e-10, rtol=0)
    found, expected = (torch.autograd.grad(value, logp)[0] for value in (loss, total))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_awrs_advantage_is_the_outcome_above_what_the_head_expects_of_the_context(chat, model):
    shared.add_heads(model, optimizer := optimizer_of(model), "value")
    kept, cfg = [[tau] for group in ragged_groups(chat) for tau in group], awr.Config()
    loss = awr.value_advantages(model, optimizer, kept, chat, cfg, "cpu")
    assert loss == pytest.approx(math.log(2), rel=1e-5)
    for (tau,) in kept:
        for t, (turn, row) in enumerate(zip(tau.turns, rows(chat, tau))):
            x_D = model(torch.tensor([context(chat, tau, t)]), head=lambda x_BTD: x_BTD[0, -1])
            V = model.heads["value"](x_D).sigmoid().item()
            assert row.advantage == pytest.approx(tau.reward - V, abs=1e-5) and 0 < V < 1
        assert tau.turns[0].advantage == pytest.approx(0, abs=1e-12)  # the record shows that of the first turn


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("r", [0.0, 1.0])
def test_digirls_step_advantage_is_doubly_robust(lam, r):
    """The paper's sum, turn h of H; the reward comes in the last turn."""
    for H in (1, 2, 7):
        V = dict(enumerate(some_values(H, seed=H), start=1))
        V[H + 1] = 0.0
        reward = lambda h: r if h == H else 0.0
        expected = [lam ** (H - h) * r + (1 - lam ** (H - h) * r) * (V[h + 1] + reward(h) - V[h])
                    for h in range(1, H + 1)]
        found = digirl.step_advantage(r, [V[h] for h in range(1, H + 1)], lam)
        assert found == pytest.approx(expected, abs=1e-12) and found[-1] == (1.0 if r else -V[H])


def test_digirl_clones_good_turns_of_the_best_episodes_and_nothing_else(chat, model):
    """Both filters by their definitions, from heads on contexts one at a time; then the mean over their tokens."""
    shared.add_heads(model, optimizer := optimizer_of(model), "instruction", "step", lr=3e-2)
    episodes, cfg = [tau for group in ragged_groups(chat) for tau in group], digirl.Config(share=0.5, max_turns=4)
    for i, tau in enumerate(episodes):
        tau.task = tau.task | {"intent": f"do number {i % 3}"}
    everything = shared.samples(chat, episodes)
    x_RD = shared.states(model, [row for *_, row in everything], cfg, "cpu")
    r_R = torch.tensor([tau.reward for tau, *_ in everything])
    shared.fit(model, optimizer, "step", x_RD, r_R, 20)
    chosen, _ = digirl.curriculum(model, optimizer, digirl.Batch(episodes[:4], episodes[4:], 1), chat, cfg, "cpu")

    def value(head, ids):
        return model.heads[head](model(torch.tensor([ids]), head=lambda x_BTD: x_BTD[0, -1])).sigmoid().item()
    A_i = [tau.reward - value("instruction", chat.head() + chat.opening("user", f"Task: {tau.task['intent']}"))
           for tau in episodes]
    best = sorted(range(len(episodes)), key=lambda i: -A_i[i])[:math.ceil(0.5 * len(episodes))]
    at_least = min(A_i[i] for i in best) - 1e-6
    assert [tau for tau, A in zip(episodes, A_i) if A >= at_least] == chosen and len(chosen) < len(episodes)

    good = digirl.good_turns(model, chosen, chat, cfg, "cpu")
    expected, total = [], 0
    for tau in chosen:
        V = [value("step", context(chat, tau, t)) for t in range(len(tau.turns))] + [0.0]
        H = len(tau.turns)
        for h, turn in enumerate(tau.turns):
            weight = 0.5 ** (H - 1 - h) * tau.reward
            total += 1
            if weight + (1 - weight) * (V[h + 1] - V[h]) > 1 / 4:
                expected.append(turn.action_ids)
    assert [row.ids[-row.n_action:] for row in good] == expected and 0 < len(expected) < total

    tokens = sum(map(len, expected))
    logp_N = torch.linspace(-3, -0.1, tokens)
    loss, _ = shared.likelihood(good, logp_N, None, cfg)
    assert loss.item() == pytest.approx(-sum(logp_N.tolist()) / tokens, rel=1e-5)


# ------------------------------------------------------------------------------------------------ the scripts

FORKS = {"awr": (awr, {"past": 6}), "digirl": (digirl, {"past": 24, "offline": 2, "share": 0.5})}


def hard_and_easy(chat):
    """A stand-in for rollout: episodes of one to three turns, of which the first of each task succeeds."""
    async def rollout(model, chat_, tasks, score, cfg, *, group, seed, temperature, enter, log=None):
        lengths = lambda task, i: [2 + i, 4, 3][:1 + (i + task["task_id"]) % 3]
        played = [trajectory(chat, float(i == 0 or task["task_id"] == 3), lengths(task, i), seed=task["task_id"],
                             member=i) for task in tasks for i in range(group)]
        for tau, task in zip(played, [task for task in tasks for _ in range(group)]):
            tau.task = tau.task | {"intent": f"do number {task['task_id'] % 4}"}
            for turn in tau.turns:
                turn.response = chat.decode(turn.action_ids)
        return played
    return rollout


def parse(fork, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", [f"{fork.__name__}.py", *map(str, arguments)])
    return evaluate.parse_args(fork.Config, fork.__doc__, {}, "")


def main(fork, cfg):
    """As the end of each script has it."""
    mgrpo.main(cfg, open_training=fork.open_training, collect=fork.collect, train=fork.train)


@pytest.fixture
def play(checkpoint, monkeypatch, tmp_path):
    """play(fork, rollout, out, **changes): a fork's loop without a browser; the lines of metrics.jsonl."""
    monkeypatch.setattr(mgrpo, "open_sites", lambda spec: contextlib.nullcontext({}))
    monkeypatch.setattr(mgrpo, "load_tasks", lambda spec, sites, **more: TASKS)
    monkeypatch.setattr(mgrpo, "report", lambda out: None)

    def run(fork, rollout, out, **changes):
        monkeypatch.setattr(mgrpo, "rollout", rollout)
        cfg = fork.Config(**dict(model=str(checkpoint), out=str(tmp_path / out), steps=5, batch=6, G=2, lr=1e-2,
                                 warmup=0.5) | changes)
        with contextlib.suppress(KeyboardInterrupt):
            main(fork, cfg)
        return read(tmp_path / out / "metrics.jsonl")
    return run


@pytest.mark.parametrize("name", FORKS)
def test_an_interrupted_fork_continues_as_if_nothing_had_happened(chat, play, tmp_path, name):
    """Bit for bit: policy, heads, their optimizer, and the past episodes that a step draws."""
    fork, more = FORKS[name]

    async def interrupted(*args, seed, **kwargs):
        if seed == "0/3":
            raise KeyboardInterrupt
        return await hard_and_easy(chat)(*args, seed=seed, **kwargs)
    whole = play(fork, hard_and_easy(chat), "whole", **more)
    assert len(play(fork, interrupted, "parts", save_every=2, **more)) == 3
    parts = play(fork, hard_and_easy(chat), "parts", save_every=2, **more)
    timeless = lambda lines: [{k: v for k, v in line.items() if "second" not in k} for line in lines]
    assert timeless(parts) == timeless(whole)
    a, b = (load(tmp_path / out).state_dict() for out in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any("value" in name or "step" in name for name in a)
    heads = [key for key in whole[0] if key.endswith("_loss")]
    assert all(abs(line[key] - math.log(2)) > 1e-4 for key in heads for line in whole[1:])  # they learned
    assert all(line["change"][-1] > 0 for line in whole[2:])


def test_digirl_first_collects_then_learns_from_all(chat, play):
    lines = play(digirl, hard_and_easy(chat), "x", past=24, offline=3, share=0.5)
    assert [line["turns_cloned"] > 0 for line in lines] == [False, False, True, True, True]
    assert [len(line["change"]) for line in lines] == [0, 0, 8, 2, 2]  # of 1, 1, 9, 3 and 3 updates
    assert [line["grad_norm"] > 0 for line in lines] == [False, False, True, True, True]


@pytest.fixture(scope="module")
def pointing(tmp_path_factory):
    """Tasks that the small base solves now and then."""
    wanted = [{"sites": ["shopping"], "task_id": i, "world": i, "start_url": "__SHOPPING__", "require_login": False,
               "storage_state": None, "intent": f"point at {a} else at {b}", "intent_template_id": 1,
               "eval": {"eval_types": ["url_match"], "reference_answers": None, "program_html": [],
                        "url_note": "EXACT", "reference_url": f"__SHOPPING__/category/{a}"}}
              for i, (a, b) in enumerate(permutations(["kitchen", "garden", "office"], 2))]
    path = tmp_path_factory.mktemp("tasks") / "tasks.json"
    path.write_text(json.dumps(wanted))
    return path


def saved(fork, out):
    """The training state in OUT, as a resumed run reads it."""
    model, _, optimizer = fork.open_training(fork.Config(model=str(out), lr=1e-3), "cpu")
    assert load_training(out / "state", model, optimizer)["step"] == 2
    return training_tensors(model, optimizer)


@pytest.mark.parametrize("name, more, heads", [
    ("awr", ["--past", 6], ["value_loss"]),
    ("digirl", ["--offline", 1, "--share", 0.5], ["step_loss", "instruction_loss"])])
def test_forks_run_log_and_save_and_two_ranks_do_what_one_does(pointing, sandbox_sites, monkeypatch, tmp_path, name,
                                                               more, heads):
    """Two steps in the browser: on one rank in this process, on two as a user starts them."""
    fork, runs = FORKS[name][0], []
    for variable, address in sandbox_sites.items():
        monkeypatch.setenv(variable, address)
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        arguments = ["--model", ROOT / "worlds/base", "--tasks", pointing, "--out", out, "--steps", 2, "--batch", 3,
                     "--G", 2, "--max-turns", 2, "--max-new-tokens", 24, "--deterministic", "--lr", 5e-5,
                     "--head-updates", 10, *more]
        if ranks == 1:
            main(fork, parse(fork, monkeypatch, *arguments))
        else:
            done = script(f"forks/{name}.py", *arguments, ranks=2, env=ENV | sandbox_sites)
            assert done.returncode == 0, done.stderr
        runs.append(read(out / "metrics.jsonl"))
        assert [line["step"] for line in runs[-1]] == [0, 1]
        assert set(load(out).state_dict()) == set(load(ROOT / "worlds/base").state_dict())
        assert (out / "report.html").exists() and len(read(out / "trajectories.jsonl")) == 12
    for one, two in zip(*runs, strict=True):
        assert set(METRICS) <= set(one) and all(0 < one[key] < 2 for key in heads)
        for key in [*heads, "reward", "loss", "grad_norm", "entropy", "tokens_trained", "groups_kept"]:
            assert one[key] == pytest.approx(two[key], rel=1e-3), key
    assert any(line["grad_norm"] > 0 for line in runs[0])
    one, two = (saved(fork, tmp_path / ranks) for ranks in "12")  # read on one rank, written on one and on two
    assert any(key.startswith(heads[0].removesuffix("_loss")) for key in one)
    for key in one:  # Adam turns rounding into steps of lr where a gradient is nearly 0, hence few and small updates
        torch.testing.assert_close(one[key], two[key], atol=5e-3, rtol=0, msg=key)


@pytest.mark.parametrize("name", FORKS)
def test_help_names_the_flags_of_a_fork(name, monkeypatch, capsys):
    fork, _ = FORKS[name]
    with pytest.raises(SystemExit):
        parse(fork, monkeypatch, "--help")
    said = capsys.readouterr().out
    assert "--updates-per-batch" in said and "of the value head" in said and fork.__doc__.splitlines()[0] in said
