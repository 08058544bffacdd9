"""What the tests share: a tokenizer trained on the spot, tiny random models, pages on loopback. Nothing comes from a network."""
import contextlib
import http.server
import json
import os
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from model import ModelConfig, RecordedStep, Transformer, save  # noqa: E402

torch.set_num_threads(1)  # two threads on a busy machine wait for each other longer than they compute



def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; make test-slow runs these")


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = ["<title>lamps</title> <a>home 0</a> <a>red lamp 5</a> $24 <button>add to cart 10</button> <input>city 8 = rome</input>",
        'system user assistant Task: Round 0 <think>look for it</think><answer># Element: red lamp 5\ndo(action="Click", '
        'element="5")</answer> exit(message="done") ** Simplified html ** error: note:'] * 20


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level BPE with ChatML's control tokens, a few hundred entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
                                  special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def tiny_config(model_type="qwen2", **changes) -> dict:
    return dict(model_type=model_type, architectures=["Qwen2ForCausalLM"], vocab_size=400, hidden_size=32, intermediate_size=48,
                num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6,
                rope_theta=10000.0, tie_word_embeddings=True, max_position_embeddings=4096, torch_dtype="float32") | changes


def tiny_model(model_type="qwen2", seed=0, **changes) -> Transformer:
    """Random weights large enough that every part of the network shows in the logits."""
    model = Transformer(ModelConfig.from_dict(tiny_config(model_type, **changes)))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.1 * noise if parameter.ndim == 1 else noise / parameter.shape[1] ** 0.5
    return model


class ComputedStep(RecordedStep):
    """Where no CUDA graph can be recorded: a replay computes the step anew, from the same buffers into the same logits."""
    STRIDE = 16

    def record(self, end):
        logits_SV = self.step(end)
        return types.SimpleNamespace(replay=lambda: logits_SV.copy_(self.step(end))), logits_SV.fill_(torch.nan)


@pytest.fixture(scope="session")
def checkpoint(tokenizer, tmp_path_factory):
    """A whole checkpoint directory with a tiny random model, and the short prompt a small policy uses."""
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save(tiny_model(vocab_size=tokenizer.get_vocab_size()), path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "agent.json").write_text(json.dumps({"system": "You browse the web.", "think": True}))
    return path


def descendants() -> dict[int, str]:
    """Process id -> command line, of everything that this process started, and what that started."""
    parents, commands = {}, {}
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # processes come and go
            parents[process] = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
            commands[process] = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()

    def ours(process):
        return process == os.getpid() or process in parents and ours(parents[process])
    commands.pop(os.getpid())
    return {process: command for process, command in commands.items() if command and ours(process)}


def chromium(kind: str) -> list[int]:
    """The ids of our Chromium processes of one kind: "renderer" or the like; "browser" is what started the others."""
    mark = {"browser": lambda command: "--type=" not in command}.get(kind, lambda command: f"--type={kind}" in command)
    return [process for process, command in descendants().items() if "chrom" in command.split(" ")[0] and mark(command)]


@pytest.fixture
def site():
    """serve(pages) -> base URL; pages: path -> HTML, or path -> function(handler) for anything else."""
    servers = []

    def serve(pages: dict) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                page = pages.get(self.path.split("?")[0])
                if callable(page):
                    return page(self)
                body = (page or "no such page").encode()
                self.send_response(200 if page is not None else 404)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()
