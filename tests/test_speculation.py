"""What stands under speculative decoding, which SGLang refuses on out-of-tree CPU platforms: batches in the shape of a
verification, and the hidden states of inner layers that EAGLE3 reads, which SGLang also hands out without a draft.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests import parity
from tests.checkpoints import DENSE, FEW_KV_HEADS, MOE, VOCAB
from tests.families import GEMMA3, GPT_OSS, QWEN2_MOE, attention_with_sinks, stand_ins
from tests.parity import Requests
from tests.probes import Probe

PREFIXES, WIDTH = (19, 6, 41), 4  # tokens in the cache, draft tokens a request
SLOTS = 512  # of the KV pool, that these batches use


def verify(scheduler: Any) -> dict[str, torch.Tensor]:
    """Prefill PREFIXES, then verify WIDTH draft tokens of each as a target model does: one extend of all rows.

    Follows ``speculative/eagle_info.py:EagleVerifyInput.prepare_for_verify``. Draft tokens are a chain, since
    torch_native has no tree mask.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    runner = scheduler.tp_worker.model_runner
    requests = torch.arange(1, len(PREFIXES) + 1)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))[: sum(PREFIXES) + WIDTH * len(PREFIXES)]
    rng = random.Random(7)
    taken = 0

    def forward(mode: Any, before: list[int], lengths: list[int]) -> Any:
        nonlocal taken
        where = 1 + slots[taken : taken + sum(lengths)]
        taken += sum(lengths)
        positions = [torch.arange(start, start + length) for start, length in zip(before, lengths, strict=True)]
        for row, position, slot in zip(requests, positions, where.split(lengths), strict=True):
            runner.req_to_token_pool.req_to_token[row, position] = slot.to(torch.int32)
        after = torch.tensor(before) + torch.tensor(lengths)
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(lengths),
            input_ids=torch.tensor([rng.randrange(1, VOCAB) for _ in range(sum(lengths))]),
            req_pool_indices=requests,
            seq_lens=after,
            seq_lens_cpu=after,
            seq_lens_sum=int(after.sum()),
            orig_seq_lens=after,
            out_cache_loc=where,
            positions=torch.cat(positions),
            extend_num_tokens=sum(lengths),
            extend_seq_lens=torch.tensor(lengths),
            extend_seq_lens_cpu=lengths,
            extend_prefix_lens=torch.tensor(before),
            extend_prefix_lens_cpu=before,
            extend_start_loc=torch.tensor(lengths).cumsum(0) - torch.tensor(lengths),
            global_num_token_non_padded_cpu=sum(lengths),
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        return runner.forward(batch).logits_output

    forward(ForwardMode.EXTEND, [0] * len(PREFIXES), list(PREFIXES))
    output = forward(ForwardMode.TARGET_VERIFY, list(PREFIXES), [WIDTH] * len(PREFIXES))
    return {"logits": output.next_token_logits.clone(), "hidden": output.hidden_states.clone()}


@pytest.mark.parametrize(("model", "world", "sp"), [(DENSE, 2, 2), (FEW_KV_HEADS, 4, 4), (MOE, 4, 2)])
def test_a_batch_of_several_draft_tokens_a_request(model, world, sp, start, tmp_path):
    """All in base; then prefill in base and the verification, of exactly threshold tokens, in shift."""

    drafts = WIDTH * len(PREFIXES)

    def run(name, **arguments):
        (tmp_path / name).mkdir()
        host = start(model, world, in_rank=Probe(tmp_path / name, verify).install, **arguments)
        return host, host.probe(tmp_path / name)

    def compare(ours):
        for rank, (theirs, mine) in enumerate(zip(stock, ours, strict=True)):
            assert theirs["extra"]["logits"].shape == (drafts, VOCAB)
            assert theirs["extra"]["hidden"].shape == (drafts, model.hidden)
            for part, tensor in theirs["extra"].items():
                torch.testing.assert_close(mine["extra"][part], tensor, atol=1e-4, rtol=1e-4, msg=f"{rank}, {part}")
            for part in "kv":
                assert (mine[part][:, 1:] - theirs[part][:, 1:]).abs().max() < parity.TOLERANCE

    host, stock = run("stock", plugin=False)
    host.close()
    host, ours = run("ours", sp_size=sp, shift_mode="sp")
    compare(ours)
    assert host.info()["tokens"] == {"base": sum(PREFIXES) + drafts, "shift": 0}
    host.set(mode="shift", threshold=drafts)
    compare(host.probe(tmp_path / "ours"))
    assert host.info()["tokens"] == {"base": 2 * sum(PREFIXES) + drafts, "shift": drafts}


LAYERS = [0, 1]
PROMPTS = Requests.random(5, [33, 7], [0, 0]).prompts


def _hidden_states(engine: Any) -> Any:
    params = {"temperature": 0, "max_new_tokens": 4}
    answers = engine.generate(input_ids=PROMPTS, sampling_params=params, return_hidden_states=True)
    return [[answer["output_ids"], answer["meta_info"]["hidden_states"]] for answer in answers]


# Each tells its layers in a way of its own: the stack alone, every layer, or the stack's end as well.
@pytest.mark.parametrize(
    ("model", "convention"),
    [
        (DENSE, "EAGLE3"),
        (MOE, "EAGLE3"),
        (GPT_OSS, "EAGLE3"),
        *(
            pytest.param(*more, marks=pytest.mark.long)
            for more in ((DENSE, "DFLASH"), (QWEN2_MOE, "EAGLE3"), (GEMMA3, "EAGLE3"))
        ),
    ],
    ids=lambda p: getattr(p, "name", p),
)
def test_hidden_states_of_inner_layers(model, convention, start):
    engine = {
        "enable_return_aux_hidden_states": True,
        "speculative_algorithm": convention,
        "return_aux_hidden_state_layer_ids": LAYERS,
        "in_rank": stand_ins,
    }
    if model is GPT_OSS:
        engine |= {"attention_backend": "intel_amx", "in_rank": attention_with_sinks}
    stock = start(model, 4, plugin=False, **engine)
    expected = stock.call(_hidden_states)
    stock.close()
    hidden = model.hidden if model in (DENSE, MOE) else 128
    assert len(expected[0][1][1]) in (hidden * len(LAYERS), hidden * (len(LAYERS) + 1))
    host = start(model, 4, sp_size=2, shift_mode="sp", **engine)
    parity.assert_close(expected, host.call(_hidden_states), model.name)
    assert host.info()["tokens"]["shift"] == 0
    host.set(mode="shift", threshold=5)
    host.flush_cache()
    parity.assert_close(expected, host.call(_hidden_states), model.name)
    assert host.info()["tokens"]["shift"] > 0
