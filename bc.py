"""Behavior cloning, the paper's first stage: from demonstrations to a policy that RL starts from.

    L = - E_(h_j, a_j) log pi(a_j | h_j)          (paper §3.1; the mean is over action tokens)

compress.py builds h_j exactly as in a rollout: a page is whole only in the turn that acts on it.
Only the tokens of responses count in the loss.

    python bc.py                                   # clone the sandbox's experts -> runs/bc
    python bc.py --data runs/x/trajectories.jsonl  # or the successful trajectories of a file
    python bc.py --data web_policy_sft.json        # or WebRL's demonstrations on WebArena-Lite
    torchrun --nproc_per_node 8 bc.py --model Qwen/Qwen2.5-3B-Instruct --paper --data demos.jsonl
"""
import run  # first: it prepares OpenMP before torch loads

import asyncio
import json
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import rollout
from compress import (Chat, Row, Trajectory, format_response, micro_batches, open_chat, pack, replay, to_record,
                      trajectory_rows)
from evaluate import Environment, in_task_order
from model import check_fit, clip_gradients, config_json, load_for_training, save, token_logprobs
import worlds
from worlds import sandbox, webarena


@dataclass
class Config(rollout.Settings):
    """Every knob is a flag; the comment after it is its help text."""
    # Model and data
    model: str = "worlds/base"   # checkpoint directory or hub id to start from
    data: str = "experts"        # "experts": record the sandbox's; else a trajectory or WebRL file
    data_split: str = "train"    # of --data: clone rows of these splits, and rows that name none
    demos: int = 38              # demonstrations to record: two of each of the 19 templates of train
    split: str = "train"         # tasks to record; full-train needs --max-turns 12, long-train 20
    cot: bool = False            # record a long chain of thought with every action
    out: str = "runs/bc"         # the run's directory; at the end it is also the checkpoint
    # Optimization
    epochs: float = 8.0          # passes over the demonstrations; a pass is (responses // batch) steps
    batch: int = 16              # responses per step, over all ranks
    lr: float | None = None      # peak of a cosine; None: 5e-4, or 2e-5 above 10 million parameters; LoRA: x 10
    warmup: float = 0.05         # share of the steps in which lr rises
    max_grad_norm: float = 1.0   # a longer gradient is scaled down to this norm
    max_tokens: int = 8192       # per micro-batch: lower it when memory runs out
    recompute: bool = False      # activation checkpointing
    lora: int = 0                # rank of the LoRA adapters (only they train); 0: train all weights
    seed: int = 0                # of the order of the demonstrations
    save_every: int = 20         # steps between saves of the training state; the end deletes it
    resume: bool = True          # continue the run in OUT from its last save, if there is one
    force: bool = False          # continue even if that run has other settings
    # Rollout, sized for the sandbox and a CPU
    max_turns: int = 10          # responses per episode
    max_new_tokens: int = 64     # per response
    max_context: int = 1536      # tokens of history, page and response together
    paper: bool = False          # the paper's values (Appendix B) for all flags not given


PAPER = dict(
    epochs=5.0,  # not in the paper; its authors published clones trained for 1, 3, 5 and 10
    lr=5e-5,
    batch=128,
    warmup=0.05,
    max_turns=15,
    max_new_tokens=1024,
    max_context=16384,
    max_tokens=16384,
    recompute=True,
)


# --------------------------------------------------------------------------------- the algorithm --

# A row that trains nothing, for a rank with fewer micro-batches than others.
PADDING = Row([0, 0], n_action=1, weight=0.0, logps=[0.0])


def balanced_micro_batches(rows: list[Row], max_tokens: int) -> list[list[Row]]:
    """This rank's micro-batches, as many as on any rank; those it lacks are [PADDING].

    Sharded ranks must run equally many forwards, or they wait for each other forever.
    """
    mine = micro_batches(rows, max_tokens)
    missing = run.all_max(len(mine)) - len(mine)
    return mine + [[PADDING]] * missing


def average_head_gradients(model):
    """Averages the gradients of a fork's heads over the ranks. They lie outside FSDP, which averages the others."""
    if run.world_size() == 1:
        return
    for parameter in nn.ModuleDict(model.fork_heads).parameters():
        if not run.all_max(parameter.grad is not None):
            continue
        if parameter.grad is None:  # this rank had no row for the head
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= run.world_size()


def optimizer_step(model, optimizer, loss: float, max_grad_norm: float) -> tuple[float, bool]:
    """Clips the gradient and steps; skips the step if loss or gradient is not finite.

    A fork's heads step as well, but are not clipped. Returns (gradient norm, skipped). Loss and norm come
    from all ranks, so all ranks decide the same.
    """
    average_head_gradients(model)
    grad_norm = clip_gradients(model, max_grad_norm)
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if finite:
        optimizer.step()
    else:
        run.print0("  ! no update: loss or gradient is not finite; if it happens again, lower --lr")
    optimizer.zero_grad()
    return grad_norm, not finite


def lr_by_size(model, *, small: float, large: float) -> float:
    """The learning rate: `small` up to ten million parameters, else `large`; ten times as much with LoRA.

    A larger model is a pre-trained language model, and a high rate would destroy what it knows. LoRA's update
    starts at zero.
    """
    parameters = sum(weight.numel() for weight in model.parameters())
    lr = small if parameters <= 1e7 else large
    return 10 * lr if model.lora else lr


def warmup_cosine(step: int, steps: int, cfg: Config) -> float:
    """The learning rate: a linear rise, then a cosine that would reach 0 after the last step."""
    warm = max(1, round(cfg.warmup * steps))
    if step < warm:
        return cfg.lr * ((step + 1) / warm)
    angle = math.pi * (step - warm) / (steps - warm)
    return cfg.lr * (0.5 * (1 + math.cos(angle)))


def rows_to_learn(demonstrations: list[Trajectory], chat: Chat,
                  cfg: Config) -> tuple[list[list[Row]], int]:
    """(the rows of each demonstration that fit into --max-context, how many rows do not)."""
    dataset = []
    left_out = 0
    for demonstration in demonstrations:
        rows = trajectory_rows(chat.for_task(demonstration.task), demonstration)
        fitting = [row for row in rows if len(row.ids) <= cfg.max_context]
        left_out += len(rows) - len(fitting)
        dataset.append(fitting)
    return dataset, left_out


def batches(dataset: list[list[Row]], steps: int, cfg: Config):
    """Yields every step's batch of rows; dataset holds one list of rows per trajectory.

    Only seed and step decide the order, so it is the same on all ranks. The responses of a trajectory stay
    neighbors: then packing writes their common history once. Rows left over at the end of a pass begin the next
    batch, which may therefore hold a response twice. A pass counts as (responses // batch) steps, so a run may show
    a response fewer times than --epochs says.
    """
    order = []
    for step in range(steps):
        if len(order) < cfg.batch:
            rng = random.Random(f"{cfg.seed}/{step}")
            epoch = rng.sample(dataset, len(dataset))
            for rows in epoch:
                order += rows
        yield order[:cfg.batch]
        order = order[cfg.batch:]


def clone_batch(model, optimizer, batch: list[Row], cfg: Config, device):
    """One optimizer step on a batch; returns (loss, gradient norm, skipped), the same on all ranks."""
    # 1) This rank's share of the batch.
    begin = run.rank() * len(batch) // run.world_size()
    end = (run.rank() + 1) * len(batch) // run.world_size()
    mine = batch[begin:end]

    # 2) Forward and backward. FSDP averages gradients over ranks: sum / global count * world size is
    #    the exact mean over the tokens of all ranks.
    total_tokens = sum(row.n_action for row in batch)
    loss_sum = 0.0
    for micro_batch in balanced_micro_batches(mine, cfg.max_tokens):
        inputs = pack(micro_batch, device)
        logp_N, _, _ = token_logprobs(model, **inputs)
        loss = -logp_N.sum() / total_tokens
        if micro_batch[0] is PADDING:  # its passes only keep sharded ranks in step
            loss = loss * 0.0
        (loss * run.world_size()).backward()
        loss_sum += loss.item()

    # 3) Step.
    [total_loss] = run.all_sum([loss_sum])
    grad_norm, skipped = optimizer_step(model, optimizer, total_loss, cfg.max_grad_norm)
    return total_loss, grad_norm, skipped


def clone(model, optimizer, dataset: list[list[Row]], cfg: Config, *,
          device, directory, first_step: int = 0):
    """Behavior cloning on `dataset`, from `first_step` on; writes each step's metrics to `directory`."""
    responses = sum(len(rows) for rows in dataset)
    steps_per_epoch = max(1, responses // cfg.batch)
    steps = max(1, round(cfg.epochs * steps_per_epoch))
    tick = run.ticker()
    start = time.monotonic()
    tokens = 0
    for step, batch in enumerate(batches(dataset, steps, cfg)):
        if step < first_step:
            continue
        for group in optimizer.param_groups:
            group["lr"] = warmup_cosine(step, steps, cfg)
        loss, grad_norm, skipped = clone_batch(model, optimizer, batch, cfg, device=device)

        done = step + 1
        seconds = time.monotonic() - start
        # Counted before packing: what rows share counts once per row. mgrpo.py's tokens_per_second counts it once
        # per micro-batch, so the two cannot be compared.
        tokens += sum(len(row.ids) for row in batch)
        speed = tokens / seconds
        left = (steps - done) / (done - first_step) * seconds
        tick(f"bc step {done}/{steps} ({100 * done // steps}%), loss {loss:.4f}, "
             f"{speed:.0f} tokens/s, {left:.0f} s left", last=done == steps)
        directory.write_metrics({
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "skipped": int(skipped),
            "tokens_per_second": speed,
        })
        if cfg.save_every and done % cfg.save_every == 0:
            run.save_state(cfg, model, optimizer, step=done, inputs=directory.inputs,
                           method_name=type(optimizer).__name__)


# -------------------------------------------------------------------------------- demonstrations --


def recorded_already(path: Path, tasks: list[dict], recorded_with: dict) -> bool:
    """Whether a file holds demonstrations of just these tasks, made with these settings."""
    if not path.exists():
        return False
    found = []
    with run.reading(path):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found.append((record["task_id"], record["intent"], record.get("recorded_with")))
    wanted = [(task["task_id"], task["intent"], recorded_with) for task in tasks]
    return found == wanted


def record_demonstrations(chat: Chat, cfg: Config, directory: run.RunDirectory, name: str):
    """Writes OUT/name: the sandbox's experts act in the real browser, on the policy's own pages.

    All ranks call it and share the work. An existing file with the same model, tasks and page settings
    is reused. A failed demonstration is an error and not a dropped row: site or browser failed twice, a limit
    such as --max-turns is too small, or the sandbox has a bug.
    """
    # 1) Reuse a file that was recorded with the same settings.
    tasks = sandbox.tasks(cfg.split, cfg.demos)
    recorded_with = {"model": cfg.model, "think": chat.think}  # the model's tokenizer decides where a page is cut
    for knob in ("viewport_only", "text_only", "max_page_chars", "max_context", "max_new_tokens"):
        recorded_with[knob] = getattr(cfg, knob)
    if recorded_already(directory.path / name, tasks, recorded_with):
        run.print0(f"{directory.path / name} is there already; delete it to record the demonstrations again")
        return

    # 2) Play: an expert answers in place of the model.
    experts = {}  # slot -> the expert of the episode that it plays

    async def act(trajectory: Trajectory, slot: int):
        if len(trajectory.turns) == 1:
            experts[slot] = sandbox.expert(trajectory.task, cfg.cot)
        thought, action = experts[slot](trajectory.turns[-1].observation)
        response = format_response(thought, action, chat.think)
        ids = chat.encode(response, tags=True) + [chat.end_id]
        return ids, [], True  # no log-probs: nothing was sampled

    with sandbox.start() as sites:
        share = tasks[run.rank()::run.world_size()]
        mine = webarena.site_urls(share, sites)
        env = Environment(sites, directory.path)
        tick = run.ticker("demonstrations: ")
        playing = rollout.play(act, chat, mine, env=env, settings=cfg, tick=tick)
        played = in_task_order(run.gather(asyncio.run(playing)), tasks)

    # 3) Every demonstration must succeed.
    failed = [tau for tau in played if tau.success < 1]
    if failed:
        first = failed[0]
        reasons = [f"{check} failed: {detail}" for check, passed, detail in first.checks if not passed]
        raise ValueError(f"{len(failed)} of {len(played)} demonstrations failed, the first on task "
                         f"{first.task['task_id']}: {'; '.join(reasons)}.")

    # 4) Write them.
    text = ""
    for tau in played:
        record = to_record(tau, chat, recorded_with=recorded_with)
        text += json.dumps(record) + "\n"
    directory.replace(name, text)


def is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def read_lines(path: str | Path) -> list[tuple[str, dict]]:
    """[(where it stands, row)] of a JSON list or of JSON lines."""
    with run.reading(path):
        text = Path(path).read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            return [(f"{path}, row {i}", row) for i, row in enumerate(json.loads(text))]
    lines = text.split("\n")
    # Only the last of several lines can be cut off. One line that is not JSON is another kind of file: `json.loads`
    # says so below.
    if len(lines) > 1 and not is_json(lines[-1]):
        cut_off = lines.pop()  # it is empty, or a killed run was writing it
        if cut_off:
            run.print0(f"{path}: its last line is cut off and left out")
    rows = []
    for i, line in enumerate(lines, 1):
        where = f"{path}, line {i}"
        with run.reading(where):
            if line.strip():
                rows.append((where, json.loads(line)))
    return rows


def why_left_out(record: dict, split: str) -> str:
    """Why an episode is no demonstration; "" if it is one."""
    # --data-split lists words ("train,dev"), or sources of an evaluation, whose names may hold commas
    # ("miniwob:click-test,click-link"). Accept both readings.
    wanted = {*worlds.sources(split), *split.split(",")}
    if "split" in record and record["split"] not in wanted:
        return f"split {record['split']}, not --data-split {split}"
    if record.get("status") == "env_error":
        return "environment error"
    # Records of older versions hold the success as their reward.
    if record.get("success", record.get("reward", 1)) != 1:
        return "no success"
    return ""


def parse_element(response: str) -> str | None:
    """The element that a response acts on. Raises ValueError if no action can be read."""
    try:
        return rollout.parse(response).element
    except rollout.ActionError as problem:
        raise ValueError(str(problem)) from None


def read_demonstrations(path: str | Path, chat: Chat, split: str = "train") -> list[Trajectory]:
    """The successful trajectories of a trajectories.jsonl, or those that WebRL's rows add up to.

    Prints how many it leaves out and why. Raises ValueError that names file and line.
    """
    demonstrations = []
    dropped = Counter()
    webrl_rows = []
    for where, row in read_lines(path):
        with run.reading(where):
            if "eval" in row and "turns" not in row:
                raise ValueError("this is a task, not a demonstration of it; python rollout.py --record makes one")
            if "conversations" in row:
                webrl_rows.append((where, row))
                continue
            why = why_left_out(row, split)
            if why:
                dropped[why] += 1
            else:
                demonstrations.append(replay(chat, row))
    if webrl_rows:
        records, dropped_rows = webarena.webrl_demonstrations(webrl_rows, parse_element)
        dropped += dropped_rows
        with run.reading(path):
            demonstrations += [replay(chat, record) for record in records]
    if dropped:
        reasons = [f"{count} ({why})" for why, count in dropped.items()]
        run.print0(f"{path}: left out {', '.join(reasons)}")
    if webrl_rows:
        used = len(webrl_rows) - dropped_rows.total()
        run.print0(f"{path}: {used} of {len(webrl_rows)} steps make up {len(demonstrations)} trajectories")
    if not demonstrations:
        raise ValueError(f"{path} holds no successful trajectory to clone.")
    return demonstrations


# ------------------------------------------------------------------------------------- the script --


def open_policy(cfg, device) -> tuple[Chat, nn.Module]:
    """The chat and the policy of --model, ready to train. mgrpo.py opens its policy with it as well."""
    chat = open_chat(cfg.model, rollout.actions_help())
    model = load_for_training(cfg.model, device, cfg.lora, cfg.precision)
    check_fit(model, chat.tokenizer, cfg.max_context)
    model.recompute = cfg.recompute
    return chat, model


def adamw(model, lr: float):
    # 0.98: the second moment averages over about 50 steps; 0.999 would take more than the run has.
    return torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.98), weight_decay=0.0)


def main(cfg: Config, make_optimizer=adamw):
    # 1) The policy, its optimizer, and where an interrupted run stopped.
    device = run.init_dist(cfg.precision)
    chat, model = open_policy(cfg, device)
    if cfg.lr is None:
        cfg = replace(cfg, lr=lr_by_size(model, small=5e-4, large=2e-5))
    optimizer = make_optimizer(model, cfg.lr)
    method_name = type(optimizer).__name__
    first_step = run.resume(cfg, model, optimizer, may_change=set(), method_name=method_name)
    directory = run.open_run(cfg, device, first_step)

    # 2) Demonstrations.
    data = cfg.data
    if data == "experts":
        name = "demos-cot.jsonl" if cfg.cot else "demos.jsonl"
        record_demonstrations(chat, cfg, directory, name)
        run.barrier()  # the other ranks wait for the file
        data = directory.path / name
    demonstrations = read_demonstrations(data, chat, cfg.data_split)

    # 3) Their rows, as far as they fit.
    dataset, over_context = rows_to_learn(demonstrations, chat, cfg)
    learned = sum(dataset, [])
    responses = len(learned)
    over_response = sum(row.n_action > cfg.max_new_tokens for row in learned)  # longer than the policy's own may be
    if not responses:
        raise ValueError(f"no response that fits --max-context {cfg.max_context} is left to learn; "
                         f"{over_context} are longer.")
    said = (f"{len(demonstrations)} demonstrations, {responses} responses to learn "
            f"({over_context} over --max-context left out)")
    if first_step > 0:
        said += f"; step {first_step + 1} is next"
    run.print0(said)
    if over_response > 0:
        run.print0(f"warning: {over_response} of them are longer than --max-new-tokens {cfg.max_new_tokens}, "
                   "where the policy's own responses are cut")

    # 4) Train, and leave a checkpoint.
    directory.begin(config_json(model), first_step)
    clone(model, optimizer, dataset, cfg, device=device, directory=directory, first_step=first_step)
    save(model, cfg.out, like=cfg.model, settings=directory.config)
    if run.rank() == 0:
        run.delete_directory(Path(cfg.out) / "state")
    tasks_flag = ""  # mgrpo.py's default is sandbox:train
    if cfg.data != "experts":
        tasks_flag = " --tasks TASKS"
    elif cfg.split != "train":
        tasks_flag = f" --tasks sandbox:{cfg.split}"
    run.print0(f"saved {cfg.out}; next: python mgrpo.py --model {cfg.out}{tasks_flag}")


if __name__ == "__main__":
    run.command_line(main, Config, __doc__, {"paper": PAPER})
