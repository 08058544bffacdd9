"""WebAgent-R1 (arXiv 2505.16421): end-to-end reinforcement learning of a web agent with M-GRPO, multi-turn group
relative policy optimization.

For each task the policy plays a group of G episodes in parallel browsers. A finished episode tau_i earns r_i = 1 if the
task is done, else 0. All its tokens share the advantage A_i = (r_i - mean(r)) / std(r), and the policy minimises

    L = - 1/G sum_i  1/|tau_i| sum_j  1/|a_ij| sum_t  [ min(rho A_i, clip(rho, 1-eps, 1+eps) A_i) - beta KL ]

    rho = pi(token | h_j, a_ij,<t) / pi_old(...)   i: episodes, j: turns, t: tokens of a response; h_j: compress.context

In PyTorch's words: the policy pi is the language model, an episode (trajectory tau) one attempt at a task. The reward
comes once, at its end, and no gradient runs through browser or judge; so sampled tokens are made likelier or less
likely, by the gradient of A log pi. The advantage A is the reward less the group's mean (the baseline), in standard
deviations: what went better than the other attempts is raised, the rest lowered. pi_old are the weights that sampled.
Where rho has left 1 +- eps in the direction that A asks for, the clip ends a token's gradient, so that several
optimizer steps on the same episodes cannot run away. KL is the distance to the reference, the policy that training
began with. The entropy in the metrics says how much pi still varies.

    python mgrpo.py                              # the sandbox on a laptop; without --model it runs bc.py's stage first
    torchrun --nproc_per_node 8 mgrpo.py --paper --model runs/bc-qwen3b --tasks train.json

Differs from the paper: groups in which all rewards are equal leave the step whole, their KL term too (the paper's
formula divides by a standard deviation of 0 there); an episode that the environment broke leaves its group instead of
counting as a failure; an episode without exit earns nothing for its answer; all tokens of a batch weigh alike by
default (--loss-norm paper: as above). From the released code: see compress.py.

Symbols below are the paper's: G, tau, a, r, A, rho, eps, beta. Dimension key: N action tokens of a micro-batch.
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see model.py; must come before whatever imports torch

import argparse
import asyncio
import math
import random
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

import bc
from bc import Stop, command_line, resume
from compress import Chat, Row, Trajectory, micro_batches, open_chat, pack, rows
from evaluate import Benchmark, World, load_tasks, newest, open_sites, report, start_run
from model import (all_max, all_sum, clip_gradients, gather, init_dist, load, load_tokenizer, rank, save, save_training,
                   token_logprobs, world_size)
from rollout import actions_help, rollout


@dataclass
class Config(Benchmark):
    # Model and data
    model: str = ""               # warm-started checkpoint; "": runs/bc, made by bc.py's defaults if it is not there
    tasks: str = "sandbox:train"  # or a file of tasks in WebArena's JSON format
    out: str = "runs/mgrpo"       # where everything goes; afterwards this directory is the checkpoint
    # M-GRPO
    steps: int = 15               # one batch of tasks each
    batch: int = 24               # tasks per step, over all ranks
    G: int = 8                    # episodes per task
    eps: float = 0.2              # clip range of the ratio rho
    beta: float = 0.0             # weight of the KL to the start policy; 0 loads no reference, and kl is logged as 0
    updates_per_batch: int = 3    # optimizer steps on the same episodes: from the second on rho leaves 1, the clip acts
    dynamic_sampling: int = 0     # rounds in which further tasks may take the places of groups that teach nothing
    loss_norm: str = "token"      # paper: 1/(G |tau| |a|); token: all alike; constant: 1/(G max_turns max_new_tokens)
    temperature: float = 0.7      # of sampling, and so of training's log-probs; at 1 a policy so small often strays
    # Optimization
    lr: float = 2e-4              # of the highest step
    warmup: int = 3               # steps that lr rises for: Adam's first steps are its largest, and its least informed
    decay: bool = True            # then fall, linearly, to 0 at the end
    clip: float = 1.0             # gradient norm
    max_tokens: int = 8192        # per micro-batch: lower it when memory runs out
    recompute: bool = False       # activation checkpointing
    replicas: int = 1             # groups of ranks that each hold the whole model (HSDP); one a node spares the network
    seed: int = 0
    save_every: int = 5           # steps between checkpoints
    keep: int = 0                 # that many of the newest ones stay, as OUT/step-00005 and so on
    held_out: str = ""            # tasks to try greedily at every checkpoint; the best one stays as OUT/best
    resume: bool = True           # go on where the run in OUT stopped; --no-resume begins it anew
    force: bool = False           # go on also if it was begun with other values
    # Rollout, sized for the sandbox and a CPU
    max_turns: int = 10
    max_new_tokens: int = 64
    max_context: int = 1536
    concurrency: int = 16
    # Preset
    paper: bool = False           # the paper's values (Appendix B) for everything not given on the command line


# Appendix B, but G and max_turns, which are the released code's. steps: one pass over its 647 tasks; concurrency: a
# step's episodes on each of eight ranks.
PAPER = dict(lr=1e-6, batch=16, G=4, beta=0.001, eps=0.2, temperature=1.0, max_context=16384, max_new_tokens=1024,
             max_turns=15, steps=40, updates_per_batch=1, warmup=0, decay=False, loss_norm="paper",
             recompute=True, max_tokens=16384, concurrency=8)


# ------------------------------------------------------------------------------------------ the algorithm: fork here --


def group_advantages(group: list[Trajectory]) -> list[Trajectory]:
    """Sets A_i of a group's valid trajectories; returns those that train: all of the valid ones, or none.

    The baseline is over trajectories, not turns. Broken environments leave the group; fewer than two valid episodes, or
    equal rewards, teach nothing about what to prefer. std is the sample standard deviation, as in the released code.
    """
    valid = [tau for tau in group if tau.status == "ok"]
    r = torch.tensor([tau.reward for tau in valid], dtype=torch.float64)
    if len(valid) < 2 or r.min() == r.max():
        return []
    for tau, A in zip(valid, ((r - r.mean()) / r.std()).tolist()):
        tau.advantage = A
    return valid


def mgrpo_loss(logp_N, logp_old_N, logp_ref_N, A_N, weight_N, eps: float, beta: float):
    """The M-GRPO objective as one weighted sum over tokens.

    All _N are (N,), one number an action token; log-probs in nats; weight_N carries the nested means. Returns (loss, a
    scalar with the gradient; {"kl", "clip_frac"}, sums over the N tokens, which `update` turns into means).
    """
    rho_N = (logp_N - logp_old_N).exp()
    surrogate_N = torch.min(rho_N * A_N, rho_N.clamp(1 - eps, 1 + eps) * A_N)
    delta_N = logp_ref_N - logp_N
    kl_N = delta_N.exp() - delta_N - 1  # k3: unbiased, never negative, 0 where the policies agree
    loss = -(weight_N * (surrogate_N - beta * kl_N)).sum()
    clipped_N = (rho_N - 1) * A_N.sign() > eps  # where the minimum took the clipped, gradient-free branch
    return loss, {"kl": kl_N.sum().item(), "clip_frac": clipped_N.sum().item()}


def weigh(kept: list[list[Trajectory]], chat: Chat, cfg: Config) -> list[Row]:
    """Training rows of the groups that train. Means over groups and tokens are global: counts come from all ranks."""
    actions = sum(len(turn.action_ids) for group in kept for tau in group for turn in tau.turns)
    groups, tokens = all_sum([len(kept), actions]).tolist()
    out = []
    for group in kept:
        for tau in group:
            turns = rows(chat, tau)
            for row in turns:
                row.weight = {"paper": 1 / (groups * len(group) * len(turns) * row.n_action), "token": 1 / tokens,
                              "constant": 1 / (groups * len(group) * cfg.max_turns * cfg.max_new_tokens)}[cfg.loss_norm]
            out += turns
    return out


def update(model, reference, optimizer, kept: list[list[Trajectory]], chat: Chat, cfg: Config, device) -> dict:
    """One optimizer step on the groups of all ranks; returns the step's training metrics.

    A loss or gradient that is not finite makes no step, on all ranks alike: both come out of sums over all of them.
    Then "skipped" names the tasks in the micro-batches of such a loss, or all tasks if only the gradient overflowed.
    """
    batches = micro_batches(weigh(kept, chat, cfg), cfg.max_tokens)
    suspects, sums = set(), dict.fromkeys(("loss", "kl", "clip_frac", "entropy", "logp_gap", "actions", "tokens"), 0.0)
    # Sharded ranks must run equally many forwards: whoever has fewer runs a row of weight zero.
    for i in range(all_max(len(batches))):
        real = i < len(batches)
        batch = batches[i] if real else [Row(trunk=[], prefix=0, leaf=[0, 0], n_action=1, weight=0.0, logps=[0.0])]
        inputs = pack(batch, device)
        expand = lambda value: torch.tensor([v for row in batch for v in value(row)], device=device)
        logp_old_N = expand(lambda row: row.logps)
        A_N = expand(lambda row: [row.advantage] * row.n_action)
        weight_N = expand(lambda row: [row.weight] * row.n_action)
        logp_N, entropy_N = token_logprobs(model, **inputs, temperature=cfg.temperature)
        logp_ref_N = logp_N.detach()
        if reference is not None:
            with torch.no_grad():
                logp_ref_N, _ = token_logprobs(reference, **inputs, temperature=cfg.temperature)
        loss, metrics = mgrpo_loss(logp_N, logp_old_N, logp_ref_N, A_N, weight_N, cfg.eps, cfg.beta)
        (loss * world_size()).backward()  # FSDP averages over ranks; the weights already hold the global counts
        if not math.isfinite(loss.item()):
            suspects |= {row.task_id for row in batch}
        if real:
            gap = (logp_N.detach() - logp_old_N).abs().sum().item()
            for key, value in (metrics | {"loss": loss.item(), "entropy": entropy_N.sum().item(), "logp_gap": gap,
                                          "actions": len(logp_N), "tokens": inputs["tokens_BT"].numel()}).items():
                sums[key] += value
    totals = dict(zip(sums, all_sum(list(sums.values())).tolist()))
    grad_norm, skipped = 0.0, []
    if totals["actions"]:
        grad_norm = clip_gradients(model, cfg.clip)
        if math.isfinite(totals["loss"]) and math.isfinite(grad_norm):
            optimizer.step()
        else:
            skipped = gather(list(suspects)) or gather([tau.task["task_id"] for group in kept for tau in group])
        optimizer.zero_grad()
    per_token = {key: totals[key] / max(totals["actions"], 1) for key in ("kl", "clip_frac", "entropy", "logp_gap")}
    return {"loss": totals["loss"], "grad_norm": grad_norm, "skipped": sorted(set(map(str, skipped))), **per_token,
            "tokens_trained": int(totals["tokens"])}


def task_batch(tasks: list[dict], step: int, cfg: Config) -> list[dict]:
    """The step's tasks: without replacement within a pass, every pass shuffled anew by the seed alone.

    Where a pass ends within a step, the next one begins with tasks that the step does not hold yet.
    """
    start, sequence = step * cfg.batch, []
    while len(sequence) < start + cfg.batch:
        number, begun = len(sequence) // len(tasks), len(sequence) % cfg.batch  # begun: tasks of an open step
        order = random.Random(f"{cfg.seed}/pass {number}").sample(range(len(tasks)), len(tasks))
        held = set(sequence[len(sequence) - begun:])
        fresh = [i for i in order if i not in held][:cfg.batch - begun]
        sequence += fresh + [i for i in order if i not in fresh]
    return [tasks[i] for i in sequence[start:start + cfg.batch]]


def collect(model, chat: Chat, tasks: list[dict], step: int, cfg: Config, world: World, run=asyncio.run, log=None):
    """Plays the step's tasks, whole groups per rank; returns (this rank's trajectories, the groups of them that train).

    None if `run` gave none on some rank (`Stop.run`): the ranks agree, and all drop the step.
    With --dynamic-sampling, further tasks take the places of groups that teach nothing, for so many rounds at most.
    Which tasks depends on the seed, the step and the number missing on all ranks together, so that the ranks agree.
    """
    batch, played, trajectories, kept = task_batch(tasks, step, cfg), [], [], []
    for extra in range(1 + cfg.dynamic_sampling):
        mine = batch[rank()::world_size()]
        episodes = run(rollout(model, chat, mine, world.score, cfg, group=cfg.G, seed=f"{cfg.seed}/{step}",
                               temperature=cfg.temperature, log=log, enter=world.enter))
        if all_max(episodes is None):
            return None
        groups = [episodes[i:i + cfg.G] for i in range(0, len(episodes), cfg.G)]
        kept += [group for group in map(group_advantages, groups) if group]
        trajectories, played = trajectories + episodes, played + batch
        missing, rest = cfg.batch - int(all_sum([len(kept)])[0]), [task for task in tasks if task not in played]
        batch = random.Random(f"{cfg.seed}/{step}/extra {extra}").sample(rest, min(missing, len(rest)))
        if not batch:
            break
    return trajectories, kept


def rollout_metrics(trajectories: list[Trajectory], kept: list[list[Trajectory]]) -> dict:
    """What the step's episodes looked like, over all ranks. success_rate counts every episode, refills included."""
    ok = [tau for tau in trajectories if tau.status == "ok"]
    turns = [turn for tau in ok for turn in tau.turns]
    response = sum(len(turn.action_ids) for turn in turns)
    sums = {"episodes": len(ok), "reward": sum(tau.reward for tau in ok), "turns": len(turns), "response": response,
            "tokens": response + sum(len(turn.observation_ids) for turn in turns)}
    counts = {"groups_kept": len(kept), "groups_played": sum(tau.member == 0 for tau in trajectories),
              "env_errors": len(trajectories) - len(ok), "env_retries": sum(bool(tau.fault) for tau in trajectories),
              "truncated": sum(not turn.ended for turn in turns),
              "invalid_actions": sum(bool(turn.error) and not turn.action for turn in turns),
              "pages_cut": sum(turn.page_cut for turn in turns)}
    total = dict(zip([*sums, *counts], all_sum([*sums.values(), *counts.values()]).tolist()))
    n, n_turns = max(total["episodes"], 1), max(total["turns"], 1)
    return {"reward": total["reward"] / n, "success_rate": total["reward"] / n, "turns": total["turns"] / n,
            "response_tokens": total["response"] / n_turns, "trajectory_tokens": total["tokens"] / n,
            **{name: int(total[name]) for name in counts}}


# ------------------------------------------------------------------------------------------------------ the script --


def warm_start(cfg: Config, log) -> str:
    """The checkpoint to start from; without one, bc.py's stage is run first."""
    if cfg.model:
        return cfg.model
    if not (Path("runs/bc") / "model.safetensors").exists():
        log("no --model given and no runs/bc yet: running behavior cloning first (python bc.py)")
        bc.main(bc.Config(seed=cfg.seed))
    return "runs/bc"


def learning_rate(step: int, cfg: Config) -> float:
    """Rises over cfg.warmup steps, then stays, or falls linearly."""
    rise = (step + 1) / max(cfg.warmup, 1)
    fall = (cfg.steps - step) / max(cfg.steps - cfg.warmup, 1) if cfg.decay else 1.0
    return cfg.lr * min(1.0, rise, fall)


def alarms(line: dict, device) -> list[str]:
    """Signs of the usual ends of such runs. They are printed and stop nothing: a person should look."""
    bound = 1e-2 if device.type == "cuda" else 1e-3  # bfloat16 there, float32 here: both far above rounding
    signs = {f"logp_gap above {bound:g}: training does not score what was sampled": line["logp_gap"] > bound,
             # 50 tokens then vary by one nat: the members of a group do the same, and no group teaches
             "entropy below 0.02 nats a token: the policy has all but stopped trying things": line["entropy"] < 0.02,
             "kl above 1 nat a token: little is left of the policy it started from": line["kl"] > 1}
    shown = [sign for sign, shows in signs.items() if shows and line["groups_kept"]]
    skipped = f"no update, loss or gradient is not finite: episodes of tasks {', '.join(line['skipped'])}"
    return shown + [skipped] * bool(line["skipped"])


def held_out(model, chat: Chat, tasks: list[dict], cfg: Config, world: World, run) -> float | None:
    """Greedy success rate on tasks, over all ranks; None if a signal came."""
    world.reset()
    mine = tasks[rank()::world_size()]
    episodes = run(rollout(model, chat, mine, world.score, cfg, temperature=0.0, enter=world.enter))
    if all_max(episodes is None):
        return None
    successes, n = all_sum([sum(tau.reward for tau in episodes), sum(tau.status == "ok" for tau in episodes)]).tolist()
    return successes / max(n, 1)


def keep_checkpoint(save_as, step: int, rate: float | None, cfg: Config):
    """The checkpoint of a step as OUT/step-N, --keep of them; and as OUT/best if none of this run did better held out.

    Rank 0 decides, for ranks that looked for themselves could see different files, and saving takes them all.
    """
    out = Path(cfg.out)
    if cfg.keep:
        save_as(out / f"step-{step:05}", {})
        if rank() == 0:  # those beyond this step are of an earlier run in OUT
            numbered = sorted(out.glob("step-[0-9][0-9][0-9][0-9][0-9]"))
            kept = [path for path in numbered if path.name <= f"step-{step:05}"][-cfg.keep:]
            for old in set(numbered) - set(kept):
                shutil.rmtree(old)
    better = False
    if rank() == 0 and rate is not None:
        lines, _ = newest(out / "metrics.jsonl", 10**6, 10**9)  # of this run alone: start_run drops all others
        better = all(rate > line.get("held_out_success", -1) for line in lines[:-1])
    if all_max(int(better)):
        save_as(out / "best", {"step": step, "held_out_success": rate})


def open_training(cfg: Config, device):
    """(policy, reference or None, optimizer), sharded over the ranks, with float32 masters."""
    model = load(cfg.model, torch.float32, device, sharded=True, replicas=cfg.replicas)
    model.recompute = cfg.recompute
    reference = None
    if cfg.beta:
        reference = load(cfg.model, torch.float32, device, sharded=True, replicas=cfg.replicas).requires_grad_(False)
    return model, reference, torch.optim.AdamW(model.parameters(), cfg.lr, betas=(0.9, 0.99), weight_decay=0.0)


def main(cfg: Config):
    if cfg.loss_norm not in ("paper", "token", "constant"):
        raise ValueError(f"--loss-norm {cfg.loss_norm}: use paper, token or constant.")
    device = init_dist()
    log = print if rank() == 0 else (lambda *_: None)
    torch.manual_seed(cfg.seed)
    cfg = replace(cfg, model=warm_start(cfg, log))
    chat = open_chat(load_tokenizer(cfg.model), cfg.model, actions_help())
    model, reference, optimizer = open_training(cfg, device)
    first = resume(cfg, model, optimizer, {"keep", "held_out", "reset_url", *(["steps"] if not cfg.decay else [])})
    save_state = lambda step: save_training(Path(cfg.out) / "state", model, optimizer,
                                            {"step": step, "config": asdict(cfg)})
    run = start_run(cfg, device, model.config.raw, first)
    save_as = lambda path, more: save(model, path, like=cfg.model, run=run.config | more)
    with open_sites(",".join(filter(None, (cfg.tasks, cfg.held_out)))) as urls, Stop() as stop:
        world = World(cfg, urls, cfg.out)
        tasks = load_tasks(cfg.tasks, urls, judge=world.judge is not None)
        held_out_tasks = load_tasks(cfg.held_out, urls, judge=world.judge is not None) if cfg.held_out else []
        if cfg.batch > len(tasks):  # a task twice in a step would play the same episodes twice
            raise ValueError(f"--batch {cfg.batch}: {cfg.tasks} holds {len(tasks)} tasks; use that many or fewer.")
        log(f"{len(tasks)} tasks, {cfg.batch} x G={cfg.G} episodes a step, {cfg.steps} steps; writing {cfg.out}"
            + (f", which goes on at step {first + 1}" if first else ""))
        failed_steps = 0  # in a row
        for step in range(first, cfg.steps):
            # Collect, each episode in a browser context and a world of its own. Advantages: who beat the group?
            began = time.monotonic()
            world.reset()
            collected = collect(model, chat, tasks, step, cfg, world, stop.run, lambda line: log("  " + line))
            if collected is None:
                save_state(step)
                log(f"stopped in step {step + 1}, which was dropped; the same command goes on from there")
                sys.exit(128 + (stop.asked or signal.SIGTERM))  # 0: another rank got the signal
            trajectories, kept = collected
            rolled = time.monotonic()
            # Update. What the first pass measures is on-policy: its gap is that between rollout and training.
            for parameters in optimizer.param_groups:
                parameters["lr"] = learning_rate(step, cfg)
            passes = [update(model, reference, optimizer, kept, chat, cfg, device)
                      for _ in range(cfg.updates_per_batch)]
            trained = passes[0] | {key: passes[-1][key] for key in ("clip_frac", "kl", "skipped")}
            seconds = time.monotonic() - rolled
            saving = step % cfg.save_every == cfg.save_every - 1 or step == cfg.steps - 1
            rate = held_out(model, chat, held_out_tasks, cfg, world, stop.run) if saving and held_out_tasks else None
            # Log.
            line = {"step": step, **rollout_metrics(trajectories, kept), **trained, "seconds_rollout": rolled - began,
                    "seconds_train": seconds,
                    "tokens_per_second": cfg.updates_per_batch * trained["tokens_trained"] / seconds}
            line |= {} if rate is None else {"held_out_success": rate}
            run.write(line)
            run.write_trajectories(gather([tau.record(chat, step=step, split="train") for tau in trajectories]))
            log(f"step {step + 1}/{cfg.steps}  success {line['success_rate']:.1%}  turns {line['turns']:.1f}  groups "
                f"{line['groups_kept']}/{cfg.batch}  entropy {line['entropy']:.3f}  gap {line['logp_gap']:.1e}  "
                f"rollout {line['seconds_rollout']:.0f} s  train {line['seconds_train']:.0f} s"
                + (f"  held out {rate:.1%}" if rate is not None else ""))
            for sign in alarms(line, device):
                log(f"  ! {sign}")
            failed_steps = failed_steps + 1 if line["skipped"] else 0
            if failed_steps == 3:
                raise ValueError("three steps in a row had a loss or gradient that is not finite; lower --lr, or look "
                                 f"at the episodes in {cfg.out}/trajectories.jsonl. The last saved state is unharmed.")
            # Save. The training state last: who finds it finds all else in place.
            if saving:
                save_as(cfg.out, {})
                keep_checkpoint(save_as, step + 1, rate, cfg)
                if rank() == 0:
                    report(cfg.out)
                save_state(step + 1)
    log(f"saved {cfg.out}; next: python evaluate.py --model {cfg.out} --tasks {cfg.tasks.replace('train', 'test')}")


def parse_args() -> Config:  # bc.py, evaluate.py and mgrpo.py repeat these lines, so that each forks alone
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in fields(Config):
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.type}
        parser.add_argument("--" + f.name.replace("_", "-"), default=f.default, help=f"default: {f.default!r}", **kind)
    if parser.parse_known_args()[0].paper:
        parser.set_defaults(**PAPER)
    return Config(**vars(parser.parse_args()))


if __name__ == "__main__":
    command_line(main, parse_args)
