"""DigiRL (arXiv 2406.11896): clone the turns that two value functions find better than expected.

    V_c(c) and V_s(h_j)  minimize  E_D [cross-entropy(r, V)]              c: the instruction
    A_c = r - V_c(c)
    A_j = w_j + (1 - w_j) (V_s(h_j+1) - V_s(h_j)),   w_j = lam^(H-j) r
    pi  maximizes  E [log pi(a_j | h_j)]  over the turns of D that pass two filters:
        A_c is among the largest --share of all episodes, and A_j > 1 / max_turns

H is the last turn, and V_s is 0 after it.

A_c chooses episodes: successes at tasks that mostly fail. This is the automatic curriculum, as a
task that always succeeds has nothing more to teach. A_j chooses turns. Late in a success it trusts
the outcome, earlier the change in V_s (the paper calls this mix doubly robust). The filter is hard:
what passes is cloned, all with the same weight.

Offline, then online: in the first --offline steps the clone plays and only V_c and V_s learn. At
the end of the last of them the policy learns from all these episodes, in as many updates as the
steps would have made, with the lr of that step. From then on it learns in every step.

    python forks/digirl.py --model runs/bc --out runs/digirl

Differs from the paper: its offline episodes are collected beforehand. Ours count among the run's
own, so that methods compare by equal numbers of episodes. Demonstrations would not do: all succeed,
so V has nothing to learn. V_c and V_s are heads on the policy's hidden states; the paper has frozen
encoders of text and pages, and two V_s of which the smaller counts. V_s learns from the step's own
episodes only, which saves forward passes and is a handicap: before a step's updates, its
cross-entropy on new episodes averages 0.69, like a coin's. The released code subtracts 0.05,
not 1 / max_turns, adds the change in V_s without its weight, and filters offline episodes by
reward. lam is its own.

Differs from mgrpo.py in 66 lines and shared.py: two heads, replayed episodes, two filters, another
loss. So --beta, --eps, --loss-norm and --turn-credit have no effect. groups_kept counts the
episodes before the filters, turns_cloned the turns after them.
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see model.py; must precede torch

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files

import torch

import mgrpo
from compress import Row, Trajectory
from evaluate import command_line
from forks.shared import (add_heads, fit, instruction, likelihood, predict, recall, samples, states)
from model import all_sum, gather


@dataclass
class Config(mgrpo.Config):
    out: str = "runs/digirl"     # the run's directory; at the end it is also the checkpoint
    # DigiRL
    offline: int = 3             # steps that only collect; after them the policy learns from all
    past: int = 768              # replayed episodes per step, over all ranks, to choose from
    share: float = 0.1           # of the episodes to clone, those with the largest A_c (and ties)
    lam: float = 0.5             # weight of the outcome one turn before the last; its power earlier
    head_lr: float = 1e-3        # of the value heads
    head_updates: int = 60       # of the value heads, per step


@dataclass
class Batch:
    """What `collect` gives to `train`. Its length is logged as groups_kept."""
    fresh: list[Trajectory]
    past: list[Trajectory]
    updates: int

    def __len__(self):
        return len(self.fresh) + len(self.past)


def open_training(cfg: Config, device):
    if cfg.offline > cfg.steps:
        raise ValueError(f"--offline {cfg.offline}: in {cfg.steps} steps the policy never learns.")
    model, reference, optimizer = mgrpo.open_training(cfg, device)
    add_heads(model, optimizer, "instruction", "step", lr=cfg.head_lr)
    return model, reference, optimizer


def collect(model, chat, tasks, cfg: Config, env, seed: str, log=None):
    played, _ = mgrpo.collect(model, chat, tasks, cfg, env, seed, log)
    valid, step = [tau for tau in played if tau.status == "ok"], int(seed.rpartition("/")[2])
    due = cfg.offline if step == cfg.offline - 1 else int(step >= cfg.offline)  # steps' worth
    return played, Batch(valid, recall(chat, cfg, cfg.past, seed), due * cfg.updates_per_batch)


def curriculum(model, optimizer, batch: Batch, chat, cfg: Config, device):
    """The first filter: (episodes with the largest A_c over all ranks, V_c's cross-entropy)."""
    episodes = batch.fresh + batch.past
    x_RD = states(model, [instruction(chat, tau.task) for tau in episodes], cfg, device)
    r_R = torch.tensor([tau.reward for tau in episodes])
    loss = fit(model, optimizer, "instruction", x_RD, r_R, cfg.head_updates)
    for tau, V in zip(episodes, predict(model, "instruction", x_RD).tolist()):
        tau.advantage = tau.reward - V
    ranking = sorted(gather([tau.advantage for tau in episodes]), reverse=True)
    top = ranking[:math.ceil(cfg.share * len(ranking))]
    return [tau for tau in episodes if tau.advantage >= top[-1]], loss


def step_advantage(r: float, V: list[float], lam: float) -> list[float]:
    """A_j of an episode's turns, given V_s of each."""
    weight = [lam ** after * r for after in reversed(range(len(V)))]
    change = [later - now for now, later in zip(V, [*V[1:], 0.0])]  # after the last turn V is 0
    return [w + (1 - w) * d for w, d in zip(weight, change)]


def good_turns(model, episodes: list[Trajectory], chat, cfg: Config, device) -> list[Row]:
    """The second filter: rows of the turns whose A_j exceeds 1 / max_turns."""
    rows = [samples(chat, [tau]) for tau in episodes]
    x_RD = states(model, [row for turns in rows for *_, row in turns], cfg, device)
    V, good = iter(predict(model, "step", x_RD).tolist()), []
    for tau, turns in zip(episodes, rows):
        A = step_advantage(tau.reward, [next(V) for _ in turns], cfg.lam)
        good += [row for (*_, row), A_j in zip(turns, A) if A_j > 1 / cfg.max_turns]
    tokens = float(all_sum([sum(row.n_action for row in good)]))
    for row in good:
        row.weight, row.advantage = 1 / tokens, 1.0
    return good


def train(model, reference, optimizer, batch: Batch, chat, cfg: Config, device) -> dict:
    fresh = samples(chat, batch.fresh)
    x_RD = states(model, [row for *_, row in fresh], cfg, device)
    r_R = torch.tensor([tau.reward for tau, *_ in fresh])
    losses = {"step_loss": fit(model, optimizer, "step", x_RD, r_R, cfg.head_updates)}
    chosen, losses["instruction_loss"] = curriculum(model, optimizer, batch, chat, cfg, device)
    rows = good_turns(model, chosen, chat, cfg, device) if batch.updates else []
    metrics = mgrpo.train(model, reference, optimizer, rows, chat,
                          replace(cfg, updates_per_batch=max(batch.updates, 1)), device,
                          weigh=lambda rows, *_: rows, loss_of=likelihood)
    return metrics | losses | {"turns_cloned": int(all_sum([len(rows)]))}


if __name__ == "__main__":
    main = partial(mgrpo.main, open_training=open_training, collect=collect, train=train)
    command_line(main, Config, __doc__, {"paper": mgrpo.PAPER | {"beta": 0.0}}, start="runs/bc")
