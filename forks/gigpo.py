"""GiGPO, credit for turns (arXiv 2505.10978): M-GRPO plus advantages within an episode.

    A_ij = A_i + w (R_ij - mean(R)) / std(R),   R_ij = gamma^(turns after j) r_i

The mean and deviation of R are over the anchor group: all turns that saw the same page, text for text,
in the valid episodes of one task whose group trains. A_i is mgrpo.py's advantage of the whole episode.

In PyTorch terms: M-GRPO pushes every token of a successful episode equally, a useless click
included. Episodes of one task often pass through the same page, so their next steps can be compared
there: the step that led to success sooner gets more, the detour gets less.

    python forks/gigpo.py --model runs/bc --out runs/gigpo

Element ids are numbered down the page, so equal pages have equal texts. The division by std hides how
much was at stake: in an anchor group of two turns one gets 0.71 and the other -0.71, whether they differ by
success and failure or by one click. As in mgrpo.py, a response that failed has no A_ij above 0 unless
--credit-errors is given.

Differs from the paper: groups whose rewards are all equal are dropped, as in mgrpo.py, so a task that
always succeeds no longer teaches the shorter way; and a page is compared as the policy read it, its error
line included.

Differs from mgrpo.py: `advantages` adds to what mgrpo.py sets. turns_compared: the share of the training
groups' turns that got an advantage of their own other than 0: another turn saw the same page, and R differs.
"""
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import torch

import mgrpo
from compress import Trajectory


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/gigpo"      # the run's directory; at the end it is also the checkpoint
    # GiGPO
    turn_credit: float = 1.0     # w, the weight of the advantages of turns
    gamma: float = 0.95          # discount per turn


def turn_advantages(training: list[Trajectory], weight: float, gamma: float):
    """Sets turn.advantage, which adds to A_i, of turns whose page other turns saw as well, if their R differ."""
    anchor_groups = {}  # page -> its turns, each with its R
    for tau in training:
        for turns_after, turn in enumerate(reversed(tau.turns)):
            R_ij = gamma ** turns_after * tau.reward
            same_page = anchor_groups.setdefault(turn.observation, [])
            same_page.append((turn, R_ij))
    for anchor_group in anchor_groups.values():
        R = torch.tensor([R_ij for _, R_ij in anchor_group], dtype=torch.float64)
        if R.min() == R.max():
            continue
        standardized = (R - R.mean()) / R.std()
        for (turn, _), extra in zip(anchor_group, standardized.tolist()):
            turn.advantage = weight * extra  # a row's advantage is the sum of its episode's and its turn's


class GiGPO(mgrpo.MGRPO):
    @staticmethod
    def check(cfg):
        if cfg.turn_credit < 0 or not 0 <= cfg.gamma <= 1:
            raise ValueError(f"--turn-credit {cfg.turn_credit:g}, --gamma {cfg.gamma:g}: give at least 0, "
                             "and gamma from 0 to 1.")

    def advantages(self, group):
        training = mgrpo.group_advantages(group)
        turn_advantages(training, self.cfg.turn_credit, self.cfg.gamma)
        return training

    def training_rows(self, episodes, step):
        """mgrpo.py's, and how many turns got an advantage of their own."""
        rows, metrics = super().training_rows(episodes, step)
        own_compared = sum(row.turn.advantage != 0 for row in rows)
        compared, turns = run.all_sum([own_compared, len(rows)])
        metrics["turns_compared"] = compared / max(turns, 1)
        return rows, metrics


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=GiGPO)
    run.command_line(main, Config, __doc__, {"paper": mgrpo.PAPER}, start="runs/bc")
