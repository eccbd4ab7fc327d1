"""One replica of a simulated deployment: a scheduler, a KV budget with a prefix cache, and a clock.

The two schedulers are described in :mod:`sgl_shift.simulate`.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from sgl_shift.cost import Batch, Chunk, StepCost
from sgl_shift.deployment import Deployment
from sgl_shift.policy import Configuration, choose
from sgl_shift.served import Result, Served, Stretch
from sgl_shift.traces import Request

NEVER = float("inf")
# SGLang's environ.py: SGLANG_INIT_NEW_TOKEN_RATIO, SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR, .._DECAY_STEPS.
NEW_TOKEN_RATIO, LEAST_RATIO, RATIO_STEPS = 0.7, 0.7 * 0.14, 600
CLIPPED_OUTPUT = 4096  # SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION
RETRY_STEPS = 16  # decode steps after which a waiting request is looked at again


class Job:
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


class Replica:
    """One engine: a scheduler, a KV budget and a clock."""

    def __init__(self, deployment: Deployment, result: Result, number: int) -> None:
        self.deployment, self.result, self.number = deployment, result, number
        self.scheduler, self.capacity = deployment.scheduler, deployment.kv_tokens
        self.clock = 0.0
        self.coming: deque[tuple[float, Job]] = deque()  # on their way through tokenizer and HTTP
        self.waiting: deque[Job] = deque()
        self.running: dict[int, Job] = {}  # by identity, in order of admission
        self.prefilling: list[Job] = []
        self.decoding: list[tuple[int, int, Job]] = []  # heap by the decode step after which a job is finished
        self.decoders: set[int] = set()
        self.steps = 0  # decode steps so far
        self.context = 0  # KV tokens of the requests that decode
        self.owed = 0  # tokens that those still generate, plus steps * len(decoders)
        self.private = 0  # KV tokens outside of the prefix cache
        self.ratio = NEW_TOKEN_RATIO
        self.cache = PrefixCache()

    @property
    def busy(self) -> bool:
        return bool(self.coming or self.waiting or self.running)

    @property
    def free(self) -> int:
        """KV tokens that can be allocated, by evicting from the prefix cache where necessary."""
        return self.capacity - self.private - self.cache.locked_tokens

    def submit(self, request: Request, ready: float, arrival: float) -> None:
        self.coming.append((ready, Job(request, arrival)))
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

    def _admit_sglang(self) -> list[tuple[Job, int]]:
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

    def _admit_vllm(self) -> list[tuple[Job, int]]:
        preempted = False
        while self.free < len(self.decoders):
            self._preempt()
            preempted = True
        room = self.scheduler.step_tokens - len(self.decoders)
        free = self.free - len(self.decoders)
        chunks: list[tuple[Job, int]] = []
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

    def _look_up(self, job: Job) -> int:
        """Prompt tokens that are in the prefix cache; at least one token is left to compute."""
        if not self.scheduler.prefix_cache or not job.request.blocks:
            return 0
        request = job.request
        most = (request.prompt_tokens - 1) // request.block
        job.locked = self.cache.match(request.blocks[:most])
        return job.locked * request.block

    def _admit(self, job: Job, found: int) -> None:
        self.cache.lock(job.request.blocks[: job.locked], job.request.block)
        job.done = found
        job.cached = max(job.cached, found)
        self.running[id(job)] = job
        self.prefilling.append(job)

    def _preempt(self) -> Job:
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

    def _run(self, work: list[tuple[Job, int]], decodes: int) -> list[Served]:
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

    def _begin_decoding(self, job: Job) -> list[Served]:
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

    def _held(self, job: Job) -> int:
        """KV tokens of a request that decodes, those in the prefix cache included."""
        return job.done + self.steps - job.begun

    def _release(self, job: Job, held: int) -> None:
        self.private -= held - job.locked * job.request.block
        self.cache.unlock(job.request.blocks[: job.locked])
        job.locked = 0

    def _keep_prompt(self, job: Job) -> None:
        """Hand the prompt's whole blocks to the prefix cache; copies of what it has by now are freed."""
        whole = job.request.prompt_tokens // job.request.block
        added = job.request.blocks[job.locked : whole]
        self.cache.lock(added, job.request.block)
        self.private -= len(added) * job.request.block
        job.locked = whole

    def _served(self, job: Job) -> Served:
        served = Served(job.request, job.arrival, job.first, self.clock, job.cached)
        self.result.served.append(served)
        return served


class PrefixCache:
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
