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

Differs from mgrpo.py: no groups, replayed episodes, a value head, another
loss. So --beta and --eps have no effect. groups_kept counts episodes. value_loss is
V's cross-entropy before this step's updates; the replayed half of the episodes it has seen before.
"""
import sys
from dataclasses import dataclass
from functools import partial
from math import exp, log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import mgrpo
from forks.shared import add_heads, fit, likelihood, predict, recall, response_rows, states, rewards_of


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment behind it is its --help."""
    out: str = "runs/awr"        # the run's directory; at the end it is also the checkpoint
    # AWR
    awr_beta: float = 0.2        # temperature of the weights exp(A / beta); smaller: only the best
    limit: float = 20.0          # largest weight
    past: int = 192              # replayed episodes per step, over all ranks
    head_lr: float = 1e-3        # of the value head
    head_updates: int = 60       # of the value head, per step


class AWR(mgrpo.MGRPO):
    smallest_group = 1  # episodes are not compared within groups

    def __init__(self, cfg, chat, model, reference, optimizer, device):
        super().__init__(cfg, chat, model, reference, optimizer, device)
        if cfg.awr_beta <= 0 or cfg.limit <= 0:
            raise ValueError("--awr-beta and --limit must be above 0.")
        add_heads(model, optimizer, "value", lr=cfg.head_lr)

    def learn_from(self, episodes, step):
        """Trains on all valid episodes and on past ones, each a group of its own."""
        valid = [tau for tau in episodes if tau.status == "ok"]
        training = valid + recall(self.chat, self.cfg, self.cfg.past, step)
        value_loss = self.value_advantages(training)
        rows = mgrpo.weigh([[tau] for tau in training], self.chat, self.cfg)
        largest = log(self.cfg.limit)
        for row in rows:  # in place of an advantage: what a response is worth
            row.advantage = exp(min(row.advantage / self.cfg.awr_beta, largest))
        groups = int(run.all_sum([len(training)]))
        return rows, {"groups_kept": groups, "value_loss": value_loss}

    def value_advantages(self, episodes) -> float:
        """Fits V, then sets A_j = r - V(h_j); returns V's cross-entropy before that."""
        cfg = self.cfg
        rows = response_rows(self.chat, episodes)
        x_RD = states(self.model, rows, cfg, self.device)
        r_R = rewards_of([row.tau for row in rows])
        loss = fit(self.model, self.optimizer, "value", x_RD, r_R, cfg.head_updates)
        V_R = predict(self.model, "value", x_RD)
        for row, V in zip(rows, V_R.tolist()):
            tau = row.tau
            if row.turn is tau.turns[0]:
                tau.advantage = tau.reward - V  # what trajectories.jsonl shows
            # A row's advantage is the sum of the episode's and the turn's.
            row.turn.advantage = tau.reward - V - tau.advantage
        return loss

    def loss(self, batch, logp_N, logp_ref_N, hidden_ND):
        return likelihood(batch, logp_N)


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=AWR)
    run.command_line(main, Config, __doc__, {"paper": mgrpo.PAPER | {"beta": 0.0}}, start="runs/bc")
