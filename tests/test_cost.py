"""The cost model: volumes and sizes against the paper's formulas, and what must hold for any model."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.models import CONFIGS
from sgl_shift.cost import Batch, Chunk, StepCost, keys, volumes
from sgl_shift.deployment import weights_of
from sgl_shift.hardware import GPUS, Efficiency, Profile
from sgl_shift.layout import Layout, LayoutError, divisors
from sgl_shift.shape import ModelShape, ShapeError

H200 = Profile(GPUS["h200"])


def shape(name: str, **options: bool) -> ModelShape:
    return ModelShape.from_config(CONFIGS[name], **options)


# The paper notes, section 1.8: elements a batch token, layer and GPU at P=8.
TABLE = {
    "Llama-70B FP8": (28672, 2016, 5824, 13440),
    "Qwen3-32B FP8": (17920, 2016, 4288, 8832),
    "Qwen3-30B-A3B": (7168, 1120, 1984, 3712),
    "Llama-8B": (14336, 1120, 3008, 6784),
}


@pytest.mark.parametrize("name", TABLE)
def test_volumes_are_those_of_the_paper(name):
    tokens = 8000
    for sp, expected in zip((1, 8, 4, 2), TABLE[name], strict=True):
        sent = volumes(shape(name), Layout(8, sp), tokens)
        assert (sent.all_reduce + sent.all_to_all) / tokens == expected


@given(st.sampled_from([2, 4, 8]), st.integers(1, 5000))
def test_padding_is_sent_too(sp, tokens):
    model, layout = shape("Llama-70B"), Layout(8, sp)
    padded = layout.rows_per_rank(tokens) * sp
    assert volumes(model, layout, tokens) == volumes(model, layout, padded)


# Public sizes: parameters in billions.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-70B", 70.6),
        ("Llama-8B", 8.03),
        ("Qwen3-32B FP8", 32.8),
        ("Qwen3-30B-A3B", 30.5),
        ("Llama-4-Scout", 107.8),
    ],
)
def test_weights_add_up_to_the_published_number_of_parameters(name, billions):
    model = shape(name)
    elements = model.dense_weights + model.expert_weights * model.experts * model.moe_layers + 2 * model.head_weights
    assert elements / 1e9 == pytest.approx(billions, rel=0.003)


def test_fp8_halves_linear_weights_but_not_the_embedding():
    plain, fp8 = shape("Llama-70B").checkpoint, shape("Llama-70B FP8").checkpoint
    embeddings = 2 * 2 * shape("Llama-70B").head_weights
    assert fp8.total - embeddings == pytest.approx((plain.total - embeddings) / 2)
    assert (plain.dtypes, fp8.dtypes) == (frozenset(), frozenset({"F8_E4M3"}))
    while_loading = shape("Llama-70B", fp8=True).checkpoint
    assert while_loading.total == fp8.total


def test_copies_of_weights_are_those_in_the_docs():
    """docs/weights.md: GB a rank of P=8 beyond one storage; scales and norms are left out here."""
    for name, copies in (
        ("Llama-70B FP8", 3.0),
        ("Qwen3-32B FP8", 1.4),
        ("Qwen3-30B-A3B", 7.2),
        ("Llama-4-Scout", 24.2),
    ):
        checkpoint = shape(name).checkpoint
        one_storage = checkpoint.stack + (checkpoint.total - checkpoint.stack) / 8
        assert (checkpoint.together(8, 1, gpu=True) - one_storage) / 1e9 == pytest.approx(copies, abs=0.06)
    twice = shape("Llama-70B", fp8=True).checkpoint  # quantized while loading: nothing is shared
    assert twice.together(8, 1, gpu=True) == twice.stack + twice.total / 8
    repacked = weights_of(shape("Llama-70B FP8"), Layout(8, 8), GPUS["a100"])  # no FP8 units
    assert repacked == twice.stack + twice.total / 8
    assert weights_of(shape("Llama-70B FP8"), Layout(8, 8), GPUS["h100"]) < repacked


def test_kv_bytes_count_replicated_heads():
    model = shape("Qwen3-30B-A3B")  # 4 KV heads
    each = 2 * 128 * 48 * 2
    assert StepCost(model, H200, Layout(4, 1)).kv_bytes == each
    assert StepCost(model, H200, Layout(8, 8)).kv_bytes == each  # not a half
    assert StepCost(shape("Qwen3-30B-A3B", fp8_kv=True), H200, Layout(8, 8)).kv_bytes == each / 2


def test_both_configurations_have_the_same_kv_cache():
    for name in CONFIGS:
        model = shape(name)
        assert len({StepCost(model, H200, Layout(8, sp)).kv_bytes for sp in (1, 2, 4, 8)}) == 1


def test_layouts_that_the_engine_refuses_have_no_cost():
    with pytest.raises(LayoutError, match="64 attention heads cannot be split over --tp-size = 6"):
        StepCost(shape("Llama-70B"), H200, Layout(6, 3))


@given(
    st.sampled_from(sorted(CONFIGS)),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 20_000),
    st.integers(0, 100_000),
    st.integers(0, 300),
)
def test_more_work_takes_no_less_time(name, world, sp, new, past, decodes):
    if world % sp or 40 % world:
        return
    cost = StepCost(shape(name), H200, Layout(world, sp), graph_tokens=10**9)
    batch = Batch((Chunk(new, past),), decodes, decodes * 1000)
    seconds = cost.seconds(batch)
    assert seconds > 0
    assert cost.seconds(batch._replace(chunks=(Chunk(new + 1, past),))) >= seconds
    assert cost.seconds(batch._replace(chunks=(Chunk(new, past + 1),))) >= seconds
    assert cost.seconds(Batch(batch.chunks, decodes + 1, batch.context + 1000)) >= seconds


@pytest.mark.parametrize("name", CONFIGS)
def test_better_machines_are_no_slower(name):
    batch = Batch((Chunk(3000, 500),), 20, 40_000)
    for field in ("bandwidth", "flops", "fp8_flops", "link"):
        faster = dataclasses.replace(GPUS["h100"], **{field: 2 * getattr(GPUS["h100"], field)})
        for sp in divisors(8):
            slow, fast = (StepCost(shape(name), Profile(gpu), Layout(8, sp)) for gpu in (GPUS["h100"], faster))
            assert fast.seconds(batch) <= slow.seconds(batch)


def test_each_configuration_is_best_where_the_paper_has_it():
    model = shape("Llama-70B FP8")
    costs = {sp: StepCost(model, H200, Layout(8, sp)) for sp in (1, 2, 4, 8)}
    prefill, decode = Batch((Chunk(4096),)), Batch((), 1, 4096)
    by_prefill, by_decode = (sorted(costs, key=lambda sp: costs[sp].seconds(batch)) for batch in (prefill, decode))
    assert by_prefill == [8, 4, 2, 1]
    assert by_decode[0] == 1
    # SP reads all the weights for each token, TP an eighth.
    assert costs[8].parts(decode).linear == pytest.approx(8 * costs[1].parts(decode).linear, rel=0.05)
    assert costs[1].parts(prefill).attention == costs[8].parts(prefill).attention


def test_a_small_batch_reads_few_experts():
    cost = StepCost(shape("Qwen3-30B-A3B"), H200, Layout(1, 1))
    one, many = (cost.parts(Batch((), n, n)).linear for n in (1, 64))
    assert 5 < many / one < 16  # 8 of 128 experts, then nearly all; the attention weights are read either way


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 50))
def test_pairs_under_a_causal_mask_and_a_window(new, past, window):
    assert keys(Chunk(new, past)) == sum(past + i for i in range(1, new + 1))
    assert keys(Chunk(new, past), window) == sum(min(past + i, window) for i in range(1, new + 1))


def test_local_attention_is_read_from_the_config():
    scout = shape("Llama-4-Scout")
    assert (scout.window, scout.local_layers) == (4096, 36)
    gemma = {**CONFIGS["Llama-8B"], "sliding_window": 1024, "sliding_window_pattern": 6, "num_hidden_layers": 26}
    assert ModelShape.from_config(gemma).local_layers == 22
    unused = {**CONFIGS["Llama-8B"], "sliding_window": 4096, "use_sliding_window": False}
    assert ModelShape.from_config(unused).local_layers == 0


def test_quantization_is_read_from_the_config():
    def read(**quantization: object) -> ModelShape:
        return ModelShape.from_config({**CONFIGS["Llama-8B"], "quantization_config": quantization})

    weights = {"num_bits": 8, "type": "float"}
    dynamic = read(
        quant_method="compressed-tensors", config_groups={"g": {"weights": weights, "input_activations": {"a": 1}}}
    )
    assert (dynamic.linear_itemsize, dynamic.fp8) == (1, True)
    four = read(quant_method="awq", bits=4)
    assert (four.linear_itemsize, four.fp8) == (0.5, False)
    with pytest.raises(ShapeError, match="'bitnet'"):
        read(quant_method="bitnet")


def test_a_config_without_sizes_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    with pytest.raises(ShapeError, match="no hidden_size"):
        ModelShape.from_path(tmp_path)
    with pytest.raises(ShapeError, match=r"is a folder with a config\.json"):
        ModelShape.from_path(tmp_path / "nothing")


def test_a_machine_from_a_file(tmp_path):
    machine = {"name": "x", "memory": 1e9, "bandwidth": 1e9, "flops": 1e12, "fp8_flops": 1e12, "link": 1e9}
    file = tmp_path / "x.json"
    file.write_text(json.dumps({**machine, "efficiency": {"gemm": 0.9}}))
    assert Profile.named(str(file)).efficiency == Efficiency(gemm=0.9)
    file.write_text(json.dumps({**machine, "efficiency": {"gem": 0.9}}))
    with pytest.raises(ValueError, match="unknown or missing there: gem"):
        Profile.named(str(file))
    with pytest.raises(ValueError, match="'h2oo' is not one of a100, h100, h200, b200"):
        Profile.named("h2oo")
