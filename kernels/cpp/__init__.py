"""CPU kernels: C++ next to the operations, compiled on first use.

compiler.py makes libraries of sources, ops.py calls their functions, graph.py records and replays what was called.
"""
