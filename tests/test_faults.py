"""What goes wrong, done alike to stock SGLang and to Shift Parallelism: the same outcome, and nothing left behind.

``docs/faults.md`` is the table of what is done here.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests import parity
from tests.checkpoints import DENSE, VOCAB
from tests.footprint import alive, shared_files, wait_until_gone
from tests.hosting import ForkedServer, Host, HostDied
from tests.servers import Server

THRESHOLD, CONTEXT, POOL = 16, 2048, 1024  # tokens; a prompt that the context takes need not fit the pool

NO_STACKS = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}  # taking the stacks takes longer than all the rest of a crash


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def serve(model: Path, folder: Path) -> tuple[Server, Server]:
    """Stock and ours, started alike; each with its temporary files in a folder of its own."""
    common = {
        "model-path": model,
        "tp-size": 2,
        "context-length": CONTEXT,
        "max-total-tokens": POOL,
        "max-running-requests": 64,
        "chunked-prefill-size": 128,
        "random-seed": 1,
    }
    flags = [str(part) for name, value in common.items() for part in (f"--{name}", value)]
    flags += ["--skip-tokenizer-init", "--sleep-on-idle"]
    shift = ["--sp-size", "2", "--shift-threshold", str(THRESHOLD)]

    def start(name: str, flags: list[str], plugin: bool) -> Server:
        temporary = folder / name
        temporary.mkdir()
        return ForkedServer(flags, folder / f"{name}.log", plugin=plugin, TMPDIR=str(temporary), **NO_STACKS)

    return start("stock", flags, plugin=False), start("ours", [*flags, *shift], plugin=True)


@pytest.fixture(scope="module")
def servers(checkpoint, tmp_path_factory):
    pair = serve(checkpoint(DENSE), tmp_path_factory.mktemp("faults"))
    try:
        yield tuple(server.wait() for server in pair)
    finally:
        for server in pair:
            server.close()


def ask(server: Server, prompt: list[int], new_tokens: int, **more: Any) -> requests.Response:
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, **more.pop("sampling", {})}
    return server.post("/generate", {"input_ids": prompt, "sampling_params": sampling, **more})


def outcome(answer: requests.Response) -> dict[str, Any]:
    """What a client sees, without what differs from one run to the next."""
    body = answer.json()
    if answer.status_code == 200:
        body = {"tokens": body["output_ids"], "finish": body["meta_info"]["finish_reason"]}
    return {"status": answer.status_code, "body": body}


def set_mode(server: Server, mode: str) -> None:
    assert server.post("/set_internal_state", {"server_args": {"shift_mode": mode}}).json() == [True]


def until_idle(server: Server, seconds: float) -> None:
    """A cache can be flushed when no request is left and every slot is free."""
    deadline = time.monotonic() + seconds
    while server.post("/flush_cache", {}).status_code != 200:
        assert time.monotonic() < deadline, f"not idle in {seconds} s\n{server.text()[-2000:]}"
        time.sleep(0.1)


# name: (prompt, new tokens, what else the request says, status)
ODD: dict[str, tuple[list[int], int, dict[str, Any], int]] = {
    "empty prompt": ([], 4, {}, 400),
    "one token": ([7], 4, {}, 200),
    "threshold": (text(1, THRESHOLD), 4, {}, 200),
    "threshold + 1": (text(2, THRESHOLD + 1), 4, {}, 200),
    "no new tokens": (text(3, 40), 0, {}, 200),
    "longer than the context": (text(4, CONTEXT + 1), 4, {}, 400),
    "longer than the context with its answer": (text(5, 1000), CONTEXT, {}, 400),
    "longer than the KV pool": (text(6, POOL + 200), 4, {}, 400),
    "longer than the KV pool with its answer": (text(7, 900), 400, {}, 200),
    "ids outside of the vocabulary": ([3, VOCAB, 10**6, 5, -1, *text(8, 40)], 4, {}, 200),
    "wrong sampling parameters": (text(9, 40), 4, {"sampling": {"top_p": 7.0}}, 400),
    "an answer that was not asked for": (text(10, 40), 4, {"return_logprob": True, "logprob_start_len": 99}, 400),
    "a wrong type": (text(11, 40), 4, {"sampling": {"max_new_tokens": "many"}}, 400),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_requests_end_as_in_stock(name, servers):
    stock, ours = servers
    prompt, new_tokens, more, status = ODD[name]
    expected = outcome(ask(stock, prompt, new_tokens, **more))
    assert expected["status"] == status, expected
    for mode in ("shift", "sp", "tp"):
        set_mode(ours, mode)
        try:
            before = ours.info()["shift_parallel"]["tokens"]
            assert outcome(ask(ours, prompt, new_tokens, **more)) == expected, mode
            after = ours.info()["shift_parallel"]["tokens"]
        finally:
            set_mode(ours, "shift")
        if status == 200 and mode == "shift":
            assert (after["base"] > before["base"]) == (len(prompt) > THRESHOLD)
        until_idle(ours, 10)
    until_idle(stock, 10)


def test_300_requests_at_once_on_a_small_kv_pool(servers):
    rng = random.Random(12)
    prompts = [text(100 + index, rng.randint(1, 90)) for index in range(300)]
    new_tokens = [rng.randint(1, 10) for _ in prompts]
    assert sum(map(len, prompts)) > 10 * POOL

    def ask_all(server: Server) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(prompts)) as at_once:
            wanted = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 2}
            answers = at_once.map(lambda p, n: ask(server, p, n, **wanted), prompts, new_tokens)
            return [parity.simplify(answer.json()) for answer in answers]

    stock, ours = servers
    before = ours.info()["shift_parallel"]["batches"]
    parity.assert_equal(ask_all(stock), ask_all(ours))
    after = ours.info()["shift_parallel"]["batches"]
    assert after["base"] > before["base"] + 20
    assert after["shift"] > before["shift"]
    for server in servers:
        until_idle(server, 10)


@pytest.mark.parametrize("when", ["in the middle of the answer", "in the middle of the prompt"])
def test_a_client_that_vanishes(when, servers):
    """Its request ends, long before it would have by itself; others do not notice."""
    prompt, new_tokens = (text(20, 30), 900) if when.endswith("answer") else (text(21, 1000), 20)
    other = text(22, 60)
    seen = []
    for server in servers:
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens}}
        with ThreadPoolExecutor(1) as background:
            # Without stream the connection is lost while nothing was sent yet.
            stream = when.endswith("answer")
            client = requests.Session()
            with contextlib.suppress(requests.Timeout):
                answer = client.post(
                    server.url + "/generate", json={**body, "stream": stream}, stream=stream, timeout=(5, 0.1)
                )
                assert len([line for line, _ in zip(answer.iter_lines(), range(6), strict=False)]) == 6
                answer.close()
            client.close()
            neighbour = background.submit(ask, server, other, 30)
            seen.append(outcome(neighbour.result()))
        until_idle(server, 30)
    assert seen[0] == seen[1]
    assert seen[0]["status"] == 200


# SGLang's own, kilobytes each: its ranks unlink the first if they get to it before they are killed.
LEFT_BY_SGLANG = {"sgl_shm_mq_*_*", "sglang_loads_*_*.shm"}


def assert_same_end(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    for ending in (ours, stock):
        left = ending.pop("shared memory")
        assert set(left) <= LEFT_BY_SGLANG, left
        assert len(left) == len(set(left)), left
        assert ending["processes"] == []
    assert ours == stock


def end(server: Server, temporary: Path, do: Callable[[Server], Any]) -> dict[str, Any]:
    """Do what ends a server, and say how it ended and what it left."""
    session = server.process.pid
    shared = shared_files(session)
    seen = do(server)
    code = server.process.wait(120)
    return {
        "seen": seen,
        "exit code": code,
        "processes": wait_until_gone(session, 20),
        "shared memory": sorted(_kind(file) for file in shared if file.exists()),
        "temporary files": sorted(_kind(file) for file in temporary.iterdir()),
    }


def _kind(file: Path) -> str:
    """Its name without what is drawn at random: ``tempfile``'s, numbers, hexadecimal ones."""
    return re.sub(r"[0-9a-f]{8,}|\d+", "*", re.sub(r"^tmp\w{8}$", "tmp*", file.name))


def streams(server: Server, number: int, new_tokens: int) -> tuple[list[threading.Thread], list[dict[str, Any]]]:
    """Clients that each read a stream, and what they saw of it; back when all have its beginning."""
    seen: list[dict[str, Any]] = [{} for _ in range(number)]
    begun = threading.Barrier(number + 1, timeout=60)

    def client(index: int) -> None:
        body = {
            "input_ids": text(50 + index, 30),
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens},
            "stream": True,
        }
        last = ""
        try:
            with requests.post(server.url + "/generate", json=body, stream=True, timeout=120) as answer:
                seen[index]["status"] = answer.status_code
                for line in filter(None, answer.iter_lines(decode_unicode=True)):
                    if not last:
                        begun.wait()
                    seen[index]["done"] = line == "data: [DONE]"
                    last = last if seen[index]["done"] else line
        except requests.RequestException:
            seen[index]["broken"] = True
        else:
            seen[index]["tokens"] = json.loads(last.removeprefix("data: "))["output_ids"]

    threads = [threading.Thread(target=client, args=(index,), daemon=True) for index in range(number)]
    for thread in threads:
        thread.start()
    begun.wait()
    return threads, seen


def sigterm_under_load(server: Server) -> Any:
    threads, seen = streams(server, 6, 100)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(60)
    return seen


def test_sigterm_under_load(servers):
    """The last of this module's tests on these servers: it ends them. Running requests are served to the end."""
    stock, ours = (end(server, server.log.with_suffix(""), sigterm_under_load) for server in servers)
    assert_same_end(ours, stock)
    assert stock["exit code"] == 0
    assert all(client["done"] and len(client["tokens"]) == 100 for client in stock["seen"])


def rank(session: int, number: int) -> int:
    (process,) = (p for p in alive(session) if f"_TP{number}" in " ".join(p.cmdline()))
    return process.pid


def killed_under_load(server: Server) -> Any:
    threads, seen = streams(server, 6, 100)  # as many as the pool takes at once
    os.kill(rank(server.process.pid, 1), signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    return [(client["status"], client["broken"]) for client in seen]


def killed_while_idle(server: Server) -> Any:
    os.kill(rank(server.process.pid, 1), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("fault", [killed_under_load, killed_while_idle], ids=lambda f: f.__name__)
def test_a_server_with_a_rank_that_dies(fault, checkpoint, tmp_path):
    pair = serve(checkpoint(DENSE), tmp_path)
    try:
        stock, ours = (end(server.wait(), server.log.with_suffix(""), fault) for server in pair)
    finally:
        for server in pair:
            server.close()
    assert_same_end(ours, stock)


def in_the_middle(action: Callable[[], None]) -> Callable[[int], None]:
    """Rank 1 does it in the attention of a large prefill's second layer. Its peer then waits for it in a collective:
    stock in the all-reduce after attention, ours in the exchange.
    """

    def in_rank(number: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        attend = TorchNativeAttnBackend.forward_extend

        def forward_extend(backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
            if number == 1 and layer.layer_id == 1 and q.shape[0] > 100:
                action()
            return attend(backend, q, k, v, layer, *args, **kwargs)

        TorchNativeAttnBackend.forward_extend = forward_extend

    return in_rank


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fails() -> None:
    raise RuntimeError("a kernel failed, say")


def ending(host: Host) -> dict[str, Any]:
    """How an engine ends that runs into the fault."""
    assert len(host.generate(input_ids=text(1, 50), sampling_params={"max_new_tokens": 2})["output_ids"]) == 2
    shared = shared_files(host.session)
    started = time.monotonic()
    with pytest.raises(HostDied) as died:
        host.generate(input_ids=text(2, 150), sampling_params={"max_new_tokens": 2})
    assert time.monotonic() - started < 200  # a peer's watchdog notices a rank that stopped, and takes its time
    return {
        "exit code": re.search(r"exit code (\S+)", str(died.value)).group(1),
        "processes": wait_until_gone(host.session, 20),
        "shared memory": sorted(_kind(file) for file in shared if file.exists()),
    }


@pytest.mark.parametrize(
    "fault", [dies, pytest.param(stops, marks=pytest.mark.long), fails], ids=lambda fault: fault.__name__
)
def test_a_rank_that_fails_in_a_base_forward_ends_the_engine_as_in_stock(fault, start):
    arguments = {
        "in_rank": in_the_middle(fault),
        "watchdog_timeout": 6,
        "chunked_prefill_size": 256,
        "environment": NO_STACKS,
    }
    stock = ending(start(DENSE, 2, plugin=False, **arguments))
    ours = start(DENSE, 2, sp_size=2, shift_threshold=100, **arguments)
    assert_same_end(ending(ours), stock)


def test_fewer_tokens_than_sp_ranks(start):
    few = parity.Requests.random(3, [1, 2, 3, 5], [3, 1, 2, 4])
    stock = start(DENSE, 4, plugin=False)
    ours = start(DENSE, 4, sp_size=4, shift_mode="sp")
    for prompt, new_tokens in zip(few.prompts, few.max_new_tokens, strict=True):
        alone = parity.Requests([prompt], [new_tokens])
        parity.assert_equal(parity.run(stock, alone), parity.run(ours, alone))
    assert ours.info()["tokens"]["shift"] == 0
