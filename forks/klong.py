"""Histories longer than the context, after KLong (arXiv 2602.17547): a window over the turns.

    first(j) = max(0, ceil((j + 1 - W) / (W - O))) * (W - O)
    h_j      = system, turns 0 ... min(P, j)-1, turns max(P, first(j)) ... j-1, page s_j

Turns are counted from 0. Turn j sees the P pinned turns (turn 0 states the task) and the
newest turns, itself included: P + W at most. The window grows to W turns; then it drops the oldest W - O
at once, except pinned ones, so O earlier turns stay. For P = 1, W = 6, O = 3:

    j = 5 sees 0 1 2 3 4;   j = 6 sees 0, 3 4 5;   j = 8 sees 0, 3 4 5 6 7;   j = 9 sees 0, 6 7 8

The turns under one position of the window are a sub-trajectory with a history of its own. All of them share
the episode's advantage, every response trains once, and the overlap is context only. So L is mgrpo.py's.

In PyTorch terms: compression keeps every past response, so after enough turns these alone fill the
context and the episode ends. Here the history stays bounded. Rollout samples from the same ids that training
scores (compress.trunk), so logp_gap stays at rounding. Why the window moves by several turns: each
move changes what comes right after the pinned turns, so the KV cache restarts there. Between two moves it
only grows.

Stages: without them, the first steps would play episodes of full length, and nearly all would fail. Stage k of S
allows max_turns k / S turns, so that rewards come early. It lasts three steps (--stage-steps); the last stage lasts
to the end of the run. A stage in which no task can be done earns nothing: give --stages 1 where the shortest task
needs more turns than the first stage allows.

    python forks/klong.py --model runs/bc --out runs/klong --max-turns 24 --held-out sandbox:dev:38

It is for long episodes. Of the default's 10 turns only the last four see a window that has moved, in the
last stage. The command evaluate.py knows no window, and a checkpoint does not name one: evaluate by
--held-out, which plays under the window, with all of max_turns.

Differs from the paper (of which we had the abstract and summaries): the paper splits a teacher's demonstrations,
made with the whole history in view, and its policy clones the parts first. Ours samples under the window; its clone
has seen whole histories. The paper's stages limit minutes, ours limit turns.

Differs from mgrpo.py: chat.dropped says which turns the history leaves out; `collect` plays by stages.
"""
import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import mgrpo


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/klong"      # the run's directory; at the end it is also the checkpoint
    # The window
    window: int = 6              # W, the most turns in it, the current one included
    overlap: int = 3             # O, earlier turns that stay in it when it moves
    pinned: int = 1              # P, turns at the beginning that stay for good
    # Stages
    stages: int = 3              # S, stages in which max_turns grows to its value; 1: no growth
    stage_steps: int = 3         # steps of each stage but the last


def dropped(j: int, *, window: int, overlap: int, pinned: int) -> range:
    """The earlier turns that turn j no longer sees: from the pinned ones to where the window begins."""
    stride = window - overlap
    too_many = max(0, j + 1 - window)
    moves = math.ceil(too_many / stride)
    first = moves * stride
    return range(pinned, max(pinned, first))


def turns_allowed(step: int, cfg: Config) -> int:
    """max_turns of the step's stage."""
    stage = min(cfg.stages, step // cfg.stage_steps + 1)
    return max(1, cfg.max_turns * stage // cfg.stages)


class KLong(mgrpo.MGRPO):
    advice = "evaluate.py would play it without the window; --held-out plays with it"

    @staticmethod
    def check(cfg):
        if cfg.pinned < 1:
            raise ValueError(f"--pinned {cfg.pinned}: give at least 1; the first turn states the task.")
        if not 0 <= cfg.overlap < cfg.window:
            raise ValueError(f"--overlap {cfg.overlap}: give at least 0, and less than --window {cfg.window}.")
        if cfg.stages < 1 or cfg.stage_steps < 1:
            raise ValueError(f"--stages {cfg.stages}, --stage-steps {cfg.stage_steps}: give at least 1 of each.")
        if (cfg.stages - 1) * cfg.stage_steps >= cfg.steps:
            raise ValueError(f"--stages {cfg.stages} of --stage-steps {cfg.stage_steps}: in {cfg.steps} steps the last "
                             "stage never begins; give fewer, or more --steps.")

    def __init__(self, cfg, chat, model, reference, optimizer, device):
        super().__init__(cfg, chat, model, reference, optimizer, device)
        # compress.trunk asks it at every turn which earlier turns to leave out.
        chat.dropped = partial(dropped, window=cfg.window, overlap=cfg.overlap, pinned=cfg.pinned)

    def collect(self, tasks, env, step, tick=run.ignore):
        """mgrpo.py's, with the stage's max_turns."""
        whole = self.cfg
        self.cfg = replace(whole, max_turns=turns_allowed(step, whole))
        try:
            return super().collect(tasks, env, step, tick)
        finally:
            self.cfg = whole

    def training_rows(self, episodes, step):
        """mgrpo.py's, and what the window did."""
        rows, metrics = super().training_rows(episodes, step)
        windows = set()
        for row in rows:
            j = row.tau.turns.index(row.turn)
            windows.add((id(row.tau), self.chat.dropped(j)))
        trained = len({id(row.tau) for row in rows})
        windows, trained = run.all_sum([len(windows), trained])
        metrics["turns_allowed"] = turns_allowed(step, self.cfg)
        metrics["windows"] = windows / max(trained, 1)  # sub-trajectories per episode
        return rows, metrics


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=KLong)
    run.command_line(main, Config, __doc__, {"paper": mgrpo.PAPER}, start="runs/bc")
