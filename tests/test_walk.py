"""The walk from the page to the gradient: its numbers are the method's, its code is the files', its page agrees."""
import copy
import json
import math
import random
import re
import runpy
import statistics
import sys

import answers
import pytest
import torch
import walk
import walk_page
import walk_text
from conftest import ROOT

import mgrpo
from compress import context, open_chat
from model import load, sample
from rollout import parse

sys.path.insert(0, str(ROOT / "forks"))

START = "title: shop\n<a>lamps <0></a> <a>cart <1></a>"
LAMPS = "title: lamps\n<a>red lamp <5></a> $24\n<a>blue lamp <6></a> $31"
RED = "title: red lamp\n<button>add to cart <10></button>"
BLUE = "title: blue lamp\n<button>add to cart <10></button>"
CART = "title: cart\nred lamp"
OPEN_LAMPS = (START, "look for it", 'do(action="Click", element="0")')
OPEN_RED = (LAMPS, "click red lamp", '# Element: red lamp <5>\ndo(action="Click", element="5")')
OPEN_BLUE = (LAMPS, "click blue lamp", '# Element: red lamp <6>\ndo(action="Click", element="6")')
ADD = (RED, "add to cart", 'do(action="Click", element="10")')
DONE = (CART, "done", 'exit(message="done")')
# (success, status, turns): one success goes astray first, one episode is the browser's fault
EPISODES = [(0, "ok", [OPEN_LAMPS, OPEN_BLUE, (BLUE, "done", 'exit(message="done")')]),
            (1, "ok", [OPEN_LAMPS, OPEN_RED, ADD, DONE]),
            (0, "env_error", [OPEN_LAMPS, OPEN_BLUE]),
            (1, "ok", [(START, "look", 'do(action="Click", element="1")'), OPEN_LAMPS, OPEN_RED, ADD, DONE]),
            (0, "ok", [OPEN_LAMPS, (LAMPS, "lost", "exit()")])]
TEMPERATURE = 0.7
LR = 1e-2  # with which three updates reach the clip


def log_probs_by_hand(model, h_t, action_ids) -> list:
    """Each token's log-prob, from a forward pass over h_t and the whole response, alone. Differentiable."""
    logits_TV = model(torch.tensor([h_t + action_ids]))[0] / TEMPERATURE
    out = []
    for k, token in enumerate(action_ids):
        logits_V = logits_TV[len(h_t) + k - 1]
        out.append(logits_V[token] - logits_V.exp().sum().log())
    return out


def recorded(checkpoint) -> dict:
    """A group.json of five scripted episodes, with the log-probs that the checkpoint gives their tokens."""
    chat = open_chat(checkpoint, "")
    model = load(checkpoint).double()
    task = {"task_id": 3, "sites": ["shopping"], "intent": "add the red lamp to the cart", "eval": {"eval_types": ["url_match"]}}
    record = {"task": task, "number": 4, "step": 0, "model": "runs/tiny", "tasks": "sandbox:train", "seed": 0,
              "temperature": TEMPERATURE, "G": len(EPISODES), "episodes": []}
    for member, (success, status, said) in enumerate(EPISODES):
        turns = []
        for page, thought, action in said:
            response = f"<think>{thought}</think><answer>{action}</answer>"
            ids = [*chat.encode(response, ours=True), chat.end_id]
            turns.append({"url": "/shop", "observation": page, "response": response, "action": str(parse(response)), "error": "",
                          "ended": True, "action_ids": ids, "logps": [0.0] * len(ids)})
        answer = "done" if said[-1] is DONE else None
        record["episodes"].append({"member": member, "success": success, "reward": float(success), "status": status,
                                   "answer": answer, "checks": [["url_match", bool(success), "it ended there"]], "turns": turns})
    with torch.no_grad():
        for tau, episode in zip(walk.read_group(record, chat), record["episodes"]):
            for t, turn in enumerate(episode["turns"]):
                logps = log_probs_by_hand(model, context(chat, tau, t), turn["action_ids"])
                turn["logps"] = [logp.item() for logp in logps]
    return record


@pytest.fixture(scope="module")
def record(checkpoint):
    return recorded(checkpoint)


@pytest.fixture(scope="module")
def pages(record, checkpoint, tmp_path_factory):
    """The folder that walk.write fills: walk.md, walk.html, walk/."""
    folder = tmp_path_factory.mktemp("walk")
    walk.write(record, str(checkpoint), folder, LR)
    return folder


@pytest.fixture(scope="module")
def seen(record, checkpoint):
    """The Walk itself."""
    return walk.compute(copy.deepcopy(record), str(checkpoint), LR)


def data_of(page) -> dict:
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


def advantages_by_hand(record) -> list[float]:
    """Of the episodes that did not break, in order."""
    r = [episode["reward"] for episode in record["episodes"] if episode["status"] == "ok"]
    return [(value - statistics.mean(r)) / statistics.stdev(r) for value in r]


def loss_by_hand(record, logps, eps=0.2):
    """The loss of the group as loops over episodes, turns and tokens; all tokens weigh the same.

    logps: [episode][turn][token], of the episodes that did not break.
    """
    total, tokens = 0.0, 0
    valid = [episode for episode in record["episodes"] if episode["status"] == "ok"]
    for episode, A, mine in zip(valid, advantages_by_hand(record), logps):
        for turn, now in zip(episode["turns"], mine):
            for old_logp, logp in zip(turn["logps"], now):
                rho = math.exp(logp - old_logp)
                inside = min(max(rho, 1 - eps), 1 + eps)
                total += min(rho * A, inside * A)
                tokens += 1
    return -total / tokens


def one_line(text: str) -> str:
    """Paragraphs are broken anywhere."""
    return " ".join(text.split())


def printed_losses(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\*\*(-?\d+\.\d+)\*\*", text)]


def check_losses(record, text: str, data: dict):
    """The two losses in the text are those of the obvious loops, from the log-probs that the page holds."""
    first, last = printed_losses(text)
    valid = [episode for episode in data["episodes"] if episode["ok"]]
    for done, shown in ((0, first), (data["updates"] - 1, last)):
        logps = [[turn["passes"][done] for turn in episode["turns"]] for episode in valid]
        assert shown == pytest.approx(loss_by_hand(record, logps), abs=2e-6)


# ------------------------------------------------------------------------------------------- the text


def test_the_numbers_of_the_walk_are_those_of_an_independent_computation(record, pages):
    text = one_line((pages / "walk.md").read_text())
    data = data_of((pages / "walk.html").read_text())

    # 1) The advantages.
    shown = re.search(r"in the order of the episodes: (.*?)\. All tokens", text)[1]
    assert [float(number) for number in shown.split(", ")] == pytest.approx(advantages_by_hand(record), abs=6e-7)

    # 2) The losses, and that the ratios of the last one have moved past the clip.
    check_losses(record, text, data)
    assert data["updates"] == 3 and "ended" in text

    # 3) The response of the walk: its probability as a whole, in float64.
    logps = record["episodes"][1]["turns"][1]["logps"]
    whole = float(re.search(r"a probability of exp\(.*?\) = (\S+)\. ?", text)[1])
    assert whole == pytest.approx(math.exp(sum(logps)), abs=1e-4)

    # 4) The slopes of the logits by hand are those by autograd.
    by_hand = re.findall(r" x (?:\(1 - \S+\)|[\d.]+) = ([+-]0\.\d+)", text.split("## 11.")[1].split("Autograd")[0])
    by_autograd = re.search(r"Autograd through `mgrpo_loss` says (\S+) and (\S+)\. ", text).groups()
    assert [float(x) for x in by_hand] == pytest.approx([float(x) for x in by_autograd], abs=2e-6)


def table_after(text: str, header: str) -> list[list[str]]:
    """The cells of the first table whose header begins so."""
    lines = text[text.index(f"| {header} |"):].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def tokens_by_hand(record, data, done: int) -> list[tuple]:
    """(place, token, rho, A) of all tokens that train, from the log-probs that the page holds."""
    out = []
    valid = [i for i, episode in enumerate(record["episodes"]) if episode["status"] == "ok"]
    for i, A in zip(valid, advantages_by_hand(record)):
        for t, turn in enumerate(data["episodes"][i]["turns"]):
            for k, (old, now) in enumerate(zip(turn["old"], turn["passes"][done])):
                token = record["episodes"][i]["turns"][t]["action_ids"][k]
                out.append(((i, t, k), token, math.exp(now - old), A))
    return out


def gradient_by_hand(rho: float, A: float) -> float:
    """Of min(rho A, clip(rho) A) by the log-prob, as a difference quotient."""
    def value(logp):
        ratio = math.exp(logp)
        return min(ratio * A, min(max(ratio, 0.8), 1.2) * A)
    return (value(math.log(rho) + 1e-6) - value(math.log(rho) - 1e-6)) / 2e-6


def check_token_table(record, text: str, data: dict):
    """Stop 9's table: which tokens it shows, and that each of its numbers can be computed from the others in its row."""
    # 1) The numbers. `exp(new - old)` and the products agree to the decimals shown.
    rows = table_after(text, "token | old log-prob")
    for _, old, new, rho, A, least, gradient in rows:
        rho, A = float(rho), float(A)
        assert rho == pytest.approx(math.exp(float(new) - float(old)), rel=2e-6, abs=1e-6)
        assert float(least) == pytest.approx(min(rho * A, min(max(rho, 0.8), 1.2) * A), rel=2e-6, abs=6e-5)
        slope = gradient_by_hand(rho, A)
        assert gradient == "0: ended" and slope == 0 or float(gradient) == pytest.approx(slope, rel=2e-6, abs=6e-5)

    # 2) The two tokens where the calls part.
    right, wrong, t, k = data["walked"], data["other"], data["turn"], data["token"]
    tokens = {place: (token, rho, A) for place, token, rho, A in tokens_by_hand(record, data, data["updates"] - 1)}
    assert float(rows[0][3]) == pytest.approx(tokens[right, t, k][1], abs=1e-6) and "(right call)" in rows[0][0]
    assert float(rows[1][3]) == pytest.approx(tokens[wrong, t, k][1], abs=1e-6) and "(wrong call)" in rows[1][0]
    both = [tokens[right, t, k][0], tokens[wrong, t, k][0]]

    # 3) The furthest one, one that still counts, and the furthest of those that moved against their advantage.
    named = {re.search(r"(furthest|still counts|against)", row[0])[1]: row for row in rows[2:]}
    far = [(abs(math.log(rho)), place, rho) for place, (token, rho, _) in tokens.items() if token not in both]
    _, (i, turn, _), rho = max(far)
    assert f"(episode {i}, turn {turn + 1}: " in named["furthest"][0] and float(named["furthest"][3]) == pytest.approx(rho, abs=1e-6)
    later = [rho for (i, turn, place), (_, rho, A) in tokens.items()
             if (i, turn) == (right, t) and place > k and gradient_by_hand(rho, A)]
    assert "still counts" not in named and not later or float(named["still counts"][3]) == pytest.approx(later[0], abs=1e-6)
    back = [(abs(math.log(rho)), rho) for _, rho, A in tokens.values() if math.log(rho) * A < 0 and abs(math.log(rho)) > 1e-3]
    assert "against" not in named and not back or float(named["against"][3]) == pytest.approx(max(back)[1], abs=1e-6)

    # 4) The response of the furthest one can be read.
    _, (i, turn, _), _ = max(far)
    response = record["episodes"][i]["turns"][turn]["response"]
    assert f"(episode {i}, turn {turn + 1}):\n\n```text\n{response}\n```" in text


def check_clip_cases(text: str):
    """Stop 9's four cases: where the gradient by hand is 0, min picks the clipped value."""
    rows = table_after(text, "A | rho | min picks")
    assert [row[:2] for row in rows] == [["A > 0", "rho > 1.2"], ["A > 0", "rho < 0.8"], ["A < 0", "rho > 1.2"], ["A < 0", "rho < 0.8"]]
    for sign, place, picks, gradient in rows:
        A = 1.0 if sign == "A > 0" else -1.0
        for rho in (1.3, 2.0) if place == "rho > 1.2" else (0.7, 0.1):
            if gradient_by_hand(rho, A) == 0:
                assert picks == f"{place.split()[-1]} A, the clipped value" and gradient == "0: the token moved enough"
            else:
                assert picks == "rho A" and gradient == "rho A: the token moved the wrong way"


def pulls_by_hand(record, data) -> tuple[int, int, int]:
    """(ended by the clip, in turns that are the same in all episodes, left) before the last update.

    Of the tokens that were drawn with a probability below 0.99. Pages and responses say which turns are the same.
    """
    said = [[(turn["observation"], turn["response"]) for turn in episode["turns"]]
            for episode in record["episodes"] if episode["status"] == "ok"]
    common = 0
    while all(turns[:common + 1] == said[0][:common + 1] for turns in said) and common < min(map(len, said)):
        common += 1
    ended, cancelling, left = 0, 0, 0
    for (i, t, k), _, rho, A in tokens_by_hand(record, data, data["updates"] - 1):
        if math.exp(record["episodes"][i]["turns"][t]["logps"][k]) >= 0.99:
            continue
        if gradient_by_hand(rho, A) == 0:
            ended += 1
        elif t < common:
            cancelling += 1
        else:
            left += 1
    return ended, cancelling, left


def check_pocket_calculator(text: str):
    """Stop 10's first table: A times tokens is the last column; the last decimal may differ by one, as the page says."""
    *episodes, total = table_after(text, "episode | r | A")
    for _, _, A, tokens, product in episodes:
        assert abs(float(A) * int(tokens) - float(product)) < 1.01e-4 + 5e-7 * int(tokens)
    assert float(total[-1]) == pytest.approx(sum(float(row[-1]) for row in episodes), abs=1e-4 * len(episodes))


def test_the_tables_can_be_computed_from_what_they_show(record, pages):
    text = (pages / "walk.md").read_text()
    check_token_table(record, text, data_of((pages / "walk.html").read_text()))
    check_clip_cases(text)
    check_pocket_calculator(text)


@torch.no_grad()
def test_the_intervals_are_where_the_sampler_changes_its_mind(record, seen, checkpoint):
    """By hand: the sum of the probabilities of all ids before a token's, and with its own."""
    k = seen.parting.token
    logits_V = load(checkpoint).double()(torch.tensor([context(seen.chat, seen.parting.right, 1) + seen.parting.right_ids[:k]]))[0, -1]
    weights = (logits_V / TEMPERATURE).exp().tolist()
    for ids, (begin, end) in zip((seen.parting.right_ids, seen.parting.wrong_ids), seen.intervals):
        whole = math.fsum(weights)
        assert begin == pytest.approx(math.fsum(weights[:ids[k]]) / whole, abs=1e-6)
        assert end == pytest.approx(math.fsum(weights[:ids[k] + 1]) / whole, abs=1e-6)
        inside = torch.tensor([begin + 1e-6, end - 1e-6, end + 1e-6], dtype=torch.float64)
        drawn, _ = sample(logits_V.float().expand(3, -1), inside, TEMPERATURE)
        assert drawn[0] == drawn[1] == ids[k] != drawn[2]
    right, wrong = seen.intervals
    shown = walk_text.draws(seen)
    assert f"owns [{right[0]:.6f}, {right[1]:.6f}) and" in one_line(shown) and f"owns [{wrong[0]:.6f}, {wrong[1]:.6f})." in one_line(shown)


def test_the_parts_of_the_context_add_up(seen, pages):
    text = one_line((pages / "walk.md").read_text())
    whole, trunk, system, present, page, frame = map(int, re.search(
        r"one list of (\d+) token ids: (\d+) of the past \(the \*trunk\*: the system prompt's (\d+) and the past turns\), "
        r"then (\d+) of the present page \(the (\d+) of stop 2; the other (\d+) are the chat format", text).groups())
    assert whole == len(context(seen.chat, seen.parting.right, 1)) == trunk + present and present == page + frame
    assert page == len(seen.chat.encode(LAMPS)) and system == len(seen.chat.system_ids()) < trunk
    assert f"So the page becomes text, {page} tokens here." in text and "the line `Round 1`)" in text


def test_the_longer_episode_is_called_another_one(pages):
    """The figures' numbers are not those of the walk's episode: they are the expert's, in assets/episode.jsonl."""
    text = one_line((pages / "walk.md").read_text())
    turns = len(json.loads((ROOT / "assets/episode.jsonl").read_text().splitlines()[0])["turns"])
    assert f"In the longer episode of the figure ({turns} turns, not ours) that makes" in text


def test_the_other_episodes_draw_is_that_of_its_own_generator(record, seen):
    """The wrong response's random number, counted from the episode's first one."""
    tau = seen.parting.wrong
    rng = random.Random(f"0/0/3/{tau.member}")
    for _ in range(len(tau.turns[0].action_ids) + seen.parting.token):
        rng.random()
    assert seen.other_draw == rng.random() != seen.draws[seen.parting.token]


def test_packed_ids_are_the_different_beginnings_of_contexts_and_each_rows_own_end(seen, pages):
    """The group is one micro-batch, and no context holds a trained response at the place where it trains."""
    beginnings = set()
    written = 0
    for row in seen.rows:
        own = 1 + row.n_action  # what predicts the first action, and the actions
        beginnings |= {tuple(row.ids[:n + 1]) for n in range(len(row.ids) - own)}
        written += own
    written += len(beginnings)
    text = one_line((pages / "walk.md").read_text())
    alone = sum(len(row.ids) for row in seen.rows)
    assert written < alone and f"{written:,} ids instead of {alone:,}" in text


def test_the_fork_in_the_text_is_whole(pages, given, tmp_path):
    """It is a method whose reward is less for a longer episode; a reader can save it and run it."""
    text = (pages / "walk.md").read_text().split("## 12.")[1].split("## Exercises")[0]
    path = tmp_path / "short.py"
    path.write_text(re.search(r"```python\n(import sys.*?)```", text, re.DOTALL)[1])
    Short = runpy.run_path(str(path))["Short"]
    method = Short(given.cfg, given.chat, given.model, None, None, torch.device("cpu"))
    short, long = (answers.episodes_with([1.0], turns=turns)[0] for turns in (2, 8))
    assert issubclass(Short, mgrpo.MGRPO) and 1 > method.reward(short) > method.reward(long) > 0


def adamw_by_hand(model, updates: int) -> list[dict]:
    """The weights after each update, of which only the first has the gradient that the model holds; then it is 0."""
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    first = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    out = []
    for n in range(1, updates + 1):
        for name, weight in weights.items():
            # Running means of the gradient and of its square, which began with 0.
            mean = 0.9 ** (n - 1) * 0.1 * first[name] / (1 - 0.9 ** n)
            square = 0.99 ** (n - 1) * 0.01 * first[name] ** 2 / (1 - 0.99 ** n)
            weights[name] = weight - LR * mean / (square.sqrt() + 1e-8)
        out.append(dict(weights))
    return out


def test_the_updates_of_the_walk_are_those_of_a_plain_training_loop(record, seen, pages, checkpoint):
    """Row by row without packing, min and clip spelled out, torch's AdamW: the log-probs after one and two updates."""
    data = data_of((pages / "walk.html").read_text())
    chat = open_chat(checkpoint, "")
    model = load(checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    group = [tau for tau in walk.read_group(record, chat) if tau.status == "ok"]
    shown = [episode for episode in data["episodes"] if episode["ok"]]
    tokens = sum(len(turn.action_ids) for tau in group for turn in tau.turns)
    for done in (0, 1, 2):
        total = 0.0
        for tau, A, episode in zip(group, advantages_by_hand(record), shown):
            for t, turn in enumerate(tau.turns):
                logps = log_probs_by_hand(model, context(chat, tau, t), turn.action_ids)
                assert [logp.item() for logp in logps] == pytest.approx(episode["turns"][t]["passes"][done], abs=5e-3)
                for logp, old in zip(logps, turn.logps):
                    rho = (logp - old).exp()
                    total = total - torch.minimum(rho * A, rho.clamp(0.8, 1.2) * A) / tokens
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if done == 0:
            after_one = adamw_by_hand(model, updates=3)
        optimizer.step()
        optimizer.zero_grad()

    # Coasting: the first gradient, then gradients of 0.
    parting = seen.parting
    ids = context(chat, parting.right, parting.turn) + parting.right_ids[:parting.token]
    for weights, shown in zip(after_one[1:], seen.coasting, strict=True):
        model.load_state_dict(weights)
        p_V = (model(torch.tensor([ids]))[0, -1] / TEMPERATURE).softmax(-1)
        assert p_V[parting.right_ids[parting.token]].item() == pytest.approx(shown, rel=2e-2)
    others = [(p, token) for token, p in enumerate(p_V.tolist()) if token != parting.right_ids[parting.token]]
    assert [p for p, _ in sorted(others)[:-3:-1]] == pytest.approx([p for _, p in seen.gaining], rel=2e-2)


def test_a_changed_loss_changes_the_walk(record, checkpoint, tmp_path, monkeypatch):
    def mgrpo_loss(logp_N, logp_old_N, logp_ref_N, A_N, weight_N, eps, beta):
        rho_N = (logp_N - logp_old_N).exp()
        surrogate_N = rho_N * A_N  # no clip
        loss = -(weight_N * surrogate_N).sum()
        return loss, {"kl": 0.0, "clip_frac": 0.0}

    monkeypatch.setattr(mgrpo, "mgrpo_loss", mgrpo_loss)
    changed = walk.compute(record, str(checkpoint), LR)
    with pytest.raises(AssertionError):
        check_losses(record, walk_text.loss(changed), walk_page.data(changed, tmp_path))


def test_the_step_moves_the_right_response_away_from_the_wrong_one(record, seen):
    before, *_, after = seen.chances
    turns = [episode["turns"][1] for episode in record["episodes"]]
    assert [before.right_response, before.wrong_response] == pytest.approx([sum(turns[1]["logps"]), sum(turns[0]["logps"])], abs=1e-3)
    k = seen.parting.token
    assert [before.right, before.wrong] == pytest.approx([math.exp(turns[i]["logps"][k]) for i in (1, 0)], abs=1e-6)
    assert after.right_response - after.wrong_response > before.right_response - before.wrong_response + 1


def test_episodes_of_other_weights_are_refused(record, checkpoint):
    other = copy.deepcopy(record)
    other["episodes"][0]["turns"][0]["logps"][0] -= 0.1
    with pytest.raises(ValueError, match="did not sample this group: a log-prob differs by 0.1"):
        walk.compute(other, str(checkpoint))


def test_attention_is_what_the_model_computes(seen):
    """Each row sums to 1 and sees nothing later. (The tool itself compares the weighted values with the model's.)"""
    h_t = context(seen.chat, seen.parting.right, 1)
    weights_LNT = seen.attention[1]
    assert weights_LNT.shape == (2, len(seen.turn.action_ids), len(h_t) + len(seen.turn.action_ids))
    assert torch.allclose(weights_LNT.sum(-1), torch.ones(weights_LNT.shape[:2]), atol=1e-5)
    assert (weights_LNT[:, 0, len(h_t):] == 0).all() and (weights_LNT[:, 0, len(h_t) - 1] > 0).all()


# ------------------------------------------------------------------------------------- choosing a group


def test_the_walk_begins_where_a_success_and_a_failure_part_after_the_first_turn(record, checkpoint):
    chat = open_chat(checkpoint, "")
    group = walk.read_group(record, chat)
    parting = walk.find_parting(group, chat)
    ids = [tau.turns[1].action_ids for tau in (parting.right, parting.wrong)]
    assert ids[0][:parting.token] == ids[1][:parting.token] and ids[0][parting.token] != ids[1][parting.token]

    all_fail = walk.read_group(record, chat)
    for tau in all_fail:
        tau.success = 0.0
    part_at_once = [group[3], group[4]]
    no_second_turn = walk.read_group(record, chat)[:2]
    for tau in no_second_turn:
        tau.turns = tau.turns[:1]
    lucky = walk.read_group(record, chat)[0]
    lucky.success = 1.0
    a_success_made_it_as_well = [*walk.read_group(record, chat)[:2], lucky]
    for other in (all_fail, part_at_once, no_second_turn, a_success_made_it_as_well, []):
        assert walk.find_parting(other, chat) is None


def test_a_response_that_names_another_element_than_it_uses_is_explained(seen):
    turn = copy.deepcopy(seen.turn)
    turn.observation = "<button>upvote <5></button> <button>downvote <6></button>"
    turn.response = '<think>click review</think><answer># Element: review <5>\ndo(action="Click", element="5")</answer>'
    assert "names “review”, but element 5 is “upvote”" in walk_text.wrong_name(turn, "5")
    turn.response = turn.response.replace("review", "upvote")
    assert walk_text.wrong_name(turn, "5") == ""
    turn.response = '<think>all is done</think><answer>exit(message="done")</answer>'
    assert walk_text.wrong_name(turn, None) == ""


def test_rare_responses_show_little(record, checkpoint):
    chat = open_chat(checkpoint, "")
    parting = walk.find_parting(walk.read_group(copy.deepcopy(record), chat), chat)
    for tau in (parting.right, parting.wrong):
        tau.turns[1].logps[parting.token] = math.log(0.2)
    assert walk.is_likely(parting)
    parting.wrong.turns[1].logps[parting.token] = math.log(0.05)
    assert not walk.is_likely(parting)


def test_play_takes_the_first_task_that_fits_and_keeps_no_address(record, checkpoint, tmp_path, monkeypatch):
    """The first group has no success, in the second one a success failed at first, the third fits. Pictures are those of
    the success."""
    played = []

    def collect(method, tasks, env, step):
        group = walk.read_group(record, method.chat)
        for tau in group:
            tau.success *= min(1, len(played))
            tau.checks = [("url_match", True, "the episode ended on http://127.0.0.1:41283/shop/cart")]
            for turn in tau.turns:
                turn.url = "http://127.0.0.1:41283/shop"
                file = env.out / f"{tau.member}.jpg"
                file.write_bytes(b"no picture")
                turn.shot = {"file": file.name, "frame": [10, 20, 30, 40]}
            if tau.success and len(played) == 1:
                tau.turns[0].error = "no action found"
        played.append(tasks[0]["task_id"])
        return group

    monkeypatch.setattr(mgrpo.MGRPO, "collect", collect)
    monkeypatch.setattr(walk, "LIKELY", 1e-9)  # this policy knows nothing, so every token is a rare one
    walk.play(str(checkpoint), tmp_path)
    kept = json.loads((tmp_path / "group.json").read_text())
    assert played == [0, 1, 2] and kept["task"]["task_id"] == 2 == kept["number"]
    assert "127.0.0.1" not in json.dumps(kept) and kept["episodes"][0]["turns"][0]["url"] == "/shop"
    assert kept["episodes"][1]["turns"][1]["logps"] == record["episodes"][1]["turns"][1]["logps"]
    assert sorted(file.name for file in tmp_path.glob("*.jpg")) == [f"turn-{t}.jpg" for t in (1, 2, 3, 4)]


# ------------------------------------------------------------------------------------------- the page


@pytest.fixture
def look_at(run):
    """look_at(page, script, width) -> (the script's result, what the browser complains of, what was asked for)."""
    async def play(path, script, keys, width):
        from rollout import Settings
        from worlds.browser import Browser
        complaints, asked = [], []
        async with Browser(Settings()) as browser:
            page = await browser.chromium.new_page(viewport={"width": width, "height": 800})
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            await page.goto(path.absolute().as_uri())
            for key in keys:
                await page.keyboard.press(key)
            return await page.evaluate(script), complaints, asked

    return lambda path, script, keys=(), width=1280: run(play(path, script, keys, width))


def by_mgrpo(record, checkpoint, data, settings) -> tuple[float, list]:
    """(loss, minus its derivative by each token's log-prob) of the group, by mgrpo.py and forks/gigpo.py."""
    from gigpo import turn_advantages
    chat = open_chat(checkpoint, "")
    cfg = mgrpo.Config(eps=settings["eps"], beta=settings["beta"], G=settings["G"], loss_norm=settings["loss_norm"])
    group = walk.read_group(record, chat)[:cfg.G]
    training = mgrpo.group_advantages(group)
    if not training:
        return 0.0, []
    turn_advantages(training, settings["credit"], walk_page.GAMMA)
    rows = mgrpo.weigh([training], chat, cfg)
    episodes = [data["episodes"][tau.member] for tau in training]
    turns = [turn for episode in episodes for turn in episode["turns"]]
    old, now, reference = [], [], []
    for row, turn in zip(rows, turns):
        old += row.logps
        now += turn["passes"][settings["done"]]
        reference += turn["passes"][0]
    logp_N = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    reference_N = torch.tensor(reference, dtype=torch.float64)
    old_N = torch.tensor(old, dtype=torch.float64)
    A_N = mgrpo.per_token([row.advantage for row in rows], rows, "cpu")
    weight_N = mgrpo.per_token([row.weight for row in rows], rows, "cpu")
    loss, _ = mgrpo.mgrpo_loss(logp_N, old_N, reference_N, A_N=A_N, weight_N=weight_N, eps=cfg.eps, beta=cfg.beta)
    loss.backward()
    return loss.item(), (-logp_N.grad).tolist()


def test_the_page_computes_what_mgrpo_computes(record, seen, pages, checkpoint, look_at):
    data = data_of((pages / "walk.html").read_text())
    default = {"eps": 0.2, "beta": 0.0, "G": 5, "credit": 0, "loss_norm": "token", "done": 2}
    cases = [default]
    for change in ({"done": 0}, {"eps": 0.05}, {"beta": 0.3}, {"G": 4}, {"G": 3}, {"loss_norm": "paper"},
                   {"loss_norm": "constant"}, {"credit": 1.0}, {"credit": 0.5, "G": 4, "loss_norm": "paper", "beta": 0.1}):
        cases.append(default | change)
    computed, complaints, asked = look_at(pages / "walk.html", """() => [JSON.stringify(settings), """ + json.dumps(cases) + """
        .map(compute).map(one => [one.loss, one.episodes.filter(e => e).flatMap(e => e.turns.flat()).map(t => t.push)])]""")
    assert complaints == [] and len(asked) == 1
    shown = json.loads(computed[0])
    assert {name: shown[name] for name in default} == default
    for case, (loss, pushes) in zip(cases, computed[1]):
        by_method = by_mgrpo(record, checkpoint, data, case)
        assert loss == pytest.approx(by_method[0], abs=1e-7), case
        assert pushes == pytest.approx(by_method[1], abs=1e-7), case
    pull, _, _ = look_at(pages / "walk.html", """() => {
        const episode = compute({...settings, done: 0}).episodes[data.walked];
        return episode.turns[data.turn][data.token].pull;
    }""")
    assert pull == pytest.approx(-seen.slope["right"], rel=1e-4)
    assert computed[1][0][0] == pytest.approx(printed_losses((pages / "walk.md").read_text())[1], abs=2e-6)


def test_the_page_shows_a_tokens_chances_and_where_the_model_looked(pages, look_at):
    data = data_of((pages / "walk.html").read_text())
    seen, complaints, _ = look_at(pages / "walk.html", """() => {
        document.querySelector('#said span').focus();
        return [document.querySelector('#which').textContent, document.querySelector('#token-label').textContent,
                [...document.querySelectorAll('#history .t')].map(node => node.title), document.querySelectorAll('.bar').length];
    }""")
    logp = data["episodes"][1]["turns"][1]["old"][0]
    assert complaints == [] and seen[0] == "turn 2 of 4" and f"probability {math.exp(logp):.4f}" in seen[1]
    shares = [float(title.rstrip("%")) for title in seen[2]]
    assert sum(shares) == pytest.approx(100, abs=5) and seen[3] in (5, 6)


def test_the_page_can_be_used_with_keys_alone(pages, look_at):
    """j goes to the next turn; Tab reaches the tokens, arrows move among them; a slider changes the loss."""
    script = """() => [document.querySelector('#which').textContent, document.activeElement.textContent,
                       document.activeElement.parentElement.id, document.querySelector('#token-label').textContent]"""
    keys = ["j", *["Tab"] * 4, "ArrowLeft", "ArrowRight", "ArrowRight"]
    seen, complaints, _ = look_at(pages / "walk.html", script, keys=keys)
    assert complaints == [] and seen[0] == "turn 3 of 4" and seen[2] == "said" and seen[3].startswith("token")
    changed, _, _ = look_at(pages / "walk.html", """() => {
        const before = document.querySelector('#sums').textContent;
        document.querySelector('#eps').focus();
        document.querySelector('#eps').value = 0.9;
        document.querySelector('#eps').dispatchEvent(new Event('input'));
        return [before, document.querySelector('#sums').textContent];
    }""")
    assert changed[0] != changed[1]


def test_nothing_of_the_page_is_wider_than_a_phone(pages, look_at):
    seen, complaints, _ = look_at(pages / "walk.html", "() => document.documentElement.scrollWidth", width=390)
    assert complaints == [] and seen == 390


def test_hostile_text_cannot_become_markup(seen, tmp_path, look_at, monkeypatch):
    bad = "</script><script>document.title = 'owned'</script>"
    monkeypatch.setitem(seen.record, "model", bad)
    page = tmp_path / "walk.html"
    page.write_text(walk_page.html(seen, tmp_path))
    shown, complaints, _ = look_at(page, "() => [document.title, document.querySelector('#line').textContent]")
    assert complaints == [] and shown[0] == "One episode, from the page to the gradient" and bad in shown[1]


# ------------------------------------------------------------------------------- what lies in assets/


def test_the_code_in_the_committed_walk_is_the_code_of_the_files():
    text = (ROOT / "assets/walk.md").read_text()
    blocks = re.findall(r"From `(\w+)\.[\w.]+`:\n\n```python\n(.*?)\n```", text, re.DOTALL)
    assert len(blocks) >= 10
    for name, block in blocks:
        source = [line.strip() for line in (ROOT / f"{name}.py").read_text().splitlines()]
        lines = [line.strip() for line in block.splitlines()]
        starts = [i for i in range(len(source)) if source[i:i + len(lines)] == lines]
        assert starts, f"{name}.py has changed since assets/walk.md was written: run tests/tools/walk.py again"


def test_the_committed_walk_agrees_with_the_method():
    """Its losses, from its recorded group and the log-probs in its page, by mgrpo.py of today and by hand."""
    text = (ROOT / "assets/walk.md").read_text()
    record = json.loads((ROOT / "assets/walk/group.json").read_text())
    data = data_of((ROOT / "assets/walk.html").read_text())
    check_losses(record, text, data)
    valid = [i for i, episode in enumerate(record["episodes"]) if episode["status"] == "ok"]
    tokens = sum(len(turn["action_ids"]) for i in valid for turn in record["episodes"][i]["turns"])
    for done, shown in zip((0, data["updates"] - 1), printed_losses(text)):
        total = 0.0
        for i, A in zip(valid, advantages_by_hand(record)):
            for turn, page_turn in zip(record["episodes"][i]["turns"], data["episodes"][i]["turns"]):
                old_N = torch.tensor(turn["logps"], dtype=torch.float64)
                now_N = torch.tensor(page_turn["passes"][done], dtype=torch.float64)
                loss, _ = mgrpo.mgrpo_loss(now_N, old_N, now_N, A_N=A, weight_N=1 / tokens, eps=0.2, beta=0.0)
                total += loss.item()
        assert shown == pytest.approx(total, abs=2e-6)
    assert "(the recorded one)" in one_line(text)
    check_token_table(record, text, data)
    check_clip_cases(text)
    check_pocket_calculator(text)
    ended, cancelling, left = pulls_by_hand(record, data)
    assert ended > 0 and f"it has ended {ended} of these." in one_line(text)
    shared = re.search(r"Another (\d+) are in turns? .*? That leaves (\d+)\.", one_line(text))
    if shared:  # the episodes of this group begin alike
        assert [*map(int, shared.groups())] == [cancelling, left]
    rows = table_after(text, "token | old log-prob")
    assert len(rows) == 5 and {row[-1] == "0: ended" for row in rows} == {True, False}


def test_every_picture_and_link_of_the_committed_walk_exists():
    links = re.findall(r"\]\((?!http)([^)]+)\)", (ROOT / "assets/walk.md").read_text())
    assert len(links) >= 8 and all((ROOT / "assets" / link).exists() for link in links)


def test_the_committed_page_is_small_and_asks_for_nothing(look_at):
    path = ROOT / "assets/walk.html"
    assert path.stat().st_size < 1_000_000
    seen, complaints, asked = look_at(path, "() => document.documentElement.scrollWidth", width=390)
    assert complaints == [] and len(asked) == 1 and seen == 390


# -------------------------------------------------------------------------------------- the exercises


@pytest.fixture(scope="module")
def given(record):
    """The material of the exercises: the scripted episodes, and worlds/base as the policy."""
    return answers.material(record, answers.BASE)


def answer(number: int, given) -> list[float]:
    """The numbers in a computed answer."""
    return [float(x) for x in re.findall(r"[+-]?\d+\.?\d*(?:e[+-]\d+)?", answers.answer(number, given))]


def check_context_lengths(given, tau):
    """Exercise 10 can be added up from the sizes that its question gives."""
    numbers = [[int(number) for number in re.findall(r"\d+", line)] for line in answers.message_sizes(given).splitlines()]
    (system,), *turns = numbers
    assert len(turns) == len(tau.turns) == len(answers.answer(10, given).splitlines())
    short = whole = system
    for (t, page, placeholder, response), line in zip(turns, answers.answer(10, given).splitlines(), strict=True):
        assert [int(number) for number in re.findall(r"\d+", line)] == [t, short + page, whole + page]
        short += placeholder + response
        whole += page + response


def test_the_answers_are_those_of_the_method_by_hand(given):
    valid = [tau for tau in given.group if tau.status == "ok"]
    turns = [turn for tau in valid for turn in tau.turns]
    written = sum(len(turn.action_ids) for turn in turns)
    rows, read, trained, share, packed, trained_again, larger = answer(1, given)
    assert rows == len(turns) and trained == trained_again == written
    assert share == pytest.approx(100 * written / read, abs=0.06) and larger == pytest.approx(100 * written / packed, abs=0.06)
    assert packed < read
    before, after = answer(2, given)
    assert abs(before - after) > 1e-4
    assert answer(3, given) == [1.5, -0.5, -0.5, -0.5]
    assert answer(4, given) == [0, 0]
    assert answer(5, given) == [4, 1.5, -0.5, -0.5, -0.5]
    assert answers.answer(6, given).endswith("that one among them: False")
    *_, right, _, _, wrong = answer(7, given)
    assert right < 1e-5 and wrong > 1e-3
    assert answer(8, given)[2::3] == [0.0, -0.5, 1.5, 0.0]
    assert [line.split()[7] for line in answers.answer(9, given).splitlines()] == ["1.000", "0.200", "1.000"]
    assert "spreads it over 180 tokens instead of 36" in answers.EXERCISES[8].answer  # 6 turns of 30, 3 turns of 12
    longest = max(given.group, key=lambda tau: len(tau.turns))
    check_context_lengths(given, longest)
    assert answer(11, given)[3] < 0.8
    assert answers.answer(12, given).endswith("+0.7500, -0.2500, -0.2500, -0.2500: right")


def test_a_readers_fork_is_checked(given, tmp_path):
    wrong = tmp_path / "mine.py"
    wrong.write_text(answers.SOLUTION.replace("tau.reward - mean", "tau.reward"))
    assert answers.check_fork(given, wrong).endswith("not r - mean(r)")
    wrong.write_text("x = 1\n")
    with pytest.raises(ValueError, match="mine.py has no class made from mgrpo.MGRPO"):
        answers.check_fork(given, wrong)


def test_every_command_of_the_exercises_runs_and_unknown_numbers_are_one_sentence(pages, monkeypatch, capsys):
    text = (pages / "walk.md").read_text()
    commands = re.findall(r"^    python tests/tools/answers.py (.*)$", text, re.MULTILINE)
    assert commands == [*map(str, range(1, 12)), "12 forks/mine.py"] and text.count("<details>") == 12
    monkeypatch.setattr(sys, "argv", ["answers.py", "3"])
    answers.main()
    assert capsys.readouterr().out == "advantages: +1.5000, -0.5000, -0.5000, -0.5000\n"
    monkeypatch.setattr(sys, "argv", ["answers.py", "13"])
    with pytest.raises(ValueError, match="there is no exercise 13; they are 1 to 12"):
        answers.main()
