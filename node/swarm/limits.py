"""Every bound of the swarm in one place, and the token bucket that enforces the rates.

Refuses to read a clock: buckets are told the time. Times are milliseconds, rates are per second.
"""

import msgspec

GOSSIP_SIZE_MAX = 64 * 1024 + 1024
"""Largest payload of one gossiped message: an envelope of a full record, in bytes."""
MESSAGE_SIZE_MAX = 1024 * 1024
"""Largest request, and largest reply, in bytes."""
NAME_SIZE_MAX = 64
"""Longest name of a topic or a request protocol, in characters."""


class SwarmLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one peer, one address, and the outside as a whole may take of this node.

    The defaults suit a daemon with some sixty peers. Rates of messages are bounded by their cost: one gossiped
    message takes about a millisecond of CPU, one connection some ten.
    """

    # --- connections
    connections_per_address: int = 32
    """Connections held at once with one remote address (an institute behind one NAT shares it)."""
    connects_per_s: float = 4.0
    connects_burst: int = 48
    """Accepted connections of one remote address. Failed hellos and bans take extra tokens from it."""
    pending_max: int = 64
    pending_per_address: int = 8
    """Accepted connections whose peer has not said hello yet."""
    upgrade_timeout_ms: int = 8_000
    """From accept to a multiplexed, encrypted connection."""
    dial_timeout_ms: int = 8_000
    hello_timeout_ms: int = 10_000
    """From the connection to a finished hello; whoever is silent longer is cut."""
    ping_interval_ms: int = 5_000
    ping_timeout_ms: int = 9_000
    """A vanished peer is cut at most the sum of both after its last sign of life."""

    # --- bytes and streams
    bytes_per_s: float = 8 * 1024 * 1024
    bytes_burst: int = 8 * 1024 * 1024
    """Of one connection; above it we simply read more slowly. Each frame costs 4 KiB on top of its length."""
    streams_per_peer: int = 64
    frame_timeout_ms: int = 15_000
    """From a frame's first byte to its last."""

    # --- gossip
    gossip_per_s: float = 60.0
    gossip_burst: int = 600
    """Messages of one peer, those that it forwards included; more are dropped and held against it."""
    control_per_s: float = 2_000.0
    control_burst: int = 8_000
    """Entries of gossipsub's control messages of one peer."""
    publish_per_s: float = 100.0
    publish_burst: int = 200
    """Our own messages: `publish` waits when they come faster."""

    # --- requests
    requests_per_s: float = 20.0
    requests_burst: int = 60
    requests_at_once: int = 8
    """Of one peer, being answered at the same time."""
    request_timeout_ms: int = 10_000
    """For reading a request, and again for writing its reply."""
    handler_timeout_ms: int = 30_000
    """For computing the reply."""

    # --- penalties
    penalty_max: float = 100.0
    """A peer with more is cut and banned."""
    penalty_decay_per_s: float = 1.0
    ban_ms: int = 600_000

    # --- reconnecting
    backoff_initial_ms: int = 250
    backoff_max_ms: int = 300_000
    remembered_attempts: int = 24
    """How often a peer that is no bootstrap peer is dialled again before it is given up: some six minutes."""
    restart_backoff_initial_ms: int = 200
    restart_backoff_max_ms: int = 30_000
    """Between a crash of libp2p and the next start of the host."""


DEFAULT_LIMITS = SwarmLimits()


class TokenBucket:
    """A rate with a burst: `take` says whether there were tokens, `debt_s` how long to wait for them.

    Source: the leaky bucket as a meter, ITU-T I.371 annex A (generic cell rate algorithm).
    """

    __slots__ = ("_burst", "_rate", "_tokens", "_updated")

    def __init__(self, rate_per_s: float, burst: float, now: float) -> None:
        self._rate = rate_per_s
        self._burst = float(burst)
        self._tokens = float(burst)
        self._updated = now

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Take `tokens` at the time `now` (seconds, any epoch) and return True, or take none and return False."""
        self._refill(now)
        if self._tokens < tokens:
            return False
        self._tokens -= tokens
        return True

    def charge(self, now: float, tokens: float) -> float:
        """Take `tokens` in any case, and return for how many seconds the caller must wait to be even."""
        self._refill(now)
        # Debt is bounded too: one that can never be paid back would be a ban in disguise.
        self._tokens = max(self._tokens - tokens, -self._burst)
        return max(0.0, -self._tokens / self._rate)

    def is_full(self, now: float) -> bool:
        """Return whether the bucket carries no history, so that it may be forgotten."""
        self._refill(now)
        return self._tokens >= self._burst

    def _refill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._updated) * self._rate)
        self._updated = max(self._updated, now)
