"""python loopback.py SCRIPT ARGUMENT ...: runs a Python server that only this machine can reach.

For scripts that listen on all interfaces and have no option for it.
"""
import runpy
import socketserver
import sys

bind = socketserver.TCPServer.server_bind


def bind_to_loopback(server):
    server.server_address = ("127.0.0.1", server.server_address[1])
    bind(server)


socketserver.TCPServer.server_bind = bind_to_loopback
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
