"""AWR, DigiRL, GiGPO and the critic: their losses against slow loops in float64, their scripts on one and two ranks."""
import contextlib
import copy
import json
import math
import re
import statistics
from functools import partial
from itertools import permutations

import pytest
import torch
from conftest import ROOT, tiny_model
from test_mgrpo import method_of, ragged_groups, trajectory, without_browser
from test_scripts import ENV, METRICS, read, script

import mgrpo
import run as runs
from compress import context, trajectory_rows
from forks import awr, critic, digirl, gigpo, shared
from model import full_state, load


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
    turns = shared.response_rows(chat, episodes)
    assert len(turns) == sum(len(tau.turns) for tau in episodes)
    h = [context(chat, one.tau, one.tau.turns.index(one.turn)) for one in turns]
    before = torch.stack([last(ids) for ids in h])
    after = torch.stack([last(ids + one.turn.action_ids) for ids, one in zip(h, turns)])
    tasks = [shared.instruction(chat, {"intent": intent}) for intent in ("find the lamp", "buy it", "buy it")]
    alone = torch.stack([last(row.ids[:-1]) for row in tasks])
    for budget in (1, 300, 10**6):
        cfg = mgrpo.Config(max_tokens=budget)
        found = partial(shared.states, model, cfg=cfg, device="cpu")
        torch.testing.assert_close(found(turns), before, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found(turns, end=True), after, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found(tasks), alone, atol=1e-5, rtol=1e-4)
    assert found([]).shape == (0, 32)
    task = chat.decode(tasks[0].ids[:-1])
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
        first, last = shared.fit(model, optimizer, "value", x_RD, y_R, updates)
        assert first == pytest.approx(expected, rel=1e-5) and last < first
    assert ((shared.predict(model, "value", x_RD) > 0.5) == (y_R > 0)).all()
    for name, weight in model.state_dict().items():  # no head among them
        assert torch.equal(weight, before.pop(name))
    assert not before and set(full_state(model)) == set(model.state_dict())
    assert shared.fit(model, optimizer, "value", x_RD, y_R, 0) == (last, last)
    assert shared.fit(model, optimizer, "value", x_RD[:0], y_R[:0], 5) == (0, 0)


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
    other_seed = mgrpo.Config(out=str(tmp_path), seed=1)
    drawn = [[tau.member for tau in shared.recall(chat, one, 5, step)]
             for one, step in ((cfg, 1), (cfg, 1), (cfg, 2), (other_seed, 1))]
    assert drawn[0] == drawn[1] != drawn[2] and all(len(set(one)) == 5 for one in drawn) and drawn[3] != drawn[0]
    assert sorted(tau.member for tau in shared.recall(chat, cfg, 99, 0)) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert {tau.member for tau in shared.recall(chat, cfg, 99, 0, among=3)} == {6, 7, 8}
    exact = []
    for tau in shared.recall(chat, cfg, 99, 0):
        then = played[tau.member]
        assert (tau.reward, tau.success) == (then.reward, then.success)
        for turn, was in zip(tau.turns, then.turns, strict=True):
            assert turn.response == was.response and turn.action_ids == was.action_ids
            exact.append(chat.encode(was.response) != was.action_ids)
    assert any(exact)  # ids as sampled, which encoding the text again would not give
    assert shared.recall(chat, mgrpo.Config(out=str(tmp_path / "none")), 5, 0) == []


def test_only_episodes_of_training_are_replayed(chat, tmp_path):
    """`make demo` evaluates into a run's own directory, which adds episodes of test tasks to the same file."""
    splits = ["train", "sandbox:test", "train", "sandbox:test", "sandbox:dev within 5 turns", None, "train"]
    with open(tmp_path / "trajectories.jsonl", "w") as file:
        for i, split in enumerate(splits):
            line = trajectory(chat, 1.0, [3], member=i).to_json(chat, step=None, split=split)
            if split is None:
                line.pop("split")
            file.write(json.dumps(line) + "\n")
    cfg = mgrpo.Config(out=str(tmp_path))
    assert sorted(tau.member for tau in shared.recall(chat, cfg, 99, 0)) == [0, 2, 6]


def test_a_long_evaluation_after_training_hides_no_episode_of_training(chat, tmp_path):
    """The newest 2,000 records were taken first and filtered then, which left nothing to replay."""
    line = lambda split: json.dumps(trajectory(chat, 1.0, [3], member=4).to_json(chat, step=0, split=split)) + "\n"
    (tmp_path / "trajectories.jsonl").write_text(line("train") + 2000 * line("sandbox:test"))
    assert [tau.member for tau in shared.recall(chat, mgrpo.Config(out=str(tmp_path)), 99, 0)] == [4]


def test_a_replayed_episode_keeps_the_reward_that_trained_it(chat, tmp_path):
    """Reward and success may differ in a fork: what trains is the reward, what counts is the success."""
    tau = trajectory(chat, 1.0, [3])
    tau.reward = -0.25
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(tau.to_json(chat, step=0, split="train")) + "\n")
    back, = shared.recall(chat, mgrpo.Config(out=str(tmp_path)), 1, 0)
    assert (back.success, back.reward) == (1.0, -0.25) and shared.rewards_of([back]).tolist() == [-0.25]


# ------------------------------------------------------------------------------------------------- the losses


def some_values(n, seed=0):
    return torch.rand(n, generator=torch.Generator().manual_seed(seed)).double().tolist()


def test_awr_clones_each_response_by_the_exponential_of_its_advantage(chat, float64, monkeypatch):
    """Loss and gradient against the paper's equation: one token at a time, weights clipped and not."""
    episodes, cfg = [tau for group in ragged_groups(chat) for tau in group], awr.Config(awr_beta=0.2, limit=9.0)
    V = iter(some_values(sum(len(tau.turns) for tau in episodes)))
    values = [[next(V) for _ in tau.turns] for tau in episodes]
    flat = [V_j for V_tau in values for V_j in V_tau]
    monkeypatch.setattr(awr.AWR, "fit_value", lambda self, rows: (flat, {"value_loss": 0.5}))
    monkeypatch.setattr(awr, "recall", lambda *_: [])
    monkeypatch.setattr(awr, "add_heads", lambda *_, **__: None)
    method = method_of(chat, None, cfg, Method=awr.AWR)
    broken = [trajectory(chat, 1.0, [3], status="env_error"), trajectory(chat, 0.0, [])]
    batch, metrics = method.learn_from([*episodes, *broken], 0)
    sizes = [row.n_action for row in batch]
    logp = (-3 * torch.rand(sum(sizes), generator=torch.Generator().manual_seed(1))).requires_grad_()
    tokens, total, parts, weights = sum(sizes), 0.0, iter(logp.split(sizes)), []
    for tau, V_tau in zip(episodes, values):
        assert tau.advantage == tau.reward - V_tau[0]  # the record shows that of the first turn
        for V_j, logp_j in zip(V_tau, parts):
            weights.append(min(math.exp((tau.reward - V_j) / 0.2), 9.0))
            for logp_t in logp_j.unbind():
                total = total - weights[-1] * logp_t / tokens
    assert 9.0 in weights and min(weights) < 0.1 and len(weights) == len(sizes)
    assert metrics == {"episodes_trained": len(episodes), "value_loss": 0.5,
                       "weight": pytest.approx(statistics.mean(weights))}
    loss, _ = method.loss(batch, logp, None, None)
    torch.testing.assert_close(loss, total, atol=1e-10, rtol=0)
    found, expected = (torch.autograd.grad(value, logp)[0] for value in (loss, total))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_awrs_value_is_what_the_head_expects_of_the_context(chat, model):
    episodes = [tau for group in ragged_groups(chat) for tau in group]
    rows = shared.response_rows(chat, episodes)
    method = method_of(chat, model, awr.Config(), optimizer_of(model), Method=awr.AWR)
    V, metrics = method.fit_value(rows)
    assert metrics["value_loss"] == pytest.approx(math.log(2), rel=1e-5)
    after = 0.0
    for row, V_j in zip(rows, V, strict=True):
        t = row.tau.turns.index(row.turn)
        x_D = model(torch.tensor([context(chat, row.tau, t)]), head=lambda x_BTD: x_BTD[0, -1])
        assert V_j == pytest.approx(model.heads["value"](x_D).sigmoid().item(), abs=1e-5) and 0 < V_j < 1
        after -= math.log(V_j if row.tau.reward else 1 - V_j) / len(rows)
    assert metrics["value_loss_fitted"] == pytest.approx(after, abs=1e-5) and after < math.log(2)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("r", [0.0, 1.0, 0.4, -1.0])
def test_digirls_turn_advantage_is_doubly_robust(lam, r):
    """w r + (1 - w) (V' - V) with w = lam^(H - j), whatever r is: a failure does not leave all of it to V."""
    for H in (1, 2, 7):
        V = dict(enumerate(some_values(H, seed=H), start=1))
        V[H + 1] = 0.0
        expected = []
        for j in range(1, H + 1):
            w = 1.0
            for _ in range(H - j):
                w = w * lam
            expected.append(w * r + (1 - w) * (V[j + 1] - V[j]))
        found = digirl.turn_advantages(r, [V[j] for j in range(1, H + 1)], lam)
        assert found == pytest.approx(expected, abs=1e-12) and found[-1] == r


def test_digirls_turn_advantages_by_hand():
    """Three turns, lam = 0.5: the weights of the outcome are 1/4, 1/2 and 1."""
    V = [0.2, 0.6, 0.5]
    assert digirl.turn_advantages(0.0, V, 0.5) == pytest.approx([0.75 * 0.4, 0.5 * -0.1, 0.0])
    assert digirl.turn_advantages(1.0, V, 0.5) == pytest.approx([0.25 + 0.75 * 0.4, 0.5 + 0.5 * -0.1, 1.0])


@pytest.mark.parametrize("share, chosen", [(0.2, 4), (0.5, 5), (0.6, 8), (0.05, 4)])
def test_ties_are_chosen_together_whatever_the_rounding(chat, model, monkeypatch, share, chosen):
    """Ten episodes of three tasks, so A_c has few values. Threads and micro-batches change its last digits."""
    cfg = digirl.Config(share=share)
    episodes = [trajectory(chat, r, [3], seed=i, member=i) for i, r in enumerate([1.0] * 5 + [0.0] * 5)]
    V_R = torch.tensor([0.3, 0.3, 0.3, 0.3, 0.9, 0.3, 0.3, 0.3, 0.5, 0.9])
    method = method_of(chat, model, cfg, optimizer_of(model), Method=digirl.DigiRL)
    for seed in range(20):
        noise_R = 1e-6 * (2 * torch.rand(10, generator=torch.Generator().manual_seed(seed)) - 1)
        monkeypatch.setattr(digirl, "predict", lambda *_: V_R + noise_R)
        best, _ = method.best_episodes(episodes)
        assert [tau.member for tau in best] == list(range(chosen)), seed


def test_digirl_clones_good_turns_of_the_best_episodes_and_nothing_else(chat, model):
    """Both filters by their definitions, from heads on contexts one at a time; then the mean over their tokens."""
    cfg = digirl.Config(share=0.5, max_turns=4, head_lr=3e-2)
    method = method_of(chat, model, cfg, optimizer_of(model), Method=digirl.DigiRL)
    episodes = [tau for group in ragged_groups(chat) for tau in group]
    for i, tau in enumerate(episodes):
        tau.task = tau.task | {"intent": f"do number {i % 3}"}
    everything = shared.response_rows(chat, episodes)
    x_RD = shared.states(model, everything, cfg, "cpu")
    r_R = torch.tensor([one.tau.reward for one in everything])
    shared.fit(model, method.optimizer, "V_s", x_RD, r_R, 20)
    chosen, _ = method.best_episodes(episodes)

    def value(head, ids):
        return model.heads[head](model(torch.tensor([ids]), head=lambda x_BTD: x_BTD[0, -1])).sigmoid().item()
    A_i = [tau.reward - value("V_c", chat.system_ids() + chat.opening("user", f"Task: {tau.task['intent']}"))
           for tau in episodes]
    best = sorted(range(len(episodes)), key=lambda i: -A_i[i])[:math.ceil(0.5 * len(episodes))]
    at_least = min(A_i[i] for i in best) - 1e-6
    assert [tau for tau, A in zip(episodes, A_i) if A >= at_least] == chosen and len(chosen) < len(episodes)

    good = method.good_turns(chosen)
    expected, total = [], 0
    for tau in chosen:
        V = [value("V_s", context(chat, tau, t)) for t in range(len(tau.turns))] + [0.0]
        H = len(tau.turns)
        for h, turn in enumerate(tau.turns):
            weight = 0.5 ** (H - 1 - h)
            total += 1
            if weight * tau.reward + (1 - weight) * (V[h + 1] - V[h]) > 1 / 4:
                expected.append(turn.action_ids)
    assert [row.ids[-row.n_action:] for row in good] == expected and 0 < len(expected) < total

    tokens = sum(map(len, expected))
    logp_N = torch.linspace(-3, -0.1, tokens)
    loss, _ = method.loss(good, logp_N, None, None)
    assert loss.item() == pytest.approx(-sum(logp_N.tolist()) / tokens, rel=1e-5)


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
        plain = mgrpo.group_advantages(copy.deepcopy(group))
        method = method_of(chat, None, gigpo.Config(turn_credit=weight), Method=gigpo.GiGPO)
        kept = method.advantages(copy.deepcopy(group))
        for tau, alone in zip(kept, plain):
            assert tau.advantage == alone.advantage
            for t, (turn, row) in enumerate(zip(tau.turns, trajectory_rows(chat, tau))):
                extra = weight * obvious_turn_advantage(kept, tau, t, 0.95)
                assert turn.advantage == pytest.approx(extra, abs=1e-12)
                assert row.advantage == pytest.approx(tau.advantage + extra, abs=1e-12)
    stay, leave = (kept[1].turns[t].advantage for t in (1, 3))
    assert stay < 0 < leave  # of the one episode, both on the shop's page: only the last click helped
    assert kept[2].turns[1].advantage == kept[3].turns[1].advantage == 0  # nobody else saw these pages


def test_gigpo_counts_the_turns_that_were_compared(chat):
    """Two of five: the shop's page, which two episodes saw. A dropped group's turns are no rows."""
    visited = [["home 1", "shop"], ["home 2", "shop", "cart"]]
    mixed = [trajectory(chat, r, [3] * len(pages), member=i) for i, (r, pages) in enumerate(zip((1.0, 0.0), visited))]
    even = [trajectory(chat, 1.0, [3] * n, member=i) for i, n in enumerate((1, 3))]
    for tau, pages in zip(mixed, visited):
        for turn, page in zip(tau.turns, pages):
            turn.observation = page
    method = method_of(chat, None, gigpo.Config(G=2), Method=gigpo.GiGPO)
    rows, metrics = method.learn_from([*mixed, *even], 0)
    assert len(rows) == 5 and metrics == {"groups_kept": 1, "turns_compared": 2 / 5}
    assert method.learn_from(even, 0)[1]["turns_compared"] == 0


def test_gigpos_discount_is_a_flag_and_a_group_that_teaches_nothing_gets_no_turn_advantages(chat):
    method = method_of(chat, None, gigpo.Config(turn_credit=1.0, gamma=0.5), Method=gigpo.GiGPO)
    group = [trajectory(chat, 1.0, [3] * n, member=n) for n in (1, 3)] + [trajectory(chat, 0.0, [3] * 2, member=2)]
    for tau in group:
        for turn in tau.turns:
            turn.observation = "home"
    kept = method.advantages(group)
    assert kept == group
    for tau in kept:
        for t, turn in enumerate(tau.turns):
            assert turn.advantage == pytest.approx(obvious_turn_advantage(kept, tau, t, 0.5), abs=1e-12)
    even = [trajectory(chat, 1.0, [3] * n, member=n) for n in (1, 3)]
    assert method.advantages(even) == [] and all(turn.advantage == 0 for tau in even for turn in tau.turns)


def obvious_critic(chat, episodes, model, cfg, expected=None):
    """The critic's loss, one token at a time -> (loss, mean cross-entropy, what V expected of each token).

    expected: what V expected in the step's first update, on which A_t rests; None: this is the first.
    """
    tokens = sum(len(turn.action_ids) for tau in episodes for turn in tau.turns)
    loss, surprise, now = 0.0, 0.0, []
    for tau in episodes:
        for t, turn in enumerate(tau.turns):
            h = context(chat, tau, t)
            x_TD = model(torch.tensor([h + turn.action_ids]), head=lambda x_BTD: x_BTD[0])
            for k, (token, logp_old) in enumerate(zip(turn.action_ids, turn.logps)):
                x_D = x_TD[len(h) + k - 1]  # the state that predicts the token
                V = model.heads["value"](x_D).sigmoid()[0]
                A = tau.reward - (V.item() if expected is None else expected[len(now)])
                now.append(V.item())
                if turn.error and not cfg.credit_errors:
                    A = min(A, 0.0)
                rho = (model.logits(x_D).log_softmax(-1)[token] - logp_old).exp()
                surrogate = min(rho * A, rho.clamp(1 - cfg.eps, 1 + cfg.eps) * A)
                cross_entropy = -(V if tau.reward else 1 - V).log()
                loss = loss + (cfg.value_weight * cross_entropy - surrogate) / tokens
                surprise += cross_entropy.item() / tokens
    return loss, surprise, now


@pytest.mark.parametrize("credit_errors", [False, True])
@pytest.mark.parametrize("budget", [1, 700, 10**6])
def test_a_critic_trains_jointly_with_the_policy(chat, model, budget, credit_errors):
    """Its gradient reaches the policy's weights; A_t keeps the first update's V. Packed, float32, 1e-5.

    Every other response failed: in a success it gets no credit unless --credit-errors is given.
    """
    episodes = [tau for group in ragged_groups(chat) for tau in group]
    for turn in [turn for tau in episodes for turn in tau.turns][::2]:
        turn.error = "no such element"
    broken = trajectory(chat, 0.0, [4], status="env_error")
    cfg = critic.Config(clip=1e9, max_tokens=budget, temperature=1.0, value_weight=0.7, credit_errors=credit_errors)
    method = method_of(chat, model, cfg, torch.optim.SGD(model.parameters(), lr=0.05), Method=critic.Critic)
    head = model.heads["value"]
    torch.nn.init.normal_(head[2].weight, generator=torch.Generator().manual_seed(0))  # at 0 nothing would pass it
    weights = dict(model.named_parameters()) | {f"head.{name}": p for name, p in head.named_parameters()}
    rows, _ = method.learn_from([*episodes, broken], 0)
    step, grads, V = method.optimizer.step, {}, None

    def recorded():
        grads.update({name: p.grad.clone() for name, p in weights.items()})
        step()
    method.optimizer.step = recorded
    for _ in range(2):
        expected, error, now = obvious_critic(chat, episodes, model, cfg, V)
        V = V or now
        expected_grads = torch.autograd.grad(expected, list(weights.values()))
        metrics = mgrpo.update(method, rows)
        assert metrics["loss"] == pytest.approx(expected.item(), abs=1e-5)
        assert metrics["value_loss"] == pytest.approx(error, rel=1e-4)
        for name, gradient in zip(weights, expected_grads):
            torch.testing.assert_close(grads[name], gradient, atol=1e-5, rtol=1e-3, msg=name)
    assert max(abs(a - b) for a, b in zip(V, now)) > 1e-3  # V moved in between


# ------------------------------------------------------------------------------------------------ the scripts

FORKS = {"awr": (awr, {"past": 6}), "digirl": (digirl, {"past": 24, "offline": 2, "share": 0.5}),
         "gigpo": (gigpo, {"G": 3}), "critic": (critic, {})}
METHODS = {awr: awr.AWR, digirl: digirl.DigiRL, gigpo: gigpo.GiGPO, critic: critic.Critic}


def hard_and_easy(chat):
    """A stand-in for rollout: episodes of one to three turns, of which the first of each task succeeds."""
    async def rollout(model, chat_, tasks, *, env, settings, group, seed, temperature, tick=None):
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
    return runs.parse_args(fork.Config, fork.__doc__, {}, "")


def main(fork, cfg):
    """As the end of each script has it."""
    mgrpo.main(cfg, METHODS[fork])


@pytest.fixture
def play(checkpoint, monkeypatch, tmp_path):
    """play(fork, rollout, out, **changes): a fork's loop without a browser; the lines of metrics.jsonl."""
    without_browser(monkeypatch)

    def play(fork, rollout, out, **changes):
        monkeypatch.setattr(mgrpo, "rollout", rollout)
        cfg = fork.Config(**dict(model=str(checkpoint), out=str(tmp_path / out), steps=5, batch=6, G=2, lr=1e-2,
                                 warmup=0.5) | changes)
        with contextlib.suppress(KeyboardInterrupt):
            main(fork, cfg)
        return read(tmp_path / out / "metrics.jsonl")
    return play


@pytest.mark.parametrize("name", FORKS)
def test_an_interrupted_fork_continues_as_if_nothing_had_happened(chat, play, tmp_path, name):
    """Bit for bit: policy, heads, their optimizer, and the past episodes that a step draws.

    In between, somebody evaluated into the same directory; those episodes must not train.
    """
    fork, more = FORKS[name]

    async def interrupted(*args, seed, **kwargs):
        if seed == "0/3":
            raise KeyboardInterrupt
        return await hard_and_easy(chat)(*args, seed=seed, **kwargs)
    whole = play(fork, hard_and_easy(chat), "whole", **more)
    assert len(play(fork, interrupted, "parts", save_every=2, **more)) == 3
    with open(tmp_path / "parts/trajectories.jsonl", "a") as file:
        for i in range(20):
            tested = trajectory(chat, 1.0, [4, 2], seed=99 + i, member=i)
            file.write(json.dumps(tested.to_json(chat, step=None, split="sandbox:test")) + "\n")
    parts = play(fork, hard_and_easy(chat), "parts", save_every=2, **more)
    timeless = lambda lines: [{k: v for k, v in line.items() if "second" not in k} for line in lines]
    assert timeless(parts) == timeless(whole)
    a, b = (load(tmp_path / out).state_dict() for out in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any("value" in name or "V_" in name for name in a)
    heads = [key for key in whole[0] if key.endswith("_loss")]
    assert all(abs(line[key] - math.log(2)) > 1e-4 for key in heads for line in whole[1:])  # they learned
    assert all(line["change"][-1] > 0 for line in whole[2:])


def test_digirl_first_collects_then_learns_from_all(chat, play):
    lines = play(digirl, hard_and_easy(chat), "x", past=24, offline=3, share=0.5)
    assert [line["turns_cloned"] > 0 for line in lines] == [False, False, True, True, True]
    assert [line["episodes_seen"] for line in lines] == [12, 24, 36, 36, 36]  # 12 of the step and up to 24 replayed
    assert all(0.5 <= line["episodes_kept"] < 1 for line in lines)  # ties enter together
    assert [len(line["change"]) for line in lines] == [0, 0, 8, 2, 2]  # of 1, 1, 9, 3 and 3 updates
    assert [line["grad_norm"] is not None and line["grad_norm"] > 0 for line in lines] == [False, False, True, True, True]
    assert [line["loss"] for line in lines[:2]] == [None, None]  # not 0, which would look like a policy that learned


@pytest.mark.parametrize("fork", [awr, digirl, critic])
def test_forks_without_groups_take_one_episode_a_task(chat, play, fork, capsys):
    lines = play(fork, hard_and_easy(chat), "x", G=1, steps=2, batch=10, **({"offline": 1, "share": 1.0} if fork is digirl else {}))
    assert all(line["tokens_trained"] > 0 for line in lines)
    said = capsys.readouterr().out  # awr and digirl printed "groups 192/24", as they counted episodes
    assert re.findall(r"  groups (\S+)", said) == (["10/10", "10/10"] if fork is critic else [])


@pytest.mark.parametrize("fork, changes, says", [
    (digirl, {"share": 0.0}, "--share 0: it is a share of the episodes"), (digirl, {"share": 1.5}, "--share 1.5"),
    (awr, {"limit": 0.0}, "--awr-beta and --limit must be above 0"), (awr, {"awr_beta": 0.0}, "--awr-beta"),
    (awr, {"beta": 0.1}, "--beta 0.1: AWR has no KL"), (digirl, {"beta": 0.1}, "--beta 0.1: DigiRL has no KL")])
def test_settings_that_choose_or_weigh_nothing_are_one_sentence(chat, play, tmp_path, fork, changes, says):
    """They were an IndexError, a "math domain error", and a reference that was loaded and scored in vain."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x/metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match=says) as refused:
        play(fork, hard_and_easy(chat), "x", **changes)
    assert "\n" not in str(refused.value)
    assert read(tmp_path / "x/metrics.jsonl") == [{"step": 0}]  # nothing was cleared yet


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
    cfg = fork.Config(model=str(out), lr=1e-3)
    model, reference, optimizer = mgrpo.open_training(cfg, "cpu")
    METHODS[fork](cfg, None, model, reference, optimizer, "cpu")
    assert runs.load_training(out / "state", model, optimizer)["step"] == 2
    return runs.training_tensors(model, optimizer)


@pytest.mark.parametrize("name, more, heads", [
    ("awr", ["--past", 6], ["value_loss"]),
    pytest.param("digirl", ["--offline", 1, "--share", 0.5], ["V_s_loss", "V_c_loss"], marks=pytest.mark.slow)])
def test_forks_run_log_and_save_and_two_ranks_do_what_one_does(pointing, sandbox_sites, monkeypatch, tmp_path, name,
                                                               more, heads):
    """Two steps in the browser: on one rank in this process, on two as a user starts them."""
    fork, found = FORKS[name][0], []
    for variable, address in sandbox_sites.items():
        monkeypatch.setenv(variable, address)
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        arguments = ["--model", ROOT / "worlds/base", "--tasks", pointing, "--out", out, "--steps", 2, "--batch", 3,
                     "--G", 2, "--max-turns", 2, "--max-new-tokens", 24, "--concurrency", 1, "--lr", 1e-5,
                     "--head-updates", 10, *more]
        if ranks == 1:
            main(fork, parse(fork, monkeypatch, *arguments))
        else:
            done = script(f"forks/{name}.py", *arguments, ranks=2, env=ENV | sandbox_sites)
            assert done.returncode == 0, done.stderr
        found.append(read(out / "metrics.jsonl"))
        assert [line["step"] for line in found[-1]] == [0, 1]
        assert set(load(out).state_dict()) == set(load(ROOT / "worlds/base").state_dict())
        assert (out / "report.html").exists() and len(read(out / "trajectories.jsonl")) == 12
    for one, two in zip(*found, strict=True):
        assert set(METRICS) - set(one) == {"groups_kept"} and all(0 < one[key] < 2 for key in heads)
        for key in [*heads, "success_rate", "loss", "grad_norm", "entropy"]:
            # None in both where no episode of a step was good enough to train
            assert one[key] == two[key] or one[key] == pytest.approx(two[key], rel=1e-3), key
        # Each rank writes the system prompt, and what else its episodes share; on one rank, more of them share.
        assert one["tokens_trained"] <= two["tokens_trained"] <= 1.2 * one["tokens_trained"]
    assert any(line["grad_norm"] for line in found[0])
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
    own = {"awr": "of the value head", "digirl": "of the value heads", "gigpo": "weight of the advantages of turns",
           "critic": "the weight of the value loss"}[name]
    assert "--updates-per-batch" in said and own in said and fork.__doc__.splitlines()[0] in said
