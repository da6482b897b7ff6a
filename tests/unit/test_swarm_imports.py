"""What the command line needs of the swarm is cheap to import."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "module", ["node.swarm", "node.swarm.invite", "node.swarm.multiaddrs", "node.swarm.hello"]
)
def test_libp2p_is_not_loaded(module: str):
    code = f"import sys, {module}; print(sorted({{'libp2p', 'multiaddr', 'google.protobuf'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
