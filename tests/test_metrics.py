"""What a server shows: its Prometheus endpoint, its log lines and its traces, against a workload counted by hand."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import json
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import requests
import torch

from sgl_shift.config import KINDS, Settings, ShiftConfig
from sgl_shift.forward import ShiftParallel
from sgl_shift.layout import Layout
from sgl_shift.policy import Configuration
from tests.checkpoints import FEW_KV_HEADS, VOCAB
from tests.hosting import ForkedServer, import_sglang
from tests.servers import Server, free_port

WORLD, LOG_INTERVAL, THRESHOLD, FLOAT = 2, 4, 8, 4
MODEL = replace(FEW_KV_HEADS, name="qwen3-1kv", kv_heads=1)  # one KV head, which both ranks keep
TP_ARGUMENTS = ["--tp-size", str(WORLD), "--sp-size", str(WORLD), "--shift-threshold", str(THRESHOLD)]


def serve(model, folder, *more: str, **environment: str) -> ForkedServer:
    flags = ["--model-path", str(model), *TP_ARGUMENTS, "--enable-metrics", "--skip-tokenizer-init"]
    flags += ["--context-length", "2048", "--max-total-tokens", "4096", "--max-running-requests", "16"]
    flags += ["--decode-log-interval", str(LOG_INTERVAL), "--skip-server-warmup", "--sleep-on-idle", *more]
    temporary = folder / "tmp"
    temporary.mkdir()
    return ForkedServer(flags, folder / "log", TMPDIR=str(temporary), **environment)


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    # Without the overlap schedule, which runs each request for a step more than it needs, or not, by the time it takes.
    server = serve(checkpoint(MODEL), tmp_path_factory.mktemp("metrics"), "--disable-overlap-schedule")
    try:
        yield server.wait()
    finally:
        server.close()


def ask(server: Server, length: int, new_tokens: int, **more: Any) -> None:
    """A prompt that shares no prefix with another."""
    ask.first = getattr(ask, "first", 0) + 1
    prompt = [ask.first % VOCAB, *(1 + 7 * i % (VOCAB - 1) for i in range(length - 1))]
    sampling = {"temperature": 0, "max_new_tokens": new_tokens}
    server.post("/generate", {"input_ids": prompt, "sampling_params": sampling, **more}).raise_for_status()


def settings(server: Server, **changes: Any) -> None:
    assert server.post("/set_internal_state", {"server_args": changes}).json() == [True]


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


class Samples:
    """``/metrics``, read once. Not with prometheus_client's parser: forked servers would inherit a client that was
    imported before it could know that there are several processes."""

    def __init__(self, server: Server) -> None:
        text = requests.get(server.url + "/metrics", timeout=60).text
        lines = re.findall(r"^([\w:]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
        self.all = [Sample(n, dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(v)) for n, labels, v in lines]

    def named(self, name: str, **labels: str) -> list[Sample]:
        return [s for s in self.all if s.name == name and labels.items() <= s.labels.items()]

    def __call__(self, name: str, **labels: str) -> float:
        (sample,) = self.named(f"sglang:shift_{name}", **labels)
        return sample.value

    def per_configuration(self, name: str) -> tuple[float, float]:
        return self(name, configuration="base"), self(name, configuration="shift")


def test_counters_add_up_against_a_workload_counted_by_hand(server):
    ask(server, 3, 1)  # the last step before was in the shift configuration
    before, start = Samples(server), time.monotonic()
    ask(server, 37, 5)  # base: 37 tokens and one of padding; then four decode steps in shift
    ask(server, 5, 3)  # shift: 5 tokens, then two decode steps
    ask(server, 20, 2, return_logprob=True, logprob_start_len=0)  # base: 20 tokens, all rows gathered; a step in shift
    settings(server, shift_mode="sp")
    ask(server, 3, 2)  # base: 3 tokens and one of padding, then a decode step of one token and one of padding
    settings(server, shift_mode="shift")
    after, wall = Samples(server), time.monotonic() - start

    def grown(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    for name, base, shift in (
        ("batches_total", 4, 4 + 3 + 1),
        ("tokens_total", 37 + 20 + 3 + 1, 4 + 7 + 1),
        ("step_seconds_count", 4, 8),
    ):
        assert (grown(name, configuration="base"), grown(name, configuration="shift")) == (base, shift), name
    assert grown("padding_tokens_total") == 1 + 0 + 1 + 1
    assert grown("switches_total") == 5  # to base, back, to base, back, to base

    # Q, K, V and the output leave a rank for the others: all heads of its rows but its own block (paper, 1.8); each
    # rank is sent the one KV head. Then rows of hidden states: the last one, all of a logprob or a decode batch.
    heads = 2 * MODEL.heads + 2 * max(MODEL.kv_heads, WORLD)
    rows = 19 + 10 + 2 + 1
    exchanged = rows * heads * MODEL.head_dim * FLOAT * MODEL.layers * (WORLD - 1) // WORLD
    assert grown("sent_bytes_total", collective="all_to_all") == exchanged
    assert grown("sent_bytes_total", collective="all_gather") == (1 + 10 + 1 + 1) * MODEL.hidden * FLOAT * (WORLD - 1)

    seconds = [grown("step_seconds_sum", configuration=c) for c in ("base", "shift")]
    assert all(s > 0 for s in seconds)
    assert sum(seconds) < wall
    assert [after("kv_replication"), *(after("threshold", kind=k) for k in KINDS)] == [2, THRESHOLD, THRESHOLD]

    shown = server.info()["shift_parallel"]
    assert shown["batches"] == dict(zip(("base", "shift"), after.per_configuration("batches_total"), strict=True))
    assert shown["tokens"] == dict(zip(("base", "shift"), after.per_configuration("tokens_total"), strict=True))
    assert shown["bytes_sent"] == {c: after("sent_bytes_total", collective=c) for c in ("all_to_all", "all_gather")}
    assert (shown["padding_tokens"], shown["switches"]) == (after("padding_tokens_total"), after("switches_total"))


def test_settings_are_exported_as_soon_as_they_are_in_force(server):
    settings(server, shift_threshold=9, shift_mode="tp")
    changed = Samples(server)
    settings(server, shift_threshold=THRESHOLD, shift_mode="shift")
    back = Samples(server)
    assert (changed("threshold", kind="decode"), changed("mode", mode="tp"), changed("mode", mode="shift")) == (9, 1, 0)
    assert (back("threshold", kind="decode"), back("mode", mode="tp"), back("mode", mode="shift")) == (THRESHOLD, 0, 1)


def test_only_the_ranks_that_sglang_has_report_do_and_under_its_labels(server):
    samples = Samples(server)
    (theirs,) = samples.named("sglang:num_running_reqs")
    assert theirs.labels.keys() == {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}
    ours = [s for s in samples.all if s.name.startswith("sglang:shift_")]
    for sample in ours:
        own = sample.labels.keys() - {"configuration", "collective", "kind", "mode", "le"}
        assert {name: sample.labels[name] for name in own} == theirs.labels, sample


def test_decode_lines_show_the_share_of_steps_since_the_line_before(server):
    def batches() -> list[str]:
        return re.findall(r"(?:Decode|Prefill) batch.*?configuration: (.*), cpu graph", server.text())

    def decode_lines() -> list[int]:
        return [i for i, line in enumerate(batches()) if "steps:" in line]

    wanted = len(decode_lines()) + 4
    for length in (3, 37):
        ask(server, length, 1 + 2 * LOG_INTERVAL)
    deadline = time.monotonic() + 30
    while len(decode_lines()) < wanted:  # a line is printed after the step is answered
        assert time.monotonic() < deadline
        time.sleep(0.05)
    *_, first, _, _, last = decode_lines()
    assert batches()[first + 1 : last + 1] == [
        "shift, steps: base 0% shift 100%",
        "base",  # the second prompt
        f"shift, steps: base {1 / (1 + LOG_INTERVAL):.0%} shift {LOG_INTERVAL / (1 + LOG_INTERVAL):.0%}",
        "shift, steps: base 0% shift 100%",
    ]


def test_profiler_traces_show_the_configuration_inside_each_step(server, tmp_path):
    profile = {"output_dir": str(tmp_path), "activities": ["CPU"]}
    server.post("/start_profile", profile).raise_for_status()
    ask(server, 37, 3)
    server.post("/stop_profile", {}).raise_for_status()
    traces = sorted(tmp_path.rglob("*.trace.json.gz"))
    assert len(traces) == WORLD
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        named = {
            kind: sorted((e for e in events if e.get("name", "").startswith(kind)), key=lambda e: e["ts"])
            for kind in ("step[", "shift_parallel[")
        }
        steps, ours = named["step["], named["shift_parallel["]
        assert [e["name"] for e in ours] == ["shift_parallel[base]", *["shift_parallel[shift]"] * 2]
        assert [e["name"].split()[0] for e in steps] == ["step[EXTEND", "step[DECODE", "step[DECODE"]
        for step, span in zip(steps, ours, strict=True):
            assert step["ts"] <= span["ts"]
            assert span["ts"] + span["dur"] <= step["ts"] + step["dur"]


def queries() -> list[tuple[str, str]]:
    """(panel, expression) of the dashboard, its variables filled in as Grafana does for "All"."""
    dashboard = json.loads((Path(__file__).parent.parent / "docs/grafana/sgl-shift.json").read_text())
    targets = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]
    values = {"$instance": ".*", "$model_name": ".*", "$__rate_interval": "4s"}
    for variable, value in values.items():
        targets = [(title, expression.replace(variable, value)) for title, expression in targets]
    return targets


def test_every_selector_of_the_dashboard_matches_what_a_server_exports(server):
    samples = Samples(server)
    shown = set()
    for title, expression in queries():
        assert "$" not in expression, title
        selectors = re.findall(r"\{(.*?)\}", expression)
        assert len(selectors) == expression.count("shift_") > 0, title
        for selector in selectors:
            equal = dict(re.findall(r'(\w+)="(.*?)"', selector))
            match = dict(re.findall(r'(\w+)=~"(.*?)"', selector))
            del match["instance"]  # Prometheus' own
            name = match.pop("__name__")
            found = [s for s in samples.all if re.fullmatch(name, s.name) and equal.items() <= s.labels.items()]
            assert found, (title, selector)
            assert all(re.fullmatch(match[label], s.labels[label]) for s in found for label in match), (title, selector)
            shown |= {s.name for s in found}
    exported = {s.name for s in samples.all if s.name.startswith("sglang:shift_") and not s.name.endswith("_created")}
    assert shown == exported


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus")
def test_every_query_of_the_dashboard_returns_data_from_prometheus(server, tmp_path):
    port = free_port()
    job = {"job_name": "sglang", "static_configs": [{"targets": [server.url.removeprefix("http://")]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    command = ["prometheus", *options, f"--web.listen-address=127.0.0.1:{port}"]
    with (tmp_path / "log").open("wb") as log:
        prometheus = subprocess.Popen(command, stdout=log, stderr=log)

    def values(expression: str) -> list[float]:
        answer = requests.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": expression}, timeout=10).json()
        return [float(sample["value"][1]) for sample in answer["data"]["result"]]

    try:
        without = queries()
        deadline = time.monotonic() + 60
        while without:
            assert time.monotonic() < deadline, f"no data for {without}\n{(tmp_path / 'log').read_text()}"
            for length in (37, 5):
                ask(server, length, 3)
            with contextlib.suppress(requests.ConnectionError):  # it is starting
                without = [(t, e) for t, e in queries() if not any(math.isfinite(v) for v in values(e))]
    finally:
        prometheus.terminate()
        prometheus.wait(30)


@pytest.mark.long
def test_replicas_and_all_ranks_report_under_labels_of_their_own(checkpoint, tmp_path):
    server = serve(checkpoint(MODEL), tmp_path, "--dp-size", "2", "--enable-metrics-for-all-schedulers")
    try:
        server.wait()
        for _ in range(4):  # round robin, so two for each replica
            ask(server, 37, 1)
        samples = Samples(server)
        prefills = samples.named("sglang:shift_batches_total", configuration="base")
        assert {(s.labels["dp_rank"], s.labels["tp_rank"]): s.value for s in prefills} == {
            (dp, tp): 2 for dp in "01" for tp in "01"
        }
        tokens = samples.named("sglang:shift_tokens_total", configuration="base", tp_rank="0")
        assert [s.value for s in tokens] == [2 * 37, 2 * 37]
    finally:
        server.close()


@pytest.mark.long
def test_request_traces_show_the_configuration_of_each_step(checkpoint, tmp_path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs pip install 'sglang[tracing]'")
    with Collector() as collector:
        trace = ["--enable-trace", "--otlp-traces-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces"]
        server = serve(
            checkpoint(MODEL),
            tmp_path,
            *trace,
            "--disable-overlap-schedule",
            OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf",
        )
        try:
            server.wait()
            ask(server, 37, 3)
            deadline = time.monotonic() + 30
            while len(collector.events) < 3 * WORLD:  # exported every few seconds
                assert time.monotonic() < deadline, collector.events
                time.sleep(0.1)
        finally:
            server.close()
    expected = [("prefill_forward", "base"), *[("decode_loop", "shift")] * 2]
    assert sorted(collector.events) == sorted(expected * WORLD)


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP traces and keeps our events: (name of the span that one is in, configuration)."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", free_port()), Collector.Handler)
        self.events: list[tuple[str, str]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *exc: Any) -> None:
        self.shutdown()
        super().__exit__(*exc)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            spans = [
                span
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans
                for scope in resource.scope_spans
                for span in scope.spans
            ]
            self.server.events += [  # type: ignore[attr-defined]
                (span.name, event.attributes[0].value.string_value)
                for span in spans
                for event in span.events
                if event.name == "shift_parallel"
            ]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Not into the test's output."""


class Event:
    """A device's event, passed when ``now`` is set to a later time."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now + 1.0  # seconds after it was recorded

    def query(self) -> bool:
        return Event.now >= self.at

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1000


def steps_on_a_device(folder: Path) -> list[tuple[float, ...]]:
    """(base steps, base seconds, shift steps, shift seconds) after each of some events, as exported."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    from prometheus_client import CollectorRegistry, multiprocess

    from sgl_shift_patches import metrics

    torch.get_device_module = lambda *_: SimpleNamespace(Event=Event)
    shift = ShiftParallel(ShiftConfig(2, Settings()), Layout(2, 2), 0, None, contextlib.nullcontext)
    labels = {"model_name": "m"}
    collector = SimpleNamespace(labels=labels, _counter_cls=None, _gauge_cls=None, _histogram_cls=None)
    exporter = metrics.Metrics(shift, collector, metrics._timer("cuda"))
    seen = []

    def look() -> None:
        exporter.publish()
        names = [f"sglang:shift_step_seconds_{what}" for what in ("count", "sum")]
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        values = [
            registry.get_sample_value(n, {**labels, "configuration": c}) for c in ("base", "shift") for n in names
        ]
        seen.append(tuple(values))

    def step(configuration: Configuration | None, seconds: float) -> None:
        with exporter.step():
            Event.now += seconds
            if configuration is None:
                raise ArithmeticError
            shift.stats.record(configuration, 5)

    step(Configuration.BASE, 0.25)
    look()  # launched, not done
    step(Configuration.SHIFT, 0.5)
    look()
    Event.now += 1
    look()
    with contextlib.suppress(ArithmeticError):
        step(None, 3.0)
    with exporter.step():  # an idle batch
        Event.now += 4
    Event.now += 1
    look()
    return seen


def test_on_a_device_a_step_is_observed_once_its_events_have_passed(tmp_path):
    import_sglang()
    with multiprocessing.get_context("fork").Pool(1) as fork:  # prometheus_client must not be imported here
        launched, later, done, end = fork.apply(steps_on_a_device, [tmp_path])
    assert launched == later == (0, 0, 0, 0)
    assert done == end == (1, 0.25, 1, 0.5)
