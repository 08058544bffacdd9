"""python -m worlds.sandbox [--port N]: serve the sites on this machine and print the address of a page that links them."""

import argparse
import json
import sys
import threading

from .server import Server

parser = argparse.ArgumentParser(prog="python -m worlds.sandbox", description="Serve the embedded websites on 127.0.0.1.")
parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
parser.add_argument("--pipe", action="store_true", help="print the addresses as JSON; end when standard input closes")
args = parser.parse_args()
try:
    server = Server(args.port)
except (OSError, OverflowError) as problem:
    sys.exit(f"sandbox: port {args.port} is not available ({problem}); pass another one, or --port 0 for any free port")
if args.pipe:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps(server.sites), flush=True)
    sys.stdin.read()  # the parent holds the other end: however it dies, this returns
else:
    print(server.url, flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
