"""Long random traffic on stock SGLang and on Shift Parallelism side by side: answers equal, nothing grows.

    python -m benchmarks.soak --minutes 30 --seed 1

Each round plays one random script on both engines: prompts of one token to hundreds, shared prefixes, requests that
join late, aborts, JSON schemas and regular expressions, logprobs of the prompt, of the output, or none. On ours the
threshold and the mode are set at random while it runs. Greedy answers are compared as in the test suite
(``tests/parity.py``): equal tokens but for ties, logprobs within its tolerance. Meanwhile memory, threads, file
descriptors, shared memory and processes of both are sampled. Exit status 1 on a difference, a hang, or growth.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from tests import parity
from tests.checkpoints import DENSE, VOCAB
from tests.footprint import footprint, shared_files, wait_until_gone
from tests.hosting import Host
from tests.traffic import Arrival, play, play_in_loop

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# What may be more in the last quarter than in the first, after the warm-up: for memory a share of it (allocators and
# Python's caches settle slowly), for what is counted a number (executors start their few threads one by one).
MEMORY_GROWTH = 0.03
COUNT_GROWTH = {"processes": 0, "threads": 4, "descriptors": 4, "shared_bytes": 0, "shared_files": 0}
WARM_UP = 0.1  # of the samples, not judged

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "bc", "def"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
CONSTRAINTS: list[dict[str, str]] = [
    {"json_schema": json.dumps(SCHEMA)},
    {"regex": "[0-9]{3}-[a-z]{2,9}"},
    {"ebnf": 'root ::= ("yes" | "no") "!"*'},
]


def write_tokenizer(folder: Path) -> None:
    """One token a byte, then names without meaning up to the checkpoint's vocabulary; structured output needs one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {f"<{index}>": index for index in range(len(vocabulary), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"<{VOCAB - 1}>").save_pretrained(folder)


def random_script(rng: random.Random, prefixes: list[list[int]]) -> list[Arrival]:
    script = []
    for index in range(rng.randint(1, 12)):
        length = rng.choice([rng.randint(1, 8), rng.randint(1, 80), rng.randint(1, 600)])
        shared = rng.randint(0, min(length, 500)) if rng.random() < 0.6 else 0
        prompt = rng.choice(prefixes)[:shared] + [rng.randrange(1, VOCAB) for _ in range(length - shared)]
        new_tokens = rng.randint(1, 24)
        constrained = rng.random() < 0.2
        script.append(
            Arrival(
                prompt,
                new_tokens,
                after=rng.randint(0, index),
                abort_at=rng.randint(1, new_tokens) if new_tokens > 4 and rng.random() < 0.15 else None,
                logprob_start_len=rng.choice([0, -1, -1, None, length // 2]),
                sampling=rng.choice(CONSTRAINTS) if constrained else {"ignore_eos": True},
            )
        )
    return script


def play_while_changing(engine: Any, script: list[Arrival], seed: int) -> tuple[list[dict[str, Any]], int]:
    """Run in the host of ours: the answers, and how often threshold and mode were set meanwhile."""
    return engine.loop.run_until_complete(_play_while_changing(engine, script, random.Random(seed)))


async def _play_while_changing(engine: Any, script: list[Arrival], rng: random.Random) -> Any:
    from sglang.srt.managers.io_struct import SetInternalStateReq

    from sgl_shift_patches import control

    playing = asyncio.ensure_future(play_in_loop(engine, script))
    changes = 0
    while not playing.done():
        threshold = rng.choice([rng.randint(1, 8), rng.randint(1, 40), rng.randint(1, 600)])
        mode = rng.choice(["shift"] * 8 + ["sp", "tp"])
        wanted = control.encode({control.THRESHOLD: threshold, control.MODE: mode})
        accepted = await engine.tokenizer_manager.set_internal_state(SetInternalStateReq(server_args=wanted))
        assert all(accepted), wanted
        changes += 1
        await asyncio.sleep(rng.uniform(0, 0.1))
    return await playing, changes


def compare(arrival: Arrival, theirs: dict[str, Any], mine: dict[str, Any]) -> tuple[float, bool]:
    """The largest difference of a logprob, and whether the answers part at a tie.

    Raises:
        AssertionError: they differ.
    """
    if arrival.logprob_start_len is None:  # ours was not asked for logprobs, stock was, to know its ties
        mine = {**mine, "logprobs": theirs["logprobs"], "prompt_logprobs": theirs["prompt_logprobs"]}
    common = min(len(theirs["tokens"]), len(mine["tokens"]))
    pairs = zip(theirs["tokens"], mine["tokens"], theirs["margins"], strict=False)
    tie = next((at for at, (a, b, gap) in enumerate(pairs) if a != b and gap < parity.TOLERANCE), None)
    if tie is not None:
        common = tie
    if tie is not None or arrival.abort_at is not None:  # an abort may come a token sooner or later
        theirs, mine = parity.cut(theirs, common), parity.cut(mine, common)
    if arrival.logprob_start_len is None:
        mine = {**mine, "logprobs": theirs["logprobs"]}
    return parity.assert_equal([theirs], [mine]), tie is not None


def flush(engine: Any) -> bool:
    """Only an idle engine flushes: a request that was lost would show."""
    return bool(engine.flush_cache().success)


def sample(host: Host, started: float) -> dict[str, Any]:
    """Of a host whose engine is between two scripts."""
    now = footprint(host.session)
    return {
        "at": round(time.monotonic() - started),
        **asdict(now),
        "processes": now.processes,
        "rss_sum": now.rss_bytes,
    }


def quarters(samples: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """First and last quarter of the samples after the warm-up, by what was sampled."""
    judged = samples[int(len(samples) * WARM_UP) :]
    size = max(1, len(judged) // 4)
    names = ["rss_sum", *(f"rss {name}" for name in judged[0]["rss"]), *COUNT_GROWTH]

    def mean(part: list[dict[str, Any]], name: str) -> float:
        return fmean(s["rss"].get(name[4:], 0) if name.startswith("rss ") else s[name] for s in part)

    return {name: (mean(judged[:size], name), mean(judged[-size:], name)) for name in names}


def growth(first_and_last: dict[str, tuple[float, float]]) -> list[str]:
    """What grew beyond its margin."""
    return [
        f"{name}: {first:.0f} -> {last:.0f}"
        for name, (first, last) in first_and_last.items()
        if last > first + (first * MEMORY_GROWTH if name.startswith("rss") else COUNT_GROWTH[name])
    ]


def soak(minutes: float, seed: int, every: float, folder: Path) -> dict[str, Any]:
    rng = random.Random(seed)
    model = folder / DENSE.name
    DENSE.write(model)
    write_tokenizer(model)
    prefixes = [[rng.randrange(1, VOCAB) for _ in range(500)] for _ in range(5)]
    common = {"sleep_on_idle": True, "chunked_prefill_size": 256, "skip_tokenizer_init": False}
    count: Counter[str] = Counter()
    failures: list[str] = []
    worst = 0.0
    samples: dict[str, list[dict[str, Any]]] = {"stock": [], "ours": []}
    with (
        ThreadPoolExecutor(2) as both,
        Host(model, 2, plugin=False, log=folder / "stock.log", **common) as stock,
        Host(model, 2, sp_size=2, log=folder / "ours.log", **common) as ours,
    ):
        hosts = {"stock": stock, "ours": ours}
        started = time.monotonic()
        info = ours.info()
        while (now := time.monotonic() - started) < minutes * 60 and not failures:
            if now >= len(samples["ours"]) * every:
                for name, host in hosts.items():
                    samples[name].append(sample(host, started))
                print(f"{now:5.0f} s: {dict(count)}, {info['switches']} switches, worst {worst:.1e}", flush=True)
            script = random_script(rng, prefixes)
            try:
                # Stock always gives logprobs: they tell where its two best are as good as equal.
                asked = [replace(a, logprob_start_len=-1) if a.logprob_start_len is None else a for a in script]
                theirs = both.submit(stock.call, play, asked)
                mine, changes = both.submit(ours.call, play_while_changing, script, rng.randrange(1 << 30)).result()
                for arrival, a, b in zip(script, theirs.result(), mine, strict=True):
                    difference, tie = compare(arrival, a, b)
                    worst = max(worst, difference)
                    count["ties"] += tie
                    count["aborted"] += arrival.abort_at is not None
                    count["constrained"] += "ignore_eos" not in arrival.sampling
                    count["input_tokens"] += len(arrival.prompt)
                    count["output_tokens"] += len(b["tokens"])
                    count["cached_tokens"] += b["cached"]
                    count["without_logprobs"] += arrival.logprob_start_len is None
                count["rounds"] += 1
                count["requests"] += len(script)
                count["settings"] += changes
                if rng.random() < 0.1:
                    assert stock.call(flush), "stock is not idle"
                    assert ours.call(flush), "ours is not idle"
                    count["flushes"] += 1
                info = ours.info()
            except Exception as error:  # also TimeoutError: a hang
                failures.append(f"round {count['rounds']}: {error!r}\n{traceback.format_exc()[-2000:]}")
                failures += [f"{name}: {host.tail(20)}" for name, host in hosts.items()]
        for name, host in hosts.items():
            samples[name].append(sample(host, started))
        seconds = time.monotonic() - started
        shared = {name: shared_files(host.session) for name, host in hosts.items()}
    left = {name: wait_until_gone(host.session, 10) for name, host in hosts.items()}
    shared_left = {name: sorted(str(file) for file in files if file.exists()) for name, files in shared.items()}
    compared = {name: quarters(part) for name, part in samples.items()}
    grown = growth(compared["ours"])
    if left["ours"]:
        failures.append(f"processes that outlive the engine: {left['ours']}")
    if len(shared_left["ours"]) > len(shared_left["stock"]):
        failures.append(f"shared memory that outlives the engine: {shared_left['ours']}")
    return {
        "passed": not failures and not grown,
        "failures": failures,
        "grown": grown,
        "minutes": round(seconds / 60, 1),
        "seed": seed,
        "counts": dict(count),
        "shift_parallel": info,
        "worst_logprob_difference": worst,
        "tolerance": parity.TOLERANCE,
        "left_behind": {"processes": left, "shared_memory": shared_left},
        "quarters": compared,
        "samples": samples,
    }


def about() -> dict[str, Any]:
    from importlib import metadata

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git.stdout.strip(),
        "sglang": metadata.version("sglang"),
        "torch": metadata.version("torch"),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, no GPU",
        "model": f"{DENSE.architecture} with random weights, byte tokenizer; --tp-size 2 --sp-size 2",
    }


def markdown(result: dict[str, Any]) -> str:
    count, shift = result["counts"], result["shift_parallel"]
    lines = [
        f"# Soak of {result['minutes']:.0f} minutes: {'passed' if result['passed'] else 'FAILED'}",
        "",
        f"`python -m benchmarks.soak`, seed {result['seed']}, {result['date']}, commit {result['commit']}. "
        f"SGLang {result['sglang']}, {result['machine']}; {result['model']}.",
        "",
        f"* {count['requests']:,} requests in {count['rounds']:,} rounds, each answered by stock SGLang too: "
        f"{count['input_tokens']:,} tokens in ({count['cached_tokens']:,} from the prefix cache), "
        f"{count['output_tokens']:,} out; {count['aborted']:,} aborted, {count['constrained']:,} with structured "
        f"output, {count['without_logprobs']:,} without logprobs.",
        f"* {shift['batches']['base']:,} batches in base, {shift['batches']['shift']:,} in shift, "
        f"**{shift['switches']:,} switches** between consecutive batches; threshold and mode set "
        f"{count['settings']:,} times while requests ran.",
        f"* Largest difference of a logprob {result['worst_logprob_difference']:.1e} (allowed: {result['tolerance']}); "
        f"{count['ties']} answers part at a tie.",
        f"* Left behind after the end: {len(result['left_behind']['processes']['ours'])} processes, "
        f"{len(result['left_behind']['shared_memory']['ours'])} files of shared memory (stock: "
        f"{len(result['left_behind']['processes']['stock'])}, {len(result['left_behind']['shared_memory']['stock'])}).",
        "",
        f"First and last quarter of {len(result['samples']['ours'])} samples, the first {WARM_UP:.0%} left out. "
        f"Allowed for ours: memory +{MEMORY_GROWTH:.0%}, threads +{COUNT_GROWTH['threads']}, "
        f"descriptors +{COUNT_GROWTH['descriptors']}, nothing of the rest. `main` is the process of the Engine.",
        "",
        "| | ours, first | ours, last | stock, first | stock, last |",
        "|---|---|---|---|---|",
    ]
    for name, ours in result["quarters"]["ours"].items():
        stock = result["quarters"]["stock"].get(name, ("", ""))
        cells = [_show(name, value) for value in (*ours, *stock)]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    if result["grown"] or result["failures"]:
        lines += ["", *(f"* grown: {item}" for item in result["grown"])]
        lines += [f"```\n{item}\n```" for item in result["failures"]]
    return "\n".join(lines) + "\n"


def _show(name: str, value: Any) -> str:
    if value == "":
        return ""
    if name.startswith("rss") or name == "shared_bytes":
        return f"{value / 1e6:,.1f} MB"
    return f"{value:.1f}".removesuffix(".0")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample-seconds", type=float, default=30)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of soak-<date>.json and .md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {**about(), **soak(args.minutes, args.seed, args.sample_seconds, Path(folder))}
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"soak-{result['date'][:10]}"
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
