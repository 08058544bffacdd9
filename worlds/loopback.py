"""python loopback.py SCRIPT ARGUMENT ...: runs a Python server that only this machine can reach.

For scripts that listen on all interfaces and have no option for it.
"""
import os
import runpy
import socketserver
import sys

bind = socketserver.TCPServer.server_bind


def bind_to_loopback(server):
    server.server_address = ("127.0.0.1", server.server_address[1])
    bind(server)


socketserver.TCPServer.server_bind = bind_to_loopback
del sys.argv[0]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # the script's neighbours can be imported, ours cannot
runpy.run_path(sys.argv[0], run_name="__main__")
