"""Selling and buying: the shell around the protocol's machines.

    peer's record ─▶ step the machine ─▶ state and outbox in one transaction ─▶ only then: send, start, gossip

Knows ports and the store, no libraries: no libp2p, no QUIC, no NVML. Refuses to decide who wins, what a price is
or what a lease owes: `protocol` does.
"""
