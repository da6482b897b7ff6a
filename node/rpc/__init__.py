"""JSON-RPC 2.0 on a unix socket: how everything on this machine speaks to the daemon.

`node.rpc.api` is the public interface (methods and their shapes), `node.rpc.server` the daemon's side,
`node.rpc.client` the caller's. Refuses the network: there is no TCP listener and there will be none.
"""
