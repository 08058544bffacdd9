"""python worlds/verifier FILE URL: the verdict of FILE's verify(URL), as a line of JSON on standard output.

Ends when its standard input closes: it does not outlive the run that started it.
"""
import importlib.util
import json
import os
import sys
import threading
import traceback
from urllib.parse import urlsplit


def end_with_parent(pipe: int):
    os.read(pipe, 1)  # nobody writes, so this returns when the parent has gone
    os._exit(1)


def verdict(file: str, server_url: str) -> dict:
    spec = importlib.util.spec_from_file_location("task_verifier", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "verify"):
        raise TypeError("it has no verify(server_url) -> (bool, str)")
    result = module.verify(server_url)
    shaped = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], bool)
    if not shaped:
        raise TypeError(f"verify returned {result!r:.80}, not (bool, str)")
    passed, reason = result
    return {"passed": passed, "reason": str(reason)[:1000]}


def main(file: str, server_url: str):
    # 1) The file may print, and close its standard streams: ours are copies.
    own_output = os.dup(1)
    os.dup2(2, 1)
    own_input = os.dup(0)  # exit() closes standard input
    # What the file starts may outlive it: it holds none of our pipes, so that nobody waits for it.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.register_at_fork(after_in_child=lambda: (os.close(own_output), os.close(own_input)))
    threading.Thread(target=end_with_parent, args=(own_input,), daemon=True).start()

    # 2) The file's neighbours can be imported; ours come last, so that a real `requests` wins.
    #    The site is asked directly, whatever proxy the machine uses.
    sys.path.append(sys.path.pop(0))
    sys.path.insert(0, os.path.dirname(file))
    host = urlsplit(server_url).hostname
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY", "")
    os.environ["no_proxy"] = f"{host},localhost,127.0.0.1,{others}"
    try:
        said = verdict(file, server_url)
    except BaseException as error:  # SystemExit too
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame.lineno for frame in frames if frame.filename == file]  # not those of a library
        where = f" (line {own[-1]})" if own else ""
        said = {"error": f"{type(error).__name__}: {str(error)[:300]}{where}"}
    line = json.dumps(said) + "\n"
    os.write(own_output, line.encode())
    os._exit(0)  # threads that the file has started do not keep us


main(*sys.argv[1:])
