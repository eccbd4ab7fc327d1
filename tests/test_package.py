"""The package as it is installed, and the CPU platform, which must never activate itself."""

from __future__ import annotations

import subprocess
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from sgl_shift_patches import cpu_platform, resolution
from tests.servers import PYTHON, run

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from what git tracks, so that a stray folder cannot make it work."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, tracked.stdout.split("\0")):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    built = run([PYTHON, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)])
    assert built.returncode == 0, built.stderr
    return next(out.glob("*.whl"))


def test_the_wheel_has_three_import_packages_and_two_entry_points(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "sgl_shift",
        "sgl_shift_patches",
        "sgl_shift_kernels",
    }
    for package, root in (
        ("sgl_shift", ROOT),
        ("sgl_shift_patches", ROOT / "patches"),
        ("sgl_shift_kernels", ROOT / "kernels"),
    ):
        files = [path for path in (root / package).iterdir() if path.suffix in (".py", ".json")]
        here = {f"{package}/{path.name}" for path in files}
        assert here | {f"{package}/py.typed"} == {name for name in names if name.startswith(f"{package}/")}
    entry_points = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert "[sglang.srt.plugins]\nsgl_shift = sgl_shift.plugin:register" in entry_points
    assert "[sglang.srt.platforms]\nsgl_shift_cpu = sgl_shift_patches.cpu_platform:activate" in entry_points


def test_installing_the_wheel_beside_sglang_changes_no_other_package(wheel):
    # Without an index, pip can only take what is installed: every dependency must be met by what SGLang brings.
    result = run([PYTHON, "-m", "pip", "install", "--dry-run", "--no-index", str(wheel)])
    assert result.returncode == 0, result.stderr
    would = [line for line in result.stdout.splitlines() if line.startswith("Would install")]
    assert all(line.removeprefix("Would install ").split() == ["sgl-shift-0.1.0"] for line in would)


def test_no_package_is_named_kernels_or_patches():
    """From the repository root, SGLang imports Hugging Face's ``kernels``."""
    found = run([PYTHON, "-c", "import kernels; print(kernels.__file__)"])
    assert "site-packages" in found.stdout


def test_the_platform_stays_off_unless_it_is_named(monkeypatch):
    for value in (None, "", "other"):
        monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
        if value is not None:
            monkeypatch.setenv("SGLANG_PLATFORM", value)
        assert cpu_platform.activate() is None


def test_the_platform_refuses_a_machine_with_accelerators(monkeypatch):
    monkeypatch.setenv("SGLANG_PLATFORM", cpu_platform.NAME)
    monkeypatch.setattr(cpu_platform, "accelerators", lambda: ["/dev/nvidia0"])
    with pytest.raises(RuntimeError, match=r"this one has /dev/nvidia0; unset SGLANG_PLATFORM"):
        cpu_platform.activate()


@pytest.mark.parametrize(
    ("cores", "ranks", "bound", "threads"),
    [
        ({0, 1}, 3, "0|1|0", "1"),
        ({0, 1, 2, 3}, 2, "0,1|2,3", "2"),
        ({4, 5, 6, 7, 8}, 2, "4,5|6,7", "2"),
        ({3}, 2, "3|3", "1"),
    ],
)
def test_each_rank_gets_cores_of_its_own_where_there_are_enough(cores, ranks, bound, threads, monkeypatch):
    monkeypatch.setattr(cpu_platform.os, "sched_getaffinity", lambda _pid: cores)
    assert cpu_platform.thread_environment(ranks) == {
        "SGLANG_CPU_OMP_THREADS_BIND": bound,
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def test_nccl_for_both_cuda_versions_is_noticed(monkeypatch):
    assert resolution.two_nccl_wheels() is None
    monkeypatch.setattr(resolution.metadata, "version", lambda name: "2.30.7")
    assert "nvidia-nccl-cu12 2.30.7 and nvidia-nccl-cu13 2.30.7 are both installed" in resolution.two_nccl_wheels()


def test_another_sglang_is_refused(monkeypatch):
    from sgl_shift_patches import registry

    assert metadata.version("sglang") == registry.SGLANG_VERSION
    monkeypatch.setattr(registry.metadata, "version", lambda name: "0.5.24")
    with pytest.raises(registry.HookError, match=r"written for SGLang 0.5.23, this is 0.5.24; install sglang==0.5.23"):
        registry.verify(())
