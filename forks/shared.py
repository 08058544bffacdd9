"""What several forks need: heads that predict success, a replay buffer, and a weighted log-likelihood.

    add_heads(model, optimizer, "value")           heads on the policy, resumed with it
    x_RD = states(model, rows, cfg, device)        hidden states where responses begin, or end
    fit(model, optimizer, "value", x_RD, y_R, 20)  cross-entropy on success
    p_R = predict(model, "value", x_RD)            chance of success, from 0 to 1
    playable(episodes)                             those that can be trained on
    instruction(chat, task)                        a row that ends with the task, before any page
    response_rows(chat, episodes)                  the rows of all their responses
    rewards_of(episodes)                           their rewards as a tensor
    without_messages(page)                         a page without errors and notes
    past_records(cfg)                              the run's newest 2,000 training episodes, as records (among=N: more)
    recall(chat, cfg, 192, step)                   192 of them, drawn at random: this rank's share
    likelihood(micro_batch, logp_N)                a loss: weighted log-likelihood

A head is two linear layers on the policy's last hidden state. There are two ways to train one. `fit`
reads detached `states`, so it does not train the policy; states are small, so the ranks share them,
and every rank fits the same head. Or a fork's `loss` applies the head to hidden_ND, and its gradient
runs on into the policy (forks/critic.py); the ranks' gradients are averaged in bc.optimizer_step.
The replay buffer is the run's own trajectories.jsonl. A resumed run finds it as it was.

Dimension key: R rows (turns or episodes) of this rank, D width, N action tokens.
"""
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from compress import Chat, Row, Trajectory, micro_batches, pack, replay, trajectory_rows
from mgrpo import per_token
from model import Transformer, unsharded
from run import all_lines, barrier, gather, rank, world_size

# ------------------------------------------------------------------------------------------ heads --


def add_heads(model: Transformer, optimizer, *names: str, lr: float = 1e-3):
    """Gives the policy heads. They start at a chance of 0.5.

    Only the training state holds them: they resume with the run, but a checkpoint has none. Their
    learning rate is constant, and --max-grad-norm leaves them out.
    """
    width = model.config.hidden_size
    scale = width ** -0.5
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same
    for name in names:
        first = nn.Linear(width, width)
        last = nn.Linear(width, 1)
        noise = torch.randn(width, width, generator=generator)
        with torch.no_grad():
            first.weight.copy_(noise * scale)
        nn.init.zeros_(first.bias)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

        head = nn.Sequential(first, nn.GELU(), last)
        head = head.to(device)
        model.fork_heads[name] = head
        optimizer.add_param_group({"params": head.parameters(), "lr": lr})


@torch.no_grad()
def states(model: Transformer, rows: list[Row], cfg, device, end: bool = False):
    """The last hidden state of each row, (R, D), float32, in the order of rows.

    It is that of the last token before the response, or, with `end`, of the response's last token. All ranks
    call it, even one without rows: they gather the weights together.
    """
    found = {}  # row -> its state; `micro_batches` sorts the rows
    with unsharded(model) as whole:
        for micro_batch in micro_batches(rows, cfg.max_tokens):
            inputs = pack(micro_batch, device)
            action_BT = inputs.pop("action_BT")
            next_BT = action_BT.roll(-1, dims=1)
            if end:
                edge_BT = action_BT & ~next_BT
            else:
                edge_BT = ~action_BT & next_BT  # the step from False to True: a response begins

            def at_edges(x_BTD):
                return x_BTD[edge_BT]

            x_RD = whole(**inputs, head=at_edges).float()
            for row, x_D in zip(micro_batch, x_RD, strict=True):
                found[row] = x_D

    if not rows:
        width = model.config.hidden_size
        return torch.zeros(0, width, device=device)
    in_order = [found[row] for row in rows]
    return torch.stack(in_order)


def fit(model: Transformer, optimizer, name: str,
        x_RD, y_R, updates: int) -> tuple[float, float] | tuple[None, None]:
    """Trains a head by cross-entropy on success y_R (from 0 to 1) over the rows of all ranks, which all call it.

    Returns the cross-entropy before and after, in nats (None without rows). ln 2 = 0.69 is what a coin achieves. If
    the next step's `before`, on new rows, is far above this step's `after`, the head knew its rows by heart.
    """
    device = x_RD.device
    own = (x_RD.cpu(), y_R.cpu())
    shares = gather([own])
    all_x_RD = torch.cat([x for x, _ in shares]).to(device)
    all_y_R = torch.cat([y for _, y in shares]).to(device)
    if not len(all_y_R):
        return None, None

    head = model.fork_heads[name]

    def cross_entropy():
        logit_R = head(all_x_RD)[:, 0]
        return F.binary_cross_entropy_with_logits(logit_R, all_y_R)

    before = cross_entropy().item()
    for _ in range(updates):
        cross_entropy().backward()
        optimizer.step()  # nothing but this head has a gradient now
        optimizer.zero_grad()
    after = cross_entropy().item()
    return before, after


@torch.no_grad()
def predict(model: Transformer, name: str, x_RD):
    """The head's chance of success for each row, (R,)."""
    head = model.fork_heads[name]
    logit_R = head(x_RD)[:, 0]
    return logit_R.sigmoid()


def rewards_of(episodes: list[Trajectory]):
    """Their rewards as a tensor, (R,)."""
    rewards = [tau.reward for tau in episodes]
    return torch.tensor(rewards, dtype=torch.float32)


# ------------------------------------------------------------------------------------------- rows --


def playable(episodes: list[Trajectory]) -> list[Trajectory]:
    """The valid episodes that have a turn to train on."""
    return [tau for tau in episodes if tau.turns and tau.status == "ok"]


def instruction(chat: Chat, task: dict) -> Row:
    """The context up to the end of the task's text, as a row for `states`."""
    text = f"Task: {task['intent']}"
    opening = chat.opening("user", text)
    ids = chat.system_ids() + opening
    # The end id stands in for a response: `states` reads the token before it.
    return Row(ids + [chat.end_id], n_action=1)


def response_rows(chat: Chat, episodes: list[Trajectory]) -> list[Row]:
    """The rows of all responses of some episodes. A row knows its episode (tau) and its turn."""
    rows = []
    for tau in episodes:
        rows += trajectory_rows(chat, tau)
    return rows


def without_messages(page: str) -> str:
    """A page without the lines before it that are about the last action: errors and notes."""
    messages = ("error: ", "note: ")
    lines = page.split("\n")
    while lines and lines[0].startswith(messages):
        lines.pop(0)
    return "\n".join(lines)


def likelihood(micro_batch: list[Row], logp_N):
    """- sum weight A log pi, and its metrics. A, at least 0, says how much a response is worth imitating.

    pi is at the sampling temperature (cfg.temperature); bc.py clones at 1.
    """
    worths = [row.weight * row.advantage for row in micro_batch]
    worth_N = per_token(worths, micro_batch, logp_N.device)
    loss = -(worth_N * logp_N).sum()
    return loss, {"kl": 0.0, "clip_frac": 0.0}


# --------------------------------------------------------------------------------- replay buffer --


def past_records(cfg, among: int = 2000) -> list[dict]:
    """The newest valid episodes of the run's own training, as records. All ranks call it.

    Only training counts: an evaluation may have written into the same file. Only the file's last
    gigabyte is read; it may hold fewer than `among`.
    """
    barrier()  # until rank 0 has written them
    path = Path(cfg.out) / "trajectories.jsonl"
    records = all_lines(path)
    valid = []
    for record in records:
        training = record.get("split") == "train"
        if training and record["status"] == "ok":
            valid.append(record)
    return valid[-among:]


def recall(chat: Chat, cfg, count: int, step: int,
           among: int = 2000) -> list[Trajectory]:
    """This rank's share of `count` past episodes, drawn without repeats from the run's newest `among`.

    They come without the log-probs of their sampling, so `logp_gap` counts them as 0 and `change` as from this
    step's first update. All ranks call it.
    """
    records = past_records(cfg, among)
    valid = [record for record in records if record["turns"]]

    rng = random.Random(f"{cfg.seed}/{step}/recall")
    count = min(count, len(valid))
    drawn = rng.sample(valid, count)
    share = drawn[rank()::world_size()]
    return [remember(chat, record) for record in share]


def remember(chat: Chat, record: dict) -> Trajectory:
    """A line of trajectories.jsonl as an episode to train on, with the ids that were sampled."""
    tau = replay(chat, record)
    tau.member = record["member"]
    tau.reward = record["reward"]
    for turn, recorded in zip(tau.turns, record["turns"]):
        turn.response_ids = recorded["ids"]
        turn.logps = None  # those of an older policy, rounded
    return tau
