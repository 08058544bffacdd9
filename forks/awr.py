"""AWR, advantage-weighted regression (arXiv 1910.00177): clone past responses, good ones more.

    V  minimizes  E_D [cross-entropy(r, V(h_j))]
    pi maximizes  E_D [w_j log pi(a_j | h_j)],   w_j = min(exp((r - V(h_j)) / awr_beta), limit)

D is the step's valid episodes and --past more, drawn from the newest 2,000 of earlier steps. r is the
reward of the whole episode, 0 or 1. V is a head on the policy's hidden state at the end of h_j, just
before the response. It estimates the chance of success.

In PyTorch terms: this is behavior cloning with a weight for each response. By default a success that V
did not expect (r - V = 0.6 or more) has the largest weight, 20. A success or a failure that V expected
has a weight near 1, so it is cloned as well. A failure that V did not expect has a weight near 0. There is
no ratio to the policy that sampled, so D may come from any policy. But no weight is negative: bad responses
become less likely only because others become more likely.

    python forks/awr.py --model runs/bc --out runs/awr

Differs from the paper: V is a probability trained by cross-entropy, because r is 0 or 1; the paper
regresses on lambda-returns. Each step trains on its own episodes and on --past earlier ones; the
paper draws all from the buffer. V is a head on the policy's layers and does not train them; the
paper's V is a network of its own, which would double the cost here. The released code standardizes
A (mean 0, deviation 1) and divides it by a temperature of 1. Here A is not standardized and awr_beta is
0.2: where V is sure and right, A is near 0 and the weight near 1.

Differs from mgrpo.py: no groups, replayed episodes, a value head, another loss. So --eps and
--credit-errors have no effect and --beta is refused.

Metrics: value_loss is V's cross-entropy before the step's --head-updates; V has seen the replayed episodes
before. value_loss_fitted is V's cross-entropy after them, on the rows that it then weighs. If it is near 0, V
knows their rewards by heart, so every A is near 0 and every weight near 1. weight is the mean weight,
episodes_trained counts D. kl and clip_frac are logged as 0.
"""
import sys
from dataclasses import dataclass
from functools import partial
from math import exp, log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import mgrpo
from forks.shared import add_heads, fit, likelihood, playable, predict, recall, rewards_of, states


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/awr"        # the run's directory; at the end it is also the checkpoint
    # AWR
    awr_beta: float = 0.2        # temperature of the weights exp(A / awr_beta); smaller: only the best
    limit: float = 20.0          # largest weight
    past: int = 192              # replayed episodes per step, over all ranks
    head_lr: float = 1e-3        # of the value head
    head_updates: int = 60       # of the value head, per step


class AWR(mgrpo.MGRPO):
    smallest_group = 1  # episodes are not compared within groups

    @staticmethod
    def check(cfg):
        if cfg.awr_beta <= 0 or cfg.limit <= 0 or cfg.past < 0:
            raise ValueError("--awr-beta and --limit must be above 0, --past at least 0.")
        if cfg.beta:
            raise ValueError(f"--beta {cfg.beta:g}: AWR has no KL term; leave it at 0 (or set --awr-beta).")

    def __init__(self, cfg, chat, model, reference, optimizer, device):
        super().__init__(cfg, chat, model, reference, optimizer, device)
        add_heads(model, optimizer, "value", lr=cfg.head_lr)

    def training_rows(self, episodes, step):
        """Trains on all valid episodes and on past ones, each a group of its own to --loss-norm."""
        # 1) The episodes: new and replayed ones.
        cfg = self.cfg
        fresh = playable(episodes)
        past = recall(self.chat, cfg, cfg.past, step)
        training = fresh + past
        groups = [[tau] for tau in training]
        rows = mgrpo.weighted_rows(groups, self.chat, cfg)

        # 2) What a response is worth: its w_j.
        V, metrics = self.fit_value(rows)
        largest = log(cfg.limit)
        for row, V_j in zip(rows, V):
            tau = row.tau
            A = tau.reward - V_j
            log_w = min(A / cfg.awr_beta, largest)  # before exp, which could overflow
            row.advantage = exp(log_w)  # w_j, where `likelihood` looks for it
            if row.turn is tau.turns[0]:
                tau.advantage = row.advantage  # the first turn's weight, for trajectories.jsonl only

        # 3) Means and counts over all ranks.
        sum_w = sum(row.advantage for row in rows)
        sum_w, n_rows, n_episodes = run.all_sum([sum_w, len(rows), len(training)])
        metrics["weight"] = sum_w / max(n_rows, 1)
        metrics["episodes_trained"] = int(n_episodes)
        return rows, metrics

    def fit_value(self, rows) -> tuple[list[float], dict]:
        """Fits V to the rewards of all rows; returns V(h_j) of each, and V's metrics."""
        x_RD = states(self.model, rows, self.cfg, self.device)
        r_R = rewards_of([row.tau for row in rows])
        updates = self.cfg.head_updates
        before, after = fit(self.model, self.optimizer, "value", x_RD, r_R, updates)
        V_R = predict(self.model, "value", x_RD)
        metrics = {
            "value_loss": before,
            "value_loss_fitted": after,
        }
        return V_R.tolist(), metrics

    def loss(self, micro_batch, logp_N, logp_ref_N, hidden_ND):
        return likelihood(micro_batch, logp_N)


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=AWR)
    paper = mgrpo.PAPER | {"beta": 0.0}
    run.command_line(main, Config, __doc__, {"paper": paper}, start="runs/bc")
