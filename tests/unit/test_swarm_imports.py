"""What the command line needs of the swarm is cheap to import."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_libp2p_is_not_loaded():
    modules = "node.swarm, node.swarm.invite, node.swarm.multiaddrs, node.swarm.hello, node.swarm.peers"
    code = f"import sys, {modules}; print(sorted({{'libp2p', 'multiaddr', 'google.protobuf'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
