"""How many GPUs do I need? Runs one M-GRPO step of the project's own code on fake tensors.

    python tests/tools/plan.py Qwen2.5-3B --gpus 8 --context 16384
    python tests/tools/plan.py Llama-3.1-8B --gpus 1 --lora 16

A fake tensor has a shape and no data, so an 8B model takes seconds and no memory. The figures agree
with torch's own tracker (FSDPMemTracker) within 1% a line; no GPU has confirmed them yet.
"""
import argparse
import contextlib
import sys
import weakref
from collections import Counter
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))
import run  # first: it sets up OpenMP before torch loads

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import fsdp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as code
from model import (KVCache, ModelConfig, Transformer, adapt, as_reference, clip_gradients, sample, shard,
                   token_logprobs, unsharded)

SHAPES = {  # type, vocabulary, width, feed-forward, layers, heads, key/value heads, head size, tied
    "Llama-3.1-8B": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, False),
    "Llama-3.2-1B": ("llama", 128256, 2048, 8192, 16, 32, 8, 64, True),
    "Llama-3.2-3B": ("llama", 128256, 3072, 8192, 28, 24, 8, 128, True),
    "Qwen2.5-0.5B": ("qwen2", 151936, 896, 4864, 24, 14, 2, 64, True),
    "Qwen2.5-1.5B": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, True),
    "Qwen2.5-3B": ("qwen2", 151936, 2048, 11008, 36, 16, 2, 128, True),
    "Qwen2.5-7B": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, False),
    "Qwen3-0.6B": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, True),
    "Qwen3-1.7B": ("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, True),
    "Qwen3-4B": ("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, True),
    "Qwen3-8B": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, False),
}
CARDS = {24: 22.5, 48: 44.5, 80: 79.2, 141: 139.8}  # GB -> GiB that L4, L40S, H100 and H200 show
RESERVE = 1.1  # CUDA's context, scratch memory of kernels and NCCL, what the allocator cannot use
GIB = 2 ** 30
# Kinds of what a card holds. Of those that end in float32 every rank holds its part.
GATHERED = "gathered weights, bfloat16"
REST = "activations, temporary tensors"


def shape_config(name: str) -> ModelConfig:
    """The config of a model in SHAPES, or of a checkpoint directory."""
    if name not in SHAPES:
        path = Path(name) / "config.json"
        if not path.exists():
            raise ValueError(f"{name}: no checkpoint directory, none of {', '.join(SHAPES)}")
        return ModelConfig.from_dict(run.read_json(path), path)
    keys = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings")
    return ModelConfig.from_dict(dict(zip(keys, SHAPES[name])))


class Memory(TorchDispatchMode):
    """Logs (phase, storage's number, its bytes) as operations on fake tensors change it.

    kinds: what each storage holds; of a gradient, known only later. marked: how many positions a
    bool mask marks, since it has no data.
    """

    def __init__(self, marked: int):
        super().__init__()
        self.marked = marked
        self.items = []  # what the next calls of item() return
        self.phase = ""
        self.kinds = []
        self.log = []

    def see(self, storage, kind: str | None = None):
        """Logs a storage's bytes now, and 0 once it is freed."""
        if not hasattr(storage, "number"):
            number = storage.number = len(self.kinds)
            self.kinds.append("AdamW's copy, float32" if self.phase == "update" else REST)
            weakref.finalize(storage, self.log_freed, number)
        if kind is not None:
            self.kinds[storage.number] = kind
        self.log.append((self.phase, storage.number, storage.nbytes()))

    def log_freed(self, number: int):
        self.log.append((self.phase, number, 0))

    def name(self, kind: str, tensors):
        """Says what the tensors' storages hold."""
        for tensor in tensors:
            if hasattr(tensor, "to_local"):  # a DTensor: this rank's part
                tensor = tensor.to_local()
            self.see(tensor.untyped_storage(), kind)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(hasattr(type_, "to_local") for type_ in types):
            return NotImplemented  # DTensor comes back with this rank's part

        if operation is torch.ops.aten._local_scalar_dense.default:  # item()
            if self.items:
                return self.items.pop(0)
            return int(args[0].dtype != torch.bool)  # any number will do

        mask = None
        if operation is torch.ops.aten.index.Tensor:
            index = args[1][0]
            if index is not None and index.dtype == torch.bool:
                mask = index
        if mask is not None:
            out = args[0].new_empty(self.marked, *args[0].shape[mask.ndim:])
        else:
            out = operation(*args, **(kwargs or {}))

        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
                self.see(tensor.untyped_storage())
        return out

    def peaks(self) -> dict:
        """{phase: {kind: bytes}} when each phase held most."""
        peaks = {}
        sizes = Counter()  # of each storage
        now = Counter()  # of each kind
        for phase, number, size in self.log:
            now[self.kinds[number]] += size - sizes[number]
            sizes[number] = size
            most = sum(peaks.get(phase, {}).values())
            if now.total() > most:
                peaks[phase] = dict(now)
        return peaks


def shard_as_on_gpus(config: ModelConfig, lora: int = 0) -> Transformer:
    """A model without weights, cut by `shard`, with the precision that it chooses on GPUs."""
    dtype = torch.bfloat16 if lora else torch.float32
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with (
        patch.object(fsdp, "MixedPrecisionPolicy", lambda *_: policy),
        patch.object(torch.cuda, "is_available", lambda: False),
        torch.device("meta"),
    ):
        model = Transformer(config).to(dtype)
        return shard(adapt(model, lora))


@contextlib.contextmanager
def gpu_kernels(memory: Memory):
    """Stand-ins that allocate on the CPU what a GPU's kernels do, and FSDP2's resizing, which `memory` has to see."""
    resize = torch.UntypedStorage.resize_

    def resized(storage, size):  # FSDP2 allocates and frees gathered weights by resizing
        resize(storage, size)
        memory.see(storage, GATHERED)

    def flash_attention(q_BHTE, k_BKCE, v_BKCE, mask_B1TC=None):
        out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q_BHTE, k_BKCE, v_BKCE, 0.0, True)
        return out

    def layer_norm(x, shape, weight, eps):
        return F.layer_norm(x, shape, weight)

    with (
        patch.object(torch.UntypedStorage, "resize_", resized),
        patch.object(code, "attend", flash_attention),
        patch.object(F, "rms_norm", layer_norm),
    ):
        yield


def plan(config: ModelConfig, gpus: int, context: int, episodes: int, recompute=True, lora=0):
    """Peak bytes per GPU in each phase of an M-GRPO step: {phase: {kind: bytes}}.

    Runs model.py with a fake process group: nothing is computed or sent. The tensors are on
    the CPU, so the GPU's kernels have stand-ins: LayerNorm allocates what fused RMSNorm does, and
    AdamW is told to be its foreach version. A micro-batch is one packed row of `context` tokens.
    lora: the rank of adapters; then the policy without them is the reference.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the process group
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=gpus)
    models = [shard_as_on_gpus(config, lora)]
    if not lora:
        models.append(shard_as_on_gpus(config))
    memory = Memory(marked=context // 2)

    with FakeTensorMode(allow_non_fake_inputs=True), memory, gpu_kernels(memory):
        policy, *others = [model.to_empty(device="cpu") for model in models]
        policy.recompute = recompute
        trained = [weight for weight in policy.parameters() if weight.requires_grad]

        # 1) What is there before the first step.
        memory.name("frozen policy, bfloat16" if lora else "policy, float32", policy.parameters())
        if lora:
            memory.name("adapters, float32", trained)
        for reference in others:
            reference.requires_grad_(False)
            memory.name("reference, float32", reference.parameters())
        optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, foreach=True)

        # 2) Adam's moments exist from the first update on.
        memory.phase = "first update"
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        plan_update(policy, optimizer, memory)

        # 3) A step: its second micro-batch begins with the gradients of the first.
        memory.phase = "training"
        for _ in range(2):
            plan_micro_batch(policy, *others, context=context, memory=memory)
        memory.phase = "update"
        plan_update(policy, optimizer, memory)
        memory.phase = "rollout"
        plan_rollout(policy, context, episodes, memory)
    dist.destroy_process_group()

    peaks = memory.peaks()
    return {phase: peaks[phase] for phase in ("rollout", "training", "update")}


def plan_update(policy: Transformer, optimizer, memory: Memory):
    """Clipping and a step of AdamW."""
    clip_gradients(policy, 1.0)
    optimizer.step()
    for state in optimizer.state.values():
        memory.name("Adam's moments, float32", (state["exp_avg"], state["exp_avg_sq"]))
    optimizer.zero_grad()


@torch.no_grad()
def plan_rollout(policy: Transformer, context: int, episodes: int, memory: Memory):
    """A chunk of one episode's prefill and one token of every episode."""
    with unsharded(policy) as model:
        if model is not policy:
            memory.name(GATHERED, model.parameters())
        weight = model.model.embed_tokens.weight
        cache = KVCache(model.config, episodes, context + 1, weight.dtype)
        memory.name("KV cache, bfloat16", (cache.k, cache.v))
        chunk = torch.zeros(1, min(2048, context), dtype=torch.long)
        memory.items = [context - chunk.numel(), context - 1]  # its first and last position
        model(chunk, chunk, cache, slice(0, 1), head=no_logits)
        token = torch.zeros(episodes, 1, dtype=torch.long)
        logits_BTV = model(token, token, cache, end=context)
        sample(logits_BTV[:, -1], torch.zeros(episodes))


def no_logits(x_BTD):
    """A `head` that keeps no position."""
    return x_BTD[:, :0]


def plan_micro_batch(policy: Transformer, reference: Transformer | None = None, *, context: int,
                     memory: Memory):
    """Forward and backward pass of eight rows that share all but their ends, as the episodes of a group may.

    Then attention holds the most: one row is written whole, and each other end has nearly all of it as its context.
    """
    end = context // 16
    whole = context - 7 * end
    segments = [(0, whole, 0, 0)]
    for start in range(whole, context, end):
        segments.append((start, start + end, 0, whole - end))
    tokens_BT = torch.zeros(1, context, dtype=torch.long)
    action_BT = torch.zeros(1, context, dtype=torch.bool)
    logp_N = token_logprobs(policy, tokens_BT, action_BT, segments=segments)[0]
    with torch.no_grad(), as_reference(policy):
        logp_ref_N = token_logprobs(reference or policy, tokens_BT, action_BT, segments=segments)[0]
    (logp_N - logp_ref_N).exp().sum().backward()

    gradients = [weight.grad for weight in policy.parameters() if weight.requires_grad]
    memory.name("gradients, float32", gradients)
    if reference:  # FSDP2 leaves the outermost module gathered if no backward pass follows
        gathered = [weight for weight in reference.parameters() if not hasattr(weight, "to_local")]
        memory.name(GATHERED, gathered)


def peak(phases: dict, more: float = 1.0) -> float:
    """GiB that a card must have. more: times as many GPUs, which share all that is float32."""
    largest = 0.0
    for held in phases.values():
        total = 0.0
        for kind, size in held.items():
            if kind.endswith("float32"):
                size /= more
            total += size
        largest = max(largest, total)
    return RESERVE * largest / GIB


def enough_gpus(phases: dict, gpus: int, size: float) -> int | None:
    """The smallest power of two, up to 1,024, of cards of `size` GiB that hold what `gpus` cards hold in phases."""
    for i in range(11):
        count = 2 ** i
        if peak(phases, count / gpus) <= size:
            return count
    return None


def print_line(kind: str, sizes: list[float]):
    """sizes: GiB in each phase."""
    columns = [f"{size:9.1f}" for size in sizes]
    print(f"{kind:34}", *columns)


def print_table(phases: dict):
    """GiB of each kind in each phase; what has no name of its own comes last."""
    print(f"{'GiB per GPU':34}", *[f"{phase:>9}" for phase in phases])
    kinds = []
    for held in phases.values():
        for kind in held:
            if kind not in kinds and kind != REST:
                kinds.append(kind)
    for kind in [*kinds, REST]:
        print_line(kind, [held.get(kind, 0) / GIB for held in phases.values()])
    print_line("total", [sum(held.values()) / GIB for held in phases.values()])


def print_plan(args):
    if min(args.context // 16, args.episodes, args.gpus) < 1:
        raise ValueError("give --gpus and --episodes at least 1, --context at least 16")
    config = shape_config(args.model)
    phases = plan(config, args.gpus, args.context, args.episodes,
                  recompute=not args.no_recompute, lora=args.lora)

    title = f"{args.model}, GPUs: {args.gpus}, tokens of context: {args.context:,}"
    title += f", episodes at once per GPU: {args.episodes}"
    if args.lora:
        title += f", LoRA of rank {args.lora}"
    print(title + "\n")
    print_table(phases)
    needed = peak(phases)
    print(f"\nneeded: {needed:.1f} GiB, the largest total and {RESERVE - 1:.0%} reserve")

    for card, size in CARDS.items():
        spare = size - needed
        fits = spare >= 0
        verdict = f"fits, {spare:.0f} GiB to spare" if fits else f"lacks {-spare:.0f} GiB"
        if args.lora:  # a rollout holds the whole model and its cache, on however many GPUs
            enough = 1 if fits else None
        else:
            enough = enough_gpus(phases, args.gpus, size)
        remedy = f"GPUs that would do: {enough}" if enough else "reduce episodes or context"
        print(f"{card:4} GB cards ({size} GiB usable): {verdict}; {remedy}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help=f"a checkpoint directory or one of {', '.join(SHAPES)}")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--context", type=int, default=16384, help="tokens of the longest episode")
    parser.add_argument("--episodes", type=int, default=8, help="decoded at once on each GPU")
    parser.add_argument("--lora", type=int, default=0, help="the rank of LoRA's adapters; 0: none")
    parser.add_argument("--no-recompute", action="store_true",
                        help="keep all activations instead of recomputing them")
    try:
        print_plan(parser.parse_args())
    except ValueError as error:
        sys.exit(f"plan.py: {error}")


if __name__ == "__main__":
    main()
