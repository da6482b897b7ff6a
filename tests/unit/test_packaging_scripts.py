"""The scripts: runnable, well formed, and careful with what is not theirs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = tuple(
    str(path.relative_to(ROOT))
    for path in (ROOT / ".ci" / "run", *sorted((ROOT / "scripts").rglob("*")))
    if path.is_file() and not path.suffix
)
SHELL = (*PROGRAMS, "scripts/_common.sh")


def run_common(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash that knows the functions of _common.sh."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"source scripts/_common.sh\n{command}"],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_programs_that_documents_name_are_here() -> None:
    assert {"scripts/quickstart", "scripts/install", "scripts/test", "scripts/lock", ".ci/run"} <= set(PROGRAMS)


@pytest.mark.parametrize("path", PROGRAMS)
def test_program_can_be_run(path: str) -> None:
    assert os.access(ROOT / path, os.X_OK)


@pytest.mark.parametrize("path", SHELL)
def test_shell_is_well_formed(path: str) -> None:
    subprocess.run(["bash", "-n", path], cwd=ROOT, check=True)


@pytest.mark.parametrize("path", [path for path in PROGRAMS if path.startswith("scripts/")])
def test_help_says_what_a_script_does(path: str) -> None:
    done = subprocess.run([f"./{path}", "--help"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert path in done.stdout
    assert not done.stderr


def test_administrator_gets_one_command() -> None:
    done = run_common("id() { echo 1000; }; has_program() { :; }; install_packages bubblewrap uidmap")
    assert done.returncode == 1
    assert "sudo apt-get install --yes --no-install-recommends bubblewrap uidmap" in done.stderr


def test_no_missing_package_is_no_reason_to_stop() -> None:
    done = run_common('id() { echo 1000; }; mapfile -t none < <(:); install_packages "${none[@]}"; echo on')
    assert (done.returncode, done.stdout) == (0, "on\n")


def test_foreign_system_is_told_the_names() -> None:
    done = run_common("has_program() { false; }; install_packages gcc")
    assert done.returncode == 1
    assert "gcc" in done.stderr
    assert "package manager" in done.stderr


def test_named_python_that_is_too_old_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = run_common("find_python", PYTHON=str(old))
    assert done.returncode == 1
    assert str(old) in done.stderr


def test_python_that_can_make_a_venv_is_preferred(tmp_path: Path) -> None:
    bare = tmp_path / "python3"
    bare.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1 ;; esac\n')
    bare.chmod(0o755)
    full = tmp_path / "python3.11"
    full.write_text("#!/bin/sh\nexit 0\n")
    full.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert run_common('find_python; echo "$PYTHON"', PATH=path, PYTHON="").stdout == "python3.11\n"


def test_live_keeper_is_seen_by_its_venv(tmp_path: Path) -> None:
    program = tmp_path / "venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.symlink_to(sys.executable)
    ready = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [program, "-c", ready, "node.keeper"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert run_common(f"live_keepers '{tmp_path}/venv'").stdout == f"{process.pid}\n"
        assert run_common(f"live_keepers '{tmp_path}/other'").stdout == ""
        process.communicate()
    assert run_common(f"live_keepers '{tmp_path}/venv'").stdout == ""


def test_venv_is_current_until_its_lock_changes(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "python"
    program.parent.mkdir()
    program.symlink_to(sys.executable)
    (tmp_path / "locks").mkdir()
    for name in ("build", "runtime"):
        (tmp_path / "locks" / f"{name}.txt").write_text("one==1\n")
    setting = f"PYTHON={sys.executable} REQUIREMENTS={tmp_path}/locks;"
    question = f'{setting} venv_is_current "{tmp_path}" runtime && echo current || echo stale'
    assert run_common(question).stdout == "stale\n"
    run_common(f'{setting} venv_stamp "{tmp_path}" runtime >"{tmp_path}/$STAMP_NAME-runtime"')
    assert run_common(question).stdout == "current\n"
    (tmp_path / "locks" / "runtime.txt").write_text("one==2\n")
    assert run_common(question).stdout == "stale\n"
