"""TP, DP, SP and Shift on the same work, measured: ``python -m benchmarks.compare``.

Each deployment is started, replays the same requests at the same arrival times, and is ended; then the next, and all of
them again for each turn. Stopped at any moment, the same command goes on where it was. ``--rate-mbit 200`` puts each
rank behind a link of that rate (needs root). The results folder has a JSON a run, ``compare.json``, ``report.md`` and
the plots.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib import metadata, util
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import floor, report, workloads
from benchmarks.network import NetworkError, SlowNetwork
from benchmarks.replay import ROUNDED_TIE, TIE, Client, Phase, to_dict
from benchmarks.serving import NAMES, Running, Served, layout, running
from sgl_shift.deployment import DoesNotFitError, weights_of
from sgl_shift.hardware import GPUS, ON_CPU, Profile, cpu
from sgl_shift.plan import usable_bytes
from sgl_shift.shape import ModelShape
from sgl_shift.traces import Request, Scale, TraceError
from tests.checkpoints import DENSE

ROOT = Path(__file__).parent.parent
MODELS = {
    "tiny": replace(DENSE, name="tiny"),
    # That of the first try on a slow interconnect (issue 8).
    "dense": replace(
        DENSE,
        name="dense",
        hidden=1024,
        heads=16,
        kv_heads=8,
        head_dim=64,
        intermediate=4096,
        layers=8,
        extra={"max_position_embeddings": 8192},
    ),
}
PHASES = ("alone", "saturated", "bursty", *workloads.PATTERNS, "rates", "lengths", "trace")


def phases_of(given: argparse.Namespace) -> list[Phase]:
    """The workloads that were asked for.

    Raises:
        TraceError: a trace that cannot be read.
    """
    found: list[Phase] = []
    for name in given.phases:
        if name == "alone":
            requests = [Request(0.0, given.prompt, given.output)] * given.alone
            found.append(Phase(name, tuple(requests), one_by_one=True))
        elif name == "saturated":
            found.append(Phase(name, tuple(workloads.at_once(given.saturated, given.prompt, given.output))))
        elif name == "bursty":
            requests = workloads.bursty(
                seconds=given.seconds,
                rate=given.rate,
                burst_size=given.burst_size,
                burst_every=given.burst_every,
                burst_seconds=given.burst_seconds,
                prompt=given.prompt,
                output=given.output,
                spread=0.2,
            )
            found.append(Phase(name, tuple(requests)))
        elif name in workloads.PATTERNS:
            found.append(Phase(name, tuple(workloads.PATTERNS[name](given.pattern_scale))))
        elif name == "rates":
            sweep = workloads.rate_sweep(given.rates, given.seconds, given.prompt, given.output)
            found += [Phase(f"rate {rate:g}", tuple(requests)) for rate, requests in sweep.items()]
        elif name == "lengths":
            sizes = workloads.input_lengths(given.lengths, given.alone, given.output)
            found += [Phase(f"length {n}", tuple(requests), one_by_one=True) for n, requests in sizes.items()]
        else:
            if given.trace is None:
                raise TraceError("--phases trace needs --trace FILE")
            scale = Scale(
                given.trace_time, given.trace_tokens, seconds=given.trace_seconds, longest=given.trace_longest
            )
            found.append(Phase("trace", tuple(workloads.load(given.trace, scale))))
    return found


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.compare", description=__doc__)
    add = parser.add_argument
    add("--results", type=Path, required=True, help="folder; what is there already is not run again")
    add("--ranks", type=int, default=4, help="P (default 4)")
    add("--rate-mbit", type=float, default=0.0, help="rate of each rank's link; 0, the default: loopback")
    add("--deployments", nargs="+", choices=NAMES, default=list(NAMES))
    add("--turns", type=int, default=5)
    add("--model", default="dense", help=f"{', '.join(MODELS)} (random weights), or a folder (default dense)")
    add("--rank-mb", type=float, help="MB a rank for weights and KV cache (default 700, what SGLang leaves on a GPU)")
    add("--threshold", type=int, default=32, help="--shift-threshold (default 32)")
    add("--chunk", type=int, default=2048, help="--chunked-prefill-size (default 2048)")
    add("--gpu", choices=sorted(GPUS), help="one GPU a rank, with the model's own dtype; default: this CPU, float32")
    add("--server-args", default="", help="more arguments for every server, as one string")
    add("--minutes", type=float, default=240.0, help="begin no run after that (default 240)")
    add("--run-minutes", type=float, default=20.0, help="give a run up after that (default 20)")
    add("--start-seconds", type=float, default=600.0, help="give a start up after that (default 600)")
    work = parser.add_argument_group("work")
    add = work.add_argument
    add("--phases", nargs="+", choices=PHASES, default=["alone", "saturated", "bursty"])
    add("--prompt", type=int, default=1024)
    add("--output", type=int, default=32)
    add("--alone", type=int, default=3, help="requests one after the other, also for each of --lengths")
    add("--saturated", type=int, default=12, help="requests at once")
    add("--seconds", type=float, default=60.0, help="of bursty, and of each of --rates")
    add("--rate", type=float, default=0.1, help="steady requests/s of bursty")
    add("--burst-size", type=int, default=6)
    add("--burst-every", type=float, default=60.0)
    add("--burst-seconds", type=float, default=2.0)
    add("--pattern-scale", type=float, default=0.05, help="factor on counts and lengths of the three patterns")
    add("--rates", nargs="+", type=float, default=[0.05, 0.1, 0.2])
    add("--lengths", nargs="+", type=int, default=[128, 512, 1024, 2048, 4096])
    add("--trace", type=Path, help="Azure .csv or Mooncake .jsonl")
    add("--trace-time", type=float, default=1.0, help="factor on arrival times")
    add("--trace-tokens", type=float, default=1.0, help="factor on lengths")
    add("--trace-seconds", type=float, default=900.0, help="of recorded time")
    add("--trace-longest", type=int, default=4096, help="tokens of a request at most, after scaling")
    given = parser.parse_args(argv)
    if given.rank_mb is None:
        given.rank_mb = usable_bytes(GPUS[given.gpu].memory, given.ranks, given.chunk) / 1e6 if given.gpu else 700.0
    if given.gpu and given.rate_mbit:
        parser.error("--rate-mbit is for ranks on a CPU: GPUs of one machine do not talk over its network")
    return given


def schedule(names: list[str], turns: int) -> Iterator[tuple[int, str]]:
    """Each deployment once a turn, each turn begun with the next: none is always the first."""
    for turn in range(turns):
        first = turn % len(names)
        yield from ((turn, name) for name in names[first:] + names[:first])


def about(
    given: argparse.Namespace, argv: list[str], machine: floor.Machine, model: ModelShape, phases: list[Phase]
) -> Any:
    profile = Profile(GPUS[given.gpu]) if given.gpu else Profile(cpu(given.ranks, 1.0), ON_CPU)
    deployments = {}
    for name in given.deployments:
        served = Served.within(name, model, profile, given.ranks, given.threshold, given.rank_mb * 1e6)
        weights = weights_of(model, layout(name, given.ranks), profile.hardware)
        deployments[name] = {"kv_tokens": served.kv_tokens, "replicas": served.replicas, "weights": weights}
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "command": shlex.join(["python", "-m", "benchmarks.compare", *argv]),
        "commit": git.stdout.strip(),
        "sglang": metadata.version("sglang"),
        "torch": metadata.version("torch"),
        "machine": f"{given.ranks} x {given.gpu}" if given.gpu else f"{platform.machine()}, {machine.cores} cores",
        "model": f"Model {given.model}: {model.layers} layers of width {model.hidden}, {model.heads} heads, "
        f"{model.kv_heads} KV heads, {model.itemsize} bytes a value",
        "ranks": given.ranks,
        "rate_mbit": given.rate_mbit,
        "rank_mb": given.rank_mb,
        "threshold": given.threshold,
        "chunk": given.chunk,
        "calibration": asdict(machine),
        "deployments": deployments,
        "phases": {p.name: describe(p) for p in phases},
        "work": _work(given, phases),
    }


def _work(given: argparse.Namespace, phases: list[Phase]) -> dict[str, Any]:
    """What two calls must have in common to be one comparison."""
    names = ("ranks", "gpu", "rate_mbit", "model", "rank_mb", "threshold", "chunk", "server_args")
    return {name: getattr(given, name) for name in names} | {
        "phases": [[p.name, p.one_by_one, hash_of(p)] for p in phases]
    }


def describe(phase: Phase) -> str:
    """In one line."""
    first = phase.requests[0]
    if all(request == first for request in phase.requests):
        when = "one after the other" if phase.one_by_one else "at once"
        return f"{len(phase.requests)} requests {when}, {first.prompt_tokens:,} tokens in, {first.output_tokens:,} out."
    return workloads.describe(phase.requests).replace("\n", "; ") + "."


def hash_of(phase: Phase) -> str:
    from hashlib import sha256

    return sha256(repr(phase.requests).encode()).hexdigest()[:16]


async def measure(
    served: Served,
    deployment: Running,
    phases: list[Phase],
    vocabulary: int,
    reference: Any,
    progress: Any,
    tie: float = TIE,
) -> dict[str, Any]:
    """All phases of one run; see ``benchmarks.report`` for what is made of it."""
    found: dict[str, Any] = {}
    async with Client(deployment.urls, vocabulary, tie=tie) as client:
        capacity = (await client.state())["memory_usage"]["token_capacity"]
        # Buffers, threads and connections that the first requests would wait for: each server, a long and a short one.
        warm = [phase.requests[0]._replace(arrival=0.0, output_tokens=2) for phase in phases[:1]] * len(deployment.urls)
        warm += [Request(0.0, 4, 4)] * len(deployment.urls)
        await client.play(Phase("warm-up", tuple(warm)), progress)
        for phase in phases:
            await client.flush()
            before, sent, resent = await client.counters(), _sent(deployment), _resent(deployment)
            records, samples = await client.play(phase, progress)
            used = floor.used_since(before, await client.counters())
            sent = [b - a for a, b in zip(sent, _sent(deployment), strict=True)]
            resent = [b - a for a, b in zip(resent, _resent(deployment), strict=True)]
            expected = [r["tokens"] for r in reference["phases"][phase.name]["records"]] if reference else None
            found[phase.name] = {
                "one_by_one": phase.one_by_one,
                "records": [to_dict(record) for record in records],
                "samples": samples,
                "used": used,
                "sent": sent,
                "resent": resent,
                "answers": await client.differences(phase, expected or [r.tokens for r in records], records),
            }
    return {"kv_tokens": capacity, "phases": found}


def _sent(deployment: Running) -> list[int]:
    return deployment.network.sent() if deployment.network else []


def _resent(deployment: Running) -> list[int]:
    return deployment.network.retransmitted() if deployment.network else []


def one_run(
    given: argparse.Namespace, served: Served, turn: int, model: tuple[Path, int], phases: list[Phase], progress: Any
) -> dict[str, Any]:
    """Start, replay, end.

    Raises:
        ServerError, NetworkError, TimeoutError, aiohttp.ClientError: it did not come to an end.
    """
    folder, vocabulary = model
    logs = given.results / "logs" / f"{turn}-{served.name}"
    logs.parent.mkdir(exist_ok=True)
    flags = ["--skip-tokenizer-init", "--sleep-on-idle", "--incremental-streaming-output"]
    flags += ["--chunked-prefill-size", str(given.chunk), "--random-seed", "1"]
    flags += [] if given.gpu else ["--dtype", "float32"]
    flags += shlex.split(given.server_args)
    done = [path for t, n in schedule(given.deployments, given.turns) if (path := path_of(given, t, n)).exists()]
    reference = json.loads(done[0].read_text()) if done else None
    load, started = os.getloadavg()[0], time.monotonic()
    with SlowNetwork(given.ranks, given.rate_mbit) if given.rate_mbit else contextlib.nullcontext() as network:
        progress("starting")
        with running(served, folder, flags, network, logs, given.start_seconds) as deployment:
            ready = time.monotonic() - started
            tie = ROUNDED_TIE if given.gpu else TIE
            measuring = measure(served, deployment, phases, vocabulary, reference, progress, tie)
            found = asyncio.run(asyncio.wait_for(measuring, given.run_minutes * 60))
    return {"deployment": served.name, "turn": turn, "load": load, "start_seconds": ready, **found}


def path_of(given: argparse.Namespace, turn: int, name: str) -> Path:
    return given.results / "runs" / f"{turn}-{name}.json"


def write(path: Path, text: str) -> None:
    """All or nothing: a file that is there is complete."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


def write_report(given: argparse.Namespace, settings: dict[str, Any], model: ModelShape) -> list[str]:
    """From the runs that there are; returns what is wrong with them."""
    from benchmarks import plots

    paths = [path_of(given, turn, name) for turn, name in schedule(given.deployments, given.turns)]
    runs = [json.loads(path.read_text()) for path in paths if path.exists()]
    if not runs:
        return ["no run has come to its end"]
    machine = floor.Machine(**settings["calibration"])
    served = {
        name: Served(name, given.ranks, given.threshold, plan["kv_tokens"])
        for name, plan in settings["deployments"].items()
    }
    rows = report.floors(runs, model, machine, served, given.chunk)
    drawn = plots.draw(runs, given.results)
    everything = {
        **settings,
        "answers_agree": not report.disagreements(runs),
        "summary": report.summary(runs),
        "against": {other: report.against(runs, other) for other in ("TP", "DP")},
        "floors": rows,
        "runs": runs,
    }
    write(given.results / "compare.json", json.dumps(everything) + "\n")
    write(given.results / "report.md", report.markdown(settings, runs, rows, drawn))
    return report.disagreements(runs)


def complain(message: str) -> int:
    print(f"benchmarks.compare: {message}", file=sys.stderr)
    return 2


def _stop(number: int, _frame: Any) -> NoReturn:
    raise SystemExit(128 + number)  # not the default, which would leave servers and namespaces behind


def main(argv: list[str]) -> int:
    given = arguments(argv)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGHUP, _stop)
    if util.find_spec("matplotlib") is None:
        return complain("the plots need matplotlib: pip install 'sgl-shift[bench]'")
    (given.results / "runs").mkdir(parents=True, exist_ok=True)
    folder = Path(given.model)
    if given.model in MODELS:
        folder = given.results / "model"
        if not (folder / "model.safetensors").exists():
            MODELS[given.model].write(folder)
    try:
        if given.rate_mbit:
            SlowNetwork(given.ranks, given.rate_mbit)
        phases, model = phases_of(given), ModelShape.from_path(folder)
        known = given.results / "settings.json"
        settings = json.loads(known.read_text()) if known.exists() else None
        if settings is None:
            link = given.rate_mbit * 1e6 / 8 or None
            machine = floor.Machine.of_gpus(GPUS[given.gpu], given.ranks) if given.gpu else floor.calibrate(link=link)
            settings = about(given, argv, machine, model, phases)
            write(known, json.dumps(settings, indent=1) + "\n")
        elif settings["work"] != json.loads(json.dumps(_work(given, phases))):
            return complain(f"{given.results} has another comparison ({settings['command']}); use another --results")
        plans = settings["deployments"]
        if missing := [name for name in given.deployments if name not in plans]:
            return complain(f"{given.results} was begun without {', '.join(missing)}; use another --results")
    except (NetworkError, TraceError, DoesNotFitError, OSError, ValueError) as error:
        return complain(str(error))
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    begun, failed = time.monotonic(), []
    runs = list(schedule(given.deployments, given.turns))
    for number, (turn, name) in enumerate(runs, 1):
        path = path_of(given, turn, name)
        minutes = (time.monotonic() - begun) / 60
        if path.exists():
            print(f"[{number}/{len(runs)}] {name}, turn {turn}: there already", flush=True)
            continue
        if minutes > given.minutes:
            failed.append(f"{name}, turn {turn}: no time left; the same command goes on from here")
            continue

        def progress(said: str, at: str = f"[{number}/{len(runs)}] {name}, turn {turn}") -> None:
            print(f"{at}, {(time.monotonic() - begun) / 60:.1f} min: {said}", flush=True)

        served = Served(name, given.ranks, given.threshold, plans[name]["kv_tokens"])
        try:
            run = one_run(given, served, turn, (folder, vocabulary), phases, progress)
        except Exception as error:  # whatever it is, the other runs are worth having
            failed.append(f"{name}, turn {turn}: {error!r}"[:4000])
            progress(f"FAILED: {error}")
            continue
        write(path, json.dumps(run) + "\n")
        progress("done")
    wrong = write_report(given, settings, model) + failed
    print(*wrong, f"{given.results / 'report.md'}", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
