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
from conftest import ROOT, pointing_task, tiny_model
from test_mgrpo import method_of, ragged_groups, trajectory, without_browser
from test_scripts import ENV, METRICS, read, script

import bc
import mgrpo
import run as runs
from compress import Trajectory, context, to_record, trajectory_rows
from forks import awr, checklist, critic, digirl, feedback, gigpo, klong, losses, overlap, shared, stops, tsr, webrl
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


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def episodes_of(groups):
    """The episodes of all groups, in one list."""
    episodes = []
    for group in groups:
        episodes += group
    return episodes


def at_the_last_token(x_BTD):
    return x_BTD[0, -1]


def last_state(model, ids):
    """The hidden state at the end of one context, which is computed alone."""
    return model(torch.tensor([ids]), head=at_the_last_token)


def cross_entropy(p, y):
    """The mean over p, which are chances of success, and y, which says what succeeded."""
    total = 0.0
    for p_i, y_i in zip(p, y, strict=True):
        if y_i:
            total -= math.log(p_i)
        else:
            total -= math.log(1 - p_i)
    return total / len(p)


# ----------------------------------------------------------------------------------------- what they share


def test_states_are_those_of_each_context_alone(chat, model):
    """Packed rows, any micro-batch: the last token of h_j, of h_j + a_j, or of the task."""
    episodes = episodes_of(ragged_groups(chat))
    turns = shared.response_rows(chat, episodes)
    assert len(turns) == sum(len(tau.turns) for tau in episodes)

    # 1) What one context at a time gives.
    before = []
    after = []
    for row in turns:
        t = row.tau.turns.index(row.turn)
        h = context(chat, row.tau, t)
        before.append(last_state(model, h))
        after.append(last_state(model, h + row.turn.response_ids))
    tasks = []
    alone = []
    for intent in ("find the lamp", "buy it", "buy it"):
        row = shared.instruction(chat, {"intent": intent})
        tasks.append(row)
        alone.append(last_state(model, row.ids[:-1]))

    # 2) The same from packed rows.
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
    for budget in (1, 300, 10**6):
        cfg = mgrpo.Config(max_tokens=budget)
        found = partial(shared.states, model, cfg=cfg, device="cpu")
        close(found(turns), torch.stack(before))
        close(found(turns, end=True), torch.stack(after))
        close(found(tasks), torch.stack(alone))

    assert found([]).shape == (0, 32)
    task = chat.decode(tasks[0].ids[:-1])
    assert task.endswith("Task: find the lamp")


def test_rewards_are_float32_even_if_a_fork_gives_whole_numbers():
    """Cross-entropy refuses others."""
    r_R = shared.rewards_of([Trajectory({}, reward=1), Trajectory({}, reward=0)])
    assert r_R.dtype == torch.float32


def test_a_head_minimizes_the_cross_entropy_on_success(chat, model):
    """float64 loops over the definition; then it tells apart what can be told apart. The policy stays as it was."""
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer = optimizer_of(model)
    shared.add_heads(model, optimizer, "value", lr=1e-2)
    x_RD = torch.randn(40, 32, generator=seeded(0))
    y_R = (x_RD[:, 0] > 0).float()
    assert shared.predict(model, "value", x_RD).tolist() == [0.5] * 40

    for updates in (7, 60):
        p_R = shared.predict(model, "value", x_RD).double()
        expected = cross_entropy(p_R.tolist(), y_R.tolist())
        first, last = shared.fit(model, optimizer, "value", x_RD, y_R, updates)
        assert first == pytest.approx(expected, rel=1e-5)
        assert last < first
    says_success_R = shared.predict(model, "value", x_RD) > 0.5
    assert (says_success_R == (y_R > 0)).all()

    after = model.state_dict()  # no head among them
    assert set(after) == set(before)
    for name, weight in after.items():
        assert torch.equal(weight, before[name])
    assert set(full_state(model)) == set(after)

    without_updates = shared.fit(model, optimizer, "value", x_RD, y_R, 0)
    assert without_updates == (last, last)
    without_rows = shared.fit(model, optimizer, "value", x_RD[:0], y_R[:0], 5)
    assert without_rows == (None, None)  # not the cross-entropy of a perfect head


def test_past_episodes_are_drawn_from_the_record_without_repeats(chat, tmp_path):
    played = []
    for i in range(9):
        tau = trajectory(chat, float(i % 2), [3, 4], seed=i, member=i)
        played.append(tau)
    played[4].status = "env_error"
    letter_by_letter = played[0].turns[0]
    letter_by_letter.response_ids = []
    for letter in "red lamp":
        letter_by_letter.response_ids += chat.encode(letter)
    letter_by_letter.logps = [-1.0] * 8
    lines = []
    for tau in played:
        for turn in tau.turns:
            turn.response = chat.decode(turn.response_ids)
        record = to_record(tau, chat, step=0, split="train")
        lines.append(json.dumps(record))
    (tmp_path / "trajectories.jsonl").write_text("\n".join(lines) + "\n")
    cfg = mgrpo.Config(out=str(tmp_path))

    # 1) The seed and the step decide which.
    def five(cfg, step):
        return [tau.member for tau in shared.recall(chat, cfg, 5, step)]
    first = five(cfg, 1)
    again = five(cfg, 1)
    next_step = five(cfg, 2)
    other_seed = five(mgrpo.Config(out=str(tmp_path), seed=1), 1)
    assert first == again
    assert again != next_step
    assert other_seed != first
    for members in (first, again, next_step, other_seed):
        assert len(set(members)) == 5

    # 2) All valid ones, or the newest of them.
    everything = shared.recall(chat, cfg, 99, 0)
    assert sorted(tau.member for tau in everything) == [0, 1, 2, 3, 5, 6, 7, 8]
    newest = shared.recall(chat, cfg, 99, 0, among=3)
    assert {tau.member for tau in newest} == {6, 7, 8}

    # 3) They are as they were played.
    exact = []
    for tau in everything:
        then = played[tau.member]
        assert tau.reward == then.reward
        assert tau.success == then.success
        for turn, was in zip(tau.turns, then.turns, strict=True):
            assert turn.response == was.response
            assert turn.response_ids == was.response_ids
            exact.append(chat.encode(was.response) != was.response_ids)
    assert any(exact)  # ids as sampled, which encoding the text again would not give

    nothing_played = mgrpo.Config(out=str(tmp_path / "none"))
    assert shared.recall(chat, nothing_played, 5, 0) == []


def test_only_episodes_of_training_are_replayed(chat, tmp_path):
    """`make demo` evaluates into a run's own directory, which adds episodes of test tasks to the same file."""
    splits = [
        "train",
        "sandbox:test",
        "train",
        "sandbox:test",
        "sandbox:dev within 5 turns",
        None,
        "train",
    ]
    with open(tmp_path / "trajectories.jsonl", "w") as file:
        for i, split in enumerate(splits):
            tau = trajectory(chat, 1.0, [3], member=i)
            record = to_record(tau, chat, step=None, split=split)
            if split is None:
                record.pop("split")
            file.write(json.dumps(record) + "\n")

    cfg = mgrpo.Config(out=str(tmp_path))
    recalled = shared.recall(chat, cfg, 99, 0)
    assert sorted(tau.member for tau in recalled) == [0, 2, 6]


def test_a_long_evaluation_after_training_hides_no_episode_of_training(chat, tmp_path):
    """The newest 2,000 records were taken first and filtered then, which left nothing to replay."""
    def line(split):
        tau = trajectory(chat, 1.0, [3], member=4)
        record = to_record(tau, chat, step=0, split=split)
        return json.dumps(record) + "\n"
    text = line("train") + 2000 * line("sandbox:test")
    (tmp_path / "trajectories.jsonl").write_text(text)

    cfg = mgrpo.Config(out=str(tmp_path))
    recalled = shared.recall(chat, cfg, 99, 0)
    assert [tau.member for tau in recalled] == [4]


def test_a_replayed_episode_keeps_the_reward_that_trained_it(chat, tmp_path):
    """Reward and success may differ in a fork: what trains is the reward, what counts is the success."""
    tau = trajectory(chat, 1.0, [3])
    tau.reward = -0.25
    record = to_record(tau, chat, step=0, split="train")
    (tmp_path / "trajectories.jsonl").write_text(json.dumps(record) + "\n")

    cfg = mgrpo.Config(out=str(tmp_path))
    back, = shared.recall(chat, cfg, 1, 0)
    assert back.success == 1.0
    assert back.reward == -0.25
    assert shared.rewards_of([back]).tolist() == [-0.25]


# ------------------------------------------------------------------------------------------------- the losses


def some_values(n, seed=0):
    return torch.rand(n, generator=seeded(seed)).double().tolist()


def test_awr_clones_each_response_by_the_exponential_of_its_advantage(chat, float64, monkeypatch):
    """Loss and gradient against the paper's equation: one token at a time, weights clipped and not."""
    episodes = episodes_of(ragged_groups(chat))
    cfg = awr.Config(awr_beta=0.2, limit=9.0)
    flat = some_values(sum(len(tau.turns) for tau in episodes))

    def known_values(self, rows):
        return flat, {"value_loss": 0.5}

    def recall_nothing(*_):
        return []

    def no_heads(*_, **__):
        pass
    monkeypatch.setattr(awr.AWR, "fit_value", known_values)
    monkeypatch.setattr(awr, "recall", recall_nothing)
    monkeypatch.setattr(awr, "add_heads", no_heads)
    method = method_of(chat, None, cfg, Method=awr.AWR)
    broken = trajectory(chat, 1.0, [3], status="env_error")
    without_turns = trajectory(chat, 0.0, [])
    batch, metrics = method.training_rows([*episodes, broken, without_turns], 0)

    # 1) The equation.
    sizes = [row.n_action for row in batch]
    tokens = sum(sizes)
    logp = -3 * torch.rand(tokens, generator=seeded(1))
    logp.requires_grad_()
    parts = iter(logp.split(sizes))
    V_left = iter(flat)
    expected = 0.0
    weights = []
    for tau in episodes:
        V_tau = [next(V_left) for _ in tau.turns]
        weight = min(math.exp((tau.reward - V_tau[0]) / 0.2), 9.0)
        assert tau.advantage == pytest.approx(weight)  # the record shows that of the first turn
        for V_j in V_tau:
            advantage = tau.reward - V_j
            weight = min(math.exp(advantage / 0.2), 9.0)
            weights.append(weight)
            for logp_t in next(parts).unbind():
                expected = expected - weight * logp_t / tokens
    assert 9.0 in weights
    assert min(weights) < 0.1
    assert len(weights) == len(sizes)

    # 2) What the fork makes of it.
    assert metrics == {
        "episodes_trained": len(episodes),
        "value_loss": 0.5,
        "weight": pytest.approx(statistics.mean(weights)),
    }
    loss, _ = method.loss(batch, logp, None, None)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    gradient, = torch.autograd.grad(loss, logp)
    expected_gradient, = torch.autograd.grad(expected, logp)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-10, rtol=0)


def test_awrs_value_is_what_the_head_expects_of_the_context(chat, model):
    episodes = episodes_of(ragged_groups(chat))
    rows = shared.response_rows(chat, episodes)
    method = method_of(chat, model, awr.Config(), optimizer_of(model), Method=awr.AWR)

    V, metrics = method.fit_value(rows)

    assert metrics["value_loss"] == pytest.approx(math.log(2), rel=1e-5)
    for row, V_j in zip(rows, V, strict=True):
        t = row.tau.turns.index(row.turn)
        h = context(chat, row.tau, t)
        logit = model.fork_heads["value"](last_state(model, h))
        assert V_j == pytest.approx(logit.sigmoid().item(), abs=1e-5)
        assert 0 < V_j < 1
    after = cross_entropy(V, [row.tau.reward for row in rows])
    assert metrics["value_loss_fitted"] == pytest.approx(after, abs=1e-5)
    assert after < math.log(2)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("r", [0.0, 1.0, 0.4, -1.0])
def test_digirls_turn_advantage_is_doubly_robust(lam, r):
    """w r + (1 - w) (V' - V) with w = lam^(H - j), whatever r is: a failure does not leave all of it to V."""
    for H in (1, 2, 7):
        values = some_values(H, seed=H)
        V = dict(enumerate(values, start=1))
        V[H + 1] = 0.0
        expected = []
        for j in range(1, H + 1):
            w = 1.0
            for _ in range(H - j):
                w = w * lam
            change = V[j + 1] - V[j]
            expected.append(w * r + (1 - w) * change)

        found = digirl.turn_advantages(r, values, lam)
        assert found == pytest.approx(expected, abs=1e-12)
        assert found[-1] == r


def test_digirls_turn_advantages_by_hand():
    """Three turns, lam = 0.5: the weights of the outcome are 1/4, 1/2 and 1."""
    V = [0.2, 0.6, 0.5]
    failure = digirl.turn_advantages(0.0, V, 0.5)
    assert failure == pytest.approx([0.75 * 0.4, 0.5 * -0.1, 0.0])
    success = digirl.turn_advantages(1.0, V, 0.5)
    assert success == pytest.approx([0.25 + 0.75 * 0.4, 0.5 + 0.5 * -0.1, 1.0])


@pytest.mark.parametrize("share, chosen", [
    (0.2, 4),
    (0.5, 5),
    (0.6, 8),
    (0.05, 4),
])
def test_ties_are_chosen_together_whatever_the_rounding(chat, model, monkeypatch, share, chosen):
    """Ten episodes of three tasks, so A_c has few values. Threads and micro-batches change its last digits."""
    cfg = digirl.Config(share=share)
    episodes = []
    for i in range(10):
        reward = float(i < 5)
        episodes.append(trajectory(chat, reward, [3], seed=i, member=i))
    V_R = torch.tensor([0.3, 0.3, 0.3, 0.3, 0.9, 0.3, 0.3, 0.3, 0.5, 0.9])
    method = method_of(chat, model, cfg, optimizer_of(model), Method=digirl.DigiRL)

    for seed in range(20):
        noise_R = 2 * torch.rand(10, generator=seeded(seed)) - 1
        rounded_R = V_R + 1e-6 * noise_R

        def predict(*_):
            return rounded_R
        monkeypatch.setattr(digirl, "predict", predict)
        best, _ = method.best_episodes(episodes)
        assert [tau.member for tau in best] == list(range(chosen)), seed


def test_a_share_of_the_episodes_is_not_rounded_up_past_a_whole_number(chat, model, monkeypatch):
    """0.28 * 25 is 7.000000000000001: an eighth episode was cloned."""
    cfg = digirl.Config(share=0.28)
    episodes = [trajectory(chat, 1.0, [3], seed=i, member=i) for i in range(25)]
    method = method_of(chat, model, cfg, optimizer_of(model), Method=digirl.DigiRL)
    monkeypatch.setattr(digirl, "predict", lambda *_: torch.arange(25) / 25)
    best, _ = method.best_episodes(episodes)
    assert [tau.member for tau in best] == list(range(7))


def test_digirl_clones_good_turns_of_the_best_episodes_and_nothing_else(chat, model):
    """Both filters by their definitions, from heads on contexts one at a time; then the mean over their tokens."""
    cfg = digirl.Config(share=0.5, max_turns=4, head_lr=3e-2)
    method = method_of(chat, model, cfg, optimizer_of(model), Method=digirl.DigiRL)
    episodes = episodes_of(ragged_groups(chat))
    for i, tau in enumerate(episodes):
        tau.task = tau.task | {"intent": f"do number {i % 3}"}
    everything = shared.response_rows(chat, episodes)
    x_RD = shared.states(model, everything, cfg, "cpu")
    r_R = torch.tensor([row.tau.reward for row in everything])
    shared.fit(model, method.optimizer, "V_s", x_RD, r_R, 20)

    def value(head, ids):
        logit = model.fork_heads[head](last_state(model, ids))
        return logit.sigmoid().item()

    # 1) The first filter.
    chosen, _ = method.best_episodes(episodes)
    A = []
    for tau in episodes:
        opening = chat.opening("user", f"Task: {tau.task['intent']}")
        V_c = value("V_c", chat.system_ids() + opening)
        A.append(tau.reward - V_c)
    n_best = math.ceil(0.5 * len(episodes))
    ranking = sorted(A, reverse=True)
    at_least = ranking[n_best - 1] - 1e-6
    best = [tau for tau, A_i in zip(episodes, A) if A_i >= at_least]
    assert chosen == best
    assert len(chosen) < len(episodes)

    # 2) The second filter.
    good = method.good_turns(chosen)
    expected = []
    for tau in chosen:
        H = len(tau.turns)
        V = []
        for t in range(H):
            V.append(value("V_s", context(chat, tau, t)))
        V.append(0.0)
        for t, turn in enumerate(tau.turns):
            weight = 0.5 ** (H - 1 - t)
            change = V[t + 1] - V[t]
            A_t = weight * tau.reward + (1 - weight) * change
            if A_t > 1 / 4:
                expected.append(turn.response_ids)
    assert [row.ids[-row.n_action:] for row in good] == expected
    total = sum(len(tau.turns) for tau in chosen)
    assert 0 < len(expected) < total
    with_good_turns = {id(row.tau) for row in good}
    for tau in episodes:
        assert tau.advantage == (id(tau) in with_good_turns)  # what the report says of it

    # 3) The loss.
    tokens = sum(map(len, expected))
    logp_N = torch.linspace(-3, -0.1, tokens)
    loss, _ = method.loss(good, logp_N, None, None)
    assert loss.item() == pytest.approx(-sum(logp_N.tolist()) / tokens, rel=1e-5)


def discounted(tau, t, gamma):
    """What an episode earned in the end, seen from turn t."""
    turns_after = len(tau.turns) - 1 - t
    return tau.reward * gamma ** turns_after


def obvious_turn_advantage(group, tau, t, gamma):
    """GiGPO's A of one turn, by its definition, in plain numbers."""
    page = tau.turns[t].observation
    on_this_page = []
    for other in group:
        for k, turn in enumerate(other.turns):
            if turn.observation == page:
                on_this_page.append(discounted(other, k, gamma))
    if len(set(on_this_page)) < 2:
        return 0.0
    mean = statistics.mean(on_this_page)
    return (discounted(tau, t, gamma) - mean) / statistics.stdev(on_this_page)


def visitor(chat, reward, pages, **more):
    """An episode that sees these pages, one a turn."""
    tau = trajectory(chat, reward, [3] * len(pages), **more)
    for turn, page in zip(tau.turns, pages, strict=True):
        turn.observation = page
    return tau


def test_turns_on_the_same_page_compare_what_they_earned_in_the_end(chat):
    """Against the definition: pages that several episodes share, that one visits again, and its own."""
    group = [
        visitor(chat, 1.0, ["home", "shop", "cart"], seed=0, member=0),
        visitor(chat, 1.0, ["home", "shop", "shop", "shop", "cart"], seed=1, member=1),
        visitor(chat, 0.0, ["home", "forum"], seed=2, member=2),
        visitor(chat, 0.0, ["home", "lost"], seed=3, member=3),
    ]
    for weight in (0.0, 0.5):
        plain = mgrpo.group_advantages(copy.deepcopy(group))
        cfg = gigpo.Config(turn_credit=weight)
        method = method_of(chat, None, cfg, Method=gigpo.GiGPO)
        kept = method.advantages(copy.deepcopy(group))
        for tau, alone in zip(kept, plain):
            assert tau.advantage == alone.advantage
            rows = trajectory_rows(chat, tau)
            for t, (turn, row) in enumerate(zip(tau.turns, rows)):
                extra = weight * obvious_turn_advantage(kept, tau, t, 0.95)
                assert turn.advantage == pytest.approx(extra, abs=1e-12)
                assert row.advantage == pytest.approx(tau.advantage + extra, abs=1e-12)

    # Of one episode, both on the shop's page: only the last click helped.
    stay = kept[1].turns[1].advantage
    leave = kept[1].turns[3].advantage
    assert stay < 0 < leave
    # Nobody else saw these pages.
    assert kept[2].turns[1].advantage == 0
    assert kept[3].turns[1].advantage == 0


def test_gigpo_counts_the_turns_that_were_compared(chat):
    """Two of five: the shop's page, which two episodes saw. A dropped group's turns are no rows."""
    mixed = [
        visitor(chat, 1.0, ["home 1", "shop"], member=0),
        visitor(chat, 0.0, ["home 2", "shop", "cart"], member=1),
    ]
    even = [
        trajectory(chat, 1.0, [3], member=0),
        trajectory(chat, 1.0, [3] * 3, member=1),
    ]
    method = method_of(chat, None, gigpo.Config(G=2), Method=gigpo.GiGPO)

    rows, metrics = method.training_rows([*mixed, *even], 0)
    assert len(rows) == 5
    assert metrics == {"groups_kept": 1, "turns_compared": 2 / 5}

    _, metrics = method.training_rows(even, 0)
    assert metrics["turns_compared"] == 0


def test_gigpos_discount_is_a_flag_and_a_group_that_teaches_nothing_gets_no_turn_advantages(chat):
    cfg = gigpo.Config(turn_credit=1.0, gamma=0.5)
    method = method_of(chat, None, cfg, Method=gigpo.GiGPO)
    group = [
        visitor(chat, 1.0, ["home"], member=1),
        visitor(chat, 1.0, ["home"] * 3, member=3),
        visitor(chat, 0.0, ["home"] * 2, member=2),
    ]
    kept = method.advantages(group)
    assert kept == group
    for tau in kept:
        for t, turn in enumerate(tau.turns):
            expected = obvious_turn_advantage(kept, tau, t, 0.5)
            assert turn.advantage == pytest.approx(expected, abs=1e-12)

    even = [
        trajectory(chat, 1.0, [3], member=1),
        trajectory(chat, 1.0, [3] * 3, member=3),
    ]
    assert method.advantages(even) == []
    for tau in even:
        for turn in tau.turns:
            assert turn.advantage == 0


def of_the_only_row(x_BTD):
    return x_BTD[0]


def obvious_critic(chat, episodes, model, cfg, expected=None):
    """The critic's loss, one token at a time -> (loss, mean cross-entropy, what V expected of each token).

    expected: what V expected in the step's first update, on which A_t rests; None: this is the first.
    """
    tokens = 0
    for tau in episodes:
        tokens += sum(len(turn.response_ids) for turn in tau.turns)
    loss = 0.0
    surprise = 0.0
    now = []
    for tau in episodes:
        for t, turn in enumerate(tau.turns):
            h = context(chat, tau, t)
            ids = h + turn.response_ids
            x_TD = model(torch.tensor([ids]), head=of_the_only_row)
            for k, (token, logp_old) in enumerate(zip(turn.response_ids, turn.logps)):
                x_D = x_TD[len(h) + k - 1]  # the state that predicts the token

                # 1) A_t, from what V expected in the first update.
                V = model.fork_heads["value"](x_D).sigmoid()[0]
                V_first = V.item()
                if expected is not None:
                    V_first = expected[len(now)]
                now.append(V.item())
                A = tau.reward - V_first
                if turn.error and not cfg.credit_errors:
                    A = min(A, 0.0)

                # 2) What the policy and V lose.
                logp = model.logits(x_D).log_softmax(-1)[token]
                rho = (logp - logp_old).exp()
                clipped = rho.clamp(1 - cfg.eps, 1 + cfg.eps)
                surrogate = min(rho * A, clipped * A)
                chance = V
                if not tau.reward:
                    chance = 1 - V
                surprise_t = -chance.log()
                loss = loss + (cfg.value_weight * surprise_t - surrogate) / tokens
                surprise += surprise_t.item() / tokens
    return loss, surprise, now


@pytest.mark.parametrize("credit_errors", [False, True])
@pytest.mark.parametrize("budget", [1, 700, 10**6])
def test_a_critic_trains_jointly_with_the_policy(chat, model, budget, credit_errors):
    """Its gradient reaches the policy's weights; A_t keeps the first update's V. Packed, float32, 1e-5.

    Every other response failed: in a success it gets no credit unless --credit-errors is given.
    """
    episodes = episodes_of(ragged_groups(chat))
    turns = []
    for tau in episodes:
        turns += tau.turns
    for turn in turns[::2]:
        turn.error = "no such element"
    broken = trajectory(chat, 0.0, [4], status="env_error")
    cfg = critic.Config(
        max_grad_norm=1e9,
        max_tokens=budget,
        temperature=1.0,
        value_weight=0.7,
        credit_errors=credit_errors,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    method = method_of(chat, model, cfg, optimizer, Method=critic.Critic)
    head = model.fork_heads["value"]
    torch.nn.init.normal_(head[2].weight, generator=seeded(0))  # at 0 nothing would pass it
    weights = dict(model.named_parameters())
    for name, weight in head.named_parameters():
        weights[f"head.{name}"] = weight
    rows, _ = method.training_rows([*episodes, broken], 0)

    step = optimizer.step
    gradients = {}

    def recorded():
        for name, weight in weights.items():
            gradients[name] = weight.grad.clone()
        step()
    optimizer.step = recorded

    V = None
    for _ in range(2):
        loss, surprise, now = obvious_critic(chat, episodes, model, cfg, V)
        V = V or now
        expected = torch.autograd.grad(loss, list(weights.values()))
        metrics = method.update(rows)
        assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["value_loss"] == pytest.approx(surprise, rel=1e-4)
        for name, gradient in zip(weights, expected):
            torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-3, msg=name)
    moved = [abs(a - b) for a, b in zip(V, now)]
    assert max(moved) > 1e-3  # V moved in between


# ------------------------------------------------------------------------------------------------ the scripts

# name -> (the fork, its settings in short runs)
FORKS = {
    "awr": (awr, {"past": 6}),
    "digirl": (digirl, {"past": 24, "offline": 2, "share": 0.5}),
    "gigpo": (gigpo, {"G": 3}),
    "critic": (critic, {}),
}
METHODS = {
    awr: awr.AWR,
    digirl: digirl.DigiRL,
    gigpo: gigpo.GiGPO,
    critic: critic.Critic,
    stops: stops.Stops,
}


def hard_and_easy(chat):
    """A stand-in for rollout: episodes of one to three turns, of which the first of each task succeeds."""
    def episode(number, i):
        n_turns = 1 + (i + number) % 3
        lengths = [2 + i, 4, 3][:n_turns]
        succeeds = i == 0 or number == 3
        tau = trajectory(chat, float(succeeds), lengths, seed=number, member=i)
        tau.task = tau.task | {"intent": f"do number {number % 4}"}
        for turn in tau.turns:
            turn.response = chat.decode(turn.response_ids)
        return tau

    async def rollout(model, chat_, tasks, *, env, settings, group_size, seed, temperature, **_):
        played = []
        for task in tasks:
            for i in range(group_size):
                played.append(episode(task["task_id"], i))
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
        settings = {
            "model": str(checkpoint),
            "out": str(tmp_path / out),
            "steps": 5,
            "batch": 6,
            "G": 2,
            "lr": 1e-2,
            "warmup": 0.5,
        }
        settings.update(changes)
        cfg = fork.Config(**settings)
        with contextlib.suppress(KeyboardInterrupt):
            main(fork, cfg)
        return read(tmp_path / out / "metrics.jsonl")
    return play


def column(lines, key):
    """One column of metrics.jsonl."""
    return [line[key] for line in lines]


def timeless(lines):
    """Lines of metrics.jsonl without what depends on the clock."""
    out = []
    for line in lines:
        out.append({key: value for key, value in line.items() if "second" not in key})
    return out


@pytest.mark.parametrize("name", FORKS)
def test_an_interrupted_fork_continues_as_if_nothing_had_happened(chat, play, tmp_path, name):
    """Bit for bit: policy, heads, their optimizer, and the past episodes that a step draws.

    In between, somebody evaluated into the same directory; those episodes must not train.
    """
    fork, more = FORKS[name]
    rollout = hard_and_easy(chat)

    async def interrupted(*args, seed, **kwargs):
        if seed == "0/3":
            raise KeyboardInterrupt
        return await rollout(*args, seed=seed, **kwargs)

    whole = play(fork, rollout, "whole", **more)
    before = play(fork, interrupted, "parts", save_every=2, **more)
    assert len(before) == 3
    with open(tmp_path / "parts/trajectories.jsonl", "a") as file:
        for i in range(20):
            tested = trajectory(chat, 1.0, [4, 2], seed=99 + i, member=i)
            record = to_record(tested, chat, step=None, split="sandbox:test")
            file.write(json.dumps(record) + "\n")
    parts = play(fork, rollout, "parts", save_every=2, **more)
    assert timeless(parts) == timeless(whole)

    its_weights = load(tmp_path / "parts").state_dict()
    for weight_name, weight in load(tmp_path / "whole").state_dict().items():
        assert torch.equal(its_weights[weight_name], weight)
        assert "value" not in weight_name
        assert "V_" not in weight_name

    heads = [key for key in whole[0] if key.endswith("_loss")]
    for line in whole[1:]:
        for key in heads:
            assert abs(line[key] - math.log(2)) > 1e-4  # they learned
    for line in whole[2:]:
        assert line["change"][-1] > 0


def test_digirl_first_collects_then_learns_from_all(chat, play):
    lines = play(digirl, hard_and_easy(chat), "x", past=24, offline=3, share=0.5)

    # 12 episodes of the step and up to 24 replayed.
    assert column(lines, "episodes_seen") == [12, 24, 36, 36, 36]
    for line in lines:
        assert 0.5 <= line["episodes_kept"] < 1  # ties enter together

    trains = [False, False, True, True, True]
    assert [line["turns_cloned"] > 0 for line in lines] == trains
    moved = []
    for line in lines:
        norm = line["grad_norm"]
        moved.append(norm is not None and norm > 0)
    assert moved == trains
    # Of 1, 1, 9, 3 and 3 updates.
    assert [len(line["change"]) for line in lines] == [0, 0, 8, 2, 2]
    # Not 0, which would look like a policy that learned.
    assert column(lines[:2], "loss") == [None, None]


@pytest.mark.parametrize("fork", [awr, digirl, critic])
def test_forks_without_groups_take_one_episode_a_task(chat, play, fork, capsys):
    more = {}
    if fork is digirl:
        more = {"offline": 1, "share": 1.0}
    groups = []
    if fork is critic:
        groups = ["10/10", "10/10"]

    lines = play(fork, hard_and_easy(chat), "x", G=1, steps=2, batch=10, **more)

    for line in lines:
        assert line["tokens_packed"] > 0
    said = capsys.readouterr().out  # awr and digirl printed "groups 192/24", as they counted episodes
    assert re.findall(r"  groups (\S+)", said) == groups


@pytest.mark.parametrize("fork, changes, says", [
    (digirl, {"share": 0.0}, "--share 0: it is a share of the episodes"),
    (digirl, {"share": 1.5}, "--share 1.5"),
    (awr, {"limit": 0.0}, "--awr-beta and --limit must be above 0"),
    (awr, {"awr_beta": 0.0}, "--awr-beta"),
    (awr, {"past": -1}, "--past at least 0"),
    (awr, {"beta": 0.1}, "--beta 0.1: AWR has no KL"),
    (digirl, {"past": -1}, "--past -1"),
    (digirl, {"lam": 1.5}, "--lam 1.5"),
    (digirl, {"beta": 0.1}, "--beta 0.1: DigiRL has no KL"),
])
def test_settings_that_choose_or_weigh_nothing_are_one_sentence(
        chat, play, monkeypatch, tmp_path, fork, changes, says):
    """They were an IndexError, a "math domain error", and a reference that was loaded and scored in vain."""
    def nothing_yet(*_):
        raise AssertionError("a model was loaded, perhaps a clone trained, before the flags were checked")
    monkeypatch.setattr(mgrpo, "open_method", nothing_yet)
    (tmp_path / "x").mkdir()
    (tmp_path / "x/metrics.jsonl").write_text('{"step": 0}\n')

    with pytest.raises(ValueError, match=says) as refused:
        play(fork, hard_and_easy(chat), "x", **changes)

    assert "\n" not in str(refused.value)
    assert read(tmp_path / "x/metrics.jsonl") == [{"step": 0}]  # nothing was cleared yet


@pytest.mark.parametrize("fork, Method, changes, says", [
    (awr, awr.AWR, {"past": -1}, "--past at least 0"),
    (checklist, checklist.Checklist, {"reward": "x"}, "--reward x: use checks or f1"),
    (checklist, checklist.Checklist, {"success_weight": math.inf}, "--success-weight inf"),
    (checklist, checklist.Checklist, {"turn_credit": -1.0}, "--turn-credit -1: give at least 0"),
    (critic, critic.Critic, {"value_weight": -1.0}, "--value-weight -1: give at least 0"),
    (digirl, digirl.DigiRL, {"lam": -0.1}, "--lam -0.1"),
    (gigpo, gigpo.GiGPO, {"gamma": 1.5}, "--gamma 1.5: give at least 0, and gamma from 0 to 1"),
    (losses, losses.Losses, {"loss": "dapo", "eps_high": -0.5}, "--eps-high -0.5"),
    (losses, losses.Losses, {"delta": -5.0}, "--delta -5: give at least 0"),
    (feedback, feedback.Feedback, {"feedback_tokens": 0}, "--feedback-tokens 0"),
    (klong, klong.KLong, {"pinned": 0}, "--pinned 0"),
    (losses, losses.Losses, {"loss": "ppo"}, "--loss ppo: use one of grpo"),
    (losses, losses.Losses, {"refill": -1}, "--refill -1"),
    (overlap, overlap.Overlap, {"cap": 0.1}, "--cap 0.1"),
    (tsr, tsr.TSR, {"candidates": 0}, "--candidates 0"),
    (webrl, webrl.WebRL, {"lam": 1.5}, "--lam 1.5"),
])
def test_flags_are_refused_before_a_model_is_opened(fork, Method, changes, says):
    """Without --model a whole clone would be trained before."""
    cfg = fork.Config(model="/no/such/checkpoint", **changes)
    with pytest.raises(ValueError, match=says):
        mgrpo.main(cfg, Method)


@pytest.fixture(scope="module")
def pointing(tmp_path_factory):
    """Tasks that the small base solves now and then."""
    tasks = []
    pairs = permutations(["kitchen", "garden", "office"], 2)
    for i, (place, other) in enumerate(pairs):
        tasks.append(pointing_task(i, place, other))
    path = tmp_path_factory.mktemp("tasks") / "tasks.json"
    path.write_text(json.dumps(tasks))
    return path


def saved(fork, out):
    """The training state in OUT, as a resumed run reads it."""
    cfg = fork.Config(model=str(out), lr=1e-3)
    _, model = bc.open_policy(cfg, "cpu")
    optimizer = mgrpo.adamw(model)
    METHODS[fork](cfg, None, model, None, optimizer, "cpu")
    assert runs.load_training(out / "state", model, optimizer)["step"] == 2
    return runs.training_tensors(model, optimizer)


@pytest.mark.parametrize("name, more, heads", [
    ("awr", ["--past", 6], ["value_loss"]),
    pytest.param(
        "digirl",
        ["--offline", 1, "--share", 0.5],
        ["V_s_loss", "V_c_loss"],
        marks=pytest.mark.slow,
    ),
])
def test_forks_run_log_and_save_and_two_ranks_do_what_one_does(
        pointing, sandbox_sites, monkeypatch, tmp_path, name, more, heads):
    """Two steps in the browser: on one rank in this process, on two as a user starts them."""
    fork, _ = FORKS[name]
    for variable, address in sandbox_sites.items():
        monkeypatch.setenv(variable, address)

    found = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        arguments = [
            "--model", ROOT / "worlds/base",
            "--tasks", pointing,
            "--out", out,
            "--steps", 2,
            "--batch", 3,
            "--G", 2,
            "--max-turns", 2,
            "--max-new-tokens", 24,
            "--concurrency", 1,
            "--lr", 1e-5,
            "--head-updates", 10,
            *more,
        ]
        if ranks == 1:
            main(fork, parse(fork, monkeypatch, *arguments))
        else:
            env = ENV | sandbox_sites
            done = script(f"forks/{name}.py", *arguments, ranks=2, env=env)
            assert done.returncode == 0, done.stderr

        lines = read(out / "metrics.jsonl")
        assert column(lines, "step") == [0, 1]
        found.append(lines)
        assert set(load(out).state_dict()) == set(load(ROOT / "worlds/base").state_dict())
        assert (out / "report.html").exists()
        assert len(read(out / "trajectories.jsonl")) == 12

    # 1) Equal lines.
    for one, two in zip(*found, strict=True):
        assert set(METRICS) - set(one) == {"groups_kept"}
        for key in heads:
            assert 0 < one[key] < 2
        for key in [*heads, "success_rate", "loss", "grad_norm", "entropy"]:
            if one[key] is None:  # no episode of the step was good enough to train
                assert two[key] is None, key
            else:
                assert one[key] == pytest.approx(two[key], rel=1e-3), key
        # Each rank writes the system prompt, and what else its episodes share; on one rank, more of them share.
        assert one["tokens_packed"] <= two["tokens_packed"] <= 1.2 * one["tokens_packed"]
    assert any(line["grad_norm"] for line in found[0])

    # 2) Equal training states, read on one rank, written on one and on two.
    one = saved(fork, tmp_path / "1")
    two = saved(fork, tmp_path / "2")
    head = heads[0].removesuffix("_loss")
    assert any(key.startswith(head) for key in one)
    # Adam turns rounding into steps of lr where a gradient is nearly 0, hence few and small updates.
    for key in one:
        torch.testing.assert_close(one[key], two[key], atol=5e-3, rtol=0, msg=key)


def test_only_what_stopped_is_rewarded_and_success_rates_still_count_successes(chat, play, tmp_path):
    outcomes = [  # success, the message of exit, reward
        (1.0, "done", 1.0),
        (1.0, "", 1.0),
        (1.0, None, 0.0),
        (0.0, "done", 0.0),
        (0.0, None, 0.0),
    ]

    async def rollout(model, chat_, tasks, *, group_size, **_):
        played = []
        for task in tasks:
            for i, (success, answer, _) in enumerate(outcomes[:group_size]):
                tau = trajectory(chat, success, [2, 3], seed=task["task_id"], member=i)
                tau.answer = answer
                tau.task = tau.task | task
                played.append(tau)
        return played

    lines = play(stops, rollout, "x", steps=1, G=5)
    assert column(lines, "success_rate") == [pytest.approx(3 / 5)]
    assert column(lines, "reward") == [pytest.approx(2 / 5)]
    assert column(lines, "groups_kept") == [6]
    records = read(tmp_path / "x/trajectories.jsonl")
    assert column(records, "reward") == [reward for _, _, reward in outcomes] * 6
    for record in records:
        assert (record["advantage"] > 0) == (record["reward"] > 0)


HELP = {
    "awr": "of the value head",
    "digirl": "of the value heads",
    "gigpo": "weight of the advantages of turns",
    "critic": "the weight of the value loss",
}


@pytest.mark.parametrize("name", FORKS)
def test_help_names_the_flags_of_a_fork(name, monkeypatch, capsys):
    fork, _ = FORKS[name]
    with pytest.raises(SystemExit):
        parse(fork, monkeypatch, "--help")
    said = capsys.readouterr().out
    assert "--updates-per-batch" in said
    assert HELP[name] in said
    assert fork.__doc__.splitlines()[0] in said


def test_awr_trains_on_past_episodes_as_well(chat, monkeypatch):
    fresh = trajectory(chat, 1.0, [3])
    past = trajectory(chat, 0.0, [2, 4], member=7)
    asked = []

    def recall(chat, cfg, count, step):
        asked.append((count, step))
        return [past]

    def known_values(self, rows):
        return [0.5] * len(rows), {}
    monkeypatch.setattr(awr, "recall", recall)
    monkeypatch.setattr(awr.AWR, "fit_value", known_values)
    monkeypatch.setattr(awr, "add_heads", lambda *_, **__: None)
    method = method_of(chat, None, awr.Config(past=5), Method=awr.AWR)

    rows, metrics = method.training_rows([fresh], 4)

    assert asked == [(5, 4)]  # another step draws others
    assert [row.tau for row in rows] == [fresh, past, past]
    assert metrics["episodes_trained"] == 2


@pytest.mark.parametrize("fork, Method", [
    (awr, awr.AWR),
    (critic, critic.Critic),
    (digirl, digirl.DigiRL),
    (webrl, webrl.WebRL),
])
def test_heads_have_a_learning_rate_of_their_own(chat, model, fork, Method):
    optimizer = optimizer_of(model, lr=0.5)
    method_of(chat, model, fork.Config(head_lr=0.02), optimizer, reference=model, Method=Method)
    policy, *heads = [group["lr"] for group in optimizer.param_groups]
    assert policy == 0.5
    assert heads
    assert set(heads) == {0.02}


def test_awr_fits_its_value_as_often_as_a_flag_says(chat, model, monkeypatch):
    rows = shared.response_rows(chat, episodes_of(ragged_groups(chat)))
    seen = []

    def fit(model, optimizer, name, x_RD, y_R, updates):
        seen.append((name, y_R.tolist(), updates))
        return None, None
    monkeypatch.setattr(awr, "fit", fit)
    method = method_of(chat, model, awr.Config(head_updates=7), optimizer_of(model), Method=awr.AWR)
    method.fit_value(rows)
    assert seen == [("value", [row.tau.reward for row in rows], 7)]


def test_the_row_of_an_instruction_is_the_beginning_of_an_episodes_first_context(chat):
    row = shared.instruction(chat, {"intent": "find the lamp"})
    beginning = chat.system_ids() + chat.opening("user", "Task: find the lamp")
    assert row.ids == beginning + [chat.end_id]
    assert row.n_action == 1


def test_the_newest_two_thousand_episodes_may_be_replayed(tmp_path, monkeypatch):
    """digirl.py alone draws 768 a step."""
    lines = []
    for i in range(2003):
        record = {"split": "train", "status": "ok", "turns": [1], "member": i}
        lines.append(json.dumps(record) + "\n")
    (tmp_path / "trajectories.jsonl").write_text("".join(lines))
    monkeypatch.setattr(shared, "remember", lambda chat, record: record["member"])
    cfg = mgrpo.Config(out=str(tmp_path))

    assert [record["member"] for record in shared.past_records(cfg)] == list(range(3, 2003))
    assert sorted(shared.recall(None, cfg, 9999, 0)) == list(range(3, 2003))
