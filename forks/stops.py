"""A reward only after `exit`: an episode that succeeds but does not stop earns nothing.

    r_i = success_i * stopped_i        stopped_i: 1 if the episode called `exit`, else 0

Many tasks are judged by the state of the site. An episode that reaches it and goes on acting until its turns are
used up then earns as much as one that stops, so nothing keeps the policy calling `exit`. A pre-trained language
model may stop calling it within two steps. The actions that it takes instead cost time, and may undo its success.

    python forks/stops.py --model runs/bc --out runs/stops

Success rates, held-out ones as well, still count successes; the metric reward counts what was rewarded.

Differs from mgrpo.py: the reward.
"""
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch
import mgrpo


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/stops"      # the run's directory; at the end it is also the checkpoint


class Stops(mgrpo.MGRPO):
    def reward(self, tau):
        stopped = tau.answer is not None
        return tau.success * stopped


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=Stops)
    run.command_line(main, Config, __doc__, {"paper": mgrpo.PAPER}, start="runs/bc")
