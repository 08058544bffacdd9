"""One step behind: the next batch is played while this one trains. Truncated importance weights correct for the
older policy that sampled it.

    L = - sum over tokens of weight [ w min(rho A, clip(rho, 1-eps, 1+eps) A) - beta KL ]

    w = min(pi_start / pi_old, cap), without gradient      rho = pi / pi_start

pi_old is the policy that sampled the token, pi_start the policy just before the step's first update. The
advantage A, the KL estimate and a token's weight in the means are mgrpo.py's. With pi_k for the policy after k
steps, what stands in one column runs at the same time:

    play 1: pi_0    train 1: pi_0 -> pi_1    train 2: pi_1 -> pi_2    train 3: pi_2 -> pi_3
                    play 2:  pi_0            play 3:  pi_1            play 4:  pi_2

So pi_old is the policy with which the step before began. Unless the cap cuts w, w rho = pi / pi_old, which is
mgrpo.py's rho. Batch 1 is on-policy: up to rounding, w is 1 and L is mgrpo.py's loss.

Why two ratios: mgrpo.py's rho corrects for tokens that another policy sampled, and clipping rho ends the gradient
of a token that the updates have moved far enough. In this fork the policy has moved by a whole step before a
batch's first update. If clipping counted that move too, tokens would lose their gradient before this batch has
pushed them. So w corrects, and clipping watches this file's rho, which starts at 1. Why a cap: a token that has
become ten times likelier would weigh ten times as much, and a few such tokens would decide the step.

    python forks/overlap.py --model runs/bc --out runs/overlap

Use it when sites answer slowly. At best a step takes as long as the longer of training and playing, not as long
as both. Both compute on the same device, so what is saved is mostly the time that playing waits for sites. The
price: during training each rank holds a second, whole copy of the policy and the KV cache of the episodes under
way, and each step has one more forward pass over its rows, for logp_gap. CUDA graphs are off.

On each rank an extra thread plays, with an event loop of its own and a frozen copy of the policy. No collective
runs in it: the ranks make the copy together, before they train. If playing fails, the error is raised when the next
step asks for its episodes. If training fails, the process ends once the batch in flight is played. --reset-url is
refused: the ranks wait for each other at a reset, which would be a collective in the thread, and an evaluation
would reset the sites under the batch. --held-out evaluates while a batch is in flight; where both change one site,
they may see each other's changes.

The batch in flight is not saved. After a resume, its tasks are played again by the restored policy, with a lag
of 0. So a run that was interrupted does not reproduce, bit for bit, one that was not.

Sources: w and rho as in the decoupled objective of Hilton et al. (arXiv 2110.00641), which AReaL (arXiv
2505.24298) uses for asynchronous rollouts; w is truncated as in CM2 (arXiv 2602.12268), which has the cap 2.
The overlap of one step is that of asynchronous RLHF (arXiv 2410.18252). We read abstracts, public documentation
and CM2's code, not the whole papers.

Differs from AReaL: rollouts have no machines of their own, and the weights never change within an episode. As in
mgrpo.py, KL is estimated from the tokens as they were sampled, without w.

Differs from mgrpo.py: `choose_tasks` remembers all tasks, `collect` waits for the batch in flight, `training_rows`
starts the next, and `loss` has w and this rho. seconds_rollout is how long a step waited for its episodes. Where
lag is 1, logp_gap is measured with the frozen copy that sampled, so it is rounding alone. `change` is measured
from pi_old, so it includes the move of the step before. Metrics: lag, how many steps pi_old is behind; drift, the
mean |log pi_start - log pi_old|; w_cut, the share of tokens whose w is cut.
"""
import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import torch

import mgrpo
from compress import Row, micro_batches, pack
from evaluate import Environment
from mgrpo import mgrpo_loss, per_row, per_token, sampled_logps
from model import Transformer, token_logprobs, unsharded


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/overlap"    # the run's directory; at the end it is also the checkpoint
    # Overlap
    cap: float = 2.0             # the largest importance weight w of a token


def corrected_loss(logp_N, logp_start_N, logp_old_N, logp_ref_N, A_N, weight_N, cfg: Config):
    """L for N action tokens; all _N are (N,), log-probs in nats.

    Returns (loss, a scalar with the gradient; its metrics as sums over the N tokens).
    """
    drift_N = logp_start_N - logp_old_N
    ratio_N = drift_N.exp()
    w_N = ratio_N.clamp(max=cfg.cap)
    # w > 0, so w min(rho A, clip(rho) A) = min(rho w A, clip(rho) w A): M-GRPO's loss with the advantages w A.
    loss, metrics = mgrpo_loss(logp_N, logp_old_N=logp_start_N, logp_ref_N=logp_ref_N, A_N=w_N * A_N,
                               weight_N=weight_N, eps=cfg.eps, beta=cfg.beta)
    metrics["drift"] = drift_N.abs().sum().item()
    metrics["w_cut"] = (ratio_N > cfg.cap).sum().item()
    return loss, metrics


def frozen_copy(model: Transformer) -> Transformer:
    """The whole policy as it is now, in the precision that it computes in. All ranks call it."""
    with unsharded(model) as whole:  # it shares memory with the policy that trains, so copy
        return copy.deepcopy(whole)


@torch.no_grad()
def mean_gap(sampler: Transformer, rows: list[Row], cfg: Config, device) -> float | None:
    """The mean |log pi - log pi_old| in nats over the action tokens of all ranks. None if there are none.

    sampler: the whole policy that sampled them, so only rounding separates the two.
    """
    total = 0.0
    count = 0
    for micro_batch in micro_batches(rows, cfg.max_tokens):
        logp_N, _, _ = token_logprobs(sampler, **pack(micro_batch, device), temperature=cfg.temperature)
        gap_N = (logp_N - sampled_logps(micro_batch, device)).abs()
        total += gap_N.sum().item()
        count += len(logp_N)
    total, count = run.all_sum([total, count])
    if count == 0:
        return None
    return total / count


class Overlap(mgrpo.MGRPO):
    @staticmethod
    def check(cfg):
        if cfg.cap < 1:
            raise ValueError(f"--cap {cfg.cap:g}: w is 1 where the policy has not moved; give at least 1.")
        if cfg.reset_url:
            raise ValueError("--reset-url: a reset would disturb the batch that is played meanwhile; "
                             "leave it out, or use mgrpo.py.")

    def __init__(self, cfg, chat, model, reference, optimizer, device):
        # Capturing a graph while another thread uses the GPU is untested.
        cfg = replace(cfg, cuda_graph=False)
        super().__init__(cfg, chat, model, reference, optimizer, device)
        self.thread = ThreadPoolExecutor(1, "play")
        self.in_flight = None  # the next step's episodes, as a future
        self.sampler = None    # the frozen copy that plays them
        self.lag = 0
        self.tick = run.ignore  # shows the progress of the batch in flight while `collect` waits
        self.tasks = None
        self.env = None  # of the batches in flight; an evaluation uses the run's own at the same time

    def choose_tasks(self, tasks, step):
        """mgrpo.py's. Remembers all tasks, from which `play_ahead` chooses."""
        self.tasks = tasks
        return super().choose_tasks(tasks, step)

    def collect(self, tasks, env, step, tick=run.ignore):
        """The episodes of these tasks, which `play_ahead` has begun; waits for them.

        The first step of a process has none in flight, so it plays now.
        """
        if self.in_flight is None:
            self.lag = 0
            self.env = Environment(env.sites, env.out, env.cfg)
            self.env.reported = env.reported
            return super().collect(tasks, env, step, tick)
        self.lag = 1
        self.tick = tick
        episodes = self.in_flight.result()
        self.in_flight = None  # if the step has to be played again, the policy as it is now plays it
        self.tick = run.ignore
        return episodes

    def training_rows(self, episodes, step):
        """mgrpo.py's, plus lag and logp_gap. Then starts to play the next batch: no update was made yet."""
        rows, metrics = super().training_rows(episodes, step)
        metrics["lag"] = self.lag
        if self.lag:
            metrics["logp_gap"] = mean_gap(self.sampler, rows, self.cfg, self.device)
        self.sampler = None  # freed before the next copy is made
        if step + 1 < self.cfg.steps:
            self.play_ahead(step + 1)
        return rows, metrics

    def play_ahead(self, step: int):
        """Starts to play a step's tasks with the weights as they are now."""
        self.sampler = frozen_copy(self.model)
        player = copy.copy(self)  # the same method, but with the frozen policy
        player.model = self.sampler
        tasks = self.choose_tasks(self.tasks, step)
        collect = mgrpo.MGRPO.collect  # this file's would wait for itself
        self.in_flight = self.thread.submit(collect, player, tasks, self.env, step, self.tell)

    def tell(self, line: str, last=False):
        """Shows progress by the tick of the moment: `collect` sets self.tick only while it waits."""
        self.tick(line, last=last)

    def loss(self, micro_batch, logp_N, logp_ref_N, hidden_ND):
        # In the step's first update, logp_N is still pi_start's: keep it on the row. Each step has new rows, but for
        # bc.PADDING, whose logp_start stays that of an earlier step: it does no harm, since its weight is 0.
        for row, logp in zip(micro_batch, per_row(logp_N.detach(), micro_batch)):
            if not hasattr(row, "logp_start"):
                row.logp_start = logp
        logp_start_N = torch.cat([row.logp_start for row in micro_batch])

        device = logp_N.device
        A_N = per_token([row.advantage for row in micro_batch], micro_batch, device)
        weight_N = per_token([row.weight for row in micro_batch], micro_batch, device)
        return corrected_loss(logp_N, logp_start_N, sampled_logps(micro_batch, device), logp_ref_N,
                              A_N=A_N, weight_N=weight_N, cfg=self.cfg)


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=Overlap)
    run.command_line(main, Config, __doc__, {"paper": mgrpo.PAPER}, start="runs/bc")
