"""One storage for the weights of both configurations: what lies where, what it takes, and weights that change."""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from sgl_shift.storage import Cut, Part, SharedWeight, assemble, natural_order
from tests import parity
from tests.checkpoints import DENSE, FEW_KV_HEADS, MOE, Tiny
from tests.families import FAMILIES, GEMMA3, GPT_OSS, LLAMA4, OLMO2, QWEN2_MOE, attention_with_sinks, stand_ins
from tests.hosting import HostDied
from tests.parity import Requests
from tests.probes import Probe
from tests.servers import free_port
from tests.test_features import PROMPTS, greedy


class Recorded:
    """A group whose other ranks' shards are known: one rank of it, without the others."""

    def __init__(self, shards: torch.Tensor) -> None:
        self.shards = shards

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.view(self.shards.dtype).copy_(self.shards.reshape(-1))


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 4])), min_size=1, max_size=3),
    st.sampled_from([2, 4]),
    st.integers(0, 3),
)
def test_a_layer_shard_by_shard_puts_out_what_a_layer_part_by_part_does(described, sp_size, rank):
    parts = tuple(Part(rows, min(repeats, sp_size)) for rows, repeats in described)
    shards = torch.randn(sp_size, sum(part.rows for part in parts), 5)
    at = 0
    for part in parts:  # repeated rows are the same
        for s in range(sp_size):
            shards[s, at : at + part.rows] = shards[s - s % part.repeats, at : at + part.rows]
        at += part.rows
    cut = Cut(0, parts)
    expected = assemble(shards, cut)
    tp = nn.Parameter(shards[rank % sp_size].clone(), requires_grad=False)
    base = nn.Parameter(torch.zeros_like(expected), requires_grad=False)
    weight = SharedWeight(cut, tp, base, sp_size, rank % sp_size)
    weight.gather(Recorded(shards))
    x = torch.randn(7, 5)
    torch.testing.assert_close(natural_order(x @ base.T, parts, sp_size), x @ expected.T)
    base[:] = 3.0
    assert (tp == 3).all()
    tp.data = torch.full_like(tp, 4.0)  # as process_weights_after_loading does
    shards[rank % sp_size] = 4.0
    weight.gather(Recorded(shards))
    assert (tp == 4).all()
    base[:] = 5.0
    assert (tp == 5).all()


@pytest.mark.parametrize("copy", ["", "a kernel wants it"])
def test_a_weight_cut_along_columns(copy):
    whole = torch.randn(6, 12)
    shards = torch.stack(whole.split(4, 1))
    tp, base = (nn.Parameter(t, requires_grad=False) for t in (shards[1].clone(), torch.zeros(6, 12)))
    weight = SharedWeight(Cut(1, copy=copy), tp, base, 3, 1)
    weight.gather(Recorded(shards))
    assert torch.equal(base, whole)
    assert torch.equal(tp, shards[1])
    base[:] = 3.0
    assert (tp == 3).all() == (not copy)


# --- in the ranks of real engines ---


def in_model_order(weight: SharedWeight) -> torch.Tensor:
    """The base weight as SGLang's loader would have it."""
    ours = weight.base.data
    if weight.cut.parts and not weight.cut.copy:  # shard by shard
        ours = assemble(ours.view(weight.sp_size, -1, *ours.shape[1:]), weight.cut)
    return ours.t() if weight.base.transposed else ours


def inspect_weights(scheduler: Any) -> dict[str, Any]:
    """Compare the base stack with one that is read from the checkpoint; write through it and look at the TP weights."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import _resolve_transformer_layer_model as stack

    from sgl_shift.weights import weight_bytes
    from sgl_shift_patches import model_runner, state, weights

    runner, shift = scheduler.tp_worker.model_runner, state.current()
    with weights.padded_as(shift.layout.world_size):
        fresh = model_runner.read_again(runner, shift)
    expected = dict(fresh.named_parameters())
    base = dict(shift.base_model[0].named_parameters())
    cuts = {id(weight.base.parameter): weight for weight in shift.shared}
    differ, separate = [], []
    for name, parameter in base.items():
        weight = cuts[id(parameter)]
        ours = in_model_order(weight)
        if ours.shape != expected[name].shape or not torch.equal(ours, expected[name]):
            differ.append(name)
        if weight.tp.data.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            separate.append(name)
    # Memory that nobody has written holds zeros, or anything.
    unloaded = [
        name
        for name, p in base.items()
        if not p.isfinite().all() or p.abs().max() > 1e3 or (p == 0).float().mean() > (0.5 if "embed" in name else 0.1)
    ]
    before = {id(weight): weight.tp.data.clone() for weight in shift.shared}
    unseen = []
    for name, parameter in base.items():
        weight = cuts[id(parameter)]
        old = parameter.clone()
        parameter += 1.0
        if not torch.equal(weight.tp.data, before[id(weight)] + 1.0) and name not in separate:
            unseen.append(name)
        parameter.copy_(old)
    outside = dict(runner.model.named_parameters())
    inside = {parameter.data_ptr() for parameter in stack(runner.model).parameters()}
    return {
        "differ": differ,
        "separate": separate,
        "unseen": unseen,
        "unloaded": unloaded,
        "outside": sum(p.numel() * p.element_size() for p in outside.values() if p.data_ptr() not in inside),
        "fresh": weight_bytes([fresh]),
        **shift.report()["weight_bytes"],
    }


TIED = dataclasses.replace(DENSE, name="llama-tied", tied=True)


def inspected(model: Any, world: int, sp: int, start: Any, folder: Path, **options: Any) -> list[dict[str, Any]]:
    in_rank, probe = options.pop("in_rank", lambda _rank: None), Probe(folder, inspect_weights)
    host = start(model, world, sp_size=sp, in_rank=lambda rank: (in_rank(rank), probe.install(rank)), **options)
    assert host.info()["separate_weights"] == ""
    return [rank["extra"] for rank in host.probe(folder)]


@pytest.mark.parametrize(
    ("model", "world", "sp"),
    [(DENSE, 2, 2), (TIED, 4, 2), (FEW_KV_HEADS, 4, 4), (MOE, 4, 2)],
    ids=lambda p: getattr(p, "name", p),
)
def test_base_weights_are_those_of_the_checkpoint_and_tp_weights_views_of_them(model, world, sp, start, tmp_path):
    for rank in inspected(model, world, sp, start, tmp_path):
        assert rank["differ"] == []
        assert rank["unseen"] == rank["unloaded"] == []
        experts = [name for name in rank["separate"] if name.endswith("w13_weight")]
        assert rank["separate"] == experts
        assert bool(experts) == bool(model.experts)
        alone = rank["base"] + rank["outside"]
        print(
            f"{model.name} P={world} SP={sp}: base {rank['base']}, with the LM head {alone}, both {rank['resident']} "
            f"({rank['resident'] / alone:.3f}); two copies {alone + rank['shift'] - rank['outside']}"
        )
        if model is DENSE or model is TIED:
            assert rank["base"] == rank["fresh"]
            assert rank["resident"] <= 1.02 * alone


ONES = [family for family in FAMILIES if family not in (GPT_OSS,)]


@pytest.mark.long
@pytest.mark.parametrize("family", ONES, ids=lambda f: f.name)
def test_weights_of_a_family(family, start, tmp_path):
    for kv_heads, sp in ((4, 2), *(((1, 2), (2, 4)) if family is not OLMO2 else ())):
        (folder := tmp_path / f"{kv_heads}-{sp}").mkdir()
        for rank in inspected(family.with_kv_heads(kv_heads), 4, sp, start, folder, in_rank=stand_ins):
            assert rank["differ"] == rank["unseen"] == rank["unloaded"] == []
            assert all(name.endswith("w13_weight") for name in rank["separate"])
            assert bool(rank["separate"]) == (family in (QWEN2_MOE, LLAMA4))


def test_weights_that_cannot_be_shared_are_read_again(start):
    """gpt-oss, whose expert weights are laid out for their kernel, and where it is asked for."""
    gpt_oss = start(GPT_OSS, 4, sp_size=2, attention_backend="intel_amx", in_rank=attention_with_sinks)
    assert "re-arranged" in gpt_oss.info()["separate_weights"]
    gpt_oss.close()
    host = start(DENSE, 2, sp_size=2, environment={"SGL_SHIFT_SEPARATE_WEIGHTS": "1"})
    info = host.info()
    assert "asks for it" in info["separate_weights"]
    assert info["weight_bytes"]["resident"] > 1.4 * info["weight_bytes"]["base"]
    assert host.call(update_from_disk, "/nowhere") == [False, True]


def forget_buffers(scheduler: Any) -> int:
    """What releasing the memory of weights does to buffers of both models."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import _resolve_transformer_layer_model as stack

    from sgl_shift_patches import state

    stock = stack(scheduler.tp_worker.model_runner.model)
    own = set()
    for model in (stock, *state.current().base_model):
        for buffer in model.buffers():
            own ^= {buffer.data_ptr()}
            buffer.zero_()
    return len(own)


def _release(engine: Any) -> None:
    engine.release_memory_occupation()


def _resume(engine: Any) -> None:
    engine.resume_memory_occupation()


def test_released_memory_comes_back_to_both_configurations(start, tmp_path):
    """Buffers, that is: the CPU has no memory saver that would take the weights."""
    probe = Probe(tmp_path, forget_buffers)

    def in_rank(rank: int) -> None:
        probe.install(rank)
        torch.get_device_module = lambda *_: torch.cpu  # SGLang synchronizes it, and torch sees CUDA, without a GPU

    host = start(GEMMA3, 2, sp_size=2, in_rank=in_rank)
    expected = {}
    for mode in ("sp", "tp"):
        host.set(mode=mode)
        host.flush_cache()
        expected[mode] = host.call(_answers)
    host.call(_release)
    assert all(rank["extra"] for rank in host.probe(tmp_path))  # the base model has buffers of its own
    host.call(_resume)
    for mode in ("sp", "tp"):
        host.set(mode=mode)
        host.flush_cache()
        assert host.call(_answers) == expected[mode]


class SmallVocabulary(Tiny):
    def write(self, folder: Path) -> None:
        super().write(folder)
        tensors = load_file(folder / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][: self.config["vocab_size"]].contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


ODD = SmallVocabulary(
    "llama-odd", "LlamaForCausalLM", "llama", heads=6, kv_heads=3, hidden=96, extra={"vocab_size": 320}
)


def test_a_vocabulary_that_needs_padding_in_tp_only(start, tmp_path):
    """Three ranks, as the demo has: padded to 384 = 6 * 64 in both, or shards would not lie in each other."""
    stock = start(ODD, 3, plugin=False)
    requests = Requests([[random.Random(3).randrange(1, 300) for _ in range(30)]], [4])
    expected = parity.run(stock, requests)
    host = start(ODD, 3, sp_size=3, shift_mode="sp", in_rank=Probe(tmp_path, inspect_weights).install)
    parity.assert_equal(expected, parity.run(host, requests))
    for rank in host.probe(tmp_path):
        assert rank["extra"]["differ"] == rank["extra"]["unseen"] == rank["extra"]["separate"] == []


def test_a_start_that_leaves_no_room_says_who_takes_what(start, tmp_path):
    def no_memory(_rank: int) -> None:
        from sglang.srt.model_executor import pool_configurator

        class Config(pool_configurator.MemoryPoolConfig):
            def __post_init__(self) -> None:
                self.max_total_num_tokens = 0
                super().__post_init__()

        pool_configurator.MemoryPoolConfig = Config

    with pytest.raises(HostDied):
        start(DENSE, 4, sp_size=4, in_rank=no_memory)
    said = (tmp_path / "engine0.log").read_text()
    assert "Not enough memory" in said
    assert "with SP=4, TP=1; stock TP=4 takes" in said
    assert "--sp-size 2: about " in said
    assert "--shift-mode tp: " in said


# --- weights that change at run time ---


def update_from_disk(engine: Any, folder: str) -> list[bool]:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    request = UpdateWeightFromDiskReqInput(model_path=folder)
    success, message, _ = engine.loop.run_until_complete(
        engine.tokenizer_manager.update_weights_from_disk(request, None)
    )
    return [success, "copy of its own" in message]


def _update_from_tensors(engine: Any, tensors: list[tuple[str, torch.Tensor]], load_format: str | None = None) -> None:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    manager, run = engine.tokenizer_manager, engine.loop.run_until_complete
    run(manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
    engine.update_weights_from_tensor(tensors, load_format=load_format)
    run(manager.end_weight_update(EndWeightUpdateReqInput(), None))


def _trainer(port: int, world_size: int, tensors: list[torch.Tensor]) -> None:
    """Rank 0 of a group whose other ranks are the engine's: broadcasts weights, as a trainer does."""
    from sglang.srt.utils import init_custom_process_group

    address = f"tcp://127.0.0.1:{port}"
    group = init_custom_process_group("gloo", address, world_size=world_size, rank=0, group_name="trainer")
    for tensor in tensors:
        torch.distributed.broadcast(tensor, src=0, group=group)


def _update_from_trainer(engine: Any, port: int, world: int, tensors: dict[str, torch.Tensor]) -> None:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    manager, run = engine.tokenizer_manager, engine.loop.run_until_complete
    engine.init_weights_update_group("127.0.0.1", port, 1, world + 1, "trainer", backend="gloo")
    run(manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    success, message = engine.update_weights_from_distributed(
        list(tensors), ["float32"] * len(tensors), shapes, group_name="trainer"
    )
    assert success, message
    run(manager.end_weight_update(EndWeightUpdateReqInput(), None))


def _check_weights(engine: Any, action: str) -> Any:
    """The checksum of all ranks, if it was asked for. Comparing with a snapshot needs a GPU in stock SGLang as well."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    check = engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action=action), None)
    success, message, _, checksum = engine.loop.run_until_complete(check)
    assert success, message
    return checksum


def _answers(engine: Any) -> Any:
    answers = engine.generate(input_ids=PROMPTS, sampling_params=greedy(3), return_logprob=True, logprob_start_len=0)
    return [[a["output_ids"], a["meta_info"]["input_token_logprobs"]] for a in answers]


NEW = dataclasses.replace(DENSE, name="llama-new")


@pytest.mark.parametrize(("world", "sp"), [(2, 2), (4, 2)])
def test_updates_reach_both_configurations(world, sp, start, checkpoint):
    from tests.checkpoints import weights

    fresh = {model.name: start(model, world, plugin=False) for model in (DENSE, NEW)}
    expected = {name: host.call(_answers) for name, host in fresh.items()}
    for host in fresh.values():
        host.close()
    host = start(DENSE, world, sp_size=sp)

    def serves(model: Tiny) -> None:
        for mode in ("sp", "tp"):
            host.set(mode=mode)
            host.flush_cache()
            parity.assert_close(expected[model.name], host.call(_answers), f"{model.name}, {mode}")

    def both_agree() -> Any:
        answers = []
        for mode in ("sp", "tp"):
            host.set(mode=mode)
            host.flush_cache()
            answers.append(host.call(_answers))
        parity.assert_close(*answers, "base and shift")
        return answers[0]

    serves(DENSE)
    assert host.call(update_from_disk, str(checkpoint(NEW)))[0]
    serves(NEW)
    assert not host.call(update_from_disk, "/nowhere")[0]
    serves(NEW)
    host.call(_update_from_tensors, list(weights(DENSE).items()))
    serves(DENSE)

    new, port = weights(NEW), free_port()
    trainer = multiprocessing.get_context("fork").Process(
        target=_trainer, args=(port, world + 1, list(new.values())), daemon=True
    )
    trainer.start()
    host.call(_update_from_trainer, port, world, new)
    trainer.join()
    serves(NEW)
    assert host.call(update_from_disk, str(checkpoint(DENSE)))[0]
    serves(DENSE)
    checksum = host.call(_check_weights, "checksum")

    # Each rank's own shard, as trainers that know the TP layout send it: no stock run has the same, but both
    # configurations of ours agree.
    shard = torch.randn(DENSE.hidden, DENSE.intermediate // world) / 8
    host.call(_update_from_tensors, [("model.layers.1.mlp.down_proj.weight", shard)], "direct")
    changed = both_agree()
    with pytest.raises(AssertionError):
        parity.assert_close(expected[DENSE.name], changed, "direct")

    assert host.call(_check_weights, "checksum") not in (None, checksum)
    host.call(_check_weights, "reset_tensors")
    with pytest.raises(AssertionError):
        parity.assert_close(changed, both_agree(), "reset")
    assert host.call(update_from_disk, str(checkpoint(DENSE)))[0]
    serves(DENSE)
    assert host.call(_check_weights, "checksum") == checksum
