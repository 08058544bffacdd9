"""Behavior cloning, the paper's first stage: demonstrations to a policy that reinforcement learning can start from.

    L = - E_(h_t, a_t) log pi(a_t | h_t)          (paper §3.1; the mean runs over action tokens)

h_t is put together by compress.py, exactly as in a rollout: a page is whole only in the turn that acts on it. Loss
falls on the response's tokens alone.

    python bc.py                                   # experts show the sandbox's tasks in a real browser; saves runs/bc
    python bc.py --data runs/x/trajectories.jsonl  # clone the successful trajectories of a file instead
    python bc.py --data web_policy_sft.json        # or WebRL's demonstrations on WebArena-Lite
    torchrun --nproc_per_node 8 bc.py --model Qwen/Qwen2.5-3B-Instruct --paper --data demos.jsonl
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see model.py; must come before whatever imports torch

import argparse
import asyncio
import json
import math
import random
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from worlds import sandbox
from compress import Chat, Row, Trajectory, micro_batches, open_chat, pack, replay, respond, rows
from evaluate import score, site_urls, start_run
from model import (all_max, all_sum, clip_gradients, init_dist, leave, load, load_tokenizer, load_training, new,
                   parse_json, rank, save, save_training, shard, token_logprobs, world_size)
from rollout import ActionError, Settings, actions_help, parse, play
from worlds.webarena import join_steps, read_step


@dataclass
class Config(Settings):
    # Model and data
    model: str = "worlds/base"   # checkpoint directory or hub id to start from
    fresh: bool = False           # from random weights: of the checkpoint, only config.json and the tokenizer are read
    data: str = "experts"         # "experts": record the sandbox's experts; a trajectory file (.jsonl), or WebRL's rows
    demos: int = 150              # demonstrations to record
    split: str = "train"          # the sandbox's tasks to record; full-train: all five sites, needs --max-turns 12
    cot: bool = False             # record a long chain of thought with every action
    out: str = "runs/bc"          # where everything goes; afterwards this directory is the checkpoint
    # Optimization
    epochs: float = 4.0           # passes over the demonstrations
    batch: int = 32               # responses per step, over all ranks
    lr: float = 1e-3              # peak of a cosine
    warmup: float = 0.05          # share of the steps that lr rises for
    clip: float = 1.0             # gradient norm
    max_tokens: int = 8192        # per micro-batch: lower it when memory runs out
    recompute: bool = False       # activation checkpointing
    replicas: int = 1             # groups of ranks that each hold the whole model (HSDP); one a node spares the network
    seed: int = 0
    save_every: int = 100         # steps between checkpoints of the training state; a run that is done leaves none
    resume: bool = True           # go on where the run in OUT stopped; --no-resume begins it anew
    force: bool = False           # go on also if it was begun with other values
    # Rollout, sized for the sandbox and a CPU
    max_turns: int = 10
    max_new_tokens: int = 64
    max_context: int = 1536
    concurrency: int = 16
    # Preset
    paper: bool = False           # the paper's values (Appendix B) for everything not given on the command line


PAPER = dict(lr=5e-5, batch=128, warmup=0.05, max_context=16384, max_new_tokens=1024, max_turns=15, recompute=True,
             max_tokens=16384)


def demos_path(cfg: Config) -> Path:
    return Path(cfg.out) / ("demos-cot.jsonl" if cfg.cot else "demos.jsonl")


def record(chat: Chat, cfg: Config, urls: dict, log) -> list[dict]:
    """Demonstrations: the sandbox's experts act in the real browser, through the policy's own observations and actions.

    Cached in OUT. An expert that fails is a bug in the sandbox, so it is an error, not a dropped row.
    """
    if cfg.observation != "compact":
        raise ValueError(f"the experts cannot read --observation {cfg.observation}; give --data what it recorded.")
    path = demos_path(cfg)
    tasks = site_urls(sandbox.tasks(cfg.split, cfg.demos), urls)
    shown = ("viewport_only", "text_only", "max_page_chars", "max_context", "max_new_tokens")  # what pages depend on
    made = {"think": chat.think} | {name: getattr(cfg, name) for name in shown}
    if path.exists():
        cached = [json.loads(line) for line in path.read_text().splitlines()]
        wanted = [(t["task_id"], t["intent"], made) for t in tasks]
        if [(r["task_id"], r["intent"], r.get("made")) for r in cached] == wanted:
            return cached
    experts: dict[int, object] = {}

    async def act(trajectory: Trajectory, slot: int):
        if len(trajectory.turns) == 1:
            experts[slot] = sandbox.expert(trajectory.task, cfg.cot)
        thought, action = experts[slot](trajectory.turns[-1].observation)
        return [*chat.encode(respond(thought, action, chat.think), ours=True), chat.end_id], [], True

    played = asyncio.run(play(tasks, act, chat, score, cfg, log=log))
    if failed := [t for t in played if t.reward < 1]:
        first = failed[0]
        raise ValueError(f"{len(failed)} of {len(played)} demonstrations failed; the first: task "
                         f"{first.task['task_id']} ({first.task['intent']!r}: {first.checks or first.turns[-1].error}).")
    records = [t.record(chat, made=made) for t in played]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(r) + "\n" for r in records))
    temporary.replace(path)
    return records


def read_rows(path: str) -> list[tuple[str, dict]]:
    """[(where it stands, row)] of a JSON list or of JSON lines."""
    try:
        text = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise ValueError(f"cannot read demonstrations from {path}: {error.strerror}.") from None
    if text.lstrip().startswith(b"["):
        return [(f"{path}, row {i}", row) for i, row in enumerate(parse_json(text, path, list))]
    lines = [(f"{path}, line {i}", line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [(where, parse_json(line, where)) for where, line in lines]


def read_demonstrations(path: str, log=print) -> list[dict]:
    """Successful trajectories of a trajectories.jsonl, or those that WebRL's rows make up (see worlds/webarena.py).

    Raises ValueError naming file, line and field. What is left out is counted and told.
    """
    records, steps, dropped = [], [], Counter()
    for where, row in read_rows(path):
        if isinstance(row, dict) and "conversations" in row:
            steps.append(read_step(row, where))
            continue
        check_fields(row, {"task_id": (int, str), "intent": str, "sites": list, "turns": list}, where)
        for turn in row["turns"]:
            check_fields(turn, {"url": str, "observation": str, "response": str}, f"{where}, in turns")
        if row.get("reward", 1) == 1:
            records.append(row)
        else:
            dropped["environment error" if row.get("status") == "env_error" else "no success"] += 1
    usable = []
    for step in steps:
        _, _, page, response = step
        try:
            element = parse(response).element
        except ActionError:
            dropped["no action can be read from the response"] += 1
            continue
        if element is None or f'id="{element}"' in page:
            usable.append(step)
        else:
            dropped["acts on an element that its page does not hold"] += 1
    records += join_steps(usable)
    if dropped:
        log(f"{path}: left out " + ", ".join(f"{n} ({why})" for why, n in dropped.items()))
    if steps:
        log(f"{path}: {len(usable)} of {len(steps)} steps make up {len(records)} trajectories")
    if not records:
        raise ValueError(f"{path} holds no successful trajectory to clone.")
    return records


def check_fields(value, kinds: dict, where: str):
    for key, kind in kinds.items():
        if not isinstance(value, dict) or not isinstance(value.get(key), kind):
            raise ValueError(f"{where}: not a trajectory, {key} is missing or of the wrong kind.")


def learning_rate(step: int, steps: int, cfg: Config) -> float:
    """Linear warm-up, then a cosine to zero."""
    warm = max(1, round(cfg.warmup * steps))
    return cfg.lr * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(0, step - warm) / max(1, steps - warm))))


def train_step(model, optimizer, batch: list[Row], cfg: Config, device) -> tuple[float, float]:
    """One optimizer step on this rank's share of a batch; returns the batch's loss and gradient norm."""
    mine = micro_batches(batch[rank()::world_size()], cfg.max_tokens)
    total_tokens = sum(row.n_action for row in batch)
    loss_sum = 0.0
    # Sharded ranks must run equally many forwards: whoever has fewer runs a row of weight zero.
    for i in range(all_max(len(mine))):
        real = i < len(mine)
        logp_N, _ = token_logprobs(model, **pack(mine[i] if real else batch[:1], device))
        # FSDP averages gradients over ranks: the sum over the global count, times world size, is the exact mean.
        loss = -logp_N.sum() / total_tokens * (1.0 if real else 0.0)
        (loss * world_size()).backward()
        loss_sum += loss.item()
    grad_norm = clip_gradients(model, cfg.clip)
    optimizer.step()
    optimizer.zero_grad()
    return float(all_sum([loss_sum])[0]), grad_norm


def train(model, optimizer, dataset: list[Row], cfg: Config, device, log, write, first: int = 0, stop=None) -> None:
    """Behavior cloning on rows, shuffled anew each epoch by the seed alone, so that every rank sees the same order."""
    per_epoch = max(1, len(dataset) // cfg.batch)
    steps, order, start, seen = max(1, round(cfg.epochs * per_epoch)), [], time.monotonic(), 0
    for step in range(steps):
        if len(order) < cfg.batch:
            order = order + random.Random(f"{cfg.seed}/{step}").sample(range(len(dataset)), len(dataset))
        batch, order = [dataset[i] for i in order[:cfg.batch]], order[cfg.batch:]
        if step < first:
            continue
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, cfg)
        loss, norm = train_step(model, optimizer, batch, cfg, device)
        seen += sum(len(row.ids) for row in batch)
        write({"step": step, "loss": loss, "grad_norm": norm, "tokens_per_second": seen / (time.monotonic() - start)})
        if step % 10 == 9 or step == steps - 1:
            log(f"bc step {step + 1}/{steps}  loss {loss:.4f}  {seen / (time.monotonic() - start):.0f} tokens/s")
        stopped = all_max(stop.asked if stop else 0)  # ranks hear of a signal at different steps
        if stopped or step % cfg.save_every == cfg.save_every - 1:
            save_training(Path(cfg.out) / "state", model, optimizer, {"step": step + 1, "config": asdict(cfg)})
        if stopped:
            log(f"stopped after step {step + 1}; the same command goes on from there")
            sys.exit(128 + stopped)


# ------------------------------------------------------------- how a training run stops and goes on; mgrpo.py's, too --


class Stop:
    """SIGTERM or Ctrl-C drops the rollout under way or waits for the update, saves and leaves; a second one kills.

    torchrun passes the signal on to its ranks and kills them 30 s later: an update that takes longer is lost.
    """

    def __enter__(self):
        self.asked, self.cancel = 0, lambda: None
        self.before = {number: signal.signal(number, self.ask) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number, _):
        if self.asked:
            os._exit(128 + number)
        self.asked = number
        os.write(2, b"stopping: the run is saved first; a second signal ends it at once\n")  # print may be under way
        self.cancel()

    def run(self, coroutine):
        """As asyncio.run; None if a signal came before it was done."""
        async def cancellable():
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            self.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            # Ctrl-C reaches the browser's processes, too: their complaints about it are no news.
            loop.set_exception_handler(lambda loop, said: self.asked or loop.default_exception_handler(said))
            if self.asked:
                return coroutine.close()
            return await coroutine
        try:
            return asyncio.run(cancellable())
        except asyncio.CancelledError:
            return None
        finally:
            self.cancel = lambda: None


def resume(cfg, model, optimizer, free: set[str]) -> int:
    """Brings model and optimizer to where the run in OUT stopped, if one did; returns the step to go on with.

    All randomness hangs on (seed, step, task, member), so there is no generator to restore. What would make it another
    run is refused; `free` names what may change, beside how often it saves and how it is laid out on the machine.
    """
    path = Path(cfg.out) / "state"
    if not cfg.resume or not (path.exists() or path.with_name("state.old").exists()):
        return 0
    extra = load_training(path, model, optimizer)
    step, was = extra.get("step"), extra.get("config")
    if not isinstance(step, int) or step < 0 or not isinstance(was, dict):
        raise ValueError(f"{path / 'state.json'}: extra holds no step and config of a run; choose another --out.")
    free = free | {"out", "save_every", "resume", "force", "concurrency", "timeout", "max_tokens", "recompute",
                   "replicas"}
    other = [f"{key} {was[key]!r:.60}, not {now!r:.60}" for key, now in asdict(cfg).items()
             if key not in free and was.get(key, now) != now]
    if other and not cfg.force:
        raise ValueError(f"{cfg.out} holds a run with {'; '.join(other)}: give it the same, go on all the same with "
                         "--force, choose another --out, or begin anew with --no-resume.")
    return step


def command_line(main, parse_args):
    """Runs a script. What a user can mend is one sentence, and so is the end of a rank whose sibling died."""
    script, status = Path(sys.argv[0]).name, None
    try:
        main(parse_args())
    except SystemExit as end:
        status = end.code
    except (ValueError, OSError) as error:
        status = f"{script}: {error}"
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, torch.distributed.DistError):
            raise
        status = f"{script}: rank {rank()} lost another rank; the same command goes on from the last saved state."
    leave(status)


# ------------------------------------------------------------------------------------------------------ the script --


def main(cfg: Config):
    device = init_dist()
    log = print if rank() == 0 else (lambda *_: None)
    torch.manual_seed(cfg.seed)
    tokenizer = load_tokenizer(cfg.model)
    chat = open_chat(tokenizer, cfg.model, actions_help())
    model = (shard(new(cfg.model, cfg.seed).to(device), cfg.replicas) if cfg.fresh else
             load(cfg.model, torch.float32, device, sharded=True, replicas=cfg.replicas))
    model.recompute = cfg.recompute
    optimizer = torch.optim.AdamW(model.parameters(), cfg.lr, betas=(0.9, 0.98), weight_decay=0.0)
    first = resume(cfg, model, optimizer, set())
    run = start_run(cfg, device, model.config.raw, first)
    if cfg.data == "experts":
        with sandbox.start() as urls:
            records = record(chat, cfg, urls, lambda line: log("demonstrations:", line)) if rank() == 0 else None
        all_max(0)  # the others wait for the recording, then read it
        records = records or read_demonstrations(demos_path(cfg))
    else:
        records = read_demonstrations(cfg.data, log)
    # A turn whose page is not there stands in the history of later ones and is not learnt itself.
    dataset = [row for record_ in records for row, turn in zip(rows(chat, replay(chat, record_)), record_["turns"])
               if turn["observation"] is not None]
    fitting = [row for row in dataset if len(row.ids) <= cfg.max_context]
    if not fitting:
        raise ValueError(f"none of {len(dataset)} responses to learn fits --max-context {cfg.max_context}; raise it.")
    log(f"{len(records)} demonstrations, {len(fitting)} responses to learn "
        f"({len(dataset) - len(fitting)} over --max-context left out)"
        + (f"; step {first + 1} is next" if first else ""))
    with Stop() as stop:
        train(model, optimizer, fitting, cfg, device, log, run.write, first, stop)
    save(model, cfg.out, like=cfg.model, run=run.config)
    if rank() == 0:
        shutil.rmtree(Path(cfg.out) / "state", ignore_errors=True)
    log(f"saved {cfg.out}; next: python mgrpo.py --model {cfg.out}")


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
