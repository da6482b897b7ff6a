"""One state in two places: a copy on another machine is another node, and none signs in another's name."""

import os
import secrets
import shutil
import subprocess
from pathlib import Path

import pytest
from support.daemons import SIMULATED_A100, Daemons


def test_state_copied_to_another_machine_makes_another_node(daemons: Daemons, tmp_path: Path) -> None:
    machine_id = tmp_path / "machine-id"
    machine_id.write_text(f"{secrets.token_hex(16)}\n")
    script = f'mount --bind {machine_id} /etc/machine-id && exec "$@"'
    elsewhere = ("unshare", "--mount", "sh", "-c", script, "sh")
    if os.geteuid() != 0 or subprocess.run([*elsewhere, "true"], capture_output=True, check=False).returncode:
        pytest.skip("another machine's id needs root, and /etc/machine-id")
    original = daemons.provider()
    node = original.node
    original.stop()
    shutil.copytree(original.folder / "state", tmp_path / "copy", symlinks=True)
    original.start()
    copy = daemons.make("copy", devices=SIMULATED_A100)
    (tmp_path / "copy").rename(copy.folder / "state")
    copy.wrapper = elsewhere
    copy.start()
    assert copy.node != node
    # Both may live at once, and are two to each other: neither signs in the other's name.
    copy.connect(original)
    copy.wait_offers()
    assert [offer.provider for offer in copy.offers() if not offer.own] == [node]
    assert original.node == node
