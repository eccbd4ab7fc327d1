"""The comparison's numbers on made-up records, its client on a real server; the whole of it in the long tests."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from dataclasses import asdict

import psutil
import pytest

from benchmarks import compare, floor, network, plots, report
from benchmarks.replay import Client, Phase, Record
from benchmarks.serving import Served, layout
from sgl_shift.cost import Batch, Chunk
from sgl_shift.layout import Layout
from sgl_shift.shape import ModelShape
from sgl_shift.traces import Request, prompt_ids
from tests.checkpoints import DENSE, VOCAB
from tests.servers import PYTHON

MODEL = ModelShape.from_config(compare.MODELS["dense"].config)


def record(index: int, sent: float, ttft: float, tpot: float, tokens: int = 5, prompt: int = 100) -> Record:
    at = [sent + ttft + i * tpot for i in range(tokens)]
    return Record(index, sent, prompt, sent, tokens=list(range(tokens)), at=at)


def run(name: str, turn: int, records: list[Record], one_by_one: bool = True, **part) -> dict:
    phase = {
        "one_by_one": one_by_one,
        "records": [asdict(r) for r in records],
        "samples": [],
        "used": {},
        "sent": [],
        "resent": [],
        "answers": {"compared": len(records), "ties": 0, "different": []},
        **part,
    }
    phases = {"alone": phase, "saturated": {**copy.deepcopy(phase), "one_by_one": False}}
    return {
        "deployment": name,
        "turn": turn,
        "load": 0.5,
        "start_seconds": 60.0,
        "kv_tokens": 1000,
        "phases": phases,
    }


def two_deployments(turns: int = 5) -> list[dict]:
    """Shift has a third of TP's TTFT and 1.02 of its TPOT in each turn; turns differ by far more than that."""
    runs = []
    for turn in range(turns):
        mood = 1 + turn
        runs.append(run("TP", turn, [record(i, 10 * i * mood, 3 * mood, 0.1 * mood) for i in range(3)]))
        runs.append(run("Shift", turn, [record(i, 10 * i * mood, 1 * mood, 0.102 * mood) for i in range(3)]))
    return runs


def test_latencies_and_throughput_of_records():
    runs = [run("TP", 0, [record(0, 1.0, 2.0, 0.5), record(1, 2.0, 4.0, 1.0, tokens=1)])]
    row = report.summary(runs)["saturated"]["TP"]
    assert row["TTFT"].value == 3.0
    assert row["TPOT"].value == pytest.approx(0.5)  # the answer of one token has none
    assert row["completion"].value == pytest.approx((4.0 + 4.0) / 2)
    assert row["throughput"].value == pytest.approx((100 + 5 + 100 + 1) / 6.0)
    assert sum(plots.per_bin(runs[0], "saturated", 0.5)) * 0.5 == pytest.approx(206)


def test_turns_are_compared_with_themselves():
    """What changes from turn to turn for both does not widen the interval of their ratio."""
    ratios = report.against(two_deployments(), "TP")["alone"]["Shift"]
    assert tuple(ratios["TTFT"]) == pytest.approx((3, 3, 3))
    assert tuple(ratios["TPOT"]) == pytest.approx((1.02, 1.02, 1.02))
    wide = report.summary(two_deployments())["alone"]["TP"]["TTFT"]
    assert wide.low < wide.value == 9 < wide.high


def test_the_interval_covers_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(report, "RESAMPLES", 200)
    rng, covered = random.Random(1), 0
    for _ in range(60):
        drawn = [[rng.gauss(10, 1) for _ in range(3)] for _ in range(12)]
        found = report.interval(drawn, statistics.fmean)
        covered += found.low <= 10 <= found.high
    assert covered >= 50


def test_turns_without_their_counterpart_are_left_out():
    runs = two_deployments(3)
    assert report.against(runs[:-1], "TP")["alone"]["Shift"]["TTFT"].value == pytest.approx(3)
    with pytest.raises(ValueError, match="turn"):
        report.ratio([[1.0], [2.0]], [[1.0]])


def test_targets_are_met_by_the_whole_interval_only():
    ratios = {
        "alone": {"Shift": {"TTFT": report.Interval(3, 2.9, 3.1), "TPOT": report.Interval(1.0, 0.9, 1.06)}},
        "saturated": {"Shift": {"throughput": report.Interval(1.7, 1.6, 1.9)}},
    }
    ttft, tpot, throughput = report.verdicts(ratios)
    assert ttft.endswith(" met.")
    assert "not by the whole interval" in tpot
    assert "**not met**" in throughput
    assert "not measured" in report.verdicts({})[0]


def test_failures_and_other_answers_are_named():
    runs = two_deployments(1)
    assert not report.disagreements(runs)
    runs[1]["phases"]["alone"]["answers"]["different"] = [2]
    runs[0]["phases"]["saturated"]["records"][1]["error"] = "gone"
    failed, other = report.disagreements(runs)
    assert failed == "TP, turn 0, saturated: request 1: gone"
    assert other == "Shift, turn 0, alone: request 2 is answered otherwise"


MACHINE = floor.Machine(cores=2, flops=100e9, bandwidth=10e9, link=25e6)


def test_the_floor_of_a_prompt_by_hand():
    """P=4 on two cores: each rank has half a core. TP sends 2 (P-1)/P rows of each all-reduce."""
    served = Served("TP", 4, 32, 1000)
    weights = 8 * (1024 * 64 * 2 * (16 + 8) + 3 * 1024 * 4096)
    flops = (2 * 1024 * weights + 8 * 4 * 1024 * (1024 * 1025 / 2)) / 4  # linear, attention, of a rank
    sent = 2 * 0.75 * 1024 * 1024 * (2 * 8 + 1) * 4
    least = flops / 50e9 + sent / 25e6
    found = floor.Floor(MODEL, served, MACHINE, 2048).prefill(1024)
    assert least <= found <= 1.05 * least  # beyond it only norms and activations, which move bytes of memory
    assert floor.sent_bytes(MODEL, Layout(4, 1), 1024) == pytest.approx(sent)


def test_floors_know_chunks_caches_and_replicas():
    at = {name: floor.Floor(MODEL, Served(name, 4, 32, 1000), MACHINE, 512) for name in ("TP", "DP", "SP", "Shift")}
    two = sum(at["SP"].step(Batch((Chunk(512, past),))) for past in (0, 512))
    assert at["SP"].prefill(1024) == pytest.approx(two)
    assert at["SP"].prefill(1024, cached=512) == pytest.approx(at["SP"].step(Batch((Chunk(512, 512),))))
    assert at["Shift"].prefill(1024) == at["SP"].prefill(1024) < at["TP"].prefill(1024)
    assert at["Shift"].decode(100) == at["TP"].decode(100) < at["SP"].decode(100)
    done = [record(i, 0, 1, 0.1) for i in range(8)]
    # Four replicas with half a core each, against one of them that has a core to itself.
    assert at["DP"].workload(done) < 2 * sum(at["DP"].prefill(100) for _ in done) / 4 * 1.5
    assert floor.expected_bytes(MODEL, at["DP"].served, done, {}) == 0


def test_expected_bytes_are_those_that_were_counted():
    used = floor.used_since(
        {"batches": {"base": 1, "shift": 1}, "tokens": {"base": 10, "shift": 5}, "bytes_sent": {"all_to_all": 7}},
        {"batches": {"base": 2, "shift": 4}, "tokens": {"base": 110, "shift": 9}, "bytes_sent": {"all_to_all": 77}},
    )
    assert used == {
        "batches": {"base": 1, "shift": 3},
        "tokens": {"base": 100, "shift": 4},
        "bytes_sent": {"all_to_all": 70},
    }
    both = floor.sent_bytes(MODEL, Layout(4, 4), 100) + floor.sent_bytes(MODEL, Layout(4, 1), 4)
    assert floor.expected_bytes(MODEL, Served("Shift", 4, 32, 1000), [], used) == both
    assert floor.used_since({}, {}) == {}


def test_each_deployment_is_first_in_some_turn():
    runs = list(compare.schedule(["TP", "DP", "SP", "Shift"], 5))
    assert len(set(runs)) == 20
    assert [runs[4 * turn][1] for turn in range(5)] == ["TP", "DP", "SP", "Shift", "TP"]


def test_the_same_memory_gives_each_deployment_its_kv_tokens():
    given = compare.arguments(["--results", "x", "--ranks", "4"])
    settings = compare.about(given, [], MACHINE, MODEL, compare.phases_of(given))
    for name, plan in settings["deployments"].items():
        kv = 2 * 64 * 8 * 8 * 4 / layout(name, 4).world_size  # K and V, head dim, KV heads, layers, bytes
        assert plan["weights"] + plan["kv_tokens"] * kv == pytest.approx(700e6, rel=1e-4)
    tokens = {name: plan["kv_tokens"] * plan["replicas"] for name, plan in settings["deployments"].items()}
    assert tokens["DP"] < tokens["Shift"] < tokens["TP"]


def test_the_report_has_every_number_and_plot(tmp_path):
    runs = two_deployments()
    given = compare.arguments(
        ["--results", str(tmp_path), "--ranks", "4", "--rate-mbit", "200", "--deployments", "TP", "Shift"]
    )
    settings = compare.about(given, ["--example"], MACHINE, MODEL, compare.phases_of(given))
    compare.path_of(given, 0, "TP").parent.mkdir()
    for each in runs:
        compare.write(compare.path_of(given, each["turn"], each["deployment"]), json.dumps(each))
    assert compare.write_report(given, settings, MODEL) == []
    text = (tmp_path / "report.md").read_text()
    assert "Target TTFT (alone) at least 2.8: 3.00 (3.00 to 3.00), met." in text
    for phase in ("alone", "saturated"):
        for kind in plots.KINDS:
            name = f"{phase}-{kind}.png"
            assert f"({name})" in text
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "compare.json").read_text())
    assert found["answers_agree"] is True
    assert len(found["runs"]) == 10


def test_another_comparison_is_not_continued(tmp_path, capsys):
    small = ["--results", str(tmp_path), "--model", "tiny", "--ranks", "2", "--rank-mb", "4", "--minutes", "-1"]
    assert compare.main(small) == 1  # no time for any run
    assert "no time left" in capsys.readouterr().out
    assert compare.main([*small, "--turns", "9"]) == 1  # more of the same
    capsys.readouterr()
    assert compare.main([*small, "--threshold", "5"]) == 2
    assert "use another --results" in capsys.readouterr().err
    assert compare.main(["--results", str(tmp_path / "b"), "--model", "tiny", "--rank-mb", "0.1"]) == 2
    assert "weights take" in capsys.readouterr().err


def test_a_slow_network_without_root_says_what_works(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(network.NetworkError, match=r"root.*loopback"):
        network.SlowNetwork(2, 200)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(network.NetworkError, match="apt-get install iproute2"):
        network.SlowNetwork(2, 200)


def test_the_client_notes_what_the_server_did(checkpoint, tmp_path):
    from tests.hosting import ForkedServer

    flags = ["--model-path", str(checkpoint(DENSE)), "--tp-size", "2", "--sp-size", "2", "--shift-threshold", "20"]
    flags += [
        "--skip-tokenizer-init",
        "--sleep-on-idle",
        "--incremental-streaming-output",
        "--max-total-tokens",
        "4096",
    ]
    server = ForkedServer(flags, tmp_path / "log")
    phase = Phase("some", (Request(0.0, 40, 6), Request(0.3, 50, 1), Request(0.5, 5, 4)))
    try:
        server.wait()
        records, samples, again, broken = asyncio.run(_play(server.url, phase))
        for request, each in zip(phase.requests, records, strict=True):
            sampling = {"temperature": 0, "max_new_tokens": request.output_tokens, "ignore_eos": True}
            body = {"input_ids": prompt_ids(request, each.index, VOCAB), "sampling_params": sampling}
            assert each.tokens == server.post("/generate", body).json()["output_ids"]
            assert request.arrival <= each.sent < each.at[0] <= each.at[-1]
            assert each.ttft <= each.completion
    finally:
        server.close()
    assert samples[0]["tokens"] == {"base": 0, "shift": 0} or samples[0]["tokens"]["shift"] < 20  # what warmed it up
    used = floor.used_since(samples[0], samples[-1])
    assert used["tokens"]["base"] == 90
    assert used["tokens"]["shift"] >= 5 + 5 + 3
    assert again == {"compared": 3, "ties": 0, "different": []}
    assert broken["different"] == [0]


async def _play(url: str, phase: Phase):
    async with Client([url], VOCAB, poll_seconds=0.2) as client:
        records, samples = await client.play(phase, lambda said: None)
        expected = [r.tokens for r in records]
        again = await client.differences(phase, expected, records)
        wrong = [(t + 1) % VOCAB for t in expected[0]]
        broken = await client.differences(phase, [wrong, *expected[1:]], records)
        await client.flush()
        return records, samples, again, broken


SMALL = ["--model", "tiny", "--ranks", "2", "--rank-mb", "4", "--turns", "1", "--phases", "alone", "saturated"]
SMALL += ["--prompt", "60", "--output", "6", "--alone", "2", "--saturated", "4", "--deployments", "TP", "Shift"]


def ours(folder) -> list[int]:
    """Processes that have the folder in their command line, or were started by one that has."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and any(str(folder) in part for part in process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def command(folder, *more: str) -> list[str]:
    return [PYTHON, "-m", "benchmarks.compare", "--results", str(folder), *SMALL, *more]


@pytest.mark.long
def test_a_small_comparison_resumes_and_leaves_nothing(tmp_path):
    folder = tmp_path / "results"
    first = subprocess.run(command(folder), capture_output=True, text=True, timeout=900, check=False)
    assert first.returncode == 0, first.stdout[-3000:]
    found = json.loads((folder / "compare.json").read_text())
    assert found["answers_agree"] is True
    answers = [[[r["tokens"] for r in phase["records"]] for phase in each["phases"].values()] for each in found["runs"]]
    assert answers[0] == answers[1] or any(p["answers"]["ties"] for p in found["runs"][1]["phases"].values())
    for each in found["runs"]:
        assert each["kv_tokens"] == found["deployments"][each["deployment"]]["kv_tokens"]
    assert all((folder / f"{phase}-{kind}.png").exists() for phase in ("alone", "saturated") for kind in plots.KINDS)
    assert ours(folder) == []
    begun = time.monotonic()
    again = subprocess.run(command(folder), capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0
    assert again.stdout.count("there already") == 2
    assert time.monotonic() - begun < 60
    # Stopped while a server starts: nothing is left, and nothing that was there is lost.
    with (tmp_path / "out").open("w") as out:
        stopped = subprocess.Popen(command(folder, "--turns", "2"), stdout=out)
    while "starting" not in (tmp_path / "out").read_text():
        time.sleep(0.2)
    time.sleep(5)
    assert len(ours(folder)) > 1
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(60) == 128 + signal.SIGTERM
    assert ours(folder) == []
    assert len(list((folder / "runs").iterdir())) == 2


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="network namespaces need root and iproute2",
)


@needs_root
@pytest.mark.long
def test_a_slow_network_is_as_slow_as_asked_and_leaves_nothing():
    listen = (
        "import socket; s = socket.create_server(('0.0.0.0', 5000)); c = s.accept()[0]\nwhile c.recv(1 << 20): pass"
    )
    send = "import socket, sys; s = socket.create_connection((sys.argv[1], 5000)); s.sendall(bytes(5_000_000))"
    with network.SlowNetwork(2, 100) as net:
        receiver = subprocess.Popen(net.command(1, [PYTHON, "-c", listen]))
        time.sleep(1)
        begun = time.monotonic()
        subprocess.run(net.command(0, [PYTHON, "-c", send, net.address(1)]), check=True)
        receiver.wait(30)
        assert 0.35 < time.monotonic() - begun < 3  # 0.4 s at 100 Mbit/s, and Python's start
        assert 5_000_000 < net.sent()[0] < 5_600_000
        assert len(net.retransmitted()) == 2
    for kind in ("netns", "link"):
        shown = subprocess.run(["ip", kind, "show"], capture_output=True, text=True, check=True).stdout
        assert str(os.getpid()) not in shown


@needs_root
@pytest.mark.long
def test_a_small_comparison_on_a_slow_network(tmp_path):
    more = ["--rate-mbit", "200", "--deployments", "TP", "DP", "Shift"]
    done = subprocess.run(command(tmp_path, *more), capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    found = json.loads((tmp_path / "compare.json").read_text())
    assert found["answers_agree"] is True
    for row in found["floors"]:
        if row["deployment"] != "DP":
            assert row["bytes_on_wire"] > row["bytes_expected"] > 0
    assert ours(tmp_path) == []
