"""WebRL (arXiv 2411.02337): regression on advantages, tasks like those that failed, a reward model.

    pi minimizes E_nu [(beta log (pi(a_j | h_j) / pi_ref(a_j | h_j)) - A_j)^2]
    A_j = lam (V(h_{j+1}) - V(h_j)) + (1 - lam) (r - V(h_j)),   where V(h_{j+1}) is r in the last turn
    V   minimizes E_new [cross-entropy(r, V(h_j))]            new: the step's own episodes
    r: 1 or 0. In the first --judged steps the judge decides; after them the outcome model does, for new
       and replayed episodes alike
    pi_ref: the policy at the start of the step (the paper: of the phase)

The optimum of max E[r] - beta KL(pi || pi_ref) obeys beta log (pi / pi_ref) = A* for every response,
whoever sampled it. So episodes from anywhere (nu) may train, without a ratio. A stands in for A*. For new
episodes it estimates the advantage of the policy that sampled; for old ones it compares their reward with
what the present V expects. The loss is 0 once a response's summed log-prob has moved by A / beta, which
bounds the later updates of a step. The first update has, on new responses, the gradient of REINFORCE times
2 beta; with --paper a step has no other update.

Replay: successes of earlier steps train again, but only responses whose perplexity under pi_ref is above
1 / --sure (else nothing is left to learn) and below 1/0.5 (else they have become foreign). Curriculum:
the next step's tasks resemble those that fail, unless they look too hard or too easy.

    python forks/webrl.py --model runs/bc --out runs/webrl

Differs from the paper. Tasks: no language model writes instructions here. Each step draws from a fixed
pool (--tasks) and weighs a task by how often its template failed lately. Templates whose smoothed
success is at most 5% (none in the last 18 to 20) or at least 75% get a tenth of that weight. The paper
drops such tasks, by V; we keep them, as there are only 19 templates. Outcome model: a head on the
frozen clone's hidden state after the last response, trained once, on all episodes of the first steps
(--judged), which the judge scores; the paper trains a language model for it. Ours is a handicap: it
agreed with the judge on 64% of the episodes (six seeds, 57 to 80%), theirs on about 80%. --judged 1000 keeps
the judge. V: a head on the policy's hidden state, not a second model, trained on new episodes only, since
replayed ones all succeed. Replay: perplexity at the sampling temperature, and --sure 0.99: at
temperature 0.7, only a tenth of the small clone's successful responses have a perplexity above the
paper's 1/0.95. As in the paper's equation, our loss counts both signs of A and sums the log-ratio over
a response. The released code keeps only responses with A >= 0 and sets A to 1 there, divides the
log-ratio by the number of tokens and takes Smooth L1.

Differs from mgrpo.py: tasks, episodes, rewards, advantages and loss. No groups: episodes_trained is how
many of the step's episodes are valid, replayed how many old responses train. --eps, --loss-norm and
--credit-errors have no effect; --lora is refused, since adapters leave no frozen clone. kl is that to
the step's first policy, and clip_frac is logged as 0.
"""
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from math import exp
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import torch

import mgrpo
from compress import Row, Trajectory, micro_batches, pack, trajectory_rows
from forks.shared import (add_heads, fit, past_records, playable, predict, recall, response_rows, rewards_of,
                          states)
from mgrpo import per_row, sampled_logps
from model import token_logprobs, unsharded

HARD = 0.05  # at this success rate and below, a task is played less often
EASY = 0.75  # and at this one and above
FOREIGN = 0.5  # an old response is not replayed if 1 / its perplexity is below this
VERDICT = "outcome model"  # its entry among an episode's checks


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/webrl"      # the run's directory; at the end it is also the checkpoint
    tasks: str = "sandbox:train:2400"  # the pool that the curriculum draws from
    batch: int = 192             # tasks per step, over all ranks
    G: int = 1                   # episodes per task
    beta: float = 1.0            # of the KL constraint: a response's log-prob moves by A / beta
    lam: float = 0.5             # weight of V's change in this turn in A; the rest is the outcome
    judged: int = 3              # steps that the judge scores; then the outcome model replaces it
    past: int = 384              # replayed episodes per step to choose from, over all ranks
    sure: float = 0.99           # an old response is not replayed if 1 / its perplexity is above
    head_lr: float = 1e-3        # of the outcome model and of V
    head_updates: int = 20       # of V, per step
    outcome_updates: int = 100   # of the outcome model, once


# ------------------------------------------------------------------------------------ curriculum --


def verdict(record: dict) -> float:
    """The reward of a line of trajectories.jsonl, as training used it: the outcome model's, or the judge's at first."""
    reward = record["success"]
    for name, passed, _ in record["checks"]:
        if name == VERDICT:
            reward = float(passed)
    return reward


def weight_of(verdicts: list[float]) -> float:
    """The weight of a template's tasks in the draw, given the verdicts on its episodes."""
    latest = verdicts[-20:]
    rate = (sum(latest) + 1) / (len(latest) + 2)  # 0.5 before the first episode
    failing = 1 - rate
    if HARD < rate < EASY:
        return failing
    return 0.1 * failing  # too hard or too easy


def curriculum(tasks: list[dict], step: int, cfg: Config) -> list[dict]:
    """The step's tasks, drawn from the pool. The more often a template failed lately, the likelier are its tasks."""
    verdicts = defaultdict(list)
    for record in past_records(cfg):
        template = (record.get("source"), record["template"])
        verdicts[template].append(verdict(record))

    # A weighted draw without replacement (Efraimidis and Spirakis 2006): each task gets the key u^(1/w), with u
    # random in [0, 1) and w its weight, and the largest keys win.
    rng = random.Random(f"{cfg.seed}/tasks {step}")
    keyed = []
    for task in tasks:
        template = (task.get("source"), task.get("intent_template_id"))
        w = weight_of(verdicts[template])
        u = rng.random()
        keyed.append((u ** (1 / w), task))
    keyed.sort(key=lambda pair: pair[0], reverse=True)
    drawn = keyed[:cfg.batch]
    return [task for _, task in drawn]


# -------------------------------------------------------------------------- advantages and the loss


def turn_advantages(r_R, V_R, last_R, lam: float):
    """A_j of turns, (R,), in the order of their episodes.

    last_R: whether a turn is the last of its episode.
    """
    next_V_R = V_R.roll(-1)  # of the turn after; a last turn's would be another episode's
    later_R = torch.where(last_R, r_R, next_V_R)
    return lam * (later_R - V_R) + (1 - lam) * (r_R - V_R)


def squared_loss(micro_batch: list[Row], logp_N, beta: float):
    """The weighted sum of the squares, and its metrics.

    row.logps are pi_ref's: of new rows from their sampling, of old ones from `familiar`.
    """
    # The log-ratio of a response is the sum over its tokens.
    logp_ref_N = sampled_logps(micro_batch, logp_N.device)
    delta_N = logp_N - logp_ref_N
    ratio_R = torch.stack([delta.sum() for delta in per_row(delta_N, micro_batch)])

    A_R = ratio_R.new_tensor([row.advantage for row in micro_batch])
    weight_R = ratio_R.new_tensor([row.weight for row in micro_batch])
    square_R = (beta * ratio_R - A_R) ** 2
    loss = (weight_R * square_R).sum()

    kl_N = mgrpo.kl_estimate(logp_N, logp_ref_N)
    return loss, {"kl": kl_N.sum().item(), "clip_frac": 0.0}


class WebRL(mgrpo.MGRPO):
    smallest_group = 1

    @staticmethod
    def check(cfg):
        if cfg.lora or cfg.beta <= 0 or cfg.judged < 1:  # beta also makes mgrpo.py load the clone
            raise ValueError("--lora must be 0, --beta and --judged above 0: the frozen clone and the "
                             "judge's first verdicts make the outcome model.")
        if cfg.past < 0 or not 0 <= cfg.lam <= 1 or cfg.sure <= FOREIGN:
            raise ValueError(f"--past {cfg.past}, --lam {cfg.lam:g}, --sure {cfg.sure:g}: give at least 0 episodes, "
                             f"lam from 0 to 1, and sure above {FOREIGN:g}.")

    def __init__(self, cfg, chat, model, reference, optimizer, device):
        super().__init__(cfg, chat, model, None, optimizer, device)
        self.clone = reference  # for the outcome model; pi_ref is the step's first policy, not this
        add_heads(model, optimizer, "value", "outcome", lr=cfg.head_lr)

    def choose_tasks(self, tasks, step):
        return curriculum(tasks, step, self.cfg)

    def training_rows(self, episodes, step):
        cfg = self.cfg
        fresh = playable(episodes)
        past = recall(self.chat, cfg, cfg.past, step)

        # 1) Rewards. From step --judged on they come from the outcome model.
        if step == cfg.judged:
            self.fit_outcome_model(step)
        if step >= cfg.judged:
            fresh = self.rewarded(fresh)
            past = self.rewarded(past)

        # 2) V, from the fresh turns.
        fresh_rows = response_rows(self.chat, fresh)
        successes = [tau for tau in past if tau.reward]
        past_rows = response_rows(self.chat, successes)
        both = fresh_rows + past_rows
        x_RD = states(self.model, both, cfg, self.device)
        r_R = rewards_of([row.tau for row in both]).to(self.device)
        n = len(fresh_rows)
        value_loss, _ = fit(self.model, self.optimizer, "value", x_RD[:n], r_R[:n], cfg.head_updates)

        # 3) The advantages of fresh and past turns.
        V_R = predict(self.model, "value", x_RD)
        is_last = [row.turn is row.tau.turns[-1] for row in both]
        last_R = torch.tensor(is_last, dtype=torch.bool, device=self.device)
        A_R = turn_advantages(r_R, V_R, last_R, cfg.lam)
        for row, A in zip(both, A_R.tolist()):
            row.advantage = A

        # 4) The rows: all fresh responses, and the past ones that still are the policy's own.
        replayed = self.familiar(past_rows)
        rows = fresh_rows + replayed
        # Where outcome model and judge agree. Before --judged they are the same.
        right = sum(tau.reward == tau.success for tau in fresh)
        n_rows, n_replayed, n_fresh, n_right = run.all_sum([len(rows), len(replayed), len(fresh), right])
        for row in rows:
            row.weight = 1 / n_rows
        metrics = {
            "episodes_trained": int(n_fresh),
            "replayed": int(n_replayed),
            "value_loss": value_loss,
        }
        if step >= cfg.judged:
            metrics["outcome_accuracy"] = n_right / max(n_fresh, 1)
        return rows, metrics

    def fit_outcome_model(self, step):
        """Trains the outcome model, once in a run, on all episodes that the judge scored."""
        judged = recall(self.chat, self.cfg, 10**6, step, among=10**6)
        x_RD = self.last_states(judged)
        r_R = rewards_of(judged)
        fit(self.model, self.optimizer, "outcome", x_RD, r_R, self.cfg.outcome_updates)

    def last_states(self, episodes):
        """The clone's hidden states after the last responses of episodes, (R, D)."""
        last_rows = [trajectory_rows(self.chat, tau)[-1] for tau in episodes]
        return states(self.clone, last_rows, self.cfg, self.device, end=True)

    def rewarded(self, episodes) -> list[Trajectory]:
        """Copies with the outcome model's reward, 0 or 1. Records and metrics keep the judge's.

        The verdict is appended to the original's checks, so it gets into the record, where `curriculum` finds it.
        """
        x_RD = self.last_states(episodes)
        chances = predict(self.model, "outcome", x_RD)
        out = []
        for tau, chance in zip(episodes, chances.tolist()):
            success = chance > 0.5
            reason = f"chance of success {chance:.0%}"
            tau.checks.append([VERDICT, success, reason])
            copy = replace(tau, reward=float(success))
            out.append(copy)
        return out

    @torch.no_grad()
    def familiar(self, old: list[Row]) -> list[Row]:
        """Old responses whose perplexity is within bounds, with the policy's present log-probs."""
        cfg = self.cfg
        with unsharded(self.model) as whole:
            for micro_batch in micro_batches(old, cfg.max_tokens):
                inputs = pack(micro_batch, self.device)
                logp_N, _, _ = token_logprobs(whole, **inputs, temperature=cfg.temperature)
                for row, logp in zip(micro_batch, per_row(logp_N, micro_batch)):
                    row.logps = logp.tolist()

        kept = []
        for row in old:
            mean_logp = sum(row.logps) / row.n_action
            probability = exp(mean_logp)  # of a token, on average: 1 / the perplexity
            if FOREIGN < probability < cfg.sure:
                kept.append(row)
        return kept

    def loss(self, micro_batch, logp_N, logp_ref_N, hidden_ND):
        return squared_loss(micro_batch, logp_N, self.cfg.beta)


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=WebRL)
    paper = mgrpo.PAPER | {
        "beta": 1.0,
        "sure": 0.95,
        "G": 1,
        "batch": 64,  # as many episodes a step as in mgrpo.py
    }
    run.command_line(main, Config, __doc__, {"paper": paper}, start="runs/bc")
