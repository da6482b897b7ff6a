"""An idle daemon's memory and processor time, with a book of offers; `scripts/bench/idle` runs it.

The offers are signed by as many keys as there are offers and gossiped by one peer, which stays connected and is
otherwise silent. Memory is VmRSS, the share is processor time over time, both of the daemon's process alone.
Refuses to guess where memory goes: it imports the parts one after the other in a fresh process.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import trio
from _loopback import Daemon, Failed, network_settings, temporary_folder, wait_for_address
from nacl.signing import SigningKey

from node.market.auctions import OFFERS_TOPIC
from node.ports import GossipVerdict, Network
from node.swarm import open_swarm
from protocol.envelope import seal
from protocol.identity import NetworkId, network_id
from protocol.records import Curve, DeviceSpec, HostSpec, Offer, Terms

OFFERS = 100
SECONDS, SECONDS_QUICK = 60.0, 10.0
SETTLE_S = 5.0
"""After the last offer: connections, first exchanges and garbage of the start are over."""
NETWORK = "demo"
PARTS = (
    ("records, RPC, settings", "node.rpc.api, node.config"),
    ("trio", "trio"),
    ("libp2p", "libp2p"),
    ("the whole daemon", "node.daemon, node.swarm.network"),
    ("NVML", "pynvml"),
)
"""(what, modules): imported in this order, each on top of those before it."""


class Signer:
    """A provider that exists only as a key."""

    def __init__(self, seed: bytes) -> None:
        self._key = SigningKey(seed)

    @property
    def public_key(self) -> bytes:
        """Its 32-byte public key."""
        return bytes(self._key.verify_key)

    def sign(self, message: bytes) -> bytes:
        """Return its signature."""
        return bytes(self._key.sign(message).signature)


def derive(seed: int, number: int) -> bytes:
    """Return 32 bytes that only `seed` and `number` decide."""
    return hashlib.sha256(f"{seed}/{number}".encode()).digest()


def make_offers(seed: int, network: NetworkId, now_ms: int) -> list[bytes]:
    """Return OFFERS sealed offers of as many providers, good for half an hour."""
    offers = []
    for number in range(OFFERS):
        offer = Offer(
            listing="simulated",
            sequence=now_ms,
            device=DeviceSpec("nvidia", "Simulated A100", 40 * 1024, 80, cuda=12040),
            quantity=1,
            free=1,
            host=HostSpec(8000, 64 * 1024, 100 * 1024),
            curve=Curve(330_000 + number, 110_000, now_ms),
            terms=Terms(),
            simulated=True,
            lottery_commitment=derive(seed, -1),
            issued_at=now_ms,
            expires_at=now_ms + 30 * 60 * 1000,
        )
        offers.append(seal(offer, Signer(derive(seed, number)), network).data)
    return offers


def read_cpu_s(pid: int) -> float:
    """Return the processor time of a process and its threads, in seconds (Linux: clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def read_memory_mib(pid: int) -> dict[str, float]:
    """Return a process's resident memory, and its parts, in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = {
        line.split(":")[0]: line.split()[1] for line in lines if line.startswith(("VmRSS", "RssAnon", "RssFile"))
    }
    return {name: int(value) / 1024 for name, value in values.items()}


def measure_imports() -> list[tuple[str, float, float]]:
    """Return (what, MiB, seconds) that each part adds to a fresh interpreter, the interpreter itself first."""
    program = (
        "import json, time\n"
        "def rss():\n"
        "    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmRSS'))\n"
        "before = rss()\n"
        "steps = [('Python itself', before / 1024, 0.0)]\n"
        f"for what, modules in {PARTS!r}:\n"
        "    started = time.perf_counter()\n"
        "    for module in modules.split(', '):\n"
        "        __import__(module)\n"
        "    now = rss()\n"
        "    steps.append((what, (now - before) / 1024, time.perf_counter() - started))\n"
        "    before = now\n"
        "print(json.dumps(steps))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [(str(what), float(mib), float(seconds)) for what, mib, seconds in json.loads(done.stdout)]


async def publish_until_known(daemon: Daemon, swarm: Network, offers: list[bytes]) -> None:
    """Gossip the offers until the daemon's book holds them all: the mesh may not stand at once."""
    while True:
        for offer in offers:
            await swarm.publish(OFFERS_TOPIC, offer)
        for _ in range(10):
            status = await trio.to_thread.run_sync(daemon.query, "status")
            if status is not None and status["swarm"]["offers_known"] >= len(offers):
                return
            await trio.sleep(0.1)


async def observe(daemon: Daemon, folder: Path, seed: int, seconds: float) -> tuple[dict[str, float], float]:
    """Fill the daemon's book, let it rest, and return its memory and its share of a core."""
    key = (folder / "network.key").read_text().strip().encode()
    network = network_id(NETWORK, key)
    async with open_swarm(
        derive(seed, -2),
        listen=("/ip4/127.0.0.1/tcp/0",),
        network=network,
        network_key=key,
        bootstrap=(wait_for_address(daemon),),
        max_peers=4,
        agent="bench/idle",
    ) as swarm:
        connected = trio.Event()

        async def note_connection(_: object) -> None:
            connected.set()

        swarm.on_connect(note_connection)
        swarm.on_gossip(OFFERS_TOPIC, lambda *_: GossipVerdict.ACCEPT)
        with trio.fail_after(30):
            if not any(peer.connected for peer in swarm.peers()):
                await connected.wait()
            await publish_until_known(daemon, swarm, make_offers(seed, network, int(time.time() * 1000)))
        await trio.sleep(SETTLE_S)
        before, started = read_cpu_s(daemon.pid), time.monotonic()
        await trio.sleep(seconds)
        share = (read_cpu_s(daemon.pid) - before) / (time.monotonic() - started)
        return read_memory_mib(daemon.pid), share


def print_table(rows: list[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value:>12}")


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench/idle")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seconds = SECONDS_QUICK if options.quick else SECONDS
    imports = measure_imports()
    try:
        with temporary_folder() as folder:
            daemon = Daemon("daemon", folder, network_settings(folder, name=NETWORK))
            try:
                daemon.start()
                memory, share = trio.run(observe, daemon, folder, options.seed, seconds)
            finally:
                daemon.stop()
    except Failed as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    rss_mib = memory["VmRSS"]
    rows = [
        (f"resident memory, {OFFERS} offers", f"{rss_mib:.1f} MiB"),
        ("  its own", f"{memory['RssAnon']:.1f} MiB"),
        ("  files, shared with others", f"{memory['RssFile']:.1f} MiB"),
        (f"share of a core, over {seconds:g} s", f"{100 * share:.2f} %"),
        ("", ""),
        ("what importing adds", ""),
        *((f"  {what} ({took:.2f} s)", f"{mib:.1f} MiB") for what, mib, took in imports),
        ("  at work, beyond imports", f"{rss_mib - sum(mib for _, mib, _ in imports):.1f} MiB"),
    ]
    print_table(rows)
    result = {
        "rss_mib": round(rss_mib, 1),
        "cpu_share": round(share, 5),
        "offers": OFFERS,
        "seconds": seconds,
        "imports_mib": {what: round(mib, 1) for what, mib, _ in imports},
        "seed": options.seed,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
