"""WebArena-Infinity as tasks: 13 applications, 2,357 tasks, each judged by a file of its own.

    git clone https://github.com/web-arena-x/webarena-infinity
    python evaluate.py --model runs/mgrpo --tasks infinity:webarena-infinity/gmail:easy:20
    python evaluate.py --validate infinity:webarena-infinity

An application keeps its state in the page and sends all of it to its server, PUT /api/state, with
every change; verify(server_url) reads it there. Traps, and what we do about them:

    - Up to four PUTs at once, which the server's threads can swap. ORDERED sends one at a time.
    - Verifiers assume a day in March 2026: CLOCK.
    - The server listens on all interfaces (loopback.py) and serves its verifiers (PRIVATE).
    - Until the page has loaded there is no state, and every verifier says False.
    - Some tasks are true from the start, and some cannot be done: `flaw`. They are played all the same,
      and a summary also gives the success rate without them.
"""
import json
import re
import shlex
import sys
from pathlib import Path

KINDS = ("easy", "medium", "hard", "function")
CLOCK = "2026-03-07T12:00:00"
PRIVATE = ["/api/", "/real-tasks/", "/function-tasks/", "/real-tasks.json", "/function-tasks.json"]

ORDERED = """(() => {
  const send = window.fetch.bind(window);
  let last = Promise.resolve();
  window.fetch = (resource, options) => {
    if (options?.method !== 'PUT') return send(resource, options);
    const answer = last.then(() => send(resource, options));
    last = answer.catch(() => {});
    return answer;
  };
})();"""

# Verifiers that say True before anything was done, at 1ca7781.
TRUE_FROM_THE_START = {
    "elation-clinical-records": ["function_20"],
    "elation-patient-communication": ["h4"],
    "figma-slides": ["e19"],
    "handshake-career-exploration": ["e15", "m4", "h17"],
    "paypal-my-wallet": ["function_45"],
    "superhuman-general": ["e3", "e8", "m9", "m13", "m14", "h46"],
    "xero-invoicing": ["m20"],
}
# The colors that figma-slides offers. It ignores what is typed into its fields of colors and of numbers.
SWATCHES = ("ffffff|000000|f24e1e|ff7262|ffac33|f7c948|0acf83|00b894|1abcfe|0052cc|7b61ff|a259ff|e0e0e0"
            "|888888|404040|1e1e1e")
# Parts of applications that do not work with mouse and keyboard, as words of the instructions that
# need them. This finds most of such tasks, not exactly them.
BROKEN_PARTS = {
    "figma-slides": rf"#(?!{SWATCHES})[0-9a-f]{{6}}|font size|corner radius|stroke width|[0-9]px"
                    r"|degrees|(?!400)[0-9]{3} ?m(s|illiseconds)\b"  # most durations are 400 ms already
                    r"|comment|disable.*librar|default (deck )?transition|rename.*template style"
                    # It cancels clicks on its checkboxes.
                    r"|available offline|download|(disable|turn off|remove).*(slide|page) number",
    "figma-text-and-typography": r"duplicate",
    "elation-patient-communication": r"schedule an? (new )?(in-person|virtual)",
    "gmail": r"\bmove\b.*\b(category|social|promotions|updates|forums|primary)\b",
    "gmail-accounts-and-contacts": r"visib|sort (order|contacts)|display order"
                                   r"|(two-factor|2fa).*(method|sms|key)|method.*two-factor",
    "paypal-my-wallet": r"autopay.*(full|statement|minimum)|automatically pay|for a gift card|card issuer",
}


def flaw(app: str, name: str, instruction: str) -> str:
    """What is known to be wrong with a task; "" if nothing is. name: e1 ... h60, function_1 ..."""
    if name in TRUE_FROM_THE_START.get(app, []):
        return "true from the start"
    parts = BROKEN_PARTS.get(app)
    if parts and re.search(parts, instruction, re.IGNORECASE):
        return "likely broken in the application"
    return ""


def task_of(folder: Path, kind: str, row: dict) -> dict:
    """One row of an application's file, in WebArena's schema."""
    app = folder.name
    name = row["id"].removeprefix("task_")
    if kind == "function":
        name = f"function_{name}"
    script = Path(__file__).parent / "loopback.py"
    command = shlex.join([sys.executable, str(script), "server.py"])
    task = {
        "task_id": f"{app}/{name}",
        "sites": [app],
        "intent": row["instruction"],
        "intent_template_id": kind,
        "intent_template": kind,
        "storage_state": None,
        "serve": command + " --port {port}",
        "cwd": str(folder),
        "clock": CLOCK,
        "script": ORDERED,
        "private": PRIVATE,
        "start_url": "http://127.0.0.1:{port}/",
        "eval": {"eval_types": ["verify"], "verify": str(folder / row["verify"])},
    }
    wrong = flaw(app, name, row["instruction"])
    if wrong:
        task["flaw"] = wrong
    return task


def folders(path: str) -> list[Path]:
    """The applications' folders of PATH or PATH/APP,..."""
    root = Path(path).expanduser().resolve()
    names = None
    if not (root / "apps").is_dir():
        names = root.name.split(",")
        root = root.parent
    known = {}
    for file in (root / "apps").glob("*/real-tasks.json"):
        folder = file.parent
        known[folder.name] = folder
    if not known:
        raise ValueError(f"infinity:{path}: applications are neither in {path}/apps nor in {root / 'apps'}; clone "
                         "https://github.com/web-arena-x/webarena-infinity and name its folder.")
    if names is None:
        names = sorted(known)
    for name in names:
        if name not in known:
            raise ValueError(f"infinity:{path}: there is no application {name}; there are "
                             f"{', '.join(sorted(known))}.")
        if names.count(name) > 1:
            raise ValueError(f"infinity:{path} names {name} twice.")
    return [known[name] for name in names]


def tasks(spec: str) -> list[dict]:
    """The tasks of PATH[/APP,...][:easy|medium|hard|function][:N]; N of them, evenly spread."""
    found = re.fullmatch(rf"([^:]+)(?::({'|'.join(KINDS)}))?(?::(\d+))?", spec)
    if not found:
        raise ValueError(f"infinity:{spec}: write infinity:PATH[/APP,...][:easy|medium|hard|function]"
                         "[:N], such as infinity:webarena-infinity/gmail:easy:20.")
    from run import reading  # not above: run imports torch, and the sandbox's process does without

    path, wanted, n = found.groups()
    every = []
    for folder in folders(path):
        for name in ("real-tasks.json", "function-tasks.json"):
            with reading(folder / name):
                text = (folder / name).read_text(encoding="utf-8")
                for row in json.loads(text):
                    kind = row.get("difficulty", "function")
                    if wanted in (None, kind):
                        every.append(task_of(folder, kind, row))
    if n is None or int(n) >= len(every):
        return every
    n = int(n)
    places = [i * len(every) // n for i in range(n)]
    return [every[place] for place in places]
