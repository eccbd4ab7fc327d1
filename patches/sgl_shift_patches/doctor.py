"""What ``python -m sgl_shift.doctor`` looks at: this environment, SGLang's source, one deployment, another SGLang."""

from __future__ import annotations

import difflib
import platform
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import sgl_shift
from sgl_shift import features
from sgl_shift.config import ShiftConfig
from sgl_shift.layout import HeadLayout, Layout
from sgl_shift.support import RefusedError
from sgl_shift.weights import Checkpoint
from sgl_shift_patches import cli, cpu_platform, fingerprints, registry, resolution
from sgl_shift_patches.fingerprints import State
from sgl_shift_patches.sources import Tree

PACKAGES = {
    "SGLang": "sglang",
    "torch": "torch",
    "FlashInfer": "flashinfer-python",
    "Triton": "triton",
    "NCCL (CUDA 12)": "nvidia-nccl-cu12",
    "NCCL (CUDA 13)": "nvidia-nccl-cu13",
}


def examine(arguments: list[str]) -> int:
    """Print what was found and, where ``arguments`` name a model, the verdict for that deployment.

    Returns:
        The exit status: 0 if a server would start, as far as this machine can tell, else 1.
    """
    print(f"sgl-shift {sgl_shift.__version__}, written for SGLang {registry.SGLANG_VERSION}\n")
    _print_rows(found())
    problems = [problem] if (problem := resolution.two_nccl_wheels()) else []
    try:
        print_source_states()
        install_all()
        print(f"\nInstalled here, as in a launcher and a rank: all {len(registry.ALL)} hooks took hold")
        fingerprints.verify()
        if arguments:
            rows, too_much = deployment(arguments)
            print("\nDeployment")
            _print_rows(rows)
            problems += too_much
    except (registry.HookError, RefusedError) as error:
        problems.append(str(error))
    except Exception as error:  # what SGLang itself finds wrong, with the arguments or the environment
        problems.append(f"{type(error).__name__}: {error}")
    print()
    for problem in problems:
        print(f"PROBLEM: {problem}")
    print("Verdict: NOT healthy" if problems else "Verdict: healthy")
    return 1 if problems else 0


def found() -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    for name, package in PACKAGES.items():
        try:
            yield name, metadata.version(package)
        except metadata.PackageNotFoundError:
            yield name, "not installed"
    yield "accelerators", ", ".join(cpu_platform.accelerators()) or "none: what follows is for SGLang on the CPU"


def print_source_states() -> None:
    """Each hook with what became of its source, and of what is relied on without a hook whatever does not hold."""
    states = fingerprints.states(fingerprints.installed())
    print("\nHooks into SGLang")
    why = {hook.target: hook.why for hook in registry.ALL}
    _print_states({target: states[target] for target in why}, why)
    relied_on = fingerprints.RELIED_ON
    differ = {target: states[target] for target in relied_on if states[target] is not State.HOLDS}
    print(f"\nRelied on without a hook: {len(relied_on) - len(differ)} of {len(relied_on)} hold")
    _print_states(differ, relied_on)


def install_all() -> None:
    """Load plugins as SGLang does and install what a launcher and a rank install.

    Raises:
        HookError: another release, a plugin that SGLang does not load (``SGLANG_PLUGINS``), a hook that does not take.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    registry.verify(registry.DOORS)
    registry.install(registry.ALL)


def deployment(arguments: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """What a server with these arguments would be, and why it would fail later.

    Raises:
        RefusedError: Shift Parallelism refuses it.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(["--log-level", "warning", *arguments])
    server_args.resolve_once()
    shift, resolved, model = cli.config_of(server_args), resolving_view(server_args), model_config_of(server_args)
    rows = [
        ("model", f"{model.hf_config.architectures[0]}, {model.num_hidden_layers} layers, {model.dtype}"),
        ("attention backend", str(resolved.attention_backend)),
    ]
    if not shift.enabled:
        return [*rows, ("Shift Parallelism", "off: no --sp-size above 1; this is stock SGLang")], []
    layout = Layout(resolved.tp_size, shift.sp_size)
    heads = HeadLayout(layout, model.num_attention_heads, model.get_total_num_kv_heads())
    groups = f"SP={layout.sp_size}, TP={layout.tp_size}; groups {layout.sp_groups}, {layout.base_tp_groups}"
    rows += [
        ("base", groups if shift.loads_base else "not loaded, because of --shift-mode tp"),
        ("shift", f"TP={layout.world_size}, stock"),
        (
            "mode",
            f"{shift.settings.mode}; threshold {'measured' if shift.auto else f'{shift.settings.threshold} tokens'}",
        ),
        ("heads", f"{heads.heads_per_rank} of {heads.num_heads} a rank, in both configurations"),
        (
            "KV heads",
            f"{heads.kv_heads_per_rank} of {heads.num_kv_heads} a rank; each is kept by {heads.kv_replication} rank(s)",
        ),
    ]
    memory, problems = memory_of(shift, heads, model, resolved)
    graphs = resolution.captured_graphs(server_args, shift)
    return [*rows, *memory, ("CUDA graphs", "; ".join(graphs) or "none"), *routed(resolved)], problems


def memory_of(
    shift: ShiftConfig, heads: HeadLayout, model: Any, resolved: Any
) -> tuple[list[tuple[str, str]], list[str]]:
    """Weights and KV cache of a rank, and whether a GPU of this machine, if it has one, holds them."""
    import torch

    kv_size = 1 if resolved.kv_cache_dtype.startswith("fp8") else model.dtype.itemsize
    kv_token = heads.kv_heads_per_rank * (model.head_dim + model.v_head_dim) * model.num_attention_layers * kv_size
    rows = [("KV cache", f"{kv_token:,} bytes a token and rank")]
    folder = model_folder(resolved.model_path)
    checkpoint = folder and Checkpoint.in_folder(folder, model.dtype.itemsize)
    if not checkpoint:
        return [*rows, ("weights", f"not known: no safetensors of {resolved.model_path} on this machine")], []
    stock = checkpoint.total / heads.layout.world_size
    gpu, layout = torch.cuda.is_available(), heads.layout
    both = checkpoint.together(layout.world_size, layout.tp_size, gpu=gpu) if shift.loads_base else stock
    rows.append(("weights", f"about {_size(both)} a rank for both configurations; stock TP alone {_size(stock)}"))
    if not gpu:
        return rows, []
    budget = torch.cuda.mem_get_info()[1] * resolved.mem_fraction_static
    tokens, stock_tokens = (int((budget - weights) / kv_token) for weights in (both, stock))
    if tokens <= 0:
        return rows, [
            f"weights of both configurations need about {_size(both)} a rank, --mem-fraction-static "
            f"{resolved.mem_fraction_static} leaves {_size(budget)}; use a smaller --sp-size, or more GPUs"
        ]
    return [*rows, ("KV tokens", f"about {tokens:,}; stock TP would have {stock_tokens:,}")], []


def model_folder(model_path: str) -> Path | None:
    """The folder of a model, which may be a name on the Hugging Face hub; nothing is downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if Path(model_path).is_dir():
        return Path(model_path)
    try:
        return Path(snapshot_download(model_path, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def routed(resolved: Any) -> Iterator[tuple[str, str]]:
    """What was asked for that is not simply served by both configurations."""
    for feature in features.asked_for(resolved):
        yield feature.verdict, feature.name.replace("`", "")


def compare(path: Path) -> int:
    """Print what another SGLang changed of what the patches rely on, with the difference of the sources.

    Args:
        path: a wheel, or a folder that holds ``sglang``.

    Returns:
        0 if all of it holds, else 1.
    """
    other = Tree(path if path.is_dir() else zipfile.Path(path))
    here, states = fingerprints.installed(), fingerprints.states(other)
    hooked = {hook.target for hook in registry.ALL}
    for target, state in states.items():
        if state is not State.HOLDS:
            print(f"{state}: {target} ({'hooked' if target in hooked else 'relied on'})")
    for target, state in states.items():
        before, after = here.find(target), other.find(target)
        if state is State.CHANGED and before and after:
            print()
            names = f"{registry.SGLANG_VERSION}/{target}", f"{path.name}/{target}"
            lines = before.text.splitlines(), after.text.splitlines()
            print(*difflib.unified_diff(*lines, *names, lineterm=""), sep="\n")
    counts = ", ".join(f"{sum(s is state for s in states.values())} {state}" for state in State)
    print(f"\n{path.name} against SGLang {registry.SGLANG_VERSION}: {counts}, of {len(states)}")
    return 0 if set(states.values()) == {State.HOLDS} else 1


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    for name, value in rows:
        print(f"  {name:<18} {value}")


def _print_states(states: dict[str, State], why: dict[str, str]) -> None:
    for target, state in states.items():
        module, _, name = target.rpartition(".")
        if module.rpartition(".")[2][:1].isupper():  # a method
            module, _, owner = module.rpartition(".")
            name = f"{owner}.{name}"
        print(f"  {state:<18} {module.rpartition('.')[2]}.{name}")
        if state is not State.HOLDS:
            print(f"  {'':<18} in {module}")
            print(f"  {'':<18} for: {why[target]}")


def _size(size: float) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.2f} MB"
