"""WebAgent-R1 (arXiv 2505.16421): end-to-end reinforcement learning of a web agent with M-GRPO,
multi-turn group relative policy optimization.

For each task the policy plays a group of G episodes in parallel. A finished episode tau_i
earns r_i = 1 if the task is done, else 0. All its tokens share the advantage
A_i = (r_i - mean(r)) / std(r). With h_j from compress.context, the policy minimizes

    L = - 1/G sum_i 1/|tau_i| sum_j 1/|a_ij| sum_t
            [ min(rho A_i, clip(rho, 1-eps, 1+eps) A_i) - beta KL ]

    rho = pi(token | h_j, a_ij,<t) / pi_old(...)      i: episodes, j: turns, t: tokens of a response

In PyTorch terms: the policy pi is the language model, and an episode (trajectory tau) is one
attempt at a task. The reward comes once, at the end, and no gradient runs through browser or judge.
Instead the gradient of A log pi makes sampled tokens more or less likely: the advantage A compares
the reward with the group's mean (the baseline), in standard deviations, so attempts that went
better than the others become more likely. pi_old are the weights that sampled. Clipping ends a
token's gradient once rho has left 1 +- eps in the direction that A asks for; --max-change can bound
the whole step. KL is the distance to the reference, the policy that training began with. The entropy in
the metrics says how much pi still varies.

    python mgrpo.py                   # the sandbox on a laptop; clones the experts first (bc.py)
    torchrun --nproc_per_node 8 mgrpo.py --paper --model runs/bc-qwen3b --tasks train.json

Differs from the paper: a group with equal rewards leaves the step, with its KL term (the formula
would divide by a standard deviation of 0). An episode broken by the environment is dropped from its
group, not counted as a failure. An episode without exit earns nothing for its answer. By default
all tokens of a batch weigh the same (--loss-norm); with --paper they do not. compress.py says how
the released code differs.

Symbols are the paper's: G, tau, a, r, A, rho, eps, beta. Dimension key: N action tokens.
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see model.py; must precede torch

import asyncio
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import bc
from bc import count_skipped, optimizer_step
from compress import Chat, Row, Trajectory, micro_batches, open_chat, pack, rows
from evaluate import (Benchmark, Environment, command_line, evaluate, newest, report, resume,
                      start_run, with_size)
from model import (all_max, all_sum, computing_dtype, gather, init_dist, load, load_tokenizer,
                   rank, save, save_training, token_logprobs, without_adapters, world_size)
from rollout import actions_help, rollout
from worlds import load_tasks, open_sites
from worlds.onlooker import ticker


@dataclass
class Config(Benchmark):
    # Model and data
    model: str = ""              # warm-started checkpoint; "": runs/bc, made by bc.py if missing
    tasks: str = "sandbox:train"  # sandbox:SPLIT[:N], or WebArena task files; commas
    out: str = "runs/mgrpo"      # the run's directory; at the end it is also the checkpoint
    # M-GRPO
    steps: int = 18              # one batch of tasks each
    batch: int = 24              # tasks per step, over all ranks
    G: int = 8                   # episodes per task
    eps: float = 0.2             # clip range of the ratio rho
    beta: float = 0.0            # weight of the KL; 0 loads no reference, and kl is logged as 0
    updates_per_batch: int = 3   # optimizer steps per batch of episodes; clipping acts from the 2nd
    max_change: float = 0.0      # bound on mean |log rho|; 0: none. bfloat16: 0.01 to 0.05
    turn_credit: float = 0.0     # weight of the advantages of turns (GiGPO); 0: one A_i an episode
    loss_norm: str = "token"     # paper: as in L; token: all tokens alike; constant: fixed lengths
    temperature: float = 0.7     # of sampling and training's log-probs; at 1 a small policy strays
    # Optimization
    lr: float = 0.0              # peak; 0: 3e-4, or 1e-6 above 10 million parameters
    warmup: float = 0.2          # fraction of the steps that warm up: Adam's first steps are noisy
    decay: bool = True           # then lr falls, linearly, to 0 at the end
    clip: float = 1.0            # largest gradient norm
    max_tokens: int = 8192       # per micro-batch: lower it when memory runs out
    recompute: bool = False      # activation checkpointing
    lora: int = 0                # rank of the LoRA adapters (only they train); 0: train all weights
    replicas: int = 1            # groups of ranks that each hold the whole model (HSDP): one a node
    seed: int = 0                # of the order of tasks and of sampling
    held_out: str = ""           # tasks to evaluate greedily on the way; OUT/best keeps the best
    held_out_every: int = 5      # steps between these evaluations
    save_every: int = 1          # steps between saves of weights and training state
    keep_every: int = 0          # steps between checkpoints that stay, as OUT/step-00010; 0: none
    resume: bool = True          # continue the run in OUT from its last save, if there is one
    force: bool = False          # continue even if that run has other settings
    # Rollout, sized for the sandbox and a CPU
    max_turns: int = 10          # responses per episode
    max_new_tokens: int = 64     # per response
    max_context: int = 1536      # tokens of history, page and response together
    paper: bool = False          # the paper's values (Appendix B) for all flags not given


# Appendix B; G and max_turns are the released code's. steps: one pass over its 647 tasks.
# concurrency: a step's episodes on each of eight ranks. save_every: a 3B model's state is 37 GB.
PAPER = dict(lr=1e-6, batch=16, G=4, beta=0.001, eps=0.2, temperature=1.0, max_context=16384,
             max_new_tokens=1024, max_turns=15, steps=40, updates_per_batch=1, warmup=0.0,
             decay=False, loss_norm="paper", recompute=True, max_tokens=16384, concurrency=8,
             save_every=5, max_change=0.0, turn_credit=0.0)


# ---------------------------------------------------------------------- the algorithm: fork here --


def group_advantages(group: list[Trajectory], turn_credit: float = 0.0) -> list[Trajectory]:
    """Sets A_i of a group's valid trajectories; returns those that train: all valid ones, or none.

    The baseline is over trajectories, not turns. Episodes that the environment broke leave the
    group. Fewer than two valid episodes, or equal rewards, teach nothing about what to prefer. std
    is the sample standard deviation, as in the released code.
    """
    valid = [tau for tau in group if tau.status == "ok"]
    r = torch.tensor([tau.reward for tau in valid], dtype=torch.float64)
    if len(valid) < 2 or r.min() == r.max():
        return []
    for tau, A in zip(valid, ((r - r.mean()) / r.std()).tolist()):
        tau.advantage = A
    turn_advantages(valid, turn_credit)
    return valid


def turn_advantages(group: list[Trajectory], weight: float, gamma: float = 0.95):
    """Sets what single turns add to A_i: credit within an episode (GiGPO, arXiv 2505.10978).

    Turns that saw the same page, text for text, form a group of their own. Its members compare
    R = gamma^(turns after it) r_i, so a useless click costs even in an episode that succeeds.
    """
    pages = {}
    for tau in group:
        for after, turn in enumerate(reversed(tau.turns)):
            pages.setdefault(turn.observation, []).append((turn, gamma ** after * tau.reward))
    for same in pages.values():
        R = torch.tensor([value for _, value in same], dtype=torch.float64)
        if R.min() < R.max():
            for (turn, _), A in zip(same, ((R - R.mean()) / R.std()).tolist()):
                turn.advantage = weight * A


def mgrpo_loss(logp_N, logp_old_N, logp_ref_N, A_N, weight_N, eps: float, beta: float):
    """The M-GRPO objective as one weighted sum over tokens.

    All _N are (N,), one number per action token; log-probs in nats; weight_N carries the nested
    means. Returns (loss, a scalar with the gradient; {"kl", "clip_frac"}, sums over the N tokens).
    """
    rho_N = (logp_N - logp_old_N).exp()
    surrogate_N = torch.min(rho_N * A_N, rho_N.clamp(1 - eps, 1 + eps) * A_N)
    delta_N = logp_ref_N - logp_N
    kl_N = delta_N.exp() - delta_N - 1  # k3: unbiased, never negative, 0 where the policies agree
    loss = -(weight_N * (surrogate_N - beta * kl_N)).sum()
    clipped_N = (rho_N - 1) * A_N.sign() > eps  # the minimum took the clipped, gradient-free branch
    return loss, {"kl": kl_N.sum().item(), "clip_frac": clipped_N.sum().item()}


def weigh(kept: list[list[Trajectory]], chat: Chat, cfg: Config) -> list[Row]:
    """Training rows of the groups that train. Means count the groups and tokens of all ranks."""
    actions = sum(len(turn.action_ids) for group in kept for tau in group for turn in tau.turns)
    groups, tokens = all_sum([len(kept), actions]).tolist()
    longest, out = cfg.max_turns * cfg.max_new_tokens, []
    for group in kept:
        for tau in group:
            turns = rows(chat, tau)
            for row in turns:
                row.weight = {"paper": 1 / (groups * len(group) * len(turns) * row.n_action),
                              "token": 1 / tokens,
                              "constant": 1 / (groups * len(group) * longest)}[cfg.loss_norm]
            out += turns
    return out


def per_token(batch: list[Row], value, device):
    """value(row), a number for each action token of a row, for all rows of a micro-batch: (N,)."""
    return torch.tensor([number for row in batch for number in value(row)], device=device)


def loss_of(batch: list[Row], logp_N, logp_ref_N, cfg: Config):
    """`mgrpo_loss` of a micro-batch."""
    logp_old_N = per_token(batch, lambda row: row.logps, logp_N.device)
    A_N = per_token(batch, lambda row: [row.advantage] * row.n_action, logp_N.device)
    weight_N = per_token(batch, lambda row: [row.weight] * row.n_action, logp_N.device)
    return mgrpo_loss(logp_N, logp_old_N, logp_ref_N, A_N, weight_N, cfg.eps, cfg.beta)


def update(model, reference, optimizer, rows: list[Row], cfg: Config, device, loss_of=loss_of,
           log=None) -> dict:
    """One optimizer step on the rows of all ranks, or only its metrics if there is no optimizer."""
    batches = micro_batches(rows, cfg.max_tokens)
    padding = Row(trunk=[], prefix=0, leaf=[0, 0], n_action=1, weight=0.0, logps=[0.0])
    averaged = ("kl", "clip_frac", "entropy", "logp_gap")
    sums, largest = dict.fromkeys(("loss", "actions", "tokens", *averaged), 0.0), 0.0
    # Sharded ranks must run equally many forwards: a rank with fewer runs a row of weight zero.
    forwards = all_max(len(batches))
    for i in range(forwards):
        real = i < len(batches)
        batch = batches[i] if real else [padding]
        inputs = pack(batch, device)
        logp_N, entropy_N = token_logprobs(model, **inputs, temperature=cfg.temperature)
        for row, logp in zip(batch, logp_N.detach().split([row.n_action for row in batch])):
            if row.logps is None:  # a fork replays it: its first pass stands in for the rollout
                row.logps = logp.tolist()
        logp_ref_N = logp_N.detach()
        if reference is not None:
            with torch.no_grad(), without_adapters(reference):
                logp_ref_N, _ = token_logprobs(reference, **inputs, temperature=cfg.temperature)
        loss, metrics = loss_of(batch, logp_N, logp_ref_N, cfg)
        if optimizer:
            (loss * world_size()).backward()  # FSDP averages over ranks; weights count all ranks
        if real:
            gap_N = (logp_N.detach() - per_token(batch, lambda row: row.logps, device)).abs()
            largest = max(largest, gap_N.max().item())
            metrics |= {"loss": loss.item(), "entropy": entropy_N.sum().item(),
                        "logp_gap": gap_N.sum().item(), "actions": len(logp_N),
                        "tokens": inputs["tokens_BT"].numel()}
            sums = {key: sums[key] + metrics[key] for key in sums}
        if log:
            log((i + 1) / forwards)  # the share that is done
    sums = dict(zip(sums, all_sum(list(sums.values())).tolist()))
    grad_norm, skipped = 0.0, False
    if optimizer and sums["actions"]:
        grad_norm, skipped = optimizer_step(model, optimizer, sums["loss"], cfg.clip)
    return {"loss": sums["loss"], "grad_norm": grad_norm, "skipped": int(skipped),
            **{key: sums[key] / max(sums["actions"], 1) for key in averaged},
            "largest_gap": all_max(largest), "tokens_trained": int(sums["tokens"])}


def train(model, reference, optimizer, kept, chat: Chat, cfg: Config, device, weigh=weigh,
          loss_of=loss_of) -> dict:
    """All updates on a batch of episodes; returns the step's metrics.

    Clipping only zeroes gradients, from the second update on, so it does not bound the step.
    max_change does: if the mean |log rho| exceeds it, the weights move only part of the way.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    start = [weight.detach().clone() for weight in weights] if cfg.max_change else []
    rows = weigh(kept, chat, cfg)
    tick, n = ticker("  updates ") if rank() == 0 else lambda line: None, cfg.updates_per_batch
    passes = [update(model, reference, optimizer, rows, cfg, device, loss_of,
                     lambda share, i=i: tick(f"({100 * (i + share) / n:.0f}%)")) for i in range(n)]
    measured, share = passes[1:], 1.0  # each pass measures what the updates before it have changed
    if cfg.max_change:
        with torch.no_grad():
            measured.append(update(model, reference, None, rows, cfg, device, loss_of))
            if measured[-1]["logp_gap"] > cfg.max_change:
                share = cfg.max_change / measured[-1]["logp_gap"]
                for weight, old in zip(weights, start):
                    weight.lerp_(old, 1 - share)
    return passes[0] | {"clip_frac": passes[-1]["clip_frac"], "kl": passes[-1]["kl"],
                        "skipped": sum(one["skipped"] for one in passes), "share": share,
                        "change": [one["logp_gap"] for one in measured],
                        "largest_change": [one["largest_gap"] for one in measured],
                        "tokens_trained": sum(one["tokens_trained"] for one in passes)}


def task_batch(tasks: list[dict], step: int, cfg: Config) -> list[dict]:
    """The step's tasks. Every step has its share of each template, so success rates are comparable.

    Each pass over the tasks is shuffled by the seed and drops its last, incomplete batch. So no
    step holds a task twice: that would play the same episodes twice.
    """
    number, k = divmod(step, len(tasks) // cfg.batch)
    templates = {}
    for task in random.Random(f"{cfg.seed}/pass {number}").sample(tasks, len(tasks)):
        templates.setdefault(task.get("intent_template_id"), []).append(task)
    # A template's n tasks stand 1/n of the pass apart; each template has a start of its own.
    spread = [((j + t / len(templates)) / len(own), task)
              for t, own in enumerate(templates.values()) for j, task in enumerate(own)]
    order = [task for _, task in sorted(spread, key=lambda pair: pair[0])]
    return order[k * cfg.batch:(k + 1) * cfg.batch]


def collect(model, chat: Chat, tasks: list[dict], cfg: Config, env: Environment, seed: str, log=None,
            **more):
    """Plays tasks, whole groups per rank; returns this rank's (trajectories, groups that train)."""
    mine, settings = tasks[rank()::world_size()], replace(cfg)
    settings.onlooker = env.onlooker(tasks, cfg.G, seed)
    episodes = asyncio.run(rollout(model, chat, mine, env.score, settings, group=cfg.G, seed=seed,
                                   temperature=cfg.temperature, log=log, enter=env.enter, **more))
    groups = [episodes[i:i + cfg.G] for i in range(0, len(episodes), cfg.G)]
    kept = (group_advantages(group, cfg.turn_credit) for group in groups)
    return episodes, [group for group in kept if group]


def rollout_metrics(trajectories: list[Trajectory], kept: list[list[Trajectory]]) -> dict:
    """The step's episodes in numbers, over all ranks."""
    ok = [tau for tau in trajectories if tau.status == "ok"]
    turns = [turn for tau in ok for turn in tau.turns]
    response = sum(len(turn.action_ids) for turn in turns)
    observation = sum(len(turn.observation_ids) for turn in turns)
    sums = {"episodes": len(ok), "reward": sum(tau.reward for tau in ok), "turns": len(turns),
            "response": response, "tokens": response + observation}
    counts = {"groups_kept": len(kept), "env_errors": len(trajectories) - len(ok),
              "env_retries": sum(bool(tau.fault) for tau in trajectories),
              "truncated": sum(not turn.ended for turn in turns),
              "invalid_actions": sum(bool(turn.error) and not turn.action for turn in turns),
              "failed_actions": sum(bool(turn.error) and bool(turn.action) for turn in turns),
              "pages_cut": sum(turn.page_cut for turn in turns)}
    total = dict(zip([*sums, *counts], all_sum([*sums.values(), *counts.values()]).tolist()))
    n = max(total["episodes"], 1)
    return {"reward": total["reward"] / n, "success_rate": total["reward"] / n,
            "turns": total["turns"] / n, "response_tokens": total["response"] / max(total["turns"], 1),
            "trajectory_tokens": total["tokens"] / n, **{name: int(total[name]) for name in counts}}


# ------------------------------------------------------------------------------------ the script --


def warm_start(cfg: Config, log) -> str:
    """The checkpoint to start from. Runs bc.py's stage if there is none."""
    if not cfg.model and not (Path("runs/bc") / "model.safetensors").exists():
        log("no --model given and no runs/bc yet: running behavior cloning first (python bc.py)")
        bc.main(bc.Config(seed=cfg.seed, viewport_only=cfg.viewport_only, text_only=cfg.text_only,
                          max_page_chars=cfg.max_page_chars))
    return cfg.model or "runs/bc"


def learning_rate(step: int, cfg: Config) -> float:
    """Linear warm-up; then constant, or a linear fall to zero."""
    warm = round(cfg.warmup * cfg.steps)
    rise = (step + 1) / max(warm, 1)
    fall = (cfg.steps - step) / max(cfg.steps - warm, 1) if cfg.decay else 1.0
    return cfg.lr * min(1.0, rise, fall)


def greedy_success(model, chat: Chat, tasks: list[dict], cfg: Config, env: Environment) -> float:
    """Success rate of greedy episodes on tasks, over all ranks."""
    env.reset()
    tick = ticker("  held out: ") if rank() == 0 else None
    ok = [tau for tau in evaluate(model, chat, tasks, cfg, env, log=tick) if tau.status == "ok"]
    return sum(tau.reward for tau in ok) / max(len(ok), 1)


def is_best(rate: float, out: Path) -> bool:
    """Whether no earlier step of the run did as well. Rank 0 decides: others may not see the file."""
    lines, _ = newest(out / "metrics.jsonl", 10**6, 10**9)
    ahead = all(rate > line.get("held_out_success", -1) for line in lines[:-1])
    return bool(all_max(int(rank() == 0 and ahead)))


def open_training(cfg: Config, device):
    """(policy, reference or None, optimizer), sharded over the ranks, with float32 masters."""
    dtype = computing_dtype(device) if cfg.lora else torch.float32
    opened = lambda: load(cfg.model, dtype, device, sharded=True, replicas=cfg.replicas, lora=cfg.lora)
    model, reference = opened(), None
    model.recompute = cfg.recompute
    if cfg.beta:  # with LoRA the policy itself, see `without_adapters`
        reference = model if cfg.lora else opened().requires_grad_(False)
    # 0.99 averages the second moment over 100 steps, not bc.py's 50: these gradients are noisier.
    optimizer = torch.optim.AdamW(model.parameters(), cfg.lr, betas=(0.9, 0.99), weight_decay=0.0)
    return model, reference, optimizer


def main(cfg: Config, open_training=open_training, task_batch=task_batch, collect=collect, train=train):
    """The script. A fork passes the functions in which it differs; see forks/."""
    if cfg.loss_norm not in ("paper", "token", "constant"):
        raise ValueError(f"--loss-norm {cfg.loss_norm}: use paper, token or constant.")
    if not 0 <= cfg.warmup <= 1:
        raise ValueError(f"--warmup {cfg.warmup:g}: it is a share of the steps, from 0 to 1.")
    device, out = init_dist(), Path(cfg.out)
    log = print if rank() == 0 else (lambda *_: None)
    cfg = replace(cfg, model=warm_start(cfg, log))
    chat = open_chat(load_tokenizer(cfg.model), cfg.model, actions_help())
    model, reference, optimizer = open_training(cfg, device)
    cfg = replace(cfg, lr=cfg.lr or bc.lr_by_size(model, 3e-4, 1e-6) * (10 if cfg.lora else 1))
    free = {"held_out", "held_out_every", "keep_every", "reset_url"}
    free |= set() if cfg.decay or cfg.warmup else {"steps"}  # lr depends on it through these two
    first = resume(cfg, model, optimizer, free)
    run = start_run(cfg, device, model.config.raw, first)
    save_as = lambda path, **more: save(model, path, like=cfg.model, run=run.config | more)
    with open_sites(",".join(filter(None, (cfg.tasks, cfg.held_out)))) as sites:
        env = Environment(cfg, sites, out)
        read = lambda spec: load_tasks(spec, sites, judge=env.judge is not None, log=log)
        tasks, held_out = read(cfg.tasks), read(cfg.held_out) if cfg.held_out else []
        if cfg.batch > len(tasks):  # a task twice in a step would play the same episodes twice
            raise ValueError(f"--batch {cfg.batch}: {cfg.tasks} holds only {len(tasks)} tasks.")
        log(f"{len(tasks)} tasks, {cfg.batch} x G={cfg.G} episodes a step, {cfg.steps} steps; "
            f"writing {out} from step {first + 1} on")
        skipped, start = 0, time.monotonic()  # skipped: updates in a row
        for step in range(first, cfg.steps):
            due = lambda every: every and (step + 1) % every == 0 or step == cfg.steps - 1
            # Collect, each episode in a browser context of its own. Advantages: who beat the group?
            began = time.monotonic()
            env.reset()
            batch = task_batch(tasks, step, cfg)
            tick = ticker(f"step {step + 1}/{cfg.steps}: ") if rank() == 0 else None
            trajectories, kept = collect(model, chat, batch, cfg, env, f"{cfg.seed}/{step}", tick)
            rolled = time.monotonic()
            # Update. The first pass is on-policy: its gap is that between rollout and training.
            optimizer.param_groups[0]["lr"] = learning_rate(step, cfg)
            trained = train(model, reference, optimizer, kept, chat, cfg, device)
            seconds = time.monotonic() - rolled
            left = (time.monotonic() - start) / (step + 1 - first) * (cfg.steps - step - 1)
            # Log.
            line = {"step": step, **rollout_metrics(trajectories, kept), **trained,
                    "seconds_rollout": rolled - began, "seconds_train": seconds,
                    "tokens_per_second": trained["tokens_trained"] / seconds}
            log(f"step {step + 1}/{cfg.steps}  success {line['success_rate']:.1%}  "
                f"turns {line['turns']:.1f}  groups {line['groups_kept']}/{cfg.batch}  "
                f"entropy {line['entropy']:.3f}  gap {line['logp_gap']:.1e}  "
                f"rollout {rolled - began:.0f} s  train {seconds:.0f} s  {left / 60:.0f} min left")
            if line["logp_gap"] > (0.1 if device.type == "cuda" else 1e-3):  # bfloat16, float32
                log("  ! logp_gap is far above rounding: training does not score what was sampled")
            if line["share"] < 1:
                log(f"  ! --max-change {cfg.max_change:g}: the weights moved {line['share']:.0%} of the way")
            # Evaluate.
            if held_out and due(cfg.held_out_every):
                line["held_out_success"] = greedy_success(model, chat, held_out, cfg, env)
                log(f"  held out: success {line['held_out_success']:.1%}")
            run.write(line)
            records = [tau.to_json(chat, step=step, split="train") for tau in trajectories]
            run.append("trajectories.jsonl", gather(records))
            skipped = count_skipped(skipped, line["skipped"] > 0, log)
            # Save. The training state comes last: where it is found, all else is in place.
            if "held_out_success" in line and is_best(line["held_out_success"], out):
                save_as(out / "best", step=step + 1, held_out_success=line["held_out_success"])
            if cfg.keep_every and (step + 1) % cfg.keep_every == 0:
                save_as(out / f"step-{step + 1:05}")
            if due(cfg.save_every):
                save_as(out)
                if rank() == 0:
                    report(out)
                save_training(out / "state", model, optimizer, {"step": step + 1, "config": asdict(cfg)})
    if rank() == 0 and (page := out / "report.html").exists():
        print(with_size(page))
    log(f"saved {out}; next: python evaluate.py --model {out} --tasks {cfg.tasks.replace('train', 'test')}")


if __name__ == "__main__":
    command_line(main, Config, __doc__, {"paper": PAPER}, start="runs/bc")
