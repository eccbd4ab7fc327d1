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
import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sgl_shift.config import Settings
from sgl_shift.cost import Batch, Chunk, StepCost
from sgl_shift.hardware import Profile
from sgl_shift.layout import Layout
from sgl_shift.policy import Configuration, choose
from sgl_shift.shape import ModelShape
from sgl_shift.traces import Request

NEVER = float("inf")
# SGLang's environ.py: SGLANG_INIT_NEW_TOKEN_RATIO, SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR, .._DECAY_STEPS.
NEW_TOKEN_RATIO, LEAST_RATIO, RATIO_STEPS = 0.7, 0.7 * 0.14, 600
CLIPPED_OUTPUT = 4096  # SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION
RETRY_STEPS = 16  # decode steps after which a waiting request is looked at again


@dataclass(frozen=True)
class Scheduler:
    """How an engine forms batches.

    Attributes:
        step_tokens: SGLang's ``--chunked-prefill-size``, vLLM's ``--max-num-batched-tokens``.
        max_running: requests in a replica's batch at most.
        prefix_cache: whether prompt blocks of earlier requests are kept and reused.
        balance: how requests are dealt to replicas.
    """

    kind: Literal["sglang", "vllm"] = "sglang"
    step_tokens: int = 8192
    max_running: int = 2048
    prefix_cache: bool = True
    balance: Literal["round_robin", "least_loaded"] = "round_robin"


DEFAULTS, SGLANG = Settings(), Scheduler()


@dataclass(frozen=True)
class Deployment:
    """Replicas of one model.

    Attributes:
        shift: the step cost in full TP, of one replica.
        base: that of the base configuration; None without Shift Parallelism.
        settings: threshold and mode (``shift`` or ``sp``), as on a server.
        kv_tokens: room in the KV cache of one replica.
    """

    name: str
    shift: StepCost
    kv_tokens: int
    base: StepCost | None = None
    settings: Settings = DEFAULTS
    replicas: int = 1
    scheduler: Scheduler = SGLANG

    @classmethod
    def of(
        cls,
        name: str,
        model: ModelShape,
        profile: Profile,
        layout: Layout,
        usable: float,
        *,
        settings: Settings = DEFAULTS,
        replicas: int = 1,
        scheduler: Scheduler = SGLANG,
        one_copy: bool = False,
    ) -> Deployment:
        """A deployment whose KV cache takes what the weights leave.

        Args:
            layout: of one replica; with SP=1 it is plain TP.
            usable: bytes of a device for weights and KV cache.
            one_copy: the base configuration's weights only: SP without Shift, where an engine can leave TP's out.

        Raises:
            LayoutError: heads that cannot be split so.
            DoesNotFitError: the weights leave no room.
        """
        base_graphs = 512 * layout.sp_size if scheduler.kind == "vllm" else 0  # SGLang's base batches run eagerly
        base = StepCost(model, profile, layout, base_graphs) if layout.sp_size > 1 else None
        shift = StepCost(model, profile, Layout(layout.world_size, 1))
        weights = weights_of(model, layout, one_copy=one_copy)
        room = int((usable - weights) / shift.kv_bytes)
        if room <= 0:
            raise DoesNotFitError(
                f"weights take {weights / 1e9:,.1f} GB a GPU, {usable / 1e9:,.1f} GB are there for weights and KV cache"
            )
        return cls(name, shift, room, base, settings, replicas, scheduler)


class DoesNotFitError(ValueError):
    """Weights that leave no room for a KV cache."""


def weights_of(model: ModelShape, layout: Layout, *, one_copy: bool = False) -> float:
    """Bytes of weights on one GPU, of all configurations that are loaded (docs/weights.md)."""
    checkpoint = model.checkpoint
    if layout.sp_size == 1 or one_copy:
        return checkpoint.total / layout.tp_size
    return checkpoint.together(layout.world_size, layout.tp_size, gpu=True)


class Served(NamedTuple):
    """What became of a request; times in seconds after the start."""

    request: Request
    arrival: float
    first: float  # first token
    finish: float
    cached: int  # prompt tokens that were in the prefix cache

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 for a single token."""
        return (self.finish - self.first) / max(1, self.request.output_tokens - 1)

    @property
    def completion(self) -> float:
        return self.finish - self.arrival


class Stretch(NamedTuple):
    """Steps in a row that are alike."""

    start: float
    seconds: float  # of all of them
    steps: int
    tokens: int  # of all of them
    configuration: Configuration
    kv_used: int  # at the end
    replica: int


@dataclass
class Result:
    served: list[Served] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    preemptions: int = 0
    refused: int = 0  # requests that do not fit into the KV cache at all

    @property
    def seconds(self) -> float:
        """Until the last request was finished."""
        return max((s.finish for s in self.served), default=0.0)

    @property
    def throughput(self) -> float:
        """Prompt and output tokens a second, over the whole run."""
        return sum(s.request.prompt_tokens + s.request.output_tokens for s in self.served) / (self.seconds or 1.0)

    def peak_throughput(self, window: float = 10.0) -> float:
        """The most tokens a second that steps processed in any window of the run."""
        bins: dict[int, float] = {}
        for stretch in self.stretches:  # spread evenly over the bins that it covers
            at, end = stretch.start, stretch.start + stretch.seconds
            while at < end:
                edge = min(end, (math.floor(at / window) + 1) * window)
                edge = edge if edge > at else end
                index = math.floor(at / window)
                bins[index] = bins.get(index, 0.0) + stretch.tokens * (edge - at) / stretch.seconds
                at = edge
        return max(bins.values(), default=0.0) / window

    def quantile(self, of: Callable[[Served], float], q: float = 0.5) -> float:
        values = sorted(of(s) for s in self.served)
        return values[min(len(values) - 1, math.ceil(q * len(values)) - 1)] if q < 1 else values[-1]

    def median(self, of: Callable[[Served], float]) -> float:
        return statistics.median(of(s) for s in self.served)

    def mean(self, of: Callable[[Served], float]) -> float:
        return statistics.fmean(of(s) for s in self.served)

    def steps_in(self, configuration: Configuration) -> int:
        return sum(s.steps for s in self.stretches if s.configuration is configuration)


def simulate(deployment: Deployment, requests: Sequence[Request], *, concurrency: int | None = None) -> Result:
    """Serve ``requests`` to the end.

    Args:
        concurrency: closed loop: so many requests at a time, the next one when one is finished; arrival times are
            then ignored. None: each arrives at its time.
    """
    result = Result()
    replicas = [_Replica(deployment, result, number) for number in range(deployment.replicas)]
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


class _Job:
    """A request on its way through a replica."""

    __slots__ = ("arrival", "begun", "cached", "done", "finish_at", "first", "generated", "goal", "locked", "request")

    def __init__(self, request: Request, arrival: float) -> None:
        self.request, self.arrival = request, arrival
        self.goal = request.prompt_tokens  # tokens to be computed before the next one is generated
        self.done = 0  # of those, computed or found in the prefix cache
        self.generated = 0  # tokens, when it last began to decode
        self.begun = self.finish_at = 0  # decode steps of the replica
        self.first = NEVER
        self.cached = 0
        self.locked = 0  # leading blocks that are in the prefix cache on this request's behalf

    @property
    def left(self) -> int:
        return self.goal - self.done


class _Replica:
    """One engine: a scheduler, a KV budget and a clock."""

    def __init__(self, deployment: Deployment, result: Result, number: int) -> None:
        self.deployment, self.result, self.number = deployment, result, number
        self.scheduler, self.capacity = deployment.scheduler, deployment.kv_tokens
        self.clock = 0.0
        self.coming: deque[tuple[float, _Job]] = deque()  # on their way through tokenizer and HTTP
        self.waiting: deque[_Job] = deque()
        self.running: dict[int, _Job] = {}  # by identity, in order of admission
        self.prefilling: list[_Job] = []
        self.decoding: list[tuple[int, int, _Job]] = []  # heap by the decode step after which a job is finished
        self.decoders: set[int] = set()
        self.steps = 0  # decode steps so far
        self.context = 0  # KV tokens of the requests that decode
        self.owed = 0  # tokens that those still generate, plus steps * len(decoders)
        self.private = 0  # KV tokens outside of the prefix cache
        self.ratio = NEW_TOKEN_RATIO
        self.cache = _PrefixCache()

    @property
    def busy(self) -> bool:
        return bool(self.coming or self.waiting or self.running)

    @property
    def free(self) -> int:
        """KV tokens that can be allocated, by evicting from the prefix cache where necessary."""
        return self.capacity - self.private - self.cache.locked_tokens

    def submit(self, request: Request, ready: float, arrival: float) -> None:
        self.coming.append((ready, _Job(request, arrival)))
        if not self.running and not self.waiting and len(self.coming) == 1:
            self.clock = max(self.clock, ready)

    def step(self, until: float) -> list[Served]:
        """Run one step, or as many alike as end before ``until`` and before anybody joins or leaves."""
        if not self.running and not self.waiting and self.coming[0][0] > self.clock:
            self.clock = self.coming[0][0]
        while self.coming and self.coming[0][0] <= self.clock:
            self.waiting.append(self.coming.popleft()[1])
        chunks = self._admit_sglang() if self.scheduler.kind == "sglang" else self._admit_vllm()
        decodes = 0 if chunks and self.scheduler.kind == "sglang" else len(self.decoders)
        if not chunks and not decodes:
            raise AssertionError("a replica with work has nothing to run")
        if chunks:
            return self._run(chunks, decodes)
        if self.coming:
            until = min(until, self.coming[0][0])
        return self._decode(until)

    # --- admission ---------------------------------------------------------------------------------------------------

    def _admit_sglang(self) -> list[tuple[_Job, int]]:
        room, chunks = self.scheduler.step_tokens, []
        for job in self.prefilling:  # at most one: the prompt that the last step left unfinished
            chunks.append((job, min(job.left, room)))
            room -= chunks[-1][1]
        free = self.free - sum(job.left for job in self.prefilling)
        reserved = self.ratio * (self.owed - self.steps * len(self.decoders))
        reserved += sum(min(j.request.output_tokens, CLIPPED_OUTPUT) for j in self.prefilling)
        while self.waiting and room > 0 and len(self.running) < self.scheduler.max_running:
            job = self.waiting[0]
            found = self._look_up(job)
            answer = min(job.request.output_tokens - job.generated, CLIPPED_OUTPUT)
            # Looking up locks what was evictable, so the free tokens are counted with it taken.
            needed = job.goal - found + answer + self.cache.evictable_of(job.request.blocks, job.locked)
            if needed + reserved > free and (self.running or chunks):
                break
            self.waiting.popleft()
            before = self.free
            self._admit(job, found)
            free -= before - self.free
            chunks.append((job, min(job.left, room)))
            room -= chunks[-1][1]
            free -= job.left
            reserved += answer
        if not chunks and self.decoders:
            while self.free < len(self.decoders):
                self._preempt()
                self.ratio = min(NEW_TOKEN_RATIO, self.ratio + 0.1)
        return chunks

    def _admit_vllm(self) -> list[tuple[_Job, int]]:
        preempted = False
        while self.free < len(self.decoders):
            self._preempt()
            preempted = True
        room = self.scheduler.step_tokens - len(self.decoders)
        free = self.free - len(self.decoders)
        chunks: list[tuple[_Job, int]] = []
        for job in list(self.prefilling):
            new = min(job.left, room)
            while 0 < new > free and id(job) in self.running:  # the newest request makes room
                before = self.free
                newest = self._preempt()
                chunks = [(other, size) for other, size in chunks if other is not newest]
                free += self.free - before
                preempted = True
            if new > 0 and id(job) in self.running:
                chunks.append((job, new))
                room, free = room - new, free - new
        while self.waiting and not preempted and room > 0 and len(self.running) < self.scheduler.max_running:
            job = self.waiting[0]
            found = self._look_up(job)
            new = min(job.goal - found, room)
            if new + self.cache.evictable_of(job.request.blocks, job.locked) > free:
                break
            self.waiting.popleft()
            before = self.free
            self._admit(job, found)
            free -= before - self.free
            chunks.append((job, new))
            room, free = room - new, free - new
        return chunks

    def _look_up(self, job: _Job) -> int:
        """Prompt tokens that are in the prefix cache; at least one token is left to compute."""
        if not self.scheduler.prefix_cache or not job.request.blocks:
            return 0
        request = job.request
        most = (request.prompt_tokens - 1) // request.block
        job.locked = self.cache.match(request.blocks[:most])
        return job.locked * request.block

    def _admit(self, job: _Job, found: int) -> None:
        self.cache.lock(job.request.blocks[: job.locked], job.request.block)
        job.done = found
        job.cached = max(job.cached, found)
        self.running[id(job)] = job
        self.prefilling.append(job)

    def _preempt(self) -> _Job:
        """Drop the newest request's KV cache; it is computed again, what it generated included."""
        job = self.running.popitem()[1]
        if id(job) in self.decoders:
            held = self._held(job)
            job.generated += self.steps - job.begun
            self.decoders.discard(id(job))
            self.decoding = [entry for entry in self.decoding if entry[2] is not job]
            heapq.heapify(self.decoding)
            self.context -= held
            self.owed -= job.finish_at
        else:
            held = job.done
            self.prefilling.remove(job)
        self._release(job, held)
        job.goal = job.request.prompt_tokens + job.generated
        job.done = 0
        self.waiting.appendleft(job)
        self.result.preemptions += 1
        return job

    # --- running -----------------------------------------------------------------------------------------------------

    def _run(self, work: list[tuple[_Job, int]], decodes: int) -> list[Served]:
        """One step with prompt chunks in it."""
        batch = Batch(tuple(Chunk(new, job.done) for job, new in work), decodes, self.context if decodes else 0)
        self._allocate(sum(new for _, new in work) + decodes)
        for job, new in work:
            job.done += new
        self._spend(batch, 1)
        finished = self._advance(1) if decodes else []
        for job, _ in work:
            if not job.left:
                finished += self._begin_decoding(job)
        return finished

    def _decode(self, until: float) -> list[Served]:
        """Decode steps, up to the next one after which the batch changes."""
        count, soonest = len(self.decoders), self.decoding[0][0] - self.steps
        steps = max(1, min(soonest, self.free // count))
        if self.waiting and self.scheduler.kind == "sglang":
            steps = min(steps, RETRY_STEPS)
        batch = Batch((), count, self.context)
        if steps > 1 and until < NEVER:
            steps = max(1, min(steps, math.ceil((until - self.clock) / self._seconds(batch))))
        self._allocate(steps * count)
        # Each step reads one token a request more than the last: the middle one costs what they cost on average.
        self._spend(batch._replace(context=self.context + count * (steps - 1) // 2), steps)
        self.ratio = max(LEAST_RATIO, self.ratio - steps * (NEW_TOKEN_RATIO - LEAST_RATIO) / RATIO_STEPS)
        return self._advance(steps)

    def _allocate(self, tokens: int) -> None:
        self.cache.shrink(self.capacity - self.private - tokens)
        self.private += tokens

    def _cost(self, tokens: int) -> tuple[StepCost, Configuration]:
        base = self.deployment.base
        configuration = choose(self.deployment.settings, tokens, base_can_run=base is not None)
        if configuration is Configuration.BASE and base is not None:
            return base, configuration
        return self.deployment.shift, configuration

    def _seconds(self, batch: Batch) -> float:
        return self._cost(batch.tokens)[0].seconds(batch)

    def _spend(self, batch: Batch, steps: int) -> None:
        cost, configuration = self._cost(batch.tokens)
        seconds = cost.seconds(batch) * steps
        used = self.private + self.cache.tokens
        self.result.stretches.append(
            Stretch(self.clock, seconds, steps, batch.tokens * steps, configuration, used, self.number)
        )
        self.clock += seconds

    def _begin_decoding(self, job: _Job) -> list[Served]:
        self.prefilling.remove(job)
        held = job.done
        if self.scheduler.prefix_cache and job.request.blocks:
            self._keep_prompt(job)
        job.generated += 1  # the step that ends a prompt yields a token
        job.first = min(job.first, self.clock)
        left = job.request.output_tokens - job.generated
        if left <= 0:
            del self.running[id(job)]
            self._release(job, held)
            return [self._served(job)]
        job.begun, job.finish_at = self.steps, self.steps + left
        self.decoders.add(id(job))
        heapq.heappush(self.decoding, (job.finish_at, id(job), job))
        self.context += held
        self.owed += job.finish_at
        return []

    def _advance(self, steps: int) -> list[Served]:
        """All requests that decode get ``steps`` tokens; those that are finished leave."""
        self.steps += steps
        self.context += steps * len(self.decoders)
        finished = []
        while self.decoding and self.decoding[0][0] <= self.steps:
            job = heapq.heappop(self.decoding)[2]
            held = self._held(job)
            self.decoders.discard(id(job))
            self.context -= held
            self.owed -= job.finish_at
            del self.running[id(job)]
            self._release(job, held)
            finished.append(self._served(job))
        return finished

    def _held(self, job: _Job) -> int:
        """KV tokens of a request that decodes, those in the prefix cache included."""
        return job.done + self.steps - job.begun

    def _release(self, job: _Job, held: int) -> None:
        self.private -= held - job.locked * job.request.block
        self.cache.unlock(job.request.blocks[: job.locked])
        job.locked = 0

    def _keep_prompt(self, job: _Job) -> None:
        """Hand the prompt's whole blocks to the prefix cache; copies of what it has by now are freed."""
        whole = job.request.prompt_tokens // job.request.block
        added = job.request.blocks[job.locked : whole]
        self.cache.lock(added, job.request.block)
        self.private -= len(added) * job.request.block
        job.locked = whole

    def _served(self, job: _Job) -> Served:
        served = Served(job.request, job.arrival, job.first, self.clock, job.cached)
        self.result.served.append(served)
        return served


class _PrefixCache:
    """Prompt blocks by id; what no request uses is evicted, the least recently used first."""

    def __init__(self) -> None:
        self.users: dict[int, int] = {}  # blocks in use
        self.unused: OrderedDict[int, None] = OrderedDict()
        self.block = 0

    @property
    def locked_tokens(self) -> int:
        return len(self.users) * self.block

    @property
    def tokens(self) -> int:
        return (len(self.users) + len(self.unused)) * self.block

    def match(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are there."""
        return next((i for i, b in enumerate(blocks) if b not in self.users and b not in self.unused), len(blocks))

    def evictable_of(self, blocks: Sequence[int], matched: int) -> int:
        """Tokens of the leading ``matched`` blocks that nobody uses."""
        return sum(block in self.unused for block in blocks[:matched]) * self.block

    def lock(self, blocks: Iterable[int], size: int) -> None:
        """Take blocks into use, adding those that are missing."""
        self.block = size
        for block in blocks:
            self.unused.pop(block, None)
            self.users[block] = self.users.get(block, 0) + 1

    def unlock(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # the deepest first, so that it is evicted first
            self.users[block] -= 1
            if not self.users[block]:
                del self.users[block]
                self.unused[block] = None

    def shrink(self, tokens: int) -> None:
        """Evict until the cache takes at most so many tokens, as far as blocks are unused."""
        while self.unused and self.tokens > tokens:
            self.unused.popitem(last=False)
