"""A learned critic that trains with the policy: PPO's advantage (arXiv 1707.06347) without groups.

    A_t = r - V(h_j, a_<t)                        for every token t of a response
    L   = L_mgrpo with A_t  +  c * mean_t (r - V(h_j, a_<t))^2

r is the reward of the whole episode, 0 or 1. V is a head on the policy's own last hidden state, the
one that predicts token t, so it estimates the chance of success token by token. Its gradient runs
through the policy's layers: both learn to read pages. A_t is computed once, in the step's first
update, and reused in the later ones, without gradient.

In PyTorch terms: M-GRPO plays a task several times to know what to expect of it. A critic predicts
that, so an episode also teaches if it is alone (--G 1), or if all of its group earned the same. The
price is that V is wrong at first.

    python forks/critic.py --model runs/bc --out runs/critic

Differs from PPO: V is a probability, and no discount or lambda-return mixes in later predictions, since
the one reward comes at the end.

Differs from mgrpo.py: all valid episodes train, and the loss has A_t and a second term.
"""
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import torch

import mgrpo
from forks.shared import add_heads
from mgrpo import mgrpo_loss, per_token, sampled_logps


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment behind it is its --help."""
    out: str = "runs/critic"     # the run's directory; at the end it is also the checkpoint
    # Critic
    value_weight: float = 0.5    # c, the weight of the value loss
    head_lr: float = 1e-3        # of the value head


class Critic(mgrpo.MGRPO):
    smallest_group = 1

    def __init__(self, cfg, chat, model, reference, optimizer, device):
        super().__init__(cfg, chat, model, reference, optimizer, device)
        add_heads(model, optimizer, "value", lr=cfg.head_lr)

    def advantages(self, group):
        """All valid episodes train. Their advantage is known token by token, in `loss`."""
        return [tau for tau in group if tau.status == "ok"]

    def loss(self, batch, logp_N, logp_ref_N, hidden_ND):
        # 1) r - V of each token, with its gradient; and as it was in the step's first update.
        V_N = self.model.heads["value"](hidden_ND.float())[:, 0].sigmoid()
        r_N = per_token([row.tau.reward if row.tau else 0.0 for row in batch], batch, V_N.device)
        error_N = r_N - V_N
        counts = [row.n_action for row in batch]
        for row, error in zip(batch, error_N.detach().split(counts)):
            if not hasattr(row, "A"):
                row.A = error
        A_N = torch.cat([row.A for row in batch])

        # 2) Both losses, weighted alike.
        weight_N = per_token([row.weight for row in batch], batch, V_N.device)
        logp_old_N = sampled_logps(batch, V_N.device)
        loss, metrics = mgrpo_loss(logp_N, logp_old_N, logp_ref_N, A_N=A_N, weight_N=weight_N,
                                   eps=self.cfg.eps, beta=self.cfg.beta)
        value_loss = (weight_N * error_N ** 2).sum()
        metrics["value_loss"] = (error_N ** 2).sum().item()
        return loss + self.cfg.value_weight * value_loss, metrics


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=Critic)
    run.command_line(main, Config, __doc__, {"paper": mgrpo.PAPER}, start="runs/bc")
