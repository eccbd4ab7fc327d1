"""Shift Parallelism in SGLang's Prometheus endpoint (``--enable-metrics``). ``docs/metrics.md`` lists what is there.

The ranks that report are those that SGLang has report, under the labels that SGLang gives them. prometheus_client
collects the processes of a server through files, so nothing here knows of the other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sgl_shift.config import KINDS, MODES, Settings
from sgl_shift.forward import ShiftParallel
from sgl_shift.policy import Configuration

# Seconds. Decode steps of large models take some 5 to 50 ms, large prefills and steps on a CPU seconds.
BUCKETS = (
    *(0.001, 0.002, 0.003, 0.005, 0.007, 0.01, 0.015, 0.02, 0.03, 0.05, 0.07),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 2, 5, 10),
)


def exporter(shift: ShiftParallel, scheduler: Any) -> Metrics | None:
    """This rank's metrics, None where SGLang reports none (``SchedulerMetricsCollector.init_new``)."""
    context = scheduler.metrics_collector_context
    if not context.current_scheduler_metrics_enabled:
        return None
    return Metrics(shift, context.collector, _timer(scheduler.device))


class Metrics:
    """:class:`sgl_shift.stats.Exporter` to Prometheus."""

    def __init__(self, shift: ShiftParallel, collector: Any, timer: Callable[..., Any]) -> None:
        import prometheus_client  # not before SGLang has set PROMETHEUS_MULTIPROC_DIR

        counter = collector._counter_cls or prometheus_client.Counter
        gauge = collector._gauge_cls or prometheus_client.Gauge
        histogram = collector._histogram_cls or prometheus_client.Histogram
        labels = collector.labels

        def make(kind: Any, name: str, documentation: str, *more: str, **options: Any) -> Callable[..., Any]:
            metric = kind(f"sglang:shift_{name}", documentation, labelnames=[*labels, *more], **options)
            return lambda **values: metric.labels(**labels, **values)

        latest = {"multiprocess_mode": "mostrecent"}
        batches = make(counter, "batches_total", "Batches that ran in a configuration.", "configuration")
        tokens = make(counter, "tokens_total", "Tokens of these batches, without padding.", "configuration")
        sent = make(counter, "sent_bytes_total", "Bytes that this rank sent to its SP group.", "collective")
        padding = make(counter, "padding_tokens_total", "Rows that base batches were padded with, over all ranks.")
        switches = make(counter, "switches_total", "Batches that ran in another configuration than the one before.")
        seconds = make(histogram, "step_seconds", "Time of a forward pass.", "configuration", buckets=BUCKETS)
        threshold = make(
            gauge, "threshold", "Batches with more tokens run in the base configuration.", "kind", **latest
        )
        mode = make(gauge, "mode", "1 for the mode in force.", "mode", **latest)
        kv_replication = make(gauge, "kv_replication", "Ranks that keep a copy of the same KV head.", **latest)

        self._shift = shift
        self._published: Settings | None = None
        stats = shift.stats
        self._counters: list[tuple[Any, Callable[[], int]]] = [
            *((batches(configuration=c), lambda c=c: stats.batches[c]) for c in Configuration),
            *((tokens(configuration=c), lambda c=c: stats.tokens[c]) for c in Configuration),
            *((sent(collective=c), lambda c=c: stats.bytes_sent[c]) for c in stats.bytes_sent),
            (padding(), lambda: stats.padding_tokens),
            (switches(), lambda: stats.switches),
        ]
        self._counted = [0] * len(self._counters)
        self._seconds = {c: seconds(configuration=c) for c in Configuration}
        self._thresholds = {kind: threshold(kind=kind) for kind in KINDS}
        self._modes = {name: mode(mode=name) for name in MODES}
        if shift.heads is not None:
            kv_replication().set(shift.heads.kv_replication)
        self._timer = timer(self._observe)
        self.publish()

    @contextmanager
    def step(self) -> Iterator[None]:
        before = self._shift.stats.total
        about: dict[str, Configuration | None] = {"configuration": None}
        with self._timer.wrap(about):
            yield
            if self._shift.stats.total > before:  # an idle batch is none
                about["configuration"] = self._shift.stats.last

    def publish(self) -> None:
        for index, (child, now) in enumerate(self._counters):
            if more := now() - self._counted[index]:
                child.inc(more)
                self._counted[index] += more
        if self._published is not (settings := self._shift.settings):
            for kind in KINDS:
                self._thresholds[kind].set(settings.limit(kind))
            for name, child in self._modes.items():
                child.set(name == settings.mode)
            self._published = settings
        self._timer._report()

    def _observe(self, t: float, configuration: Configuration | None) -> None:
        if configuration is not None:
            self._seconds[configuration].observe(t)


def _timer(device: str) -> Callable[..., Any]:
    """What times a step. On an accelerator, forward returns before the device is done: SGLang's timer records an event
    on either side, and reads them once they have passed. It never waits."""
    from sglang.srt.utils.device_timer import DeviceTimer

    return WallTimer if device == "cpu" else DeviceTimer


class WallTimer:
    """As much of SGLang's ``DeviceTimer`` as is used here, where forward returns when it is done."""

    def __init__(self, reporter: Callable[..., None]) -> None:
        self._reporter = reporter

    @contextmanager
    def wrap(self, metadata: dict[str, Any]) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._reporter(t=time.perf_counter() - start, **metadata)

    def _report(self) -> None:
        """Nothing is outstanding."""
