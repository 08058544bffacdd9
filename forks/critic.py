"""A learned critic that trains with the policy: PPO's advantage (arXiv 1707.06347) without groups.

    A_t = r - V(h_j, a_<t)                        for every token t of a response
    L   = L_mgrpo with A_t  +  c * sum_t weight_t cross-entropy(r, V(h_j, a_<t))

r is the reward of the whole episode, 0 or 1; weight_t is L_mgrpo's (mgrpo.weighted_rows). V is a head on the
policy's own last hidden state, the one that predicts token t, so it estimates the chance of success before
token t is sampled. Its gradient runs through the policy's layers: both learn to read pages. A_t is computed
once, in the step's first update, and reused in the later ones, without gradient. As in mgrpo.py, a response
that failed has no A above 0 unless --credit-errors is given.

In PyTorch terms: M-GRPO plays a task several times to know what to expect of it. A critic predicts
that, so an episode also teaches if it is alone (--G 1), or if all of its group earned the same. The
price is that V is wrong at first: it starts at 0.5, so where 20% of the episodes succeed the mean of A is
-0.3, and the first steps mostly push sampled tokens down. A is not normalized. G stays 8 only so that
all methods play equally many episodes of a task.

    python forks/critic.py --model runs/bc --out runs/critic

Differs from PPO: V is a probability. gamma = lambda = 1, so later predictions of V do not enter A, since
the one reward comes at the end. V minimizes a cross-entropy: through a sigmoid, the gradient of PPO's
squared error vanishes where V is sure and wrong.

Differs from mgrpo.py: all valid episodes train, and the loss has A_t and a second term. The metric loss is
that of both terms, value_loss the cross-entropy per token in the first update (0.69 is a coin's), and
groups_kept counts the groups with a valid episode. In the records an episode's advantage is 0: A differs from
token to token.
"""
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import torch
import torch.nn.functional as F

import mgrpo
from forks.shared import add_heads
from mgrpo import mgrpo_loss, per_row, per_token, sampled_logps


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/critic"     # the run's directory; at the end it is also the checkpoint
    # Critic
    value_weight: float = 0.5    # c, the weight of the value loss
    head_lr: float = 1e-3        # of the value head


class Critic(mgrpo.MGRPO):
    smallest_group = 1

    @staticmethod
    def check(cfg):
        if cfg.value_weight < 0:
            raise ValueError(f"--value-weight {cfg.value_weight:g}: give at least 0.")

    def __init__(self, cfg, chat, model, reference, optimizer, device):
        super().__init__(cfg, chat, model, reference, optimizer, device)
        add_heads(model, optimizer, "value", lr=cfg.head_lr)

    def advantages(self, group):
        """All valid episodes train. Their advantage is known token by token, in `loss`."""
        return [tau for tau in group if tau.status == "ok"]

    def loss(self, micro_batch, logp_N, logp_ref_N, hidden_ND):
        # 1) V of each token, and the logit that it comes from.
        device = logp_N.device
        head = self.model.fork_heads["value"]
        logit_N = head(hidden_ND.float())[:, 0]
        V_N = logit_N.detach().sigmoid()

        # 2) A as it was in the step's first update. Each step has new rows, but for PADDING, whose A stays that of
        #    an earlier step: it does no harm, since its weight is 0.
        rewards = [row.tau.reward if row.tau else 0.0 for row in micro_batch]  # PADDING has no episode
        r_N = per_token(rewards, micro_batch, device)
        new_A_N = r_N - V_N
        for row, A in zip(micro_batch, per_row(new_A_N, micro_batch)):
            first_update = not hasattr(row, "A")
            if first_update:
                failed = row.turn and row.turn.error
                if failed and not self.cfg.credit_errors:
                    A = A.clamp(max=0.0)  # as mgrpo.withhold_credit does
                row.A = A
        A_N = torch.cat([row.A for row in micro_batch])

        # 3) Both losses, weighted alike.
        weight_N = per_token([row.weight for row in micro_batch], micro_batch, device)
        logp_old_N = sampled_logps(micro_batch, device)
        loss, metrics = mgrpo_loss(logp_N, logp_old_N, logp_ref_N,
                                   A_N=A_N, weight_N=weight_N,
                                   eps=self.cfg.eps, beta=self.cfg.beta)
        value_loss_N = F.binary_cross_entropy_with_logits(logit_N, r_N, reduction="none")
        metrics["value_loss"] = value_loss_N.sum().item()
        value_loss = (weight_N * value_loss_N).sum()
        return loss + self.cfg.value_weight * value_loss, metrics


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=Critic)
    run.command_line(main, Config, __doc__, {"paper": mgrpo.PAPER}, start="runs/bc")
