"""The keeper: the process that looks after one lease on one side, its tunnel and its job.

A composition root: it puts tunnel, jobs, sandbox and the lease's machine together. It outlives the daemon, which
reads its status and tells it to cancel and settle (`node.lease`). Refuses to hold the node key and to open the
database: it parses a stranger's bytes, and has nothing of more worth than this one lease.
"""
