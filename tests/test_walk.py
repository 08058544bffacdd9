"""The walk from the page to the gradient: its numbers are the method's, its code is the files', its page agrees."""
import copy
import json
import math
import random
import re
import runpy
import statistics
import sys
from typing import NamedTuple

import answers
import pytest
import torch
import walk
import walk_page
import walk_text
from conftest import ROOT, listen

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
# Turns: (page, thought, action)
ASTRAY = (START, "look", 'do(action="Click", element="1")')
OPEN_LAMPS = (START, "look for it", 'do(action="Click", element="0")')
OPEN_RED = (LAMPS, "click red lamp", '# Element: red lamp <5>\ndo(action="Click", element="5")')
OPEN_BLUE = (LAMPS, "click blue lamp", '# Element: red lamp <6>\ndo(action="Click", element="6")')
LOST = (LAMPS, "lost", "exit()")
ADD = (RED, "add to cart", 'do(action="Click", element="10")')
DONE_TOO_EARLY = (BLUE, "done", 'exit(message="done")')
DONE = (CART, "done", 'exit(message="done")')
# Episodes: (success, status, turns). One success goes astray first, one episode is the browser's fault.
EPISODES = [
    (0, "ok", [OPEN_LAMPS, OPEN_BLUE, DONE_TOO_EARLY]),
    (1, "ok", [OPEN_LAMPS, OPEN_RED, ADD, DONE]),
    (0, "env_error", [OPEN_LAMPS, OPEN_BLUE]),
    (1, "ok", [ASTRAY, OPEN_LAMPS, OPEN_RED, ADD, DONE]),
    (0, "ok", [OPEN_LAMPS, LOST]),
]
TEMPERATURE = 0.7
LR = 1e-2  # with which three updates reach the clip


def log_probs_by_hand(model, h_j, response_ids) -> list:
    """Each token's log-prob, from a forward pass over h_j and the whole response, alone. Differentiable."""
    logits_TV = model(torch.tensor([h_j + response_ids]))[0] / TEMPERATURE
    out = []
    for k, token in enumerate(response_ids):
        logits_V = logits_TV[len(h_j) + k - 1]
        out.append(logits_V[token] - logits_V.exp().sum().log())
    return out


def turn_record(chat, page, thought, action) -> dict:
    """A turn of a group.json. Its log-probs are still to be filled in."""
    response = f"<think>{thought}</think><answer>{action}</answer>"
    ids = chat.encode(response, tags=True) + [chat.end_id]
    return {
        "url": "/shop",
        "observation": page,
        "response": response,
        "action": str(parse(response)),
        "error": "",
        "ended": True,
        "response_ids": ids,
        "logps": [0.0] * len(ids),
    }


def episode_record(chat, member, success, status, said) -> dict:
    """An episode of a group.json."""
    answer = None
    if said[-1] is DONE:
        answer = "done"
    turns = [turn_record(chat, *turn) for turn in said]
    return {
        "member": member,
        "success": success,
        "reward": float(success),
        "status": status,
        "answer": answer,
        "checks": [["url_match", bool(success), "it ended there"]],
        "turns": turns,
    }


def recorded(checkpoint) -> dict:
    """A group.json of five scripted episodes, with the log-probs that the checkpoint gives their tokens."""
    chat = open_chat(checkpoint, "")
    model = load(checkpoint).double()
    episodes = []
    for member, episode in enumerate(EPISODES):
        episodes.append(episode_record(chat, member, *episode))
    task = {
        "task_id": 3,
        "sites": ["shopping"],
        "intent": "add the red lamp to the cart",
        "eval": {"eval_types": ["url_match"]},
    }
    record = {
        "task": task,
        "number": 4,
        "step": 0,
        "model": "runs/tiny",
        "tasks": "sandbox:train",
        "seed": 0,
        "temperature": TEMPERATURE,
        "G": len(EPISODES),
        "episodes": episodes,
    }

    group = walk.read_group(record, chat)
    with torch.no_grad():
        for tau, episode in zip(group, episodes):
            for t, turn in enumerate(episode["turns"]):
                h_j = context(chat, tau, t)
                logps = log_probs_by_hand(model, h_j, turn["response_ids"])
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


def data_of(page: str) -> dict:
    """What the page's script computes with."""
    element = r'<script id="data" type="application/json">(.*?)</script>'
    return json.loads(re.search(element, page, re.DOTALL)[1])


def unbroken(record) -> list[int]:
    """Which episodes did not break."""
    out = []
    for i, episode in enumerate(record["episodes"]):
        if episode["status"] == "ok":
            out.append(i)
    return out


def advantages_by_hand(record) -> list[float]:
    """Of the episodes that did not break, in order."""
    r = [record["episodes"][i]["reward"] for i in unbroken(record)]
    mean = statistics.mean(r)
    std = statistics.stdev(r)
    return [(value - mean) / std for value in r]


def surrogate_by_hand(rho: float, A: float, eps=0.2) -> float:
    """min(rho A, clip(rho) A)"""
    inside = min(max(rho, 1 - eps), 1 + eps)
    return min(rho * A, inside * A)


def loss_by_hand(record, logps, eps=0.2):
    """The loss of the group as loops over episodes, turns and tokens; all tokens weigh the same.

    logps: [episode][turn][token], of the episodes that did not break.
    """
    total = 0.0
    tokens = 0
    for i, A, of_turns in zip(unbroken(record), advantages_by_hand(record), logps):
        turns = record["episodes"][i]["turns"]
        for turn, of_tokens in zip(turns, of_turns):
            for old_logp, logp in zip(turn["logps"], of_tokens):
                rho = math.exp(logp - old_logp)
                total += surrogate_by_hand(rho, A, eps)
                tokens += 1
    return -total / tokens


def one_line(text: str) -> str:
    """Paragraphs are broken anywhere."""
    return " ".join(text.split())


def printed_losses(text: str) -> list[float]:
    numbers = re.findall(r"\*\*(-?\d+\.\d+)\*\*", text)
    return [float(number) for number in numbers]


def check_losses(record, text: str, data: dict):
    """The two losses in the text are those of the obvious loops, from the log-probs that the page holds."""
    def by_hand(done):
        logps = []
        for episode in data["episodes"]:
            if episode["ok"]:
                logps.append([turn["passes"][done] for turn in episode["turns"]])
        return loss_by_hand(record, logps)

    first, last = printed_losses(text)
    assert first == pytest.approx(by_hand(0), abs=2e-6)
    assert last == pytest.approx(by_hand(data["updates"] - 1), abs=2e-6)


# ------------------------------------------------------------------------------------------- the text


def test_the_numbers_of_the_walk_are_those_of_an_independent_computation(record, pages):
    text = one_line((pages / "walk.md").read_text())
    data = data_of((pages / "walk.html").read_text())

    # 1) The advantages.
    shown = re.search(r"in the order of the episodes: (.*?)\. All tokens", text)[1]
    advantages = [float(number) for number in shown.split(", ")]
    assert advantages == pytest.approx(advantages_by_hand(record), abs=6e-7)

    # 2) The losses, and that the ratios of the last one have moved past the clip.
    check_losses(record, text, data)
    assert data["updates"] == 3
    assert "ended" in text

    # 3) The response of the walk: its probability as a whole, in float64.
    logps = record["episodes"][1]["turns"][1]["logps"]
    whole = float(re.search(r"a probability of exp\(.*?\) = (\S+)\. ?", text)[1])
    assert whole == pytest.approx(math.exp(sum(logps)), abs=1e-4)

    # 4) The slopes of the logits by hand are those by autograd.
    stop = text.split("## 11.")[1].split("Autograd")[0]
    by_hand = re.findall(r" x (?:\(1 - \S+\)|[\d.]+) = ([+-]0\.\d+)", stop)
    says = re.search(r"Autograd through `mgrpo_loss` says (\S+) and (\S+)\. ", text)
    slopes = [float(number) for number in by_hand]
    by_autograd = [float(number) for number in says.groups()]
    assert slopes == pytest.approx(by_autograd, abs=2e-6)


def table_after(text: str, header: str) -> list[list[str]]:
    """The cells of the first table whose header begins so."""
    table = text[text.index(f"| {header} |"):].split("\n\n")[0]
    rows = []
    for line in table.splitlines()[2:]:
        cells = line.strip("|").split(" | ")
        rows.append([cell.strip() for cell in cells])
    return rows


class Token(NamedTuple):
    """A token that trains, after some updates."""
    place: tuple[int, int, int]  # episode, turn, which token of the response
    id: int
    rho: float
    A: float

    def moved(self) -> float:
        """How far its log-prob has moved, up or down."""
        return abs(math.log(self.rho))

    def gradient(self) -> float:
        return gradient_by_hand(self.rho, self.A)


def tokens_by_hand(record, data, done: int) -> list[Token]:
    """All tokens that train, from the log-probs that the page holds."""
    out = []
    for i, A in zip(unbroken(record), advantages_by_hand(record)):
        for t, turn in enumerate(data["episodes"][i]["turns"]):
            ids = record["episodes"][i]["turns"][t]["response_ids"]
            for k, (old, now) in enumerate(zip(turn["old"], turn["passes"][done])):
                token = Token((i, t, k), ids[k], math.exp(now - old), A)
                out.append(token)
    return out


def gradient_by_hand(rho: float, A: float) -> float:
    """Of min(rho A, clip(rho) A) by the log-prob, as a difference quotient."""
    logp = math.log(rho)
    above = surrogate_by_hand(math.exp(logp + 1e-6), A)
    below = surrogate_by_hand(math.exp(logp - 1e-6), A)
    return (above - below) / 2e-6


def check_token_table(record, text: str, data: dict):
    """Stop 9's table: which tokens it shows, and that each number can be computed from the others in its row."""
    # 1) The numbers. `exp(new - old)` and the products agree to the decimals shown.
    rows = table_after(text, "token | old log-prob")
    for _, old, new, rho, A, least, gradient in rows:
        rho = float(rho)
        A = float(A)
        assert rho == pytest.approx(math.exp(float(new) - float(old)), rel=2e-6, abs=1e-6)
        assert float(least) == pytest.approx(surrogate_by_hand(rho, A), rel=2e-6, abs=6e-5)
        slope = gradient_by_hand(rho, A)
        if gradient == "0: ended":
            assert slope == 0
        else:
            assert float(gradient) == pytest.approx(slope, rel=2e-6, abs=6e-5)

    # 2) The two tokens where the calls part.
    tokens = tokens_by_hand(record, data, data["updates"] - 1)
    by_place = {token.place: token for token in tokens}
    t = data["turn"]
    k = data["token"]
    right = by_place[data["walked"], t, k]
    wrong = by_place[data["other"], t, k]
    assert "(right call)" in rows[0][0]
    assert float(rows[0][3]) == pytest.approx(right.rho, abs=1e-6)
    assert "(wrong call)" in rows[1][0]
    assert float(rows[1][3]) == pytest.approx(wrong.rho, abs=1e-6)

    named = {}
    for row in rows[2:]:
        name = re.search(r"(furthest|still counts|against)", row[0])[1]
        named[name] = row

    # 3) The furthest one. Of equal ones it is the last.
    def distance(token):
        return token.moved(), token.place

    others = [token for token in tokens if token.id not in (right.id, wrong.id)]
    furthest = max(others, key=distance)
    i, turn, _ = furthest.place
    assert f"(episode {i}, turn {turn + 1}: " in named["furthest"][0]
    assert float(named["furthest"][3]) == pytest.approx(furthest.rho, abs=1e-6)

    # 4) One that still counts: the first one behind the right call's.
    counting = []
    for token in tokens:
        episode, turn_of_token, place = token.place
        is_later = (episode, turn_of_token) == (data["walked"], t) and place > k
        if is_later and token.gradient() != 0:
            counting.append(token)
    assert ("still counts" in named) == bool(counting)
    if counting:
        assert float(named["still counts"][3]) == pytest.approx(counting[0].rho, abs=1e-6)

    # 5) The furthest of those that moved against their advantage.
    against = []
    for token in tokens:
        is_against = math.log(token.rho) * token.A < 0
        if is_against and token.moved() > 1e-3:
            against.append(token)
    assert ("against" in named) == bool(against)
    if against:
        worst = max(against, key=Token.moved)
        assert float(named["against"][3]) == pytest.approx(worst.rho, abs=1e-6)

    # 6) The response of the furthest one can be read.
    response = record["episodes"][i]["turns"][turn]["response"]
    assert f"(episode {i}, turn {turn + 1}):\n\n```text\n{response}\n```" in text


def check_clip_cases(text: str):
    """Stop 9's four cases: where the gradient by hand is 0, min picks the clipped value."""
    advantages = {"A > 0": 1.0, "A < 0": -1.0}
    ratios = {"rho > 1.2": (1.3, 2.0), "rho < 0.8": (0.7, 0.1)}
    rows = table_after(text, "A | rho | min picks")
    assert [row[:2] for row in rows] == [
        ["A > 0", "rho > 1.2"],
        ["A > 0", "rho < 0.8"],
        ["A < 0", "rho > 1.2"],
        ["A < 0", "rho < 0.8"],
    ]
    for sign, place, picks, gradient in rows:
        bound = place.split()[-1]
        for rho in ratios[place]:
            if gradient_by_hand(rho, advantages[sign]) == 0:
                assert picks == f"{bound} A, the clipped value"
                assert gradient == "0: the token moved enough"
            else:
                assert picks == "rho A"
                assert gradient == "rho A: the token moved the wrong way"


def shared_turns(record) -> int:
    """How many first turns, pages and responses, are the same in all episodes that did not break."""
    said = []
    for i in unbroken(record):
        turns = record["episodes"][i]["turns"]
        said.append([(turn["observation"], turn["response"]) for turn in turns])
    shared = 0
    for turns in zip(*said):  # as many as the shortest episode has
        if len(set(turns)) > 1:
            break
        shared += 1
    return shared


def pulls_by_hand(record, data) -> tuple[int, int, int]:
    """(ended by the clip, in turns that are the same in all episodes, left) before the last update.

    Of the tokens that were drawn with a probability below 0.99.
    """
    shared = shared_turns(record)
    ended = 0
    cancelling = 0
    left = 0
    for token in tokens_by_hand(record, data, data["updates"] - 1):
        i, t, k = token.place
        drawn_with = math.exp(record["episodes"][i]["turns"][t]["logps"][k])
        if drawn_with >= 0.99:
            continue
        if token.gradient() == 0:
            ended += 1
        elif t < shared:
            cancelling += 1
        else:
            left += 1
    return ended, cancelling, left


def check_pocket_calculator(text: str):
    """Stop 10's first table: A times tokens is the last column, up to one in the last decimal, as the page says."""
    *episodes, total = table_after(text, "episode | r | A")
    products = 0.0
    for _, _, A, tokens, product in episodes:
        tokens = int(tokens)
        product = float(product)
        assert abs(float(A) * tokens - product) < 1.01e-4 + 5e-7 * tokens
        products += product
    assert float(total[-1]) == pytest.approx(products, abs=1e-4 * len(episodes))


def test_the_tables_can_be_computed_from_what_they_show(record, pages):
    text = (pages / "walk.md").read_text()
    data = data_of((pages / "walk.html").read_text())
    check_token_table(record, text, data)
    check_clip_cases(text)
    check_pocket_calculator(text)


@torch.no_grad()
def test_the_intervals_are_where_the_sampler_changes_its_mind(record, seen, checkpoint):
    """By hand: the sum of the probabilities of all ids before a token's, and with its own."""
    parting = seen.parting
    k = parting.token
    before = context(seen.chat, parting.right, 1) + parting.right_ids[:k]
    model = load(checkpoint).double()
    logits_V = model(torch.tensor([before]))[0, -1]
    weights = (logits_V / TEMPERATURE).exp().tolist()
    whole = math.fsum(weights)

    def check_interval(token, interval):
        begin, end = interval
        assert begin == pytest.approx(math.fsum(weights[:token]) / whole, abs=1e-6)
        assert end == pytest.approx(math.fsum(weights[:token + 1]) / whole, abs=1e-6)
        # Two random numbers within the interval, and one behind it.
        u_B = torch.tensor([begin + 1e-6, end - 1e-6, end + 1e-6], dtype=torch.float64)
        drawn, _ = sample(logits_V.float().expand(3, -1), u_B, TEMPERATURE)
        assert drawn[0] == token
        assert drawn[1] == token
        assert drawn[2] != token

    right, wrong = seen.intervals
    check_interval(parting.right_ids[k], right)
    check_interval(parting.wrong_ids[k], wrong)

    shown = one_line(walk_text.draws(seen))
    assert f"owns [{right[0]:.6f}, {right[1]:.6f}) and" in shown
    assert f"owns [{wrong[0]:.6f}, {wrong[1]:.6f})." in shown


def test_the_parts_of_the_context_add_up(seen, pages):
    text = one_line((pages / "walk.md").read_text())
    sizes = re.search(
        r"one list of (\d+) token ids: "
        r"(\d+) of the past \(the \*trunk\*: the system prompt's (\d+) and the past turns\), "
        r"then (\d+) of the present page "
        r"\(the (\d+) of stop 2; the other (\d+) are the chat format", text)
    whole, trunk, system, present, page, frame = map(int, sizes.groups())

    assert whole == len(context(seen.chat, seen.parting.right, 1))
    assert whole == trunk + present
    assert present == page + frame
    assert page == len(seen.chat.encode(LAMPS))
    assert system == len(seen.chat.system_ids())
    assert system < trunk
    assert f"So the page becomes text, {page} tokens here." in text
    assert "the line `Round 1`)" in text


def test_the_longer_episode_is_called_another_one(pages):
    """The figures' numbers are not those of the walk's episode: they are the expert's, in assets/episode.jsonl."""
    text = one_line((pages / "walk.md").read_text())
    first, *_ = (ROOT / "assets/episode.jsonl").read_text().splitlines()
    turns = len(json.loads(first)["turns"])
    assert f"In the longer episode of the figure ({turns} turns, not ours) that makes" in text


def test_the_other_episodes_draw_is_that_of_its_own_generator(record, seen):
    """The wrong response's random number, counted from the episode's first one."""
    tau = seen.parting.wrong
    k = seen.parting.token
    rng = random.Random(f"0/0/3/{tau.member}")
    first_turn = len(tau.turns[0].response_ids)
    for _ in range(first_turn + k):
        rng.random()
    assert seen.other_draw == rng.random()
    assert seen.other_draw != seen.draws[k]


def test_packed_ids_are_the_different_beginnings_of_contexts_and_each_rows_own_end(seen, pages):
    """The group is one micro-batch, and no context holds a trained response at the place where it trains."""
    beginnings = set()
    ends = 0
    alone = 0
    for row in seen.rows:
        own = 1 + row.n_action  # what predicts the first action, and the actions
        for n in range(len(row.ids) - own):
            beginnings.add(tuple(row.ids[:n + 1]))
        ends += own
        alone += len(row.ids)
    written = len(beginnings) + ends

    assert written < alone
    text = one_line((pages / "walk.md").read_text())
    assert f"{written:,} ids instead of {alone:,}" in text


def test_the_fork_in_the_text_is_whole(pages, given, tmp_path):
    """It is a method whose reward is less for a longer episode; a reader can save it and run it."""
    text = (pages / "walk.md").read_text()
    stop = text.split("## 12.")[1].split("## Exercises")[0]
    code = re.search(r"```python\n(import sys.*?)```", stop, re.DOTALL)[1]
    path = tmp_path / "short.py"
    path.write_text(code)

    Short = runpy.run_path(str(path))["Short"]

    assert issubclass(Short, mgrpo.MGRPO)
    method = Short(given.cfg, given.chat, given.model, None, None, torch.device("cpu"))
    (short,) = answers.episodes_with([1.0], turns=2)
    (long,) = answers.episodes_with([1.0], turns=8)
    assert 1 > method.reward(short) > method.reward(long) > 0


def adamw_by_hand(model, updates: int) -> list[dict]:
    """The weights after each update, of which only the first has the gradient that the model holds; then it is 0."""
    weights = {}
    first = {}
    for name, weight in model.named_parameters():
        weights[name] = weight.detach().clone()
        first[name] = weight.grad.clone()

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
    group = walk.read_group(record, chat)
    tokens = 0
    for i in unbroken(record):
        tokens += sum(len(turn.response_ids) for turn in group[i].turns)

    # 1) Three updates; before each of them the log-probs are the page's.
    for done in (0, 1, 2):
        total = 0.0
        for i, A in zip(unbroken(record), advantages_by_hand(record)):
            for t, turn in enumerate(group[i].turns):
                logps = log_probs_by_hand(model, context(chat, group[i], t), turn.response_ids)
                shown = data["episodes"][i]["turns"][t]["passes"][done]
                assert [logp.item() for logp in logps] == pytest.approx(shown, abs=5e-3)
                for logp, old in zip(logps, turn.logps):
                    rho = (logp - old).exp()
                    clipped = rho.clamp(0.8, 1.2)
                    total = total - torch.minimum(rho * A, clipped * A) / tokens
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if done == 0:
            after_one = adamw_by_hand(model, updates=3)
        optimizer.step()
        optimizer.zero_grad()

    # 2) Coasting: the first gradient, then gradients of 0.
    parting = seen.parting
    right_id = parting.right_ids[parting.token]
    ids = context(chat, parting.right, parting.turn) + parting.right_ids[:parting.token]
    for weights, shown in zip(after_one[1:], seen.coasting, strict=True):
        model.load_state_dict(weights)
        logits_V = model(torch.tensor([ids]))[0, -1]
        p_V = (logits_V / TEMPERATURE).softmax(-1)
        assert p_V[right_id].item() == pytest.approx(shown, rel=2e-2)

    # 3) The two other tokens that are likeliest then.
    others = p_V.tolist()
    others.pop(right_id)
    likeliest = sorted(others, reverse=True)[:2]
    assert likeliest == pytest.approx([p for _, p in seen.gaining], rel=2e-2)


def test_a_changed_loss_changes_the_walk(record, checkpoint, tmp_path, monkeypatch):
    def mgrpo_loss(logp_N, logp_old_N, logp_ref_N, A_N, weight_N, eps, beta):
        rho_N = (logp_N - logp_old_N).exp()
        surrogate_N = rho_N * A_N  # no clip
        gain_N = surrogate_N
        loss = -(weight_N * gain_N).sum()
        return loss, {"kl": 0.0, "clip_frac": 0.0}

    monkeypatch.setattr(mgrpo, "mgrpo_loss", mgrpo_loss)
    changed = walk.compute(record, str(checkpoint), LR)
    with pytest.raises(AssertionError):
        check_losses(record, walk_text.loss(changed), walk_page.data(changed, tmp_path))


def test_the_step_moves_the_right_response_away_from_the_wrong_one(record, seen):
    before, *_, after = seen.chances
    k = seen.parting.token
    wrong = record["episodes"][0]["turns"][1]["logps"]
    right = record["episodes"][1]["turns"][1]["logps"]

    assert before.right_response == pytest.approx(sum(right), abs=1e-3)
    assert before.wrong_response == pytest.approx(sum(wrong), abs=1e-3)
    assert before.right == pytest.approx(math.exp(right[k]), abs=1e-6)
    assert before.wrong == pytest.approx(math.exp(wrong[k]), abs=1e-6)

    apart_before = before.right_response - before.wrong_response
    apart_after = after.right_response - after.wrong_response
    assert apart_after > apart_before + 1


def test_episodes_of_other_weights_are_refused(record, checkpoint):
    other = copy.deepcopy(record)
    other["episodes"][0]["turns"][0]["logps"][0] -= 0.1
    with pytest.raises(ValueError, match="did not sample this group: a log-prob differs by 0.1"):
        walk.compute(other, str(checkpoint))


def test_attention_is_what_the_model_computes(seen):
    """Each row sums to 1 and sees nothing later. (The tool itself compares the weighted values with the model's.)"""
    past = len(context(seen.chat, seen.parting.right, 1))
    written = len(seen.turn.response_ids)

    weights_LNT = seen.attention[1]

    assert weights_LNT.shape == (2, written, past + written)
    ones_LN = torch.ones(weights_LNT.shape[:2])
    assert torch.allclose(weights_LNT.sum(-1), ones_LN, atol=1e-5)
    first_LT = weights_LNT[:, 0]
    assert (first_LT[:, past:] == 0).all()
    assert (first_LT[:, past - 1] > 0).all()


# ------------------------------------------------------------------------------------- choosing a group


def test_the_walk_begins_where_a_success_and_a_failure_part_after_the_first_turn(record, checkpoint):
    chat = open_chat(checkpoint, "")
    group = walk.read_group(record, chat)
    parting = walk.find_parting(group, chat)
    right = parting.right.turns[1].response_ids
    wrong = parting.wrong.turns[1].response_ids
    k = parting.token
    assert right[:k] == wrong[:k]
    assert right[k] != wrong[k]

    # Groups that hold no such place.
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
    group = walk.read_group(copy.deepcopy(record), chat)
    parting = walk.find_parting(group, chat)
    right = parting.right.turns[1]
    wrong = parting.wrong.turns[1]

    right.logps[parting.token] = math.log(0.2)
    wrong.logps[parting.token] = math.log(0.2)
    assert walk.is_likely(parting)

    wrong.logps[parting.token] = math.log(0.05)
    assert not walk.is_likely(parting)


def test_play_takes_the_first_task_that_fits_and_keeps_no_address(record, checkpoint, tmp_path, monkeypatch):
    """The first group has no success, in the second one a success failed at first, the third fits.

    Pictures are those of the success.
    """
    played = []

    def collect(method, tasks, env, step):
        group = walk.read_group(record, method.chat)
        for tau in group:
            if not played:
                tau.success = 0.0
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
    assert played == [0, 1, 2]
    assert kept["task"]["task_id"] == 2
    assert kept["number"] == 2
    assert "127.0.0.1" not in json.dumps(kept)
    assert kept["episodes"][0]["turns"][0]["url"] == "/shop"
    logps = kept["episodes"][1]["turns"][1]["logps"]
    assert logps == record["episodes"][1]["turns"][1]["logps"]
    pictures = sorted(file.name for file in tmp_path.glob("*.jpg"))
    assert pictures == ["turn-1.jpg", "turn-2.jpg", "turn-3.jpg", "turn-4.jpg"]


# ------------------------------------------------------------------------------------------- the page


@pytest.fixture
def look_at(run):
    """look_at(page, script, keys, width) -> (the script's result, the browser's complaints, requested addresses)."""
    async def play(path, script, keys, width):
        from rollout import Settings
        from worlds.browser import Browser
        async with Browser(Settings()) as browser:
            page = await browser.chromium.new_page(viewport={"width": width, "height": 800})
            complaints, asked = listen(page)
            await page.goto(path.absolute().as_uri())
            for key in keys:
                await page.keyboard.press(key)
            result = await page.evaluate(script)
        return result, complaints, asked

    def look_at(path, script, keys=(), width=1280):
        return run(play(path, script, keys, width))
    return look_at


def by_mgrpo(record, checkpoint, data, settings) -> tuple[float, list]:
    """(loss, minus its derivative by each token's log-prob) of the group, by mgrpo.py and forks/gigpo.py."""
    from gigpo import turn_advantages
    # 1) The rows, with their advantages and weights.
    chat = open_chat(checkpoint, "")
    cfg = mgrpo.Config(
        eps=settings["eps"],
        beta=settings["beta"],
        G=settings["G"],
        loss_norm=settings["loss_norm"],
    )
    group = walk.read_group(record, chat)[:cfg.G]
    training = mgrpo.group_advantages(group)
    if not training:
        return 0.0, []
    turn_advantages(training, settings["credit"], walk_page.GAMMA)
    rows = mgrpo.weighted_rows([training], chat, cfg)

    # 2) Their log-probs. The page's first pass is that of the reference.
    turns = []
    for tau in training:
        turns += data["episodes"][tau.member]["turns"]
    old = []
    now = []
    reference = []
    for row, turn in zip(rows, turns):
        old += row.logps
        now += turn["passes"][settings["done"]]
        reference += turn["passes"][0]

    # 3) The loss.
    logp_N = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    loss, _ = mgrpo.mgrpo_loss(
        logp_N,
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(reference, dtype=torch.float64),
        A_N=mgrpo.per_token([row.advantage for row in rows], rows, "cpu"),
        weight_N=mgrpo.per_token([row.weight for row in rows], rows, "cpu"),
        eps=cfg.eps,
        beta=cfg.beta,
    )
    loss.backward()
    return loss.item(), (-logp_N.grad).tolist()


def test_the_page_computes_what_mgrpo_computes(record, seen, pages, checkpoint, look_at):
    page = pages / "walk.html"
    data = data_of(page.read_text())
    default = {
        "eps": 0.2,
        "beta": 0.0,
        "G": 5,
        "credit": 0,
        "loss_norm": "token",
        "done": 2,
    }
    changes = [
        {},
        {"done": 0},
        {"eps": 0.05},
        {"beta": 0.3},
        {"G": 4},
        {"G": 3},
        {"loss_norm": "paper"},
        {"loss_norm": "constant"},
        {"credit": 1.0},
        {"credit": 0.5, "G": 4, "loss_norm": "paper", "beta": 0.1},
    ]
    cases = [default | change for change in changes]

    # 1) The page begins with mgrpo.py's settings.
    script = """() => {
        const pushes = one => one.episodes.filter(e => e).flatMap(e => e.turns.flat()).map(t => t.push);
        const all = CASES.map(compute);
        return [JSON.stringify(settings), all.map(one => [one.loss, pushes(one)])];
    }""".replace("CASES", json.dumps(cases))
    (shown, computed), complaints, asked = look_at(page, script)
    assert complaints == []
    assert len(asked) == 1
    settings = json.loads(shown)
    assert {name: settings[name] for name in default} == default

    # 2) Losses and pulls under all settings are mgrpo.py's.
    for case, (loss, pushes) in zip(cases, computed):
        loss_of_method, pushes_of_method = by_mgrpo(record, checkpoint, data, case)
        assert loss == pytest.approx(loss_of_method, abs=1e-7), case
        assert pushes == pytest.approx(pushes_of_method, abs=1e-7), case

    # 3) And those of the text.
    pull, _, _ = look_at(page, """() => {
        const episode = compute({...settings, done: 0}).episodes[data.walked];
        return episode.turns[data.turn][data.token].pull;
    }""")
    assert pull == pytest.approx(-seen.slope["right"], rel=1e-4)
    _, last_loss = printed_losses((pages / "walk.md").read_text())
    assert computed[0][0] == pytest.approx(last_loss, abs=2e-6)


def test_the_page_shows_a_tokens_chances_and_where_the_model_looked(pages, look_at):
    data = data_of((pages / "walk.html").read_text())
    seen, complaints, _ = look_at(pages / "walk.html", """() => {
        document.querySelector('#said span').focus();
        return [document.querySelector('#which').textContent,
                document.querySelector('#token-label').textContent,
                [...document.querySelectorAll('#history .t')].map(node => node.title),
                document.querySelectorAll('.bar').length];
    }""")
    which, label, titles, bars = seen

    assert complaints == []
    assert which == "turn 2 of 4"
    logp = data["episodes"][1]["turns"][1]["old"][0]
    assert f"probability {math.exp(logp):.4f}" in label
    shares = [float(title.rstrip("%")) for title in titles]
    assert sum(shares) == pytest.approx(100, abs=5)
    assert bars in (5, 6)


def test_the_page_can_be_used_with_keys_alone(pages, look_at):
    """j goes to the next turn; Tab reaches the tokens, arrows move among them; a slider changes the loss."""
    keys = ["j", *["Tab"] * 4, "ArrowLeft", "ArrowRight", "ArrowRight"]
    script = """() => [document.querySelector('#which').textContent,
                       document.activeElement.parentElement.id,
                       document.querySelector('#token-label').textContent]"""
    (which, parent, label), complaints, _ = look_at(pages / "walk.html", script, keys=keys)
    assert complaints == []
    assert which == "turn 3 of 4"
    assert parent == "said"
    assert label.startswith("token")

    (before, after), _, _ = look_at(pages / "walk.html", """() => {
        const before = document.querySelector('#sums').textContent;
        document.querySelector('#eps').focus();
        document.querySelector('#eps').value = 0.9;
        document.querySelector('#eps').dispatchEvent(new Event('input'));
        return [before, document.querySelector('#sums').textContent];
    }""")
    assert before != after


def test_nothing_of_the_page_is_wider_than_a_phone(pages, look_at):
    script = "() => document.documentElement.scrollWidth"
    width, complaints, _ = look_at(pages / "walk.html", script, width=390)
    assert complaints == []
    assert width == 390


def test_hostile_text_cannot_become_markup(seen, tmp_path, look_at, monkeypatch):
    bad = "</script><script>document.title = 'owned'</script>"
    monkeypatch.setitem(seen.record, "model", bad)
    page = tmp_path / "walk.html"
    page.write_text(walk_page.html(seen, tmp_path))

    script = "() => [document.title, document.querySelector('#line').textContent]"
    (title, line), complaints, _ = look_at(page, script)

    assert complaints == []
    assert title == "One episode, from the page to the gradient"
    assert bad in line


# ------------------------------------------------------------------------------- what lies in assets/


def stripped(code: str) -> list[str]:
    return [line.strip() for line in code.splitlines()]


def test_the_code_in_the_committed_walk_is_the_code_of_the_files():
    text = (ROOT / "assets/walk.md").read_text()
    blocks = re.findall(r"From `(\w+)\.[\w.]+`:\n\n```python\n(.*?)\n```", text, re.DOTALL)
    assert len(blocks) >= 10
    for name, block in blocks:
        source = stripped((ROOT / f"{name}.py").read_text())
        lines = stripped(block)
        places = range(len(source))
        starts = [i for i in places if source[i:i + len(lines)] == lines]
        assert starts, f"{name}.py has changed since assets/walk.md was written: run tests/tools/walk.py again"


def loss_by_method(record, data, done: int) -> float:
    """The loss of the group by mgrpo.py, from the log-probs that the page holds; all tokens weigh the same."""
    tokens = 0
    for i in unbroken(record):
        tokens += sum(len(turn["response_ids"]) for turn in record["episodes"][i]["turns"])

    total = 0.0
    for i, A in zip(unbroken(record), advantages_by_hand(record)):
        turns = record["episodes"][i]["turns"]
        page_turns = data["episodes"][i]["turns"]
        for turn, page_turn in zip(turns, page_turns):
            old_N = torch.tensor(turn["logps"], dtype=torch.float64)
            now_N = torch.tensor(page_turn["passes"][done], dtype=torch.float64)
            loss, _ = mgrpo.mgrpo_loss(
                now_N,
                old_N,
                now_N,
                A_N=A,
                weight_N=1 / tokens,
                eps=0.2,
                beta=0.0,
            )
            total += loss.item()
    return total


def test_the_committed_walk_agrees_with_the_method():
    """Its losses, from its recorded group and the log-probs in its page, by mgrpo.py of today and by hand."""
    text = (ROOT / "assets/walk.md").read_text()
    record = json.loads((ROOT / "assets/walk/group.json").read_text())
    data = data_of((ROOT / "assets/walk.html").read_text())

    # 1) The losses.
    check_losses(record, text, data)
    first, last = printed_losses(text)
    assert first == pytest.approx(loss_by_method(record, data, 0), abs=2e-6)
    assert last == pytest.approx(loss_by_method(record, data, data["updates"] - 1), abs=2e-6)
    assert "(the recorded one)" in one_line(text)

    # 2) The tables.
    check_token_table(record, text, data)
    check_clip_cases(text)
    check_pocket_calculator(text)
    rows = table_after(text, "token | old log-prob")
    has_ended = [row[-1] == "0: ended" for row in rows]
    assert len(rows) == 5
    assert set(has_ended) == {True, False}

    # 3) How many tokens still pull.
    ended, cancelling, left = pulls_by_hand(record, data)
    assert ended > 0
    assert f"it has ended {ended} of these." in one_line(text)
    shared = re.search(r"Another (\d+) are in turns? .*? That leaves (\d+)\.", one_line(text))
    if shared:  # the episodes of this group begin alike
        assert int(shared[1]) == cancelling
        assert int(shared[2]) == left


def test_every_picture_and_link_of_the_committed_walk_exists():
    text = (ROOT / "assets/walk.md").read_text()
    links = re.findall(r"\]\((?!http)([^)]+)\)", text)
    assert len(links) >= 8
    for link in links:
        assert (ROOT / "assets" / link).exists()


def test_the_committed_page_is_small_and_asks_for_nothing(look_at):
    path = ROOT / "assets/walk.html"
    assert path.stat().st_size < 1_000_000
    width, complaints, asked = look_at(path, "() => document.documentElement.scrollWidth", width=390)
    assert complaints == []
    assert len(asked) == 1
    assert width == 390


# -------------------------------------------------------------------------------------- the exercises


@pytest.fixture(scope="module")
def given(record):
    """The material of the exercises: the scripted episodes, and worlds/base as the policy."""
    return answers.material(record, answers.BASE)


def answer(number: int, given) -> list[float]:
    """The numbers in a computed answer."""
    numbers = re.findall(r"[+-]?\d+\.?\d*(?:e[+-]\d+)?", answers.answer(number, given))
    return [float(x) for x in numbers]


def whole_numbers(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", line)]


def check_context_lengths(given, tau):
    """Exercise 10 can be added up from the sizes that its question gives."""
    system_line, *size_lines = answers.message_sizes(given).splitlines()
    answer_lines = answers.answer(10, given).splitlines()
    assert len(size_lines) == len(tau.turns)
    assert len(answer_lines) == len(tau.turns)

    (system,) = whole_numbers(system_line)
    short = system
    whole = system
    for size_line, answer_line in zip(size_lines, answer_lines, strict=True):
        t, page, placeholder, response = whole_numbers(size_line)
        assert whole_numbers(answer_line) == [t, short + page, whole + page]
        short += placeholder + response
        whole += page + response


def test_the_answers_are_those_of_the_method_by_hand(given):
    # 1) Rows and tokens.
    lengths = []
    for tau in given.group:
        if tau.status == "ok":
            lengths += [len(turn.response_ids) for turn in tau.turns]
    written = sum(lengths)
    rows, read, trained, share, packed, trained_again, larger = answer(1, given)
    assert rows == len(lengths)
    assert trained == written
    assert trained_again == written
    assert share == pytest.approx(100 * written / read, abs=0.06)
    assert larger == pytest.approx(100 * written / packed, abs=0.06)
    assert packed < read

    # 2) A response that is encoded again.
    before, after = answer(2, given)
    assert abs(before - after) > 1e-4

    # 3) Advantages and the clip.
    assert answer(3, given) == [1.5, -0.5, -0.5, -0.5]
    assert answer(4, given) == [0, 0]
    assert answer(5, given) == [4, 1.5, -0.5, -0.5, -0.5]
    assert answers.answer(6, given).endswith("that one among them: False")
    *_, right, _, _, wrong = answer(7, given)
    assert right < 1e-5
    assert wrong > 1e-3
    assert answer(8, given)[2::3] == [0.0, -0.5, 1.5, 0.0]

    # 4) Weights of tokens.
    weights = [line.split()[7] for line in answers.answer(9, given).splitlines()]
    assert weights == ["1.000", "0.200", "1.000"]
    spread = "spreads it over 180 tokens instead of 36"  # 6 turns of 30, 3 turns of 12
    assert spread in answers.EXERCISES[8].answer

    # 5) Contexts, and a fork.
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
    numbers = [str(number) for number in range(1, 12)]
    assert commands == [*numbers, "12 forks/mine.py"]
    assert text.count("<details>") == 12

    monkeypatch.setattr(sys, "argv", ["answers.py", "3"])
    answers.main()
    assert capsys.readouterr().out == "advantages: +1.5000, -0.5000, -0.5000, -0.5000\n"

    monkeypatch.setattr(sys, "argv", ["answers.py", "13"])
    with pytest.raises(ValueError, match="there is no exercise 13; they are 1 to 12"):
        answers.main()
