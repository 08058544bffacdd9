"""Compares model.py with transformers, and stores transformers' values in golden.json for the tests.

    python tests/golden/make.py [DIR]      needs transformers; DIR: SmolLM2-135M-Instruct

For every family, transformers opens a small random checkpoint of ours and we open one that it saved.
Weights must be bit-equal, logits within 2e-4, at the start and behind 20,000 positions. With DIR,
50 greedy tokens of five prompts must be equal.
"""
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
import transformers
from conftest import tiny_model

from model import generate, load, load_tokenizer, save

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
UNTIED = {"tie_word_embeddings": False}
FAMILIES = {
    "llama, tied, grouped queries": ("llama", {}),
    "llama, untied, one key a query": ("llama", UNTIED | {"num_key_value_heads": 4}),
    "llama 3.1, untied, llama3 scaling": ("llama", UNTIED | {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama 3.2, tied, one key for all": ("llama", {"num_key_value_heads": 1,
                                                   "rope_scaling": LLAMA3 | {"factor": 32.0}}),
    "qwen2, tied": ("qwen2", {}),
    "qwen2, untied": ("qwen2", UNTIED | {"rope_theta": 1e6}),
    "qwen3, tied, wide heads": ("qwen3", {"head_dim": 16}),
    "qwen3, untied": ("qwen3", UNTIED | {"head_dim": 12, "num_key_value_heads": 1}),
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Click the button that says",
           "<|im_start|>user\nWhat is 7 times 8?<|im_end|>\n<|im_start|>assistant\n", "Once upon a time, a lamp"]


def golden_model(family, changes):
    return tiny_model(family, seed=11, architectures=[ARCHITECTURES[family]], **changes)


def golden_tokens():
    return torch.randint(0, 400, (2, 100), generator=torch.Generator().manual_seed(12))


def same_weights(ours, theirs):
    theirs = theirs.state_dict()
    return all(torch.equal(weight, theirs[key]) for key, weight in ours.state_dict().items())


@torch.no_grad()
def compare_family(family, changes):
    """Opens each other's checkpoints; returns transformers' logits and the largest gap to ours."""
    ours, tokens = golden_model(family, changes), golden_tokens()
    with tempfile.TemporaryDirectory() as folder:
        save(ours, Path(folder) / "ours")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "ours")
        assert theirs.dtype == torch.float32 and same_weights(ours, theirs)
        theirs.save_pretrained(Path(folder) / "theirs", max_shard_size="30KB")  # several files
        again = load(Path(folder) / "theirs")
        assert same_weights(again, theirs)
        positions = torch.stack((torch.arange(100), torch.arange(20_000, 20_100)))
        logits = theirs(tokens, position_ids=positions).logits
        return logits, max(float((model(tokens, positions) - logits).abs().max()) for model in (ours, again))


@torch.no_grad()
def compare_greedy(path):
    """Returns transformers' 50 greedy tokens of each prompt, after checking that ours are the same."""
    tokenizer, ours = load_tokenizer(path), load(path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    out = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt).ids
        tokens_1T = torch.tensor([ids])
        expected = theirs.generate(tokens_1T, attention_mask=torch.ones_like(tokens_1T), do_sample=False,
                                   max_new_tokens=50, min_new_tokens=50, eos_token_id=None)[0, len(ids):].tolist()
        assert generate(ours, ids, 50)[0] == expected, prompt
        out.append({"prompt": prompt, "ids": expected})
        print(f"50 equal tokens: {prompt!r}{tokenizer.decode(expected[:12])!r}...")
    return out


def main(smollm2=None):
    path = Path(__file__).parent / "golden.json"
    golden = json.loads(path.read_text()) if path.exists() else {}
    golden |= {"transformers": transformers.__version__, "torch": torch.__version__, "families": []}
    for name, (family, changes) in FAMILIES.items():
        logits, gap = compare_family(family, changes)
        print(f"{name:36} largest gap {gap:.1e} of logits up to {logits.abs().max():.1f}")
        assert gap < 2e-4
        golden["families"].append({"name": name, "family": family, "changes": changes,
                                   "logits": logits[:, ::33, :24].tolist()})
    if smollm2:
        golden["smollm2"] = compare_greedy(smollm2)
    path.write_text(json.dumps(json.loads(json.dumps(golden), parse_float=lambda x: round(float(x), 5))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
