"""How many GPUs do I need? Runs one M-GRPO step of the project's own code on fake tensors.

    python tests/tools/plan.py Qwen2.5-3B --gpus 8 --context 16384
    python tests/tools/plan.py Llama-3.1-8B --gpus 1 --lora 16

A fake tensor has a shape and no data, so an 8B model takes seconds and no memory. The figures agree
with torch's own tracker (FSDPMemTracker) within 1% a line, and with what an H200 allocated within 3%
(`bench.py phases`; figures in assets/bench/).
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

COLUMNS = (  # of SHAPES, by their names in config.json
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
SHAPES = {
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
CARDS = {  # nominal GB: GiB that the card shows
    24: 22.5,    # L4
    48: 44.5,    # L40S
    80: 79.2,    # H100
    141: 139.8,  # H200
}
RESERVE = 1.1  # CUDA's context, scratch memory of kernels and NCCL, what the allocator cannot use
GIB = 2 ** 30
# Kinds of what a card holds. Of those that end in float32 every rank holds its part.
GATHERED = "gathered weights, bfloat16"
REST = "activations, temporary tensors"


def shape_config(name: str) -> ModelConfig:
    """The config of a model in SHAPES, or of a checkpoint directory."""
    if name in SHAPES:
        shape = zip(COLUMNS, SHAPES[name])
        return ModelConfig.from_dict(dict(shape))

    path = Path(name) / "config.json"
    if not path.exists():
        raise ValueError(f"{name}: no checkpoint directory, none of {', '.join(SHAPES)}")
    return ModelConfig.from_dict(run.read_json(path), path)


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
            storage.number = self.new_number()
            weakref.finalize(storage, self.log_size, storage.number, 0)
        if kind is not None:
            self.kinds[storage.number] = kind
        self.log_size(storage.number, storage.nbytes())

    def new_number(self) -> int:
        """The number of a storage not seen before. In an update, new ones are the optimizer's."""
        kind = REST
        if self.phase == "update":
            kind = "AdamW's copy, float32"
        self.kinds.append(kind)
        return len(self.kinds) - 1

    def log_size(self, number: int, size: int):
        change = (self.phase, number, size)
        self.log.append(change)

    def name(self, kind: str, tensors):
        """Says what the tensors' storages hold."""
        for tensor in tensors:
            if hasattr(tensor, "to_local"):  # a DTensor: this rank's part
                tensor = tensor.to_local()
            self.see(tensor.untyped_storage(), kind)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        """PyTorch calls this instead of an operation."""
        for cls in types:
            if hasattr(cls, "to_local"):
                return NotImplemented  # DTensor comes back with this rank's part

        # 1) What fake tensors cannot do, since it depends on data: item(), and x[mask].
        if operation is torch.ops.aten._local_scalar_dense.default:
            return self.item(args[0])
        mask = None
        if operation is torch.ops.aten.index.Tensor:
            x, indices = args
            index = indices[0]
            if index is not None and index.dtype == torch.bool:
                mask = index

        if mask is None:
            kwargs = kwargs or {}
            out = operation(*args, **kwargs)
        else:
            unmasked = x.shape[mask.ndim:]
            out = x.new_empty(self.marked, *unmasked)

        # 2) Log the results.
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
                self.see(tensor.untyped_storage())
        return out

    def item(self, tensor) -> int:
        """The number in a tensor that has no data."""
        if self.items:
            return self.items.pop(0)
        if tensor.dtype == torch.bool:
            return 0
        return 1  # any number will do

    def peaks(self) -> dict:
        """{phase: {kind: bytes}} when each phase held most."""
        peaks = {}
        most = Counter()  # of each phase
        sizes = Counter()  # of each storage
        held = Counter()  # of each kind
        for phase, number, size in self.log:
            kind = self.kinds[number]
            held[kind] += size - sizes[number]
            sizes[number] = size
            total = held.total()
            if total > most[phase]:
                most[phase] = total
                peaks[phase] = dict(held)
        return peaks


def shard_as_on_gpus(config: ModelConfig, lora: int = 0) -> Transformer:
    """A model without weights, cut by `shard`, with the precision that it chooses on GPUs."""
    dtype = torch.float32
    if lora:
        dtype = torch.bfloat16
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with (
        patch.object(fsdp, "MixedPrecisionPolicy", return_value=policy),
        patch.object(torch.cuda, "is_available", return_value=False),
        torch.device("meta"),
    ):
        model = Transformer(config).to(dtype)
        adapt(model, lora)
        return shard(model)


@contextlib.contextmanager
def gpu_kernels(memory: Memory):
    """Stand-ins that allocate on the CPU what a GPU's kernels do, and FSDP2's resizing, which `memory` has to see."""
    resize = torch.UntypedStorage.resize_

    def resized(storage, size):  # FSDP2 allocates and frees gathered weights by resizing
        resize(storage, size)
        memory.see(storage, GATHERED)

    def flash_attention(q_BHTE, k_BKCE, v_BKCE, mask_B1TC=None):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        y_BHTE, *_ = kernel(q_BHTE, k_BKCE, v_BKCE, dropout_p=0.0, is_causal=True)
        return y_BHTE

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
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=gpus)
    policy = shard_as_on_gpus(config, lora)
    reference = policy
    if not lora:
        reference = shard_as_on_gpus(config)
    memory = Memory(marked=context // 2)

    with FakeTensorMode(allow_non_fake_inputs=True), memory, gpu_kernels(memory):
        # 1) What is there before the first step.
        policy.to_empty(device="cpu")
        policy.recompute = recompute
        trained = [weight for weight in policy.parameters() if weight.requires_grad]
        if lora:
            memory.name("frozen policy, bfloat16", policy.parameters())
            memory.name("adapters, float32", trained)
        else:
            reference.to_empty(device="cpu")
            reference.requires_grad_(False)
            memory.name("policy, float32", policy.parameters())
            memory.name("reference, float32", reference.parameters())
        optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0, foreach=True)

        # 2) Adam's moments exist from the first update on.
        memory.phase = "first update"
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        plan_update(policy, optimizer, memory)

        # 3) A step: its second micro-batch begins with the gradients of the first.
        memory.phase = "training"
        plan_micro_batch(policy, reference, context, memory)
        plan_micro_batch(policy, reference, context, memory)
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
        moments = (state["exp_avg"], state["exp_avg_sq"])
        memory.name("Adam's moments, float32", moments)
    optimizer.zero_grad()


@torch.no_grad()
def plan_rollout(policy: Transformer, context: int, episodes: int, memory: Memory):
    """The last chunk of one episode's prefill, and one token of every episode."""
    with unsharded(policy) as model:
        if model is not policy:
            memory.name(GATHERED, model.parameters())
        dtype = model.model.embed_tokens.weight.dtype
        cache = KVCache(model.config, episodes, context + 1, dtype)
        memory.name("KV cache, bfloat16", (cache.k, cache.v))

        # 1) Prefill. The cache asks for the lowest and the highest position, which are not in the tensor.
        T = min(2048, context)  # Engine.prefill's chunk
        chunk_1T = torch.zeros(1, T, dtype=torch.long)
        memory.items = [context - T, context - 1]
        model(chunk_1T, chunk_1T, cache, slice(0, 1), head=no_logits)

        # 2) Decode.
        token_B1 = torch.zeros(episodes, 1, dtype=torch.long)
        logits_B1V = model(token_B1, token_B1, cache, end=context)
        uniform_B = torch.zeros(episodes)
        sample(logits_B1V[:, -1], uniform_B)


def no_logits(x_BTD):
    """A `head` that keeps no position."""
    return x_BTD[:, :0]


def plan_micro_batch(policy: Transformer, reference: Transformer, context: int, memory: Memory):
    """Forward and backward pass of eight rows that share all but their ends, as the episodes of a group may.

    Then attention holds the most: one row is written whole, and each other end has nearly all of it as its context.
    """
    # 1) The rows, packed; see `Transformer.forward`.
    end = context // 16
    whole = context - 7 * end
    segments = [(0, whole, 0, 0)]
    for start in range(whole, context, end):
        segments.append((start, start + end, 0, whole - end))
    tokens_1T = torch.zeros(1, context, dtype=torch.long)
    action_1T = torch.zeros(1, context, dtype=torch.bool)

    # 2) Their passes. An expression of all log-probs stands in for the loss.
    logp_N = token_logprobs(policy, tokens_1T, action_1T, segments=segments)[0]
    with torch.no_grad(), as_reference(policy):
        logp_ref_N = token_logprobs(reference, tokens_1T, action_1T, segments=segments)[0]
    loss = (logp_N - logp_ref_N).exp().sum()
    loss.backward()

    # 3) What they leave behind.
    gradients = [weight.grad for weight in policy.parameters() if weight.requires_grad]
    memory.name("gradients, float32", gradients)
    if reference is not policy:  # FSDP2 leaves the outermost module gathered if no backward pass follows
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


def print_line(kind: str, sizes: list[int]):
    """sizes: bytes in each phase."""
    cells = [f"{size / GIB:9.1f}" for size in sizes]
    print(f"{kind:34}", *cells)


def print_table(phases: dict):
    """GiB of each kind in each phase; what has no name of its own comes last."""
    head = [f"{phase:>9}" for phase in phases]
    print(f"{'GiB per GPU':34}", *head)

    kinds = []
    for held in phases.values():
        for kind in held:
            if kind not in kinds and kind != REST:
                kinds.append(kind)
    kinds.append(REST)
    for kind in kinds:
        sizes = [held.get(kind, 0) for held in phases.values()]
        print_line(kind, sizes)

    totals = [sum(held.values()) for held in phases.values()]
    print_line("total", totals)


def print_plan(args):
    if args.gpus < 1 or args.episodes < 1 or args.context < 16 or args.lora < 0:
        raise ValueError("give --gpus and --episodes at least 1, --context at least 16, --lora at least 0")
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
        if spare >= 0:
            verdict = f"fits, {spare:.0f} GiB to spare"
        else:
            verdict = f"lacks {-spare:.0f} GiB"

        # With LoRA a rollout holds the whole model and its cache, on however many GPUs.
        enough = None
        if not args.lora:
            enough = enough_gpus(phases, args.gpus, size)
        elif spare >= 0:
            enough = 1
        remedy = "reduce episodes or context"
        if enough:
            remedy = f"GPUs that would do: {enough}"
        print(f"{card:4} GB cards ({size} GiB usable): {verdict}; {remedy}")


def main():
    first_line = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(description=first_line)
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
