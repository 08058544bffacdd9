"""Writes assets/walk.md and assets/walk.html: one real episode, followed from the page to the gradient.

    python tests/tools/walk.py --model runs/demo-31/bc                   # play a group, then write both pages
    python tests/tools/walk.py --model runs/demo-31/bc --group assets/walk/group.json   # write them again

The model is a clone, such as `make demo` leaves. The group is G attempts at one task of sandbox:train, sampled
as mgrpo.py samples them in its first step, one after the other (--concurrency 1), so the same weights play the
same episodes on the same machine. The task is the first one whose group

    1) holds at least two successes and two failures,
    2) has a success and a failure that read the same pages and gave the same responses for at least one turn
       and then part: from the same context one makes a call that only successful episodes made there, the
       other a call that only failed ones made; the successful call uses an element, so that one sees it,
    3) parts at tokens that both have a probability of LIKELY or more, so that one sees what an update does to them,
    4) reads at most LINES lines of text at each turn of that success,
    5) has no success with a response that failed, since mgrpo.py gives that one no credit.

The success is the episode of the walk, and the turn at which the two part is its turn. The recorded group stays
in assets/walk/group.json, with a picture of each turn of the episode.

    walk.py         plays the group and computes all numbers, with the six files' own functions
    walk_text.py    assets/walk.md and its pictures
    walk_page.py    assets/walk.html, from walk_page.html
"""
import argparse
import base64
import copy
import json
import math
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import run  # noqa: E402  first: it sets up OpenMP before torch loads

import random  # noqa: E402

import torch  # noqa: E402
from playwright.sync_api import sync_playwright  # noqa: E402

import bc  # noqa: E402
import mgrpo  # noqa: E402
import model as policy  # noqa: E402
import worlds  # noqa: E402
from compress import Chat, Row, Trajectory, Turn, context, open_chat, pack  # noqa: E402
from evaluate import Environment  # noqa: E402
from rollout import actions_help, task_key  # noqa: E402
from worlds.browser import find_chromium  # noqa: E402

LIKELY = 0.1
LINES = 24  # a page that people read here has at most so many
STEP = 0    # the step of training that the group is sampled as; it is part of the seed
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")  # of the sandbox, another one each time

# ------------------------------------------------------------------------------------ playing a group


@dataclass
class Parting:
    """Where a success and a failure part: both have the same context at `turn`, and different calls."""
    right: Trajectory
    wrong: Trajectory
    turn: int   # from 0
    token: int  # of the response, from 0: the first one in which the two differ

    @property
    def right_ids(self) -> list[int]:
        return self.right.turns[self.turn].response_ids

    @property
    def wrong_ids(self) -> list[int]:
        return self.wrong.turns[self.turn].response_ids


def calls_at(group: list[Trajectory], chat: Chat, t: int) -> dict[tuple, list[Trajectory]]:
    """{context of turn t: the episodes that had it}, without calls that could not be read."""
    found = {}
    for tau in group:
        if t < len(tau.turns) and tau.turns[t].action:
            found.setdefault(tuple(context(chat, tau, t)), []).append(tau)
    return found


def find_parting(group: list[Trajectory], chat: Chat) -> Parting | None:
    """The first place, from the second turn on, that the rule at the top of this file asks for."""
    valid = [tau for tau in group if tau.status == "ok"]
    longest = max((len(tau.turns) for tau in valid), default=0)
    for t in range(1, longest):
        for episodes in calls_at(valid, chat, t).values():
            by_success = {tau.turns[t].action for tau in episodes if tau.success}
            by_failure = {tau.turns[t].action for tau in episodes if not tau.success}
            right = [tau for tau in episodes if tau.success and tau.turns[t].action not in by_failure
                     and tau.turns[t].action.startswith("do(")]
            wrong = [tau for tau in episodes if not tau.success and tau.turns[t].action not in by_success]
            if right and wrong:
                same = os.path.commonprefix([right[0].turns[t].response_ids, wrong[0].turns[t].response_ids])
                return Parting(right[0], wrong[0], t, len(same))
    return None


def is_likely(parting: Parting) -> bool:
    """Whether neither response was a rare one where the two part."""
    sampled = [tau.turns[parting.turn].logps[parting.token] for tau in (parting.right, parting.wrong)]
    return min(sampled) >= math.log(LIKELY)


def is_short(tau: Trajectory) -> bool:
    return all(len(turn.observation.splitlines()) <= LINES for turn in tau.turns)


def earns_all_its_credit(tau: Trajectory) -> bool:
    """Whether mgrpo.withhold_credit leaves the episode as it is."""
    return not tau.success or not any(turn.error for turn in tau.turns)


def settings(model: str) -> mgrpo.Config:
    """mgrpo.py's defaults and the checkpoint's sizes, for one task, one episode at a time."""
    return replace(mgrpo.Config(model=model, batch=1, concurrency=1), **run.remembered(model))


def play(model: str, folder: Path):
    """Plays tasks until one fits the rule; writes group.json and the pictures of its episode."""
    cfg = settings(model)
    cfg.screenshots = cfg.G
    chat = open_chat(model, actions_help())
    method = mgrpo.MGRPO(cfg, chat, policy.load(model), reference=None, optimizer=None, device=torch.device("cpu"))
    with worlds.open_sites(cfg.tasks) as sites, tempfile.TemporaryDirectory() as pictures:
        env = Environment(sites, pictures, cfg)
        for number, task in enumerate(worlds.load_tasks(cfg.tasks, sites)):
            group = method.collect([task], env, STEP)
            successes = sum(tau.success for tau in group)
            print(f"task {number}: {successes:.0f} of {cfg.G} succeed: {task['intent']}", flush=True)
            parting = find_parting(group, chat)
            mixed = min(successes, cfg.G - successes) >= 2
            fits = mixed and parting and is_likely(parting) and is_short(parting.right)
            if fits and all(map(earns_all_its_credit, group)):
                folder.mkdir(parents=True, exist_ok=True)
                frame_pictures(parting.right, Path(pictures), folder)
                (folder / "group.json").write_text(json.dumps(group_json(group, task, number, cfg), indent=1) + "\n")
                return
    raise ValueError(f"no task of {cfg.tasks} has a group that fits; train the clone longer or shorter.")


def group_json(group: list[Trajectory], task: dict, number: int, cfg: mgrpo.Config) -> dict:
    """Everything that `read_group` needs to continue from here. Addresses become paths."""
    episodes = []
    for tau in group:
        record = {name: getattr(tau, name) for name in ("member", "success", "reward", "status", "answer")}
        record["checks"] = [[name, passed, detail] for name, passed, detail in tau.checks]
        record["turns"] = []
        for turn in tau.turns:
            names = ("url", "observation", "response", "action", "error", "ended", "response_ids", "logps")
            record["turns"].append({name: getattr(turn, name) for name in names})
        episodes.append(record)
    kept = {name: task[name] for name in ("task_id", "sites", "intent", "eval")}
    sampled = {name: getattr(cfg, name) for name in ("model", "tasks", "seed", "temperature", "G")}
    whole = {"task": kept, "number": number, "step": STEP, **sampled, "episodes": episodes}
    return json.loads(ADDRESS.sub("", json.dumps(whole)))


def frame_pictures(tau: Trajectory, source: Path, folder: Path):
    """FOLDER/turn-1.jpg, ...: the window at each turn, with a frame around what the action is for."""
    for old in folder.glob("turn-*.jpg"):
        old.unlink()
    with sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        chromium = playwright.chromium.launch(executable_path=find_chromium(playwright), args=flags)
        page = chromium.new_page(viewport={"width": 1280, "height": 720}, device_scale_factor=0.7)
        for t, turn in enumerate(tau.turns):
            x, y, width, height = turn.shot["frame"] or (0, 0, 0, 0)
            jpeg = base64.b64encode((source / turn.shot["file"]).read_bytes()).decode()
            border = "5px solid #e8622c" if width else "0"
            page.set_content(f'<body style="margin:0"><img width="1280" src="data:image/jpeg;base64,{jpeg}">'
                             f'<i style="position:absolute;left:{x - 8}px;top:{y - 8}px;width:{width + 6}px;'
                             f'height:{height + 6}px;border:{border};border-radius:8px"></i>')
            page.screenshot(path=folder / f"turn-{t + 1}.jpg", type="jpeg", quality=60)
        chromium.close()


def read_group(record: dict, chat: Chat) -> list[Trajectory]:
    """The recorded episodes, as rollout.py left them. Sampled ids and log-probs are not computed again."""
    group = []
    for episode in record["episodes"]:
        tau = Trajectory(record["task"], episode["member"])
        for name in ("success", "reward", "status", "answer", "checks"):
            setattr(tau, name, episode[name])
        for t, said in enumerate(episode["turns"]):
            message_ids = chat.user_ids(tau.task, t, said["observation"])
            tau.turns.append(Turn(message_ids=message_ids, **said))
        group.append(tau)
    return group


# ----------------------------------------------------------------------------- computing the numbers


@dataclass
class Chances:
    """What the policy thinks of the two responses: before the first update, or after one of them."""
    right: float           # probability of the token in which the right response differs
    wrong: float           # ... and of the wrong response's token at the same place
    right_response: float  # log-prob of the whole response
    wrong_response: float


@dataclass
class Walk:
    """What both pages show. `passes` has one entry an update; `logps` and `chances` have one more."""
    record: dict  # group.json
    cfg: mgrpo.Config
    chat: Chat
    group: list[Trajectory]
    parting: Parting
    parameters: int
    lr: float = 0.0
    trained: list[Trajectory] = field(default_factory=list)  # the group, without episodes that broke
    rows: list[Row] = field(default_factory=list)            # of all its turns, with advantages and weights
    passes: list[dict] = field(default_factory=list)         # what MGRPO.update returns
    logps: list[list[list[float]]] = field(default_factory=list)  # [passes done][row][token]
    chances: list[Chances] = field(default_factory=list)
    likeliest: list[list] = field(default_factory=list)      # [turn][token]: [(id, probability), ...] of the episode
    attention: list[torch.Tensor] = field(default_factory=list)  # [turn]: (L, n_action, T), see `attention_of`
    draws: list[float] = field(default_factory=list)         # the random numbers of the walk's response
    drawn: list[int] = field(default_factory=list)           # the ids that `sample` makes of them
    other_draw: float = 0.0                                  # the wrong response's, where the two part
    intervals: list[tuple] = field(default_factory=list)     # see `interval`: the right and the wrong token's
    coasting: list[float] = field(default_factory=list)      # see `coast`
    gaining: list[tuple] = field(default_factory=list)       # [(id, probability), ...], see `coast`
    slope: dict = field(default_factory=dict)                # see `logit_slopes`
    gap: float = 0.0                                         # see `largest_gap`

    @property
    def turn(self) -> Turn:
        return self.parting.right.turns[self.parting.turn]

    def row_of(self, tau: Trajectory, t: int) -> int:
        """The index in `rows` of an episode's turn."""
        return [row.turn for row in self.rows].index(tau.turns[t])


@torch.no_grad()
def logits_of_response(model, h_j: list[int], response_ids: list[int]):
    """(N, V): what the model says before each token of a response, by the plain forward pass."""
    tokens_BT = torch.tensor([h_j + response_ids])
    logits_BTV = model(tokens_BT)
    return logits_BTV[0, len(h_j) - 1:-1]


@torch.no_grad()
def score_rows(model, rows: list[Row], cfg: mgrpo.Config) -> list[list[float]]:
    """The log-prob of each row's action tokens, as training computes it."""
    found = {}
    for batch in bc.balanced_micro_batches(rows, cfg.max_tokens):
        logp_N, _, _ = policy.token_logprobs(model, **pack(batch), temperature=cfg.temperature)
        for row, logp in zip(batch, logp_N.split([row.n_action for row in batch])):
            found[id(row)] = logp.tolist()
    return [found[id(row)] for row in rows]


def largest_gap(walk: Walk) -> float:
    """The largest |log-prob in training - log-prob when sampled|, before the first update."""
    largest = 0.0
    for row, logps in zip(walk.rows, walk.logps[0]):
        for now, then in zip(logps, row.logps):
            largest = max(largest, abs(now - then))
    return largest


def logits_at_parting(walk: Walk, model):
    """(V,): what the model says where the responses part."""
    parting = walk.parting
    h_j = context(walk.chat, parting.right, parting.turn)
    return logits_of_response(model, h_j, parting.right_ids)[parting.token]


def probabilities_at_parting(walk: Walk, model):
    """(V,)"""
    return policy.log_probs(logits_at_parting(walk, model), walk.cfg.temperature).exp()


def two_tokens(walk: Walk, model) -> tuple[float, float]:
    """Probabilities of the right and the wrong token where the responses part."""
    parting = walk.parting
    p_V = probabilities_at_parting(walk, model)
    return p_V[parting.right_ids[parting.token]].item(), p_V[parting.wrong_ids[parting.token]].item()


def chances_now(walk: Walk, model) -> Chances:
    """Call it after `score_rows`: the responses' log-probs are its latest."""
    parting = walk.parting
    right, wrong = two_tokens(walk, model)
    right_row = walk.row_of(parting.right, parting.turn)
    wrong_row = walk.row_of(parting.wrong, parting.turn)
    return Chances(right, wrong, sum(walk.logps[-1][right_row]), sum(walk.logps[-1][wrong_row]))


def coast(walk: Walk, method: mgrpo.MGRPO, updates: int) -> tuple[list[float], list[tuple[int, float]]]:
    """So many further updates whose gradient is 0: what AdamW's running means do by themselves.

    Returns the right token's probability after each of them, and at the end the two likeliest other
    tokens with their probabilities. Works on copies of model and optimizer.
    """
    model, optimizer = copy.deepcopy((method.model, method.optimizer))
    out = []
    for _ in range(updates):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        right, _ = two_tokens(walk, model)
        out.append(right)

    p_V = probabilities_at_parting(walk, model)
    p_V[walk.parting.right_ids[walk.parting.token]] = 0
    p_2, ids_2 = p_V.topk(2)
    return out, list(zip(ids_2.tolist(), p_2.tolist()))


def random_numbers(record: dict, tau: Trajectory, t: int) -> list[float]:
    """The numbers that the engine drew for a turn's response, one a token. Earlier turns drew the first ones."""
    rng = random.Random(f"{record['seed']}/{record['step']}/{task_key(tau.task)}/{tau.member}")
    for turn in tau.turns[:t]:
        for _ in turn.response_ids:
            rng.random()
    return [rng.random() for _ in tau.turns[t].response_ids]


def interval(logits_V, token: int, temperature: float) -> tuple[float, float]:
    """(begin, end): the random numbers of which `sample` makes this token."""
    ends_V = policy.log_probs(logits_V, temperature).exp().double().cumsum(0)
    ends_V /= ends_V[-1].clone()
    begin = ends_V[token - 1].item() if token else 0.0
    return begin, ends_V[token].item()


def logit_slopes(walk: Walk, model) -> dict:
    """d loss / d logit of the right and the wrong token where the responses part, by autograd.

    Of the loss of that one token, in the first update. {"right", "wrong", "weight", "p_right", "p_wrong"}
    """
    parting = walk.parting
    row = walk.rows[walk.row_of(parting.right, parting.turn)]
    logits_V = logits_at_parting(walk, model).requires_grad_()
    logp_V = policy.log_probs(logits_V, walk.cfg.temperature)
    right = parting.right_ids[parting.token]
    wrong = parting.wrong_ids[parting.token]
    logp_1 = logp_V[right:right + 1]
    loss, _ = mgrpo.mgrpo_loss(logp_1, logp_1.detach(), logp_1.detach(), A_N=row.advantage, weight_N=row.weight,
                               eps=walk.cfg.eps, beta=walk.cfg.beta)
    loss.backward()
    p_V = logp_V.detach().exp()
    return {"right": logits_V.grad[right].item(), "wrong": logits_V.grad[wrong].item(), "weight": row.weight,
            "p_right": p_V[right].item(), "p_wrong": p_V[wrong].item()}


@torch.no_grad()
def attention_of(model, h_j: list[int], response_ids: list[int]):
    """(L, N, T): where the model looks when it predicts each response token, the mean over a layer's heads.

    Row n holds the weights of the position before token n: that position predicts it. They are computed
    from the queries and keys that model.attend is called with, by its own formula, and checked against
    what it returns.
    """
    layers = []
    attend = policy.attend

    def watched(q_BHTE, k_BKCE, v_BKCE, mask=None):
        y_BHTE = attend(q_BHTE, k_BKCE, v_BKCE, mask)
        _, H, T, E = q_BHTE.shape
        repeats = H // k_BKCE.shape[1]
        k_BHCE = k_BKCE.repeat_interleave(repeats, dim=1)
        v_BHCE = v_BKCE.repeat_interleave(repeats, dim=1)
        scores_BHTC = q_BHTE @ k_BHCE.transpose(2, 3) / E ** 0.5
        later_TC = torch.ones(T, T, dtype=torch.bool).triu(1)
        weights_BHTC = scores_BHTC.masked_fill(later_TC, -torch.inf).softmax(-1)
        assert torch.allclose(weights_BHTC @ v_BHCE, y_BHTE, atol=1e-4), "not the weights that the model used"
        layers.append(weights_BHTC[0].mean(0))
        return y_BHTE

    policy.attend = watched
    try:
        model(torch.tensor([h_j + response_ids]))
    finally:
        policy.attend = attend
    return torch.stack(layers)[:, len(h_j) - 1:-1]


def look(walk: Walk, model):
    """Fills in what does not depend on training: likeliest tokens, attention, the draws."""
    parting = walk.parting
    tau = parting.right
    for t, turn in enumerate(tau.turns):
        h_j = context(walk.chat, tau, t)
        logits_NV = logits_of_response(model, h_j, turn.response_ids)
        p_NV = policy.log_probs(logits_NV, walk.cfg.temperature).exp()
        p_N5, ids_N5 = p_NV.topk(5)
        walk.likeliest.append([list(zip(ids, p)) for ids, p in zip(ids_N5.tolist(), p_N5.tolist())])
        walk.attention.append(attention_of(model, h_j, turn.response_ids))
        if t == parting.turn:
            walk.draws = random_numbers(walk.record, tau, t)
            uniform_N = torch.tensor(walk.draws, dtype=torch.float64)
            ids_N, _ = policy.sample(logits_NV, uniform_N, walk.cfg.temperature)
            walk.drawn = ids_N.tolist()
            walk.other_draw = random_numbers(walk.record, parting.wrong, t)[parting.token]
            for ids in (parting.right_ids, parting.wrong_ids):
                token = ids[parting.token]
                walk.intervals.append(interval(logits_NV[parting.token], token, walk.cfg.temperature))


def compute(record: dict, model_dir: str, lr: float | None = None) -> Walk:
    """Trains the model on the recorded group, as mgrpo.main does, and measures on the way. No file changes.

    lr: the learning rate; None: that of the first step of training.
    Raises ValueError if other weights sampled the group.
    """
    cfg = replace(settings(model_dir), G=record["G"], temperature=record["temperature"])
    device = torch.device("cpu")
    method = mgrpo.open_method(cfg, mgrpo.MGRPO, device)
    cfg = method.cfg
    group = read_group(record, method.chat)
    parting = find_parting(group, method.chat)
    if parting is None:
        raise ValueError("the group holds no success and failure that part after the first turn.")
    parameters = sum(weight.numel() for weight in method.model.parameters())
    walk = Walk(record, cfg, method.chat, group, parting, parameters)

    # 1) Advantages, rows and weights.
    walk.rows, _ = method.training_rows(group, STEP)
    walk.trained = [tau for tau in group if tau.status == "ok"]

    # 2) The policy that sampled.
    walk.logps.append(score_rows(method.model, walk.rows, cfg))
    walk.gap = largest_gap(walk)
    if walk.gap > 1e-2:
        raise ValueError(f"{model_dir} did not sample this group: a log-prob differs by {walk.gap:.2g}. Give the --model "
                         "that did, or leave out --group to play a new one.")
    look(walk, method.model)
    walk.slope = logit_slopes(walk, method.model)
    walk.chances.append(chances_now(walk, method.model))

    # 3) The updates of the first step of training.
    walk.lr = lr or mgrpo.warmup_linear(STEP, cfg)
    method.optimizer.param_groups[0]["lr"] = walk.lr
    updates = method.n_updates(STEP)
    for _ in range(updates):
        walk.passes.append(method.update(walk.rows))
        walk.logps.append(score_rows(method.model, walk.rows, cfg))
        walk.chances.append(chances_now(walk, method.model))
        if len(walk.passes) == 1:
            walk.coasting, walk.gaining = coast(walk, method, updates - 1)
    return walk


def write(record: dict, model_dir: str, assets: Path, lr: float | None = None):
    """ASSETS/walk.md, ASSETS/walk.html and the pictures in ASSETS/walk/."""
    import walk_page
    import walk_text
    walk = compute(record, model_dir, lr)
    (assets / "walk").mkdir(parents=True, exist_ok=True)
    (assets / "walk/row.svg").write_text(walk_text.row_picture(walk), encoding="utf-8")
    (assets / "walk.md").write_text(walk_text.text(walk), encoding="utf-8")
    (assets / "walk.html").write_text(walk_page.html(walk, assets / "walk"), encoding="utf-8")
    for name in ("walk.md", "walk.html"):
        print(f"{assets / name}: {(assets / name).stat().st_size / 1000:.0f} kB")


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--model", default="runs/demo-31/bc", help="the clone that plays and is trained")
    parser.add_argument("--group", type=Path, help="a recorded group.json: play nothing, write the pages again")
    parser.add_argument("--out", type=Path, default=ROOT / "assets", help="the folder of the pages")
    parser.add_argument("--lr", type=float, help="of the updates; by default that of mgrpo.py's first step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    group = args.group
    if group is None:
        play(args.model, args.out / "walk")
        group = args.out / "walk/group.json"
    write(run.read_json(group), args.model, args.out, args.lr)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"walk.py: {error}")
