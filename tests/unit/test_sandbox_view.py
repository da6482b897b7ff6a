"""What bubblewrap is told to show: as arguments, without running it."""

from pathlib import Path

import pytest

from node.errors import SandboxError
from node.ports import SandboxLimits, SandboxSpec
from node.sandbox import checks, view
from node.sandbox.hierarchy import Mount

NFS = Mount("/", "/usr/local/share", "nfs4", ("rw",))


def spec(**changes: object) -> SandboxSpec:
    fields: dict[str, object] = {
        "name": "a-job",
        "argv": ("true",),
        "variables": {},
        "root": Path("/leases/1/scratch/job"),
        "workdir": "/job/src",
        "uid": 231_072,
        "limits": SandboxLimits(cpus_milli=1_000, memory_mib=64, pids=10, shm_mib=32, tmp_mib=16),
        "stdout": 1,
        "stderr": 2,
    }
    return SandboxSpec(**(fields | changes))  # type: ignore[arg-type]


def layout(shown: tuple[str, ...] = (), mounts: tuple[Mount, ...] = (), **changes: object) -> list[str]:
    return view.layout(
        spec(**changes),
        job_dir="/run/gpunode-x",
        shown=[Path(name) for name in shown],
        mounts=mounts,
        files={"/etc/passwd": 9},
    )


def binds(arguments: list[str]) -> dict[str, str]:
    """Return target -> the option that binds it."""
    options = ("--bind", "--ro-bind", "--ro-bind-try", "--dev-bind")
    return {arguments[at + 2]: word for at, word in enumerate(arguments) if word in options}


def test_the_host_is_read_only_and_its_private_places_are_not_shown() -> None:
    shown = binds(layout())
    assert [target for target, option in shown.items() if option == "--bind"] == ["/job"]
    assert shown["/usr"] == "--ro-bind"
    for place in ("/etc", "/home", "/root", "/srv", "/mnt", "/opt", "/var", "/run", "/sys", "/"):
        assert place not in shown


def test_the_jobs_directory_comes_after_everything_and_nothing_is_laid_out_below_it() -> None:
    arguments = layout(
        shown=("/opt/conda",), read_only_mounts=(("/a", "/usr/lib/b"),), device_nodes=("/dev/null",)
    )
    at = arguments.index("/job")
    assert arguments[at - 2 : at + 1] == ["--bind", "/run/gpunode-x", "/job"]
    assert arguments[at + 1 :] == ["--remount-ro", "/", "--chdir", "/job/src"]


def test_temporary_places_have_their_sizes() -> None:
    arguments = layout()
    for place, size_mib in (("/tmp", 16), ("/dev/shm", 32)):
        at = arguments.index(place)
        assert arguments[at - 5 : at] == ["--perms", "1777", "--size", str(size_mib << 20), "--tmpfs"]
    assert arguments[arguments.index("--remount-ro") :][:2] == ["--remount-ro", "/dev"]


def test_network_file_systems_below_what_is_shown_are_covered() -> None:
    far = Mount("/", "/home/share", "nfs4", ("rw",))
    local = Mount("/", "/usr/src", "ext4", ("rw",))
    arguments = layout(mounts=(NFS, far, local))
    assert arguments[arguments.index("/usr/local/share") - 1] == "--tmpfs"
    assert "/home/share" not in arguments
    assert "/usr/src" not in arguments
    # Unless it is what the configuration names.
    assert binds(layout(shown=("/usr/local/share",), mounts=(NFS,)))["/usr/local/share"] == "--ro-bind"
    assert "--tmpfs /usr/local/share" not in " ".join(layout(shown=("/usr/local/share",), mounts=(NFS,)))


def test_devices_are_bound_as_devices() -> None:
    assert binds(layout(device_nodes=("/dev/null",)))["/dev/null"] == "--dev-bind"


@pytest.mark.parametrize("node", ["/dev/../etc/shadow", "/etc/passwd", "null", "/dev", "/dev/no-such", "/dev/shm"])
def test_what_is_no_device_is_refused(node: str) -> None:
    with pytest.raises(SandboxError):
        layout(device_nodes=(node,))


@pytest.mark.parametrize(
    "target",
    ["relative", "/", "/a/../b", "/job", "/job/x", "/proc/x", "/dev/x", "/tmp", "/etc/passwd", "/x/", "//x"],
)
def test_a_mount_may_not_cover_the_jobs_own_places(target: str) -> None:
    with pytest.raises(SandboxError):
        layout(read_only_mounts=(("/a", target),))


@pytest.mark.parametrize("workdir", ["/", "/jobs", "/job/../etc", "job", "", "/job/./x", "/job//x"])
def test_the_working_directory_is_below_job(workdir: str) -> None:
    with pytest.raises(SandboxError):
        layout(workdir=workdir)


def test_the_jobs_variables_win_but_not_over_its_devices() -> None:
    found = view.variables(
        spec(
            variables={"HOME": "/job/home", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, visible_devices=("GPU-a", "MIG-b")
        )
    )
    assert found["HOME"] == "/job/home"
    assert found["CUDA_VISIBLE_DEVICES"] == found["NVIDIA_VISIBLE_DEVICES"] == "GPU-a,MIG-b"
    assert view.variables(spec())["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert view.variables(spec())["CUDA_VISIBLE_DEVICES"] == ""


def test_an_environments_programs_come_first(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    found = view.variables(spec(), [tmp_path, tmp_path / "without-bin"])
    assert found["PATH"].startswith(f"{tmp_path}/bin:/usr/local/bin:")
    assert "without-bin" not in found["PATH"]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Job"},
        {"name": ""},
        {"name": "x" * 41},
        {"name": "a/b"},
        {"argv": ()},
        {"argv": ("",)},
        {"argv": ("a\0b",)},
        {"variables": {"A": "b\0c"}},
        {"variables": {"": "x"}},
        {"variables": {"A=B": "x"}},
        {"uid": 0},
    ],
)
def test_a_job_that_makes_no_sense_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(SandboxError):
        checks.check(spec(**changes))


def test_only_root_gives_jobs_other_uids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.os, "geteuid", lambda: 1_000)
    checks.check(spec(uid=1_000))
    with pytest.raises(SandboxError, match="only root"):
        checks.check(spec(uid=1_001))
