"""Behavior cloning, the paper's first stage: from demonstrations to a policy that RL starts from.

    L = - E_(h_t, a_t) log pi(a_t | h_t)          (paper §3.1; the mean is over action tokens)

compress.py builds h_t exactly as in a rollout: a page is whole only in the turn that acts on it.
Only the tokens of responses count in the loss.

    python bc.py                                   # clone the sandbox's experts -> runs/bc
    python bc.py --data runs/x/trajectories.jsonl  # or the successful trajectories of a file
    python bc.py --data web_policy_sft.json        # or WebRL's demonstrations on WebArena-Lite
    torchrun --nproc_per_node 8 bc.py --model Qwen/Qwen2.5-3B-Instruct --paper --data demos.jsonl
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see model.py; must precede torch

import asyncio
import json
import math
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from compress import (PLACEHOLDER, Chat, Row, Trajectory, format_response, micro_batches, open_chat,
                      pack, replay, rows)
from evaluate import Run, command_line, forget, resume, score, start_run
from model import (all_max, all_sum, clip_gradients, computing_dtype, gather, init_dist, load,
                   load_tokenizer, rank, reading, save, save_training, token_logprobs, world_size)
from rollout import ActionError, Settings, actions_help, parse, play
from worlds import sandbox
from worlds.onlooker import ticker
from worlds.webarena import join_steps, read_step, site_urls


@dataclass
class Config(Settings):
    # Model and data
    model: str = "worlds/base"   # checkpoint directory or hub id to start from
    data: str = "experts"        # "experts": record the sandbox's; else a trajectory or WebRL file
    demos: int = 38              # demonstrations to record: two of each template of the small tier
    split: str = "train"         # tasks to record; full-train: all five sites, needs --max-turns 12
    cot: bool = False            # record a long chain of thought with every action
    out: str = "runs/bc"         # the run's directory; at the end it is also the checkpoint
    # Optimization
    epochs: float = 4.0          # passes over the demonstrations
    batch: int = 16              # responses per step, over all ranks
    lr: float = 0.0              # peak of a cosine; 0: chosen by the model's size (lr_by_size)
    warmup: float = 0.05         # share of the steps in which lr rises
    clip: float = 1.0            # largest gradient norm
    max_tokens: int = 8192       # per micro-batch: lower it when memory runs out
    recompute: bool = False      # activation checkpointing
    lora: int = 0                # rank of the LoRA adapters (only they train); 0: train all weights
    replicas: int = 1            # groups of ranks that each hold the whole model (HSDP): one a node
    seed: int = 0                # of the order of the demonstrations
    save_every: int = 20         # steps between saves of the training state; the end deletes it
    resume: bool = True          # continue the run in OUT from its last save, if there is one
    force: bool = False          # continue even if that run has other settings
    # Rollout, sized for the sandbox and a CPU
    max_turns: int = 10          # responses per episode
    max_new_tokens: int = 64     # per response
    max_context: int = 1536      # tokens of history, page and response together
    paper: bool = False          # the paper's values (Appendix B) for all flags not given


PAPER = dict(lr=5e-5, batch=128, warmup=0.05, max_context=16384, max_new_tokens=1024, max_turns=15,
             recompute=True, max_tokens=16384)


# -------------------------------------------------------------------------------- demonstrations --


def record_demonstrations(chat: Chat, cfg: Config, run: Run, name: str, log):
    """Writes OUT/name: the sandbox's experts act in the real browser, on the policy's own pages.

    All ranks call it and share the work. An existing file with the same tasks and page settings is
    reused. An expert that fails is a bug of the sandbox, so it is an error and not a dropped row.
    """
    tasks, path = sandbox.tasks(cfg.split, cfg.demos), run.path / name
    pages = ("viewport_only", "text_only", "max_page_chars", "max_context", "max_new_tokens")
    made = {"think": chat.think} | {name: getattr(cfg, name) for name in pages}
    if path.exists():
        with reading(path):
            old = [json.loads(line) for line in path.read_text().splitlines()]
            if ([(r["task_id"], r["intent"], r.get("made")) for r in old]
                    == [(t["task_id"], t["intent"], made) for t in tasks]):
                return
    experts = {}

    async def act(trajectory: Trajectory, slot: int):
        if len(trajectory.turns) == 1:
            experts[slot] = sandbox.expert(trajectory.task, cfg.cot)
        thought, action = experts[slot](trajectory.turns[-1].observation)
        response = format_response(thought, action, chat.think)
        return [*chat.encode(response, ours=True), chat.end_id], [], True

    with sandbox.start() as sites:
        mine = site_urls(tasks[rank()::world_size()], sites)
        played = gather(asyncio.run(play(mine, act, chat, score, cfg, log=log)))
    order = [task["task_id"] for task in tasks]
    played.sort(key=lambda tau: order.index(tau.task["task_id"]))
    if failed := [tau for tau in played if tau.reward < 1]:
        first = failed[0]
        raise ValueError(f"{len(failed)} of {len(played)} demonstrations failed, the first on task "
                         f"{first.task['task_id']}: {first.checks or first.turns[-1].error}.")
    run.replace(name, "".join(json.dumps(tau.to_json(chat, made=made)) + "\n" for tau in played))


def read_lines(path: str) -> list[tuple[str, dict]]:
    """[(where it stands, row)] of a JSON list or of JSON lines."""
    with reading(path):
        text = Path(path).read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            return [(f"{path}, row {i}", row) for i, row in enumerate(json.loads(text))]
    out = []
    for i, line in enumerate(text.split("\n"), 1):
        with reading(where := f"{path}, line {i}"):
            out += [(where, json.loads(line))] if line.strip() else []
    return out


def read_demonstrations(path: str, chat: Chat, log=print) -> list[Trajectory]:
    """The successful trajectories of a trajectories.jsonl, or those that WebRL's rows add up to.

    Logs how many it leaves out and why. Raises ValueError that names file and line.
    """
    out, steps, dropped = [], [], Counter()
    for where, row in read_lines(path):
        with reading(where):
            if "conversations" in row:
                steps.append(read_step(row))
            elif row.get("reward", 1) == 1:
                out.append(replay(chat, row))
            else:
                broken = row.get("status") == "env_error"
                dropped["environment error" if broken else "no success"] += 1
    usable = []
    for step in steps:
        *_, page, response = step
        try:
            element = parse(response).element
        except ActionError:
            dropped["no action can be read from the response"] += 1
            continue
        if element is None or f'id="{element}"' in page:
            usable.append(step)
        else:
            dropped["acts on an element that is not on its page"] += 1
    with reading(path):
        out += [replay(chat, record) for record in join_steps(usable)]
    if dropped:
        log(f"{path}: left out " + ", ".join(f"{n} ({why})" for why, n in dropped.items()))
    if steps:
        log(f"{path}: {len(usable)} of {len(steps)} steps make up {len(out)} trajectories")
    if not out:
        raise ValueError(f"{path} holds no successful trajectory to clone.")
    return out


# --------------------------------------------------------------------------------- the algorithm --


def optimizer_step(model, optimizer, loss: float, clip: float) -> tuple[float, bool]:
    """Clips the gradient and steps; skips the step if loss or gradient is not finite.

    Returns (gradient norm, skipped). Both numbers come from all ranks, so the ranks decide alike.
    """
    grad_norm = clip_gradients(model, clip)
    skipped = not (math.isfinite(loss) and math.isfinite(grad_norm))
    if not skipped:
        optimizer.step()
    optimizer.zero_grad()
    return grad_norm, skipped


def count_skipped(in_a_row: int, skipped: bool, log) -> int:
    """How many steps in a row were skipped, this one included. The third ends the run."""
    if skipped:
        log("  ! no update: loss or gradient is not finite")
    if skipped and in_a_row == 2:
        raise ValueError("three steps in a row had a loss or gradient that is not finite; lower "
                         "--lr, or look at the data. The last saved state is unharmed.")
    return in_a_row + 1 if skipped else 0


def lr_by_size(model, small: float, large: float) -> float:
    """`small` up to ten million parameters. Above, `large`: more would undo the pretraining.

    SmolLM2-135M, 60 steps: the loss rises from 1.87 to 3.58 at 1e-3, and falls to 1.18 at 2e-5.
    """
    return small if sum(weight.numel() for weight in model.parameters()) <= 1e7 else large


def learning_rate(step: int, steps: int, cfg: Config) -> float:
    """Linear warm-up, then a cosine to zero."""
    warm = max(1, round(cfg.warmup * steps))
    angle = math.pi * max(0, step - warm) / max(1, steps - warm)
    return cfg.lr * min((step + 1) / warm, 0.5 * (1 + math.cos(angle)))


def batches(dataset: list[list[Row]], steps: int, cfg: Config):
    """Yields every step's batch of rows; dataset holds one list of rows per trajectory.

    Only the seed shuffles, so all ranks see the same order. The responses of a trajectory stay
    neighbors: then packing reads their common history once, which halves the tokens.
    """
    order = []
    for step in range(steps):
        if len(order) < cfg.batch:
            epoch = random.Random(f"{cfg.seed}/{step}").sample(dataset, len(dataset))
            order += [row for trajectory in epoch for row in trajectory]
        yield order[:cfg.batch]
        order = order[cfg.batch:]


def train_step(model, optimizer, batch: list[Row], cfg: Config, device):
    """One optimizer step on this rank's share of a batch; returns (loss, gradient norm, skipped)."""
    share = lambda r: r * len(batch) // world_size()
    mine = micro_batches(batch[share(rank()):share(rank() + 1)], cfg.max_tokens)
    total_tokens = sum(row.n_action for row in batch)
    loss_sum = 0.0
    # Sharded ranks must run equally many forwards: a rank with fewer runs rows of weight zero.
    for i in range(all_max(len(mine))):
        real = i < len(mine)
        logp_N, _ = token_logprobs(model, **pack(mine[i] if real else batch[:1], device))
        # FSDP averages gradients over ranks: sum / global count * world size is the exact mean.
        loss = -logp_N.sum() / total_tokens * (1.0 if real else 0.0)
        (loss * world_size()).backward()
        loss_sum += loss.item()
    loss = float(all_sum([loss_sum])[0])
    return loss, *optimizer_step(model, optimizer, loss, cfg.clip)


def train(model, optimizer, dataset: list[list[Row]], cfg: Config, device, log, write, first: int = 0):
    """Behavior cloning on rows, from step `first`; `write` takes one dict of metrics a step."""
    steps = max(1, round(cfg.epochs * max(1, sum(map(len, dataset)) // cfg.batch)))
    start, seen, in_a_row = time.monotonic(), 0, 0
    tick = ticker() if rank() == 0 else log
    for step, batch in enumerate(batches(dataset, steps, cfg)):
        if step < first:
            continue
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, cfg)
        loss, grad_norm, skipped = train_step(model, optimizer, batch, cfg, device)
        seen += sum(len(row.ids) for row in batch)
        speed = seen / (time.monotonic() - start)
        write({"step": step, "loss": loss, "grad_norm": grad_norm, "skipped": int(skipped),
               "tokens_per_second": speed})
        left = (steps - step - 1) / (step + 1 - first) * (time.monotonic() - start)
        tick(f"bc step {step + 1}/{steps} ({100 * (step + 1) // steps}%), loss {loss:.4f}, "
             f"{speed:.0f} tokens/s, {left:.0f} s left")
        in_a_row = count_skipped(in_a_row, skipped, log)
        if cfg.save_every and (step + 1) % cfg.save_every == 0:
            extra = {"step": step + 1, "config": asdict(cfg)}
            save_training(Path(cfg.out) / "state", model, optimizer, extra)


def main(cfg: Config):
    device = init_dist()
    log = print if rank() == 0 else (lambda *_: None)
    chat = open_chat(load_tokenizer(cfg.model), cfg.model, actions_help())
    dtype = computing_dtype(device) if cfg.lora else torch.float32
    model = load(cfg.model, dtype, device, sharded=True, replicas=cfg.replicas, lora=cfg.lora)
    model.recompute = cfg.recompute
    cfg = replace(cfg, lr=cfg.lr or lr_by_size(model, 5e-4, 2e-5) * (10 if cfg.lora else 1))
    # 0.98: the second moment averages over about 50 steps; 0.999 would take more than the run has.
    optimizer = torch.optim.AdamW(model.parameters(), cfg.lr, betas=(0.9, 0.98), weight_decay=0.0)
    first = resume(cfg, model, optimizer, free=set())
    run = start_run(cfg, device, model.config.raw, first)
    # Demonstrations
    data = cfg.data
    if data == "experts":
        name = "demos-cot.jsonl" if cfg.cot else "demos.jsonl"
        data = run.path / name
        record_demonstrations(chat, cfg, run, name, ticker("demonstrations: ") if rank() == 0 else None)
        all_max(0)  # the other ranks wait for the file
    demonstrations = read_demonstrations(data, chat, log)
    # Rows. A turn whose page is missing stays in the history of later turns but is not learned.
    responses = lambda tau: [turn for turn in tau.turns if turn.action_ids]  # `rows` has one for each
    dataset = [[row for row, turn in zip(rows(chat.of_record(tau.task), tau), responses(tau))
                if turn.observation != PLACEHOLDER] for tau in demonstrations]
    fitting = [[row for row in tau if len(row.ids) <= cfg.max_context] for tau in dataset]
    count = lambda trajectories: sum(map(len, trajectories))
    if not count(fitting):
        raise ValueError(f"none of {count(dataset)} responses fits --max-context {cfg.max_context}.")
    log(f"{len(demonstrations)} demonstrations, {count(fitting)} responses to learn "
        f"({count(dataset) - count(fitting)} over --max-context left out)"
        + (f"; step {first + 1} is next" if first else ""))
    train(model, optimizer, fitting, cfg, device, log, run.write, first)
    save(model, cfg.out, like=cfg.model, run=run.config)
    if rank() == 0:
        forget(Path(cfg.out) / "state")
    log(f"saved {cfg.out}; next: python mgrpo.py --model {cfg.out}")


if __name__ == "__main__":
    command_line(main, Config, __doc__, {"paper": PAPER})
