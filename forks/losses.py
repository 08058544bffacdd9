"""A page of losses: what came after GRPO, one function each.

    L = - sum over tokens of weight [ J - beta KL ]

    --loss    A                   J, of each token                              weights
    grpo      (r - mean) / std    min(rho A, clip(rho, 0.8, 1.2) A)             --loss-norm
    dr_grpo   r - mean            as in grpo                                    constant
    maxrl     (r - mean) / mean   as in grpo                                    --loss-norm
    raft      r                   as in grpo                                    --loss-norm
    dapo      as in grpo          min(rho A, clip(rho, 0.8, 1.28) A)            token
    gspo      as in grpo          min(s A, clip(s, 0.9997, 1.0004) A)           paper
    cispo     as in grpo          stop_gradient(min(rho, 5)) A log pi           token
    masked    as in grpo          as in grpo; 0 if A < 0 and the response       --loss-norm
                                  has a mean log(pi_old / pi) > delta

r are the rewards of one task's episodes, s is the geometric mean of rho over a response. The weights
are those of mgrpo.py's --loss-norm: "token" and "paper" make the sum a mean.

In PyTorch terms: each of these losses has the gradient of a weighted cross-entropy, - push log pi. On
the policy that sampled, where rho = 1, push is A, whatever J is. The next updates of the same batch
find rho away from 1, and only there does J matter. assets/losses.svg draws push over rho.

The papers have one response per episode. Here a "sequence" of GSPO and of the mask is a response, not an
episode: each response has a context of its own and is one row, which no micro-batch splits. A loss function
sees only its micro-batch. What depends on the whole batch of all ranks, such as the number of tokens, is in
the weights (mgrpo.weighted_rows).

    python forks/losses.py --loss cispo --model runs/bc --out runs/cispo

Differs from the papers: DAPO's penalty for overlong responses is left out, and its refilled groups are
a flag, --refill, because they cost episodes. Dr. GRPO, DAPO, GSPO and CISPO have no KL term: with
--paper, which sets --beta 0.001 for all losses, give them --beta 0. MiniMax names no bound for CISPO's
ratio, DeepSeek no delta; we take what others use, 5 and 0.5. DeepSeek-V3.2 also has A = r - mean and
weighs its KL by rho. RAFT also trains on groups in which all succeed; these are dropped here, as in all
losses. DAPO and CISPO take the mean over the tokens of one prompt's responses and then over prompts; "token"
is the mean over all tokens of a batch. GSPO's clip range was chosen for long responses: on the sandbox, two
updates at lr 3e-4 leave about half of the tokens without a further push (47% on average, seeds 31 to 33). In
bfloat16 rounding alone (logp_gap) may exceed that range. Not all of these papers were read in full: formulas
and numbers are also from abstracts and public code.

Differs from mgrpo.py: `advantages` and `loss`, and for --refill `choose_tasks` and `collect`. --loss-norm
has no effect where the table names another one; the means count only groups that train. clip_frac counts
the tokens without a push, and the metric loss of cispo says nothing, as only its gradient is defined. With
--refill the figures of a step (reward, success_rate) count the refilled groups as well.
"""
import random
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the six files
import run  # before torch

import torch

import mgrpo
from mgrpo import per_token, sampled_logps


@dataclass
class Config(mgrpo.Config):
    """Every knob is a flag; the comment after it is its help text."""
    out: str = "runs/losses"     # the run's directory; at the end it is also the checkpoint
    # Losses
    loss: str = "grpo"           # grpo, dr_grpo, maxrl, raft, dapo, gspo, cispo or masked
    eps: float | None = None     # how far below 1 the ratio may fall before it is clipped; None: the loss's own
    eps_high: float | None = None  # how far above 1 it may rise; None: dapo's, gspo's and cispo's own, else eps
    delta: float = 0.5           # of masked: largest drift of a response with A < 0, in mean nats per token
    refill: int = 0              # extra rounds: other tasks in place of groups whose rewards are all equal


@dataclass
class Tokens:
    """The N action tokens of some responses, one response after the other."""
    logp: torch.Tensor      # (N,) log pi, in nats
    logp_old: torch.Tensor  # (N,) log pi when they were sampled
    A: torch.Tensor         # (N,) advantages
    lengths: list[int]      # tokens of each response

    @property
    def log_rho(self):
        return self.logp - self.logp_old

    def response_mean(self, x_N):
        """(N,): at each token the mean of x over its response."""
        responses = x_N.split(self.lengths)
        means_R = torch.stack([response.mean() for response in responses])
        counts_R = torch.tensor(self.lengths, device=x_N.device)
        return means_R.repeat_interleave(counts_R)


# ------------------------------------------- the advantages A, from the rewards r of a group's episodes


def standardized(r):
    """GRPO (arXiv 2402.03300, section 4.1.2): A = (r - mean) / std.

    In a group with few successes each success pushes hard, in one with few failures each failure does.
    """
    return (r - r.mean()) / r.std()


def dr_grpo(r):
    """Dr. GRPO (arXiv 2503.20783, section 3.2): A = r - mean, and a constant in place of the length.

    Without std, groups with few successes or few failures push less, compared with other groups, than in GRPO. With
    a constant length, every token of a long failure pushes as hard as those of a short one, which
    --loss-norm paper does not do.
    """
    return r - r.mean()


def maxrl(r):
    """MaxRL (arXiv 2602.02710, algorithm 1): A = (r - mean) / mean, for rewards of 0 or 1.

    It maximizes the log of the chance of success (the first G terms of its series), not the chance itself.
    With m, the group's mean, every failure pushes by -1 and a success by (1 - m) / m: the rarer success
    is, the harder it pushes.
    """
    return (r - r.mean()) / r.mean()


def raft(r):
    """RAFT++ (arXiv 2504.11343): A = r, for rewards of 0 or 1.

    Only successes push (the tokens of failures still count in the mean of --loss-norm). It is filtered
    cloning, but of episodes that the present policy played: compared with GRPO it shows what
    failures teach, compared with filtered cloning what further playing teaches.
    """
    return r


# ------------------------------------------------------ the surrogates J, (N,), one number for each token


def clipped(rho_N, A_N, cfg: Config):
    """PPO (arXiv 1707.06347, eq. 7): min(rho A, clip(rho, 1 - eps, 1 + eps_high) A)."""
    unclipped_N = rho_N * A_N
    clipped_N = rho_N.clamp(1 - cfg.eps, 1 + cfg.eps_high) * A_N
    return torch.min(unclipped_N, clipped_N)


def grpo(t: Tokens, cfg: Config):
    """GRPO (arXiv 2402.03300, eq. 3): J = min(rho A, clip(rho, 0.8, 1.2) A).

    A token pushes by rho A until it is 20% likelier (A > 0) or less likely (A < 0), then no more.
    """
    rho_N = t.log_rho.exp()
    return clipped(rho_N, t.A, cfg)


def dapo(t: Tokens, cfg: Config):
    """DAPO (arXiv 2503.14476, eq. 8): J = min(rho A, clip(rho, 0.8, 1.28) A), a mean over all tokens.

    A token of a success pushes until it is 28% likelier, which gives rare tokens more room to rise.
    """
    return grpo(t, cfg)  # with another eps_high, and other weights: see LOSSES


def gspo(t: Tokens, cfg: Config):
    """GSPO (arXiv 2507.18071, eq. 5 and 7): J = min(s A, clip(s, 1 - 3e-4, 1 + 4e-4) A).

    s = (pi(a) / pi_old(a))^(1/|a|); a mean over an episode's responses, then over episodes. All tokens
    of a response push equally hard, or none does once the response as a whole has moved; single tokens
    may move far.
    """
    log_s_N = t.response_mean(t.log_rho)
    s_N = log_s_N.exp()
    return clipped(s_N, t.A, cfg)


def cispo(t: Tokens, cfg: Config):
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): J = stop_gradient(min(rho, 5)) A log pi.

    No token ever stops pushing: those that GRPO's clip would stop go on, by at most 5 A.
    """
    rho_N = t.log_rho.exp()
    # By default 1 - eps is 0, which bounds nothing: rho is positive.
    bounded_N = rho_N.clamp(1 - cfg.eps, 1 + cfg.eps_high)
    weight_N = bounded_N.detach()
    return weight_N * t.A * t.logp


def masked(t: Tokens, cfg: Config):
    """DeepSeek-V3.2 (arXiv 2512.02556, eq. 8 and 9): J of GRPO, but 0 for failures that have drifted.

    A response with A < 0 that is less likely than when it was sampled, by more than delta nats per token,
    pushes no more, not even by its tokens that have become likelier, which GRPO pushes down hardest.
    """
    log_rho_N = t.log_rho.detach()
    drift_N = -t.response_mean(log_rho_N)
    dropped_N = (t.A < 0) & (drift_N > cfg.delta)
    J_N = grpo(t, cfg)
    return J_N.masked_fill(dropped_N, 0.0)


# ----------------------------------------------------------------------------------------- the method

LOSSES = {
    # --loss   A             J       eps   eps_high; None: as eps   --loss-norm; None: as given
    "grpo":    (standardized, grpo,   0.2,  None, None),
    "dr_grpo": (dr_grpo,      grpo,   0.2,  None, "constant"),
    "maxrl":   (maxrl,        grpo,   0.2,  None, None),
    "raft":    (raft,         grpo,   0.2,  None, None),
    "dapo":    (standardized, dapo,   0.2,  0.28, "token"),
    "gspo":    (standardized, gspo,   3e-4, 4e-4, "paper"),
    "cispo":   (standardized, cispo,  1.0,  4.0,  "token"),
    "masked":  (standardized, masked, 0.2,  None, None),
}


def own_settings(cfg: Config) -> Config:
    """The loss's own clip range, unless flags give another one, and its own --loss-norm."""
    if cfg.loss not in LOSSES:
        names = ", ".join(LOSSES)
        raise ValueError(f"--loss {cfg.loss}: use one of {names}.")
    _, _, eps, eps_high, norm = LOSSES[cfg.loss]

    if cfg.eps is not None:
        eps = cfg.eps

    if cfg.eps_high is not None:
        eps_high = cfg.eps_high
    elif eps_high is None:
        eps_high = eps

    if norm is None:
        norm = cfg.loss_norm
    return replace(cfg, eps=eps, eps_high=eps_high, loss_norm=norm)


def push(J, t: Tokens, cfg: Config):
    """(N,): d (sum of J) / d log pi of each token: which way the loss pushes it, and how hard."""
    logp_N = t.logp.detach().requires_grad_()
    t = replace(t, logp=logp_N)
    with torch.enable_grad():
        total = J(t, cfg).sum()
    [gradient_N] = torch.autograd.grad(total, logp_N)
    return gradient_N


class Losses(mgrpo.MGRPO):
    @staticmethod
    def check(cfg):
        own = own_settings(cfg)  # raises
        if own.eps_high < 0 or cfg.delta < 0:
            raise ValueError(f"--eps-high {own.eps_high:g}, --delta {cfg.delta:g}: give at least 0.")
        if cfg.refill < 0:
            raise ValueError(f"--refill {cfg.refill}: give at least 0 rounds.")

    def __init__(self, cfg, chat, model, reference, optimizer, device):
        super().__init__(own_settings(cfg), chat, model, reference, optimizer, device)
        self.advantages_of, self.surrogate, *_ = LOSSES[cfg.loss]

    def advantages(self, group):
        training = mgrpo.group_advantages(group)  # drops groups of equal rewards
        if not training:
            return []
        r = torch.tensor([tau.reward for tau in training], dtype=torch.float64)
        A = self.advantages_of(r)
        for tau, A_i in zip(training, A.tolist()):
            tau.advantage = A_i
        return training

    def loss(self, micro_batch, logp_N, logp_ref_N, hidden_ND):
        # 1) The tokens of the micro-batch, and their weights.
        device = logp_N.device
        logp_old_N = sampled_logps(micro_batch, device)
        advantages = [row.advantage for row in micro_batch]
        weights = [row.weight for row in micro_batch]
        lengths = [row.n_action for row in micro_batch]
        A_N = per_token(advantages, micro_batch, device)
        weight_N = per_token(weights, micro_batch, device)
        t = Tokens(logp_N, logp_old_N, A_N, lengths)

        # 2) L.
        kl_N = mgrpo.kl_estimate(logp_N, logp_ref_N)
        J_N = self.surrogate(t, self.cfg)
        gain_N = J_N - self.cfg.beta * kl_N
        loss = -(weight_N * gain_N).sum()

        # 3) The metrics.
        push_N = push(self.surrogate, t, self.cfg)
        without_push_N = (push_N == 0) & (t.A != 0)
        return loss, {
            "kl": kl_N.sum().item(),
            "clip_frac": without_push_N.sum().item(),
        }

    # DAPO's dynamic sampling (section 3.2 there), for any loss.

    def choose_tasks(self, tasks, step):
        """mgrpo.py's choice. The other tasks, in random order, are there to refill the batch."""
        chosen = super().choose_tasks(tasks, step)
        others = [task for task in tasks if task not in chosen]
        rng = random.Random(f"{self.cfg.seed}/spare {step}")
        self.spare = rng.sample(others, len(others))
        return chosen

    def collect(self, tasks, env, step, tick=run.ignore):
        """Plays the tasks; then, --refill times, one other task for each group that will not train.

        All rounds have the step's seed. Random numbers and the names of pictures also depend on the task,
        and within a step no task comes twice.
        """
        episodes = super().collect(tasks, env, step, tick)
        spare = self.spare  # if the step is collected again, it begins with all of them
        for _ in range(self.cfg.refill):
            missing = self.cfg.batch - self.groups_that_train(episodes)
            more = spare[:missing]
            spare = spare[missing:]
            if not more:
                break
            episodes += super().collect(more, env, step, tick)
        return episodes

    def groups_that_train(self, episodes) -> int:
        """How many, over all ranks. group_advantages sets A as well; `advantages` overwrites it later."""
        training = 0
        for group in mgrpo.groups_of(episodes, self.cfg.G):
            if mgrpo.group_advantages(group):
                training += 1
        [total] = run.all_sum([training])
        return int(total)


if __name__ == "__main__":
    main = partial(mgrpo.main, Method=Losses)
    paper = mgrpo.PAPER | {"eps": None}
    run.command_line(main, Config, __doc__, {"paper": paper}, start="runs/bc")
