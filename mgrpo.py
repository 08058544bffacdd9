"""WebAgent-R1 (arXiv 2505.16421): end-to-end reinforcement learning of a web agent with M-GRPO,
multi-turn group relative policy optimization.

For each task the policy plays a group of G episodes in parallel. A finished episode tau_i
earns r_i = 1 if the task is done, else 0. All its tokens share the advantage
A_i = (r_i - mean(r)) / std(r). With h_j, the context of turn j (compress.context), we minimize

    L = - 1/G sum_i 1/|tau_i| sum_j 1/|a_ij| sum_t
            [ min(rho A_i, clip(rho, 1-eps, 1+eps) A_i) - beta KL ]

    rho = pi(token | h_j, a_ij,<t) / pi_old(...)      i: episodes, j: turns, t: tokens of a response

|tau_i| is the number of turns, |a_ij| the number of tokens of a response; only responses train. This
is the loss of one task. A batch takes the mean over the tasks whose groups train.

In PyTorch terms: the policy pi is the language model, and an episode (trajectory tau) is one attempt
at a task. The reward comes once, at the end, and no gradient runs through browser or judge. So we
cannot ask how to change a token to earn more. We ask how to make the tokens of good attempts
likelier: minimize - A log pi(token), a cross-entropy whose weight A may be negative. A compares the
reward with the group's mean (the baseline), in standard deviations: of G = 4 episodes with r = 1, 0,
0, 0 the first has A = 1.5, the others -0.5.

Why rho: a batch is used for several optimizer steps, and after the first one the weights are no longer
those that sampled (pi_old). rho corrects for that (importance sampling): the average of rho A over
tokens that pi_old drew equals the average of A over tokens that pi draws in the same contexts. The
gradient of rho is rho times that of log pi. So at rho = 1, rho A and A log pi have the same gradient.

Why min and clip: a token's gradient ends once its probability has moved far enough in the direction that
A asks for: rho > 1 + eps if A > 0, rho < 1 - eps if A < 0. Other tokens share the weights, so rho can
drift on: clipping does not bound how far the policy moves.

KL says how far pi is from the reference, the policy that training began with. Entropy in the metrics
says how undecided pi still is. The loss itself says little: in the first update rho is 1, so the loss is
minus the weighted sum of A (plus beta KL). With --paper that sum is 0 for every group. By default longer
episodes weigh more, and failed responses lose their positive A. So the loss says how long episodes were
and how many responses failed, and not whether the policy gets better.

    python mgrpo.py                   # the sandbox, on CPU cores; clones the experts first (bc.py)
    torchrun --nproc_per_node 8 mgrpo.py --paper --model runs/bc-qwen3b --tasks train.json

Differs from the paper: groups whose rewards are all equal are dropped, so they add neither policy
gradient nor KL (the formula would divide by a standard deviation of 0). An episode broken by the
environment is dropped from its group, not counted as a failure. An episode without exit earns
nothing for its answer. By default all tokens of a batch weigh the same (--loss-norm), and a response
that failed gets no credit for its episode's success (--credit-errors); --paper restores both of the
paper's choices. compress.py says how the released code differs.

Other RL trainers have these parts, and this one does not. What you would notice:

    no critic: a group whose rewards are all equal teaches nothing, and --G 1 is refused (forks/critic.py)
    no reward model: one 0 or 1 an episode, so needless clicks of a success are made likelier as well
    no normalization over the batch: one success of 8 gets A = 2.5, whatever the other groups did
    no KL by default: nothing pulls pi back to the clone, and kl is logged as 0 (--beta 0.001)
    no entropy bonus: entropy is logged, but nothing keeps it up; if it falls, groups agree and drop out
    no mini-batches: each update uses all rows of the step; --updates-per-batch says how many updates there are
    no separate inference engine: rollout.Engine decodes with the weights that train (FSDP2 gathers them whole
        on each rank for the rollout); each episode under way reserves a KV cache of --max-context tokens
    no Ray: torchrun starts equal ranks, which play and then train; while they play, nothing trains
    no asynchronous rollouts: a step waits for its slowest episode; in return, its first update is on-policy:
        the weights that train are those that sampled (forks/overlap.py)
    no replay: a step's episodes are dropped after its updates (forks/awr.py, forks/webrl.py)
    no tensor or sequence parallelism: FSDP2 splits weights, gradients and Adam's state, but no context;
        one GPU must hold a whole context, and the whole policy while it plays

Symbols are the paper's: G, tau, a, r, A, rho, eps, beta. Dimension key: N action tokens, D width.
"""
import run  # first: it prepares OpenMP before torch loads

import asyncio
import random
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

import bc
import compress
import worlds
from compress import Chat, Row, Trajectory, to_record
from evaluate import SiteSettings, Environment, episode_metrics, evaluate, mean, percent, why_no_verdicts
from model import as_reference, computing_dtype, config_json, load_for_training, save, token_logprobs
from rollout import check_room, rollout, task_key
from worlds.browser import BrowserSettings


@dataclass
class Config(SiteSettings):
    """Every knob is a flag; the comment after it is its help text."""
    # Model and data
    model: str | None = None     # warm-started checkpoint; None: runs/bc, made by bc.py if missing
    tasks: str = "sandbox:train"  # sandbox:SPLIT[/TEMPLATE][:N], miniwob[:...], infinity:..., FILE; or A,B
    out: str = "runs/mgrpo"      # the run's directory; at the end it is also the checkpoint
    # M-GRPO
    steps: int = 9               # one batch of tasks each
    batch: int = 24              # tasks per step, over all ranks
    G: int = 8                   # episodes per task
    eps: float = 0.2             # clip range of the ratio rho
    beta: float = 0.0            # weight of the KL; 0 loads no reference, and kl is logged as 0
    updates_per_batch: int = 3   # optimizer steps per batch (TRL: num_iterations); clipping acts from the 2nd
    loss_norm: str = "token"     # paper: nested means; token: equal weights; constant: equal, fixed divisor
    credit_errors: bool = False  # responses that failed also get credit for a success
    temperature: float = 0.7     # of sampling and of training's log-probs
    # Optimization
    lr: float | None = None      # peak; None: 3e-4, or 1e-6 above 10 million parameters; LoRA: x 10
    warmup: float = 0.2          # share of the steps in which lr rises: Adam's first steps are noisy
    decay: bool = True           # after the warm-up lr falls linearly; one step after the last it would be 0
    max_grad_norm: float = 1.0   # a longer gradient is scaled down to this norm
    max_tokens: int = 8192       # per micro-batch: lower it when memory runs out
    recompute: bool = False      # activation checkpointing
    lora: int = 0                # rank of the LoRA adapters (only they train); 0: train all weights
    seed: int = 0                # of the order of tasks and of sampling
    held_out: str | None = None  # tasks to evaluate greedily (broken episodes fail); OUT/best keeps the best
    held_out_every: int = 5      # steps between these evaluations; 0: only after the last step
    save_every: int = 1          # steps between saves of weights and training state; 0: only after the last step
    keep_every: int = 0          # steps between checkpoints that stay, as OUT/step-00010; 0: none
    resume: bool = True          # continue the run in OUT from its last save, if there is one
    force: bool = False          # continue even if that run has other settings
    # Rollout, sized for the sandbox and a CPU
    max_turns: int = 10          # responses per episode
    max_new_tokens: int = 64     # per response
    max_context: int = 1536      # tokens of history, page and response together
    paper: bool = False          # WebAgent-R1's values (Appendix B) for all flags not given


# Appendix B. The paper does not give G, max_turns, updates_per_batch or the number of passes: those are the released
# code's. max_tokens, concurrency and save_every are ours, for eight 80 GB GPUs. max_grad_norm stays at our 1.0; the
# released code clips at 0.01.
PAPER = dict(
    steps=40,  # one pass over its 647 tasks
    batch=16,
    G=4,
    eps=0.2,
    beta=0.001,
    updates_per_batch=1,
    loss_norm="paper",
    credit_errors=True,
    temperature=1.0,
    lr=1e-6,
    warmup=0.0,
    decay=False,
    max_turns=15,
    max_new_tokens=1024,
    max_context=16384,
    max_tokens=16384,
    recompute=True,
    concurrency=8,  # a step's episodes on each of eight ranks
    save_every=5,  # a 3B model's training state is 37 GB
)


# ---------------------------------------------------------------------- the algorithm: fork here --


def groups_of(episodes: list[Trajectory], G: int) -> list[list[Trajectory]]:
    """Episodes in the order that `rollout` returns, G of each task, cut into the groups of their tasks."""
    return [episodes[start:start + G] for start in range(0, len(episodes), G)]


def group_advantages(group: list[Trajectory]) -> list[Trajectory]:
    """Sets A_i of a group's valid trajectories; returns those that train: all valid ones, or none.

    The baseline is over trajectories, not turns. Episodes that the environment broke leave the
    group. Fewer than two valid episodes, or equal rewards, teach nothing about what to prefer. std
    is the sample standard deviation, as in the released code.
    """
    valid = [tau for tau in group if tau.status == "ok"]
    r = torch.tensor([tau.reward for tau in valid], dtype=torch.float64)
    if len(valid) < 2 or r.max() - r.min() < 1e-9:  # a fork's rewards may be equal up to rounding
        return []
    A = (r - r.mean()) / r.std()
    for tau, A_i in zip(valid, A.tolist()):
        tau.advantage = A_i
    return valid


def kl_estimate(logp_N, logp_ref_N):
    """k3, Schulman's estimate of KL(pi || pi_ref) from tokens that pi sampled, (N,).

    The mean of -delta is the KL; exp(delta) - 1 has mean 0 and makes every term non-negative, 0 where the
    policies agree. From a batch's second update on, pi is no longer the policy that sampled the tokens, so the
    estimate is approximate.

    Only its value estimates this KL. Its gradient at these tokens, which the loss takes, is on average that of
    KL(pi_ref || pi), as in GRPO. Both pull pi toward pi_ref. The gradient has no bound: one token 25 nats below
    the reference counts 7e10-fold. Once --max-grad-norm has scaled the gradient down, this one token decides the
    whole update.
    """
    delta_N = logp_ref_N - logp_N
    return delta_N.exp() - delta_N - 1


def mgrpo_loss(logp_N, logp_old_N, logp_ref_N, A_N, weight_N, eps: float, beta: float):
    """The M-GRPO objective as one weighted sum over tokens.

    All _N are (N,), one number per action token; log-probs in nats; weight_N: each token's weight, see
    `weighted_rows`. Returns (loss, a scalar with the gradient; {"kl", "clip_frac"}, sums over the N tokens).
    """
    rho_N = (logp_N - logp_old_N).exp()
    unclipped_N = rho_N * A_N
    clipped_N = rho_N.clamp(1 - eps, 1 + eps) * A_N
    surrogate_N = torch.min(unclipped_N, clipped_N)

    kl_N = kl_estimate(logp_N, logp_ref_N)
    gain_N = surrogate_N - beta * kl_N
    loss = -(weight_N * gain_N).sum()
    is_clipped_N = clipped_N < unclipped_N
    return loss, {
        "kl": kl_N.sum().item(),
        "clip_frac": is_clipped_N.sum().item(),  # a count so far; `update` divides it
    }


def weighted_rows(groups: list[list[Trajectory]], chat: Chat, cfg: Config) -> list[Row]:
    """The training rows of the groups that train, each with the weight of its action tokens in L.

    The means are over the groups and tokens of all ranks, so every rank calls it, even one without groups.
    """
    own_tokens = 0  # this rank's
    for group in groups:
        for tau in group:
            own_tokens += sum(len(turn.response_ids) for turn in tau.turns)
    n_groups, n_tokens = run.all_sum([len(groups), own_tokens])
    longest = cfg.max_turns * cfg.max_new_tokens  # the most response tokens that an episode can have
    out = []
    for group in groups:
        for tau in group:
            rows = compress.trajectory_rows(chat, tau)
            for row in rows:
                if cfg.loss_norm == "paper":  # the means over groups, episodes, turns and tokens
                    row.weight = 1 / (n_groups * len(group) * len(rows) * row.n_action)
                elif cfg.loss_norm == "token":
                    row.weight = 1 / n_tokens
                else:  # constant: as if every episode had the longest possible length
                    row.weight = 1 / (n_groups * len(group) * longest)
            out += rows
    return out


def withhold_credit(rows: list[Row]):
    """Caps the advantage of responses that failed at 0: no action could be read, or the action failed.

    Such a response did nothing, so it did not help: the episode succeeded in spite of it. And many
    are loops as long as max_new_tokens allows, so they would outweigh the actions that did help.
    """
    for row in rows:
        if row.turn.error:
            row.advantage = min(row.advantage, 0.0)


def per_token(values: list[float], rows: list[Row], device):
    """One value per row -> (N,): the value at each of the row's action tokens."""
    counts = torch.tensor([row.n_action for row in rows], device=device)
    return torch.tensor(values, device=device).repeat_interleave(counts)


def per_row(x_N, rows: list[Row]):
    """(N,) -> one tensor per row, of its action tokens."""
    return x_N.split([row.n_action for row in rows])


def sampled_logps(rows: list[Row], device):
    """(N,): the action tokens' log-probs when they were sampled."""
    logps = []
    for row in rows:
        logps += row.logps
    return torch.tensor(logps, device=device)


def fill_missing_logps(rows: list[Row], logp_N):
    """Rows of a fork's replayed episodes have no log-probs: they get those of this pass, as if pi had sampled them."""
    for row, own_logp_N in zip(rows, per_row(logp_N.detach(), rows)):
        if row.logps is None:
            row.logps = own_logp_N.tolist()


def task_batch(tasks: list[dict], step: int, cfg: Config) -> list[dict]:
    """The step's tasks. Every step has its share of each template, so success rates are comparable.

    Each epoch, a pass over the tasks, is shuffled by the seed and drops its last, incomplete batch. So no
    step holds a task twice: that would play the same episodes twice.
    """
    # 1) The step is batch k of its epoch. Shuffle the epoch's tasks.
    batches_per_epoch = len(tasks) // cfg.batch
    epoch, k = divmod(step, batches_per_epoch)
    rng = random.Random(f"{cfg.seed}/pass {epoch}")
    shuffled = rng.sample(tasks, len(tasks))

    # 2) Sort them by template.
    templates = {}
    for task in shuffled:
        template = (task.get("source"), task.get("intent_template_id"))
        same_template = templates.setdefault(template, [])
        same_template.append(task)

    # 3) Give each task a place in [0, 1): a template's n tasks at (0 + f)/n, (1 + f)/n, ..., with a fraction
    #    f of its own, so that not all templates begin at 0. In the order of places, every batch is a
    #    cross-section of the templates.
    places = []
    for i, same_template in enumerate(templates.values()):
        f = i / len(templates)
        for j, task in enumerate(same_template):
            place = (j + f) / len(same_template)
            places.append((place, task))
    places.sort(key=lambda pair: pair[0])
    order = [task for _, task in places]

    # 4) Cut out batch k.
    return order[k * cfg.batch:(k + 1) * cfg.batch]


class MGRPO:
    """The parts of the method that a fork replaces. `main` holds the loop around them.

    To fork, subclass it in a file of your own and run mgrpo.main(cfg, YourMethod); see forks/.

    A row is one response with its context (compress.py). PADDING is a row of weight 0 (bc.py). In `inputs`, which
    compress.pack makes of a micro-batch, B is 1 and T the number of its ids. Forks also use R, the number of rows.
    """
    smallest_group = 2  # one episode's reward has no spread: A would be 0 / 0
    advice = "next: python evaluate.py --model {out}{tasks}"  # how `main` ends

    def __init__(self, cfg: Config, chat: Chat, model, reference, optimizer, device):
        self.cfg = cfg
        self.chat = chat
        self.model = model
        self.reference = reference  # None without a KL term
        self.optimizer = optimizer
        self.device = device

    @staticmethod
    def check(cfg: Config):
        """Refuses a fork's flags that cannot work, before anything is loaded or trained."""

    def choose_tasks(self, tasks: list[dict], step: int) -> list[dict]:
        """The step's tasks, cfg.batch of them, the same on all ranks and after a resume.

        A fork that draws them uses random.Random(f"{cfg.seed}/tasks {step}"), and no task twice: what is
        sampled depends on (seed, step, task, member) alone, so the second group would repeat the first.
        """
        return task_batch(tasks, step, self.cfg)

    def collect(self, tasks: list[dict], env: Environment, step: int,
                tick=run.ignore, choose=None):
        """Plays the step's tasks, whole groups per rank; returns this rank's episodes in order.

        tick(text, last=False) shows progress. choose: how a turn chooses among several responses; see `rollout` and
        forks/tsr.py. A fork may call it several times in a step, each time for other tasks. A step whose
        episodes all broke is collected again.
        """
        cfg = self.cfg
        seed = f"{cfg.seed}/{step}"
        env.begin_batch(tasks, group_size=cfg.G, name=seed)
        mine = tasks[run.rank()::run.world_size()]
        playing = rollout(self.model, self.chat, mine, env=env, settings=cfg, group_size=cfg.G,
                          seed=seed, temperature=cfg.temperature, tick=tick, choose=choose)
        episodes = asyncio.run(playing)
        for tau in episodes:
            if tau.status == "ok":
                tau.reward = self.reward(tau)
        return episodes

    def reward(self, tau: Trajectory) -> float:
        """The number that training maximizes, for a judged episode. Statistics count tau.success.

        tau.answer is None unless the episode called exit. tau.turns may be empty; `compress.Turn` says what
        each holds.
        """
        return tau.success

    def advantages(self, group: list[Trajectory]) -> list[Trajectory]:
        """Sets the advantages within one task's group; returns the episodes that train.

        A row's advantage is tau.advantage + turn.advantage. Both are 0 until they are set.
        """
        return group_advantages(group)

    def training_rows(self, episodes: list[Trajectory], step: int) -> tuple[list[Row], dict]:
        """(training rows with advantages and weights, more metrics) of this rank's episodes."""
        kept = []
        for group in groups_of(episodes, self.cfg.G):
            training = self.advantages(group)
            if training:
                kept.append(training)
        rows = weighted_rows(kept, self.chat, self.cfg)
        if not self.cfg.credit_errors:
            withhold_credit(rows)
        [n_kept] = run.all_sum([len(kept)])
        return rows, {"groups_kept": int(n_kept)}

    def n_updates(self, step: int) -> int:
        """How many optimizer steps the step's rows are used for."""
        return self.cfg.updates_per_batch

    def update(self, rows: list[Row]) -> dict:
        """One optimizer step on the step's rows; returns its metrics. A fork may do more before or after it.

        All ranks call it, each with its own rows. In a step's first update logp_gap, the mean
        |log pi - log pi_old|, is rounding alone.
        """
        cfg = self.cfg
        sums = {}
        for micro_batch in bc.balanced_micro_batches(rows, cfg.max_tokens):
            # 1) Forward: log-probs of the sampled tokens under the policy and the reference.
            inputs = compress.pack(micro_batch, self.device)
            logp_N, entropy_N, hidden_ND = self.logprobs(micro_batch, inputs)
            logp_ref_N = self.reference_logps(inputs, logp_N)
            fill_missing_logps(micro_batch, logp_N)

            # 2) Loss and backward. The weights divide by the counts of all ranks already, and FSDP divides
            #    by the number of ranks once more, so multiply by it.
            loss, metrics = self.loss(micro_batch, logp_N, logp_ref_N, hidden_ND)
            (loss * run.world_size()).backward()

            # 3) Measure. PADDING adds nothing but its keys: all_sum below adds the ranks' lists of values, so
            #    every rank needs the same keys in the same order.
            gap_N = (logp_N.detach() - sampled_logps(micro_batch, self.device)).abs()
            metrics["entropy"] = entropy_N.sum().item()
            metrics["logp_gap"] = gap_N.sum().item()
            metrics["loss"] = loss.item()
            metrics["action_tokens"] = len(logp_N)
            metrics["packed_tokens"] = inputs["tokens_BT"].numel()
            for key, value in metrics.items():
                sums.setdefault(key, 0.0)
                if micro_batch[0] is not bc.PADDING:
                    sums[key] += value

        # 4) Add up over the ranks, and step.
        summed = run.all_sum(list(sums.values()))
        totals = dict(zip(sums, summed))
        total_loss = totals["loss"]
        n_action_tokens = totals["action_tokens"]
        grad_norm, skipped = bc.optimizer_step(self.model, self.optimizer, total_loss, cfg.max_grad_norm)
        for key in totals:
            if key not in ("loss", "action_tokens", "packed_tokens"):
                totals[key] /= n_action_tokens  # these become means over the action tokens
        totals["grad_norm"] = grad_norm
        totals["skipped"] = int(skipped)
        return totals

    def logprobs(self, micro_batch: list[Row], inputs: dict):
        """(logp_N, entropy_N, hidden_ND) of the action tokens of a micro-batch under the policy.

        inputs: what `pack` made of the batch. A fork may score more of it than the actions, or keep the
        entropy for its `loss`.
        """
        return token_logprobs(self.model, **inputs, temperature=self.cfg.temperature)

    def reference_logps(self, inputs: dict, logp_N):
        """Log-probs of the action tokens under the reference; the policy's own, logp_N, if there is none."""
        if self.reference is None:
            return logp_N.detach()
        with torch.no_grad(), as_reference(self.reference):
            logp_ref_N, _, _ = token_logprobs(self.reference, **inputs, temperature=self.cfg.temperature)
        return logp_ref_N

    def loss(self, micro_batch: list[Row], logp_N, logp_ref_N, hidden_ND):
        """(loss of a micro-batch, its metrics as sums over its tokens: kl, clip_frac, and a fork's own).

        hidden_ND: the last hidden states that predict the action tokens, for a fork's own heads. All
        ranks call this equally often: one with fewer micro-batches gets PADDING, whose weight is 0. The
        metrics have the same names in the same order each time; a fork's own are logged as they are in the
        step's first update. To keep something from that update for the later ones, put it on the row.
        """
        device = logp_N.device
        advantages = [row.advantage for row in micro_batch]
        weights = [row.weight for row in micro_batch]
        logp_old_N = sampled_logps(micro_batch, device)
        A_N = per_token(advantages, micro_batch, device)
        weight_N = per_token(weights, micro_batch, device)
        return mgrpo_loss(
            logp_N,
            logp_old_N,
            logp_ref_N,
            A_N=A_N,
            weight_N=weight_N,
            eps=self.cfg.eps,
            beta=self.cfg.beta,
        )


def update_metrics(updates: list[dict]) -> dict:
    """The metrics of a step from those of its updates, in order. None, not 0, where nothing was trained."""
    if not updates:
        untrained = dict.fromkeys(("loss", "grad_norm", "kl", "clip_frac", "entropy", "logp_gap"))
        return {**untrained, "skipped": 0, "change": [], "tokens_packed": 0}
    # From the first update, which is on-policy: loss, gradient norm, entropy, logp_gap, and a fork's own.
    # From the last one: kl and clip_frac, since they show how far the updates before it moved the policy.
    first, *others = updates
    last = updates[-1]
    metrics = dict(first)
    del metrics["action_tokens"], metrics["packed_tokens"]
    metrics["kl"] = last["kl"]
    metrics["clip_frac"] = last["clip_frac"]
    metrics["change"] = [one["logp_gap"] for one in others]  # mean |log rho| before each of them
    metrics["skipped"] = sum(one["skipped"] for one in updates)
    metrics["tokens_packed"] = int(sum(one["packed_tokens"] for one in updates))
    return metrics


def step_metrics(step: int, episodes: list[Trajectory], updates: list[dict]) -> dict:
    """A step's line of metrics.jsonl, without its times and what `training_rows` measured.

        reward               mean of what training maximizes; more about the episodes: evaluate.episode_metrics
        loss, entropy        of the first update; entropy is a mean over the action tokens, in nats
        grad_norm            of the first update, before clipping
        logp_gap             mean |log pi - log pi_old| before the first update: rounding alone
        change               the same before each later update: how far the earlier ones moved the policy
        kl, clip_frac        of the last update; clip_frac is the share of action tokens that are clipped
        skipped              updates that took no step, because loss or gradient was not finite
        tokens_packed        tokens computed in all updates, contexts included
    """
    rewards = [tau.reward for tau in episodes if tau.status == "ok"]
    return {"step": step, "reward": mean(rewards), **episode_metrics(episodes), **update_metrics(updates)}


# --------------------------------------------------------------------------------------- setting up --


def check(cfg: Config, Method):
    """Refuses settings that cannot train."""
    if cfg.loss_norm not in ("paper", "token", "constant"):
        raise ValueError(f"--loss-norm {cfg.loss_norm}: use paper, token or constant.")
    if cfg.temperature <= 0:
        raise ValueError("--temperature 0: all episodes of a group would be the same; sample above 0.")
    if cfg.G < Method.smallest_group:
        raise ValueError(f"--G {cfg.G}: an episode is compared with others of its task; "
                         f"give at least {Method.smallest_group}.")
    Method.check(cfg)
    worlds.check_files(cfg.tasks, cfg.held_out)


def warm_start(cfg: Config) -> str:
    """The checkpoint to start from. Runs bc.py's stage if there is none."""
    if cfg.model is not None:
        return cfg.model
    if not (Path("runs/bc") / "model.safetensors").exists():
        run.print0("no --model given and no runs/bc yet: running behavior cloning first (python bc.py)")
        names = ["seed", "concurrency", "precision", "resume", "force"]
        names += [knob.name for knob in fields(BrowserSettings)]
        shared = {name: getattr(cfg, name) for name in names}
        bc.main(bc.Config(**shared))
    return "runs/bc"


def open_reference(cfg: Config, model, device):
    """The policy that training began with, for the KL term, sharded over the ranks; None without that term."""
    if not cfg.beta:
        return None
    if cfg.lora:
        return model  # `as_reference` computes with its frozen weights and the adapters of --model
    return load_for_training(cfg.model, device, precision=cfg.precision).requires_grad_(False)


def adamw(model):
    # The learning rate is set at each step. 0.99: over the 27 updates of a default run the second moment is
    # nearly a plain mean of all of them.
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)


def open_method(cfg: Config, Method, device) -> MGRPO:
    """The method with its policy. Its cfg names the model and the learning rate that were chosen."""
    cfg = replace(cfg, model=warm_start(cfg))
    chat, model = bc.open_policy(cfg, device)
    reference = open_reference(cfg, model, device)
    optimizer = adamw(model)
    if cfg.lr is None:
        lr = bc.lr_by_size(model, small=3e-4, large=1e-6)
        cfg = replace(cfg, lr=lr)
    return Method(cfg, chat, model, reference, optimizer, device)


def open_tasks(cfg: Config, env: Environment) -> tuple[list[dict], list[dict]]:
    """(the tasks to train on, the held-out ones)."""
    has_judge = env.judge is not None
    tasks = worlds.load_tasks(cfg.tasks, env.sites, judge=has_judge)
    held_out = []
    if cfg.held_out:
        held_out = worlds.load_tasks(cfg.held_out, env.sites, judge=has_judge)
    if cfg.batch > len(tasks):
        raise ValueError(f"--batch {cfg.batch}: {cfg.tasks} holds only {len(tasks)} tasks; "
                         f"give at most --batch {len(tasks)}.")
    return tasks, held_out


# ---------------------------------------------------------------- saving, and going on after a kill --


def due(step: int, every: int, cfg: Config) -> bool:
    """Whether what is done every `every` steps (0: never) is due after this one. After the last step it always is."""
    if step == cfg.steps - 1:
        return True
    return every > 0 and (step + 1) % every == 0


def kept_best(out: Path) -> dict:
    """The held_out and held_out_success of OUT/best; {} if there is none. Raises ValueError if it is damaged."""
    config = out / "best" / "config.json"
    if not config.exists():
        return {}
    written = run.read_json(config)
    with run.reading(config):
        settings = written["run"]
        return {name: settings[name] for name in ("held_out", "held_out_success")}


def is_best(metrics: dict, out: Path) -> bool:
    """Whether this step's held-out success beats that of every earlier step on the same tasks.

    Rank 0 decides for all ranks: it sees the file.
    """
    rate = metrics.get("held_out_success")
    if rate is None:
        return False
    best = False
    if run.rank() == 0:
        lines = run.all_lines(out / "metrics.jsonl")
        earlier = lines[:-1]  # the last is this step's
        # The line of OUT/best may be gone: a run that resumes repeats the steps since its last save.
        earlier.append(kept_best(out))
        same_tasks = [one for one in earlier if one.get("held_out") == metrics["held_out"]]
        rates = [one.get("held_out_success") for one in same_tasks]
        best = all(rate > old for old in rates if old is not None)
    return run.all_max(best)


def save_everything(method: MGRPO, directory: run.RunDirectory, metrics: dict):
    """Checkpoints, report and training state, as far as they are due after a step."""
    cfg = method.cfg
    step = metrics["step"]

    def save_as(path, **more):
        settings = {**directory.config, **more}
        save(method.model, path, like=cfg.model, settings=settings)

    if is_best(metrics, directory.path):
        # Whole, then swapped: OUT/best never holds one policy with another one's score.
        fresh = directory.path / "best.new"
        save_as(fresh, step=step + 1, held_out_success=metrics["held_out_success"])
        if run.rank() == 0:
            run.swap_directory(directory.path / "best", fresh)
    if cfg.keep_every and (step + 1) % cfg.keep_every == 0:
        save_as(directory.path / f"step-{step + 1:05}")
    if due(step, cfg.save_every, cfg):
        # The policy first, then the state: a run that is killed in between resumes from its previous state and
        # repeats the steps since then. The first time there is no previous state, and `refuse_lost_state` would
        # refuse the policy. So then the state comes first; if the run is killed in between, its next save or `finish`
        # writes the policy.
        no_state = run.rank() == 0 and not run.saved_states(directory.path / "state")
        if run.all_max(no_state):  # the first save
            save_state(method, directory, step + 1)
            save_as(directory.path)
        else:
            save_as(directory.path)
            save_state(method, directory, step + 1)
        if run.rank() == 0:  # last: a report that cannot be drawn costs no step
            run.report(directory.path)


def save_state(method: MGRPO, directory: run.RunDirectory, step: int):
    """Saves what a resumed run needs; it continues with `step`."""
    run.save_state(method.cfg, method.model, method.optimizer, step=step, inputs=directory.inputs,
                   method_name=type(method).__name__)


def refuse_lost_state(out: Path):
    """Raises ValueError if a trained policy is there without its training state: a new run would replace it."""
    has_policy = run.holds_run(out) and (out / "model.safetensors").exists()
    has_state = len(run.saved_states(out / "state")) > 0
    if has_policy and not has_state:
        raise ValueError(f"{out} holds a trained policy, but no state/ to go on from. "
                         "Give --no-resume to replace it, or another --out.")


def where_to_begin(method: MGRPO) -> int:
    """Restores the run in OUT, if there is one; returns its next step, else 0."""
    cfg = method.cfg
    may_change = {"held_out", "held_out_every", "keep_every", "reset_url"}
    if not cfg.decay and not cfg.warmup:
        may_change.add("steps")  # a constant learning rate does not depend on it
    first_step = run.resume(cfg, method.model, method.optimizer, may_change=may_change,
                            method_name=type(method).__name__)
    if first_step == 0 and cfg.resume:
        refuse_lost_state(Path(cfg.out))
    return first_step


def finish(method: MGRPO, device, first_step: int):
    """Says that a run is finished, and draws its report. If it was killed before it wrote its policy, writes it now."""
    cfg = method.cfg
    out = Path(cfg.out)
    has_no_policy = run.rank() == 0 and not (out / "model.safetensors").exists()
    if run.all_max(has_no_policy):
        directory = run.open_run(cfg, device, first_step)
        save(method.model, out, like=cfg.model, settings=directory.config)
        run.print0(f"saved the policy in {out}: the run was killed before it could do so")
    if run.rank() == 0:
        run.report(out)  # the run may have been killed before it drew its last step
    run.print0(f"{cfg.out} is finished: all {first_step} steps are done. "
               "Give --no-resume to start over, or another --out.")


# --------------------------------------------------------------------------------------- the script --


def warmup_linear(step: int, cfg: Config) -> float:
    """The learning rate: a linear rise; then constant, or a linear fall that would reach 0 after the last step."""
    warm = round(cfg.warmup * cfg.steps)
    if step < warm:
        return cfg.lr * ((step + 1) / warm)
    if not cfg.decay:
        return cfg.lr
    return cfg.lr * ((cfg.steps - step) / (cfg.steps - warm))


def greedy_success(method: MGRPO, tasks: list[dict], env: Environment) -> float | None:
    """Success rate of greedy episodes on tasks, over all ranks; None if none could be judged.

    A broken episode counts as a failure: else one success while the site was down, 1 of 1, would be the best for good.
    """
    env.begin_batch(tasks)
    tick = run.ticker("  held out: ")
    played = evaluate(method.model, method.chat, tasks,
                      env=env, settings=method.cfg, tick=tick)
    if all(tau.status != "ok" for tau in played):
        return None
    return mean([tau.success for tau in played])


# A logp_gap above this is more than rounding. bfloat16: SmolLM2's is 0.04 before cloning and 0.01 after it.
ALARM = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def print_step(metrics: dict, cfg: Config, device, minutes_left: float):
    """A step in one line for people."""
    said = f"step {metrics['step'] + 1}/{cfg.steps}"
    said += f"  success {percent(metrics['success_rate'])}  turns {metrics['turns']:.1f}"
    if "groups_kept" in metrics:  # not in forks that compare no groups
        said += f"  groups {metrics['groups_kept']}/{cfg.batch}"
    if metrics["entropy"] is not None:
        said += f"  entropy {metrics['entropy']:.3f}  gap {metrics['logp_gap']:.1e}"
    said += f"  rollout {metrics['seconds_rollout']:.0f} s  train {metrics['seconds_train']:.0f} s"
    run.print0(f"{said}  {minutes_left:.0f} min left")
    gap = metrics["logp_gap"] or 0.0
    if gap > ALARM[computing_dtype(device, cfg.precision)]:
        run.print0("  ! logp_gap is far above rounding: training does not score what was sampled")


PATIENCE = 3  # how many times a step is played at most, while none of its episodes can be judged


def play_step(method: MGRPO, tasks: list, env: Environment, step: int,
              directory: run.RunDirectory) -> tuple[list, list]:
    """Plays a step's tasks. Returns this rank's episodes, and those of all ranks.

    Sites may be down for a while, so a step is played again if none of its episodes could be judged. If the sites
    stay down, raises ValueError; the run resumes with this step.
    """
    keys = {task_key(task) for task in tasks}
    if len(keys) < len(tasks):
        raise ValueError(f"{type(method).__name__}.choose_tasks chose a task twice; "
                         "its two groups would be the same episodes.")
    for _ in range(PATIENCE):
        tick = run.ticker(f"step {step + 1}/{method.cfg.steps}: ")
        episodes = method.collect(tasks, env, step, tick)
        all_episodes = run.gather(episodes)
        if any(tau.status == "ok" for tau in all_episodes):
            return episodes, all_episodes
        run.print0(f"  none of the {len(all_episodes)} episodes could be judged")
    save_state(method, directory, step)
    raise ValueError(why_no_verdicts(all_episodes, directory.path))


def main(cfg: Config, Method=MGRPO):
    """The script. A fork passes its own Method."""
    check(cfg, Method)
    device = run.init_dist(cfg.precision)
    method = open_method(cfg, Method, device)
    cfg = method.cfg
    first_step = where_to_begin(method)
    if first_step >= cfg.steps:
        finish(method, device, first_step)
        return

    with worlds.open_sites(cfg.tasks, cfg.held_out) as sites:
        env = Environment(sites, cfg.out, cfg)
        tasks, held_out = open_tasks(cfg, env)
        check_room(method.chat, tasks + held_out, cfg)
        directory = run.open_run(cfg, device, first_step)
        directory.begin(config_json(method.model), first_step)
        if run.rank() == 0:  # the others may still see files that a new run is deleting
            kept_best(directory.path)  # if it is damaged, say so before a step is played
        run.print0(f"{len(tasks)} tasks, {cfg.batch} x G={cfg.G} episodes a step, {cfg.steps} steps; "
                   f"writing {cfg.out} from step {first_step + 1} on")
        run_start = time.monotonic()
        for step in range(first_step, cfg.steps):
            policy_group = method.optimizer.param_groups[0]  # the others are a fork's heads
            policy_group["lr"] = warmup_linear(step, cfg)

            # 1) Collect. Each episode has a browser context of its own.
            step_start = time.monotonic()
            batch = method.choose_tasks(tasks, step)
            episodes, all_episodes = play_step(method, batch, env, step, directory)

            # 2) Advantages: which episodes did better than the others of their group?
            rollout_end = time.monotonic()
            rows, measured = method.training_rows(episodes, step)

            # 3) Update: forward, loss, backward, step. From the second update on, rho differs from 1 and
            #    clipping takes effect.
            updates = []  # the metrics of each
            if run.all_max(len(rows)) > 0:  # if one rank has rows, all ranks take part
                n_updates = method.n_updates(step)
                tick = run.ticker("  updates ")
                for i in range(n_updates):
                    tick(f"{i}/{n_updates}")
                    updates.append(method.update(rows))
                tick(f"{n_updates}/{n_updates}", last=True)

            # 4) Log.
            train_end = time.monotonic()
            metrics = step_metrics(step, all_episodes, updates)
            metrics.update(measured)
            metrics["seconds_rollout"] = rollout_end - step_start
            metrics["seconds_train"] = train_end - rollout_end
            metrics["tokens_per_second"] = metrics["tokens_packed"] / metrics["seconds_train"]
            done = step + 1
            seconds_a_step = (train_end - run_start) / (done - first_step)
            minutes_left = seconds_a_step * (cfg.steps - done) / 60
            print_step(metrics, cfg, device, minutes_left)

            # 5) Evaluate.
            if held_out and due(step, cfg.held_out_every, cfg):
                metrics["held_out"] = cfg.held_out
                metrics["held_out_success"] = greedy_success(method, held_out, env)
                run.print0(f"  held out: success {percent(metrics['held_out_success'])}")

            # 6) Save.
            records = [to_record(tau, method.chat, step=step, split="train") for tau in episodes]
            directory.append("trajectories.jsonl", run.gather(records))
            directory.write_metrics(metrics)
            save_everything(method, directory, metrics)

    if run.rank() == 0:
        run.print0(run.with_size(directory.path / "report.html"))
    tasks_flag = "" if cfg.tasks.startswith("sandbox:train") else " --tasks TASKS"
    run.print0(f"saved {cfg.out}; {method.advice.format(out=cfg.out, tasks=tasks_flag)}")


if __name__ == "__main__":
    run.command_line(main, Config, __doc__, {"paper": PAPER}, start="runs/bc")
