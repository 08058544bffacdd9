"""What agents act in. sandbox/: the embedded sites; base/: the small model; webarena.py, miniwob.py: the benchmarks' tasks.

A leaf: nothing here imports the six files at the top.
"""
