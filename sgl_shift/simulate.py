"""Discrete-event simulation of continuous batching over the cost model.

Two schedulers are modelled, each as its engine does it by default:

* ``sglang`` (``managers/scheduler.py:get_next_batch_to_run``, ``schedule_policy.py:PrefillAdder``): prefill first. A
  step is either prompt chunks, up to ``--chunked-prefill-size`` tokens together, or one token for every running
  request (no ``--enable-mixed-chunk``). A request is admitted if there is room for its prompt and for a part, the
  new-token ratio, of what the running ones may still generate.
* ``vllm`` (V1): mixed. A step is one token for every running request and prompt chunks with what is left of
  ``--max-num-batched-tokens``. A request is admitted if its first chunk fits; if decodes run out of room, the newest
  request is preempted and computed again.

Requests that decode advance together, so a stretch of steps in which nobody joins or leaves is computed at once: 15
minutes of a trace take a second. No torch, no SGLang.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence

from sgl_shift.deployment import Deployment
from sgl_shift.replica import NEVER, Replica
from sgl_shift.served import Result
from sgl_shift.traces import Request


def simulate(deployment: Deployment, requests: Sequence[Request], *, concurrency: int | None = None) -> Result:
    """Serve ``requests`` to the end.

    Args:
        concurrency: closed loop: so many requests at a time, the next one when one is finished; arrival times are
            then ignored. None: each arrives at its time.
    """
    result = Result()
    replicas = [Replica(deployment, result, number) for number in range(deployment.replicas)]
    turn = itertools.cycle(replicas)
    later = deque(requests[concurrency:]) if concurrency else deque()
    first = requests[:concurrency] if concurrency else requests
    arrivals = [(0.0 if concurrency else r.arrival, i, r) for i, r in enumerate(first)]
    heapq.heapify(arrivals)
    numbers = itertools.count(len(arrivals))
    while True:
        arriving = arrivals[0][0] if arrivals else NEVER
        behind = min((r for r in replicas if r.busy), key=lambda r: r.clock, default=None)
        if behind is not None and behind.clock < arriving:
            finished = behind.step(arriving)
            for served in finished:
                if later:
                    heapq.heappush(arrivals, (served.finish, next(numbers), later.popleft()))
        elif arrivals:
            at, _, request = heapq.heappop(arrivals)
            if request.prompt_tokens + request.output_tokens > deployment.kv_tokens:
                result.refused += 1
                continue
            if deployment.scheduler.balance == "round_robin":
                replica = next(turn)
            else:
                # vLLM's DP load balancer (v1/engine/core_client.py) weighs waiting requests four times.
                replica = min(replicas, key=lambda r: 4 * (len(r.coming) + len(r.waiting)) + len(r.running))
            replica.submit(request, at + deployment.shift.profile.efficiency.request, at)
        else:
            return result
