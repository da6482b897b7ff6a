"""Jobs' files: trees cut into chunks, their transfer over a tunnel, and bounded logs.

Refuses to start anything: `node.sandbox` runs jobs, `node.keeper` puts both together.
"""
