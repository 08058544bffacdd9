"""WebRL (arXiv 2411.02337): regression on advantages, tasks like those that failed, a reward model.

    pi minimizes E_nu [(beta log (pi(a_j | h_j) / pi_ref(a_j | h_j)) - A_j)^2]
    A_j = lam (V(h_j+1) - V(h_j)) + (1 - lam) (r - V(h_j)),   where V(h_j+1) is r in the last turn
    V   minimizes E_nu [cross-entropy(r, V(h_j))]             r: 1 or 0, says the outcome model

The optimum of max E[r] - beta KL(pi || pi_ref) obeys beta log (pi / pi_ref) = A* for every response,
whoever sampled it; A estimates A*. So episodes from anywhere (nu) may train, without a ratio. The
loss is 0 once a response's summed log-prob has moved by A / beta. pi_ref is the policy of the phase
before; here a phase is a step, so pi_ref is the policy that began it.

Replay: successes of earlier steps train again, but only responses whose perplexity under pi_ref is
above 1/0.95 (else nothing is left to learn) and below 1/0.5 (else they have become foreign).
Curriculum: the next step's tasks resemble those that fail, unless they look too hard or too easy.

    python forks/webrl.py --model runs/bc --out runs/webrl

Differs from the paper. Tasks: no language model writes instructions here. The sandbox draws new
instances of templates by how often they fail, and templates whose success is below 5% or above 75%
a tenth as often (the paper drops such tasks, by V; of 19 templates none may vanish). Outcome model:
a head on the frozen clone's hidden state after the last response, trained once, on all episodes of
the first steps (--judged), which the judge scores; the paper trains a language model for it. Ours
is a handicap: it was right in 69% of the episodes, theirs in about 80% (--judged 1000 keeps the
judge). V: a head on the policy's hidden state, not a second model, trained on
new episodes only, since replayed ones all succeed. Replay: perplexity at the sampling temperature,
and from 1/0.99 on, as only a tenth of the small clone's successful responses exceed 1/0.95 at 0.7.
As printed, the loss counts both signs of A and sums the log-ratio over a response. The released
code keeps only A >= 0, as 1, divides the log-ratio by the number of tokens and takes Smooth L1.

Differs from mgrpo.py in 110 lines and shared.py: tasks, episodes, rewards, advantages and loss. So
--eps, --loss-norm and --turn-credit have no effect. kl is that to the step's first policy.
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see model.py; must precede torch

import math
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files

import torch

import mgrpo
from compress import Row, Trajectory, micro_batches, pack, rows
from evaluate import command_line, newest
from forks.shared import add_heads, fit, predict, recall, samples, states
from mgrpo import per_token
from model import all_max, all_sum, token_logprobs, unsharded

HARD, EASY = 0.05, 0.75  # success rates between which a task is worth playing
FOREIGN = 0.5  # an old response is not replayed if 1 / its perplexity is below this
VERDICT = "outcome model"  # its entry among an episode's checks


@dataclass
class Config(mgrpo.Config):
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


@dataclass
class Batch:
    """What `collect` gives to `train`. lesson: all judged episodes, once the judge has left."""
    step: int
    fresh: list[Trajectory]
    past: list[Trajectory]
    lesson: list[Trajectory]

    def __len__(self):  # is logged as groups_kept
        return len(self.fresh)


def open_training(cfg: Config, device):
    if cfg.lora or cfg.beta <= 0 or cfg.judged < 1:  # beta also makes mgrpo.py load the clone
        raise ValueError("--lora must be 0, --beta and --judged above 0: the frozen clone and the "
                         "judge's first verdicts make the outcome model.")
    model, clone, optimizer = mgrpo.open_training(cfg, device)
    add_heads(model, optimizer, "value", "outcome", lr=cfg.head_lr)
    return model, clone, optimizer


def verdict(record: dict) -> float:
    """The reward that training used for a line of trajectories.jsonl: the judge's only at first."""
    said = [passed for name, passed, _ in record["checks"] if name == VERDICT]
    return float(said[-1]) if said else record["reward"]


def curriculum(tasks: list[dict], step: int, cfg: Config) -> list[dict]:
    """The step's tasks, drawn from the pool: the more often a template failed lately, the more."""
    all_max(0)  # until rank 0 has written the last step's episodes
    lately = defaultdict(list)
    for record in newest(Path(cfg.out) / "trajectories.jsonl")[0]:
        if record["status"] == "ok":
            lately[record["template"]].append(verdict(record))

    def weight(task):
        latest = lately[task.get("intent_template_id")][-20:]
        rate = (sum(latest) + 1) / (len(latest) + 2)  # 0.5 before the first episode
        return (1 - rate) * (1.0 if HARD < rate < EASY else 0.1)

    rng = random.Random(f"{cfg.seed}/tasks {step}")
    # The largest u^(1/w) are a sample without replacement in which w is a task's weight.
    return sorted(tasks, key=lambda task: -rng.random() ** (1 / weight(task)))[:cfg.batch]


def collect(model, chat, tasks, cfg: Config, env, seed: str, log=None):
    played, _ = mgrpo.collect(model, chat, tasks, cfg, env, seed, log)
    valid = [tau for tau in played if tau.turns and tau.status == "ok"]
    step = int(seed.rpartition("/")[2])
    lesson = recall(chat, cfg, 10**6, seed, among=10**6) if step == cfg.judged else []
    return played, Batch(step, valid, recall(chat, cfg, cfg.past, seed), lesson)


def last_states(clone, episodes, chat, cfg: Config, device):
    """The clone's hidden states after the last responses of episodes, (R, D)."""
    return states(clone, [rows(chat, tau)[-1] for tau in episodes], cfg, device, end=True)


def rewarded(model, clone, episodes, chat, cfg: Config, device) -> list[Trajectory]:
    """Copies with the outcome model's reward, 0 or 1. Records and metrics keep the judge's.

    The verdict is noted among an episode's checks, where `curriculum` finds it.
    """
    chances = predict(model, "outcome", last_states(clone, episodes, chat, cfg, device)).tolist()
    for tau, chance in zip(episodes, chances):
        tau.checks.append([VERDICT, chance > 0.5, f"chance of success {chance:.0%}"])
    return [replace(tau, reward=float(chance > 0.5)) for tau, chance in zip(episodes, chances)]


def advantages(r_R, V_R, last_R, lam: float):
    """A of turns, in the order of their episodes. last_R: whether a turn is the last of its own."""
    later_R = torch.where(last_R, r_R, V_R.roll(-1))
    return lam * (later_R - V_R) + (1 - lam) * (r_R - V_R)


@torch.no_grad()
def familiar(model, old: list[Row], cfg: Config, device) -> list[Row]:
    """Old responses whose perplexity is within bounds, with the policy's present log-probs."""
    with unsharded(model) as whole:
        for batch in micro_batches(old, cfg.max_tokens):
            logp_N, _ = token_logprobs(whole, **pack(batch, device), temperature=cfg.temperature)
            for row, logp in zip(batch, logp_N.split([row.n_action for row in batch])):
                row.logps = logp.tolist()
    return [row for row in old if FOREIGN < math.exp(sum(row.logps) / row.n_action) < cfg.sure]


def loss_of(batch: list[Row], logp_N, logp_ref_N, cfg: Config):
    """The square, weighted. pi_ref's log-probs are row.logps, from before the first update."""
    delta_N = logp_N - per_token(batch, lambda row: row.logps, logp_N.device)
    ratio_R = torch.stack([part.sum() for part in delta_N.split([row.n_action for row in batch])])
    A_R, weight_R = ratio_R.new_tensor([(row.advantage, row.weight) for row in batch]).T
    loss = (weight_R * (cfg.beta * ratio_R - A_R) ** 2).sum()
    kl_N = (-delta_N).exp() + delta_N - 1
    return loss, {"kl": kl_N.sum().item(), "clip_frac": 0.0}


def train(model, clone, optimizer, batch: Batch, chat, cfg: Config, device) -> dict:
    """Rewards, then V, then the policy."""
    fresh, past, more = batch.fresh, batch.past, {}
    if batch.step == cfg.judged:
        x_RD = last_states(clone, batch.lesson, chat, cfg, device)
        r_R = torch.tensor([tau.reward for tau in batch.lesson])
        fit(model, optimizer, "outcome", x_RD, r_R, cfg.outcome_updates)
    if batch.step >= cfg.judged:
        fresh, past = (rewarded(model, clone, part, chat, cfg, device) for part in (fresh, past))
        right = sum(tau.reward == same.reward for tau, same in zip(fresh, batch.fresh))
        right, played = all_sum([right, len(fresh)]).tolist()
        more["outcome_accuracy"] = right / max(played, 1)
    new, old = samples(chat, fresh), samples(chat, [tau for tau in past if tau.reward])
    turns = new + old
    x_RD, n = states(model, [row for *_, row in turns], cfg, device), len(new)
    r_R = torch.tensor([tau.reward for tau, *_ in turns], device=device)
    more["value_loss"] = fit(model, optimizer, "value", x_RD[:n], r_R[:n], cfg.head_updates)
    last_R = torch.tensor([turn is tau.turns[-1] for tau, turn, _ in turns]).bool().to(device)
    A_R = advantages(r_R, predict(model, "value", x_RD), last_R, cfg.lam)
    for (*_, row), A in zip(turns, A_R.tolist()):
        row.advantage = A
    replayed = familiar(model, [row for *_, row in old], cfg, device)
    train_on = [row for *_, row in new] + replayed
    responses, more["replayed"] = map(int, all_sum([len(train_on), len(replayed)]))
    for row in train_on:
        row.weight = 1 / responses
    return more | mgrpo.train(model, None, optimizer, train_on, chat, cfg, device,
                              weigh=lambda rows, *_: rows, loss_of=loss_of)


if __name__ == "__main__":
    main = partial(mgrpo.main, open_training=open_training, task_batch=curriculum, collect=collect,
                   train=train)
    paper = {"beta": 1.0, "sure": 0.95, "G": 1, "batch": 64}  # episodes a step as in mgrpo.py
    command_line(main, Config, __doc__, {"paper": mgrpo.PAPER | paper}, start="runs/bc")
