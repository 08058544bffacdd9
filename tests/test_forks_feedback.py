"""forks/feedback.py: what is appended, what it leaves as it was, and its loss against one turn at a time."""
import copy
import time

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
NO_ELEMENT = "error: there is no element 9 on this page"


@pytest.fixture
def model(chat):
    return tiny_model(vocab_size=chat.tokenizer.get_vocab_size())


def feedback_of(chat, model=None, optimizer=None, **changes):
    cfg = feedback.Config(**changes)
    return method_of(chat, model, cfg, optimizer, Method=feedback.Feedback)


def still(model):
    """An optimizer that leaves the policy where it is."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


# --------------------------------------------------------------------------------------- what is predicted


@pytest.mark.parametrize("after, new", [
    (HOME, ""),
    (HOME.replace("5", "7").replace("10", "11"), ""),  # other ids
    (f"{NO_ELEMENT}\n{HOME}", NO_ELEMENT),
    ("note: the page showed an alert: hi\n" + HOME, "note: the page showed an alert: hi"),
    (HOME.replace("$24", "$25"), "<a>home <0></a> <a>red lamp <5></a> $25"),
    (HOME + "\nadded", "added"),
    (HOME.replace("title: shop\n", ""), ""),  # what is gone cannot be read
    ("title: cart\n<a>home <0></a> <a>red lamp <5></a> $24\n1 item", "title: cart\n1 item"),
    ("title: cart\nempty", "title: cart\nempty"),
    ("", ""),
    (HOME + "\nx\nhalf a li" + feedback.CUT, "x"),
    ("<input>city <8> = rome</input>\n" + HOME, "<input>city <8> = rome</input>"),
    ("<select>size <7> = s (s | m)</select>\n" + HOME, "<select>size <7> = s (s | m)</select>"),
])
def test_what_an_action_changed_is_what_the_page_before_did_not_have(after, new):
    assert feedback.news(HOME, after) == new


def test_the_same_error_again_is_news_again_and_another_value_of_a_field_too():
    page = f"{NO_ELEMENT}\n{HOME}"
    assert feedback.news(page, page) == NO_ELEMENT
    rome = "<input>city <8> = rome</input>"
    oslo = "<input>city <8> = oslo</input>"
    assert feedback.news(rome, oslo) == oslo


@pytest.mark.parametrize("line, changed", [
    ("<input>amount <7> = {}</input>", True),
    ("<select>year <7> = {} (2024 | 2025)</select>", True),
    ("lamps {} (sale)", True),
    ("left = {} = right", True),
    ("<a>order {} <7></a>", True),
    ("{}</", True),
    ("<a>lamp <{}></a>", False),
    ("<a> <{}></a>", False),
    ("<select>size <{}> = 3 (3 | 4)</select>", False),
    ("<a>Mar 10 <{}></a> 12 <input>amount <{}> = 25</input> (3)", False),
])
def test_only_ids_do_not_count_and_no_other_number(line, changed):
    """A field's value, a number in the text: what one reads there may be the very change."""
    before = line.replace("{}", "24")
    after = line.replace("{}", "25")
    expected = ""
    if changed:
        expected = after
    assert feedback.news(before, after) == expected


def test_where_a_page_was_cut_is_no_news():
    """The history grows, so the same page is cut further up; without a message it is cut further down."""
    lines = [f"<a>item {i} <{i}></a>" for i in range(10)]
    cut = "\n".join(lines[:6]) + "\n<a>item 6" + feedback.CUT
    cut_further_up = "\n".join(lines[:4]) + "\n<a>it" + feedback.CUT
    whole = "\n".join(lines)
    assert feedback.news(cut, cut) == ""
    assert feedback.news(cut, cut_further_up) == ""
    assert feedback.news(cut_further_up, cut) == ""
    assert feedback.news(cut, whole) == ""
    assert feedback.news(cut, "title: elsewhere") == "title: elsewhere"
    assert feedback.news(cut, "title: first\n" + cut) == "title: first"


def test_only_line_feeds_end_the_lines_of_a_page():
    assert feedback.whole_lines("one\x85two\u2028three\nfour") == ["one\x85two\u2028three", "four"]


def test_a_long_page_is_compared_at_once():
    """Every row of a list has the same buttons. In 2,000 lines difflib's exact answer takes minutes."""
    rows = []
    for i in range(700):
        rows += [f"<td>customer {i}</td>", "<a>Edit <1></a>", "<a>Delete <2></a>"]
    after = rows[:900] + ["<td>one more</td>"] + rows[900:]
    before = "\n".join(rows)
    start = time.monotonic()
    assert feedback.news(before, "\n".join(after)) == "<td>one more</td>"
    assert time.monotonic() - start < 20


def test_what_begins_like_a_message_inside_a_page_is_a_line_like_others():
    page = "title: x\nnote: closed on Sunday"
    assert feedback.news(f"note: a dialog\n{page}", page) == ""


PAGES = [
    HOME,
    "error: no effect\n" + HOME,
    "title: cart\n1 item\n<a>pay <3></a>",
    "title: cart\n1 item\n<a>pay <4></a>",
    "title: paid\n" + "<a>red lamp <5></a> $24\n" * 9,
]
# What each page shows that the one before it did not, by hand.
NEWS = [
    None,
    "error: no effect",
    "title: cart\n1 item\n<a>pay <3></a>",
    "",
    "title: paid\n" + ("<a>red lamp <5></a> $24\n" * 9).strip(),
]


def episode(chat, reward, lengths, seed=0, member=0, status="ok"):
    """An episode through PAGES, whose responses now and then end by themselves."""
    tau = trajectory(chat, reward, lengths, seed=seed, member=member, status=status)
    for t, turn in enumerate(tau.turns):
        turn.observation = PAGES[t % len(PAGES)]
        turn.message_ids = chat.user_ids(tau.task, t, turn.observation)
        if (t + seed) % 2:
            turn.response_ids[-1] = chat.end_id
    return tau


def groups_of(chat):
    """A group that trains, one that fails as a whole, and an episode that the environment broke."""
    mixed = []
    for i in range(3):
        lengths = [2 + i, 3, 4, 1, 2]
        n_turns = 3 + i
        mixed.append(episode(chat, float(i == 0), lengths[:n_turns], seed=i, member=i))
    failed = []
    for i in range(3):
        failed.append(episode(chat, 0.0, [3, 2 + i], seed=9 + i, member=i))
    failed[1].status = "env_error"
    return [*mixed, *failed]


def obvious_feedback(chat, tau, t, limit):
    """(ids of h_j, a_j and the start of the next message; the ids to predict), written out.

    Both are empty after the last turn.
    """
    next_t = t + 1
    if next_t == len(tau.turns):
        return [], []
    start = chat.opening("user", f"Round {next_t}\n\n")
    message = chat.opening("user", f"Round {next_t}\n\n{NEWS[next_t]}")
    assert message[:len(start)] == start
    response = chat.past_response(tau.turns[t].response_ids)
    before = context(chat, tau, t) + response + start
    new = message[len(start):]
    return before, new[:limit]


def test_the_news_stand_behind_the_response_in_the_form_of_the_next_message(chat):
    for limit in (5, 64):
        tau = episode(chat, 0.0, [3, 2, 4, 3, 2])
        rows = trajectory_rows(chat, tau)
        counts = [feedback.append_feedback(chat, row, limit, max_context=10_000) for row in rows]

        for t, (row, n) in enumerate(zip(rows, counts)):
            response = tau.turns[t].response_ids
            before, new = obvious_feedback(chat, tau, t, limit)
            assert n == len(new)
            assert n == sum(row.after)
            if n:
                assert row.ids == before + new
                assert row.after[-n:] == [True] * n
            else:
                assert row.ids == context(chat, tau, t) + response
                assert row.after == []
            packed = pack([row])
            trained = packed["tokens_BT"][packed["action_BT"]].tolist()
            assert trained == response  # never the news

        has_news = [n > 0 for n in counts]
        assert has_news == [True, True, False, True, False]
        assert max(counts) <= limit
        assert max(counts) == 5 or limit == 64

    text = chat.tokenizer.decode(rows[0].ids, skip_special_tokens=False)
    assert text.endswith("<|im_end|>\n<|im_start|>user\nRound 1\n\nerror: no effect")


def test_the_news_leave_a_row_within_the_context(chat):
    def rows():
        return trajectory_rows(chat, episode(chat, 0.0, [3, 2, 4, 3, 2]))

    whole = rows()[0]
    n_news = feedback.append_feedback(chat, whole, limit=64, max_context=10_000)
    longest = len(whole.ids)
    assert n_news > 2
    for missing in range(n_news + 3):
        row = rows()[0]
        alone = row.ids
        left = max(0, n_news - missing)
        assert feedback.append_feedback(chat, row, limit=64, max_context=longest - missing) == left
        assert sum(row.after) == left
        if left:
            assert row.ids == whole.ids[:longest - missing]
        else:
            assert row.ids == alone


@pytest.mark.parametrize("budget", [1, 500, 10**6])
def test_the_policys_log_probs_are_those_without_the_appended_tokens(chat, model, budget):
    """By causality. Packed in any way, and one row alone; of later turns as well, which share the history."""
    episodes = groups_of(chat)[:3]
    plain = {}
    for tau in episodes:
        for t, row in enumerate(trajectory_rows(chat, tau)):
            plain[tau.member, t] = logprobs(model, row)

    method = feedback_of(chat, model, G=3, temperature=1.0)
    rows, _ = method.training_rows(copy.deepcopy(episodes), 0)
    found = 0
    for batch in micro_batches(rows, budget):
        lengths = [row.n_action for row in batch]
        n_actions = sum(lengths)
        logp_N, entropy_N, hidden_ND = method.logprobs(batch, pack(batch))
        assert len(logp_N) == n_actions
        assert len(entropy_N) == n_actions
        assert len(hidden_ND) == n_actions
        for row, logp in zip(batch, logp_N.split(lengths)):
            t = row.tau.turns.index(row.turn)
            torch.testing.assert_close(logp, plain[row.tau.member, t], atol=1e-5, rtol=1e-5)
            found += 1
    assert found == 12
    assert len(plain) == 12


# ------------------------------------------------------------------------------------------------ the loss


def obvious_loss(chat, episodes, advantages, model, cfg, limit):
    """(loss, mean cross-entropy of the news, their number), one turn and one token at a time.

    advantages: of the episodes that train, by id.
    """
    def logps_of(before, new):
        """The log-probs of the tokens `new`, which follow the tokens `before`."""
        logits_TV = model(torch.tensor([before + new]))[0] / cfg.temperature
        logp_TV = logits_TV.log_softmax(-1)
        first = len(before) - 1
        return [logp_TV[first + k, token] for k, token in enumerate(new)]

    tokens = 0
    for tau in episodes:
        if id(tau) in advantages:
            tokens += sum(len(turn.response_ids) for turn in tau.turns)

    policy = 0.0
    cross_entropy = 0.0
    n = 0
    for tau in episodes:
        if tau.status != "ok":
            continue
        for t, turn in enumerate(tau.turns):
            if id(tau) in advantages:
                A = advantages[id(tau)]
                h_j = context(chat, tau, t)
                logps = logps_of(h_j, turn.response_ids)
                for logp, logp_old in zip(logps, turn.logps):
                    rho = (logp - logp_old).exp()
                    clipped = rho.clamp(1 - cfg.eps, 1 + cfg.eps)
                    policy = policy - min(rho * A, clipped * A) / tokens
            before, new = obvious_feedback(chat, tau, t, limit)
            if new:
                for logp in logps_of(before, new):
                    cross_entropy = cross_entropy - logp
                    n += 1
    mean = cross_entropy / n
    return policy + cfg.feedback * mean, mean, n


@pytest.mark.parametrize("budget", [1, 700, 10**6])
def test_an_update_has_the_gradient_of_both_losses(chat, model, budget):
    """Packed, float32, 1e-5. Of the group that fails as a whole, only the news count."""
    episodes = groups_of(chat)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = optimizer.step
    grads = {}

    def recorded():
        for name, parameter in model.named_parameters():
            grads[name] = parameter.grad.clone()
        step()
    optimizer.step = recorded

    method = feedback_of(
        chat,
        model,
        optimizer,
        G=3,
        temperature=0.7,
        max_grad_norm=1e9,
        max_tokens=budget,
        feedback=0.3,
        feedback_tokens=20,
    )
    rows, metrics = method.training_rows(episodes, 0)

    # Of three episodes of the mixed group the first succeeds: the mean is 1/3, the variance too.
    advantages = {}
    for tau in episodes[:3]:
        advantages[id(tau)] = -1 / 3 / (1 / 3) ** 0.5
    advantages[id(episodes[0])] = 2 / 3 / (1 / 3) ** 0.5

    for _ in range(2):  # from the second update on, rho differs from 1 and the news are scored anew
        expected, cross_entropy, n = obvious_loss(chat, episodes, advantages, model, method.cfg, 20)
        gradients = torch.autograd.grad(expected, list(model.parameters()))
        line = method.update(rows)
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
    method = method_of(chat, model, cfg, still(model), reference, Method=feedback.Feedback)

    rows, _ = method.training_rows(failed, 0)
    line = method.update(rows)

    assert line["kl"] > 0
    cross_entropy = line["feedback_loss"]
    assert line["loss"] == pytest.approx(0.3 * cross_entropy, rel=1e-5)


def test_metrics_of_the_policy_do_not_count_the_news(chat, model):
    episodes = groups_of(chat)[:3]

    def line_of(method):
        rows, _ = method.training_rows(copy.deepcopy(episodes), 0)
        return method.update(rows)

    ours = line_of(feedback_of(chat, model, still(model), G=3, feedback=0.0))
    theirs = line_of(method_of(chat, model, mgrpo.Config(G=3), still(model)))

    for key in ("loss", "kl", "clip_frac", "entropy", "logp_gap", "action_tokens", "grad_norm"):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-7), key
    assert ours["packed_tokens"] > theirs["packed_tokens"]
    assert ours["feedback_loss"] > 0


def test_it_learns_to_predict_pages_from_failures_alone(chat, model):
    """mgrpo.py makes no step on them."""
    failed = []
    for i in range(3):
        failed.append(episode(chat, 0.0, [3, 2, 4, 3, 2], seed=i, member=i))
    assert mgrpo.group_advantages(failed) == []

    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    method = feedback_of(chat, model, optimizer, G=3, feedback=0.05)
    rows, metrics = method.training_rows(failed, 0)
    losses = [method.update(rows)["feedback_loss"] for _ in range(12)]
    assert metrics["groups_kept"] == 0
    assert losses[-1] < 0.7 * losses[0]


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

    def timeless(lines):
        found = []
        for line in lines:
            found.append({k: v for k, v in line.items() if "second" not in k})
        return found

    assert timeless(parts) == timeless(whole)
    assert whole[-1]["feedback_loss"] < whole[0]["feedback_loss"]
    for line in whole:
        assert line["n_feedback"]
    weights = load(tmp_path / "whole").state_dict()
    continued = load(tmp_path / "parts").state_dict()
    for name, weight in weights.items():
        assert torch.equal(weight, continued[name])


@pytest.mark.slow
def test_two_ranks_do_what_one_does(pointing, sandbox_sites, monkeypatch, tmp_path):  # noqa: F811
    found = on_one_and_two_ranks(feedback, pointing, sandbox_sites, monkeypatch, tmp_path, "--feedback", 0.1)
    for one, two in zip(*found, strict=True):
        assert one["feedback_loss"] == pytest.approx(two["feedback_loss"], rel=1e-3)
        assert one["n_feedback"] == two["n_feedback"]
        assert two["n_feedback"] > 0
        assert one["logp_gap"] < 1e-5
        assert two["logp_gap"] < 1e-5
