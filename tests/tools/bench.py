"""Measures speed and memory, section by section; compares with transformers if it is installed (it is no dependency).

    python tests/tools/bench.py model --checkpoint runs/smollm2 --threads 2
    python tests/tools/bench.py model --shape Llama-3.1-8B --device cuda --tokens 8192      # bfloat16, random weights
    python tests/tools/bench.py phases --shape Qwen2.5-3B --lora 16 --tokens 16384 --concurrency 8        # on a GPU
    python tests/tools/bench.py step --checkpoint runs/smollm2 --data runs/smol-bc/demos.jsonl --lora 16 --threads 1
    python tests/tools/bench.py packing --threads 2
    python tests/tools/bench.py rollout          # browsers, compared with bare Playwright; kept keys and values
    python tests/tools/bench.py leaks --episodes 2000

Ours and theirs take turns within one process, so that whatever else the machine does slows both; figures are medians.
Memory is the peak of a process of its own that does one training step and nothing else, with an allocator that returns
what is freed at once: the peak is that of the tensors.
"""
import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from functools import partial
from inspect import signature
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT))
import run as run_py  # noqa: F401  first: it sets up OpenMP before torch loads

import torch
from playwright.async_api import async_playwright

import model as model_py
import rollout as rollout_py
from compress import Row, Trajectory, context, micro_batches, open_chat, pack, replay, trajectory_rows
from conftest import Env, descendants, pad
from model import (KVCache, ModelConfig, GraphedStep, Transformer, adapt, as_reference, attend, clip_gradients,
                   computing_dtype, load, load_for_training, sample, shard, token_logprobs, unsharded)
from plan import GIB, plan, shape_config
from rollout import Engine, Settings, actions_help
from worlds import load_tasks, open_sites
from worlds.browser import Browser, BrowserSettings, Session, find_chromium, origin

transformers = find_spec("transformers")  # imported where it is used: what measures our memory does without


def take_turns(contestants: dict, repeats: int) -> dict:
    """Median seconds of each; a contestant is a function that returns the seconds that count."""
    times = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            times[name].append(run())
    return {name: statistics.median(seconds) for name, seconds in times.items()}


# On a machine that is busy with other work the clock on the wall measures that work; one thread's CPU time does not.
CLOCK = time.process_time if "--cpu-time" in sys.argv else time.perf_counter


def on_gpu() -> bool:
    return torch.get_default_device().type == "cuda"


def seconds(run) -> float:
    """How long run() takes; on a GPU until its kernels have ended."""
    if on_gpu():
        torch.cuda.synchronize()
    began = CLOCK()
    run()
    if on_gpu():
        torch.cuda.synchronize()
    return CLOCK() - began


def memory(what: str, process: int | str = "self") -> int:
    """Bytes that a process holds (VmRSS), or held at most (VmHWM; getrusage's figure begins with that of its parent)."""
    status = Path(f"/proc/{process}/status").read_text()
    kilobytes = re.search(rf"{what}:\s+(\d+)", status)[1]
    return 1024 * int(kilobytes)


def peak_memory() -> int:
    """The most bytes that this process has held, on a GPU those of its tensors."""
    return torch.cuda.max_memory_allocated() if on_gpu() else memory("VmHWM")


def print_row(what: str, unit: str, ours: float, theirs: float | None = None, ratio: float | None = None, remark=""):
    beside = f"{'-':>12} {'-':>9}"
    if theirs is not None:
        beside = f"{theirs:12.2f} {ratio:8.2f}x"
    print(f"{what:44} {ours:10.2f} {beside} {unit:10} {remark}", flush=True)


def print_speeds(what: str, tokens: int, times: dict, remark=""):
    """A row of tokens a second. times: seconds of "ours" and, if there is one, of "theirs"."""
    ours = tokens / times["ours"]
    if "theirs" not in times:
        print_row(what, "tokens/s", ours, remark=remark)
        return
    theirs = tokens / times["theirs"]
    print_row(what, "tokens/s", ours, theirs, ours / theirs, remark)


# ---------------------------------------------------------------------------------------------------------- model.py --


def new_cache(model, rows: int, length: int) -> KVCache:
    weight = model.model.embed_tokens.weight
    return KVCache(model.config, rows, length, weight.dtype, weight.device)


def last_logits(model):
    """The head of a pass that needs the logits of the last token only."""
    def head(x_BTD):
        return model.logits(x_BTD[:, -1])
    return head


def decode_ours(model, rows: int, context: int, n: int, recorded: bool = False) -> float:
    """Seconds of n tokens for each row. recorded: by a CUDA graph."""
    cache = new_cache(model, rows, context + n)
    cache.k.normal_()
    cache.v.normal_()
    graph = GraphedStep(model, cache)
    head = last_logits(model)

    def run():
        tokens_B1 = torch.full((rows, 1), 7)
        for position in range(context, context + n):
            positions_B1 = position - torch.arange(rows)[:, None]  # as in a rollout, no two rows hold equally much
            if recorded:
                logits_BV = graph(tokens_B1, positions_B1, position)
            else:
                logits_BV = model(tokens_B1, positions_B1, cache, head=head)
            ids_B, _ = sample(logits_BV, None, temperature=0)
            tokens_B1 = ids_B[:, None]

    if recorded:
        run()  # a rollout records once and replays for minutes
    return seconds(run)


def attend_to_lengths(q_BHTE, k_BKCE, v_BKCE, mask_B1TC=None):
    """`attend` for decoding on a GPU without a mask: flash attention that knows the length of every row.

    With a mask torch takes the memory-efficient kernel, whose blocks share no row's keys: 8 rows of Qwen2.5-3B keep 16
    of a GPU's multiprocessors busy. varlen_attn (mha_varlen_fwd) divides the keys among them if each query is one token
    and has more heads than the keys. So each of a row's key heads becomes a sequence of its own, where it lies in the
    cache.
    """
    from torch.nn.attention.varlen import varlen_attn
    B, H, T, E = q_BHTE.shape
    K, C = k_BKCE.shape[1:3]
    if mask_B1TC is None or T > 1:
        return attend(q_BHTE, k_BKCE, v_BKCE, mask_B1TC)

    # 1) Where each sequence begins, and how many keys it may see. The layers of a pass share the mask.
    if not hasattr(mask_B1TC, "lengths"):
        sequences = torch.arange(B * K + 1, dtype=torch.int32)
        length = k_BKCE.stride(1) // E  # of a row in the cache
        seen = (mask_B1TC == 0).sum(-1).flatten().int()
        mask_B1TC.lengths = sequences, sequences * length, seen.repeat_interleave(K)
    starts_q, starts_k, seen = mask_B1TC.lengths

    # 2) The cache as one sequence after the other, without a copy.
    def flat(x_BKCE):
        length = x_BKCE.stride(1) // E
        return x_BKCE.as_strided(((B * K - 1) * length + C, 1, E), (E, E, 1))

    q = q_BHTE.reshape(B * K, H // K, E)
    out = varlen_attn(q, flat(k_BKCE), flat(v_BKCE), starts_q, starts_k, 1, C, enable_gqa=H > K, seqused_k=seen)
    return out.reshape(B, H, T, E)


def knows_grouped_lengths() -> bool:
    """Whether this torch's varlen_attn lets several query heads share a key head; that of 2.11 does not."""
    from torch.nn.attention.varlen import varlen_attn
    return "enable_gqa" in signature(varlen_attn).parameters


def decode_flash(model, rows: int, context: int, n: int) -> float:
    with patch.object(model_py, "attend", attend_to_lengths):
        return decode_ours(model, rows, context, n, recorded=True)


def compare_decoding_attention(model, repeats: int, context: int = 16_384):
    """Decoding behind a long context on a GPU: with a mask, as model.py does, and with the rows' lengths."""
    def noise(heads, length):
        return torch.randn(4, heads, length, 128, dtype=torch.bfloat16)

    q = noise(16, 1)
    k = noise(2, 1000)
    v = noise(2, 1000)
    newest = torch.tensor([9, 99, 500, 999])[:, None, None, None]
    mask = torch.where(torch.arange(1000) > newest, -torch.inf, 0.0).bfloat16()
    gap = (attend(q, k, v, mask) - attend_to_lengths(q, k, v, mask)).abs().max()
    print(f"attention with lengths differs from attention with a mask by at most {gap:.1e}")

    for rows in (1, 8):
        times = take_turns({"mask": partial(decode_ours, model, rows, context, 8, recorded=True),
                            "lengths": partial(decode_flash, model, rows, context, 8)}, repeats)
        for name, took in times.items():
            print_row(f"decode, {rows} rows with {context} tokens, {name}", "tokens/s", rows * 8 / took)


def decode_theirs(model, rows: int, context: int, n: int) -> float:
    config = model.config
    cache = import_module("transformers").DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        k, v = torch.randn(2, rows, config.num_key_value_heads, context, config.head_dim, dtype=model.dtype)
        cache.update(k, v, layer)
    ids = torch.full((rows, context + 1), 7)

    def run():
        model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
                       max_new_tokens=n, min_new_tokens=n)
    return seconds(run)


def prefill_ours(model, length: int) -> float:
    cache = new_cache(model, 1, length)
    ids = torch.full((1, length), 7)
    positions = torch.arange(length)[None]
    return seconds(partial(model, ids, positions, cache, head=last_logits(model)))


def prefill_theirs(model, length: int) -> float:
    ids = torch.full((1, length), 7)
    return seconds(partial(model, ids, use_cache=True, logits_to_keep=1))


def read_rate() -> float:
    """Bytes a second at which a matrix too large for any cache is multiplied by a vector."""
    matrix = torch.ones(8192, 16384)
    vector = torch.ones(16384)
    times = [seconds(lambda: matrix @ vector) for _ in range(7)]
    return matrix.nbytes / statistics.median(times)


def multiply_rate(dtype) -> float:
    """Floating-point operations a second in the product of two large square matrices."""
    matrix = torch.randn(4096, 4096, dtype=dtype)
    times = [seconds(lambda: matrix @ matrix) for _ in range(7)]
    return 2 * 4096 ** 3 / statistics.median(times)


def train_flops(c: ModelConfig, tokens: int, scored: int) -> float:
    """Of a forward and a backward pass without recomputation: 6 a weight and token, and causal attention."""
    with torch.device("meta"):
        layers = sum(weight.numel() for weight in Transformer(c).model.layers.parameters())
    attention = 6 * tokens ** 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim
    head = 6 * scored * c.vocab_size * c.hidden_size
    return 6 * tokens * layers + head + attention


def open_ours(args):
    if not args.shape:
        return load(args.checkpoint, computing_dtype(torch.device(args.device)), args.device)
    torch.set_default_dtype(computing_dtype(torch.device(args.device)))
    try:
        return Transformer(shape_config(args.shape))  # on the default device; what its random weights say is no matter
    finally:
        torch.set_default_dtype(torch.float32)


def open_theirs(args):
    library = import_module("transformers")
    dtype = computing_dtype(torch.device(args.device))
    if not args.shape:
        return library.AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=dtype).to(args.device)
    raw = dict(shape_config(args.shape).raw)
    config = library.AutoConfig.for_model(raw.pop("model_type"), **raw)
    return library.AutoModelForCausalLM.from_config(config, dtype=dtype)


def train_step(args):
    """One training step of a trajectory whose last 5% are actions: prints its seconds and the process's peak memory."""
    if args.variant == "theirs":
        model = open_theirs(args)
    else:
        model = open_ours(args)
        model.recompute = args.variant == "recomputed"

    def step(n_tokens):
        place_BT = torch.arange(n_tokens)[None]
        ids = place_BT * 7919 % 1000
        action_BT = place_BT >= n_tokens * 0.95
        if args.variant == "theirs":
            labels = ids.masked_fill(~action_BT, -100)
            loss = model(ids, labels=labels).loss
        else:
            logp_N, _, _ = token_logprobs(model, ids, action_BT)
            loss = -logp_N.mean()
        loss.backward()

    warm = args.tokens if args.device == "cuda" else 64  # a GPU chooses its kernels by size
    step(warm)
    model.zero_grad()
    took = seconds(lambda: step(args.tokens))
    print(json.dumps({"seconds": took, "bytes": peak_memory()}))


def model(args):
    """Decoding, prefill and a training step of model.py beside transformers."""
    with torch.no_grad():
        compare_inference(args)
    if args.device == "cuda":
        torch.cuda.empty_cache()
    compare_training(args)


def compare_inference(args):
    ours = open_ours(args)
    theirs = open_theirs(args) if transformers else None
    cuda = args.device == "cuda"
    dtype = ours.model.embed_tokens.weight.dtype
    hardware = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads"
    beside = version("transformers") if transformers else "not installed: its columns stay empty"
    print(f"{args.shape or args.checkpoint}, {str(dtype).removeprefix('torch.')}, {hardware}, "
          f"torch {torch.__version__}, transformers {beside}")
    print(f"{'':44} {'ours':>10} {'theirs':>12} {'ratio':>9}")

    # 1) Decoding. One row can be no faster than the weights can be read.
    floor = sum(weight.nbytes for weight in ours.parameters()) / read_rate()
    for rows in (1, 8, 32):
        n = 16 if rows == 1 else 8
        contestants = {"ours": partial(decode_ours, ours, rows, 512, n, recorded=cuda)}
        if cuda:
            contestants["direct"] = partial(decode_ours, ours, rows, 512, n)
        if theirs:
            contestants["theirs"] = partial(decode_theirs, theirs, rows, 512, n)
        times = take_turns(contestants, args.repeats)
        if cuda:
            print_row(f"decode, {rows} rows, without a CUDA graph", "tokens/s", rows * n / times["direct"])
        remark = ""
        if rows == 1:
            remark = f"{floor * n / times['ours']:.0%} of the rate at which the weights can be read"
        print_speeds(f"decode, {rows} rows with 512 tokens", rows * n, times, remark)

    # 2) Prefill.
    contestants = {"ours": partial(prefill_ours, ours, 512)}
    if theirs:
        contestants["theirs"] = partial(prefill_theirs, theirs, 512)
    print_speeds("prefill, 512 tokens", 512, take_turns(contestants, args.repeats))
    if cuda and knows_grouped_lengths():
        compare_decoding_attention(ours, args.repeats)


def train_in_a_child(args, variant: str) -> dict:
    """`train_step` in a process of its own -> its seconds and bytes."""
    command = [sys.executable, __file__, "train_step", "--variant", variant, "--checkpoint", args.checkpoint,
               "--shape", args.shape, "--device", args.device, "--tokens", str(args.tokens),
               "--threads", str(args.threads)]
    if args.cpu_time:
        command.append("--cpu-time")
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    child = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    return json.loads(child.stdout.splitlines()[-1])


def compare_training(args):
    found = {"ours": [], "recomputed": []}
    if transformers:
        found["theirs"] = []
    for _ in range(args.train_repeats):
        for variant, results in found.items():
            results.append(train_in_a_child(args, variant))

    def middle(variant: str, key: str) -> float:
        return statistics.median(result[key] for result in found[variant])

    config = shape_config(args.shape or args.checkpoint)
    dtype = computing_dtype(torch.device(args.device))
    fastest = train_flops(config, args.tokens, args.tokens // 20) / multiply_rate(dtype)
    for variant in ("ours", "recomputed"):
        how = ", recomputed" if variant == "recomputed" else ""
        took = middle(variant, "seconds")
        held = middle(variant, "bytes")
        time_beside = []
        memory_beside = []
        if transformers:
            theirs = middle("theirs", "seconds")
            time_beside = [theirs, theirs / took]
            theirs = middle("theirs", "bytes")
            memory_beside = [theirs / 1e9, held / theirs]
        remark = f"{fastest / took:.0%} of the rate at which large matrices are multiplied"
        print_row(f"training step, {args.tokens} tokens, 5% actions{how}", "s", took, *time_beside, remark=remark)
        print_row(f"  its peak memory{how}", "GB", held / 1e9, *memory_beside, remark="of theirs")


# ------------------------------------------------------------------------------------------------------------ plan.py --


def phases(args):
    """The peak memory of an M-GRPO step on this GPU, phase by phase, beside what plan.py computes."""
    config = shape_config(args.shape)
    episodes = args.concurrency
    planned = plan(config, 1, args.tokens, episodes, lora=args.lora)
    measured = step_on_gpu(config, args.tokens, episodes, args.lora)
    kind = f"LoRA of rank {args.lora}" if args.lora else "all weights"
    print(f"{args.shape}, {kind}, {args.tokens} tokens of context, {episodes} episodes, {torch.cuda.get_device_name()}")
    print(f"{'GiB':12} {'planned':>10} {'measured':>10}")
    for phase, held in planned.items():
        print(f"{phase:12} {sum(held.values()) / GIB:10.2f} {measured[phase] / GIB:10.2f}", flush=True)
    print(f"{'reserved':12} {'':10} {torch.cuda.max_memory_reserved() / GIB:10.2f}  by torch's allocator, at most")


def step_on_gpu(config, context: int, episodes: int, lora: int) -> dict:
    """Runs what plan.py describes, with random weights: {phase: the most bytes allocated}."""
    device = run_py.init_dist()
    torch.set_default_device(device)

    def random_policy():
        dtype = torch.bfloat16 if lora else torch.float32
        with torch.device("meta"):
            policy = shard(adapt(Transformer(config).to(dtype), lora))
        policy.to_empty(device=device)
        for weight in policy.parameters():
            whole = weight.to_local() if hasattr(weight, "to_local") else weight
            whole.data.normal_(std=0.02)
        return policy

    policy = random_policy()
    policy.recompute = True
    reference = policy if lora else random_policy().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, foreach=True)

    def train():
        """Eight rows that share all but their ends, as in plan_micro_batch."""
        end = context // 16
        whole = context - 7 * end
        segments = [(0, whole, 0, 0)]
        positions = list(range(whole))
        for start in range(whole, context, end):
            segments.append((start, start + end, 0, whole - end))
            positions.extend(range(whole - end, whole))
        tokens = torch.randint(0, config.vocab_size, (1, context))
        positions = torch.tensor([positions])
        action = torch.arange(context)[None] % 2 == 1
        logp = token_logprobs(policy, tokens, action, positions_BT=positions, segments=segments)[0]
        with torch.no_grad(), as_reference(policy):
            logp_ref = token_logprobs(reference, tokens, action, positions_BT=positions, segments=segments)[0]
        (logp - logp_ref).exp().sum().backward()

    def update():
        clip_gradients(policy, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def roll_out():
        with unsharded(policy) as model:
            dtype = model.model.embed_tokens.weight.dtype
            cache = KVCache(config, episodes, context + 1, dtype, device)
            length = min(2048, context)  # Engine.prefill's chunk
            chunk = torch.randint(0, config.vocab_size, (1, length))
            positions = torch.arange(context - length, context)[None]
            model(chunk, positions, cache, slice(0, 1), head=lambda x_BTD: x_BTD[:, :0])
            last = torch.full((episodes, 1), context - 1)
            logits = model(chunk[0, :1].expand(episodes, 1), last, cache, end=context)[:, -1]
            sample(logits, torch.rand(episodes, dtype=torch.float64))

    train()
    update()  # from here on Adam's moments exist
    most = {}
    for phase, parts in (("rollout", [roll_out]), ("training", [train, train]), ("update", [update])):
        torch.cuda.reset_peak_memory_stats()
        for part in parts:
            part()
        most[phase] = torch.cuda.max_memory_allocated()
    return most


# -------------------------------------------------------------------------------------------------------- compress.py --


def cpu_seconds(run) -> float:
    """Of all threads together: where others use the machine, the clock tells how busy they are."""
    began = time.process_time()
    run()
    return time.process_time() - began


def random_ids(n: int) -> list[int]:
    return torch.randint(0, 1000, (n,)).tolist()


def rows_of_a_trajectory(page: int, turns: int) -> list[Row]:
    """600 tokens of instructions; of each past turn a placeholder of 30 and a response of 150; a page."""
    history = random_ids(600 + 180 * turns)
    rows = []
    for t in range(turns):
        before = history[:600 + 180 * t]
        rows.append(Row(before + random_ids(30 + page + 150), n_action=150))
    return rows


def packing(args):
    """Training on one trajectory, packed and one row per turn; one layer of Qwen2.5-0.5B's shape: all layers cost alike."""
    raw = dict(model_type="qwen2", vocab_size=1000, hidden_size=896, intermediate_size=4864, num_hidden_layers=1,
               num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1e6)
    network = Transformer(ModelConfig.from_dict(raw))

    def step(layout: list[dict]):
        for inputs in layout:
            logp_N, _, _ = token_logprobs(network, **inputs)
            (-logp_N.mean()).backward()

    print(f"{'(row per turn, packed)':28} {'tokens':>16} {'ratio':>6} {'CPU seconds':>16} {'ratio':>6}")
    for page, turns in ((1500, 15), (6000, 8)):
        rows = rows_of_a_trajectory(page, turns)
        single = []
        for row in rows:
            tokens_BT, action_BT = pad([row])
            single.append({"tokens_BT": tokens_BT, "action_BT": action_BT})
        packed = [pack(batch) for batch in micro_batches(rows, args.max_tokens)]
        times = take_turns({"single": partial(cpu_seconds, partial(step, single)),
                            "packed": partial(cpu_seconds, partial(step, packed))}, args.train_repeats)
        a = sum(inputs["tokens_BT"].numel() for inputs in single)
        b = sum(inputs["tokens_BT"].numel() for inputs in packed)
        print(f"{page}-token pages, {turns:2} turns    {a:8} {b:7} {a / b:5.2f}x {times['single']:8.1f} "
              f"{times['packed']:7.1f} {times['single'] / times['packed']:5.2f}x", flush=True)


# --------------------------------------------------------------------------------------------------- a step of mgrpo.py --


class Meter:
    """Seconds and tokens of each part: CPU seconds of the thread that computes, on a GPU those of the clock."""

    def __init__(self, cuda: bool):
        self.clock = time.perf_counter if cuda else time.thread_time
        self.wait = torch.cuda.synchronize if cuda else run_py.ignore
        self.seconds = Counter()
        self.tokens = Counter()

    @contextlib.contextmanager
    def part(self, name: str, tokens: int = 0):
        self.wait()
        began = self.clock()
        yield
        self.wait()
        self.seconds[name] += self.clock() - began
        self.tokens[name] += tokens

    def print(self):
        for name, took in self.seconds.items():
            n = self.tokens[name]
            speed = f"{n:8} tokens {n / took:9.1f} tokens/s" if n else ""
            print(f"  {name:20} {took:9.2f} s {speed}", flush=True)
        print(f"  {'together':20} {sum(self.seconds.values()):9.2f} s", flush=True)


def to_prefill(engine: Engine, request) -> tuple[int, int]:
    """How many tokens of a request have to be computed, and how many if slots did not copy from each other."""
    ids = request.context_ids[:-1]
    kept = [len(os.path.commonprefix([held, ids])) for held in engine.held]
    return len(ids) - max(kept), len(ids) - kept[request.slot]


class MeteredEngine(Engine):
    """An engine that measures its passes. All responses have max_new_tokens."""

    def prefill(self, request):
        new, new_in_slot = to_prefill(self, request)
        self.uncopied += new_in_slot
        with self.meter.part("prefill", new):
            super().prefill(request)

    def decode(self):
        with self.meter.part("decode", len(self.running)):
            return super().decode()


async def respond_to_recorded(engine, chat, episodes, slots: int):
    """Every episode's turns in order, `slots` episodes at once, without a browser between them."""
    queue = iter(episodes)

    async def work(slot):
        for episode in queue:
            for t in range(len(episode.turns)):
                await engine.respond(context(chat, episode, t), slot, random.Random(t))

    serving = asyncio.ensure_future(engine.serve())
    await asyncio.gather(*(work(slot) for slot in range(slots)))
    serving.cancel()
    await asyncio.wait([serving])


def recorded_episodes(chat, args) -> list[Trajectory]:
    """Groups of recorded episodes, which differ from their first token on: slots share as little as can be."""
    records = [json.loads(line) for line in Path(args.data).read_text().splitlines()]
    episodes = []
    for i in range(args.episodes):
        episode = replay(chat, records[i // args.group % len(records)])
        for turn in episode.turns:
            turn.response_ids[0] = 100 + i % args.group
        episodes.append(episode)
    return episodes


def step(args):
    """A step of mgrpo.py on recorded episodes (bc.py's OUT/demos.jsonl, say), part by part, without browsers."""
    chat = open_chat(args.checkpoint, actions_help())
    episodes = recorded_episodes(chat, args)
    rows = []
    for episode in episodes:
        rows += trajectory_rows(chat, episode)
    length = statistics.mean(row.n_action for row in rows)
    context_length = statistics.mean(len(row.ids) for row in rows) - length
    run_py.init_dist(args.precision)
    network = load_for_training(args.checkpoint, torch.device(args.device), args.lora, args.precision)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-6, weight_decay=0.0)
    print(f"{args.checkpoint}, {args.precision}, LoRA {args.lora}, {args.episodes} episodes, {len(rows)} responses "
          f"of {length:.0f} tokens, contexts of {context_length:.0f}, {torch.get_num_threads()} threads")
    meter = Meter(args.device == "cuda")

    # 1) Rollout.
    longest = max(len(row.ids) for row in rows)
    with unsharded(network) as whole:
        engine = MeteredEngine(whole, -1, n_slots=args.concurrency, length=longest + 64, max_new_tokens=round(length))
        engine.meter = meter
        engine.uncopied = 0
        asyncio.run(respond_to_recorded(engine, chat, episodes, args.concurrency))
    after_rollout = peak_memory()

    # 2) Training.
    for batch in micro_batches(rows, args.max_tokens):
        inputs = pack(batch, args.device)
        n = inputs["tokens_BT"].numel()
        with meter.part("training, forward", n):
            logp_N, _, _ = token_logprobs(network, **inputs)
        with meter.part("training, backward", n):
            (-logp_N.sum() / len(rows)).backward()
    with meter.part("optimizer"):
        clip_gradients(network, 1.0)
        optimizer.step()
    meter.print()
    apart = sum(len(row.ids) for row in rows)
    print(f"  prefill without copies between slots: {engine.uncopied} tokens; training with one row per turn: {apart} tokens\n"
          f"  peak memory: {after_rollout / 1e9:.2f} GB after the rollout, {peak_memory() / 1e9:.2f} GB after the training")


# --------------------------------------------------------------------------------------------------------- rollout.py --


async def our_steps(tasks: list[dict], steps: int, visited: list) -> float:
    """Every task's session observes and clicks a link, `steps` times; seconds without opening and closing.

    visited: gets every session's addresses.
    """
    async def walk(session, addresses, rng):
        for _ in range(steps):
            url, page = await session.observe()
            addresses.append(url)
            link = rng.choice(re.findall(r"<a>[^<]* <(\d+)></a>", page))
            await session.execute("Click", Session.click, int(link))

    async with Browser(BrowserSettings()) as browser:
        sessions = [await browser.open(task) for task in tasks]
        visited[:] = [[] for _ in tasks]
        walks = []
        for i, session in enumerate(sessions):
            walks.append(walk(session, visited[i], random.Random(i)))
        began = time.perf_counter()
        await asyncio.gather(*walks)
        took = time.perf_counter() - began
        for session in sessions:
            await session.close()
    return took


async def bare_steps(tasks: list[dict], visited: list, click: bool) -> float:
    """The floor: in the same Chromium, Playwright alone visits the same pages and reads each one's text.

    click: by the link that leads there, as an agent must; otherwise it calls the address, which is less work.
    """
    def link_to(address: str) -> str:
        path = address.removeprefix(origin(address))
        return f'a[href="{path}"]'

    async def walk(page, addresses):
        linked = False  # whether the page has a link to the next address
        for url, after in zip(addresses, [*addresses[1:], ""]):
            if click and linked:
                async with page.expect_navigation():
                    await page.locator(link_to(url)).first.click()
            else:
                await page.goto(url)
            read = "selector => [document.body.innerText, !!document.querySelector(selector)]"
            _, linked = await page.evaluate(read, link_to(after))

    async with Browser(BrowserSettings()) as browser:
        pages = []
        for i, task in enumerate(tasks):
            headers = {"X-World": f"{task['world']}-bare{i}"}
            browser_context = await browser.chromium.new_context(extra_http_headers=headers)
            pages.append(await browser_context.new_page())
        began = time.perf_counter()
        await asyncio.gather(*map(walk, pages, visited))
        return time.perf_counter() - began


async def chromium_path() -> str:
    async with async_playwright() as playwright:
        return find_chromium(playwright)


def clicks(chat, turns: int):
    """A policy that clicks the first element until its last turn."""
    async def act(trajectory, slot):
        last = len(trajectory.turns) == turns
        text = "exit()" if last else 'do(action="Click", element="0")'
        return [*chat.encode(text), chat.end_id], [], True
    return act


def rollout(args):
    """Environment steps compared with bare Playwright; what keeping keys and values saves."""
    with open_sites("sandbox") as urls:
        tasks = load_tasks("sandbox:test:64", urls)
        compare_steps(tasks, args)
        count_prefilled(tasks)


def compare_steps(tasks: list[dict], args):
    print(f"{'contexts':10} {'our steps/s':>12} {'bare clicks/s':>14} {'ratio':>7} {'bare calls/s':>14} {'ratio':>7}")
    for contexts in (1, 4, 8, 16):
        some = tasks[:contexts]
        steps = args.steps // contexts
        visited = []
        times = take_turns({"ours": lambda: asyncio.run(our_steps(some, steps, visited)),
                            "clicks": lambda: asyncio.run(bare_steps(some, visited, click=True)),
                            "calls": lambda: asyncio.run(bare_steps(some, visited, click=False))}, args.repeats)
        ours = contexts * steps / times["ours"]
        by_link = contexts * steps / times["clicks"]
        by_address = contexts * steps / times["calls"]
        print(f"{contexts:<10} {ours:12.1f} {by_link:14.1f} {ours / by_link:6.2f}x {by_address:14.1f} "
              f"{ours / by_address:6.2f}x", flush=True)
        if contexts == 1 and args.browsergym:
            compare_browsergym(args.browsergym, tasks[0]["start_url"], ours)


def compare_browsergym(python: str, start_url: str, ours: float):
    """python: the interpreter of an environment with browsergym-core."""
    script = Path(__file__).with_name("browsergym_steps.py")
    for delay in ("0.5", "0"):  # seconds that it sleeps in each step; the first is its default
        command = [python, script, asyncio.run(chromium_path()), start_url, "30", delay]
        theirs = float(subprocess.check_output(command))
        print(f"1, browsergym-core with a delay of {delay} s: {theirs:.2f} steps/s, {ours / theirs:.1f}x", flush=True)


class CountingEngine(Engine):
    """An engine that counts what it prefills."""
    turns = 0
    whole = 0  # tokens of the contexts
    new = 0    # of these, tokens that were computed

    def prefill(self, request):
        new, _ = to_prefill(self, request)
        CountingEngine.turns += 1
        CountingEngine.whole += len(request.context_ids) - 1
        CountingEngine.new += new
        super().prefill(request)


def count_prefilled(tasks: list[dict]):
    base = "worlds/base"
    chat = open_chat(base, actions_help())
    settings = Settings(max_turns=10, max_new_tokens=64, max_context=1536)
    with patch.object(rollout_py, "Engine", CountingEngine):
        asyncio.run(rollout_py.rollout(load(base), chat, tasks, Env(), settings))
    turns = CountingEngine.turns
    whole = CountingEngine.whole / turns
    new = CountingEngine.new / turns
    print(f"prefilled tokens a turn, {turns} turns on the sandbox: {new:.0f}; without the kept trunk "
          f"{whole:.0f}, {whole / new:.2f}x", flush=True)


def resident(process: int | str) -> float:
    """MB of memory that a process holds."""
    return memory("VmRSS", process) / 2 ** 20


def started(name: str) -> list[int]:
    """The processes that we have started whose program is called like this."""
    return [process for process, command in descendants().items() if name in command.split(" ")[0]]


class Weighing(Env):
    """Prints what our process and Chromium's hold every 200 episodes."""

    def __init__(self):
        self.began = time.monotonic()
        self.ended = 0
        print("episodes   our MB  node MB  processes  Chromium MB  contexts  per second")

    async def verdict(self, task, answer, page, checks):
        self.ended += 1
        if self.ended % 200 == 0:
            chromium = started("chrom")
            node = sum(map(resident, started("node")))
            contexts = len(page.context.browser.contexts)
            speed = self.ended / (time.monotonic() - self.began)
            print(f"{self.ended:8} {resident('self'):8.0f} {node:8.0f} {len(chromium):10} "
                  f"{sum(map(resident, chromium)):12.0f} {contexts:9} {speed:10.2f}", flush=True)
        return 1.0


def leaks(args):
    """Plays short episodes and watches the memory."""
    chat = open_chat("worlds/base", actions_help())
    with open_sites("sandbox") as urls:
        every = load_tasks("sandbox:train", urls)
        tasks = [every[i % len(every)] for i in range(args.episodes)]
        settings = Settings(max_turns=3, max_context=4096, concurrency=8)
        asyncio.run(rollout_py.play(clicks(chat, 3), chat, tasks, Weighing(), settings))


SECTIONS = {"model": model, "train_step": train_step, "phases": phases, "step": step, "packing": packing,
            "rollout": rollout, "leaks": leaks}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--checkpoint", default="runs/smollm2")
    parser.add_argument("--shape", default="", help="random weights of this shape (plan.py's), not a checkpoint")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="of model; on cuda in bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds; with --threads 1 on a busy machine")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train-repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=32768, help="of a micro-batch in packing and step")
    parser.add_argument("--tokens", type=int, default=4096, help="of the trajectory in the training step")
    parser.add_argument("--data", default="runs/bc/demos.jsonl", help="recorded episodes, for step")
    parser.add_argument("--group", type=int, default=4, help="episodes of a task, of step")
    parser.add_argument("--lora", type=int, default=0, help="of step and phases")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"), help="of step")
    parser.add_argument("--concurrency", type=int, default=16, help="episodes at once, of step and phases")
    parser.add_argument("--steps", type=int, default=160, help="of all contexts together in rollout")
    parser.add_argument("--episodes", type=int, default=2000, help="of leaks and step")
    parser.add_argument("--browsergym", metavar="PYTHON", help="of an environment with browsergym-core, for rollout")
    parser.add_argument("--variant", default="ours", choices=("ours", "recomputed", "theirs"), help="of train_step")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.device == "cuda":  # a default device, even the CPU, puts Python between every call and torch
        torch.set_default_device(args.device)
    SECTIONS[args.section](args)
