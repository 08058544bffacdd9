"""GiGPO, credit for turns (arXiv 2505.10978): M-GRPO plus advantages within an episode.

    A_ij = A_i + w (R_ij - mean(R)) / std(R),   R_ij = gamma^(turns after j) r_i

The mean and deviation of R are over the anchor group: all turns of the task's G episodes that saw
the same page, text for text. A_i is mgrpo.py's advantage of the whole episode.

In PyTorch terms: M-GRPO pushes every token of a successful episode equally, a useless click
included. Episodes of one task often pass through the same page, so their next steps can be compared
there: the step that led to success sooner gets more, the detour gets less.

    python forks/gigpo.py --model runs/bc --out runs/gigpo

Differs from the paper: groups whose rewards are all equal are dropped, as in mgrpo.py, and a page is
compared as the policy read it, its error line included.

Differs from mgrpo.py: `advantages` adds to what mgrpo.py sets.
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
    """Every knob is a flag; the comment behind it is its --help."""
    out: str = "runs/gigpo"      # the run's directory; at the end it is also the checkpoint
    # GiGPO
    turn_credit: float = 1.0     # w, the weight of the advantages of turns
    gamma: float = 0.95          # discount a turn


def turn_advantages(group: list[Trajectory], weight: float, gamma: float):
    """Sets what single turns add to A_i, on every turn whose page another turn of the group saw."""
    pages = {}
    for tau in group:
        for turns_after, turn in enumerate(reversed(tau.turns)):
            R = gamma ** turns_after * tau.reward
            pages.setdefault(turn.observation, []).append((turn, R))
    for anchor_group in pages.values():
        R = torch.tensor([value for _, value in anchor_group], dtype=torch.float64)
        if R.min() == R.max():
            continue
        A = (R - R.mean()) / R.std()
        for (turn, _), A_j in zip(anchor_group, A.tolist()):
            turn.advantage = weight * A_j


class GiGPO(mgrpo.MGRPO):
    def advantages(self, group):
        training = mgrpo.group_advantages(group)
        turn_advantages(training, self.cfg.turn_credit, self.cfg.gamma)
        return training


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=GiGPO)
    run.command_line(main, Config, __doc__, {"paper": mgrpo.PAPER}, start="runs/bc")
