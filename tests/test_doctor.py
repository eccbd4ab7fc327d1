"""The doctor, and the fingerprints by which it and every start tell an SGLang that is not the one written against."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sgl_shift import doctor as door
from sgl_shift.config import ShiftConfig
from sgl_shift.features import FEATURES
from sgl_shift.layout import HeadLayout, Layout
from sgl_shift_patches import doctor, fingerprints, registry
from sgl_shift_patches.fingerprints import State
from sgl_shift_patches.sources import Tree
from tests.checkpoints import DENSE
from tests.hosting import import_sglang
from tests.test_refusals import resolve

PATCHES = Path(registry.__file__).parent
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"


def tree(folder: Path, **files: str) -> Tree:
    (folder / "package").mkdir(parents=True)
    for name, text in files.items():
        (folder / "package" / f"{name}.py").write_text(text)
    return Tree(folder)


class TestSources:
    def test_only_what_a_function_does_counts(self, tmp_path):
        def of(name: str, text: str) -> str:
            return tree(tmp_path / name, module=text).find("package.module.f").fingerprint

        first = of("first", "def f(a, b):\n    return a + b\n")
        assert first == of(
            "other lines", "import os\n\n\ndef f(\n    a,\n    b,\n):\n    'Adds.'\n    return (a + b)  # why\n"
        )
        assert first != of("code", "def f(a, b):\n    return a - b\n")
        assert first != of("default", "def f(a, b=1):\n    return a + b\n")
        assert first != of("decorator", "@cache\ndef f(a, b):\n    return a + b\n")

    def test_methods_are_found_where_they_are_inherited_from(self, tmp_path):
        sources = tree(
            tmp_path,
            mixin="class Mixin:\n    def far(self): pass\n",
            module="from package.mixin import Mixin\nclass Base:\n    @property\n    def near(self): pass\n"
            "class Own(Base, Mixin):\n    def own(self): pass\n",
        )
        assert sources.find("package.module.Own.own").text == "    def own(self): pass"
        assert sources.find("package.module.Own.near").text == "    @property\n    def near(self): pass"
        assert sources.find("package.module.Own.far").text == "    def far(self): pass"
        for missing in ("package.module.Own.gone", "package.module.gone", "package.gone.f", "gone.f"):
            assert sources.find(missing) is None


class TestFingerprints:
    def test_the_file_is_that_of_the_installed_sglang(self):
        """python -m sgl_shift_patches.fingerprints prints it; docs/porting.md."""
        assert fingerprints.recorded() == fingerprints.of_installed()
        assert fingerprints.recorded().sglang == registry.SGLANG_VERSION

    def test_every_hook_has_one(self):
        assert len(set(fingerprints.targets())) == len(fingerprints.targets())
        assert {hook.target for hook in registry.ALL} < fingerprints.recorded().fingerprints.keys()

    def test_so_has_all_that_the_patches_import(self):
        known = {part for target in fingerprints.targets() for part in target.split(".")}
        imported = {
            alias.name
            for file in PATCHES.glob("*.py")
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang")
            for alias in node.names
        }
        # Values, and an enum that names hook and device kinds: no function that could behave differently.
        assert imported - known == {"app", "envs", "GPU_MEMORY_TYPE_WEIGHTS", "HookType", "PlatformEnum"}


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """A copy of the files of SGLang that matter, taken for the installed one; ``changed(file, old, new)`` edits it."""
    folder = tmp_path / "site-packages"
    installed = fingerprints.installed().root
    for name in fingerprints.recorded().files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / name, folder / name)

    def change(file: str, old: str, new: str) -> Path:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
        return folder

    monkeypatch.setattr(fingerprints, "installed", lambda: Tree(folder))
    return change


RUNNER_FILE = "sglang/srt/model_executor/model_runner.py"
CHANGE = RUNNER_FILE, "        self.forward_pass_id += 1\n", "        self.forward_pass_id += 2\n"
REMOVAL = RUNNER_FILE, "    def check_weights(", "    def check_all_weights("


class TestAChangedSGLang:
    def test_is_refused_with_what_changed(self, changed):
        fingerprints.verify()
        changed(*CHANGE)
        changed(*REMOVAL)
        with pytest.raises(registry.HookError) as refusal:
            fingerprints.verify()
        assert f"\n  changed upstream: {FORWARD}\n" in str(refusal.value)
        assert "\n  missing: sglang.srt.model_executor.model_runner.ModelRunner.check_weights\n" in str(refusal.value)
        assert str(refusal.value).count("\n  ") == 2
        assert "SGL_SHIFT_ALLOW_CHANGED_SGLANG=1" in str(refusal.value)

    def test_stops_the_start(self, changed, checkpoint):
        changed(*CHANGE)
        with pytest.raises(RuntimeError, match=r"HookError.*changed upstream: .*ModelRunner\.forward"):
            resolve(checkpoint(DENSE), tp_size=2, sp_size=2)
        resolve(checkpoint(DENSE), tp_size=2)  # stock does not care

    def test_can_be_accepted(self, changed, monkeypatch, caplog):
        changed(*CHANGE)
        monkeypatch.setenv(fingerprints.ALLOW_VARIABLE, "1")
        fingerprints.verify()
        assert "changed upstream" in caplog.text

    def test_may_differ_in_comments(self, changed):
        changed(RUNNER_FILE, CHANGE[1], CHANGE[1].rstrip("\n") + "  # counts\n")
        fingerprints.verify()

    def test_is_shown_by_the_doctor(self, changed, tmp_path):
        changed(*CHANGE)
        changed(*REMOVAL)
        status, said = run_doctor(tmp_path)
        assert status == 1
        assert "changed upstream   model_runner.ModelRunner.forward\n" in said
        assert "missing            model_runner.ModelRunner.check_weights\n" in said
        assert said.count("\n  holds  ") == len(registry.ALL) - 2
        assert "NOT healthy" in said
        assert max(map(len, said.partition("PROBLEM")[0].splitlines())) <= 120


def run_doctor(tmp_path: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit status and output of ``python -m sgl_shift.doctor``, in a process that need not import SGLang anew."""
    import_sglang()
    output = tmp_path / "doctor.txt"

    def run() -> None:
        os.environ.update(environment)
        with output.open("w") as out, contextlib.redirect_stdout(out):
            status = door.main(list(arguments))
        sys.exit(status)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(120)
    return process.exitcode, output.read_text()


class TestADeployment:
    def test_that_would_run(self, checkpoint, tmp_path):
        status, said = run_doctor(
            tmp_path, "--model-path", str(checkpoint(DENSE)), "--tp-size", "8", "--sp-size", "4", "--enable-lora"
        )
        assert status == 0, said
        for line in (
            "SGLang             0.5.23",
            f"all {len(registry.ALL)} hooks took hold",
            "base               SP=4, TP=2; groups [[0, 1, 2, 3], [4, 5, 6, 7]]",
            "heads              1 of 8 a rank",
            "KV heads           1 of 4 a rank; each is kept by 2 rank(s)",
            "KV cache           384 bytes a token and rank",  # K and V, 3 layers, 1 head of 16 floats
            "stock TP           LoRA: batches in which a request has an adapter",
            "Verdict: healthy",
        ):
            assert line in said
        assert max(map(len, said.partition("PROBLEM")[0].splitlines())) <= 120

    def test_that_is_refused(self, checkpoint, tmp_path):
        status, said = run_doctor(
            tmp_path, "--model-path", str(checkpoint(DENSE)), "--tp-size", "4", "--sp-size", "3", "--pp-size", "2"
        )
        assert status == 1
        assert "--sp-size 3 does not divide --tp-size 4; use --sp-size 2 or 4" in said
        assert "--pp-size 2: " in said
        assert "NOT healthy" in said

    def test_for_which_sglang_finds_no_model(self, tmp_path):
        status, said = run_doctor(tmp_path, "--model-path", str(tmp_path / "none"), "--tp-size", "4", "--sp-size", "2")
        assert status == 1
        assert "PROBLEM: " in said

    def test_whose_plugin_sglang_does_not_load(self, tmp_path):
        status, said = run_doctor(tmp_path, SGLANG_PLUGINS="none")
        assert status == 1
        assert "did not take hold" in said

    def test_options_of_features_are_options_of_this_sglang(self):
        import msgspec

        import_sglang()
        from sglang.srt.server_args import ServerArgs

        fields = {field.name for field in msgspec.structs.fields(ServerArgs)}
        assert {feature.option for feature in FEATURES if feature.option} < fields

    def test_weights_are_estimated_as_they_turn_out(self, start, checkpoint):
        wide = dataclasses.replace(DENSE, name="wide", hidden=256, intermediate=2048)  # norms and RoPE are not counted
        real = start(wide, 4, sp_size=2).info()["weight_bytes"]
        estimate = doctor.Checkpoint.in_folder(checkpoint(wide), torch.float32.itemsize)
        assert estimate.total / 4 == pytest.approx(real["shift"], rel=0.1)
        assert estimate.stack / 2 == pytest.approx(real["base"], rel=0.1)
        assert estimate.together(4, 2, gpu=False) == pytest.approx(real["resident"], rel=0.1)

    @pytest.mark.parametrize(("memory", "fits"), [(1_000_000, True), (100_000, False)])
    def test_memory_of_a_gpu(self, memory, fits, checkpoint, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, memory))
        model = SimpleNamespace(dtype=torch.float32, head_dim=16, v_head_dim=16, num_attention_layers=3)
        resolved = SimpleNamespace(model_path=str(checkpoint(DENSE)), kv_cache_dtype="auto", mem_fraction_static=0.5)
        heads = HeadLayout(Layout(4, 2), DENSE.heads, DENSE.kv_heads)
        rows, problems = doctor.memory_of(ShiftConfig(sp_size=2), heads, model, resolved)
        assert ("KV tokens" in dict(rows)) == fits
        assert bool(problems) != fits


def test_another_sglang_is_compared_with_the_pinned_one(changed, tmp_path, capsys, monkeypatch):
    """As a wheel, which is neither unpacked nor imported."""
    changed(*CHANGE)
    folder = changed(*REMOVAL)
    monkeypatch.undo()  # the one that is installed is the real one again
    wheel = tmp_path / "sglang-9.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in folder.rglob("*.py"):
            archive.write(file, file.relative_to(folder))
    assert door.main(["--wheel", str(wheel)]) == 1
    said = capsys.readouterr().out
    assert f"changed upstream: {FORWARD} (hooked)\n" in said
    assert "missing: sglang.srt.model_executor.model_runner.ModelRunner.check_weights (hooked)\n" in said
    assert "\n-        self.forward_pass_id += 1\n+        self.forward_pass_id += 2\n" in said
    count = len(fingerprints.targets())
    assert f"{count - 2} holds, 1 changed upstream, 1 missing, of {count}" in said
    assert fingerprints.states(Tree(folder))[FORWARD] is State.CHANGED
