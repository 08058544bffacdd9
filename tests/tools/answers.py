"""Computes the answers to the exercises at the end of assets/walk.md.

    python tests/tools/answers.py 3
    python tests/tools/answers.py 12 forks/mine.py    # checks a fork of yours

Each exercise is a question, an answer in words, and a function that computes it with the six files. The
functions read the episodes of assets/walk/group.json. The clone that played them is not in the repository,
so the policy is worlds/base, which the clone was made from. Where an exercise needs the log-probs of
sampling, those of worlds/base stand in for them: rho is 1 before the first update, as in training.
"""
import argparse
import math
import runpy
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
import run  # noqa: E402  first: it sets up OpenMP before torch loads

import torch  # noqa: E402

import mgrpo  # noqa: E402
from compress import (PLACEHOLDER, Chat, Row, Trajectory, Turn, context, micro_batches, open_chat, pack,  # noqa: E402
                      past_turn, replay)
from model import Transformer, generate, load, token_logprobs  # noqa: E402
from rollout import actions_help  # noqa: E402

BASE = str(ROOT / "worlds/base")


@dataclass
class Material:
    """What the exercises are about. The episodes are those of the walk, in the tokens of this policy."""
    chat: Chat
    model: Transformer
    group: list[Trajectory]
    cfg: mgrpo.Config

    def rows(self) -> list[Row]:
        """Of all episodes, with advantages, weights, and the log-probs that this policy gives the tokens."""
        rows = mgrpo.weighted_rows([mgrpo.group_advantages(self.group)], self.chat, self.cfg)
        for row in rows:
            row.logps = score(self.model, row, self.cfg.temperature).tolist()
        return rows


@torch.no_grad()
def score(model: Transformer, row: Row, temperature: float):
    """(N,): log-probs of a row's action tokens."""
    logp_N, _, _ = token_logprobs(model, **pack([row]), temperature=temperature)
    return logp_N


def material(record: dict, checkpoint: str) -> Material:
    """record: group.json. checkpoint: of the policy."""
    chat = open_chat(checkpoint, actions_help())
    episodes = []
    for said in record["episodes"]:
        turns = [{**turn, "truncated": not turn["ended"]} for turn in said["turns"]]
        tau = replay(chat, {**record["task"], "success": said["success"], "turns": turns})
        tau.status = said["status"]
        episodes.append(tau)
    cfg = mgrpo.Config(model=checkpoint, temperature=record["temperature"], G=record["G"])
    return Material(chat, load(checkpoint), episodes, cfg)


def episodes_with(rewards: list[float], turns: int = 1, tokens: int = 1) -> list[Trajectory]:
    """Episodes of made-up turns with these rewards."""
    task = {"task_id": 0, "intent": "x", "sites": []}
    out = []
    for reward in rewards:
        tau = Trajectory(task, success=reward, reward=reward)
        for _ in range(turns):
            tau.turns.append(Turn("", "a page", message_ids=[0], response_ids=[0] * tokens, logps=[0.0] * tokens,
                                  response=""))
        out.append(tau)
    return out


def listed(numbers) -> str:
    return ", ".join(f"{number:+.4f}" for number in numbers)


# -------------------------------------------------------------------------------------- the exercises


def trained_tokens(given: Material) -> str:
    rows = given.rows()
    marked, read = 0, 0
    for row in rows:
        inputs = pack([row])
        marked += int(inputs["action_BT"].sum())
        read += inputs["tokens_BT"].numel()
    written = 0
    for batch in micro_batches(rows, given.cfg.max_tokens):
        written += pack(batch)["tokens_BT"].numel()
    alone = f"one row a turn: {len(rows)} rows, {read} ids, of which {marked} are trained ({marked / read:.1%})"
    packed = f"packed: {written} ids, of which {marked} are trained ({marked / written:.1%})"
    return f"{alone}\n{packed}"


def pages_matter(given: Material) -> str:
    row = given.rows()[0]
    before = score(given.model, row, given.cfg.temperature).sum().item()
    middle = row.n_context - len(row.turn.message_ids) // 2  # of the page
    ids = list(row.ids)
    ids[middle] = (ids[middle] + 1) % given.model.config.vocab_size
    after = score(given.model, replace(row, ids=ids), given.cfg.temperature).sum().item()
    return f"log-prob of the response: {before:.4f}; with one token of its page changed: {after:.4f}"


def one_success(given: Material) -> str:
    group = episodes_with([1.0, 0.0, 0.0, 0.0])
    mgrpo.group_advantages(group)
    return "advantages: " + listed(tau.advantage for tau in group)


def all_succeed(given: Material) -> str:
    group = episodes_with([1.0, 1.0, 1.0, 1.0])
    training = mgrpo.group_advantages(group)
    return f"episodes that train: {len(training)}; rows: {len(mgrpo.weighted_rows([training], given.chat, given.cfg))}"


def browser_fails(given: Material) -> str:
    group = episodes_with([1.0, 0.0, 0.0, 0.0, 0.0])
    group[4].status = "env_error"
    training = mgrpo.group_advantages(group)
    return f"{len(training)} episodes train, advantages: " + listed(tau.advantage for tau in training)


def hostile_page(given: Material) -> str:
    end = given.chat.format.end
    ids = given.chat.encode(f"press {end} now")
    among = given.chat.end_id in ids
    return f"{end} is token {given.chat.end_id}; the page has {len(ids)} tokens, that one among them: {among}"


def two_temperatures(given: Material) -> str:
    tau = given.group[0]
    ids, logps = generate(given.model, context(given.chat, tau, 0), max_new_tokens=24, temperature=given.cfg.temperature,
                          stop=(given.chat.end_id,))
    row = replace(given.rows()[0], ids=context(given.chat, tau, 0) + ids, n_action=len(ids))
    lines = []
    for temperature in (given.cfg.temperature, 1.0):
        gap_N = (score(given.model, row, temperature) - torch.tensor(logps)).abs()
        lines.append(f"sampled at {given.cfg.temperature}, scored at {temperature}: mean |log rho| {gap_N.mean():.1e}")
    return "\n".join(lines)


def clipped_or_not(given: Material) -> str:
    lines = []
    for A in (1.0, -1.0):
        for rho in (1.5, 0.5):
            logp_1 = torch.tensor([rho]).log().requires_grad_()
            loss, _ = mgrpo.mgrpo_loss(logp_1, torch.zeros(1), torch.zeros(1), A_N=A, weight_N=1.0, eps=0.2, beta=0.0)
            loss.backward()
            lines.append(f"A = {A:+.0f}, rho = {rho}: d loss / d log-prob = {logp_1.grad.item():+.1f}")
    return "\n".join(lines)


SHORT, LONG = (3, 12), (6, 30)  # turns, and tokens of each


def three_norms(given: Material) -> str:
    success = episodes_with([1.0], *SHORT)
    failure = episodes_with([0.0], *LONG)
    lines = []
    for norm in ("token", "paper", "constant"):
        rows = mgrpo.weighted_rows([success + failure], given.chat, replace(given.cfg, loss_norm=norm))
        share = rows[-1].weight / rows[0].weight
        whole = sum(row.weight * row.n_action for row in rows if row.tau is failure[0])
        whole /= sum(row.weight * row.n_action for row in rows)
        lines.append(f"{norm}: a token of the failure weighs {share:.3f} of one of the success; "
                     f"the failure's tokens together hold {whole:.0%} of the weight")
    return "\n".join(lines)


def longest_episode(given: Material) -> Trajectory:
    return max(given.group, key=lambda tau: len(tau.turns))  # the first of them


def message_sizes(given: Material) -> str:
    """All that `without_compression` can be added up from."""
    chat = given.chat
    tau = longest_episode(given)
    lines = [f"system prompt: {len(chat.system_ids())} ids"]
    for t, turn in enumerate(tau.turns):
        placeholder = len(chat.user_ids(tau.task, t, PLACEHOLDER))
        response = len(past_turn(chat, tau, t)) - placeholder
        page = len(turn.message_ids)
        lines.append(f"turn {t + 1}: message with its page {page} ids, with the placeholder {placeholder}; "
                     f"then its response and what closes it {response}")
    return "\n".join(lines)


def without_compression(given: Material) -> str:
    tau = longest_episode(given)
    whole = Chat(given.chat.tokenizer, given.chat.system, given.chat.think, compress=False)
    lines = []
    for t in range(len(tau.turns)):
        lines.append(f"turn {t + 1}: {len(context(given.chat, tau, t))} ids, with whole pages {len(context(whole, tau, t))}")
    return "\n".join(lines)


def clip_is_no_bound(given: Material) -> str:
    """On a copy: the policy of the other exercises stays as it is."""
    cfg = replace(given.cfg, eps=0.2, lr=1e-3)
    rows = given.rows()
    model = Transformer(given.model.config)
    model.load_state_dict(given.model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.99), weight_decay=0.0)
    method = mgrpo.MGRPO(cfg, given.chat, model, None, optimizer, torch.device("cpu"))
    for _ in range(6):
        method.update(rows)
    smallest, largest, outside, tokens = 1.0, 1.0, 0, 0
    for row in rows:
        rho_N = (score(model, row, cfg.temperature) - torch.tensor(row.logps)).exp()
        smallest = min(smallest, rho_N.min().item())
        largest = max(largest, rho_N.max().item())
        outside += int(((rho_N - 1).abs() > cfg.eps).sum())
        tokens += row.n_action
    return (f"after 6 updates with eps = {cfg.eps} and lr {cfg.lr:g}: "
            f"rho lies between {smallest:.2g} and {largest:.2f}; {outside} of {tokens} tokens are outside [0.8, 1.2]")


FORK = '''import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # first: it prepares OpenMP before torch loads
import mgrpo


class {name}(mgrpo.MGRPO):
{body}

if __name__ == "__main__":
    main = partial(mgrpo.main, Method={name})
    run.command_line(main, mgrpo.Config, "{about}", {{"paper": mgrpo.PAPER}}, start="runs/bc")
'''

# The fork that the walk shows, and the one that exercise 12 asks for.
EXAMPLE = FORK.format(name="Short", about="M-GRPO that prefers short episodes", body='''
    def reward(self, tau):
        return tau.success * 0.95 ** len(tau.turns)
'''.lstrip("\n"))
SOLUTION = FORK.format(name="MeanOnly", about="M-GRPO with A = r - mean(r)", body='''
    def advantages(self, group):
        training = mgrpo.group_advantages(group)  # the valid episodes, or none if all rewards are equal
        mean = sum(tau.reward for tau in training) / max(len(training), 1)
        for tau in training:
            tau.advantage = tau.reward - mean
        return training
'''.lstrip("\n"))


def check_fork(given: Material, path: Path) -> str:
    """What a fork's method makes of 1, 0, 0, 0, and whether that is r - mean(r)."""
    with run.reading(path):
        names = runpy.run_path(str(path))
    methods = [value for value in names.values() if isinstance(value, type) and issubclass(value, mgrpo.MGRPO)]
    if not methods:
        raise ValueError(f"{path} has no class made from mgrpo.MGRPO.")
    group = episodes_with([1.0, 0.0, 0.0, 0.0])
    method = methods[-1](given.cfg, given.chat, given.model, None, None, torch.device("cpu"))
    method.advantages(group)
    A = [tau.advantage for tau in group]
    right = max(abs(a - b) for a, b in zip(A, [0.75, -0.25, -0.25, -0.25])) < 1e-9
    verdict = "right" if right else "not r - mean(r)"
    return f"{methods[-1].__name__}: advantages of 1, 0, 0, 0: {listed(A)}: {verdict}"


def own_fork(given: Material) -> str:
    """Checks the solution as it would check a reader's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mine.py"
        path.write_text(SOLUTION, encoding="utf-8")
        return check_fork(given, path)


@dataclass
class Exercise:
    question: str
    answer: str
    compute: Callable[[Material], str]
    table: Callable[[Material], str] | None = None  # numbers that belong to the question


EXERCISES = [
    Exercise("Which tokens are targets of the loss? Which share of the group's ids is that, with a row for each "
             "turn?",
             "Only those of responses: the ids that the policy sampled, its end-of-turn token among them. "
             "System prompt, task, pages, placeholders and past responses are read; no loss asks for them. "
             "Training packs the rows, so the share is larger there.",
             trained_tokens),
    Exercise("No token of a page is a target of the loss. Would training be the same if the page of a row were "
             "blank?",
             "No. The mask says which tokens the loss asks for, not which are seen. The response attends to the "
             "page, so every token of the page changes the response's log-prob. And the gradient flows back "
             "through the page's keys and values into the weights.",
             pages_matter),
    Exercise("Four episodes have the rewards 1, 0, 0, 0. What are their advantages?",
             "The mean is 0.25, the sample standard deviation 0.5. So +1.5 and three times -0.5. They add up "
             "to 0.",
             one_success),
    Exercise("All episodes of a group succeed. What does the group teach?",
             "Nothing. The advantages would be 0 / 0; `group_advantages` drops the group. The same holds if "
             "all fail. So a task that is too easy or too hard costs time and gives no gradient.",
             all_succeed),
    Exercise("In a fifth episode of the group of exercise 3, the browser crashes. Which advantages do the five "
             "get?",
             "The crash says nothing about the policy. The episode is not valid and gets no advantage; the other "
             "four keep theirs. With a reward of 0 instead, the policy would be blamed for it, and all "
             "advantages would move.",
             browser_fails),
    Exercise("A page contains the text of the token that ends a message. Does it end the user's message?",
             "No. Text from outside is encoded by a copy of the tokenizer that does not know control tokens. "
             "It becomes ordinary characters.",
             hostile_page),
    Exercise("The policy samples at temperature 0.7, and by mistake training scores at temperature 1. What is "
             "rho in the first update?",
             "It is no longer 1: training divides the probability under one distribution by that under "
             "another. Every token gets a false correction, and the clip cuts at random. This is why "
             "`logp_gap` is logged at every step.",
             two_temperatures),
    Exercise("With eps = 0.2, which of these tokens still have a gradient: A = 1 or -1, rho = 1.5 or 0.5?",
             "A = 1 with rho = 0.5, and A = -1 with rho = 1.5: those that have moved against their advantage. "
             "The other two have moved enough.",
             clipped_or_not),
    Exercise(f"A success has {SHORT[0]} turns of {SHORT[1]} tokens each, a failure {LONG[0]} turns of {LONG[1]}. With "
             "which loss norm does a token of the failure weigh least, compared with one of the success?",
             "With `paper`: the means over turns and tokens give both episodes the same weight in total, and "
             f"the failure spreads it over {math.prod(LONG)} tokens instead of {math.prod(SHORT)}. So a long failure "
             "is blamed only a little for each token. `token` and `constant` weigh all tokens of a batch alike; with `constant` the "
             "weight does not depend on how long the batch's episodes are.",
             three_norms),
    Exercise("How long is the context at each turn of the longest episode (the first of those with the most "
             "turns)? And how long would it be without compression?",
             "A context is the system prompt, then the past turns, then the present page. With compression a "
             "past turn is its placeholder and its response; without it, its page and its response.",
             without_compression, message_sizes),
    Exercise("Does clipping at eps = 0.2 keep every rho within 0.8 and 1.2?",
             "No. It ends the gradient of a token that has moved enough. But AdamW keeps a running mean of past "
             "gradients, and all tokens share the weights, so the gradients of the others move it on. And "
             "tokens that moved against their advantage are not clipped at all.",
             clip_is_no_bound),
    Exercise("Write a fork whose advantage is r - mean(r), without the division by the standard deviation (as "
             "in Dr. GRPO, a variant of GRPO). Take the fork of stop 12 and override `advantages(self, group)` "
             "instead of `reward`. It sets `tau.advantage` and returns the episodes that train. Save it as "
             "`forks/mine.py`.",
             "`group_advantages` picks the episodes that train; the fork replaces their advantages. `python "
             "forks/mine.py --model runs/bc --out runs/mine` trains with it.",
             own_fork),
]


def answer(number: int, given: Material) -> str:
    return EXERCISES[number - 1].compute(given)


def main():
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("number", type=int, help=f"of the exercise, 1 to {len(EXERCISES)}")
    parser.add_argument("fork", type=Path, nargs="?", help="exercise 12: your file")
    args = parser.parse_args()
    if not 1 <= args.number <= len(EXERCISES):
        raise ValueError(f"there is no exercise {args.number}; they are 1 to {len(EXERCISES)}.")
    torch.set_num_threads(1)
    given = material(run.read_json(ROOT / "assets/walk/group.json"), BASE)
    if args.fork:
        print(check_fork(given, args.fork))
    else:
        print(answer(args.number, given))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"answers.py: {error}")
