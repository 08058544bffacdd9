"""What a script needs besides learning: ranks, files, a run's directory, resuming, the report, the command line.

Nothing here plays, judges or learns. Two rules hold throughout:

    - A kill loses no finished work. Files are written under another name and renamed when they are complete,
      so a reader finds the old file or the new one, never half of one, whenever the process dies.
      The .jsonl files are appended to; readers skip a last line that is cut off.
    - A user's error prints one sentence that names the file or the flag (a ValueError that we raise). A bug
      prints its traceback.

A run's directory, runs/NAME/:

    config.json          the model's configuration; under "run", every knob, commit, torch, device
    metrics.jsonl        one object a step
    trajectories.jsonl   one episode a line
    unfinished/          the episodes of an evaluation that has not ended (evaluate.Unfinished)
    state/00012/         the training state at the 12th save, in one part per rank; `resume` continues from it
    best/                a copy of the checkpoint that did best on --held-out
    step-00010/          checkpoints of --keep-every
    report.html          all of it to browse, in one file that needs no network
    screenshots/         the pictures of --screenshots
    model.safetensors    the weights: the directory is also a checkpoint
    adapter/             with --lora: the adapters as trained
    demos.jsonl          bc.py: the demonstrations that it recorded
    summary.json         evaluate.py: success rates
    judge.jsonl          with --judge-url: the judge's replies, which later runs here use again
    servers.log          what a task's server wrote before it failed (worlds/serve.py)
    lock                 the id of the process that writes here
"""
import os

# By default, OpenMP threads that wait keep a core busy, which the browser needs. Must be set before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import base64
import contextlib
import fcntl
import hashlib
import inspect
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
import types
import typing
from dataclasses import asdict, fields
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

ROOT = Path(__file__).parent

# ------------------------------------------------------------------------------------------ ranks --

TIMEOUT = timedelta(hours=2)  # for the longest episodes; torchrun notices a dead rank long before


def init_dist(precision: str | None = None) -> torch.device:
    """Joins the other ranks if torchrun started us; returns this rank's device.

    A process alone becomes a group of one on any GPU, and on a CPU with --precision bfloat16: `model.shard`
    needs a group to keep float32 weights behind bfloat16. Warns if bfloat16 is slow here.
    """
    # 1) The device.
    cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:
        device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}")
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan every new row length again

    # 2) The group, once: mgrpo.py may run bc.main, which calls this function again.
    alone = "RANK" not in os.environ
    needs_group = cuda or not alone or precision == "bfloat16"
    if dist.is_initialized() or not needs_group:
        return device
    group = {}  # torchrun's variables name it
    if alone:
        group = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT, **group)

    # 3) A warning, once.
    if precision == "bfloat16" and not cuda:
        slowdown = bfloat16_slowdown()
        if slowdown > 2:
            print0(f"warning: this CPU multiplies {slowdown:.0f} times as slowly in bfloat16 as in float32; "
                   "leave out --precision bfloat16")
    return device


def bfloat16_slowdown() -> float:
    """CPU time of a matrix product in bfloat16 as a multiple of that in float32: far above 1 where it is emulated."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(512, 512, dtype=dtype)
        nn.functional.linear(square, square)  # the first product of a dtype takes longer
        start = time.process_time()  # CPU time: other processes on the machine do not count
        nn.functional.linear(square, square)
        seconds[dtype] = time.process_time() - start
    return seconds[torch.bfloat16] / seconds[torch.float32]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(items: list) -> list:
    """The ranks' lists one after the other, on every rank."""
    if not dist.is_initialized():
        return list(items)
    parts = [None] * world_size()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def all_sum(values: list) -> list[float]:
    """Element-wise sum of a list of numbers over all ranks, in float64."""
    return torch.tensor(gather([values]), dtype=torch.float64).sum(0).tolist()


def all_max(value):
    """The largest of the ranks' values."""
    return max(gather([value]))


def barrier():
    """All ranks wait here for each other."""
    all_max(0)


# ----------------------------------------------------------------------------- what people see live


def say(*values, **options):
    """Prints. If nobody reads the log any more (`| head`), or its disk is full, training goes on without it."""
    try:
        print(*values, flush=True, **options)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())


def print0(*values):
    """Prints on rank 0 only."""
    if rank() == 0:
        say(*values)


def ignore(*_, **__):
    """Does nothing: what functions that report progress call by default."""


def ticker(begin: str = ""):
    """Returns tick(line, last=False), which shows progress: one line, rewritten on a terminal; elsewhere a new line
    now and then. The last one is always shown and stays. Ranks other than 0 are silent.
    """
    if rank() != 0:
        return ignore
    live = sys.stdout.isatty()
    pause = 0.2 if live else 10.0  # seconds between two lines, at least
    shown = -pause

    def tick(line: str, last=False):
        nonlocal shown
        now = time.monotonic()
        if not last and now - shown < pause:
            return
        shown = now
        line = begin + line
        if not live:
            say(line)
            return
        end = "\n"
        if not last:  # the next one overwrites it, which works only within one row of the terminal
            end = ""
            width = shutil.get_terminal_size().columns - 1
            line = line[:width]
        say(f"\r\033[K{line}", end=end)

    return tick


# ------------------------------------------------------------------------------------------- files --


@contextlib.contextmanager
def reading(path: str | Path):
    """Turns whatever a missing, damaged or unsupported file raises into a ValueError naming it."""
    try:
        yield
    except Exception as error:  # every library has its own kinds; the user needs the file's name
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        said = " ".join(str(error).split())
        raise ValueError(f"cannot use {path}: {kind}{said:.300}") from error


@contextlib.contextmanager
def writing(path: str | Path):
    """Turns a full disk or a missing permission into a ValueError naming the path."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {path}: {error}; what was there is unharmed. "
                         "Repeat the command when it can be written.") from error


def read_json(path: Path) -> dict:
    with reading(path):
        value = json.loads(path.read_text(encoding="utf-8-sig"))  # an editor may have written a byte order mark
        if not isinstance(value, dict):
            raise ValueError(f"it holds {value!r:.60}, not an object")
        return value


def last_lines(path: Path, count: int = 2000, size: int = 40_000_000) -> tuple[list[dict], int]:
    """The objects in the last `size` bytes of a .jsonl file, at most `count`; how many it left out."""
    if not path.exists():
        return [], 0
    with open(path, "rb") as file:
        total = sum(1 for _ in file)
        file.seek(max(0, file.tell() - size))
        texts = file.read().splitlines()[-count:]
    lines = []
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):  # the first or last may be cut off
            lines.append(json.loads(text, parse_constant=lambda _: None))  # JSON has no NaN
    return lines, total - len(lines)


def all_lines(path: Path) -> list[dict]:
    """The objects in a .jsonl file, up to a million, from its last gigabyte."""
    lines, _ = last_lines(path, count=10**6, size=10**9)
    return lines


def keep_lines(path: Path, keep):
    """Rewrites a .jsonl file without the objects that `keep` refuses and without a cut-off last line."""
    if not path.exists():
        return
    shorter = path.with_suffix(".tmp")
    with writing(path):
        with open(path, "rb") as old, open(shorter, "wb") as new:
            for number, line in enumerate(old, 1):
                with reading(f"{path}, line {number} (repair or delete it)"):
                    kept = line.endswith(b"\n") and keep(json.loads(line))
                if kept:
                    new.write(line)
        shorter.replace(path)


# --------------------------------------------------------------------------------- training state --


def is_sharded(tensor) -> bool:
    """Whether this rank holds only a part of it: FSDP2's weights are DTensors."""
    return hasattr(tensor, "placements")


@torch.no_grad()
def fill(parameter, tensor):
    """Copies a whole tensor into a parameter; of a sharded one, this rank's part."""
    if tensor.shape != parameter.shape:
        raise ValueError(f"a tensor has shape {[*tensor.shape]}, the model {[*parameter.shape]}")
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor
        # src_data_rank None: no communication, since every rank has read the tensor.
        tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(tensor)


def reshard(model):
    """Cuts gathered weights again: FSDP2 leaves some whole after a forward pass without a backward pass."""
    for part in model.modules():
        if hasattr(part, "reshard"):
            part.reshard()


def training_tensors(model, optimizer) -> dict:
    """The trained parameters and AdamW's state, by name: NAME, NAME/step, NAME/exp_avg, NAME/exp_avg_sq.

    An optimizer that has not stepped yet gets its first state, zeros. Of model.fork_heads also the frozen weights
    and the buffers, such as a moving average of the policy.
    """
    heads = nn.ModuleDict(model.fork_heads)
    tensors = dict(heads.named_parameters()) | dict(heads.named_buffers())
    trained = {}
    for part in (model, heads):
        trained.update({name: p for name, p in part.named_parameters() if p.requires_grad})
    tensors.update(trained)
    for name, parameter in trained.items():
        state = optimizer.state[parameter]
        if not state:  # before its first step
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        for key, tensor in state.items():
            tensors[f"{name}/{key}"] = tensor
    return tensors


def saved_states(path: Path) -> list[Path]:
    """The directories in which `save_training` has left whole training states, oldest first."""
    if path.exists():
        os.listdir(path)  # raises OSError without permission, where `glob` would find nothing
    return sorted(path.glob("[0-9]" * 5))


def save_training(path: str | Path, model, optimizer, extra: dict):
    """Writes what a resumed run needs to PATH/00001, 00002, ...: `training_tensors` and `extra`.

    All ranks call it, each writes its part, and `load_training` reads them on any number of ranks.
    A directory gets its number when it is complete; only then is the one before it removed.
    """
    reshard(model)
    path = Path(path)
    fresh = path / "tmp"
    sharded = is_sharded(next(model.parameters()))
    parts = world_size() if sharded else 1
    with writing(path):
        if rank() == 0:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
        barrier()
        if rank() < parts:
            local = {}
            for name, tensor in training_tensors(model, optimizer).items():
                if is_sharded(tensor):
                    tensor = tensor.to_local()
                local[name] = tensor.detach().cpu().contiguous()
            save_file(local, fresh / f"part-{rank()}.safetensors")
        barrier()
        if rank() == 0:
            (fresh / "state.json").write_text(json.dumps({"parts": parts, "extra": extra}))
            older = saved_states(path)
            number = 1
            if older:
                number = int(older[-1].name) + 1
            fresh.rename(path / f"{number:05}")
            for directory in older:
                shutil.rmtree(directory)
    barrier()


def load_training(path: str | Path, model, optimizer) -> dict | None:
    """Brings model and optimizer to where `save_training` left them; returns `extra`, or None."""
    saved = saved_states(Path(path))
    if not saved:
        return None
    newest_state = saved[-1]
    reshard(model)
    with reading(f"{newest_state} (--no-resume starts over)"), contextlib.ExitStack() as stack:
        state = json.loads((newest_state / "state.json").read_text())
        parts = []
        for i in range(state["parts"]):
            file = safe_open(newest_state / f"part-{i}.safetensors", framework="pt")
            parts.append(stack.enter_context(file))
        tensors = training_tensors(model, optimizer)
        if set(parts[0].keys()) != set(tensors):
            raise ValueError("it belongs to another model or method; give its --model and --lora, "
                             "run its script, or give another --out")
        for name, tensor in tensors.items():
            pieces = [part.get_tensor(name) for part in parts]
            # FSDP2 cuts the first dimension. Heads and step counts are whole in every part.
            whole = pieces[0]
            if whole.shape != tensor.shape:
                whole = torch.cat(pieces)
            fill(tensor, whole)
        extra = state["extra"]
        if type(extra["step"]) is not int or extra["step"] < 0:
            raise ValueError(f"state.json has step {extra['step']!r:.60}")
        return extra


def fingerprint(path: str | Path | None) -> dict:
    """{file name: hash} of a checkpoint's weights, or of one file; {} if there is neither.

    Weights are gigabytes: their hash covers only the size and the first and last megabyte.
    """
    if not path:
        return {}
    path = Path(path)
    files = [path]
    if not path.is_file():
        files = sorted(path.glob("*.safetensors"))
    hashes = {}
    for file in files:
        size = file.stat().st_size
        ends = 1_000_000 if file.suffix == ".safetensors" else size
        with open(file, "rb") as content:
            begin = content.read(ends)
            content.seek(max(0, size - ends))
            end = content.read()
        seen = str(size).encode() + begin + end
        hashes[file.name] = hashlib.sha256(seen).hexdigest()
    return hashes


def checkpoint_fingerprint(path: str | Path | None) -> dict:
    """`fingerprint` of a checkpoint's weights and adapters, and of its agent.json, which decides the prompt."""
    if not path:
        return {}
    path = Path(path)
    return {**fingerprint(path), **fingerprint(path / "adapter"), **fingerprint(path / "agent.json")}


def inputs_of(cfg) -> dict:
    """{flag: {path: its fingerprint}} of what a run reads: its checkpoint, demonstrations and task files."""
    hash_functions = {"model": checkpoint_fingerprint, "data": fingerprint, "tasks": fingerprint}
    inputs = {}
    for flag, hashes_of in hash_functions.items():
        value = getattr(cfg, flag, None) or ""  # bc.py has no --tasks, mgrpo.py no --data
        paths = [value]
        if flag == "tasks":  # it may name several files
            paths = value.split(",")
        inputs[flag] = {path: hashes_of(path) for path in paths}
    return inputs


# Knobs that say where and how fast a run runs, and not what comes out.
PLACE_AND_PACE = {"out", "resume", "force", "save_every", "concurrency", "timeout", "max_tokens", "recompute",
                  "screenshots", "cuda_graph", "browser"}


def save_state(cfg, model, optimizer, *, step: int, inputs: dict, method_name: str = ""):
    """Saves the training state: the run continues with `step`.

    inputs: `RunDirectory.inputs`; method_name: see `resume`.
    """
    extra = {"step": step, "config": asdict(cfg), "inputs": inputs, "method": method_name}
    save_training(Path(cfg.out) / "state", model, optimizer, extra)


def differences(cfg, saved: dict, may_change: set[str], method_name: str) -> list[str]:
    """What differs between this run and the one that `save_state` saved: knobs, method, contents of its inputs."""
    was = saved["config"]
    found = []
    for key, now in asdict(cfg).items():
        if key in may_change or key not in was:  # a knob that was added since then has no saved value
            continue
        if was[key] != now:
            found.append(f"{key} {was[key]!r:.60}, not {now!r:.60}")
    if saved["method"] != method_name:
        found.append(f"the method {saved['method']}, not {method_name}")

    contents = {"model": "weights, adapters or agent.json", "data": "demonstrations", "tasks": "tasks"}
    for flag, hashes in inputs_of(cfg).items():
        paths = getattr(cfg, flag, None)
        same_paths = was.get(flag) == paths  # the first loop says so if not
        if same_paths and hashes != saved["inputs"][flag]:
            found.append(f"other {contents[flag]} in {paths}, which have been rewritten or removed since it began")
    return found


def resume(cfg, model, optimizer, may_change: set[str], method_name: str = "") -> int:
    """Loads the training state in cfg.out, if there is one; returns the step to continue with.

    method_name: the class that trains, MGRPO or a fork's; for bc.py its optimizer's. A run resumes only with the
    one that it began with.

    Randomness depends on (seed, step, task, member) alone, so there is no generator to restore. The
    run must have the same values, but for `may_change` and PLACE_AND_PACE.
    """
    state = Path(cfg.out) / "state"
    extra = None
    if cfg.resume:
        extra = load_training(state, model, optimizer)
    if extra is None:
        return 0

    with reading(f"{state} (--no-resume starts over)"):
        step = extra["step"]
        other = differences(cfg, extra, may_change | PLACE_AND_PACE, method_name)
    if other and not cfg.force:
        raise ValueError(f"{cfg.out} holds a run with {'; '.join(other)}. Give the same values, "
                         "--force to continue anyway, --no-resume to start over, or another --out.")
    return step


def remove(directory: Path):
    """Deletes a directory, if it is there. Of a link to one only the link: somebody has put it on another disk."""
    if directory.is_symlink():
        directory.unlink()
    else:
        shutil.rmtree(directory, ignore_errors=True)


def delete_directory(directory: Path):
    """Deletes a directory at once: after a kill all of it is there, or none (but for NAME.old)."""
    gone = directory.with_name(f"{directory.name}.old")
    remove(gone)
    if directory.exists():
        directory.rename(gone)
        remove(gone)


def swap_directory(directory: Path, fresh: Path):
    """Puts `fresh` in the place of a directory. A kill may leave neither there: see `undo_half_a_swap`."""
    gone = directory.with_name(f"{directory.name}.old")
    remove(gone)
    if directory.exists():
        directory.rename(gone)
    fresh.rename(directory)
    remove(gone)


def undo_half_a_swap(directory: Path):
    """Puts back what `swap_directory` has moved away, if the process was killed before `fresh` took its place."""
    gone = directory.with_name(f"{directory.name}.old")
    if gone.exists() and not directory.exists():
        gone.rename(directory)


# -------------------------------------------------------------------------------- a run's directory

# What a new run deletes of an earlier one, besides its weights.
# A name ends in .old if a process was killed while it deleted or swapped the directory.
DIRECTORIES = ("state", "state.old", "best", "best.new", "best.old", "step-[0-9]*", "adapter", "adapter.old",
               "screenshots", "screenshots.old", "unfinished", "unfinished.old")
RECORDS = ("metrics.jsonl", "trajectories.jsonl", "summary*.json", "report.html")
# A checkpoint's files, which a new run overwrites.
CHECKPOINT = ("*.safetensors", "config.json", "generation_config.json", "agent.json", "tokenizer*.json",
              "special_tokens_map.json", "chat_template.jinja")


class RunDirectory:
    """A run's directory. Only rank 0 writes."""

    def __init__(self, path: str | Path, config: dict):
        self.path = Path(path)
        self.config = config
        self.inputs = {}  # what `inputs_of` found when this process opened the run
        self.lock = None  # the file that `claim` locks; closing it would give the lock up

    def claim(self):
        """Locks the directory until this process ends: two runs in one would mix their records."""
        if rank() != 0:
            return
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.path / "lock", "a+")
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.lock.seek(0)
                raise ValueError(f"{self.path} is in use by process {self.lock.read()}; wait for it, "
                                 "stop it, or give another --out.") from None
            for pattern in ("*.json", "*.jsonl", "report.html"):  # what a killed process was writing in `replace`
                for leftover in self.path.glob(f"{pattern}.[0-9]*.tmp"):
                    leftover.unlink(missing_ok=True)
            self.lock.truncate(0)
            print(os.getpid(), end="", file=self.lock, flush=True)

    def replace(self, name: str, content: str | dict):
        """Writes a file under another name and renames it: readers never see half of it."""
        if rank() != 0:
            return
        text = content
        if not isinstance(content, str):
            text = json.dumps(content, indent=2) + "\n"
        with writing(self.path / name):
            temporary = self.path / f"{name}.{os.getpid()}.tmp"  # --report may write next to a run
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path / name)

    def append(self, name: str, lines: list[dict]):
        if rank() != 0:
            return
        with writing(self.path / name), open(self.path / name, "a", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")

    def write_metrics(self, metrics: dict):
        """Appends a line. JSON has no NaN, so non-finite numbers become null."""
        finite = json.loads(json.dumps(metrics), parse_constant=lambda _: None)
        self.append("metrics.jsonl", [finite])

    def begin(self, model_config: dict, first_step: int):
        """Call this right before training from `first_step` on: removes what later steps left, writes config.json.

        Until then an earlier run's directory is whole: this one may still find that it cannot train.
        """
        def is_earlier(line: dict) -> bool:  # lines of later steps come again
            step = line.get("step") or 0
            return step < first_step

        if first_step == 0:
            self.clear()
        if rank() == 0:
            undo_half_a_swap(self.path / "best")
            for name in ("metrics.jsonl", "trajectories.jsonl"):
                keep_lines(self.path / name, is_earlier)
        self.replace("config.json", {**model_config, "run": self.config})

    def clear(self):
        """Removes what an earlier run left, its policy too, so that nobody takes it for this run's."""
        if rank() != 0:
            return
        try:
            for pattern in DIRECTORIES:
                for found in self.path.glob(pattern):
                    delete_directory(found)
            for pattern in ("model.safetensors", "model-[0-9]*.safetensors", *RECORDS):
                for file in self.path.glob(pattern):
                    file.unlink()
        except OSError as error:
            raise ValueError(f"cannot clear {self.path}: {error}; a part of the earlier run may be gone") from error


def ask_git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def describe_run(cfg, device) -> dict:
    """The resolved configuration and what else is needed to repeat the run."""
    hardware = f"cpu, {torch.get_num_threads()} threads"
    if torch.device(device).type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    commit = ""
    with contextlib.suppress(OSError):  # git is not installed
        commit = ask_git("rev-parse", "--short=12", "HEAD")
        if ask_git("status", "--porcelain", "*.py", "*.js"):  # a new, untracked fork counts as well
            commit += "+changes"
    return {"script": Path(sys.argv[0]).name, **asdict(cfg), "commit": commit,
            "torch": torch.__version__, "device": hardware}


def holds_run(out: Path) -> bool:
    """Whether a training or an evaluation wrote what is there: config.json says so; before that the lock does."""
    config = out / "config.json"
    if config.exists():
        return "run" in read_json(config)
    return (out / "lock").exists()


def refuse_foreign(out: Path, patterns: tuple[str, ...]):
    """Raises ValueError if `out` holds files of these names, which a script of ours is about to replace or delete."""
    for pattern in patterns:
        for found in out.glob(pattern):
            raise ValueError(f"--out {out} is not the directory of a run, and {found.name} in it would be lost; "
                             "choose another --out.")


def refuse_inputs_in(out: Path, cfg):
    """Raises ValueError if `out`, which a new run overwrites, holds what this run starts from."""
    inputs = {"--model": cfg.model, "--data": getattr(cfg, "data", None)}  # mgrpo.py has no --data
    if cfg.model:
        adapters = Path(cfg.model) / "adapter" / "adapter_config.json"
        if adapters.exists():
            inputs["--model's frozen weights"] = read_json(adapters).get("base_model_name_or_path")
    for name, place in inputs.items():
        if not place:
            continue
        path = Path(os.path.realpath(place))
        if path.exists() and out in (path, *path.parents):
            raise ValueError(f"{name} {path} is in --out, which a new run overwrites; "
                             "choose another --out.")


def open_run(cfg, device, first_step: int) -> RunDirectory:
    """Claims cfg.out for a run that goes on at `first_step`, 0 for a new one.

    What is there stays as it is until `RunDirectory.begin`.
    """
    if not cfg.out:
        raise ValueError("--out: name a directory for the run.")
    if first_step == 0:
        out = Path(os.path.realpath(cfg.out))  # Path.resolve raises RuntimeError for a link to itself
        refuse_inputs_in(out, cfg)
        if not holds_run(out):
            refuse_foreign(out, (*DIRECTORIES, *RECORDS, *CHECKPOINT, "demos*.jsonl"))

    directory = RunDirectory(cfg.out, describe_run(cfg, device))
    directory.inputs = inputs_of(cfg)
    directory.claim()
    print0("config: " + ", ".join(f"{key} {value}" for key, value in directory.config.items()))
    return directory


# -------------------------------------------------------------------------------------- the report --


def embed_screenshots(records: list[dict], path: Path, room: int = 40_000_000):
    """Puts the screenshots of a run's records into them, the newest first, `room` bytes at most."""
    for record in reversed(records):
        for turn in record["turns"]:
            if "shot" not in turn:
                continue
            file = path / turn["shot"]["file"]
            if not file.exists():
                continue
            room -= file.stat().st_size
            if room > 0:
                turn["shot"]["jpeg"] = base64.b64encode(file.read_bytes()).decode()


def report(run_dir: str | Path, others=()) -> Path:
    """Writes run_dir/report.html, one file that needs no network -> its path. others: to compare."""
    path = Path(run_dir)
    shown = ("metrics.jsonl", "trajectories.jsonl", "summary.json")
    if not any((path / name).exists() for name in shown):
        raise ValueError(f"{path} holds no results of a run; give --out the directory of one.")
    config = {}
    if (path / "config.json").exists():
        config = read_json(path / "config.json")
    summaries = []
    for directory in (*others, path):
        for file in sorted(Path(directory).glob("summary*.json")):
            summaries.append({**read_json(file), "name": file.parent.resolve().name})
    trajectories, left_out = last_lines(path / "trajectories.jsonl")
    with reading(path / "trajectories.jsonl"):
        embed_screenshots(trajectories, path)
    metrics, _ = last_lines(path / "metrics.jsonl", count=100_000)

    data = {"name": path.name, "config": config.get("run", {}), "metrics": metrics,
            "trajectories": trajectories, "left_out": left_out, "summaries": summaries}
    # Page text is hostile: without a "<" it cannot close the script element that holds the data.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    template = (ROOT / "assets" / "report.html").read_text(encoding="utf-8")
    RunDirectory(path, {}).replace("report.html", template.replace("/*DATA*/", text))
    return path / "report.html"


def with_size(report: Path) -> str:
    return f"report: {report} ({report.stat().st_size / 1e6:.1f} MB)"


# --------------------------------------------------------------------------------- the command line

# Names of flags, those of forks/ among them.
SIZES = ("max_turns", "max_new_tokens", "max_context", "viewport_only", "text_only", "max_page_chars")
COUNTS = ("max_turns", "max_new_tokens", "max_tokens", "concurrency", "batch", "G", "updates_per_batch", "runs",
          "steps", "demos", "max_page_chars", "head_updates", "outcome_updates")
NOT_NEGATIVE = ("lr", "eps", "beta", "lora", "temperature", "save_every", "keep_every", "held_out_every")
ABOVE_ZERO = ("max_grad_norm", "epochs", "head_lr")
FINITE = ("lr", "head_lr", "beta", "temperature", "epochs", "turn_credit", "value_weight", "feedback",
          "awr_beta")
LEAST = {**dict.fromkeys(COUNTS, 1), **dict.fromkeys(NOT_NEGATIVE, 0)}


def remembered(checkpoint: str | None) -> dict:
    """The sizes and the kind of pages that a checkpoint of ours was trained with."""
    if not checkpoint:
        return {}
    path = Path(checkpoint) / "config.json"
    if not path.exists():  # a model of the hub
        return {}
    config = read_json(path)
    settings = config.get("run") or {}
    with reading(path):
        if not isinstance(settings, dict):
            raise ValueError(f"its run is {settings!r:.60}, not an object")
    has_model = "model_type" in config
    if not has_model and settings.get("script") == "evaluate.py":
        played = settings.get("model")
        raise ValueError(f"--model {checkpoint} is an evaluation and holds no weights; it played {played}.")
    sizes = {name: settings[name] for name in SIZES if name in settings}
    with reading(path):
        for name, value in sizes.items():
            kind = bool if name in ("viewport_only", "text_only") else int
            if type(value) is not kind or (kind is int and value < 1):
                raise ValueError(f"its run has {name} {value!r:.60}")
    return sizes


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def add_flag(parser: argparse.ArgumentParser, field, kind, comments: dict):
    """One flag for one field of a Config. kind: its type."""
    if isinstance(kind, types.UnionType):  # `float | None`: None stands for a value found later
        kind = kind.__args__[0]
    if kind is bool:
        options = {"action": argparse.BooleanOptionalAction}
    elif kind == list[int]:
        options = {"type": numbers, "metavar": "N,N,..."}
    elif kind in (int, float, str):
        options = {"type": kind, "metavar": kind.__name__.upper()}
    else:
        raise TypeError(f"{field.name}: a flag is an int, float, str or one of these or None, a bool, or a "
                        f"list[int], not {kind}.")
    text = comments.get(field.name, "").replace("%", "%%")
    parser.add_argument("--" + field.name.replace("_", "-"), help=f"{text} (default: %(default)r)", **options)


def parse_args(Config, description: str, presets: dict[str, dict], start=None, positional=()):
    """A Config from the command line, else presets, else the checkpoint's sizes, else defaults.

    The comment behind each field of Config is the flag's help: it is read from the source. start: the
    checkpoint that is opened without --model, or a function of the known arguments that returns the
    checkpoint; None: the script takes no sizes from its checkpoint. positional: fields that are given
    without a flag.
    """
    if "__dataclass_fields__" not in vars(Config):
        raise TypeError(f"{Config.__name__} needs @dataclass; without it, its own fields do not become flags.")

    # 1) A flag for each field. A comment of a class counts more than that of one it inherits from.
    first = "".join(f"{name.upper()} " for name in positional)
    stronger = [f"--{flag}" for flag in presets]
    if start is not None:
        stronger.insert(0, "the sizes in the checkpoint's config.json")
    note = ""
    if stronger:
        note = f"These defaults give way to {' and to '.join(stronger)}."
    parser = argparse.ArgumentParser(description=description, usage=f"%(prog)s {first}[--FLAG VALUE ...]",
                                     epilog=note, formatter_class=argparse.RawDescriptionHelpFormatter)
    classes = reversed(Config.__mro__[:-1])  # the last is `object`
    source = "".join(inspect.getsource(kind) for kind in classes)
    comments = dict(re.findall(r"^    (\w+): .*?#\s*(.+)$", source, re.MULTILINE))
    kinds = typing.get_type_hints(Config)
    for field in fields(Config):
        if field.name in positional:
            parser.add_argument(field.name, help=comments[field.name])
        else:
            add_flag(parser, field, kinds[field.name], comments)

    # 2) Defaults, where later ones replace earlier ones: Config's, the checkpoint's sizes, the presets asked for.
    parser.set_defaults(**vars(Config()))
    known, _ = parser.parse_known_args()
    checkpoint = start
    if callable(start):
        checkpoint = start(known)
    elif start is not None:
        checkpoint = known.model or start
    for name, value in remembered(checkpoint).items():
        if not isinstance(value, bool):
            value = str(value)  # argparse parses a default that is text, so 10 becomes [10] where a list is due
        parser.set_defaults(**{name: value})
    if getattr(known, "paper", False) and "paper" not in presets:
        raise ValueError("--paper: this script does not know the paper's values; let it pass "
                         "{'paper': mgrpo.PAPER} to run.command_line.")
    for flag, values in presets.items():
        if getattr(known, flag):
            parser.set_defaults(**values)

    # 3) The values.
    given = vars(parser.parse_args())
    for field in fields(Config):
        if given[field.name] == "" and field.default != "":  # such as "$M" where M is not set
            raise ValueError(f"--{field.name.replace('_', '-')} is empty; give a value, or leave it out.")
    refuse_out_of_range(given)
    return Config(**given)


def refuse_out_of_range(given: dict):
    """Raises ValueError if a number is smaller or larger than its flag allows. given: {field: value}"""
    for name, least in LEAST.items():
        value = given.get(name)
        if value is None:
            continue
        smallest = value
        if isinstance(value, list):  # evaluate.py's turns: 0 shows what passes when nobody acts
            smallest = min(value)
            least = 0
        in_range = smallest >= least  # False for nan
        if not in_range:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give at least {least}.")
    for name in ABOVE_ZERO:
        value = given.get(name, 1)
        if not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: give more than 0.")
    for name, value in given.items():
        if not isinstance(value, float):
            continue
        if math.isinf(value) and name not in FINITE:  # --max-grad-norm inf: no limit
            continue
        if not abs(value) < 1e30:  # nan, or so large that float32 cannot compute with it
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a finite number, less than 1e30.")
    temperature = given.get("temperature", 0)
    if 0 < temperature < 0.01:
        raise ValueError(f"--temperature {temperature:g}: give at least 0.01, or in evaluate.py 0 (greedy).")
    warmup = given.get("warmup", 0)
    if not 0 <= warmup <= 1:
        raise ValueError(f"--warmup {warmup:g}: it is a share of the steps, from 0 to 1.")


def is_ours(error: ValueError) -> bool:
    """Whether a file of ours, or a fork, raised it to say what to do. Else Python or a library found a bug."""
    *_, place = traceback.extract_tb(error.__traceback__)
    libraries = ("site-packages", sysconfig.get_path("stdlib"))
    from_a_library = any(library in place.filename for library in libraries)
    return place.line.startswith("raise") and not from_a_library


def command_line(main, Config, description: str, presets: dict[str, dict] = {}, start=None, positional=()):
    """Runs a script's main(Config), and exits. The user's errors and lost ranks print one line, Ctrl-C prints nothing.

    presets: {flag: the values it stands for}. start, positional: see `parse_args`.
    """
    script = Path(sys.argv[0]).name
    sys.stdout = sys.stdout or open(os.devnull, "w")
    # Flush every line, since a signal leaves no time for it. Escape a lone surrogate instead of failing to print it.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")
    # Ctrl-C ends the process at once. Python's own handler could not run in a rank that waits in C++.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        status = main(parse_args(Config, description, presets, start, positional))
    except (ValueError, OSError) as error:
        if isinstance(error, ValueError) and not is_ours(error):
            raise
        status = f"{script}: {error}"
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, dist.DistError):
            raise
        status = f"{script}: rank {rank()} lost another rank; run the same command again."
    if not dist.is_initialized():
        sys.exit(status)

    # A process group, even of one rank, has threads that destroy_process_group() does not stop. A normal exit
    # tears Python down under them, which now and then aborts a rank whose work is done. So skip that.
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    os._exit(int(bool(status)))
