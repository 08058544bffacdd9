"""What several forks need: heads that predict success, a replay buffer, and regression on actions.

    add_heads(model, optimizer, "value")           heads on the policy, resumed with it
    x_RD = states(model, rows, cfg, device)        hidden states where responses begin, or end
    fit(model, optimizer, "value", x_RD, y_R, 20)  cross-entropy on success
    p_R = predict(model, "value", x_RD)            chance of success, from 0 to 1
    instruction(chat, task)                        a row that ends with the task, before any page
    samples(chat, episodes)                        their turns, each with its episode and its row
    recall(chat, cfg, 192, seed)                   past episodes of the run, from its own records
    likelihood                                     a loss for mgrpo.train: weighted log-likelihood

A head is two linear layers on the policy's last hidden state. Its gradient ends there: it does not
train the policy. States are small, so the ranks share them, and every rank fits the same head.
The replay buffer is the run's own trajectories.jsonl. A resumed run finds it as it was.

Dimension key: R rows (turns or episodes) of this rank, D width, N action tokens.
"""
import functools
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from compress import Chat, Row, Trajectory, micro_batches, pack, replay, rows
from evaluate import newest
from mgrpo import per_token
from model import Transformer, all_max, gather, rank, unsharded, world_size


def add_heads(model: Transformer, optimizer, *names: str, lr: float = 1e-3):
    """Gives the policy heads. They start at a chance of 0.5. Only the training state holds them."""
    width, generator = model.config.hidden_size, torch.Generator().manual_seed(0)
    for name in names:
        first, last = nn.Linear(width, width), nn.Linear(width, 1)
        with torch.no_grad():  # all ranks draw the same
            first.weight.copy_(torch.randn(width, width, generator=generator) * width ** -0.5)
        for tensor in (first.bias, last.weight, last.bias):
            nn.init.zeros_(tensor)
        head = nn.Sequential(first, nn.GELU(), last).to(next(model.parameters()).device)
        model.heads[name] = head
        optimizer.add_param_group({"params": head.parameters(), "lr": lr})


@torch.no_grad()
def states(model: Transformer, rows: list[Row], cfg, device, end: bool = False):
    """The last hidden state of each row, (R, D), float32, in the order of rows.

    It is read at the last token before the response, or, with `end`, at the response's own last.
    """
    found = {}
    with unsharded(model) as whole:
        for batch in micro_batches(rows, cfg.max_tokens):
            inputs = pack(batch, device)
            action_BT = inputs.pop("action_BT")
            next_BT = action_BT.roll(-1, dims=1)  # a step from False to True is where a response begins
            edge_BT = action_BT & ~next_BT if end else ~action_BT & next_BT
            x_RD = whole(**inputs, head=lambda x_BTD: x_BTD[edge_BT]).float()
            found |= {id(row): x_D for row, x_D in zip(batch, x_RD, strict=True)}
    nothing = torch.zeros(0, model.config.hidden_size, device=device)
    return torch.stack([found[id(row)] for row in rows]) if rows else nothing


def fit(model: Transformer, optimizer, name: str, x_RD, y_R, updates: int) -> float:
    """Trains a head by cross-entropy on success y_R (0 or 1) over the rows of all ranks.

    Returns the cross-entropy before its first update, in nats. ln 2 = 0.69 is what a coin achieves.
    """
    both = gather([(x_RD.cpu(), y_R.cpu())])
    x_RD, y_R = (torch.cat(parts).float().to(x_RD.device) for parts in zip(*both))
    losses = []
    for _ in range(updates if len(y_R) else 0):
        loss = F.binary_cross_entropy_with_logits(model.heads[name](x_RD)[:, 0], y_R)
        loss.backward()
        optimizer.step()  # nothing but this head has a gradient now
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0] if losses else 0.0


@torch.no_grad()
def predict(model: Transformer, name: str, x_RD):
    """The head's chance of success for each row, (R,)."""
    return model.heads[name](x_RD)[:, 0].sigmoid()


def instruction(chat: Chat, task: dict) -> Row:
    """The context up to the end of the task's text, as a row for `states`."""
    ids = chat.head() + chat.opening("user", f"Task: {task['intent']}")
    return Row(trunk=ids, prefix=len(ids), leaf=[chat.end_id], n_action=1)


def samples(chat: Chat, episodes: list[Trajectory]) -> list[tuple]:
    """[(trajectory, turn, row)] of all responses."""
    responses = lambda tau: [turn for turn in tau.turns if turn.action_ids]  # `rows` has one for each
    return [(tau, turn, row) for tau in episodes for turn, row in zip(responses(tau), rows(chat, tau))]


def recall(chat: Chat, cfg, count: int, seed: str, among: int = 2000) -> list[Trajectory]:
    """This rank's share of `count` past episodes, drawn without repeats from the run's newest `among`.

    Their log-probs at sampling time are not given: gap and change in the metrics count from the
    start of this step. All ranks call it.
    """
    all_max(0)  # until rank 0 has written them
    records, _ = newest(Path(cfg.out) / "trajectories.jsonl", among, 10**9)
    valid = [record for record in records if record["turns"] and record["status"] == "ok"]
    drawn = random.Random(f"{seed}/recall").sample(valid, min(count, len(valid)))
    return [remember(chat, record) for record in drawn[rank()::world_size()]]


@functools.cache
def spelling(chat: Chat) -> dict[str, int]:
    """The id of each token that is whole characters, by its text."""
    ids = range(chat.tokenizer.get_vocab_size())
    texts = chat.tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    return {text: i for text, i in zip(texts, ids) if "\ufffd" not in text}


def remember(chat: Chat, record: dict) -> Trajectory:
    """A line of trajectories.jsonl as an episode to train on, with the ids that were sampled.

    Only a response with a token that is part of a character is encoded again from its text.
    """
    tau, ids = replay(chat, record), spelling(chat)
    tau.member, tau.reward = record["member"], record["reward"]
    for turn, said in zip(tau.turns, record["turns"]):
        turn.logps = None  # those of an older policy, rounded
        if all(token in ids for token in said["tokens"]):
            turn.action_ids = [ids[token] for token in said["tokens"]]
    return tau


def likelihood(batch: list[Row], logp_N, logp_ref_N, cfg):
    """- sum weight A log pi, where A says how much a response is worth imitating: `loss_of`."""
    worth_N = per_token(batch, lambda row: [row.weight * row.advantage] * row.n_action, logp_N.device)
    return -(worth_N * logp_N).sum(), {"kl": 0.0, "clip_frac": 0.0}
