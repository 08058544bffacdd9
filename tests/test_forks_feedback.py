"""forks/feedback.py: what is appended, what it leaves as it was, and its loss against one turn at a time."""
import copy

import pytest
import torch
from conftest import tiny_model
from test_forks import METHODS, hard_and_easy, play, pointing  # noqa: F401 (fixtures)
from test_forks_checklist import on_one_and_two_ranks
from test_mgrpo import logprobs, method_of, trajectory

import mgrpo
from compress import context, micro_batches, pack, trajectory_rows
from forks import feedback
from model import load

METHODS[feedback] = feedback.Feedback

HOME = "title: shop\n<a>home <0></a> <a>red lamp <5></a> $24\n<button>add to cart <10></button>"


@pytest.fixture
def model(chat):
    return tiny_model(vocab_size=chat.tokenizer.get_vocab_size())


def feedback_of(chat, model=None, optimizer=None, **changes):
    return method_of(chat, model, feedback.Config(**changes), optimizer, Method=feedback.Feedback)


# --------------------------------------------------------------------------------------- what is predicted


@pytest.mark.parametrize("after, new", [
    (HOME, ""),
    (HOME.replace("5", "7").replace("10", "11"), ""),  # other ids
    ("error: there is no element 9 on this page\n" + HOME, "error: there is no element 9 on this page"),
    ("note: the page showed an alert: hi\n" + HOME, "note: the page showed an alert: hi"),
    (HOME.replace("$24", "$25"), "<a>home <0></a> <a>red lamp <5></a> $25"),
    (HOME + "\nadded", "added"), (HOME.replace("title: shop\n", ""), ""),  # what is gone cannot be read
    ("title: cart\n<a>home <0></a> <a>red lamp <5></a> $24\n1 item", "title: cart\n1 item"),
    ("title: cart\nempty", "title: cart\nempty"), ("", ""),
    (HOME + "\nx" + feedback.CUT, "x"),
    ("<input>city <8> = rome</input>\n" + HOME, "<input>city <8> = rome</input>"),
    ("<select>size <7> = s (s | m)</select>\n" + HOME, "<select>size <7> = s (s | m)</select>")])
def test_what_an_action_changed_is_what_the_page_before_did_not_have(after, new):
    assert feedback.news(HOME, after) == new


def test_the_same_error_again_is_news_again_and_another_value_of_a_field_too():
    error = "error: there is no element 9 on this page"
    assert feedback.news(f"{error}\n{HOME}", f"{error}\n{HOME}") == error
    field = "<input>city <8> = {}</input>"
    assert feedback.news(field.format("rome"), field.format("oslo")) == field.format("oslo")


@pytest.mark.parametrize("line, changed", [
    ("<input>amount <7> = {}</input>", True), ("<select>year <7> = {} (2024 | 2025)</select>", True),
    ("lamps {} (sale)", True), ("left = {} = right", True), ("<a>order {} <7></a>", True), ("{}</", True),
    ("<a>lamp <{}></a>", False), ("<a> <{}></a>", False), ("<select>size <{}> = 3 (3 | 4)</select>", False),
    ("<a>Mar 10 <{}></a> 12 <input>amount <{}> = 25</input> (3)", False)])
def test_only_ids_do_not_count_and_no_other_number(line, changed):
    """A field's value, a number in the text: what one reads there may be the very change."""
    before, after = line.replace("{}", "24"), line.replace("{}", "25")
    assert feedback.news(before, after) == (after if changed else "")


def test_what_begins_like_a_message_inside_a_page_is_a_line_like_others():
    page = "title: x\nnote: closed on Sunday"
    assert feedback.news(f"note: a dialog\n{page}", page) == ""


PAGES = [HOME, "error: no effect\n" + HOME, "title: cart\n1 item\n<a>pay <3></a>", "title: cart\n1 item\n<a>pay <4></a>",
         "title: paid\n" + "<a>red lamp <5></a> $24\n" * 9]


def episode(chat, reward, lengths, seed=0, member=0, status="ok"):
    """An episode through PAGES, whose responses now and then end by themselves."""
    tau = trajectory(chat, reward, lengths, seed=seed, member=member, status=status)
    for t, turn in enumerate(tau.turns):
        turn.observation = PAGES[t % len(PAGES)]
        turn.observation_ids = chat.user_ids(tau.task, t, turn.observation)
        if (t + seed) % 2:
            turn.action_ids[-1] = chat.end_id
    return tau


def groups_of(chat):
    """A group that trains, one that fails as a whole, and an episode that the environment broke."""
    mixed = [episode(chat, float(i == 0), [2 + i, 3, 4, 1, 2][:3 + i], seed=i, member=i) for i in range(3)]
    failed = [episode(chat, 0.0, [3, 2 + i], seed=9 + i, member=i) for i in range(3)]
    failed[1].status = "env_error"
    return [*mixed, *failed]


def obvious_feedback(chat, tau, t, limit):
    """(ids of h_t, a_t and the start of the next message; the ids to predict), written out; () if there are none."""
    if t + 1 == len(tau.turns):
        return [], []
    lines = {1: "error: no effect", 2: "title: cart\n1 item\n<a>pay <3></a>", 3: "",
             4: "title: paid\n" + ("<a>red lamp <5></a> $24\n" * 9).strip()}[t + 1]
    start = chat.opening("user", f"Round {t + 1}\n\n")
    message = chat.opening("user", f"Round {t + 1}\n\n{lines}")
    assert message[:len(start)] == start
    before = context(chat, tau, t) + chat.past_response(tau.turns[t].action_ids) + start
    return before, message[len(start):][:limit]


def test_the_news_stand_behind_the_response_in_the_form_of_the_next_message(chat):
    for limit in (5, 64):
        tau = episode(chat, 0.0, [3, 2, 4, 3, 2])
        rows = trajectory_rows(chat, tau)
        counts = [feedback.append_feedback(chat, row, limit) for row in rows]
        for t, (row, n) in enumerate(zip(rows, counts)):
            before, new = obvious_feedback(chat, tau, t, limit)
            assert n == len(new) == sum(row.after)
            if n:
                assert row.ids == before + new and row.after[-n:] == [True] * n
            else:
                assert row.ids == context(chat, tau, t) + tau.turns[t].action_ids and row.after == []
            packed = pack([row])
            trained = packed["tokens_BT"][packed["action_BT"]].tolist()
            assert trained == tau.turns[t].action_ids  # never the news
        assert [n > 0 for n in counts] == [True, True, False, True, False] and max(counts) <= limit
        assert max(counts) == 5 or limit == 64
    text = chat.tokenizer.decode(rows[0].ids, skip_special_tokens=False)
    assert text.endswith("<|im_end|>\n<|im_start|>user\nRound 1\n\nerror: no effect")


@pytest.mark.parametrize("budget", [1, 500, 10**6])
def test_the_policys_log_probs_are_those_without_the_appended_tokens(chat, model, budget):
    """By causality. Packed in any way, and one row alone; of later turns as well, which share the history."""
    episodes = groups_of(chat)[:3]
    plain = {(tau.member, t): logprobs(model, row) for tau in episodes
             for t, row in enumerate(trajectory_rows(chat, tau))}
    method = feedback_of(chat, model, G=3, temperature=1.0)
    rows, _ = method.learn_from(copy.deepcopy(episodes), 0)
    found = 0
    for batch in micro_batches(rows, budget):
        logp_N, entropy_N, hidden_ND = method.score(batch, pack(batch))
        assert len(logp_N) == len(entropy_N) == len(hidden_ND) == sum(row.n_action for row in batch)
        for row, logp in zip(batch, logp_N.split([row.n_action for row in batch])):
            t = row.tau.turns.index(row.turn)
            torch.testing.assert_close(logp, plain[row.tau.member, t], atol=1e-5, rtol=1e-5)
            found += 1
    assert found == len(plain) == 12


# ------------------------------------------------------------------------------------------------ the loss


def obvious_loss(chat, episodes, kept, model, cfg, limit):
    """(loss, mean cross-entropy of the news), one turn and one token at a time."""
    tokens = sum(len(turn.action_ids) for tau, _ in kept for turn in tau.turns)
    policy, cross_entropy, n = 0.0, 0.0, 0
    advantages = {id(tau): A for tau, A in kept}
    for tau in episodes:
        if tau.status != "ok":
            continue
        for t, turn in enumerate(tau.turns):
            h_t = context(chat, tau, t)
            before, new = obvious_feedback(chat, tau, t, limit)
            logp_TV = (model(torch.tensor([h_t + turn.action_ids]))[0] / cfg.temperature).log_softmax(-1)
            for k, token in enumerate(turn.action_ids):
                if id(tau) in advantages:
                    A = advantages[id(tau)]
                    rho = (logp_TV[len(h_t) + k - 1, token] - turn.logps[k]).exp()
                    policy = policy - min(rho * A, rho.clamp(1 - cfg.eps, 1 + cfg.eps) * A) / tokens
            if new:
                logp_TV = (model(torch.tensor([before + new]))[0] / cfg.temperature).log_softmax(-1)
                for k, token in enumerate(new):
                    cross_entropy = cross_entropy - logp_TV[len(before) + k - 1, token]
                    n += 1
    return policy + cfg.feedback * cross_entropy / n, cross_entropy / n, n


@pytest.mark.parametrize("budget", [1, 700, 10**6])
def test_an_update_has_the_gradient_of_both_losses(chat, model, budget):
    """Packed, float32, 1e-5. Of the group that fails as a whole, only the news count."""
    episodes = groups_of(chat)
    cfg = dict(G=3, temperature=0.7, clip=1e9, max_tokens=budget, feedback=0.3, feedback_tokens=20)
    grads = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = optimizer.step

    def recorded():
        grads.update({name: p.grad.clone() for name, p in model.named_parameters()})
        step()
    optimizer.step = recorded
    method = feedback_of(chat, model, optimizer, **cfg)
    rows, metrics = method.learn_from(episodes, 0)
    A = [2 / 3 / (1 / 3) ** 0.5, -1 / 3 / (1 / 3) ** 0.5, -1 / 3 / (1 / 3) ** 0.5]
    kept = list(zip(episodes[:3], A))
    for _ in range(2):  # from the second update on, rho differs from 1 and the news are scored anew
        expected, cross_entropy, n = obvious_loss(chat, episodes, kept, model, method.cfg, 20)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        line = mgrpo.update(method, rows)
        assert metrics == {"groups_kept": 1, "n_feedback": n}
        assert line["loss"] == pytest.approx(expected.item(), abs=1e-5)
        assert line["feedback_loss"] == pytest.approx(cross_entropy.item(), rel=1e-4)
        for (name, _), gradient in zip(model.named_parameters(), gradients):
            torch.testing.assert_close(grads[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


def test_a_group_that_fails_as_a_whole_is_not_pulled_to_the_reference(chat, model):
    """As in mgrpo.py: its loss is the cross-entropy alone, whatever beta is."""
    failed = groups_of(chat)[3:]
    reference = tiny_model(seed=1, vocab_size=chat.tokenizer.get_vocab_size())
    cfg = feedback.Config(G=3, beta=0.5, feedback=0.3)
    method = method_of(chat, model, cfg, torch.optim.SGD(model.parameters(), lr=0.0), reference, feedback.Feedback)
    rows, _ = method.learn_from(failed, 0)
    line = mgrpo.update(method, rows)
    assert line["kl"] > 0 and line["loss"] == pytest.approx(0.3 * line["feedback_loss"], rel=1e-5)


def test_metrics_of_the_policy_do_not_count_the_news(chat, model):
    episodes = groups_of(chat)[:3]
    lines = []
    for method in (feedback_of(chat, model, torch.optim.SGD(model.parameters(), lr=0.0), G=3, feedback=0.0),
                   method_of(chat, model, mgrpo.Config(G=3), torch.optim.SGD(model.parameters(), lr=0.0))):
        rows, _ = method.learn_from(copy.deepcopy(episodes), 0)
        lines.append(mgrpo.update(method, rows))
    for key in ("loss", "kl", "clip_frac", "entropy", "logp_gap", "actions", "grad_norm"):
        assert lines[0][key] == pytest.approx(lines[1][key], rel=1e-4, abs=1e-7), key
    assert lines[0]["tokens"] > lines[1]["tokens"] and lines[0]["feedback_loss"] > 0


def test_it_learns_to_predict_pages_from_failures_alone(chat, model):
    """mgrpo.py makes no step on them."""
    failed = [episode(chat, 0.0, [3, 2, 4, 3, 2], seed=i, member=i) for i in range(3)]
    assert mgrpo.group_advantages(failed) == []
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    method = feedback_of(chat, model, optimizer, G=3, feedback=0.05)
    rows, metrics = method.learn_from(failed, 0)
    losses = [mgrpo.update(method, rows)["feedback_loss"] for _ in range(12)]
    assert metrics["groups_kept"] == 0 and losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("changes", [{"feedback": -0.1}, {"feedback_tokens": 0}])
def test_a_negative_weight_and_no_tokens_are_refused(chat, changes):
    with pytest.raises(ValueError, match="at least 1 token"):
        feedback_of(chat, **changes)


# ---------------------------------------------------------------------------------------------- the script


def test_an_interrupted_run_continues_as_if_nothing_had_happened(chat, play, tmp_path):  # noqa: F811
    """Bit for bit, on groups that train and groups that do not."""
    async def paged(*args, **kwargs):
        played = await hard_and_easy(chat)(*args, **kwargs)
        for tau in played:
            for t, turn in enumerate(tau.turns):
                turn.observation = PAGES[t]
        return played

    async def interrupted(*args, seed, **kwargs):
        if seed == "0/3":
            raise KeyboardInterrupt
        return await paged(*args, seed=seed, **kwargs)
    whole = play(feedback, paged, "whole")
    assert len(play(feedback, interrupted, "parts", save_every=2)) == 3
    parts = play(feedback, paged, "parts", save_every=2)
    timeless = lambda lines: [{k: v for k, v in line.items() if "second" not in k} for line in lines]
    assert timeless(parts) == timeless(whole)
    assert whole[-1]["feedback_loss"] < whole[0]["feedback_loss"] and all(line["n_feedback"] for line in whole)
    a, b = (load(tmp_path / out).state_dict() for out in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_two_ranks_do_what_one_does(pointing, sandbox_sites, monkeypatch, tmp_path):  # noqa: F811
    found = on_one_and_two_ranks(feedback, pointing, sandbox_sites, monkeypatch, tmp_path, "--feedback", 0.1)
    for one, two in zip(*found, strict=True):
        assert one["feedback_loss"] == pytest.approx(two["feedback_loss"], rel=1e-3)
        assert one["n_feedback"] == two["n_feedback"] > 0 and max(one["logp_gap"], two["logp_gap"]) < 1e-5
