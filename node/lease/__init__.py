"""The lease directory and the link between daemon and keeper: what both composition roots share.

Refuses to know tunnels, sandboxes and jobs.
"""
