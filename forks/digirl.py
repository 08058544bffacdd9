"""DigiRL (arXiv 2406.11896): clone the turns that two value functions find better than expected.

    V_c(c)    minimizes  E_D   [cross-entropy(r, V_c)]       c: the instruction
    V_s(h_j)  minimizes  E_new [cross-entropy(r, V_s)]       new: the step's own episodes
    A_c = r - V_c(c)
    A_j = w_j r + (1 - w_j) (V_s(h_{j+1}) - V_s(h_j)),   w_j = lam^(H-j)  H: the episode's last turn
    pi  maximizes  the mean log-prob of the tokens of all turns of D that pass two filters:
        A_c is among the largest --share of all episodes, and A_j > 1 / max_turns

D is the step's valid episodes and --past more, drawn from the newest 2,000 of earlier steps.

A_c chooses episodes: successes at tasks that mostly fail. This is the automatic curriculum, as a
task that always succeeds has nothing more to teach. Equal A_c enter together, so more than --share may
pass; if fewer episodes succeed, failures pass as well. A_j chooses turns. At the end of a success it trusts
the outcome, before that the change in V_s. The paper calls this mix doubly robust. As long as V_s is flat,
this keeps the last four turns of a success. What passes is cloned, all with the same weight.

Offline, then online: in the first --offline steps the clone plays and only V_c and V_s learn. At the end of the
last of them the policy is trained for the first time, on what passes the filters of all these episodes (or of
as many as --past draws), in --offline times --updates-per-batch updates, with the lr of that step. From then on
it learns in every step.

    python forks/digirl.py --model runs/bc --out runs/digirl

Differs from the paper: its offline episodes are collected beforehand. Ours count among the run's own,
so that methods compare by equal numbers of episodes. Demonstrations would not do: all succeed, so V has
nothing to learn. V_c and V_s are heads on the policy's hidden states; the paper has frozen encoders of
text and pages, and two V_s of which the smaller counts. V_s learns from the step's own episodes only,
which saves forward passes and is a handicap: before V_s is fitted in a step, its cross-entropy on new
episodes is 0.60 on average (nine steps, seeds 31 and 32; a coin's is 0.69). In the released code the
threshold of A_j is 0.05, not 1 / max_turns, the change in V_s counts in full, without 1 - w_j, and offline episodes are
filtered by reward. Our lam, 0.5, is the released code's.

Differs from mgrpo.py: no groups, two heads, replayed episodes, two filters, another loss. So --eps,
--loss-norm and --credit-errors have no effect and --beta is refused.

Metrics: episodes_seen, of the step and replayed; episodes_kept, the share of them that passes the first filter
(with ties more than --share); turns_cloned, what passes both; V_s_loss and V_c_loss, before the step's fit.
kl and clip_frac are logged as 0.
"""
import sys
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import mgrpo
from forks.shared import (add_heads, fit, instruction, likelihood, playable, predict, recall, response_rows,
                          rewards_of, states)

TIE = 1e-4  # A_c this close are equal: rounding depends on threads and micro-batches


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/digirl"     # the run's directory; at the end it is also the checkpoint
    # DigiRL
    offline: int = 3             # first steps, in which only V_c and V_s learn; the last of them trains the policy, too
    past: int = 768              # replayed episodes per step, over all ranks: as many as four steps play
    share: float = 0.1           # of the episodes to clone, those with the largest A_c (and ties)
    lam: float = 0.5             # w_j = lam^(turns still to come), the weight of the outcome
    head_lr: float = 1e-3        # of the value heads
    head_updates: int = 60       # of the value heads, per step


def turn_advantages(r: float, V: list[float], lam: float) -> list[float]:
    """A_j of an episode's turns, given V_s of each."""
    H = len(V) - 1
    later = V[1:] + [0.0]  # after the last turn any value would do: its w is 1
    advantages = []
    for j in range(len(V)):
        w = lam ** (H - j)
        change = later[j] - V[j]
        A_j = w * r + (1 - w) * change
        advantages.append(A_j)
    return advantages


class DigiRL(mgrpo.MGRPO):
    smallest_group = 1  # episodes are not compared within groups

    @staticmethod
    def check(cfg):
        if cfg.offline < 0:
            raise ValueError(f"--offline {cfg.offline}: give at least 0 steps.")
        if cfg.offline > cfg.steps:
            raise ValueError(f"--offline {cfg.offline}: in {cfg.steps} steps the policy never learns; "
                             "give fewer, or more --steps.")
        if not 0 < cfg.share <= 1:
            raise ValueError(f"--share {cfg.share:g}: it is a share of the episodes, above 0, up to 1.")
        if cfg.past < 0 or not 0 <= cfg.lam <= 1:
            raise ValueError(f"--past {cfg.past}, --lam {cfg.lam:g}: give at least 0 episodes, and lam from 0 to 1.")
        if cfg.beta:
            raise ValueError(f"--beta {cfg.beta:g}: DigiRL has no KL term; leave it at 0.")

    def __init__(self, cfg, chat, model, reference, optimizer, device):
        super().__init__(cfg, chat, model, reference, optimizer, device)
        add_heads(model, optimizer, "V_c", "V_s", lr=cfg.head_lr)

    def n_updates(self, step):
        """None at first; then all that was left out at once; then as many as in mgrpo.py."""
        last_offline = self.cfg.offline - 1
        if step < last_offline:
            return 0
        if step == last_offline:
            return self.cfg.offline * self.cfg.updates_per_batch
        return self.cfg.updates_per_batch

    def training_rows(self, episodes, step):
        cfg = self.cfg
        # 1) V_s learns from the step's own episodes.
        fresh = playable(episodes)
        responses = response_rows(self.chat, fresh)
        x_RD = states(self.model, responses, cfg, self.device)
        r_R = rewards_of([row.tau for row in responses])
        V_s_loss, _ = fit(self.model, self.optimizer, "V_s", x_RD, r_R, cfg.head_updates)

        # 2) V_c learns from all, and chooses episodes.
        past = recall(self.chat, cfg, cfg.past, step)
        everything = fresh + past
        chosen, V_c_loss = self.best_episodes(everything)

        # 3) V_s chooses turns.
        rows = []
        if self.n_updates(step):
            rows = self.good_turns(chosen)

        # 4) Counts over all ranks.
        seen, kept, cloned = run.all_sum([len(everything), len(chosen), len(rows)])
        return rows, {
            "episodes_seen": int(seen),
            "episodes_kept": kept / max(seen, 1),
            "turns_cloned": int(cloned),
            "V_s_loss": V_s_loss,
            "V_c_loss": V_c_loss,
        }

    def best_episodes(self, episodes):
        """The first filter: (episodes with the largest A_c over all ranks, V_c's cross-entropy)."""
        cfg = self.cfg
        rows = [instruction(self.chat, tau.task) for tau in episodes]
        x_RD = states(self.model, rows, cfg, self.device)
        r_R = rewards_of(episodes)
        loss, _ = fit(self.model, self.optimizer, "V_c", x_RD, r_R, cfg.head_updates)
        V_R = predict(self.model, "V_c", x_RD)
        A_c = [tau.reward - V for tau, V in zip(episodes, V_R.tolist())]

        ranking = run.gather(A_c)
        ranking.sort(reverse=True)
        if not ranking:
            return [], loss
        n_best = ceil(cfg.share * len(ranking) - 1e-9)  # 0.28 * 25 is 7.000000000000001
        least = ranking[n_best - 1] - TIE
        best = [tau for tau, A in zip(episodes, A_c) if A >= least]
        return best, loss

    def good_turns(self, episodes):
        """The second filter: rows of the turns whose A_j exceeds 1 / max_turns."""
        cfg = self.cfg
        rows = response_rows(self.chat, episodes)  # one for each turn that can train
        x_RD = states(self.model, rows, cfg, self.device)
        V_R = predict(self.model, "V_s", x_RD)
        A = []
        counts = [sum(row.tau is tau for row in rows) for tau in episodes]  # of each episode's rows
        for tau, V in zip(episodes, V_R.split(counts)):
            A += turn_advantages(tau.reward, V.tolist(), cfg.lam)
        good = [row for row, A_j in zip(rows, A) if A_j > 1 / cfg.max_turns]

        own_tokens = sum(row.n_action for row in good)
        [n_tokens] = run.all_sum([own_tokens])
        for row in good:
            row.weight = 1 / n_tokens
            row.advantage = 1.0
            row.tau.advantage = 1.0  # for trajectories.jsonl only: some of its turns are cloned
        return good

    def loss(self, micro_batch, logp_N, logp_ref_N, hidden_ND):
        return likelihood(micro_batch, logp_N)


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=DigiRL)
    paper = mgrpo.PAPER | {"beta": 0.0}
    run.command_line(main, Config, __doc__, {"paper": paper}, start="runs/bc")
