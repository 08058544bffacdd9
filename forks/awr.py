"""AWR, advantage-weighted regression (arXiv 1910.00177): clone past responses, good ones more.

    V  minimizes  E_D [cross-entropy(r, V(h_j))]
    pi maximizes  E_D [w_j log pi(a_j | h_j)],   w_j = min(exp((r - V(h_j)) / beta), limit)

D is a replay buffer. r is the reward of the whole episode, 0 or 1. V is a head on the policy's
hidden state at the end of h_j, just before the response. It estimates the chance of success.

In PyTorch terms: this is behavior cloning with a weight for each response. A success that V did
not expect has a large weight, a failure that V expected a weight near 1, a surprising failure one
near 0. No ratio to the policy that sampled D appears, so any policy may have. But no weight is
negative: bad responses become less likely only because others become more likely.

    python forks/awr.py --model runs/bc --out runs/awr

Differs from the paper: V is a probability trained by cross-entropy, because r is 0 or 1; the paper
regresses on lambda-returns. Each step trains on its own episodes and on --past earlier ones; the
paper draws all from the buffer. V is a head on the policy's layers and does not train them; the
paper's V is a network of its own, which would double the cost here. The released code standardizes
A (mean 0, deviation 1) and takes beta = 1. Here A stays as it is: where V is sure and right, A is
near 0 and the weight near 1.

Differs from mgrpo.py in 38 lines and shared.py: no groups, replayed episodes, a value head, another
loss. So --beta, --eps and --turn-credit have no effect. groups_kept counts episodes. value_loss is
V's cross-entropy before this step's updates; the replayed half of the episodes it has seen before.
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see model.py; must precede torch

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files

import torch

import mgrpo
from evaluate import command_line
from forks.shared import add_heads, fit, likelihood, predict, recall, samples, states


@dataclass
class Config(mgrpo.Config):
    out: str = "runs/awr"        # the run's directory; at the end it is also the checkpoint
    # AWR
    awr_beta: float = 0.2        # temperature of the weights exp(A / beta); smaller: only the best
    limit: float = 20.0          # largest weight
    past: int = 192              # replayed episodes per step, over all ranks
    head_lr: float = 1e-3        # of the value head
    head_updates: int = 60       # of the value head, per step


def open_training(cfg: Config, device):
    model, reference, optimizer = mgrpo.open_training(cfg, device)
    add_heads(model, optimizer, "value", lr=cfg.head_lr)
    return model, reference, optimizer


def collect(model, chat, tasks, cfg: Config, env, seed: str, log=None):
    """Plays as M-GRPO does. All valid episodes train, and past ones; each is a group of its own."""
    played, _ = mgrpo.collect(model, chat, tasks, cfg, env, seed, log)
    valid = [tau for tau in played if tau.status == "ok"]
    return played, [[tau] for tau in valid + recall(chat, cfg, cfg.past, seed)]


def value_advantages(model, optimizer, kept, chat, cfg: Config, device) -> float:
    """Fits V, then sets A_j = r - V(h_j); returns V's cross-entropy before that."""
    everything = samples(chat, [tau for group in kept for tau in group])
    x_RD = states(model, [row for _, _, row in everything], cfg, device)
    r_R = torch.tensor([tau.reward for tau, _, _ in everything])
    loss = fit(model, optimizer, "value", x_RD, r_R, cfg.head_updates)
    for (tau, turn, _), V in zip(everything, predict(model, "value", x_RD).tolist()):
        if turn is tau.turns[0]:
            tau.advantage = tau.reward - V  # what trajectories.jsonl shows
        turn.advantage = tau.reward - V - tau.advantage  # a row's advantage is the sum of both
    return loss


def weigh(kept, chat, cfg: Config):
    """M-GRPO's rows and means. In place of an advantage, what a response is worth."""
    rows = mgrpo.weigh(kept, chat, cfg)
    for row in rows:
        row.advantage = math.exp(min(row.advantage / cfg.awr_beta, math.log(cfg.limit)))
    return rows


def train(model, reference, optimizer, kept, chat, cfg: Config, device) -> dict:
    value_loss = value_advantages(model, optimizer, kept, chat, cfg, device)
    metrics = mgrpo.train(model, reference, optimizer, kept, chat, cfg, device, weigh, likelihood)
    return metrics | {"value_loss": value_loss}


if __name__ == "__main__":
    main = partial(mgrpo.main, open_training=open_training, collect=collect, train=train)
    command_line(main, Config, __doc__, {"paper": mgrpo.PAPER | {"beta": 0.0}}, start="runs/bc")
