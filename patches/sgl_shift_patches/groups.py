"""SP and base-TP groups beside SGLang's own, and the scope that makes them SGLang's parallel state."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch

from sgl_shift.config import ShiftConfig, switched_on
from sgl_shift.forward import ShiftParallel
from sgl_shift.layout import Layout
from sgl_shift.policy import Configuration
from sgl_shift_patches import cli, state

logger = logging.getLogger(__name__)

DEBUG_VARIABLE = "SGL_SHIFT_DEBUG"
# Ranks meet right after SGLang's own rendezvous, so they are seconds apart at most.
MEETING_TIMEOUT = timedelta(seconds=60)


class RanksDifferError(RuntimeError):
    """Ranks that came up, or are about to run a batch, differently. Going on would hang or give wrong answers."""


class SpGroup:
    """:class:`sgl_shift.exchange.Group` over one of SGLang's ``GroupCoordinator``.

    Calls what SGLang's public methods call behind their custom operators: those are registered for CUDA tensors only
    (``utils/common.py:direct_register_custom_op``) and matter to Dynamo alone. PyNccl is used inside graph capture.
    """

    def __init__(self, coordinator: Any) -> None:
        self.coordinator = coordinator

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.coordinator._all_to_all_single(output, input)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.coordinator._all_gather_into_tensor(output, input)


def init_parallel_runtime(_result: None, *args: Any, **kwargs: Any) -> None:
    """After ``bootstrap.init_parallel_runtime``: bring Shift Parallelism up in this rank.

    Runs in every scheduler process, before memory is measured and weights are loaded.
    """
    from sgl_shift_patches import registry

    shift = cli.config_of(kwargs["server_args"])
    if not shift.enabled:
        return
    if not cli.was_checked(kwargs["server_args"]):
        raise RuntimeError(
            "Shift Parallelism is on in this rank, but the launcher never checked the deployment: its arguments were "
            "resolved before plugins were loaded. Start it with python -m sgl_shift.run MODULE ... --sp-size N, or "
            "call sglang.srt.plugins.load_plugins() before ServerArgs are resolved"
        )
    registry.verify(registry.DOORS)
    registry.install(registry.RANK)
    state.set_current(make_groups(shift))


def make_groups(config: ShiftConfig) -> ShiftParallel:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import get_parallel

    tp_group = get_parallel().tp_group
    layout, rank = Layout(tp_group.world_size, config.sp_size), tp_group.rank_in_group
    meet(rank, layout, config)

    def group(name: str, ranks: list[list[int]], **options: Any) -> Any:
        backend = torch.distributed.get_backend(tp_group.device_group)
        # local_rank as WORLD has it (parallel_state.py:initialize_model_parallel); collective over all ranks.
        local_rank = parallel_state.get_world_group().local_rank
        return parallel_state.init_model_parallel_group(ranks, local_rank, backend, group_name=name, **options)

    # Only all-to-all and all-gather run in an SP group; custom all-reduce buffers would be wasted on it.
    sp = group("shift_sp", layout.sp_groups, use_custom_allreduce=False)
    base_tp = group("shift_base_tp", layout.base_tp_groups)
    warm_up(SpGroup(sp), base_tp, layout, tp_group.device)
    if rank == 0:
        logger.info("Shift Parallelism: SP groups %s, base-TP groups %s", layout.sp_groups, layout.base_tp_groups)
    return ShiftParallel(
        config=config,
        layout=layout,
        rank=rank,
        sp_group=SpGroup(sp),
        base_scope=lambda: base_scope(base_tp),
        agree=_agreement(tp_group, layout) if debugging() else None,
        coordinators=(sp, base_tp),
    )


def debugging() -> bool:
    """Whether every step is compared over the ranks before it runs; slow, for finding out."""
    return switched_on(DEBUG_VARIABLE)


def warm_up(sp: SpGroup, base_tp: Any, layout: Layout, device: torch.device) -> None:
    """Make the communicators, which come into being with the first collective, before memory is measured: torch's, and
    PyNccl's, which graphs use."""
    numbers = torch.zeros(layout.sp_size, device=device)
    with ExitStack() as pynccl:
        for graphs in (False, True):
            if graphs:
                for group in (sp.coordinator, base_tp):
                    if group.pynccl_comm is not None:
                        pynccl.enter_context(group.pynccl_comm.change_state(enable=True))
            sp.all_to_all(torch.empty_like(numbers), numbers)
            sp.all_gather(torch.empty_like(numbers), numbers[:1])
            base_tp.all_reduce(numbers)


@contextmanager
def graph_capture(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Around ``parallel_state.graph_capture``, which knows SGLang's groups: ours take part as well, on its stream, so
    that PyNccl and custom all-reduce serve them while a graph is captured."""
    shift = state.current()
    with original(*args, **kwargs) as context, ExitStack() as stack:
        for group in shift.coordinators if shift is not None else ():
            stack.enter_context(group.graph_capture(context))
        yield context


def meet(rank: int, layout: Layout, config: ShiftConfig) -> None:
    """Wait until every rank is here with the same configuration.

    Over the rendezvous store, not a collective: a rank whose plugin failed never comes, and a collective would hang.

    Raises:
        RanksDifferError: a rank did not come, or came with another configuration.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    mine = json.dumps([config.to_dict(), layout.world_size, debugging()], sort_keys=True)
    store.set(f"sgl_shift/{rank}", mine)
    for other in range(layout.world_size):
        try:
            store.wait([f"sgl_shift/{other}"], MEETING_TIMEOUT)
        except Exception as error:  # torch raises DistStoreError or RuntimeError, by version
            raise RanksDifferError(
                f"rank {other} did not bring Shift Parallelism up within {MEETING_TIMEOUT.seconds} s: see its log for "
                "why the plugin or a hook failed there. The server does not start: that rank would serve plain TP."
            ) from error
        theirs = store.get(f"sgl_shift/{other}").decode()
        if theirs != mine:
            raise RanksDifferError(f"rank {rank} came up with {mine}, rank {other} with {theirs}")


@contextmanager
def base_scope(base_tp: Any) -> Iterator[None]:
    """Inside, SGLang's parallel state is TP over ``base_tp``: what building and running the base model needs."""
    from sglang.srt.distributed.parallel_state import patch_tensor_parallel_group
    from sglang.srt.runtime_context import get_parallel

    with (
        patch_tensor_parallel_group(base_tp, owns_attention=True),
        # Not replaced by the former, but what layers/moe/utils.py:post_experts_reduction_group sums experts over:
        # with the stock group, ranks would add up the outputs of different tokens, without any error.
        get_parallel().override(moe_tp_group=base_tp, shared_experts_tp_group=base_tp),
    ):
        yield


def _agreement(tp_group: Any, layout: Layout) -> Callable[[Configuration, int], None]:
    """Debug mode: gather what each rank is about to do, and stop on the first difference."""
    order = list(Configuration)

    def agree(configuration: Configuration, num_tokens: int) -> None:
        mine = torch.tensor([order.index(configuration), num_tokens, layout.digest()])
        rows = [torch.empty_like(mine) for _ in range(tp_group.world_size)]
        torch.distributed.all_gather(rows, mine, group=tp_group.cpu_group)
        plans = [row.tolist() for row in rows]
        if any(plan != plans[0] for plan in plans):
            seen = "; ".join(f"rank {r}: {order[c]}, {n} tokens, layout {d:#x}" for r, (c, n, d) in enumerate(plans))
            raise RanksDifferError(f"ranks disagree on a batch: {seen}")

    return agree
