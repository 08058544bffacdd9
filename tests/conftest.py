"""What the tests share: a tokenizer trained on the spot, tiny random models, pages on loopback. Nothing comes from a network."""
import asyncio
import contextlib
import http.server
import json
import os
import signal
import socket
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/tools")]

from model import GraphedStep, ModelConfig, Transformer, save  # noqa: E402

torch.set_num_threads(1)  # two threads on a busy machine wait for each other longer than they compute



def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes minutes; make test-slow runs these")
    # A shell starts what runs in its background deaf to Ctrl-C, and the runs that tests interrupt inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # tests compute on the CPU; make test-gpu shows them a GPU


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = ["<title>lamps</title> <a>home <0></a> <a>red lamp <5></a> $24 <button>add to cart <10></button> "
        "<input>city <8> = rome</input>",
        'system user assistant Task: Round 0 <think>look for it</think><answer># Element: red lamp <5>\ndo(action="Click", '
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


class ComputedStep(GraphedStep):
    """For machines without CUDA graphs: a replay computes the step again, with the same buffers."""
    STRIDE = 16

    def capture(self, end):
        logits_SV = self.step(end)
        replay = lambda: logits_SV.copy_(self.step(end))
        return types.SimpleNamespace(replay=replay), logits_SV.fill_(torch.nan)


def pad(batch):
    """Training rows the obvious way, one turn a row, padded on the right -> (tokens_BT, action_BT).

    The reference for `compress.pack`. Causality hides the padding; action_BT comes from recorded lengths.
    """
    T = max(len(row.ids) for row in batch)
    tokens = [row.ids + [0] * (T - len(row.ids)) for row in batch]
    action = [[len(row.ids) - row.n_action <= t < len(row.ids) for t in range(T)] for row in batch]
    return torch.tensor(tokens), torch.tensor(action)


@pytest.fixture(scope="session")
def chat(tokenizer):
    from compress import Chat
    return Chat(tokenizer, "You browse the web.")


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
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield serve
    for server in servers:
        server.shutdown()  # takes as long as serve_forever polls
        server.server_close()


def answer(request, body: bytes = b"", status: int = 200, **headers):
    """What a site's page function sends."""
    request.send_response(status)
    for name, value in {"Content-Type": "text/html", "Content-Length": str(len(body)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)


def require_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")


def redirect(to):
    return lambda request: answer(request, status=302, Location=to)


PAGE = """<title>lamps &amp; more</title>
<nav><a href="/two">home</a> <a href="/two">cart</a></nav><h1>lamps</h1>
<form action="/two"><label>search <input name=q></label><button>go</button></form>
<ul><li><a href="/two">red  lamp</a> $24</li><li><a href="/two"><b>blue</b> lamp</a> $31</li></ul>
<table><tr><td>order 12<td>shipped<td><a href="/two">view</a></tr></table>
<select aria-label=size><option>small<option>large</select> <label><input type=checkbox>gift wrap</label>
<p>not an element: &lt;a>trap &lt;3>&lt;/a></p><div style="display:none">hidden <a href=x>no</a></div>
<script>var x = "code"</script>
<div id=spot style="cursor:pointer">spot <button>inner</button></div><button disabled>later</button>
<span role=button onclick="document.title='clicked'">do it</span><textarea placeholder=note>old</textarea>
<input type=hidden value=h>"""


# ------------------------------------------------------------------------------- one Chromium for many tests


@pytest.fixture(scope="session")
def shared_browser():
    """(event loop, Browser) for the whole test run. This Browser has no fence."""
    from worlds.browser import Browser, BrowserSettings
    loop = asyncio.new_event_loop()
    browser = Browser(BrowserSettings(timeout=60))
    loop.run_until_complete(browser.__aenter__())
    yield loop, browser
    loop.run_until_complete(browser.__aexit__())
    loop.close()


@pytest.fixture
def run(shared_browser, monkeypatch):
    """run(coroutine): like asyncio.run, but all Browsers in it use the Chromium that tests share.

    Saves the second that a Chromium takes to start. That Chromium has no fence and loads images, whatever
    sites and settings the Browser has. Tests of the fence, or that kill Chromium, use asyncio.run.
    """
    from worlds.browser import Browser
    loop, shared = shared_browser
    loop.run_until_complete(shared.revive())

    async def enter(browser):
        browser.playwright, browser.chromium = shared.playwright, shared.chromium
        return browser

    async def leave(browser, *_):
        for browser_context in list(shared.chromium.contexts):
            await browser_context.close()

    monkeypatch.setattr(Browser, "__aenter__", enter)
    monkeypatch.setattr(Browser, "__aexit__", leave)
    return loop.run_until_complete


@pytest.fixture
def browse(run):
    """Runs the coroutine function test(session) in a session of its own."""
    from worlds.browser import Browser, BrowserSettings

    def browse(test, start_url, settings=None, **task):
        async def go():
            async with Browser(settings or BrowserSettings(timeout=20)) as browser:
                session = await browser.open({"start_url": start_url, **task})
                try:
                    await test(session)
                finally:
                    await session.close()
        run(go())
    return browse


async def execute(session, text):
    """Executes an action as an episode does. Raises ActionError."""
    import rollout
    call = rollout.parse(text)
    await session.execute(call.name, rollout.ACTIONS[call.name].method, *call.method_args())


async def act(session, text) -> str:
    """Executes an action; returns the observation that follows."""
    await execute(session, text)
    return (await session.observe())[1]


@pytest.fixture(scope="session")
def sandbox_sites():
    """{SITE: address} of one sandbox process for the whole test run; each episode has a world of its own there."""
    from worlds import sandbox
    with sandbox.start() as sites:
        yield sites


@pytest.fixture
def solve(chat, run, sandbox_sites, tmp_path):
    """solve(tasks, policy(task) -> (observation -> thought, action)): trajectories, judged as in training."""
    from compress import format_response
    from evaluate import Environment, SiteSettings
    from rollout import Settings, play
    from worlds.webarena import site_urls

    def solve(tasks, policy):
        policies = {}

        async def act(trajectory, slot):
            if len(trajectory.turns) == 1:
                policies[slot] = policy(trajectory.task)
            thought, action = policies[slot](trajectory.turns[-1].observation)
            return [*chat.encode(format_response(thought, action, chat.think)), chat.end_id], [], True

        settings = Settings(max_turns=20, max_context=100_000, concurrency=8)
        environment = Environment(sandbox_sites, tmp_path, SiteSettings())
        return run(play(act, chat, site_urls(tasks, sandbox_sites), environment, settings))
    return solve


# ------------------------------------------------------------------------------------------- episodes


class Env:
    """The task's side of an episode, as evaluate.Environment is: no login, no pictures, a verdict of the test's.

    judge(task, answer, page, checks) -> success; a number is the verdict on every episode.
    """
    visible = False

    def __init__(self, judge=1.0):
        self.judge = judge

    def begin_batch(self, tasks, group_size=1, name=""):
        pass

    @contextlib.asynccontextmanager
    async def enter(self, browser, task):
        yield task

    def earlier(self, task, member):
        return None

    def keep(self, trajectory):
        pass

    def prepare(self, task):
        pass

    async def end_prepared(self):
        pass

    def report_blocked(self, origins):
        pass

    async def watch(self, session, trajectory):
        pass

    async def verdict(self, task, answer, page, checks):
        return await self.judge(task, answer, page, checks) if callable(self.judge) else self.judge


def scripted(chat, texts):
    """An `Act` that says these texts, turn by turn; the last one again and again."""
    async def act(trajectory, slot):
        text = texts[min(len(trajectory.turns), len(texts)) - 1]
        return [*chat.encode(text), chat.end_id], [], True
    return act


def task_at(url, **more):
    return {"task_id": 0, "intent": "look around", "sites": ["x"], "start_url": url, **more}


# ---------------------------------------------------------------------- tasks, and chat models behind a URL


def make_task(**spec) -> dict:
    """A task in WebArena's schema; spec is its "eval"."""
    return {"task_id": 7, "sites": ["shopping"], "intent": "find the lamp", "start_url": "http://127.0.0.1/",
            "intent_template_id": 1, "eval": spec}


def target(url, locator, prep_actions=(), **contents) -> dict:
    """A task that looks at one page."""
    page = {"url": url, "locator": locator, "required_contents": contents, "prep_actions": list(prep_actions)}
    return make_task(eval_types=["program_html"], program_html=[page])


def fuzzy(reference, note="") -> dict:
    """A task whose answer only a language model can judge."""
    return make_task(eval_types=["string_match"], reference_answers={"fuzzy_match": reference}, string_note=note)


GOOD = make_task(eval_types=["string_match"], reference_answers={"must_include": ["x"]})


def chat_server(site, *script):
    """An OpenAI-compatible server -> (its URL, the requests it has seen).

    It goes through `script` and stays at its end. An entry is a reply's text, a status, raw bytes, seconds of
    silence, "breaks off", or a function of the request that returns one of these.
    """
    seen = []

    def complete(handler):
        request = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        seen.append(request | {"path": handler.path, "key": handler.headers.get("Authorization")})
        entry = script[min(len(seen), len(script)) - 1]
        entry = entry(request) if callable(entry) else entry
        if isinstance(entry, float):
            threading.Event().wait(entry)
        if entry == "breaks off":
            handler.send_response(503)
            handler.send_header("Content-Length", "100")
            handler.end_headers()
            handler.close_connection = True
            return handler.wfile.write(b"0123456789")
        reply = {"choices": [{"message": {"content": entry}, "finish_reason": "stop"}]}
        body = entry if isinstance(entry, bytes) else json.dumps(reply).encode()
        handler.send_response(entry if isinstance(entry, int) else 200)
        handler.send_header("Retry-After", "0")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return site({"/v1/chat/completions": complete}) + "/v1", seen


def pointing_task(number, place, other) -> dict:
    """A task in the sandbox's shop that is solved by a visit to the category `place`."""
    check = {
        "eval_types": ["url_match"],
        "reference_answers": None,
        "program_html": [],
        "url_note": "EXACT",
        "reference_url": f"__SHOPPING__/category/{place}",
    }
    return {
        "sites": ["shopping"],
        "task_id": number,
        "world": number,
        "start_url": "__SHOPPING__",
        "require_login": False,
        "storage_state": None,
        "intent": f"point at {place} else at {other}",
        "intent_template_id": 1,
        "eval": check,
    }


def listen(page) -> tuple[list[str], list[str]]:
    """(what the browser complains of, the addresses it asks for) from now on, in lists that grow."""
    complaints = []
    asked = []

    def on_console(message):
        complaints.append(message.text)

    def on_error(error):
        complaints.append(str(error))

    def on_request(request):
        asked.append(request.url)

    page.on("console", on_console)
    page.on("pageerror", on_error)
    page.on("request", on_request)
    return complaints, asked
