"""Tool servers of the Model Context Protocol: their configuration, connections to them, and calls.

https://modelcontextprotocol.io/specification
"""
