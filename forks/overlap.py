"""One step behind: the next batch is played while this one trains; truncated importance weights correct for it.

    L = - sum over tokens of weight [ w min(r A, clip(r, 1-eps, 1+eps) A) - beta KL ]

    w = min(pi_start / pi_old, cap)      r = pi / pi_start

pi_old sampled the token, and pi_start is the policy at the step's first update; A, KL and weight are
mgrpo.py's. The weights of the batch, pi_old, are those that the step before it began with:

    play 1: pi_0    train 1: pi_0 -> pi_1    train 2: pi_1 -> pi_2    train 3: pi_2 -> pi_3
                    play 2:  pi_0            play 3:  pi_1            play 4:  pi_2

So w r is mgrpo.py's rho, against the weights that sampled, but for the cap. Batch 1 is on-policy: there w = 1,
and L is mgrpo.py's loss.

In PyTorch terms: mgrpo.py's rho does two things. It corrects for tokens that another policy sampled, and
clipping it ends a token's gradient once the updates have moved it enough. Here the policy has moved before the
first update. Clipping that as well would take the gradient from tokens that this batch has not pushed at all.
So w corrects, as a constant without gradient, and clipping watches r, which starts at 1. Why a cap: a token
that has become ten times likelier would weigh ten times as much, and few such tokens would decide the step.

    python forks/overlap.py --model runs/bc --out runs/overlap

Use it when sites answer slowly. At best a step takes as long as training or playing, whichever is longer, and
not as long as both. But the two share a processor, so mostly the waiting overlaps. It costs memory: while a step
trains, there is a second, whole copy of the policy on each rank, and a KV cache.

A thread of its own plays the next batch: an event loop, Playwright and Chromium, and the frozen copy. No
collective runs in it: the ranks copy the weights together, before they train. The thread ends with its batch,
even if an error ends the run before. --held-out evaluates next to the batch in flight. It would reset the sites
under that batch, so --reset-url is refused.

After a resume, the first batch is played by the weights that the run goes on from, with a lag of 0: the batch
that was in flight is forgotten, and nothing that was trained is lost. So a run that was interrupted is not, bit
for bit, one that was not.

Sources: w and r as in the decoupled objective of Hilton et al. (arXiv 2110.00641), which AReaL (arXiv
2505.24298) uses for asynchronous rollouts; w is truncated as in CM2 (arXiv 2602.12268), which has the cap 2.
The overlap of one step is that of asynchronous RLHF (arXiv 2410.18252). We had abstracts, public documentation
and CM2's code, not all of the papers.

Differs from these: they have separate machines for rollout, and AReaL episodes that change their weights half-way.
As in mgrpo.py, KL is estimated from the tokens as they were sampled, without w.

Differs from mgrpo.py: `collect` waits for the batch in flight, `learn_from` starts the next, and `loss` has w
and r. seconds_rollout is what a step waited for its episodes. logp_gap compares rollout and training under the
frozen copy, so it is rounding as ever; `change` counts from pi_old, as ever. Metrics: lag, how many steps pi_old
is behind; drift, the mean |log pi_start - log pi_old|; truncated, the share of tokens whose w is cut.
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
from mgrpo import mgrpo_loss, per_token, sampled_logps
from model import Transformer, token_logprobs, unsharded


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment behind it is its --help."""
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
    # w > 0, so w min(r A, clip(r) A) = min(r w A, clip(r) w A): M-GRPO's loss with the advantages w A.
    loss, metrics = mgrpo_loss(logp_N, logp_start_N, logp_ref_N, A_N=w_N * A_N, weight_N=weight_N,
                               eps=cfg.eps, beta=cfg.beta)
    metrics["drift"] = drift_N.abs().sum().item()
    metrics["truncated"] = (ratio_N > cfg.cap).sum().item()
    return loss, metrics


def frozen_copy(model: Transformer) -> Transformer:
    """The whole policy as it is now, in the precision that it computes in. All ranks call it."""
    with unsharded(model) as whole:
        return copy.deepcopy(whole)


@torch.no_grad()
def mean_gap(sampler: Transformer, rows: list[Row], cfg: Config, device) -> float | None:
    """The mean |log pi - log pi_old| in nats over the action tokens of all ranks. None: there are none.

    sampler: the whole policy that sampled them, so this is the gap between rollout and training.
    """
    total = 0.0
    count = 0
    for batch in micro_batches(rows, cfg.max_tokens):
        logp_N, _, _ = token_logprobs(sampler, **pack(batch, device), temperature=cfg.temperature)
        gap_N = (logp_N - sampled_logps(batch, device)).abs()
        total += gap_N.sum().item()
        count += len(logp_N)
    total, count = run.all_sum([total, count]).tolist()
    return total / count if count else None


class Overlap(mgrpo.MGRPO):
    def __init__(self, cfg, chat, model, reference, optimizer, device):
        if cfg.cap < 1:
            raise ValueError(f"--cap {cfg.cap:g}: on the policy that sampled, w is 1; give at least 1.")
        if cfg.reset_url:
            raise ValueError("--reset-url: an evaluation would reset the sites that the next batch is played "
                             "on; leave it out, or use mgrpo.py.")
        # A graph would be captured while another thread uses the GPU, which nobody has tried.
        cfg = replace(cfg, cuda_graph=False)
        super().__init__(cfg, chat, model, reference, optimizer, device)
        self.thread = ThreadPoolExecutor(1, "play")
        self.in_flight = None  # the next step's episodes, as a future
        self.sampler = None    # the frozen copy that plays them
        self.lag = 0
        self.tick = run.ignore

    def choose_tasks(self, tasks, step):
        """mgrpo.py's. Keeps all tasks, to choose the next step's ahead."""
        self.tasks = tasks
        return super().choose_tasks(tasks, step)

    def collect(self, tasks, env, step, tick=run.ignore):
        """The batch in flight, once it is played. The first step of a process has none, so it plays now."""
        self.env = env
        if self.in_flight is None:
            self.lag = 0
            return super().collect(tasks, env, step, tick)
        self.lag = 1
        self.tick = tick
        episodes = self.in_flight.result()
        self.tick = run.ignore
        return episodes

    def learn_from(self, episodes, step):
        """mgrpo.py's, and the gap under the weights that sampled. Then the next batch sets out."""
        rows, metrics = super().learn_from(episodes, step)
        metrics["lag"] = self.lag
        if self.lag:
            metrics["logp_gap"] = mean_gap(self.sampler, rows, self.cfg, self.device)
        self.in_flight = None
        self.sampler = None  # before the next one is made, so that memory never holds both
        if step + 1 < self.cfg.steps:
            self.play_ahead(step + 1)
        return rows, metrics

    def play_ahead(self, step: int):
        """Starts to play a step's tasks with the weights as they are now."""
        self.sampler = frozen_copy(self.model)
        player = copy.copy(self)  # differs in its policy alone
        player.model = self.sampler
        # An environment of its own, since an evaluation may use the other one meanwhile.
        env = Environment(self.env.sites, self.env.out, self.env.cfg)
        tasks = self.choose_tasks(self.tasks, step)
        self.in_flight = self.thread.submit(mgrpo.MGRPO.collect, player, tasks, env, step, self.tell)

    def tell(self, line: str):
        """Shows the progress of the batch in flight, but only while the run waits for it."""
        self.tick(line)

    def loss(self, batch, logp_N, logp_ref_N, hidden_ND):
        # The step's first update finds the policy that the step began with. A step's rows are new, but for
        # PADDING, whose weight is 0.
        counts = [row.n_action for row in batch]
        for row, logp in zip(batch, logp_N.detach().split(counts)):
            first_update = not hasattr(row, "logp_start")
            if first_update:
                row.logp_start = logp
        logp_start_N = torch.cat([row.logp_start for row in batch])

        device = logp_N.device
        A_N = per_token([row.advantage for row in batch], batch, device)
        weight_N = per_token([row.weight for row in batch], batch, device)
        return corrected_loss(logp_N, logp_start_N, sampled_logps(batch, device), logp_ref_N,
                              A_N=A_N, weight_N=weight_N, cfg=self.cfg)


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=Overlap)
    run.command_line(main, Config, __doc__, {"paper": mgrpo.PAPER}, start="runs/bc")
